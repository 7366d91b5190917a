"""What charts share: Vega-Lite in the colours of the page, one for each strategy."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import altair as alt

from co2sim.console.figures import COLOURS
from co2sim.report.study import Answered

Spec: TypeAlias = dict[str, Any]
Rows: TypeAlias = list[dict[str, Any]]

TEXT = "currentColor"
"""Of the page, so that a chart is light, dark and printed as the page is."""
PALETTE = [TEXT if colour == "#000000" else colour for colour in COLOURS]
_SHAPES = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "stroke"]
HEIGHT = 280
ROW = 26
"""Pixels of a bar."""
_LINE = 15
"""Pixels of a line of text."""
_CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "axis": {
        "labelColor": TEXT,
        "titleColor": TEXT,
        "tickColor": TEXT,
        "domainColor": TEXT,
        "gridColor": TEXT,
        "gridOpacity": 0.15,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "legend": {
        "labelColor": TEXT,
        "titleColor": TEXT,
        "labelFontSize": 12,
        "orient": "bottom",
        "columns": 1,
        "labelLimit": 600,
        "symbolStrokeWidth": 2,
        "symbolOpacity": 1,
    },
    "view": {"stroke": None},
}


STRATEGIES = alt.Y(
    "strategy:N",
    sort=None,
    title=None,
    axis=alt.Axis(labelExpr="split(datum.label, ', ')", labelLimit=220),
)
"""One below the other, each option on a line of its own."""


def high(group: Sequence[Answered]) -> int:
    """Pixels for the labels of strategies."""
    return sum(max(ROW, 8 + _LINE * (1 + one.strategy.count(", "))) for one in group)


def points_of(
    rows: Rows, x: alt.X, y: alt.Y, names: Sequence[str], tips: Sequence[alt.Tooltip]
) -> list[alt.Chart]:
    """Points, hollow where a case does not fit in memory."""
    colour, shape = by_strategy(names)
    return [
        alt.Chart(data(here))
        .mark_point(size=60, filled=fits)
        .encode(x=x, y=y, color=colour, shape=shape, tooltip=list(tips))
        for fits in (True, False)
        if (here := [row for row in rows if row["fits"] == fits])
    ]


def by_strategy(names: Sequence[str]) -> tuple[alt.Color, alt.Shape]:
    """The same colour and shape for a strategy in every chart."""
    known = list(dict.fromkeys(names))
    shapes = alt.Scale(domain=known, range=cycled(_SHAPES, len(known)))
    return (
        alt.Color("strategy:N", title=None, scale=_colours(names)),
        alt.Shape("strategy:N", title=None, scale=shapes),
    )


def _colours(names: Sequence[str]) -> alt.Scale:
    known = list(dict.fromkeys(names))
    return alt.Scale(domain=known, range=cycled(PALETTE, len(known)))


def cycled(values: Sequence[str], count: int) -> list[str]:
    """So many of the values, from the first on again where they are too few."""
    return [values[at % len(values)] for at in range(count)]


def data(rows: Sequence[Mapping[str, Any]]) -> alt.InlineData:
    """Rows inside of a specification."""
    return alt.InlineData(values=[dict(row) for row in rows])


def spec(chart: Any, height: int) -> Spec:
    """As wide as the page lets it."""
    found: Spec = chart.properties(width="container", height=height).to_dict()
    found["config"] = _CONFIG
    found["autosize"] = {"type": "fit-x", "contains": "padding"}
    return found
