"""The page of `co2sim solve`: which value of a number reaches a target, and how sure that is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import altair as alt
import pandas as pd

from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal, remark
from co2sim.report import sections, tables
from co2sim.report.chart_style import (
    BAND,
    HEIGHT,
    TEXT,
    Encoding,
    NumberAxis,
    Rows,
    Spec,
    by_colour,
    data,
    figure_tips,
    interval,
    number_axis,
    prefixed,
    scale_of,
    spec,
    wide,
)
from co2sim.report.html import Figure, Page, PageSection
from co2sim.report.tables import Answered, Table
from co2sim.report.text import solve
from co2sim.report.text.solve import crossing
from co2sim.studies.grid import display_name, offer_name, strategy_title
from co2sim.studies.sensitivity import Sensitivity
from co2sim.studies.solve import Solved, ValueRange
from co2sim.studies.targets import Metric


@dataclass(frozen=True, kw_only=True)
class AllSolved:
    """What was solved, for every case and target; those of one case follow each other.

    `results` are those of the cases as they are, by strategy, as far as they can be simulated;
    `levers` what a tenth more of each number does to them. `command` repeats it all.
    """

    cases: Sequence[Question]
    found: Sequence[Solved]
    results: Mapping[str, Result]
    levers: Mapping[str, Sequence[Sensitivity]]
    tokens: float | None
    goal: Goal
    command: str

    @cached_property
    def names(self) -> list[str]:
        """The strategies."""
        return [strategy_title(case.strategy) for case in self.cases]

    @cached_property
    def by_target(self) -> list[list[Solved]]:
        """What was solved, by target."""
        wanted = list(dict.fromkeys(solved.target for solved in self.found))
        return [[one for one in self.found if one.target == target] for target in wanted]

    @cached_property
    def as_they_are(self) -> list[Answered]:
        """The cases that can be simulated as they are."""
        return [
            Answered(offer_name(case.cluster), name, case, self.results[name], None)
            for name, case in zip(self.names, self.cases, strict=True)
            if name in self.results
        ]


def page(answers: AllSolved) -> Page:
    """Nothing is simulated for it."""
    axis = answers.found[0].axis
    shown = answers.as_they_are
    return Page(
        screen=solve.screen(answers.found, answers.results),
        sections=[
            *(_reached(group, number, answers) for number, group in enumerate(answers.by_target)),
            sections.gains({f"{name}, as it is": each for name, each in answers.levers.items()}),
            sections.trust(shown, shown) if shown else PageSection("trust", "How sure this is"),
            sections.inputs_of(
                [(display_name(case.cluster), case) for case in answers.cases[:1]],
                {axis.path: f"{axis.shown(axis.low)} to {axis.shown(axis.high)}"},
            ),
        ],
        commands=_commands(answers),
        files=_files(answers),
    )


def _reached(group: Sequence[Solved], turn: int, answers: AllSolved) -> PageSection:
    """The figure over the number, and the answers."""
    said = remark(solve.trainings([solved.case for solved in group], answers.results), answers.goal)
    target, axis = group[0].target, group[0].axis
    metric = target.metric
    side = "at least" if metric.more else "at most"
    chart = Figure(
        title="",
        note=f"Diamonds: from where the figure is {side} what the dashed lines say, with the 90 %"
        " interval of that value. Bands are 90 % intervals of the figure.",
        label=f"{metric.words} by {axis.path}, a line for each strategy",
        chart=_chart(group, [strategy_title(solved.case.strategy) for solved in group]),
        table=_points(group),
    )
    reached = Figure(f"{axis.path} for {target.name}", table=tables.reached(group))
    return PageSection(
        key=f"target-{turn}",
        title=f"{metric.words[0].upper()}{metric.words[1:]}, by {axis.path}",
        figures=[chart, reached],
        notes=[*solve.remarks(group), *([said] if said else [])],
    )


def _points(group: Sequence[Solved]) -> Table:
    """Every value that was looked at."""
    metric, axis = group[0].target.metric, group[0].axis
    rows = []
    for solved in group:
        name = strategy_title(solved.case.strategy)
        for (value, figure), band in zip(solved.points, solved.bands, strict=True):
            said = "does not fit" if figure is None else metric.shown(figure, solved.currency)
            ends = [metric.shown(end, solved.currency) for end in band or ()]
            rows.append([name, axis.shown(value), said, " to ".join(ends) or "-"])
    return Table(("strategy", axis.path, group[0].target.name, "90 % interval"), rows)


def _commands(answers: AllSolved) -> list[str]:
    """Which repeats it, and what shows the figures at the answers."""
    said = [f"# to see all of it\n{answers.command}"]
    lines = solve.checks(answers.found, answers.tokens, answers.goal)
    return [*said, *("# {}\n{}".format(*line.split(": ", 1)) for line in lines)]


def _files(answers: AllSolved) -> dict[str, tuple[str, str]]:
    plain = [solve.plain(solved, answers.levers, answers.results) for solved in answers.found]
    rows = [
        {
            "strategy": answer["strategy"],
            "number": answer["number"],
            "unit": answer["unit"],
            "target": answer["target"],
            "value": point["value"],
            "figure": point["figure"],
            "figure_low": (point["interval"] or (None, None))[0],
            "figure_high": (point["interval"] or (None, None))[1],
        }
        for answer in plain
        for point in answer["points"]
    ]
    return {
        "solve.csv": ("text/csv", pd.DataFrame(rows).to_csv(index=False)),
        "solve.json": ("application/json", json.dumps(plain, indent=1)),
    }


def _chart(solved: Sequence[Solved], names: Sequence[str]) -> Spec:
    """The figure of a target over the number, a line for each strategy, and where it is enough."""
    target, currency = solved[0].target, solved[0].currency
    across = number_axis(solved[0].axis)
    rows = _eventful(
        [row for each in solved for row in _chart_points(each, across)], solved, across
    )
    levels = target.values  # noqa: PD011 - of a target
    figures = [row["value"] for row in rows if row["value"] is not None] + [*levels]
    drawn = [row["x"] for row in rows]
    y = _upright(target.metric, currency, log=target.metric.unit != "share" and wide(figures))
    x, colour = across.encoding("x", drawn, log=True), by_colour("strategy", names)
    encoding: Encoding = {"x": x, "y": y, "color": colour}
    base = alt.Chart(data(rows)).encode(**encoding)
    *tips, _memory = figure_tips(target.name, alt.Tooltip("at:N", title=across.path))
    limits = [{"value": value, "words": target.metric.shown(value, currency)} for value in levels]
    lines = alt.Chart(data(limits)).encode(y=y)
    layers = [
        interval(rows, "y", encoding, area=True, opacity=BAND),
        base.mark_line(),
        base.mark_point(size=30, filled=True).encode(tooltip=tips),
        lines.mark_rule(strokeDash=[4, 3], color=TEXT),
        lines.mark_text(align="left", dx=4, dy=-6, color=TEXT, fontSize=11).encode(
            x=alt.value(0), text="words:N"
        ),
    ]
    if marks := [row for each in solved for row in _crossings(each, across)]:
        layers += _marked(marks, encoding)
    return spec(alt.layer(*layers), HEIGHT + 60)


_STILL = 0.02
"""A figure that moves by less than this share of all that it does stands still."""


def _eventful(rows: Rows, group: Sequence[Solved], across: NumberAxis) -> Rows:
    """The points between the first and the last place where a figure moves, or is enough."""
    ends = [end for each in group for row in _crossings(each, across) for end in _spread(row)]
    drawn = sorted({row["x"] for row in rows})
    for name in dict.fromkeys(row["strategy"] for row in rows):
        line = [row for row in rows if row["strategy"] == name and row["value"] is not None]
        line.sort(key=lambda row: row["x"])
        values = [row["value"] for row in line]
        still = _STILL * (max(values, default=0.0) - min(values, default=0.0))
        moving = [row["x"] for row in line if abs(row["value"] - values[0]) > still]
        moved = [row["x"] for row in line if abs(row["value"] - values[-1]) > still]
        ends += [*moving[:1], *moved[-1:]]
    if not ends:
        return rows
    low = max([x for x in drawn if x < min(ends)], default=drawn[0])
    high = min([x for x in drawn if x > max(ends)], default=drawn[-1])
    return [row for row in rows if low <= row["x"] <= high]


def _spread(row: dict[str, Any]) -> list[float]:
    return [end for end in (row["x"], row["low"], row["high"]) if end is not None]


def _chart_points(each: Solved, across: NumberAxis) -> Rows:
    strategy, metric = strategy_title(each.case.strategy), each.target.metric
    return [
        {
            "strategy": strategy,
            "x": value * across.factor,
            "at": each.axis.shown(value),
            "value": figure,
            "shown": "" if figure is None else metric.shown(figure, each.currency),
            "low": band and band[0],
            "high": band and band[1],
            "interval": band and " to ".join(metric.shown(end, each.currency) for end in band),
        }
        for (value, figure), band in zip(each.points, each.bands, strict=True)
    ]


def _crossings(each: Solved, across: NumberAxis) -> Rows:
    """Where the figure crosses the values of the target, with the interval of the one crossing."""
    rows: Rows = []
    for answer in each.answers:
        sides = (crossing(spans or ()) for spans in (answer.hoped, answer.sure))
        ends = [end for end in sides if end is not None]
        edges = _edges(answer.met)
        ends = ends if len(edges) == 1 and len(ends) > 1 else []
        rows += [
            {
                "strategy": strategy_title(each.case.strategy),
                "x": edge * across.factor,
                "at": each.axis.shown(edge),
                "value": answer.value,
                "shown": each.target.metric.shown(answer.value, each.currency),
                "low": min(ends) * across.factor if ends else None,
                "high": max(ends) * across.factor if ends else None,
                "interval": " to ".join(map(each.axis.shown, sorted(ends))),
            }
            for edge in edges
        ]
    return rows


def _edges(met: Sequence[ValueRange]) -> list[float]:
    """Ends of ranges that are crossings."""
    ends = [(span.low, span.open_low) for span in met] + [(s.high, s.open_high) for s in met]
    return [end for end, is_open in ends if not is_open]


def _marked(marks: Rows, encoding: Encoding) -> list[Any]:
    """Diamonds, and thick lines for their intervals."""
    tips = ["strategy:N", alt.Tooltip("shown:N", title="reached"), alt.Tooltip("at:N", title="at")]
    tips.append(alt.Tooltip("interval:N", title="90 % interval"))
    diamonds = alt.Chart(data(marks)).mark_point(shape="diamond", size=130, filled=True, opacity=1)
    rules = interval(marks, "x", encoding, strokeWidth=3, opacity=0.6)
    return [rules, diamonds.encode(**encoding, tooltip=tips)]


def _upright(metric: Metric, currency: str | None, *, log: bool) -> alt.Y:
    title = {"money": f"{metric.words}, {currency or 'USD'}"}
    formats = {"share": ".0%", "days": "~g", "money": "~s", "": "~s"}
    axis = alt.Axis(labelExpr=prefixed("s"))
    if metric.unit != "s":
        axis = alt.Axis(format=formats[metric.unit])
    return alt.Y(
        "value:Q",
        title=title.get(metric.unit, metric.words),
        scale=scale_of(log=log, padding=10),
        axis=axis,
    )
