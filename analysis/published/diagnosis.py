"""Where a large error may come from: time, similar cells, constants, omitted mechanisms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import TypeAlias

from analysis.published.calibrate import root_of
from analysis.published.cells import (
    Cell,
    changed,
    with_override,
    with_strategy_options,
    with_values,
)
from analysis.published.parameters import GROUPS, Constant, stated
from analysis.published.predict import CellPrediction, predict
from analysis.published.sensitivity import GROUP
from co2sim.prediction import driver
from co2sim.strategies.local import LocalSteps, round_steps

Change: TypeAlias = Callable[[Cell], Cell]
"""How to run a cell without a mechanism, or with one that the model leaves out."""


@dataclass(frozen=True, slots=True)
class Ablation:
    """A mechanism: mean absolute errors over all cells of its group, with and without it."""

    name: str
    group: str
    mape_with: float
    mape_without: float


def _options(*strategies: str, **options: str) -> Change:
    """Other options of strategies, wherever a cell runs one of them."""

    def flip(cell: Cell) -> Cell:
        for strategy in strategies:
            cell = with_strategy_options(cell, strategy, options)
        return cell

    return flip


def _override(path: str, text: str) -> Change:
    return lambda cell: with_override(cell, path, text)


def _kernels(**values: float) -> Change:
    """Other numbers of the kernels that a stack runs."""
    return lambda cell: with_values(
        cell, {f"gpu.kernels.{name}": value for name, value in values.items()}
    )


MECHANISMS: Mapping[str, Mapping[str, Change]] = {
    "v100-zeropp": {
        "parameters fetched again for recomputation": _options(
            "zero3", "zeropp", max_reuse="1000000000000"
        ),
        "gradients reduced matrix by matrix": _options(
            "zero3", "zeropp", reduce_bucket="1000000000000"
        ),
        "gathers and reductions in their own queues": _override("communicators", "group"),
        "intra-node hop in turn": _override("hops", "pipelined"),
        "memory traffic of matrix products": _kernels(operand_efficiency=1.0),
        "all-to-all slower than a ring": _override("inter.exchange_efficiency", "1"),
    },
    "a100-data-parallel": {
        "memory traffic of matrix products": _kernels(operand_efficiency=1.0),
        "host that issues operations": _kernels(call_overhead=0.0),
        "gap after every kernel": _kernels(kernel_gap=0.0),
        "slow product over the vocabulary": _kernels(vocabulary_efficiency=0.859),
        "memory traffic of optimizer and elementwise kernels": _override(
            "gpu.memory_bandwidth", "1e9 GB/s"
        ),
    },
    "a100-co2": {
        "gradients reduced to owners, parameters broadcast from them": _options(
            "zero2", owners="false", bucket="500000000"
        ),
        "one rank of a node relays CO2's average": _override("inter.relay_efficiency", "1"),
        "slower TCP during computation": _override("inter.busy_efficiency", "1"),
    },
    "mpt-fsdp": {
        "memory traffic of matrix products": _kernels(operand_efficiency=1.0),
        "slow product over the vocabulary": _kernels(vocabulary_efficiency=0.7),
        "flash attention slower in the backward pass": _kernels(attention_backward=1.0),
        "gradients joined, cast and divided": _options("fsdp", version="2"),
        "recomputation that stops early": lambda cell: changed(
            cell, lambda run: run.changed(checkpointing="reentrant")
        ),
        "computation slowed by communication": _override("interference", "0"),
        "nodes of different speed": _override("node_spread", "0"),
    },
}
"""Mechanisms of the model by the group of cells that they matter to, and how to do without."""


OMITTED: Mapping[str, Mapping[str, Change]] = {
    "v100-zeropp": {
        "each layer gathered in four parts, as DeepSpeed does matrix by matrix": _options(
            "zero3", "zeropp", gathers="4"
        ),
    },
    "a100-co2": {"4 NCCL channels instead of 2": _override("channels", "4")},
}
"""Mechanisms that the model leaves out, and other values of what it assumes."""


def mape(cells: Sequence[Cell], values: Mapping[str, float] | None = None) -> float:
    """Mean absolute relative error; `values` replace constants."""
    return fmean(abs(predict(cell, values, fast=True) / cell.published - 1) for cell in cells)


def ablate(cells: Sequence[Cell]) -> list[Ablation]:
    """Each mechanism of the model that some of the cells depend on.

    Raises OptionError where an option has the value of its ablation already.
    """
    ablations = []
    for group, mechanisms in MECHANISMS.items():
        chosen = [cell for cell in cells if cell.group == group]
        for name, flip in mechanisms.items():
            without = [flip(cell) for cell in chosen]
            if without != chosen:
                ablations.append(Ablation(name, group, mape(chosen), mape(without)))
    return ablations


_VISIBLE = 1e-3
"""Smallest change of an error that is reported."""
_SIMILAR = 3
"""Smallest number of cells whose mean error is reported."""


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Seconds of a round of the cell's first configuration, and their parts.

    `compute_s` is the round with free communication, `communication_s` the time during which some
    communication is under way.
    """

    round_s: float
    compute_s: float
    communication_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class SimilarCells:
    """Mean signed errors of the cells that share these labels with a cell, and of all others."""

    labels: tuple[tuple[str, str], ...]
    cells: int
    error: float
    others: float


