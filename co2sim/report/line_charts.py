"""Charts of speed over GPUs, and of days against money."""

from collections.abc import Iterable
from typing import Any

import altair as alt

from co2sim.published_cells import ThroughputCell
from co2sim.published_speeds import SpeedComparison
from co2sim.report.chart_style import (
    HEIGHT,
    TEXT,
    Rows,
    Spec,
    by_strategy,
    data,
    points_of,
    spec,
)
from co2sim.report.study import Answered, Study

_BAND = 0.18


def scaling(study: Study, cluster: str) -> Spec:
    """Throughput over GPUs, one line a strategy; bands are 90 % intervals, stars are published."""
    names = [one.strategy for one in study.all]
    rows = [_speed(one) for one in study.clusters[cluster]]
    unit = f"{study.results[0].unit}s/s"
    sizes = sorted({row["gpus"] for row in rows})
    several = len(sizes) > 1
    x = alt.X(
        "gpus:Q",
        title="GPUs",
        scale=alt.Scale(type="log", base=2, nice=False, padding=16),
        axis=alt.Axis(values=sizes, format=",d"),
    )
    log = alt.Scale(type="log", nice=False, padding=10)
    y = alt.Y("value:Q", title=unit, scale=log, axis=alt.Axis(format="~s"))
    colour, _ = by_strategy(names)
    base = alt.Chart(data(rows))
    ends = {"y": alt.Y("low:Q", scale=log, title=unit), "y2": "high:Q"}
    shown = base.transform_filter("isValid(datum.low)")
    band = (
        shown.mark_area(opacity=_BAND).encode(x=x, **ends, color=colour)
        if several
        else shown.mark_rule(opacity=2 * _BAND, strokeWidth=5).encode(x=x, **ends, color=colour)
    )
    tips = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("gpus:Q", title="GPUs"),
        alt.Tooltip("value:Q", title=unit, format=",.0f"),
        alt.Tooltip("interval:N", title="90 % interval"),
        alt.Tooltip("memory:N"),
    ]
    line = base.mark_line().encode(x=x, y=y, color=colour)
    layers = [band, *([line] if several else []), *points_of(rows, x, y, names, tips)]
    stars = _published(study.comparisons, cluster, set(names))
    if stars:
        layers.append(
            alt.Chart(data(stars))
            .mark_point(shape=_STAR, size=160, filled=False, strokeWidth=1.5)
            .encode(
                x=x,
                y=y,
                color=colour,
                tooltip=[
                    alt.Tooltip("strategy:N"),
                    alt.Tooltip("gpus:Q", title="GPUs"),
                    alt.Tooltip("value:Q", title=f"published {unit}", format=",.0f"),
                    alt.Tooltip("error:Q", title="predicted is off by", format="+.1%"),
                ],
            )
        )
    return spec(alt.layer(*layers), HEIGHT)


_STAR = (
    "M0,-1L0.225,-0.309L0.951,-0.309L0.363,0.118L0.588,0.809L0,0.382L-0.588,0.809"
    "L-0.363,0.118L-0.951,-0.309L-0.225,-0.309Z"
)


def per_gpu(study: Study, cluster: str) -> Spec | None:
    """Throughput per GPU, relative to the fewest GPUs; None for a single size."""
    group = study.clusters[cluster]
    names = [one.strategy for one in study.all]
    least = min(one.result.gpus for one in group)
    first = {
        one.strategy: one.result.tokens_per_s_per_gpu for one in group if one.result.gpus == least
    }
    rows: Rows = [
        {
            "strategy": one.strategy,
            "gpus": one.result.gpus,
            "value": one.result.tokens_per_s_per_gpu / first[one.strategy],
        }
        for one in group
    ]
    sizes = sorted({row["gpus"] for row in rows})
    if len(sizes) == 1:
        return None
    colour, shape = by_strategy(names)
    x = alt.X(
        "gpus:Q",
        title="GPUs",
        scale=alt.Scale(type="log", base=2, nice=False, padding=16),
        axis=alt.Axis(values=sizes, format=",d"),
    )
    y = alt.Y(
        "value:Q",
        title=f"per GPU, relative to {least} GPUs",
        axis=alt.Axis(format=".0%"),
        scale=alt.Scale(zero=True),
    )
    tips = ["strategy:N", "gpus:Q", alt.Tooltip("value:Q", format=".1%", title="relative")]
    base = alt.Chart(data(rows)).encode(x=x, y=y, color=colour)
    points = base.mark_point(size=60, filled=True).encode(shape=shape, tooltip=tips)
    return spec(alt.layer(base.mark_line(), points), HEIGHT)


