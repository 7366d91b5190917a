"""Published numbers with their prediction, its signed error and its interval; tables of errors."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, TypeVar

from analysis.published.cells import Cell, run_figures, with_values
from analysis.published.predict import predict, prepare, result_of
from analysis.published.runs import RunSetup
from co2sim.common.progress import Done
from co2sim.prediction.calibrations import Calibration, calibrations, squares
from co2sim.prediction.intervals import beyond_fit, interval_halfwidths

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
