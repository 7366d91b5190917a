"""Published numbers beside their prediction by simulation: its signed error and its interval.

What is computed of a configuration is a function of its `RunSetup`, and kept in a cache of bounded
size: fits and derivatives ask for the same schedules with other constants.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean, median
from typing import Any, TypeVar

from analysis.published.cells import Cell, run_figures, with_constants, with_values
from analysis.published.runs import RunSetup
from co2sim.common.errors import CatalogError
from co2sim.common.progress import Done
from co2sim.common.units import Seconds
from co2sim.hardware.cluster import Cluster
from co2sim.prediction import driver
from co2sim.prediction.calibrations import Calibration, calibrations, squares
from co2sim.prediction.intervals import beyond_fit, interval_halfwidths
from co2sim.prediction.job import Stage
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Collective, Compute, Kind, Schedule
from co2sim.simulation import metrics
from co2sim.simulation.costs import cost_of
from co2sim.simulation.lowering import alone
from co2sim.simulation.run import execute, expected_slowdown
from co2sim.strategies import parse
from co2sim.studies.run_all import Failure, run_all

_MANY_RESULTS = 2048
"""Results that are kept: those of all published cells, several times over."""

_MANY_TIMES = 8192
"""Step times that are kept: a number each."""

_MANY_SCHEDULES = 2048
"""Schedules that are kept: those of all published cells, several times over."""

_FEW, _MORE = 2, 3
"""Layers, and micro-steps, of the runs from which a longer one is extrapolated."""


_ONE_BUCKET = parse("ddp:bucket_mib=1000000")
"""Gradients in one buffer, reduced after the last backward pass, as Megatron-LM does it."""

# --- results -------------------------------------------------------------------------------------


def simulated(
    cases: Sequence[Question], jobs: int, what: str, *, progress: bool | None = None
) -> list[Result]:
    """The results of cases, of which each must have one: else the error of the first without."""
    results = []
    for outcome in run_all(cases, jobs, what=what, progress=progress):
        if isinstance(outcome, Failure):
            raise CatalogError(f"{outcome.case}: {outcome.reason}")
        results.append(outcome)
    return results


_RESULTS: dict[RunSetup, Result] = {}


def prepare(runs: Iterable[RunSetup], jobs: int = -1) -> None:
    """Simulate what is not known yet, in processes; see `co2sim.studies.run_all.run_all`."""
    new = [run for run in dict.fromkeys(runs) if run not in _RESULTS]
    if len(_RESULTS) + len(new) > _MANY_RESULTS:
        _RESULTS.clear()
    cases = [run.case() for run in new]
    _RESULTS.update(zip(new, simulated(cases, jobs, "predicting published runs"), strict=True))


def result_of(run: RunSetup) -> Result:
    """The result of a run, as `co2sim run` has it."""
    if run not in _RESULTS:
        prepare([run], 1)
    return _RESULTS[run]


# --- cells ---------------------------------------------------------------------------------------


def predict(cell: Cell, values: Mapping[str, float] | None = None, *, fast: bool = False) -> float:
    """What the simulator gives for a cell; `values` replace constants of its group.

    `fast` is for fits and derivatives. It sums a schedule without overlap, and extrapolates from
    few layers to many; both agree with the whole simulation to a hundredth of a percent, which a
    test holds.
    """
    if values:
        cell = with_constants(cell, values)
    step_time = quick_step_time if fast else _whole_step_time
    quantities = [_value(cell, run, step_time) for run in cell.runs]
    if not cell.over:
        return quantities[0]
    others = (_value(cell, run, step_time) for run in cell.over)
    ratios = [above / below for above, below in zip(quantities, others, strict=True)]
    return max(ratios) if cell.pick == "max" else min(ratios)


def _whole_step_time(run: RunSetup) -> Seconds:
    return result_of(run).step_time_s


def _value(cell: Cell, run: RunSetup, step_time: Callable[[RunSetup], Seconds]) -> float:
    """The cell's quantity of a run; of a ratio tokens per second are per GPU."""
    if cell.quantity == "inter_node_volume":
        return _volume(run, cell.part)
    step = step_time(run)
    if cell.quantity == "iteration_ms":
        return step * 1e3
    samples = run.micro_batch * run.accumulation / step
    if cell.quantity == "tokens_per_s":
        return samples * run.trained().tokens * (1 if cell.over else run.gpus)
    return samples * _prepared(_plain(run)).workload.hardware_flops_per_sample / 1e12


