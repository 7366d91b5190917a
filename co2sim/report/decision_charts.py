"""Charts of decisions: a figure over the number that is solved for, and where an answer turns."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from co2sim.report.chart_style import (
    HEIGHT,
    ROW,
    TEXT,
    NumberAxis,
    Rows,
    Spec,
    by_strategy,
    data,
    number_axis,
    prefixed,
    scale_of,
    spec,
    wide,
)
from co2sim.report.text.solve import crossing
from co2sim.studies.grid import strategy_title
from co2sim.studies.sensitivity import BreakEven
from co2sim.studies.solve import Solved, ValueRange
from co2sim.studies.targets import Metric

_OPACITY = 0.18


def solved(found: Sequence[Solved], names: Sequence[str]) -> Spec:
    """The figure of a target over the number, a line for each strategy, and where it is enough."""
    target, metric = found[0].target, found[0].target.metric
    across = number_axis(found[0].axis)
    rows = _eventful([row for each in found for row in _points(each, across)], found, across)
    figures = [row["value"] for row in rows if row["value"] is not None]
    figures += target.values
    colour, _ = by_strategy(names)
    drawn = [row["x"] for row in rows]
    x = across.encoding("x", drawn, log=True)
    log = metric.unit != "share" and wide(figures)

    def upright(field: str) -> alt.Y:
        return _upright(field, metric, found[0].currency, log=log)

    y = upright("value")
    base = alt.Chart(data(rows)).encode(x=x, color=colour)
    banded = [row for row in rows if row["low"] is not None]
    tips = ["strategy:N", alt.Tooltip("at:N", title=across.path), *_tips(target.name)]
    limits = [
        {"value": value, "words": metric.shown(value, found[0].currency)} for value in target.values
    ]
    lines = alt.Chart(data(limits)).encode(y=y)
    layers = [
        *([_band(banded, x, upright("low"), colour)] if banded else []),
        base.mark_line().encode(y=y),
        base.mark_point(size=30, filled=True).encode(y=y, tooltip=tips),
        lines.mark_rule(strokeDash=[4, 3], color=TEXT),
        lines.mark_text(align="left", dx=4, dy=-6, color=TEXT, fontSize=11).encode(
            x=alt.value(0), text="words:N"
        ),
    ]
    marks = [row for each in found for row in _crossings(each, across)]
    if marks:
        layers += _marked(marks, x, across.encoding("low", drawn, log=True), y, colour)
    return spec(alt.layer(*layers), HEIGHT + 60)


_STILL = 0.02
"""A figure that moves by less than this share of all that it does stands still."""


def _eventful(rows: Rows, found: Sequence[Solved], across: NumberAxis) -> Rows:
    """The points between the first and the last place where a figure moves, or is enough."""
    ends = [end for each in found for row in _crossings(each, across) for end in _spread(row)]
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


def _band(rows: Rows, x: alt.X, low: alt.Y, colour: alt.Color) -> Any:
    area = alt.Chart(data(rows)).mark_area(opacity=_OPACITY)
    return area.encode(x=x, y=low, y2="high:Q", color=colour)


def _points(each: Solved, across: NumberAxis) -> Rows:
    strategy, metric = strategy_title(each.case.strategy), each.target.metric
    return [
        {
            "strategy": strategy,
            "x": value * across.factor,
            "at": each.axis.shown(value),
            "value": figure,
            "said": "" if figure is None else metric.shown(figure, each.currency),
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
        found = (crossing(spans or ()) for spans in (answer.hoped, answer.sure))
        ends = [end for end in found if end is not None]
        edges = _edges(answer.met)
        ends = ends if len(edges) == 1 and len(ends) > 1 else []
        rows += [
            {
                "strategy": strategy_title(each.case.strategy),
                "x": edge * across.factor,
                "at": each.axis.shown(edge),
                "value": answer.value,
                "said": each.target.metric.shown(answer.value, each.currency),
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


def _marked(marks: Rows, x: alt.X, low: alt.X, y: alt.Y, colour: alt.Color) -> list[Any]:
    """Diamonds, and thick lines for their intervals."""
    tips = ["strategy:N", alt.Tooltip("said:N", title="reached"), alt.Tooltip("at:N", title="at")]
    tips.append(alt.Tooltip("interval:N", title="90 % interval"))
    diamonds = alt.Chart(data(marks)).mark_point(shape="diamond", size=130, filled=True, opacity=1)
    layers = [diamonds.encode(x=x, y=y, color=colour, tooltip=tips)]
    sure = [row for row in marks if row["low"] is not None]
    if sure:
        rules = alt.Chart(data(sure)).mark_rule(strokeWidth=3, opacity=0.6)
        layers.insert(0, rules.encode(x=low, x2="high:Q", y=y, color=colour))
    return layers


def _tips(name: str) -> list[alt.Tooltip]:
    return [alt.Tooltip("said:N", title=name), alt.Tooltip("interval:N", title="90 % interval")]


def _upright(field: str, metric: Metric, currency: str | None, *, log: bool) -> alt.Y:
    title = {"money": f"{metric.words}, {currency or 'USD'}"}
    formats = {"share": ".0%", "days": "~g", "money": "~s", "": "~s"}
    axis = alt.Axis(labelExpr=prefixed("s"))
    if metric.unit != "s":
        axis = alt.Axis(format=formats[metric.unit])
    return alt.Y(
        f"{field}:Q",
        title=title.get(metric.unit, metric.words),
        scale=scale_of(log=log, padding=10),
        axis=axis,
    )


def turns(found: Sequence[BreakEven]) -> Spec:
    """How many times each number is what it is now where the answer turns."""
    rows: Rows = [
        {
            "what": f"{turn.what}\n{turn.shown_now} → {turn.shown_at}: {turn.winner} wins",
            "now": 1.0,
            "times": turn.at / turn.now,
            "place": place,
        }
        for place, turn in enumerate(found)
    ]
    log = alt.Scale(type="log", nice=False, padding=16)
    x = alt.X("times:Q", title="times what it is now", scale=log, axis=alt.Axis(format="~r"))
    base = alt.Chart(data(rows)).encode(y=alt.Y("place:O", title=None, axis=None))
    here = alt.Y("place:O", title=None, axis=None)
    tips = [alt.Tooltip("what:N", title="now, and where it turns")]
    now = alt.X("now:Q", title="times what it is now", scale=log)
    layers = [
        alt.Chart(data([{"now": 1.0}])).mark_rule(color=TEXT, strokeDash=[4, 3]).encode(x=now),
        base.mark_rule(strokeWidth=3, color=TEXT).encode(x=now, x2="times:Q", tooltip=tips),
        base.mark_point(size=90, filled=True, color=TEXT, opacity=1).encode(x=x, tooltip=tips),
        base.mark_text(
            align="left",
            dy=-26,
            color=TEXT,
            fontSize=11,
            lineBreak="\n",
            limit=alt.expr("width"),
        ).encode(x=alt.value(0), text=alt.Text("what:N"), y=here),
    ]
    return spec(alt.layer(*layers), 3 * ROW * len(rows))
