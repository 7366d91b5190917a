"""What charts share: Vega-Lite in the colours of the page, one for each thing on it."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import altair as alt
import vl_convert

from co2sim.common.plots import COLOURS
from co2sim.common.units import number
from co2sim.report.text.answer import labels
from co2sim.schedule.schedule import Kind
from co2sim.studies.targets import Axis

Spec: TypeAlias = dict[str, Any]
Encoding: TypeAlias = dict[str, Any]
"""Channels of a chart by name."""
Rows: TypeAlias = list[dict[str, Any]]
Ranged: TypeAlias = tuple[float, float | None, float | None]
"""A figure, and the ends of its 90 % interval, None where it has none."""
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
        "labelLimit": {"expr": "max(250, width - 30)"},
        "symbolStrokeWidth": 2,
        "symbolOpacity": 1,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "view": {"stroke": None},
}


def of_works(kinds: Sequence[str]) -> dict[str, str]:
    """A colour for each kind of work: blues of what computes, browns of what communicates."""
    sends = [kind for kind in kinds if _sent(kind)]
    others = [kind for kind in kinds if not _sent(kind) and kind not in _PASSES]
    colours = _PASSES | dict(zip(sends, cycled(_SENDING, len(sends)), strict=True))
    colours |= dict(zip(others, cycled(_COMPUTING, len(others)), strict=True))
    return {kind: colours[kind] for kind in kinds}


def _sent(kind: str) -> bool:
    """Whether it is a collective, such as "all-reduce" or "all_reduce over world"."""
    return kind.partition(" over ")[0].replace("_", "-") in _SENT


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


def high(names: Sequence[str]) -> int:
    """Pixels for bars with the labels of strategies, all as high as the highest label needs."""
    lines = max(1 + name.count(", ") for name in names)
    return len(names) * max(ROW, 8 + _LINE * lines)


def figure_row(
    strategy: str, figure: Ranged, *, fits: bool, memory: str = "", **where: Any
) -> dict[str, Any]:
    """A figure with its interval, also as texts for tips; `where` it is drawn.

    `memory` says more than whether it `fits`.
    """
    value, low, high = figure
    ends = {} if low is None or high is None else {"low": low, "high": high}
    return {
        "strategy": strategy,
        "value": value,
        "low": None,
        "high": None,
        "shown": number(value),
        "interval": " to ".join(map(number, ends.values())),
        "fits": fits,
        "memory": memory or ("fits" if fits else "DOES NOT FIT"),
        **ends,
        **where,
    }


def figure_tips(unit: str, *where: alt.Tooltip) -> list[alt.Tooltip]:
    """What is said of a `figure_row`."""
    return [
        alt.Tooltip("strategy:N"),
        *where,
        alt.Tooltip("shown:N", title=unit),
        alt.Tooltip("interval:N", title="90 % interval"),
        alt.Tooltip("memory:N"),
    ]


def ends_of(rows: Rows) -> list[float]:
    """All that an axis of `figure_row`s has to have room for."""
    values = (row[key] for row in rows for key in ("value", "low", "high"))
    return [value for value in values if value is not None]


def fit_points(rows: Rows, encoding: Encoding, **mark: Any) -> list[alt.Chart]:
    """Points, hollow where a case does not fit in memory."""
    return [
        alt.Chart(data(here)).mark_point(filled=fits, **mark).encode(**encoding)
        for fits in (True, False)
        if (here := [row for row in rows if row["fits"] == fits])
    ]


def interval(
    rows: Rows, along: str, encoding: Encoding, *, area: bool = False, **mark: Any
) -> Drawn:
    """From `low` to `high` along a channel, "x" or "y", of the rows that have both: lines or areas.

    In `encoding` the channel is that of the value.
    """
    low = encoding[along].copy()
    low.shorthand = "low:Q"
    base = alt.Chart(data(rows)).transform_filter("isValid(datum.low)")
    drawn: Drawn = base.mark_area(**mark) if area else base.mark_rule(**mark)
    return drawn.encode(**{**encoding, along: low, f"{along}2": "high:Q"})


BAND = 0.18
"""Opacity of an interval behind its line."""


def banded(
    rows: Rows,
    x: alt.X,
    y: alt.Y,
    names: Sequence[str],
    tips: Sequence[alt.Tooltip],
    *,
    several: bool,
) -> list[alt.Chart]:
    """Intervals, lines (with several places on the x axis) and points, one colour a strategy.

    `rows` have a `value`, which `y` names, and `low` and `high`, which are None without interval.
    """
    colour, shape = by_strategy(names)
    encoding: Encoding = {"x": x, "y": y, "color": colour}
    thin = faded(names, BAND if several else 2 * BAND, band=True)
    thick = {} if several else {"strokeWidth": 5}
    has_ends = any(row["low"] is not None for row in rows)
    band = interval(rows, "y", encoding | {"opacity": thin}, area=several, **thick)
    encoding["opacity"] = faded(names)
    lines = [alt.Chart(data(rows)).mark_line().encode(**encoding)] if several else []
    points = fit_points(rows, encoding | {"shape": shape, "tooltip": list(tips)}, size=60)
    return picked([*([band] if has_ends else []), *lines, *points], names)


def ranged_bars(
    rows: Rows, encoding: Encoding, opacity: float, tips: Sequence[alt.Tooltip], ink: str = TEXT
) -> Drawn:
    """A bar for each `figure_row`, pale where it does not fit, and a line for its interval.

    Bars have the colour of the `encoding`, or else the `ink` of the lines.
    """
    faint = alt.condition("datum.fits", alt.value(opacity), alt.value(0.4 * opacity))
    fill = alt.Undefined if "color" in encoding else ink
    bars = (
        alt.Chart(data(rows)).mark_bar(color=fill).encode(**encoding, opacity=faint, tooltip=tips)
    )
    across = {key: channel for key, channel in encoding.items() if key != "color"}
    return alt.layer(bars, interval(rows, "x", across, strokeWidth=2, color=ink))


def stacked(source: alt.Data, x: alt.X, y: alt.Y, colour: alt.Color, tips: Sequence[Any]) -> Drawn:
    """Bars whose parts follow each other by `place`."""
    bars = alt.Chart(source).mark_bar()
    return bars.encode(x=x, y=y, color=colour, order=alt.Order("place:Q"), tooltip=list(tips))


def line_at(channel: alt.X | alt.Y, value: float, *, dash: Sequence[int] = (4, 3)) -> Drawn:
    """A dashed line across the chart where a channel has a value."""
    field = str(channel.shorthand).removesuffix(":Q")
    rule = alt.Chart(data([{field: value}])).mark_rule(strokeDash=list(dash), color=TEXT)
    return rule.encode(**{"x" if isinstance(channel, alt.X) else "y": channel})


def gpu_axis(sizes: Sequence[int], field: str = "gpus") -> alt.X:
    """Numbers of GPUs, each with its label."""
    return alt.X(
        f"{field}:Q",
        title="GPUs",
        scale=alt.Scale(type="log", base=2, nice=False, padding=16),
        axis=alt.Axis(values=list(sizes), format=",d"),
    )


STAR = (
    "M0,-1L0.225,-0.309L0.951,-0.309L0.363,0.118L0.588,0.809L0,0.382L-0.588,0.809"
    "L-0.363,0.118L-0.951,-0.309L-0.225,-0.309Z"
)


def by_strategy(names: Sequence[str]) -> tuple[alt.Color, alt.Shape]:
    """The same colour and shape for a strategy in every chart."""
    return by_colour("strategy", names), by_shape("strategy", names)


def crowded(names: Sequence[str]) -> bool:
    """Whether too many lines cross to tell one from another."""
    return len(dict.fromkeys(names)) > _CROWD


def columns_for(names: Sequence[str], **options: Any) -> alt.Legend:
    """As many columns as there is room for, however wide the chart is.

    A name that has no room is shortened as on first screens.
    """
    longest = 40 + _LETTER * max(map(len, names))
    columns = alt.expr(f"max(1, floor(width / {longest}))")
    short = json.dumps(labels(name for name in names if name.endswith(")")))
    values = "replace(datum.label, regexp('[a-z_]+=', 'g'), '')"
    name = f"length(datum.label) * {_LETTER} < width - 30 ? datum.label"
    name += f" : ({short})[datum.label] || {values}"
    return alt.Legend(columns=columns, labelExpr=name, **options)


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


def by_shape(field: str, names: Sequence[str], **legend: Any) -> alt.Shape:
    """A shape for each name."""
    distinct = list(dict.fromkeys(names))
    scale = alt.Scale(domain=distinct, range=cycled(_SHAPES, len(distinct)))
    return alt.Shape(f"{field}:N", title=None, scale=scale, legend=columns_for(distinct, **legend))


def by_colour(field: str, names: Sequence[str]) -> alt.Color:
    """A colour for each name."""
    distinct = list(dict.fromkeys(names))
    colours = dict(zip(distinct, cycled(PALETTE, len(distinct)), strict=True))
    return coloured(field, colours, columns_for(distinct))


def coloured(field: str, colours: Mapping[str, str], legend: alt.Legend | None = None) -> alt.Color:
    """These colours of these names, in this order."""
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color(f"{field}:N", title=None, scale=scale, legend=legend or alt.Undefined)


def shaped(field: str, shapes: Mapping[str, str]) -> alt.Shape:
    """These shapes of these names, in this order."""
    scale = alt.Scale(domain=list(shapes), range=list(shapes.values()))
    return alt.Shape(f"{field}:N", title=None, scale=scale)


def equality(x: alt.X, y: alt.Y, ends: Sequence[float]) -> Drawn:
    """A dashed line where both figures are equal."""
    fields = [str(channel.shorthand).removesuffix(":Q") for channel in (x, y)]
    line = alt.Chart(data([dict.fromkeys(fields, end) for end in ends]))
    return line.mark_line(color=TEXT, strokeDash=[4, 3]).encode(x=x, y=y)


def cycled(values: Sequence[str], count: int) -> list[str]:
    """This number of values, from the first on again where they are too few."""
    return [values[turn % len(values)] for turn in range(count)]


def data(rows: Sequence[Mapping[str, Any]]) -> alt.InlineData:
    """Rows inside of a specification."""
    return alt.InlineData(values=[dict(row) for row in rows])


def spec(chart: Any, height: int) -> Spec:
    """As wide as the page lets it."""
    made: Spec = chart.properties(width="container", height=height).to_dict()
    below = {"bottom": {"direction": "vertical", "anchor": "start", "margin": 6}}
    made["config"] = CONFIG | {"legend": CONFIG["legend"] | {"layout": below}}
    made["autosize"] = {"type": "fit-x", "contains": "padding"}
    return made


def picture(chart: Any, kind: str, **legend: Any) -> bytes:
    """A chart as a file for paper, "png" or "svg": black on white."""
    drawn = chart.to_dict()
    drawn["config"] = CONFIG | {"background": "white", "font": "sans-serif"}
    drawn["config"]["legend"] = CONFIG["legend"] | {"labelLimit": 0} | legend
    black = inked(drawn, "#000000")
    if kind == "png":
        return vl_convert.vegalite_to_png(black, scale=2)
    return vl_convert.vegalite_to_svg(black).encode()


def inked(drawn: Spec, ink: str) -> Spec:
    """A specification with this colour where it has that of the page; its data stay."""
    without = {key: value for key, value in drawn.items() if key != "datasets"}
    made: Spec = json.loads(json.dumps(without).replace(f'"{TEXT}"', f'"{ink}"'))
    return made | {"datasets": drawn.get("datasets", {})}


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
    positive = [value for value in values if value > 0]
    low, high = min(positive, default=1.0), max(positive, default=1.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if _FEW <= len(inside) <= _MAX_TICKS:
            return inside
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
    every = list(values)
    return bool(every) and min(every) > 0 and max(every) > _WIDE * min(every)
