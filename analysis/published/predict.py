"""Published numbers beside their prediction by simulation: its signed error and its interval."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, TypeVar

from analysis.published.cells import Cell
from analysis.published.runs import RunSetup
from co2sim.common.errors import CatalogError
from co2sim.common.progress import Done
from co2sim.prediction.intervals import unshared
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Collective, Kind
from co2sim.simulation.costs import cost_of
from co2sim.studies.run_all import Failure, run_all

_MANY_RESULTS = 2048
"""Results that are kept: those of all published cells, several times over."""

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


def predict(cell: Cell) -> float:
    """What the simulator gives for a cell."""
    quantities = [_value(cell, run) for run in cell.runs]
    if not cell.over:
        return quantities[0]
    others = (_value(cell, run) for run in cell.over)
    ratios = [above / below for above, below in zip(quantities, others, strict=True)]
    return max(ratios) if cell.pick == "max" else min(ratios)


def _value(cell: Cell, run: RunSetup) -> float:
    """The cell's quantity of a run; of a ratio tokens per second are per GPU."""
    if cell.quantity == "inter_node_volume":
        return _volume(run, cell.part)
    step = result_of(run).step_time_s
    if cell.quantity == "iteration_ms":
        return step * 1e3
    samples = run.micro_batch * run.accumulation / step
    if cell.quantity == "tokens_per_s":
        return samples * run.trained().tokens * (1 if cell.over else run.gpus)
    return samples * run.case().stage().workload.hardware_flops_per_sample / 1e12


def _volume(setup: RunSetup, part: str) -> float:
    """What a node sends to others in a step, as a multiple of the model in its training type.

    `part` is `total`, or one of those that `_part` names. Scales are not counted.
    """
    prepared, cluster = setup.case().stage(), setup.used_cluster()
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
        """Whether it has an interval, as those have that depend on time."""
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
    prepare(run for cell in cells for run in cell.setups)
    rows = []
    for count, cell in enumerate(cells, 1):
        rows.append(_predicted(cell))
        if done:
            done(count, len(cells))
    return rows


def _predicted(cell: Cell) -> CellPrediction:
    """With the interval of its first run; of a ratio with that of the first two."""
    predicted = predict(cell)
    if cell.quantity == "inter_node_volume":
        return CellPrediction(cell, predicted)
    results = [result_of(run) for run in (cell.setup, *cell.over[:1])]
    reach = math.hypot(*map(_reach, results))
    if cell.over:
        reach = min(reach, unshared(*results))
    return CellPrediction(
        cell, predicted, predicted * math.exp(-reach), predicted * math.exp(reach)
    )


def _reach(result: Result) -> float:
    """How far the 90 % interval of log(tokens/s) reaches to both sides."""
    assert result.tokens_per_s_high is not None
    return math.log(result.tokens_per_s_high / result.tokens_per_s)


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
