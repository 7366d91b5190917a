"""What charts share: Vega-Lite in the colours of the page, one for each thing on it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import altair as alt

from co2sim.common.plots import COLOURS
from co2sim.report.tables import Answered
from co2sim.schedule.schedule import Kind
from co2sim.studies.targets import Axis

Spec: TypeAlias = dict[str, Any]
Rows: TypeAlias = list[dict[str, Any]]
Drawn: TypeAlias = Any
"""A chart of Altair, whose methods forget of which kind it is."""

TEXT = "currentColor"
"""Of the page, so that a chart is light, dark and printed as the page is."""
PALETTE = [TEXT if colour == "#000000" else colour for colour in COLOURS[:5] + COLOURS[6:7]]
"""Of strategies, or of offers; sky and grey are those of time."""
SKY, TAN, BROWN, GREY = "#56B4E9", "#DFC27D", "#8C510A", "#888888"
"""Of a round: computing, computing with communication behind it, communication, waiting."""
_PASSES = {"forward": "#A6D8F5", "backward": SKY}
_COMPUTING = ("#2E7FB0", "#8FA9B8", "#1D5A80", "#C9DCE6", "#6C7F8A", "#B7C4CB")
_SENDING = (BROWN, "#BF812D", TAN, "#5C3505", "#F0DDB0", "#A6611A")
_SENT = {kind.value.replace("_", "-") for kind in Kind}
_SHAPES = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "stroke"]
HEIGHT = 280
_CROWD = 8
"""Lines: with more of them a chart shows no bands but of those that are picked."""
_LETTER = 7
"""Pixels, about."""
ROW = 26
"""Pixels of a bar."""
_LINE = 15
"""Pixels of a line of text."""
CONFIG: Spec = {
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
        "labelFlush": False,
        "labelSeparation": 6,
    },
    "legend": {
        "labelColor": TEXT,
        "titleColor": TEXT,
        "labelFontSize": 12,
        "orient": "bottom",
        "columns": 1,
        "symbolLimit": 0,
        "labelLimit": {"expr": "max(160, width - 30)"},
        "symbolStrokeWidth": 2,
        "symbolOpacity": 1,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "view": {"stroke": None},
}


def of_works(kinds: Sequence[str]) -> list[str]:
    """A colour for each kind of work: blues of what computes, browns of what communicates."""
    sends = [kind for kind in kinds if kind in _SENT]
    others = [kind for kind in kinds if kind not in _SENT | _PASSES.keys()]
    found = _PASSES | dict(zip(sends, cycled(_SENDING, len(sends)), strict=True))
    found |= dict(zip(others, cycled(_COMPUTING, len(others)), strict=True))
    return [found[kind] for kind in kinds]


FAINT = 0.6
"""Opacity of bars in the colour of the text: of what is no strategy."""

COLUMNS = alt.expr("width < 400 ? 1 : 2")
"""Of a legend with many short names; one on a phone."""

STRATEGIES = alt.Y(
    "strategy:N",
    sort=None,
    title=None,
    axis=alt.Axis(
        labelExpr="split(datum.label, ', ')",
        labelLimit=220,
        labelOffset={
            "condition": [
                {"test": f"length(split(datum.label, ', ')) == {lines}", "value": -7 * (lines - 1)}
                for lines in range(2, 9)
            ],
            "value": 0,
        },
    ),
)
"""One below the other, each option on its own line, in the middle of the bar."""


def high(group: Sequence[Answered]) -> int:
    """Pixels for bars with the labels of strategies, all as high as the highest label needs."""
    return len(group) * row_height(max(1 + one.strategy.count(", ") for one in group))


def row_height(lines: int) -> int:
    """Pixels of a row, by the lines of its label."""
    return max(ROW, 8 + _LINE * lines)


def points_of(
    rows: Rows, x: alt.X, y: alt.Y, names: Sequence[str], tips: Sequence[alt.Tooltip]
) -> list[alt.Chart]:
    """Points, hollow where a case does not fit in memory."""
    colour, shape = by_strategy(names)
    return [
        alt.Chart(data(here))
        .mark_point(size=60, filled=fits)
        .encode(x=x, y=y, color=colour, shape=shape, opacity=faded(names), tooltip=list(tips))
        for fits in (True, False)
        if (here := [row for row in rows if row["fits"] == fits])
    ]


def by_strategy(names: Sequence[str]) -> tuple[alt.Color, alt.Shape]:
    """The same colour and shape for a strategy in every chart."""
    known = list(dict.fromkeys(names))
    shapes = alt.Scale(domain=known, range=cycled(_SHAPES, len(known)))
    legend = columns_for(known)
    return (
        alt.Color("strategy:N", title=None, scale=_colours(names), legend=legend),
        alt.Shape("strategy:N", title=None, scale=shapes, legend=legend),
    )


def crowded(names: Sequence[str]) -> bool:
    """Whether too many lines cross to tell one from another."""
    return len(dict.fromkeys(names)) > _CROWD


def columns_for(known: Sequence[str], **options: Any) -> alt.Legend:
    """As many columns as there is room for, however wide the chart is."""
    longest = 40 + _LETTER * max(map(len, known))
    return alt.Legend(columns=alt.expr(f"max(1, floor(width / {longest}))"), **options)


def picking(names: Sequence[str]) -> str:
    """What is said of a crowd."""
    if not crowded(names):
        return ""
    return " Click a name in the legend to see it alone, with its interval; with shift, more."


def picked(layers: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Layers of lines and points of a crowd, of which the legend picks; bands show those only."""
    if not crowded(names):
        return list(layers)
    pick = alt.selection_point(name="pick", fields=["strategy"], bind="legend")
    first, *others = layers
    return [first.add_params(pick), *others]


