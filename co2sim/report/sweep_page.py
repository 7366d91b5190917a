"""The page of `co2sim sweep`: figures over what varies, as lines or as bars."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter

import altair as alt

from co2sim.common.errors import Co2simError
from co2sim.common.units import parse, parse_price
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.report import charts, sections, tables
from co2sim.report.chart_style import (
    FAINT,
    HEIGHT,
    STRATEGIES,
    NumberAxis,
    Rows,
    Spec,
    banded,
    ends_of,
    figure_tips,
    high,
    log_ticks,
    number_axis,
    picking,
    ranged_bars,
    scale_of,
    spec,
    wide,
)
from co2sim.report.charts import Measure
from co2sim.report.html import Figure, Page, PageSection
from co2sim.report.tables import Answered
from co2sim.report.text import totals
from co2sim.report.text.screen import Screen
from co2sim.studies.grid import Setting, display_name, setting_name, short_names, strategy_title
from co2sim.studies.run_all import Failure, Outcome
from co2sim.studies.table import to_frame
from co2sim.studies.targets import axis_of

_MAX_ROWS = 200
"""Of one table."""
_MAX_TEXTS = 20
_MAX_INPUTS = 20
_MAX_ON_FRONT = 12
"""Points of days against money: each has its own colour."""
_MAX_CHARACTERS = 250_000
"""Of a file inside of the page."""


MAX_BARS = 40
MAX_LINES = 40
MAX_POINTS = 800
"""Of one chart."""


@dataclass(frozen=True, kw_only=True)
class Swept:
    """Cases with what each varies and what became of it, in the order of the table.

    `screen` is what the command says first, `rows` what --json prints. `missing` says how many were
    done where an interrupt left some out. `command` repeats it all.
    """

    cases: Sequence[Question]
    settings: Sequence[Setting]
    outcomes: Sequence[Outcome]
    screen: Screen
    rows: Sequence[Mapping[str, object]]
    goal: Goal
    tokens: float | None
    command: str
    missing: str = ""

    @cached_property
    def names(self) -> list[str]:
        """What each case varies, as a text."""
        return [setting_name(setting) for setting in self.settings]

    @cached_property
    def all(self) -> list[Answered]:
        """The cases that gave a result; what they vary stands for their strategy."""
        trained = totals.totals_for(self.cases, self.outcomes, self.tokens, self.goal)
        every = zip(self.names, self.cases, self.outcomes, trained, strict=True)
        offers = short_names(case.cluster for case in self.cases)
        return [
            Answered(offers[display_name(case.cluster)], name, case, outcome, totals)
            for name, case, outcome, totals in every
            if isinstance(outcome, Result)
        ]

    @cached_property
    def failed(self) -> list[str]:
        """The cases without a result, each with its reason."""
        return [
            f"{name}: {outcome.reason}"
            for name, outcome in zip(self.names, self.outcomes, strict=True)
            if isinstance(outcome, Failure)
        ]

    @cached_property
    def paths(self) -> list[str]:
        """What varies."""
        return list(self.settings[0])

    @cached_property
    def varied(self) -> dict[str, str]:
        """The values of each path as texts."""
        return {
            path: ", ".join(dict.fromkeys(display_name(setting[path]) for setting in self.settings))
            for path in self.paths
        }

    @cached_property
    def across(self) -> NumberAxis | None:
        """How the first thing that varies is drawn, if all its values are numbers."""
        return self._numbers[0]

    @cached_property
    def placed(self) -> list[tuple[float, str, str]]:
        """Of the cases with a result: the first number as it is drawn, as it was given; the rest.

        The rest is what names the line: the strategy where nothing else varies.
        """
        first, *others = self.paths
        every = zip(self.settings, self.outcomes, self._numbers[1], strict=True)
        return [
            (
                value,
                display_name(setting[first]),
                setting_name({path: setting[path] for path in others}) or self._alone,
            )
            for setting, outcome, value in every
            if isinstance(outcome, Result)
        ]

    @cached_property
    def _alone(self) -> str:
        return strategy_title(self.cases[0].strategy)

    @cached_property
    def _numbers(self) -> tuple[NumberAxis | None, list[float]]:
        path = self.paths[0]
        texts = [display_name(setting[path]) for setting in self.settings]
        return _numbers(path, self.cases[0], texts) or (None, [0.0] * len(texts))

    def doubts(self) -> list[str]:
        """What is missing, and what failed."""
        said = [f"This sweep was interrupted: {self.missing}."] if self.missing else []
        if self.failed:
            said.append(f"{len(self.failed):,} of {len(self.cases):,} cases failed.")
        return said


def _numbers(
    path: str, case: Question, texts: Sequence[str]
) -> tuple[NumberAxis, list[float]] | None:
    """The values in what they are drawn in; None unless all of them are numbers."""
    try:
        axis = axis_of(case, path)
        drawn = number_axis(axis)
        priced = axis.unit == "USD/s"
        values = [parse_price(text)[0] if priced else parse(text, axis.unit) for text in texts]
        return drawn, [value * drawn.factor for value in values]
    except Co2simError:  # what nothing is solved for, such as jitter, may be a plain number
        pass
    try:
        return NumberAxis(path), [parse(text, "") for text in texts]
    except Co2simError:
        return None


def measures(swept: Swept) -> list[Measure]:
    """Throughput; days, and money where all prices are in one currency, for tokens to train."""
    shown = [charts.speed(swept.all[0].result.unit)]
    trained = [entry.totals for entry in swept.all if entry.totals]
    if not trained:
        return shown
    currencies = {totals.currency for totals in trained}
    priced = (
        [charts.cost(str(*currencies))] if len(currencies) == 1 and None not in currencies else []
    )
    return [*shown, charts.DAYS, *priced]


def _chart(swept: Swept, measure: Measure) -> tuple[Spec, str]:
    """Lines where the first thing that varies is a number, else bars; what was left out."""
    pairs = [pair for pair in zip(swept.all, swept.placed, strict=True) if measure.of(pair[0])]
    if swept.across is None:
        rows = measure.rows([entry for entry, _ in pairs[:MAX_BARS]])
        return _bars(rows, measure), left_out("cases", len(pairs), MAX_BARS)
    lines: dict[str, Rows] = {}
    for row, (_, (x, text, line)) in zip(
        measure.rows([entry for entry, _ in pairs]), pairs, strict=True
    ):
        lines.setdefault(line, []).append(row | {"strategy": line, "x": x, "at": text})
    kept = [sorted(rows, key=itemgetter("x")) for rows in list(lines.values())[:MAX_LINES]]
    count = sum(map(len, kept))
    every = -(-count // MAX_POINTS)
    words = left_out("lines", len(lines), MAX_LINES)
    words += f" Of {count:,} points one in {every} is drawn." if every > 1 else ""
    words += picking([rows[0]["strategy"] for rows in kept])
    return _lines(swept.across, [row for rows in kept for row in rows[::every]], measure), words


def left_out(what: str, count: int, most: int) -> str:
    """What is said of more than a page can show."""
    return f" The first {most} of {count:,} {what} are drawn." if count > most else ""


def _lines(across: NumberAxis, rows: Rows, measure: Measure) -> Spec:
    """A line for each combination of the others."""
    names = [row["strategy"] for row in rows]
    drawn = [row["x"] for row in rows]
    x = across.encoding("x", drawn, log=wide(drawn))
    ends = ends_of(rows)
    log = wide(ends)
    values = log_ticks(ends) if log else alt.Undefined
    scale, axis = scale_of(log=log, padding=10), alt.Axis(format=measure.ticks, values=values)
    y = alt.Y("value:Q", title=measure.unit, scale=scale, axis=axis)
    tips = figure_tips(measure.unit, alt.Tooltip("at:N", title=across.path))
    return spec(alt.layer(*banded(rows, x, y, names, tips, several=True)), HEIGHT)


def _bars(rows: Rows, measure: Measure) -> Spec:
    """A bar for each case, and a line for its interval."""
    x = alt.X("value:Q", title=measure.unit, axis=alt.Axis(format=measure.ticks))
    bars = ranged_bars(rows, {"x": x, "y": STRATEGIES}, FAINT, figure_tips(measure.unit))
    return spec(bars, high([row["strategy"] for row in rows]))


def page(swept: Swept) -> Page:
    """Nothing is simulated for it. Of very many cases the first ones are shown, and it says so."""
    every = swept.all
    files, cut = _files(swept)
    groups = dict(sorted(sections.by_cluster(every[:MAX_BARS]).items()))
    more = left_out("cases", len(every), MAX_BARS).strip()
    plain = [replace(entry, strategy=entry.result.strategy) for entry in every]
    trust = sections.trust(plain, plain)
    return Page(
        screen=replace(swept.screen, table=swept.screen.table[:_MAX_ROWS]),
        doubts=swept.doubts(),
        sections=[
            _speed(swept),
            PageSection("failed", "Cases that failed", notes=_few(swept.failed)),
            _money(swept),
            replace(sections.time(groups), intro=more),
            replace(sections.memory(groups), intro=more),
            replace(trust, warnings=_few(trust.warnings), notes=_few(trust.notes)),
            sections.inputs_of(_inputs(swept), swept.varied),
            PageSection("kept", "The data in this page", notes=cut),
        ],
        commands=[swept.command],
        files=files,
    )


def _inputs(swept: Swept) -> list[tuple[str, Question]]:
    """A case for each cluster and model."""
    cases = {(display_name(case.cluster), display_name(case.model)): case for case in swept.cases}
    return [(cluster, case) for (cluster, _), case in list(cases.items())[:_MAX_INPUTS]]


def _few(lines: Sequence[str]) -> list[str]:
    """The first of many."""
    left = len(lines) - _MAX_TEXTS
    return [*lines[:_MAX_TEXTS], *([f"and {left:,} more"] if left > 0 else [])]


def _figure(swept: Swept, measure: Measure) -> Figure:
    chart, words = _chart(swept, measure)
    shape = "; hollow points do" if swept.across else "; pale bars do"
    misfits = any(not entry.fits for entry in swept.all)
    return Figure(
        title=measure.title,
        note=f"Intervals are of 90 %{f'{shape} not fit in memory' * misfits}.{words}",
        label=f"{measure.title} by {' and '.join(swept.paths)}",
        chart=chart,
    )


def _speed(swept: Swept) -> PageSection:
    """Throughput, and a table of every case."""
    table = tables.speeds(swept.all[:_MAX_ROWS])
    named = replace(table, columns=("case", *table.columns[1:]))
    first, *_ = measures(swept)
    chart = replace(_figure(swept, first), table=named)
    return PageSection("speed", "Speed", figures=[chart], notes=_cut_rows(swept))


def _money(swept: Swept) -> PageSection:
    """Days and money by what varies; against each other where the cases are few."""
    every = swept.all
    _, *others = measures(swept)
    if not others:
        return PageSection("money", "Days and money")
    few = len(every) <= _MAX_ON_FRONT
    table = tables.trainings(every[:_MAX_ROWS])
    if table:
        table = replace(table, columns=("cluster", "case", *table.columns[2:]))
    figures = [_figure(swept, measure) for measure in others]
    figures[0] = replace(figures[0], table=table)
    if few:
        lined = [
            replace(entry, strategy=line) if swept.across else entry
            for entry, (_, _, line) in zip(every, swept.placed, strict=True)
        ]
        front = sections.money(lined, [entry.strategy for entry in lined])
        if len({(entry.cluster, entry.result.gpus) for entry in every}) > 1:  # else one figure
            figures += [replace(each, title="Money by days", table=None) for each in front.figures]
    shown = every[:_MAX_ROWS]
    basis = totals.basis_lines([entry.case for entry in shown], [entry.totals for entry in shown])
    return PageSection("money", "Days and money", figures=figures, notes=basis)


def _cut_rows(swept: Swept) -> list[str]:
    count = len(swept.all)
    if count <= _MAX_ROWS:
        return []
    return [f"Tables of this page have the first {_MAX_ROWS} of {count:,} cases."]


def _files(swept: Swept) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """All figures, of as many cases as a page can hold; and what it cannot."""
    cases = len(swept.cases)
    texts = [json.dumps(row) for row in swept.rows]
    fitting = _fitting([len(text) + 2 for text in texts])
    frame = to_frame(swept.cases, swept.outcomes, swept.settings, swept.goal, swept.tokens)
    head, *lines = frame.to_csv(index=False).splitlines(keepends=True)
    kept = _fitting([len(line) for line in lines])
    inside = ",\n".join(texts[:fitting])
    cut = []
    if kept < len(lines) or fitting < cases:
        cut.append(
            f"Of {cases:,} cases the first {min(kept, cases):,} are in sweep.csv, the first"
            f" {fitting:,} in sweep.json; --csv and --json write all of them."
        )
    return {
        "sweep.csv": ("text/csv", "".join([head, *lines[:kept]])),
        "sweep.json": ("application/json", f"[{inside}]"),
    }, cut


def _fitting(sizes: Sequence[int]) -> int:
    """How many of the first ones there is room for."""
    room = _MAX_CHARACTERS
    for count, size in enumerate(sizes):
        room -= size
        if room < 0:
            return count
    return len(sizes)
