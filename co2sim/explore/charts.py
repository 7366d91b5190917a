"""The charts of the explorer: Vega-Lite whose data the page fills in."""

import altair as alt

from co2sim.console.figures import COLOURS
from co2sim.explore.question import MOST_STRATEGIES
from co2sim.report.bar_charts import PARTS
from co2sim.report.chart_style import HEIGHT, ROW, STRATEGIES, TEXT, Spec, by_strategy, spec

_BAND = 0.15
_ROWS, _NOW = alt.NamedData("rows"), alt.NamedData("now")


def curve() -> Spec:
    """A figure over a control, a line for each strategy; a dashed line is where the slider is.

    The page sets the titles, the kind of the scale of y, and the strategies of colours and shapes.
    """
    colour, shape = by_strategy([str(place) for place in range(MOST_STRATEGIES)])
    x = alt.X("text:N", sort=None, title="x", axis=alt.Axis(labelOverlap=True, labelAngle=0))
    y = alt.Y("value:Q", title="y", scale=alt.Scale(nice=False, padding=10))
    base = alt.Chart(_ROWS).transform_filter("isValid(datum.value)")
    ends = {"y": alt.Y("low:Q", title="y"), "y2": "high:Q"}
    tips = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("text:N", title="at"),
        alt.Tooltip("shown:N", title="value"),
        alt.Tooltip("interval:N", title="90 % interval"),
        alt.Tooltip("memory:N"),
    ]
    band = base.transform_filter("isValid(datum.low)").mark_area(opacity=_BAND)
    fill = alt.condition("datum.fits", alt.value(1.0), alt.value(0.0))
    points = base.mark_point(size=60, filled=False).encode(
        x=x, y=y, color=colour, shape=shape, tooltip=tips
    )
    inside = base.mark_point(size=60, filled=True).encode(
        x=x, y=y, color=colour, shape=shape, opacity=fill, tooltip=tips
    )
    layers = [
        band.encode(x=x, color=colour, **ends),
        base.mark_line().encode(x=x, y=y, color=colour),
        inside,
        points,
        alt.Chart(_NOW).mark_rule(strokeDash=[4, 3], color=TEXT).encode(x=x),
    ]
    return spec(alt.layer(*layers), HEIGHT)


def shares() -> Spec:
    """What a round is spent on, a bar for each strategy."""
    colours = [COLOURS[5], COLOURS[2], COLOURS[1], COLOURS[7]]
    chart = (
        alt.Chart(_ROWS)
        .mark_bar()
        .encode(
            x=alt.X(
                "share:Q",
                title="share of a round",
                axis=alt.Axis(format=".0%"),
                scale=alt.Scale(domain=[0, 1]),
            ),
            y=STRATEGIES,
            color=alt.Color(
                "part:N", title=None, scale=alt.Scale(domain=list(PARTS), range=colours)
            ),
            order=alt.Order("place:Q"),
            tooltip=["strategy:N", "part:N", alt.Tooltip("share:Q", format=".1%")],
        )
    )
    return spec(chart, ROW)


def memory() -> Spec:
    """The memory of a GPU, a bar for each strategy, beside what the GPU has."""
    bars = (
        alt.Chart(_ROWS)
        .mark_bar(color=COLOURS[0])
        .encode(
            x=alt.X("size:Q", title="GiB on a GPU"),
            y=STRATEGIES,
            tooltip=["strategy:N", alt.Tooltip("size:Q", format=".3~g", title="GiB")],
        )
    )
    rule = (
        alt.Chart(_NOW)
        .mark_rule(strokeDash=[6, 4], strokeWidth=2, color=TEXT)
        .encode(x="has:Q", tooltip=[alt.Tooltip("has:Q", format=".4~g", title="GiB it has")])
    )
    return spec(alt.layer(bars, rule), ROW)
