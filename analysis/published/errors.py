"""Predicted beside published: every cell with its signed error and its interval."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from analysis.published.parameters import GROUPS, Group, cluster_of, record, stated
from analysis.published.predict import Cell, phases, predict, with_override

LEVEL = 0.90
"""Of the prediction intervals."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the catalog's record says of a fit: how uncertain its constants are, and its scatter."""

    group: str
    constants: tuple[str, ...]
    covariance: tuple[tuple[float, ...], ...]
    scatter: float
    factor: float

    @classmethod
    def of(cls, group: str, entry: Mapping[str, Any]) -> "Calibration":
        """From the record."""
        return cls(
            group,
            tuple(entry["constants"]),
            tuple(tuple(row) for row in entry["covariance"]),
            float(entry["scatter"]),
            float(entry["interval_factor"]),
        )


@dataclass(frozen=True, slots=True)
class Row:
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
        """As JSON has it."""
        return {
            "source": self.cell.source,
            "cell": self.cell.name,
            "strategy": self.cell.strategy,
            "use": self.cell.use,
            "published": self.cell.published,
            "predicted": self.predicted,
            "error": self.error,
            "low": self.low if self.has_interval else None,
            "high": self.high if self.has_interval else None,
            "phases_s": phases(self.cell),
        }


def calibrations() -> dict[str, Calibration]:
    """The fits behind the catalog, by group."""
    return {name: Calibration.of(name, entry) for name, entry in record().items()}


def validate(cells: Sequence[Cell]) -> list[Row]:
    """Predict every cell with the constants of the catalog."""
    known = calibrations()
    return [_row(cell, known.get(cell.group)) for cell in cells]


def _row(cell: Cell, calibration: Calibration | None) -> Row:
    predicted = predict(cell)
    if calibration is None:
        return Row(cell, predicted)
    down, up = _moves(cell, GROUPS[cell.group], calibration)
    scatter = calibration.scatter * (math.sqrt(2) if cell.over else 1.0)
    rounded = cell.rounding / cell.published / math.sqrt(12)
    rest = (calibration.factor * math.hypot(scatter, rounded)) ** 2
    return Row(
        cell,
        predicted,
        predicted * math.exp(-math.sqrt(down + rest)),
        predicted * math.exp(math.sqrt(up + rest)),
    )


def _moves(cell: Cell, group: Group, calibration: Calibration) -> tuple[float, float]:
    """Sums of squares by which log(prediction) falls and rises within the constants' uncertainty.

    The constants move along each axis of their covariance, both ways, as far as the interval's
    level asks, but not beyond their bounds. What is hidden on one side may show on the other.
    What is borrowed moves over the middle nine tenths of its range.
    """
    setup = cell.terms[0].setup
    values = stated(group, cluster_of(setup.cluster, setup.overrides))
    base = math.log(predict(cell, values, fast=True))
    known = {constant.name: constant for constant in group.constants}
    scales = np.array([known[name].high - known[name].low for name in calibration.constants])
    covariance = np.array(calibration.covariance) / np.outer(scales, scales)
    variances, axes = np.linalg.eigh(covariance)
    down = up = 0.0
    for variance, axis in zip(variances, axes.T, strict=True):
        length = calibration.factor * math.sqrt(max(0.0, float(variance)))
        found = [0.0]
        for step in axis * scales * length, -axis * scales * length:
            moved = {
                name: min(known[name].high, max(known[name].low, values[name] + float(change)))
                for name, change in zip(calibration.constants, step, strict=True)
            }
            found.append(math.log(predict(cell, moved, fast=True)) - base)
        down += min(found) ** 2
        up += max(found) ** 2
    for one in group.borrowed:
        found = [0.0]
        for share in (0.05, 0.95):
            there = with_override(cell, one.path, f"{one.low + share * (one.high - one.low):.6g}")
            found.append(math.log(predict(there, fast=True)) - base)
        down += min(found) ** 2
        up += max(found) ** 2
    return down, up


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors over several cells; `inside` is None where none has an interval."""

    cells: int
    mape: float
    bias: float
    worst: Row
    inside: float | None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Summary":
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


def summaries(rows: Iterable[Row]) -> dict[tuple[str, str, str], Summary]:
    """By source, use and strategy; "all" stands for every strategy of a source and use."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        cell = row.cell
        for strategy in ("all", cell.strategy):
            found.setdefault((cell.source, cell.use, strategy), []).append(row)
    return {key: Summary.of(some) for key, some in sorted(found.items())}
