"""Adapters of low rank beside frozen weights (LoRA; Hu et al. 2021, arXiv 2106.09685).

Every matrix of attention and of the MLP, of `inner` x `columns`, gets two: `inner` x rank, and rank
x `columns`; an expert has its own, as torchtune's LoRAGroupedExperts has. Embedding, head, norms,
biases and routers are frozen without any. The names for it: `target_modules="all-linear"` of PEFT,
where queries, keys and values are their own modules, as in Llama.

A backward pass over a frozen weight has one product, for the gradient of its input; over an adapter
it has two. Inputs of frozen products need not be kept for gradients of weights, but those of
adapters are the same tensors, so they are kept as before, and so is what is as wide as the rank.
Activations of the head are counted as if it were trained.

Frozen weights beside adapters may be stored in NF4 (QLoRA; Dettmers et al. 2023, arXiv 2305.14314):
4 bits, and scales that are quantized, too. Every use, in a forward pass, when it runs again, and in
a backward pass, makes them whole before the product: bitsandbytes, autograd/_functions.py,
MatMul4Bit; torchao, dtypes/nf4tensor.py, LinearNF4.

Of tensor-parallel ranks each has the part of an adapter that meets its part of the weight, and the
other matrix whole, whose gradients are summed up. PEFT's adapters of Megatron's layers
(src/peft/tuners/lora/tp_layer.py) exchange what is as wide as the rank instead: not modelled.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes
from co2sim.models.operators import AnyOperator, Block, Model, Product

_CALLS = 4
"""Operations of an adapter in a forward pass: its two products, the scaling of their result, and
its sum with that of the frozen weight. Source: PEFT, src/peft/tuners/lora/layer.py, Linear.forward,
without dropout."""

_FORWARD_MOVES = 5
"""Elements that kernels of a forward pass move for one of an adapter's output: scaling reads and
writes it, the sum reads two and writes one."""

_BACKWARD_MOVES = (2, 3)
"""Those of a backward pass for one of its output, and of its input: scaling reads and writes the
gradient; gradients of the input by the adapter and by the frozen weight are summed up."""


_SCALE_BITS = 8 / 64 + 32 / (64 * 256)
"""Of NF4 for a parameter: a scale of 8 bits for 64 of them, and one of 32 bits for 256 of these.
Source: Dettmers et al. 2023, arXiv 2305.14314, section 3, double quantization: 0.127 bits."""

NF4: Bytes = (4 + _SCALE_BITS) / 8
"""Of a parameter with its scales."""

_DEQUANTIZATIONS = 3
"""Operations that make a matrix whole: its scales, their offset, and the matrix. Source:
bitsandbytes 0.45, functional.py, dequantize_4bit with nested scales."""


def with_adapters(model: Model, rank: int, packing: float = 1.0) -> Model:
    """A model whose layers have adapters, and of which nothing else is trained.

    What the adapters are beside is stored as `packing` times as many elements.

    Raises OptionError for a model without products in its layers.
    """
    made: dict[int, tuple[AnyOperator, ...]] = {}
    for block in model.blocks:
        if id(block.operators) not in made:
            adapts = block.is_layer
            operators = (
                new
                for op in block.operators
                for new in _adapted(op, rank if adapts else 0, packing)
            )
            made[id(block.operators)] = tuple(operators)
    blocks = tuple(replace(block, operators=made[id(block.operators)]) for block in model.blocks)
    if not any(block.trained for block in blocks):
        raise OptionError(
            f"lora={rank} does not apply to {model.name}: nothing is known of the matrix products"
            " of its layers"
        )
    return replace(model, blocks=blocks)


def trained_parameters(model: Model, rank: int | None) -> int:
    """Those of a model that are trained, with adapters of a rank or (None) without."""
    return model.parameters if rank is None else with_adapters(model, rank).trained_parameters


def _adapted(op: AnyOperator, rank: int, packing: float) -> Iterator[AnyOperator]:
    """A frozen operator and, of a product with weights but for routers, those of its adapters."""
    if not (isinstance(op, Product) and rank and not op.wide):
        yield replace(op, frozen=True)
    else:
        yield replace(_packed(op, packing) if packing < 1 else op, frozen=True)
        for index, width in enumerate(op.widths or (op.columns,)):
            narrow, wide = _pair(op, rank, width)
            of_keys = op.key_heads if index in op.keyed else 0
            yield from (narrow, replace(wide, key_heads=of_keys, keyed=(0,) if of_keys else ()))


def _packed(op: Product, packing: float) -> Product:
    """The product, whose weights are stored in fewer bits."""
    tensors = tuple(math.ceil(size * packing) for size in op.tensors)
    calls = op.calls + _DEQUANTIZATIONS * len(op.widths or (op.columns,))
    return replace(op, tensors=tensors, packed=op.elements - sum(tensors), calls=calls)


def _pair(op: Product, rank: int, width: int) -> tuple[Product, Product]:
    """To `rank` columns, and to those of the weight: each is divided where the weight is."""
    many = op.groups or 1
    narrow = replace(
        op,
        name="adapter",
        columns=rank,
        widths=(),
        tensors=(many * op.inner * rank,),
        calls=_CALLS,
        kept=float(rank),
        exact=(0.0, float(_BACKWARD_MOVES[1] * op.inner)),
        cut="routed" if op.groups else "",
        along=op.along if op.along == "inner" else "",
        what="",
        key_heads=0,
        keyed=(),
        adapter=True,
    )
    wide = replace(
        narrow,
        inner=rank,
        columns=width,
        tensors=(many * rank * width,),
        calls=0,
        kept=0.0,
        exact=(float(_FORWARD_MOVES * width), float(_BACKWARD_MOVES[0] * width)),
        along=op.along if op.along == "columns" else "",
    )
    return narrow, wide


def summed(block: Block, etp: int = 1) -> int:
    """Elements of adapters that all tensor-parallel ranks have: those not divided with a weight.

    Of experts that ranks have those that `etp` share.
    """
    return sum(
        op.elements
        for op in block.of(Product)
        if op.adapter and not op.along and not (op.chosen and op.apart > 1 and etp == 1)
    )
