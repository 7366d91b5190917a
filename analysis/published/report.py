"""The report of `co2analysis validate`: what it holds, and how it becomes Markdown.

Its words and tables stand in `templates/validation.md.j2`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from analysis.published import diagnosis, sensitivity
from analysis.published.cells import Cell, Unpredicted, unpredicted
from analysis.published.parameters import GROUPS, Constant, stated
from analysis.published.predict import (
    CellPrediction,
    ErrorSummary,
    summaries,
    summaries_by_hardware,
)
from co2sim.common import units
from co2sim.common.progress import Done
from co2sim.common.units import duration, number
from co2sim.prediction.calibrations import Calibration, calibrations
from co2sim.prediction.intervals import error_model

_TOKENS = (512, 1024, 2048, 4096, 8192)
"""Tokens per GPU and step that are assumed for CO2's runs."""

_LARGEST = 3
"""Errors that are looked into."""


@dataclass(frozen=True, slots=True)
class ConstantEstimate:
    """A fitted constant with its 90 % confidence interval, cut at its bounds."""

    generation: str
    constant: Constant
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Mean absolute errors on a source: of what was fitted, and of what was not.

    `left_out` is that of cells or runs without which the constants were found; None where there is
    nothing of the kind.
    """

    source: str
    count: int
    fitted: float | None
    left_out: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known about one error; `group_mape` is the MAPE of its group, nothing changed."""

    row: CellPrediction
    time: diagnosis.RoundTime | None
    similar: diagnosis.SimilarCells | None
    required: Sequence[diagnosis.RequiredValue]
    omitted: Sequence[diagnosis.OmittedMechanism]
    group_mape: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """Everything that the report shows. A part that is empty is left out."""

    rows: Sequence[CellPrediction] = ()
    explanations: Sequence[Explanation] = ()
    speeds: Sequence[diagnosis.ImpliedSpeeds] = ()
    constants: Sequence[ConstantEstimate] = ()
    fits: Mapping[str, Calibration] = field(default_factory=dict)
    ablations: Sequence[diagnosis.Ablation] = ()
    by_tokens: Mapping[str, sensitivity.Refit] = field(default_factory=dict)
    by_communication: Mapping[str, sensitivity.Refit] = field(default_factory=dict)
    bounds: Sequence[diagnosis.RatioLowerBound] = ()
    unpredicted: Sequence[Unpredicted] = ()

    @property
    def sources(self) -> list[SourceLine]:
        """Fitted cells, cells for checks, and published training runs, each by its source."""
        lines = [
            SourceLine(GROUPS[name].source, fit.cells, fit.mape, fit.cross_validated)
            for name, fit in calibrations().items()
        ]
        checks: dict[str, list[float]] = {}
        for row in self.rows:
            if row.cell.use == "check":
                checks.setdefault(f"{row.cell.source}, checks", []).append(abs(row.error))
        lines += [SourceLine(name, len(e), None, fmean(e)) for name, e in checks.items()]
        runs = error_model().sources
        return lines + [
            SourceLine(f"{source.title}, runs", source.runs, None, source.mean) for source in runs
        ]

    @property
    def summaries(self) -> dict[tuple[str, str, str], ErrorSummary]:
        """Errors by source, use and strategy."""
        return summaries(self.rows)

    @property
    def by_hardware(self) -> dict[tuple[str, str, str, str], ErrorSummary]:
        """Errors of cells whose GPU differs, by source, use, GPU and number of nodes."""
        return summaries_by_hardware(self.rows)

    @property
    def largest(self) -> list[CellPrediction]:
        """The cells with the largest errors."""
        return sorted(self.rows, key=lambda row: -abs(row.error))[:_LARGEST]


def brief_report(rows: Sequence[CellPrediction], papers: Path | None = None) -> ValidationReport:
    """Errors only, and the cells in the folder of papers that are not predicted."""
    return ValidationReport(rows=rows, unpredicted=unpredicted(papers) if papers else ())