def _volume(setup: RunSetup, part: str) -> float:
    """What a node sends to others in a step, as a multiple of the model in its training type.

    `part` is `total`, or one of those that `_part` names. Scales are not counted.
    """
    prepared, cluster = _prepared(_plain(setup)), setup.used_cluster()
    sent = sum(
        cost_of(replace(op.work, scale_block=0), cluster).bytes_per_link(cluster)[1]
        for op in prepared.schedule.body
        if isinstance(op.work, Collective) and part in {"total", _part(op.name, op.work)}
    )
    return sent / (prepared.workload.parameters * prepared.workload.precision.bytes)


def _part(name: str, work: Collective) -> str:
    """The part of a step of ZeRO-3 that a collective belongs to."""
    if work.kind != Kind.ALL_GATHER:
        return "gradient_reduce_scatter"
    return "forward_all_gather" if ".forward." in name else "backward_all_gather"


# --- short ways for fits -------------------------------------------------------------------------


@lru_cache(_MANY_TIMES)
def quick_step_time(setup: RunSetup) -> Seconds:
    """The same by a shorter way where there is one: without overlap, and for equal layers."""
    if setup.pp > 1:
        return _whole_step_time(setup)
    if _is_serial(setup):
        return _serial_step_time(setup)
    if setup.parsed().name in {"zero3", "zeropp", "fsdp"}:
        return _extrapolated_step_time(setup)
    schedule, trace = driver.trace(setup.case())
    return metrics.window(trace, schedule, 1).round_time / schedule.steps


def _extrapolated_step_time(setup: RunSetup) -> Seconds:
    """From shorter models and steps: each of many equal layers, or micro-steps, adds as much."""
    layers = len(setup.trained().blocks) - 2
    cluster = setup.used_cluster()

    def with_all_layers(micro_steps: int) -> Seconds:
        few, more = (_simulated(setup, cluster, count, micro_steps) for count in (_FEW, _MORE))
        return few + (more - few) * (layers - _FEW)

    if setup.accumulation <= _MORE:
        return with_all_layers(setup.accumulation)
    few, more = (with_all_layers(count) for count in (_FEW, _MORE))
    return few + (more - few) * (setup.accumulation - _FEW)


def _simulated(setup: RunSetup, cluster: Cluster, layers: int, micro_steps: int) -> Seconds:
    """A round of a smaller run."""
    schedule = _shorter(_plain(setup), layers, micro_steps)
    precision = setup.precision
    slowdown = expected_slowdown(schedule, cluster, precision=precision)
    trace = execute(schedule, cluster, precision=precision, rounds=2, slowdown=slowdown)
    return metrics.window(trace, schedule, 1).round_time


@lru_cache(_MANY_SCHEDULES)
def _shorter(stated: RunSetup, layers: int, micro_steps: int) -> Schedule:
    """The schedule of a smaller run: it does not depend on the fitted constants."""
    shape = {**stated.overrides, "model.layers": str(layers)}
    return stated.changed(overrides=shape, accumulation=micro_steps).case().stage().schedule


@lru_cache(_MANY_SCHEDULES)
def _prepared(stated: RunSetup) -> Stage:
    """Job and schedule, which do not depend on the fitted constants either."""
    return stated.case().stage()


def _plain(setup: RunSetup) -> RunSetup:
    """What job and schedule depend on: no constants, and no numbers of a cluster of this layout."""
    return _of_layout(setup.changed(constants=()))