def front(study: Study) -> Spec | None:
    """Days against money, with intervals; None where nothing has a price, or nobody asked."""
    rows: Rows = [
        {
            "name": f"{one.strategy}, {one.result.gpus} GPUs, {one.cluster}",
            "strategy": one.strategy,
            "days": one.totals.days,
            "cost": one.totals.cost,
            "days_low": one.totals.days_low,
            "days_high": one.totals.days_high,
            "cost_low": one.totals.cost_low,
            "cost_high": one.totals.cost_high,
            "fits": one.result.fits_in_memory,
        }
        for one in study.all
        if one.totals is not None and one.totals.cost is not None
    ]
    currencies = {one.totals.currency for one in study.all if one.totals and one.totals.cost}
    if not rows or len(currencies) != 1:
        return None
    on_front = {row["name"] for row in _undominated([row for row in rows if row["fits"]])}
    for row in rows:
        row["front"] = row["name"] in on_front
    names = [one.strategy for one in study.all]
    colour, _ = by_strategy(names)
    log = alt.Scale(type="log", nice=False, padding=16)
    x = alt.X("days:Q", scale=log, title="days", axis=alt.Axis(format="~g"))
    y = alt.Y("cost:Q", scale=log, title=f"{currencies.pop()}", axis=alt.Axis(format="~s"))
    base = alt.Chart(data(rows))
    tips = [
        alt.Tooltip("name:N"),
        alt.Tooltip("days:Q", format=",.3~g"),
        alt.Tooltip("cost:Q", format=",.3~s"),
        alt.Tooltip("front:N", title="nothing is cheaper and faster"),
    ]
    wide = base.transform_filter("isValid(datum.days_low)").mark_rule(opacity=0.4)
    tall = base.transform_filter("isValid(datum.cost_low)").mark_rule(opacity=0.4)
    dashed = base.transform_filter("datum.front").mark_line(color=TEXT, strokeDash=[4, 3])
    layers = [
        wide.encode(
            x=alt.X("days_low:Q", scale=log, title="days"), x2="days_high:Q", y=y, color=colour
        ),
        tall.encode(x=x, y=alt.Y("cost_low:Q", scale=log), y2="cost_high:Q", color=colour),
        dashed.encode(x=x, y=y),
        *points_of(rows, x, y, names, tips),
    ]
    return spec(alt.layer(*layers), HEIGHT)


def _speed(one: Answered) -> dict[str, Any]:
    result = one.result
    low, high = result.tokens_per_s_low, result.tokens_per_s_high
    return {
        "strategy": one.strategy,
        "gpus": result.gpus,
        "value": result.tokens_per_s,
        "low": low,
        "high": high,
        "interval": "" if low is None or high is None else f"{low:,.0f} to {high:,.0f}",
        "fits": result.fits_in_memory,
        "memory": "fits" if result.fits_in_memory else "DOES NOT FIT",
    }


def _published(comparisons: Iterable[SpeedComparison], cluster: str, names: set[str]) -> Rows:
    return [
        {
            "strategy": one.strategy,
            "gpus": one.cell.sizes[0],
            "value": one.cell.value,
            "error": one.error,
        }
        for one in comparisons
        if isinstance(one.cell, ThroughputCell)
        and one.cell.cluster == cluster
        and one.strategy in names
    ]


def _undominated(rows: Rows) -> Rows:
    """Those that no other one beats in both days and money."""
    return [
        row
        for row in rows
        if not any(
            other["days"] <= row["days"]
            and other["cost"] <= row["cost"]
            and (other["days"], other["cost"]) != (row["days"], row["cost"])
            for other in rows
        )
    ]
