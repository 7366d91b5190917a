"""Whole published trainings, beside predictions: `co2analysis whole`.

Each of `co2sim/catalog/trainings.toml` that has a setting is predicted as any question is, with
failures. Nothing is fitted to them: what lies between both is the error of the prediction, what a
project has beside its training, and how their authors counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from co2sim.common.units import figures
from co2sim.prediction import driver
from co2sim.prediction.question import OPEN_BATCH, Question
from co2sim.prediction.result import Result
from co2sim.prediction.totals import Totals, totals_of
from co2sim.prediction.whole import Training, trainings

COLUMNS = (
    "training",
    "GPU",
    "tokens",
    "GPU-hours",
    "of peak",
    "predicted",
    "of peak",
    "useful time",
    "factor",
)
_HEAD = """\
# GPU-hours of whole published trainings, as times those predicted: written by
# `co2analysis whole --write`. Nothing is fitted to them. What is not published of their settings is
# assumed (`trainings.toml`).

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A training with its prediction; `result` and `totals` are None where none can be made."""

    training: Training
    result: Result | None = None
    totals: Totals | None = None

    @property
    def factor(self) -> float | None:
        """How many times the predicted GPU-hours were published."""
        return None if self.totals is None else self.training.gpu_hours / self.totals.gpu_hours

    def cells(self) -> list[str]:
        """A row of the table; "-" is not predicted."""
        it, predicted = self.training, ["-"] * 4
        if self.totals is not None and self.factor is not None:
            share = it.effective / it.peak * self.factor
            predicted = [
                f"{self.totals.gpu_hours:,.0f}",
                f"{share:.0%}",
                f"{self.totals.goodput:.1%}",
                figures(self.factor),
            ]
        hours = f"{it.gpu_hours:,.0f}"
        return [
            it.name,
            it.gpu,
            f"{it.tokens:.4g}",
            hours,
            f"{it.effective / it.peak:.0%}",
            *predicted,
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        totals = self.totals and asdict(self.totals)
        return asdict(self.training) | {"factor": self.factor, "predicted": totals}


def predicted() -> list[Whole]:
    """Every training of the catalog; those with a setting are simulated."""
    return [_predicted(each) for each in trainings()]


def _predicted(training: Training) -> Whole:
    if not training.setting:
        return Whole(training=training)
    setting = {name: value for name, value in training.setting.items() if name != "assumed"}
    case = driver.resolve_auto(Question(**(OPEN_BATCH | setting)))
    result = driver.run(case, progress=None)
    return Whole(training=training, result=result, totals=totals_of(case, result, training.tokens))


def summary(rows: Sequence[Whole]) -> Iterator[str]:
    """The median of the factors, their range, and what they are."""
    factors = sorted(row.factor for row in rows if row.factor is not None)
    below = sum(factor < 1 for factor in factors)
    yield (
        f"factor: GPU-hours published, as times those predicted. Of {len(factors)} the median is"
        f" {figures(median(factors))}, from {figures(factors[0])} to {figures(factors[-1])};"
        f" {below} took less than predicted. Nothing is fitted to them."
    )


def assumed(rows: Sequence[Whole]) -> Iterator[str]:
    """What is not published of the settings, and what does not fit in memory."""
    named: dict[str, list[str]] = {}
    for row in rows:
        if row.training.setting:
            named.setdefault(row.training.setting["assumed"], []).append(row.training.name)
    for what, of in named.items():
        yield f"assumed of {', '.join(of)}: {what}"
    for row in rows:
        if row.result is not None and not row.result.fits_in_memory:
            yield f"warning: {row.training.name} does not fit in memory as it is predicted"


def factors_file(rows: Sequence[Whole]) -> str:
    """The factors as `co2sim/catalog/training_factors.toml` has them."""
    lines = [f'"{row.training.name}" = {row.factor:.3f}' for row in rows if row.factor is not None]
    return _HEAD + "\n".join(lines) + "\n"
