"""What every mechanism is worth: the errors without it, all constants as they are (no new fit)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from analysis.published.predict import Cell, changed, predict, with_override


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A mechanism by name, the group of cells it matters to, and how to run a cell otherwise.

    That is without it, or with it if the model leaves it out.
    """

    name: str
    group: str
    flip: Callable[[Cell], Cell]


def _strategy(old: str, new: str) -> Callable[[Cell], Cell]:
    return lambda cell: changed(
        cell, lambda setup: replace(setup, strategy=setup.strategy.replace(old, new))
    )


def _override(path: str, text: str) -> Callable[[Cell], Cell]:
    return lambda cell: with_override(cell, path, text)


MECHANISMS = (
    Mechanism(
        "parameters fetched again for recomputation",
        "v100-zeropp",
        _strategy("max_reuse=1000000000", "max_reuse=1000000000000"),
    ),
    Mechanism(
        "gradients reduced matrix by matrix",
        "v100-zeropp",
        _strategy("reduce_bucket=10000000", "reduce_bucket=1000000000000"),
    ),
    Mechanism(
        "gathers and reductions in queues of their own",
        "v100-zeropp",
        _override("communicators", "group"),
    ),
    Mechanism("intra-node hop in turn", "v100-zeropp", _override("hops", "pipelined")),
    Mechanism(
        "memory traffic of matrix products",
        "v100-zeropp",
        _override("gpu.kernels.operand_efficiency", "1"),
    ),
    Mechanism(
        "all-to-all slower than a ring",
        "v100-zeropp",
        _override("inter.exchange_efficiency", "1"),
    ),
    Mechanism(
        "memory traffic of matrix products",
        "a100-data-parallel",
        _override("gpu.kernels.operand_efficiency", "1"),
    ),
    Mechanism(
        "host that issues operations",
        "a100-data-parallel",
        _override("gpu.kernels.call_overhead", "0 us"),
    ),
    Mechanism(
        "gap after every kernel", "a100-data-parallel", _override("gpu.kernels.kernel_gap", "0 us")
    ),
    Mechanism(
        "slow product over the vocabulary",
        "a100-data-parallel",
        _override("gpu.kernels.vocabulary_efficiency", "0.859"),
    ),
    Mechanism(
        "memory traffic of optimizer and elementwise kernels",
        "a100-data-parallel",
        _override("gpu.memory_bandwidth", "1e9 GB/s"),
    ),
    Mechanism(
        "gradients reduced to owners, parameters broadcast from them",
        "a100-co2",
        _strategy("owners=true,bucket=8388608", "owners=false"),
    ),
    Mechanism(
        "one rank of a node relays CO2's average",
        "a100-co2",
        _override("inter.relay_efficiency", "1"),
    ),
    Mechanism("slower TCP beside computation", "a100-co2", _override("inter.busy_efficiency", "1")),
)


ADDED = (
    Mechanism(
        "each layer gathered in four parts, as DeepSpeed does matrix by matrix",
        "v100-zeropp",
        _strategy("max_reuse=1000000000", "max_reuse=1000000000,gathers=4"),
    ),
    Mechanism("4 NCCL channels instead of 2", "a100-co2", _override("channels", "4")),
)
"""What the model leaves out, or assumes otherwise."""


def mape(cells: Sequence[Cell], values: Mapping[str, float] | None = None) -> float:
    """Mean absolute relative error; `values` replace constants."""
    return fmean(abs(predict(cell, values, fast=True) / cell.published - 1) for cell in cells)


def ablate(cells: Sequence[Cell]) -> list[tuple[Mechanism, float, float]]:
    """Each mechanism with the mean absolute error with and without it, over all its cells."""
    found = []
    for mechanism in MECHANISMS:
        chosen = [cell for cell in cells if cell.group == mechanism.group]
        if chosen:
            found.append((mechanism, mape(chosen), mape([mechanism.flip(cell) for cell in chosen])))
    return found
