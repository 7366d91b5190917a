"""A page: one HTML file that holds all it needs and asks no network for anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from co2sim import __version__
from co2sim.report import html
from co2sim.report.bundle import vega
from co2sim.report.rounds import Round
from co2sim.report.tables import Table

MOST_ROUNDS = 12
"""Timelines of more strategies are left out."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart (a Vega-Lite specification), a table, or both; then the table is folded away.

    `label` is for those who do not see the chart.
    """

    title: str
    note: str = ""
    label: str = ""
    chart: Mapping[str, Any] | None = None
    table: Table | None = None
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Timelines:
    """Rounds by their names, of which two are shown, one above the other, in one time axis.

    `chart` is the specification that the bars of a round go into.
    """

    note: str
    rounds: Mapping[str, Round]
    chart: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of a page; `key` is its anchor. `text` is prose that is HTML already."""

    key: str
    title: str
    intro: str = ""
    figures: Sequence[Figure] = ()
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    timelines: Timelines | None = None
    text: Markup | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.figures or self.warnings or self.notes or self.timelines or self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a page says.

    `answer` are sentences, of which the first one stands for all, `doubts` what they leave open.
    `commands` repeat the figures. `files` are kind and content by name, as a reader saves them.
    """

    answer: Sequence[str]
    doubts: Sequence[str] = ()
    sections: Sequence[PageSection]
    commands: Sequence[str]
    files: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def render(page: Page) -> bytes:
    """The file. Without a chart there is no script in it, and no extra needed."""
    sections = [section for section in page.sections if not section.empty]
    charts: dict[str, Any] = {
        f"{section.key}-{place}": figure.chart
        for section in sections
        for place, figure in enumerate(section.figures)
        if figure.chart is not None
    }
    lines = next((section.timelines for section in sections if section.timelines), None)
    if lines:
        charts["timeline"] = lines.chart
    scripts = {"vega": vega(), "page": html.asset("page.js")} if charts else {}
    return (
        html.environment()
        .get_template("report.html.j2")
        .render(
            page=page,
            sections=sections,
            charts=charts,
            rounds={name: one.to_dict() for name, one in lines.rounds.items()} if lines else {},
            links={name: html.link(*content) for name, content in page.files.items()},
            scripts={name: Markup(text) for name, text in scripts.items()},  # noqa: S704 - ours
            policy=html.policy(scripts.values()),
            style=html.asset("page.css"),
            version=__version__,
        )
        .encode()
    )
