"""The page of `co2sim sweep`: figures over what varies, as lines or as bars."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import altair as alt

from co2sim.common.errors import Co2simError
from co2sim.common.units import parse, parse_price
from co2sim.prediction.intervals import undecided
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.report import sections, tables
from co2sim.report.chart_style import (
    FAINT,
    HEIGHT,
    STRATEGIES,
    TEXT,
    NumberAxis,
    Rows,
    Spec,
    banded,
    data,
    high,
    interval,
    log_ticks,
    number_axis,
    picking,
    scale_of,
    spec,
    wide,
)
from co2sim.report.html import Figure, Page, PageSection
from co2sim.report.tables import Answered
from co2sim.report.text import totals
from co2sim.studies.grid import Setting, display_name, offer_names, setting_name, strategy_title
from co2sim.studies.run_all import Failure, Outcome
from co2sim.studies.table import to_frame
from co2sim.studies.targets import Axis, axis_of

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

    `rows` are what --json prints of them. `missing` says how many were done where an interrupt
    left some out. `command` repeats it all.
    """

    cases: Sequence[Question]
    settings: Sequence[Setting]
    outcomes: Sequence[Outcome]
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
        found = totals.totals_for(self.cases, self.outcomes, self.tokens, self.goal)
        every = zip(self.names, self.cases, self.outcomes, found, strict=True)
        offers = offer_names(case.cluster for case in self.cases)
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

    def answer(self) -> list[str]:
        """The best case: the cheapest and the fastest training, or the highest throughput."""
        if self.tokens is not None:
            return totals.in_brief(self._trainings())
        if not self._ranked:
            return [f"None of {len(self.all):,} cases fits in memory."]
        first = self._ranked[0]
        return [f"{first.strategy} is the fastest at {sections.speed_of(first.result)}."]

    def _trainings(self) -> totals.Trainings:
        return [(one.strategy, one.result, one.totals) for one in self.all]

    @cached_property
    def best(self) -> Answered:
        """The case that the answer names first."""
        return sections.best(self.all, self._trainings() if self.tokens is not None else ())

    @cached_property
    def _ranked(self) -> list[Answered]:
        """Those that fit in memory, the fastest first."""
        fitting = [one for one in self.all if one.result.fits_in_memory]
        return sorted(fitting, key=lambda one: -one.result.tokens_per_s)

    def doubts(self) -> list[str]:
        """What is missing, what failed, and whether the order of the first two is certain."""
        said = [f"This sweep was interrupted: {self.missing}."] if self.missing else []
        if self.failed:
            said.append(f"{len(self.failed):,} of {len(self.cases):,} cases failed.")
        first, second = ([*self._ranked, None, None])[:2]
        if first and second and self.tokens is None and undecided(first.result, second.result):
            said.append(
                f"Between it and {second.strategy} it is undecided: they differ by less than may be"
                " wrong."
            )
        return said


def _numbers(
    path: str, case: Question, texts: Sequence[str]
) -> tuple[NumberAxis, list[float]] | None:
    """The values in what they are drawn in; None unless all of them are numbers."""
    try:
        axis = axis_of(case, path)
        drawn = number_axis(axis)
        return drawn, [_value(text, axis) * drawn.factor for text in texts]
    except Co2simError:  # what nothing is solved for, such as jitter, may be a plain number
        pass
    try:
        return NumberAxis(path), [parse(text, "") for text in texts]
    except Co2simError:
        return None


