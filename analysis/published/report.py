"""The report of `co2analysis validate`: what it holds, and how it becomes Markdown.

Its words and tables stand in `templates/validation.md.j2`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.published.cells import Unpredicted
from analysis.published.predict import (
    CellPrediction,
    ErrorSummary,
    summaries,
    summaries_by_hardware,
)
from co2sim.common import units
from co2sim.common.units import number

_LARGEST = 3
"""Errors that are listed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """Everything that the report shows. A part that is empty is left out."""

    rows: Sequence[CellPrediction] = ()
    unpredicted: Sequence[Unpredicted] = ()

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
    shown = percent, whole_percent, signed, number
    environment.filters |= {function.__name__: function for function in shown}
    text = environment.get_template("validation.md.j2").render(report=report)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


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
