"""Adapters of low rank beside frozen weights (LoRA; Hu et al. 2021, arXiv 2106.09685).

Every matrix of attention and of the MLP, of `inner` x `columns`, gets two: `inner` x rank, and rank
x `columns`; an expert has its own, as torchtune's LoRAGroupedExperts has. Embedding, head, norms,
biases and routers are frozen without any. The names for it: `target_modules="all-linear"` of PEFT,
where queries, keys and values are their own modules, as in Llama.

A backward pass over a frozen weight has one product, for the gradient of its input; over an adapter
it has two. Inputs of frozen products need not be kept for gradients of weights, but those of
adapters are the same tensors, so they are kept as before, and so is what is as wide as the rank.
Activations of the head are counted as if it were trained.

Of tensor-parallel ranks each has the part of an adapter that meets its part of the weight, and the
other matrix whole, whose gradients are summed up. PEFT's adapters of Megatron's layers
(src/peft/tuners/lora/tp_layer.py) exchange what is as wide as the rank instead: not modelled.
"""

from collections.abc import Iterable
from dataclasses import replace

from co2sim.common.errors import OptionError
from co2sim.models.blocks import Adapters, Block, MatMul, Model

_CALLS = 4
"""Operations of an adapter in a forward pass: its two products, the scaling of their result, and
its sum with that of the frozen weight. Source: PEFT, src/peft/tuners/lora/layer.py, Linear.forward,
without dropout."""

FORWARD_MOVES = 5
"""Elements that kernels of a forward pass move for one of an adapter's output: scaling reads and
writes it, the sum reads two and writes one."""

BACKWARD_MOVES = (2, 3)
"""Those of a backward pass for one of its output, and of its input: scaling reads and writes the
gradient; gradients of the input by the adapter and by the frozen weight are summed up."""


def with_adapters(model: Model, rank: int, whole: Model | None = None) -> Model:
    """A model whose layers have adapters, and of which nothing else is trained.

    `whole` is the model without adapters of which `model` is the part of a tensor-parallel rank.
    Raises OptionError for a model without products in its layers.
    """
    wholes = model.blocks if whole is None else whole.blocks
    blocks = [
        _with_adapters(block, rank, full) if _is_layer(block) else _frozen(block, first=not index)
        for index, (block, full) in enumerate(zip(model.blocks, wholes, strict=True))
    ]
    if not any(block.trained for block in blocks):
        raise OptionError(
            f"lora={rank} does not apply to {model.name}: nothing is known of the matrix products"
            " of its layers"
        )
    return replace(model, blocks=tuple(blocks), shape=None)


def trained_parameters(model: Model, rank: int | None) -> int:
    """Those of a model that are trained, with adapters of a rank or (None) without."""
    return model.parameters if rank is None else with_adapters(model, rank).trained_parameters


def _is_layer(block: Block) -> bool:
    return bool(block.boundary_bytes and block.products and not block.logits)


def _frozen(block: Block, *, first: bool) -> Block:
    """An embedding, whose backward pass has nothing to do, or a head."""
    spared = 2 * block.flops if first else block.flops
    return replace(block, adapters=Adapters(spared=spared, first=first))


def _with_adapters(block: Block, rank: int, whole: Block) -> Block:
    pairs = [pair for product in _adapted(block.products) for pair in _pairs(product, rank)]
    of_experts = [pair for pair in pairs if block.experts and pair[0].groups]
    others = [pair for pair in pairs if not (block.experts and pair[0].groups)]
    tensors, experts = (
        tuple(_elements(m) for pair in chosen for m in pair) for chosen in (others, of_experts)
    )
    operators, mlp = block.operators, 0
    if operators:
        mlp = sum(len(_pairs(m, rank)) for m in _adapted(block.products[-operators.products :]))
        kept = sum(2.0 * down.rows * rank for down, _ in pairs[len(pairs) - mlp :])
        operators = replace(
            operators, mlp=operators.mlp + kept, mlp_calls=operators.mlp_calls + _CALLS * mlp
        )
    mixing = block.scores.flops if block.scores else _flops(m for m in block.products if m.count)
    return replace(
        block,
        tensors=(*block.tensors, *tensors),
        experts=(*block.experts, *experts),
        flops=block.flops + _flops(product for pair in pairs for product in pair),
        activation_bytes=block.activation_bytes + sum(2.0 * down.rows * rank for down, _ in pairs),
        calls=block.calls + _CALLS * len(pairs),
        operators=operators,
        adapters=Adapters(
            tensors=tensors,
            experts=experts,
            pairs=tuple(pairs),
            mlp=mlp,
            spared=block.flops - mixing,
            summed=_summed(block, whole, rank),
        ),
    )


def _adapted(products: Iterable[MatMul]) -> list[MatMul]:
    """Those with weights, but for routers."""
    return [product for product in products if not (product.count or product.exact)]


def _pairs(product: MatMul, rank: int) -> list[tuple[MatMul, MatMul]]:
    """The two products of every adapter of a product with weights."""
    return [
        (
            replace(product, columns=rank, widths=()),
            replace(product, inner=rank, columns=width, widths=()),
        )
        for width in product.widths or (product.columns,)
    ]


def _elements(product: MatMul) -> int:
    return (product.groups or 1) * product.inner * product.columns


def _flops(products: Iterable[MatMul]) -> float:
    return sum(2.0 * (m.count or 1) * m.rows * m.inner * m.columns for m in products)


def _summed(block: Block, whole: Block, rank: int) -> int:
    """Elements of adapters that all tensor-parallel ranks have: those not divided with a weight."""
    if block.division is None:
        return 0
    elements = 0
    for product, all_ in zip(block.products, whole.products, strict=True):
        if product.count or product.exact or (block.experts and product.groups):
            continue
        for pair, undivided in zip(_pairs(product, rank), _pairs(all_, rank), strict=True):
            for part, other in zip(pair, undivided, strict=True):
                elements += _elements(part) if _elements(part) == _elements(other) else 0
    return elements