@dataclass(frozen=True, slots=True)
class RequiredValue:
    """The value of one constant that would reproduce a cell; None if none within its bounds does.

    `mape` is then the mean absolute error of the constant's group of cells.
    """

    constant: Constant
    stated: float
    needed: float | None
    mape: float | None


@dataclass(frozen=True, slots=True)
class OmittedMechanism:
    """A mechanism that the model leaves out: errors of a cell and of its group with it."""

    name: str
    error: float
    mape: float


def round_time(cell: Cell) -> RoundTime:
    """What a round consists of, by the simulation."""
    result = driver.run(cell.setup.case())
    busy = result.round_time_s - result.exposed_comm_s - result.waiting_s
    return RoundTime(result.round_time_s, busy, result.comm_busy_s, result.exposed_comm_s)


def similar_cells(row: CellPrediction, rows: Sequence[CellPrediction]) -> SimilarCells | None:
    """The label, or pair of labels, of the cell whose cells differ most from all others."""
    similar = []
    labels = sorted(row.cell.labels.items())
    group = [other for other in rows if other.cell.group == row.cell.group]
    for chosen in (*combinations(labels, 1), *combinations(labels, 2)):
        same = [r.error for r in group if set(chosen) <= set(r.cell.labels.items())]
        rest = [r.error for r in group if not set(chosen) <= set(r.cell.labels.items())]
        if len(same) >= _SIMILAR and rest:
            similar.append(SimilarCells(chosen, len(same), fmean(same), fmean(rest)))
    return max(similar, key=lambda cells: abs(cells.error - cells.others), default=None)


def required_values(cell: Cell, cells: Sequence[Cell]) -> list[RequiredValue]:
    """For every constant of the cell's group, the value that reproduces it, and its errors."""
    group = GROUPS[cell.group]
    values = stated(group)
    same_group = [other for other in cells if other.group == cell.group]
    required = []
    for constant in group.on(cell.setup.cluster):
        root = root_of(cell, constant, values)
        needed, errors = None, None
        if root.reproduces:
            needed, errors = root.value, mape(same_group, {**values, constant.name: root.value})
        required.append(RequiredValue(constant, values[constant.name], needed, errors))
    return required


def omitted_mechanisms(cell: Cell, cells: Sequence[Cell]) -> list[OmittedMechanism]:
    """What the model leaves out and would change the cell, with the constants as they are."""
    same_group = [other for other in cells if other.group == cell.group]
    before = predict(cell, fast=True) / cell.published - 1
    omitted = []
    for name, flip in OMITTED.get(cell.group, {}).items():
        error = predict(flip(cell), fast=True) / cell.published - 1
        if abs(error - before) > _VISIBLE:
            mean = mape([flip(other) for other in same_group])
            omitted.append(OmittedMechanism(name, error, mean))
    return omitted


@dataclass(frozen=True, slots=True)
class RatioLowerBound:
    """The lower bound of a ratio, from published throughputs, and what a lower ratio implies.

    `stretch` is the least fraction by which a round takes longer than a whole step of data
    parallelism, if the published ratio is right; its rounding is taken into account.
    """

    cell: Cell
    bound: float
    stretch: float


@dataclass(frozen=True, slots=True)
class ImpliedSpeeds:
    """Tokens per second and GPU at both sizes of a ratio cell, and in a single node.

    `large` and `single` are published, `small` follows from the ratio.
    """

    cell: Cell
    single: float
    small: float
    large: float

    @property
    def small_gpus(self) -> int:
        """GPUs of the smaller run."""
        return self.cell.over[0].gpus

    @property
    def large_gpus(self) -> int:
        """GPUs of the larger run."""
        return self.cell.setup.gpus


def implied_speeds(cells: Sequence[Cell]) -> list[ImpliedSpeeds]:
    """Of CO2's ratios whose throughput at the larger size is published too."""
    here = [cell for cell in cells if cell.group == GROUP]
    speeds = {cell.runs: cell.published / cell.setup.gpus for cell in here if not cell.over}
    single = next((runs for runs in speeds if runs[0].used_cluster().nodes == 1), None)
    return [
        ImpliedSpeeds(cell, speeds[single], speeds[cell.runs] / cell.published, speeds[cell.runs])
        for cell in here
        if cell.over and _tau(cell) and cell.runs in speeds and single
    ]


def ratio_lower_bounds(cells: Sequence[Cell]) -> list[RatioLowerBound]:
    """Those of CO2's published scalability ratios that lie below their lower bound."""
    here = [cell for cell in cells if cell.group == GROUP]
    speeds = [(speed, speed.published / speed.setup.gpus) for speed in here if not speed.over]
    fastest = max((per_gpu for _, per_gpu in speeds), default=0.0)
    bounds = []
    for cell in here:
        tau, gpus = _tau(cell), cell.setup.gpus
        steps = [each for speed, each in speeds if speed.setup.gpus == gpus and _tau(speed)]
        whole = [each for speed, each in speeds if speed.setup.gpus == gpus and not _tau(speed)]
        if cell.over and tau and steps and whole:
            bound = min(tau * whole[0], *steps) / fastest
            most = cell.published + cell.rounding / 2
            if most < bound:
                stretch = tau * whole[0] / (most * fastest) - 1
                bounds.append(RatioLowerBound(cell, bound, stretch))
    return bounds


def _tau(cell: Cell) -> int:
    """Local steps of a round; 0 of data parallelism."""
    strategy = cell.setup.parsed()
    return round_steps(strategy) if isinstance(strategy, LocalSteps) else 0
