"""What every page has: escaped texts, data inside, and a policy that lets only its scripts run."""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from co2sim import __version__
from co2sim.prediction.case import Case
from co2sim.prediction.notes import ALIKE
from co2sim.prediction.published import SpeedComparison
from co2sim.report import bar_charts, line_charts, tables
from co2sim.report.bundle import vega
from co2sim.report.chart_style import picking
from co2sim.report.rounds import Round
from co2sim.report.tables import Answered, Table
from co2sim.studies.sensitivity import Sensitivity

_PACKAGE = "co2sim.report"


def environment(*packages: str) -> Environment:
    """Templates of these packages, and those that all pages share."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in (*packages, _PACKAGE)]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["data"] = data
    return made


def data(value: object) -> Markup:
    """JSON inside of a script element, which nothing in a text can end."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - escaped above


def policy(scripts: Iterable[str], *more: str) -> str:
    """A content security policy: these scripts, and nothing from anywhere else but `more`."""
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    ]
    rules = [
        "default-src 'none'",
        " ".join(["script-src", *(hashes or ["'none'"])]),
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        *more,
    ]
    return "; ".join(rules)


def link(kind: str, content: str) -> str:
    """A file as an address that holds it."""
    return f"data:{kind};base64,{base64.b64encode(content.encode()).decode()}"


def asset(name: str, package: str = _PACKAGE) -> Markup:
    """A script or style of this package, never text from an input."""
    found = (resources.files(package) / "templates" / name).read_text("utf-8")
    return Markup(found)  # noqa: S704 - ours


MAX_ROUNDS = 12
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
    scripts = {"vega": vega(), "page": asset("page.js")} if charts else {}
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            page=page,
            sections=sections,
            charts=charts,
            rounds={name: one.to_dict() for name, one in lines.rounds.items()} if lines else {},
            links={name: link(*content) for name, content in page.files.items()},
            scripts={name: Markup(text) for name, text in scripts.items()},  # noqa: S704 - ours
            policy=policy(scripts.values()),
            style=asset("page.css"),
            version=__version__,
        )
        .encode()
    )


def money(every: Sequence[Answered], names: Sequence[str]) -> PageSection:
    """What it takes to train the tokens that were asked for; empty if not asked for."""
    table = tables.trainings(every)
    if table is None:
        return PageSection("money", "Days and money")
    chart = bar_charts.front(every, names)
    if chart is None:
        return PageSection("money", "Days and energy", figures=_days(every, names))
    note = (
        "Lines are intervals: of the speed, together with the range of the price. Nothing is"
        " cheaper and faster than what the dashed line joins. Hollow points do not fit in memory."
        f"{picking(names)}"
    )
    figure = Figure("What it takes", note, "money by days, a point for each case", chart, table)
    return PageSection("money", "Days and money", figures=[figure])


def _days(every: Sequence[Answered], names: Sequence[str]) -> list[Figure]:
    """Days over GPUs, by cluster: where nothing has a price."""
    return [
        Figure(
            title=f"Days on {cluster}",
            note=f"Bands are 90 % intervals. Hollow points do not fit in memory.{picking(names)}",
            label="days by number of GPUs, a line for each strategy",
            chart=line_charts.days(group, names, every),
            table=tables.trainings(group),
        )
        for cluster in dict.fromkeys(one.cluster for one in every)
        for group in [[one for one in every if one.cluster == cluster and one.totals]]
        if group
    ]


def time(
    groups: Mapping[str, Sequence[Answered]], timelines: Timelines | None = None
) -> PageSection:
    """What a round is spent on, by cluster."""
    found = [
        Figure(
            title=f"A round on {_sizes(group)} of {cluster}",
            note="Exposed: computing waits for it. The table sums the spans of one rank by work;"
            " they overlap.",
            label="shares of the time of a round, a bar for each strategy",
            chart=bar_charts.shares(group),
            table=tables.times(group),
        )
        for cluster, group in groups.items()
    ]
    return PageSection("time", "Where the time goes", figures=found, timelines=timelines)


def memory(groups: Mapping[str, Sequence[Answered]]) -> PageSection:
    """The memory of a GPU by item, by cluster."""
    found = [
        Figure(
            title=f"A GPU of {cluster}, of {_sizes(group)}",
            note="The dashed line is what the GPU has.",
            label="memory of a GPU by item, a bar for each strategy",
            chart=bar_charts.memory(group),
            table=tables.memory(group),
        )
        for cluster, group in groups.items()
    ]
    return PageSection("memory", "Memory", figures=found)


def _sizes(group: Sequence[Answered]) -> str:
    sizes = sorted({one.result.gpus for one in group})
    return f"{' or '.join(f'{size:,}' for size in sizes)} GPUs"


def gains(found: Mapping[str, Sequence[Sensitivity]]) -> PageSection:
    """What a tenth more of each number gives, by what it is about."""
    figures = []
    for about, levers in found.items():
        shown = [lever for lever in levers if lever.gain]
        if shown:
            figures.append(
                Figure(
                    title=about,
                    note="A tenth more of each number by itself, by simulation; latencies are"
                    " divided by 1.1.",
                    label="growth of throughput where one number of the hardware is a tenth better",
                    chart=bar_charts.gains(shown),
                    table=tables.gains(shown),
                )
            )
    return PageSection("gains", "What more would give", figures=figures)


def trust(
    every: Sequence[Answered],
    shown: Sequence[Answered],
    comparisons: Sequence[SpeedComparison] = (),
) -> PageSection:
    """How sure it all is; warnings and notes are those of the cases `shown`, once each."""
    found = [Figure("", table=tables.sources(every))]
    errors = tables.errors(every)
    if errors:
        note = (
            "How far published runs were from predictions by constants that were fitted without"
            " them, or not at all:"
        )
        found.append(Figure("", note, table=errors))
    published = tables.published(comparisons)
    if published:
        note = "Published runs of this study beside their predictions:"
        found.append(Figure("", note, table=published))
    return PageSection(
        "trust",
        "How sure this is",
        figures=found,
        warnings=_lines(shown, "warnings"),
        notes=_lines(shown, "notes"),
    )


def inputs(every: Sequence[Answered]) -> PageSection:
    """Every number with its source."""
    return inputs_of({one.cluster: one.case for one in every}.items())


def inputs_of(
    cases: Iterable[tuple[str, Case]], varied: Mapping[str, str] | None = None
) -> PageSection:
    """Of the clusters and models of cases with their cluster, and the values of what is varied."""
    found = [Figure(name, table=table, folded=True) for name, table in tables.inputs(cases, varied)]
    intro = "Every number with its source. Those marked as assumed have none."
    return PageSection("inputs", "Inputs", intro, found)


def _lines(shown: Sequence[Answered], kind: str) -> list[str]:
    """Warnings, or notes, once each; behind the case, unless many have them alike."""
    found: dict[str, Answered] = {}
    for one in shown:
        for text in getattr(one.result, kind):
            found.setdefault(text, one)
    return [
        text
        if text in ALIKE
        else f"{one.strategy} on {one.result.gpus} GPUs of {one.cluster}: {text}"
        for text, one in found.items()
    ]