@lru_cache(_MANY_SCHEDULES)
def _of_layout(stated: RunSetup) -> RunSetup:
    of_model = {k: v for k, v in stated.overrides.items() if k.startswith("model.")}
    plain = stated.changed(overrides=of_model)
    changed, catalog = stated.used_cluster(), plain.used_cluster()
    same = changed.layout == catalog.layout and changed.gpu.peak == catalog.gpu.peak
    return plain if same else stated


def _is_serial(setup: RunSetup) -> bool:
    """Whether nothing overlaps: one bucket, which closes when the backward pass has ended."""
    return setup.parsed() == _ONE_BUCKET


@lru_cache(_MANY_SCHEDULES)
def _works(stated: RunSetup) -> list[tuple[Compute | Collective, int]]:
    """Different works of a schedule, and how often each runs."""
    counted: dict[Compute | Collective, int] = {}
    for op in stated.case().stage().schedule.body:
        counted[op.work] = counted.get(op.work, 0) + 1
    return list(counted.items())


def _serial_step_time(setup: RunSetup) -> Seconds:
    """The sum of all works, each alone."""
    cluster = setup.used_cluster()
    return sum(
        count * _alone(work, cluster, setup.precision) for work, count in _works(_plain(setup))
    )


def _alone(work: Compute | Collective, cluster: Cluster, precision: str) -> Seconds:
    if isinstance(work, Compute):
        return alone(work, cluster, precision, free=False)
    return cost_of(work, cluster).duration_alone(cluster)


K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class CellPrediction:
    """A cell, its prediction, and the interval of the prediction; errors are of the prediction.

    Without an interval its ends are NaN.
    """

    cell: Cell
    predicted: float
    low: float = field(default=math.nan)
    high: float = field(default=math.nan)

    @property
    def error(self) -> float:
        """Signed and relative: positive where the prediction is too high."""
        return self.predicted / self.cell.published - 1

    @property
    def has_interval(self) -> bool:
        """Whether it has an interval, as those have that depend on fitted constants."""
        return not math.isnan(self.low)

    @property
    def inside(self) -> bool:
        """Whether the published value lies in the interval."""
        return self.low <= self.cell.published <= self.high

    def to_dict(self) -> dict[str, Any]:
        """For JSON; memory is that of the run that needs most of its GPU, if there are several.

        `breakdown_s` is what the step of a run consists of, as in `co2sim run`; empty for several.
        """
        results = [result_of(run) for run in self.cell.setups]
        needed = [(r.memory_bytes_per_gpu["total"], r.gpu_memory_bytes) for r in results]
        memory, room = max(needed, key=lambda pair: pair[0] / pair[1])
        return {
            "source": self.cell.source,
            "cell": self.cell.name,
            "strategy": self.cell.strategy,
            "use": self.cell.use,
            "labels": dict(self.cell.labels),
            "fits_in_memory": memory <= room,
            "memory_bytes_per_gpu": memory,
            "published": self.cell.published,
            "predicted": self.predicted,
            "error": self.error,
            "low": self.low if self.has_interval else None,
            "high": self.high if self.has_interval else None,
            "breakdown_s": results[0].breakdown_s if len(results) == 1 else {},
        }


def validate(cells: Sequence[Cell], done: Done | None = None) -> list[CellPrediction]:
    """Predict every cell with the constants of the catalog."""
    fits = calibrations()
    prepare(run for cell in cells for run in cell.setups)
    rows = []
    for count, cell in enumerate(cells, 1):
        rows.append(_predicted(cell, fits.get(cell.group)))
        if done:
            done(count, len(cells))
    return rows


