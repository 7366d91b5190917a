"""Published cells with their prediction, its signed error and its interval."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from analysis.published.cells import Cell, run_figures, with_values
from analysis.published.predict import memory_of, phases, predict
from analysis.published.runs import RunSetup
from co2sim.common.progress import Done
from co2sim.prediction import driver
from co2sim.prediction.calibrations import Calibration, calibrations
from co2sim.prediction.intervals import beyond_fit, interval_halfwidths


@dataclass(frozen=True, slots=True)
class CellPrediction:
    """A cell, its prediction, and the interval of the prediction; errors are of the prediction.

    Without fitted constants there is no interval: its ends are NaN.
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
        """Whether the prediction depends on fitted constants, and so has an interval."""
        return not math.isnan(self.low)

    @property
    def inside(self) -> bool:
        """Whether the published value lies in the interval."""
        return self.low <= self.cell.published <= self.high

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `phases_s` are seconds of a step without overlap, by kernel or collective.

        Of a cell of several runs, memory is that of the run that needs most of its GPU.
        """
        memory = max(map(memory_of, self.cell.setups), key=lambda one: one.share)
        return {
            "source": self.cell.source,
            "cell": self.cell.name,
            "strategy": self.cell.strategy,
            "use": self.cell.use,
            "labels": dict(self.cell.labels),
            "fits_in_memory": memory.share <= 1,
            "memory_bytes_per_gpu": memory.needed,
            "published": self.cell.published,
            "predicted": self.predicted,
            "error": self.error,
            "low": self.low if self.has_interval else None,
            "high": self.high if self.has_interval else None,
            "phases_s": phases(self.cell),
        }


def validate(cells: Sequence[Cell], done: Done | None = None) -> list[CellPrediction]:
    """Predict every cell with the constants of the catalog."""
    known = calibrations()
    found = []
    for place, cell in enumerate(cells, 1):
        found.append(_predicted(cell, known.get(cell.group)))
        if done:
            done(place, len(cells))
    return found


def _predicted(cell: Cell, calibration: Calibration | None) -> CellPrediction:
    predicted = predict(cell)
    if calibration is None:
        return CellPrediction(cell, predicted)
    several = math.sqrt(2) if cell.over else 1.0
    if (other := _unknown_to(calibration, cell)) is not None:
        result = driver.run(other.case())
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
    down, up = interval_halfwidths(calibration.moves(gpu, moved), reach)
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
    """Errors over several cells; `inside` is None where none has an interval."""

    cells: int
    mape: float
    bias: float
    worst: CellPrediction
    inside: float | None

    @classmethod
    def of(cls, rows: Sequence[CellPrediction]) -> "ErrorSummary":
        """Of at least one row."""
        errors = [row.error for row in rows]
        inside = [row.inside for row in rows if row.has_interval]
        return cls(
            len(rows),
            fmean(abs(error) for error in errors),
            fmean(errors),
            max(rows, key=lambda row: abs(row.error)),
            fmean(inside) if inside else None,
        )


def summaries(rows: Iterable[CellPrediction]) -> dict[tuple[str, str, str], ErrorSummary]:
    """By source, use and strategy; "all" stands for every strategy of a source and use."""
    return _grouped(
        ((row.cell.source, row.cell.use, strategy), row)
        for row in rows
        for strategy in ("all", row.cell.strategy)
    )


def summaries_by_hardware(
    rows: Iterable[CellPrediction],
) -> dict[tuple[str, str, str, str], ErrorSummary]:
    """By source, use, GPU and "one node", "several nodes" or "ratios", of cells with these labels.

    "all" stands for every GPU, and for any number of nodes; ratios are of several.
    """
    found = []
    for row in rows:
        cell = row.cell
        if not {"gpu", "nodes"} <= cell.labels.keys():
            continue
        sizes = ("ratios",) if cell.over else ("all", cell.labels["nodes"])
        found += [
            ((cell.source, cell.use, gpu, size), row)
            for gpu in ("all", cell.labels["gpu"])
            for size in sizes
        ]
    return _grouped(found)


def _grouped(
    rows: Iterable[tuple[tuple[str, ...], CellPrediction]],
) -> dict[Any, ErrorSummary]:
    found: dict[tuple[str, ...], list[CellPrediction]] = {}
    for key, row in rows:
        found.setdefault(key, []).append(row)
    return {key: ErrorSummary.of(some) for key, some in sorted(found.items())}