def full_report(
    rows: Sequence[CellPrediction],
    every: Sequence[Cell],
    papers: Path,
    done: Done | None = None,
) -> ValidationReport:
    """Errors, their analysis, constants, ablations and sensitivities; `every` are all cells.

    Only errors of cells that depend on fitted constants are analysed.
    """
    largest = ValidationReport(rows=[row for row in rows if row.has_interval]).largest
    refittable = sensitivity.can_refit(every)
    tokens = _TOKENS if refittable else ()
    parts: dict[str, Callable[[], Any]] = {
        "explanations": lambda: [explain(row, rows, every) for row in largest],
        "speeds": lambda: diagnosis.implied_speeds(every),
        "constants": estimates,
        "fits": calibrations,
        "ablations": lambda: diagnosis.ablate(every),
        "by_tokens": lambda: {
            f"{count:,}": refit
            for count, refit in sensitivity.refits_by_tokens(every, tokens).items()
        },
        "by_communication": lambda: (
            sensitivity.refits_by_communication(every) if refittable else {}
        ),
        "bounds": lambda: diagnosis.ratio_lower_bounds(every),
        "unpredicted": lambda: unpredicted(papers),
    }
    made = {}
    for count, (name, make) in enumerate(parts.items(), 1):
        made[name] = make()
        if done:
            done(count, len(parts))
    return ValidationReport(rows=rows, **made)


def explain(
    row: CellPrediction, rows: Sequence[CellPrediction], every: Sequence[Cell]
) -> Explanation:
    """What is known about the error of one cell."""
    cell = row.cell
    return Explanation(
        row=row,
        time=None if cell.quantity == "iteration_ms" else diagnosis.round_time(cell),
        similar=diagnosis.similar_cells(row, rows),
        required=diagnosis.required_values(cell, every),
        omitted=diagnosis.omitted_mechanisms(cell, every),
        group_mape=diagnosis.mape([other for other in every if other.group == cell.group]),
    )


def estimates() -> list[ConstantEstimate]:
    """The fitted constants of the catalog."""
    constants = []
    for name, calibration in calibrations().items():
        group = GROUPS[name]
        values = stated(group)
        for index, constant in enumerate(group.constants):
            half = calibration.factor * calibration.covariance[index][index] ** 0.5
            value = values[constant.name]
            low, high = max(constant.low, value - half), min(constant.high, value + half)
            constants.append(ConstantEstimate(group.generation, constant, value, low, high))
    return constants


def render(report: ValidationReport) -> str:
    """The report as Markdown."""
    from jinja2 import (  # noqa: PLC0415 - only to write a report
        Environment,
        PackageLoader,
        StrictUndefined,
        select_autoescape,
    )

    environment = Environment(
        loader=PackageLoader("analysis.published"),
        autoescape=select_autoescape(),  # of HTML; this is Markdown
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _filters()
    text = environment.get_template("validation.md.j2").render(report=report)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _filters() -> dict[str, Any]:
    """How the template prints numbers."""
    shown = percent, whole_percent, signed, at_bound, labelled
    return {function.__name__: function for function in (*shown, duration, number)}


# --- numbers and names as they are printed -------------------------------------------------------


def percent(value: float | None) -> str:
    """In percent, with one digit behind the point; a dash for nothing."""
    return "-" if value is None else f"{value:.1%}"


def whole_percent(value: float | None) -> str:
    """In whole percent; a dash for nothing."""
    return "-" if value is None else f"{value:.0%}"


def signed(value: float) -> str:
    """In percent, with its sign; none for what rounds to zero."""
    return units.percent(value, 1)


def at_bound(constant: Constant, value: float) -> str:
    """A value of a constant, and whether it is at a bound."""
    return constant.shown(value) + (" (at bound)" if constant.at_bound(value) else "")


def labelled(errors: Mapping[str, float]) -> str:
    """Errors by label, in one line; a dash for none."""
    return (
        ", ".join(f"{name.replace('_', ' ')} {percent(error)}" for name, error in errors.items())
        or "-"
    )
