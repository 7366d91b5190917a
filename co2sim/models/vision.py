"""Transformers of images: from patches to classes, or from noise to an image's latent.

Tensor-parallel ranks divide the layers only.
"""

from dataclasses import replace

from co2sim.models.operators import AnyOperator, Block, CrossEntropy, Model, Operator, Product
from co2sim.models.transformer import HEAD_CALLS, Transformer, whole_bias

_START_CALLS = 6
"""Operations before the layers: the batch, patches (a convolution and two views), class token or
none, positions."""

_FREQUENCIES = 256
"""Numbers that a time is written as. Source: facebookresearch/DiT, models.py, TimestepEmbedder."""

_SHIFTS = 6
"""Of a layer: a shift, a scale and a gate of attention, and of the MLP. Source: Peebles and Xie
2023, arXiv 2212.09748, figure 3."""


def _product(rows: int, inner: int, columns: int, kept: float = 0.0) -> tuple[AnyOperator, ...]:
    """With a bias, of all ranks alike."""
    tensors = (inner * columns,)
    made = Product(rows=rows, inner=inner, columns=columns, tensors=tensors, calls=1, kept=kept)
    return (made, *whole_bias(rows, columns))


def vision_transformer(
    name: str,
    body: Transformer,
    *,
    image: int,
    patch: int,
    channels: int,
    classes: int,
) -> Model:
    """ViT (Dosovitskiy et al. 2021, arXiv 2010.11929): patches, class token, layers, head."""
    h, patches = body.hidden, (image // patch) ** 2
    tokens, inputs = patches + 1, channels * patch * patch
    embedding = (
        *_product(patches, inputs, h, kept=float(inputs)),
        Operator(
            name="class token, positions",
            rows=tokens,
            tensors=(h, tokens * h),
            calls=_START_CALLS,
            kept=h / 2 * body.dropout,  # a mask of a byte
            passing=float(h),
        ),
    )
    head = (
        Operator(
            name="norm", rows=tokens, tensors=body.norm_tensors(h), calls=HEAD_CALLS, kept=2.0 * h
        ),
        *_product(1, h, classes),
        CrossEntropy(rows=1, columns=classes, vocabulary=False),
    )
    return Model(
        name,
        (
            Block("embedding", embedding),
            *body.blocks(tokens),
            Block("head", head, float(tokens * h)),
        ),
        tokens=1,
        unit="image",
        divisible=True,
    )


def diffusion_transformer(
    name: str,
    body: Transformer,
    *,
    image: int,
    patch: int,
    channels: int,
    outputs: int,
    classes: int,
) -> Model:
    """DiT with adaLN-Zero (Peebles and Xie 2023, arXiv 2212.09748): layers on a latent's patches.

    A latent has `image` x `image` places of `channels`, and `outputs` are predicted of each. A time
    and one of `classes`, or none of them, make shifts, scales and gates of every layer, by products
    with one row a sample. Positions are not trained.
    """
    h, tokens = body.hidden, (image // patch) ** 2
    inputs, result = channels * patch * patch, outputs * patch * patch
    embedding = (
        *_product(tokens, inputs, h, kept=float(inputs)),
        Operator(name="positions", rows=tokens, calls=_START_CALLS, passing=float(h)),
        *_product(1, _FREQUENCIES, h, kept=float(_FREQUENCIES + h)),
        *_product(1, h, h, kept=2.0 * h),
        Operator(name="classes", tensors=((classes + 1) * h,), calls=2),
    )
    final = (
        Operator(name="norm", rows=tokens, calls=1, kept=2.0 * h),
        *_modulation(tokens, h, 2),
        *_product(tokens, h, result, kept=float(result)),
        Operator(name="squared error", rows=tokens, calls=HEAD_CALLS, passing=float(result)),
    )
    modulation = _modulation(tokens, h, _SHIFTS)
    made: dict[int, tuple[AnyOperator, ...]] = {}
    layers = [
        replace(
            block,
            operators=made.setdefault(id(block.operators), (*block.operators, *modulation)),
        )
        for block in body.blocks(tokens)
    ]
    blocks = (Block("embedding", embedding), *layers, Block("final", final))
    return Model(name, blocks, tokens=1, unit="latent", divisible=True)


def _modulation(tokens: int, hidden: int, shifts: int) -> tuple[AnyOperator, ...]:
    """`shifts` vectors of a sample, and what they do to its tokens.

    A shift and a scale change the output of a norm, of which the backward pass needs that without
    them; a gate what a part of a layer adds, which is kept, too.
    """
    gates = shifts // 3
    scales = (shifts - gates) // 2
    return (
        *_product(1, hidden, shifts * hidden, kept=float((2 + shifts) * hidden)),
        Operator(
            name="shift, scale, gate",
            rows=tokens,
            calls=scales + gates + 2,  # each fused, as elsewhere; SiLU, and views of the shifts
            kept=float((scales + gates) * hidden),
            moved=float((2 * scales + 2 * gates) * hidden),
        ),
    )
