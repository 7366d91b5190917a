"""From the shape of a network to its blocks: parameters, FLOP and activations of each.

Activations in a 2-byte type follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4): a GPT
layer keeps 34 s h bytes and 5 a s^2 of attention scores; other widths change the terms they enter.
Without dropout, which keeps masks and the scores it masked, that is 32 s h and 2 a s^2.
"""

from dataclasses import dataclass
from typing import Literal

from co2sim.workload import Block, MatMul, Model, Scores

LAYER_CALLS = 26
"""Operations of one layer's forward pass in an eager framework with the fusions of Megatron-LM:

2 norms, 4 matrix products with weights, 2 of attention, scaled masked softmax, 3 times bias,
dropout and residual, GELU, and 13 views, splits, transpositions and copies between them.
"""

HEAD_CALLS = 10
"""Norm, matrix product, and the cross entropy in eight."""

START_CALLS = 20
"""Batch, masks, positions, two look-ups, their sum and dropout, scaling and averaging the loss."""

Attention = Literal["softmax", "linear"]
Norm = Literal["layernorm", "rmsnorm", "none"]
Bias = bool | Literal["attention", "qkv", "mlp"]
"""Which matrices have a bias: all or none, or those of attention, of its inputs, of the MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A stack of equal attention and MLP layers of width `hidden`.

    `gated` MLPs have three matrices, `attention_gate` is one more matrix in attention; `attention`
    "linear" keeps no scores. `kv_heads` and `head_dim` of 0 mean `heads` and hidden / heads.
    A token of a `causal` one sees those before it only; with `dropout` masks are kept, too.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    attention: Attention = "softmax"
    attention_gate: bool = False
    bias: Bias = True
    norm: Norm = "layernorm"
    causal: bool = True
    dropout: bool = False

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return {"layernorm": 2, "rmsnorm": 1, "none": 0}[self.norm] * self.hidden

    def blocks(self, tokens: int) -> tuple[Block, ...]:
        """The layers on samples of `tokens` tokens."""
        return tuple(self._layer(number, tokens) for number in range(self.layers))

    def _layer(self, number: int, tokens: int) -> Block:
        h, f, s = self.hidden, self.ffn, tokens
        head_dim = self.head_dim or h // self.heads
        q, kv = self.heads * head_dim, (self.kv_heads or self.heads) * head_dim
        gates = [(h, q)] if self.attention_gate else []
        matrices = [
            (h, q),
            (h, kv),
            (h, kv),
            *gates,
            (q, h),
            (h, f),
            *([(h, f)] if self.gated else []),
            (f, h),
        ]
        attention = 4 + len(gates)
        biased = {True: slice(None), False: slice(0), "qkv": slice(3)} | {
            "attention": slice(attention),
            "mlp": slice(attention, None),
        }
        biases = [width for _, width in matrices[biased[self.bias]]]
        tensors = (
            [rows * columns for rows, columns in matrices] + biases + [self.norm_parameters] * 2
        )
        softmax = self.attention == "softmax"
        mixing = 4.0 * s * q * (s if softmax else head_dim)
        across = s if softmax else head_dim
        products = (
            MatMul(s, h, sum(width for _, width in matrices[:3]) + len(gates) * q),
            MatMul(s, head_dim, across, self.heads),
            MatMul(s, across, head_dim, self.heads),
            MatMul(s, q, h),
            MatMul(s, h, (2 if self.gated else 1) * f),
            MatMul(s, f, h),
        )
        kept = 4 * h + 2 * h + 2 * q + 4 * kv + 2 * q + 2 * len(gates) * q  # norms and attention
        kept += 2 * h + (6 if self.gated else 4) * f  # MLP
        kept += 2 * h if self.dropout else 0  # two masks of a byte
        return Block(
            name=f"layer{number}",
            tensors=tuple(size for size in tensors if size),
            flops=2.0 * s * sum(rows * columns for rows, columns in matrices) + mixing,
            activation_bytes=float(s * kept),
            scores=self._scores(s, mixing) if softmax else None,
            boundary_bytes=2.0 * s * h,
            products=products,
            calls=LAYER_CALLS,
        )

    def _scores(self, tokens: int, flops: float) -> Scores:
        kept = (5.0 if self.dropout else 2.0) * self.heads * tokens**2
        return Scores(flops, kept, self.heads, tokens, self.causal)


def language_model(
    name: str,
    body: Transformer,
    *,
    vocab: int,
    tokens: int,
    tied: bool,
    positions: int = 0,
    token_types: int = 0,
    embedding_norm: bool = False,
    head_transform: bool = False,
) -> Model:
    """A decoder, or an encoder with a masked-language head: embedding, layers, vocabulary.

    `head_transform` is BERT's dense layer and norm before a vocabulary with biases; it stands for
    the final norm. A tied head shares the embedding: its parameters count there, its FLOP here.
    """
    h, s = body.hidden, tokens
    norm = body.norm_parameters
    lookups = [vocab * h, positions * h, token_types * h, norm if embedding_norm else 0]
    head = [h * h, h, norm, vocab] if head_transform else [norm]
    head.append(0 if tied else vocab * h)
    return Model(
        name=name,
        blocks=(
            Block(
                "embedding",
                tuple(size for size in lookups if size),
                0.0,
                float(s * h),
                calls=START_CALLS,
            ),
            *body.blocks(s),
            Block(
                "head",
                tuple(size for size in head if size),
                flops=2.0 * s * h * (vocab + (h if head_transform else 0)),
                activation_bytes=4.0 * s * h,  # input and norm
                boundary_bytes=2.0 * s * h,
                products=(
                    *([MatMul(s, h, h)] if head_transform else []),
                    MatMul(s, h, vocab),
                ),
                calls=HEAD_CALLS,
                logits=s * vocab,
                tied=vocab * h if tied else 0,
            ),
        ),
        tokens=tokens,
    )


def vision_transformer(
    name: str, body: Transformer, *, image: int, patch: int, channels: int, classes: int
) -> Model:
    """ViT (Dosovitskiy et al. 2021, arXiv 2010.11929): patches, class token, layers, head."""
    h = body.hidden
    patches = (image // patch) ** 2
    tokens, inputs = patches + 1, channels * patch * patch
    return Model(
        name=name,
        blocks=(
            Block(
                "embedding",
                (h * inputs, h, h, tokens * h),
                2.0 * patches * inputs * h,
                2.0 * patches * inputs + tokens * h,
            ),
            *body.blocks(tokens),
            Block(
                "head",
                (body.norm_parameters, h * classes, classes),
                2.0 * h * classes,
                4.0 * tokens * h + 4 * classes,
            ),
        ),
        tokens=1,
        unit="image",
    )