def _value(text: str, axis: Axis) -> float:
    return parse_price(text)[0] if axis.unit == "USD/s" else parse(text, axis.unit)


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a case with the ends of its interval, in `unit`; `format` is that of its axis."""

    title: str
    unit: str
    format: str
    of: Callable[[Answered], tuple[float, float | None, float | None]]


def measures(swept: Swept) -> list[Measure]:
    """Throughput; days, and money where all prices are in one currency, for tokens to train."""
    unit = f"{swept.all[0].result.unit}s/s"
    found = [Measure(f"{unit} of all GPUs", unit, "~s", _speed_of)]
    totals = [one.totals for one in swept.all]
    if not any(totals):
        return found
    found.append(Measure("Days", "days", ",~r", _days))
    currencies = {total.currency for total in totals if total}
    if len(currencies) == 1 and None not in currencies:
        currency = str(currencies.pop())
        found.append(Measure(f"Cost, {currency}", currency, "~s", _cost))
    return found


def _speed_of(one: Answered) -> tuple[float, float | None, float | None]:
    result = one.result
    return result.tokens_per_s, result.tokens_per_s_low, result.tokens_per_s_high


def _days(one: Answered) -> tuple[float, float | None, float | None]:
    assert one.totals is not None
    return one.totals.days, one.totals.days_low, one.totals.days_high


def _cost(one: Answered) -> tuple[float, float | None, float | None]:
    found = one.totals
    assert found is not None
    assert found.cost is not None
    return found.cost, found.cost_low, found.cost_high


def _chart(swept: Swept, measure: Measure) -> tuple[Spec, str]:
    """Lines where the first thing that varies is a number, else bars; what was left out."""
    pairs = zip(swept.all, swept.placed, strict=True)
    known = [(one, place) for one, place in pairs if measure.of is _speed_of or one.totals]
    if swept.across is None:
        shown = [one for one, _ in known[:MAX_BARS]]
        return _bars(shown, measure), left_out("cases", len(known), MAX_BARS)
    lines: dict[str, Rows] = {}
    for one, (x, at, line) in known:
        lines.setdefault(line, []).append(_chart_row(one, measure, line, x, at))
    kept = [sorted(rows, key=_x) for rows in list(lines.values())[:MAX_LINES]]
    count = sum(map(len, kept))
    every = -(-count // MAX_POINTS)
    words = left_out("lines", len(lines), MAX_LINES)
    words += f" Of {count:,} points one in {every} is drawn." if every > 1 else ""
    words += picking([rows[0]["strategy"] for rows in kept])
    return _lines(swept.across, [row for rows in kept for row in rows[::every]], measure), words


def _x(row: dict[str, Any]) -> float:
    return float(row["x"])


def left_out(what: str, count: int, most: int) -> str:
    """What is said of more than a page can show."""
    return f" The first {most} of {count:,} {what} are drawn." if count > most else ""


def _chart_row(one: Answered, measure: Measure, line: str, x: float, at: str) -> dict[str, Any]:
    value, low, high_ = measure.of(one)
    return {
        "strategy": line,
        "x": x,
        "at": at,
        "value": value,
        "low": low,
        "high": high_,
        "fits": one.result.fits_in_memory,
    }


def _tips(measure: Measure) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("value:Q", title=measure.unit, format=",.4~r"),
        alt.Tooltip("low:Q", title="90 %: from", format=",.4~r"),
        alt.Tooltip("high:Q", title="to", format=",.4~r"),
        alt.Tooltip("fits:N", title="fits in memory"),
    ]


def _lines(across: NumberAxis, rows: Rows, measure: Measure) -> Spec:
    """A line for each combination of the others."""
    names = [row["strategy"] for row in rows]
    drawn = [row["x"] for row in rows]
    x = across.encoding("x", drawn, log=wide(drawn))
    ends = [end for row in rows for end in (row["value"], row["low"], row["high"]) if end]
    log = wide(ends)
    values = log_ticks(ends) if log else alt.Undefined
    scale, axis = scale_of(log=log, padding=10), alt.Axis(format=measure.format, values=values)
    y = alt.Y("value:Q", title=measure.unit, scale=scale, axis=axis)
    tips = [alt.Tooltip("strategy:N"), alt.Tooltip("at:N", title=across.path), *_tips(measure)]
    return spec(alt.layer(*banded(rows, x, y, names, tips, several=True)), HEIGHT)


def _bars(group: Sequence[Answered], measure: Measure) -> Spec:
    """A bar for each case, and a line for its interval."""
    rows = [_chart_row(one, measure, one.strategy, 0.0, "") for one in group]
    x = alt.X("value:Q", title=measure.unit, axis=alt.Axis(format=measure.format))
    bars = alt.Chart(data(rows)).mark_bar(color=TEXT)
    bars = bars.encode(
        x=x,
        y=STRATEGIES,
        opacity=alt.condition("datum.fits", alt.value(FAINT), alt.value(0.25)),
        tooltip=[alt.Tooltip("strategy:N", title="case"), *_tips(measure)],
    )
    ends = interval(rows, "x", {"x": x, "y": STRATEGIES}, strokeWidth=2, color=TEXT)
    return spec(alt.layer(bars, ends), high(group))


def page(swept: Swept) -> Page:
    """Nothing is simulated for it. Of very many cases the first ones are shown, and it says so."""
    every = swept.all
    files, cut = _files(swept)
    groups = dict(sorted(sections.by_cluster(every[:MAX_BARS]).items()))
    more = left_out("cases", len(every), MAX_BARS).strip()
    plain = [replace(one, strategy=one.result.strategy) for one in every]
    trust = sections.trust(plain, plain)
    return Page(
        answer=[_heading(swept), *swept.answer()],
        facts={
            "The answer": swept.answer(),
            "How sure": sections.surest(swept.best, *swept.doubts()),
            "Evidence": sections.evidence(swept.best),
        },
        doubts=[*swept.doubts(), *sections.predicted_with(every)],
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


def _heading(swept: Swept) -> str:
    """Model, tokens, batch and cluster, as far as they are the same; and the best case."""
    clusters = list(dict.fromkeys(one.cluster for one in swept.all))
    where = f" on {clusters[0]}" if len(clusters) == 1 else ""
    return f"{sections.about(swept.all, swept.tokens)}{where}: {swept.best.strategy}"


def _inputs(swept: Swept) -> list[tuple[str, Question]]:
    """A case for each cluster and model."""
    found = {(display_name(case.cluster), display_name(case.model)): case for case in swept.cases}
    return [(cluster, case) for (cluster, _), case in list(found.items())[:_MAX_INPUTS]]


def _few(lines: Sequence[str]) -> list[str]:
    """The first of many."""
    left = len(lines) - _MAX_TEXTS
    return [*lines[:_MAX_TEXTS], *([f"and {left:,} more"] if left > 0 else [])]


def _figure(swept: Swept, measure: Measure) -> Figure:
    chart, words = _chart(swept, measure)
    shape = "; hollow points do" if swept.across else "; pale bars do"
    misfits = any(not one.result.fits_in_memory for one in swept.all)
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
            replace(one, strategy=line) if swept.across else one
            for one, (_, _, line) in zip(every, swept.placed, strict=True)
        ]
        front = sections.money(lined, [one.strategy for one in lined])
        if len({(one.cluster, one.result.gpus) for one in every}) > 1:  # else they are one figure
            figures += [replace(one, title="Money by days", table=None) for one in front.figures]
    basis = totals.basis_lines(swept.cases[:_MAX_ROWS], [one.totals for one in every])
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
    for place, size in enumerate(sizes):
        room -= size
        if room < 0:
            return place
    return len(sizes)