def faded(names: Sequence[str], shown: float = 1.0, *, band: bool = False) -> Any:
    """The opacity of a line, or a band, in a crowd of which the legend picks some."""
    if not crowded(names):
        return alt.value(shown)
    chosen = alt.selection_point(name="pick")
    if band:
        return alt.condition(chosen, alt.value(shown), alt.value(0.0), empty=False)
    return alt.condition(chosen, alt.value(shown), alt.value(0.1))


def _colours(names: Sequence[str]) -> alt.Scale:
    known = list(dict.fromkeys(names))
    return alt.Scale(domain=known, range=cycled(PALETTE, len(known)))


def by_shape(field: str, names: Sequence[str]) -> alt.Shape:
    """A shape for each, in its own legend."""
    known = list(dict.fromkeys(names))
    scale = alt.Scale(domain=known, range=cycled(_SHAPES, len(known)))
    legend = columns_for(known, symbolFillColor=TEXT, symbolStrokeColor=TEXT)
    return alt.Shape(f"{field}:N", title=None, scale=scale, legend=legend)


def by_colour(field: str, names: Sequence[str]) -> alt.Color:
    """A colour for each, in its own legend."""
    known = list(dict.fromkeys(names))
    return alt.Color(f"{field}:N", title=None, scale=_colours(known), legend=columns_for(known))


def cycled(values: Sequence[str], count: int) -> list[str]:
    """This number of values, from the first on again where they are too few."""
    return [values[at % len(values)] for at in range(count)]


def data(rows: Sequence[Mapping[str, Any]]) -> alt.InlineData:
    """Rows inside of a specification."""
    return alt.InlineData(values=[dict(row) for row in rows])


def spec(chart: Any, height: int) -> Spec:
    """As wide as the page lets it."""
    found: Spec = chart.properties(width="container", height=height).to_dict()
    below = {"bottom": {"direction": "vertical", "anchor": "start", "margin": 6}}
    found["config"] = CONFIG | {"legend": CONFIG["legend"] | {"layout": below}}
    found["autosize"] = {"type": "fit-x", "contains": "padding"}
    return found


_WIDE = 8.0
"""Values that differ by more than such a factor are drawn on a log scale."""
_DAY = 86400.0
_LONG = 60.0
"""Seconds from which on times are drawn in days."""
_DECADES = 100.0
"""Over such a factor only powers of ten have ticks."""
_MAX_TICKS = 9


@dataclass(frozen=True, slots=True)
class NumberAxis:
    """The number at a path: `factor` times its value is drawn, in `unit`.

    `prefixed` says that the unit may have a prefix, as in Gbit/s.
    """

    path: str
    unit: str = ""
    factor: float = 1.0
    prefixed: bool = False

    def encoding(self, field: str, drawn: Sequence[float], *, log: bool) -> alt.X:
        """The channel of a field that holds one of the values `drawn`."""
        axis = alt.Axis(labelExpr=self.label)
        few = sorted(set(drawn))
        if len(few) <= _MAX_TICKS:
            axis = alt.Axis(labelExpr=self.label, values=few)
        elif log and max(drawn) >= _DECADES * min(drawn):
            axis = alt.Axis(labelExpr=self.label, values=_powers(min(drawn), max(drawn)))
        return alt.X(f"{field}:Q", title=self.path, scale=scale_of(log=log), axis=axis)

    @property
    def label(self) -> str:
        """An expression of Vega for the label of a tick: a number, with its unit."""
        if self.prefixed:
            return prefixed(self.unit)
        behind = f" + ' {self.unit}'" if self.unit else ""
        return f"format(datum.value, ',~r'){behind}"


def prefixed(unit: str) -> str:
    """An expression of Vega for a number with a prefix before its unit: "25 Gbit/s"."""
    return f"replace(format(datum.value, '~s'), regexp('([a-zA-Zµ]?)$'), ' $1') + '{unit}'"


def number_axis(axis: Axis) -> NumberAxis:
    """How a number is drawn: bandwidths between nodes in bits, long times in days."""
    path = axis.path
    if axis.unit == "USD/s":
        return NumberAxis(path, f"{axis.currency}/h", 3600.0)
    if axis.unit == "B/s" and path.startswith(("inter.", "wan.")):
        return NumberAxis(path, "bit/s", 8.0, prefixed=True)
    if axis.unit == "s" and axis.low >= _LONG:
        return NumberAxis(path, "days", 1 / _DAY)
    return NumberAxis(path, axis.unit, 1.0, prefixed=bool(axis.unit))


def scale_of(*, log: bool, padding: int = 16) -> alt.Scale:
    """Around what is drawn, without a zero that is not drawn."""
    if log:
        return alt.Scale(type="log", nice=False, padding=padding)
    return alt.Scale(nice=False, zero=False, padding=padding)


def log_ticks(values: Iterable[float]) -> Any:
    """The 1, 2 and 5 of every decade of values, or more; Vega's own where these are too few."""
    known = [value for value in values if value > 0]
    low, high = min(known, default=1.0), max(known, default=1.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        found = [tick for tick in ticks if low <= tick <= high]
        if _FEW <= len(found) <= _MAX_TICKS:
            return found
    return alt.Undefined


_FEW = 3
"""Ticks that an axis needs at least."""


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten in a range."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = (last - first) // _MAX_TICKS + 1
    return [10.0**power for power in range(first, last + 1, step)]


def wide(values: Iterable[float]) -> bool:
    """Whether values are better drawn on a log scale."""
    known = list(values)
    return bool(known) and min(known) > 0 and max(known) > _WIDE * min(known)
