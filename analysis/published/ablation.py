"""Ablations: the errors without each mechanism of the model, with all constants unchanged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from analysis.published.cells import Cell, changed, with_override, with_strategy_options
from analysis.published.predict import predict


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A mechanism by name, the group of cells it matters to, and how to run a cell without it.

    For a mechanism that the model leaves out: how to run a cell with it.
    """

    name: str
    group: str
    flip: Callable[[Cell], Cell]


@dataclass(frozen=True, slots=True)
class Ablation:
    """Mean absolute errors over all cells of a mechanism's group, with and without it."""

    mechanism: Mechanism
    mape_with: float
    mape_without: float


def _options(*strategies: str, **options: str) -> Callable[[Cell], Cell]:
    """Other options of strategies, wherever a cell runs one of them."""

    def flip(cell: Cell) -> Cell:
        for strategy in strategies:
            cell = with_strategy_options(cell, strategy, options)
        return cell

    return flip


def _override(path: str, text: str) -> Callable[[Cell], Cell]:
    return lambda cell: with_override(cell, path, text)


MECHANISMS = (
    Mechanism(
        "parameters fetched again for recomputation",
        "v100-zeropp",
        _options("zero3", "zeropp", max_reuse="1000000000000"),
    ),
    Mechanism(
        "gradients reduced matrix by matrix",
        "v100-zeropp",
        _options("zero3", "zeropp", reduce_bucket="1000000000000"),
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
        _options("zero2", owners="false", bucket="500000000"),
    ),
    Mechanism(
        "one rank of a node relays CO2's average",
        "a100-co2",
        _override("inter.relay_efficiency", "1"),
    ),
    Mechanism("slower TCP during computation", "a100-co2", _override("inter.busy_efficiency", "1")),
    Mechanism(
        "memory traffic of matrix products",
        "mpt-fsdp",
        _override("gpu.kernels.operand_efficiency", "1"),
    ),
    Mechanism(
        "slow product over the vocabulary",
        "mpt-fsdp",
        _override("gpu.kernels.vocabulary_efficiency", "0.7"),
    ),
    Mechanism(
        "flash attention slower in the backward pass",
        "mpt-fsdp",
        _override("gpu.kernels.attention_backward", "1"),
    ),
    Mechanism(
        "gradients joined, cast and divided",
        "mpt-fsdp",
        _options("fsdp", version="2"),
    ),
    Mechanism(
        "recomputation that stops early",
        "mpt-fsdp",
        lambda cell: changed(cell, lambda setup: replace(setup, checkpointing="reentrant")),
    ),
    Mechanism("computation slowed by communication", "mpt-fsdp", _override("interference", "0")),
    Mechanism("nodes of different speed", "mpt-fsdp", _override("node_spread", "0")),
)


OMITTED = (
    Mechanism(
        "each layer gathered in four parts, as DeepSpeed does matrix by matrix",
        "v100-zeropp",
        _options("zero3", "zeropp", gathers="4"),
    ),
    Mechanism("4 NCCL channels instead of 2", "a100-co2", _override("channels", "4")),
)
"""Mechanisms that the model leaves out, and other values of what it assumes."""


def mape(cells: Sequence[Cell], values: Mapping[str, float] | None = None) -> float:
    """Mean absolute relative error; `values` replace constants."""
    return fmean(abs(predict(cell, values, fast=True) / cell.published - 1) for cell in cells)


def ablate(cells: Sequence[Cell]) -> list[Ablation]:
    """Each mechanism of the model that some of the cells depend on.

    Raises OptionError where an option has the value of its ablation already.
    """
    found = []
    for mechanism in MECHANISMS:
        chosen = [cell for cell in cells if cell.group == mechanism.group]
        without = [mechanism.flip(cell) for cell in chosen]
        if without != chosen:
            found.append(Ablation(mechanism, mape(chosen), mape(without)))
    return found
