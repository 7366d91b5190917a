"""Where a large error may come from: time, similar cells, constants, omitted mechanisms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

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


def _kernels(**values: float) -> Callable[[Cell], Cell]:
    """Other numbers of the kernels that a stack runs."""
    return lambda cell: with_values(
        cell, {f"gpu.kernels.{name}": value for name, value in values.items()}
    )


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
        "gathers and reductions in their own queues",
        "v100-zeropp",
        _override("communicators", "group"),
    ),
    Mechanism("intra-node hop in turn", "v100-zeropp", _override("hops", "pipelined")),
    Mechanism(
        "memory traffic of matrix products",
        "v100-zeropp",
        _kernels(operand_efficiency=1.0),
    ),
    Mechanism(
        "all-to-all slower than a ring",
        "v100-zeropp",
        _override("inter.exchange_efficiency", "1"),
    ),
    Mechanism(
        "memory traffic of matrix products",
        "a100-data-parallel",
        _kernels(operand_efficiency=1.0),
    ),
    Mechanism(
        "host that issues operations",
        "a100-data-parallel",
        _kernels(call_overhead=0.0),
    ),
    Mechanism("gap after every kernel", "a100-data-parallel", _kernels(kernel_gap=0.0)),
    Mechanism(
        "slow product over the vocabulary",
        "a100-data-parallel",
        _kernels(vocabulary_efficiency=0.859),
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
        _kernels(operand_efficiency=1.0),
    ),
    Mechanism(
        "slow product over the vocabulary",
        "mpt-fsdp",
        _kernels(vocabulary_efficiency=0.7),
    ),
    Mechanism(
        "flash attention slower in the backward pass",
        "mpt-fsdp",
        _kernels(attention_backward=1.0),
    ),
    Mechanism(
        "gradients joined, cast and divided",
        "mpt-fsdp",
        _options("fsdp", version="2"),
    ),
    Mechanism(
        "recomputation that stops early",
        "mpt-fsdp",
        lambda cell: changed(cell, lambda run: run.changed(checkpointing="reentrant")),
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
    found = []
    labels = sorted(row.cell.labels.items())
    group = [other for other in rows if other.cell.group == row.cell.group]
    for chosen in (*combinations(labels, 1), *combinations(labels, 2)):
        same = [r.error for r in group if set(chosen) <= set(r.cell.labels.items())]
        rest = [r.error for r in group if not set(chosen) <= set(r.cell.labels.items())]
        if len(same) >= _SIMILAR and rest:
            found.append(SimilarCells(chosen, len(same), fmean(same), fmean(rest)))
    return max(found, key=lambda one: abs(one.error - one.others), default=None)


def required_values(cell: Cell, cells: Sequence[Cell]) -> list[RequiredValue]:
    """For every constant of the cell's group, the value that reproduces it, and its errors."""
    group = GROUPS[cell.group]
    values = stated(group)
    same_group = [other for other in cells if other.group == cell.group]
    found = []
    for constant in group.on(cell.setup.cluster):
        known = values[constant.name]
        root = root_of(cell, constant, values)
        if root.reproduces:
            errors = mape(same_group, {**values, constant.name: root.value})
            found.append(RequiredValue(constant, known, root.value, errors))
        else:
            found.append(RequiredValue(constant, known, None, None))
    return found


def omitted_mechanisms(cell: Cell, cells: Sequence[Cell]) -> list[OmittedMechanism]:
    """What the model leaves out and would change the cell, with the constants as they are."""
    same_group = [other for other in cells if other.group == cell.group]
    before = predict(cell, fast=True) / cell.published - 1
    found = []
    for one in OMITTED:
        if one.group != cell.group:
            continue
        error = predict(one.flip(cell), fast=True) / cell.published - 1
        if abs(error - before) > _VISIBLE:
            mean = mape([one.flip(other) for other in same_group])
            found.append(OmittedMechanism(one.name, error, mean))
    return found


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
    speeds = {cell.runs: cell.published / _gpus(cell) for cell in here if not cell.over}
    single = [cell for cell in here if not cell.over and _nodes(cell) == 1]
    return [
        ImpliedSpeeds(
            cell,
            speeds[single[0].runs],
            speeds[cell.runs] / cell.published,
            speeds[cell.runs],
        )
        for cell in here
        if cell.over and _tau(cell) and cell.runs in speeds and single
    ]


def ratio_lower_bounds(cells: Sequence[Cell]) -> list[RatioLowerBound]:
    """Those of CO2's published scalability ratios that lie below their lower bound."""
    here = [cell for cell in cells if cell.group == GROUP]
    speeds = [cell for cell in here if not cell.over]
    fastest = max((cell.published / _gpus(cell) for cell in speeds), default=0.0)
    found = []
    for cell in here:
        tau = _tau(cell)
        same = [one for one in speeds if _gpus(one) == _gpus(cell)]
        steps = [one.published / _gpus(one) for one in same if _tau(one)]
        whole = [one.published / _gpus(one) for one in same if not _tau(one)]
        if cell.over and tau and steps and whole:
            bound = min(tau * whole[0], *steps) / fastest
            most = cell.published + cell.rounding / 2
            if most < bound:
                stretch = tau * whole[0] / (most * fastest) - 1
                found.append(RatioLowerBound(cell, bound, stretch))
    return found


def _gpus(cell: Cell) -> int:
    return cell.setup.gpus


def _nodes(cell: Cell) -> int:
    return cell.setup.used_cluster().nodes


def _tau(cell: Cell) -> int:
    """Local steps of a round; 0 of data parallelism."""
    strategy = cell.setup.parsed()
    return round_steps(strategy) if isinstance(strategy, LocalSteps) else 0
