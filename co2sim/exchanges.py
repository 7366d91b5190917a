"""What tensor-parallel ranks exchange in a pass over a block, as collectives.

Megatron-LM sums what the ranks computed of a block's outputs in the forward pass (operator g), and
what they computed of the gradients of its inputs in the backward pass (f): two all-reduces of
b s h elements a layer in each (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Where ranks
divide the sequence, each is a reduce-scatter and an all-gather, with the same bytes in all, and a
backward pass gathers the inputs once more for the gradients of weights, beside the products
(Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
"""

from collections.abc import Sequence
from functools import reduce
from typing import Literal, TypeAlias

from co2sim.blocks import Division
from co2sim.schedule import Collective, DType, Exchanges, Kind, tensor

Pass: TypeAlias = Literal["forward", "recompute", "backward"]

_LOSS_SUMS = 3
"""All-reduces of a value for every row of logits: their largest, the target's, the sum of their
exponentials. Source: Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py."""


def exchanged(
    block: Division | None,
    passes: Sequence[Pass],
    samples: int,
    dtype: DType,
    stops_early: bool,  # noqa: FBT001
) -> Exchanges | None:
    """The exchanges of passes over a block with `samples` samples; None where it is whole.

    A repeated forward pass that `stops_early` needs no result of the block's last product.
    """
    if block is None:
        return None
    made = [_of_pass(block, one, samples, dtype, stops_early) for one in passes]
    return reduce(Exchanges.then, made)


def _of_pass(
    block: Division,
    which: Pass,
    samples: int,
    dtype: DType,
    stops_early: bool,  # noqa: FBT001
) -> Exchanges:
    group, elements = tensor(block.ranks), samples * block.elements

    def make(kind: Kind, times: int) -> tuple[Collective, ...]:
        return (Collective(kind, "activations", elements, dtype, group),) * times

    inputs, outputs, rows = block.inputs, block.outputs, block.rows
    if which == "backward":
        inputs, outputs, rows = outputs, inputs, 0
    elif which == "recompute" and stops_early:
        outputs, rows = max(0, outputs - 1), 0
    loss: tuple[Collective, ...] = ()
    if rows:
        sums = Collective(Kind.ALL_REDUCE, "loss", samples * rows, DType.FP32, group)
        loss = (sums,) * _LOSS_SUMS
    if not block.sequence:
        return Exchanges(behind=(*make(Kind.ALL_REDUCE, outputs), *loss))
    again = make(Kind.ALL_GATHER, outputs) if which == "backward" else ()
    before, behind = make(Kind.ALL_GATHER, inputs), make(Kind.REDUCE_SCATTER, outputs)
    return Exchanges(before, again, (*behind, *loss))