def _predicted(cell: Cell, calibration: Calibration | None) -> CellPrediction:
    predicted = predict(cell)
    if calibration is None:
        return CellPrediction(cell, predicted)
    several = math.sqrt(2) if cell.over else 1.0
    if (other := _unknown_to(calibration, cell)) is not None:
        result = result_of(other)
        assert result.tokens_per_s_high is not None
        reach = several * math.log(result.tokens_per_s_high / result.tokens_per_s)
        return CellPrediction(
            cell, predicted, predicted * math.exp(-reach), predicted * math.exp(reach)
        )

    def moved(values: Mapping[str, float]) -> float:
        return predict(with_values(cell, values), fast=True)

    scatter = calibration.scatter * several
    rounded = cell.rounding / predicted / math.sqrt(12)
    reach = calibration.factor * math.hypot(scatter, rounded)
    gpu = cell.setup.whole_cluster().gpu.name
    pairs = [[(moved(values), times) for values, times in p] for p in calibration.moves(gpu)]
    down, up = interval_halfwidths(squares(moved({}), pairs), reach)
    return CellPrediction(cell, predicted, predicted * math.exp(-down), predicted * math.exp(up))


def _unknown_to(calibration: Calibration, cell: Cell) -> RunSetup | None:
    """The first of a cell's runs of which the fit does not tell, as `co2sim run` would say."""
    for run in cell.setups:
        layout = run.used_cluster().layout
        if beyond_fit(calibration, run.parsed(), layout, run_figures(run)):
            return run
    return None


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Errors over several cells: absolute and signed, in the mean and in the median, and the worst.

    `inside` is the share of published values in their intervals, and `width` how many times the
    low end of an interval the high one is, in the median; both None where none has an interval.
    """

    cells: int
    mape: float
    median: float
    bias: float
    median_bias: float
    worst: CellPrediction
    inside: float | None
    width: float | None

    @classmethod
    def of(cls, rows: Sequence[CellPrediction]) -> "ErrorSummary":
        """Of at least one row. A published zero has no error."""
        errors = [row.error for row in rows]
        absolute = [abs(error) for error in errors]
        certain = [row for row in rows if row.has_interval]
        return cls(
            cells=len(rows),
            mape=fmean(absolute),
            median=median(absolute),
            bias=fmean(errors),
            median_bias=median(errors),
            worst=max(rows, key=lambda row: abs(row.error)),
            inside=fmean(row.inside for row in certain) if certain else None,
            width=median(row.high / row.low for row in certain) if certain else None,
        )


def summarized(
    rows: Iterable[CellPrediction], keys: Callable[[CellPrediction], Iterable[K]]
) -> dict[K, ErrorSummary]:
    """Errors by key, in the order of the rows; a row counts for each of its keys."""
    groups: dict[K, list[CellPrediction]] = {}
    for row in rows:
        for key in keys(row):
            groups.setdefault(key, []).append(row)
    return {key: ErrorSummary.of(some) for key, some in groups.items()}


def summaries(rows: Iterable[CellPrediction]) -> dict[tuple[str, str, str], ErrorSummary]:
    """By source, use and strategy; "all" stands for every strategy of a source and use."""

    def keys(row: CellPrediction) -> Iterable[tuple[str, str, str]]:
        return ((row.cell.source, row.cell.use, name) for name in ("all", row.cell.strategy))

    return dict(sorted(summarized(rows, keys).items()))


def summaries_by_hardware(
    rows: Iterable[CellPrediction],
) -> dict[tuple[str, str, str, str], ErrorSummary]:
    """By source, use, GPU and "one node", "several nodes" or "ratios", of cells with these labels.

    "all" stands for every GPU, and for any number of nodes; ratios are of several.
    """

    def keys(row: CellPrediction) -> Iterable[tuple[str, str, str, str]]:
        cell = row.cell
        if not {"gpu", "nodes"} <= cell.labels.keys():
            return ()
        sizes = ("ratios",) if cell.over else ("all", cell.labels["nodes"])
        gpus = ("all", cell.labels["gpu"])
        return ((cell.source, cell.use, gpu, size) for gpu in gpus for size in sizes)

    return dict(sorted(summarized(rows, keys).items()))
