"""Charts over numbers of GPUs: of speed, and of days."""

from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from co2sim.prediction.published import SpeedComparison, ThroughputCell
from co2sim.prediction.totals import Totals
from co2sim.report.chart_style import (
    HEIGHT,
    Rows,
    Spec,
    by_strategy,
    data,
    faded,
    picked,
    points_of,
    spec,
)
from co2sim.report.tables import Answered

_BAND = 0.18


def scaling(
    group: Sequence[Answered],
    names: Sequence[str],
    comparisons: Iterable[SpeedComparison] = (),
    every: Sequence[Answered] = (),
) -> Spec:
    """Throughput over GPUs, one line a strategy; bands are 90 % intervals, stars are published.

    All cases of the group are of one cluster; `names` are the strategies of the page, and the axis
    has room for `every` case of it, so that clusters can be compared.
    """
    rows = [_speed(one) for one in group]
    unit = f"{group[0].result.unit}s/s"
    layers, x, y = _over_gpus(rows, names, unit, ",.0f", "~s", map(_speed, every))
    colour, _ = by_strategy(names)
    stars = _published(comparisons, group[0].cluster, set(names))
    if stars:
        layers.append(
            alt.Chart(data(stars))
            .mark_point(shape=STAR, size=160, filled=False, strokeWidth=1.5)
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


def days(group: Sequence[Answered], names: Sequence[str], every: Sequence[Answered] = ()) -> Spec:
    """Days of the training over GPUs, as `scaling`; cases without totals have none."""
    rows = [_days(one, one.totals) for one in group if one.totals]
    others = (_days(one, one.totals) for one in every if one.totals)
    layers, _, _ = _over_gpus(rows, names, "days", ",.3~g", "~g", others)
    return spec(alt.layer(*layers), HEIGHT)


def _days(one: Answered, totals: Totals) -> dict[str, Any]:
    low, high = totals.days_low, totals.days_high
    return _speed(one) | {
        "value": totals.days,
        "low": low,
        "high": high,
        "interval": _interval(low, high, ",.3g"),
    }


def _over_gpus(
    rows: Rows,
    names: Sequence[str],
    unit: str,
    shown: str,
    ticks: str,
    every: Iterable[dict[str, Any]] = (),
) -> tuple[list[alt.Chart], alt.X, alt.Y]:
    """The layers of a figure over GPUs, and its axes, with room for every row of the page."""
    ends = [v for row in every for v in (row["value"], row["low"], row["high"]) if v is not None]
    sizes = sorted({row["gpus"] for row in rows})
    x = gpu_axis(sizes)
    log = alt.Scale(type="log", nice=False, padding=10)
    if ends:
        log = alt.Scale(type="log", nice=False, domain=[min(ends), max(ends)], padding=10)
    y = alt.Y("value:Q", title=unit, scale=log, axis=alt.Axis(format=ticks))
    tips = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("gpus:Q", title="GPUs"),
        alt.Tooltip("value:Q", title=unit, format=shown),
        alt.Tooltip("interval:N", title="90 % interval"),
        alt.Tooltip("memory:N"),
    ]
    return banded(rows, x, y, names, tips, several=len(sizes) > 1), x, y


def gpu_axis(sizes: Sequence[int]) -> alt.X:
    """Numbers of GPUs, each with its label."""
    return alt.X(
        "gpus:Q",
        title="GPUs",
        scale=alt.Scale(type="log", base=2, nice=False, padding=16),
        axis=alt.Axis(values=list(sizes), format=",d"),
    )


def _interval(low: float | None, high: float | None, shown: str) -> str:
    return "" if low is None or high is None else f"{low:{shown}} to {high:{shown}}"


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
    colour, _ = by_strategy(names)
    base = alt.Chart(data(rows))
    low = y.copy()
    low.shorthand = "low:Q"
    shown = base.transform_filter("isValid(datum.low)")
    band = (
        shown.mark_area().encode(opacity=faded(names, _BAND, band=True))
        if several
        else shown.mark_rule(strokeWidth=5).encode(opacity=faded(names, 2 * _BAND, band=True))
    )
    line = base.mark_line().encode(x=x, y=y, color=colour, opacity=faded(names))
    drawn = band.encode(x=x, y=low, y2="high:Q", color=colour)
    points = points_of(rows, x, y, names, tips)
    return picked([drawn, *([line] if several else []), *points], names)


STAR = (
    "M0,-1L0.225,-0.309L0.951,-0.309L0.363,0.118L0.588,0.809L0,0.382L-0.588,0.809"
    "L-0.363,0.118L-0.951,-0.309L-0.225,-0.309Z"
)


def per_gpu(group: Sequence[Answered], names: Sequence[str]) -> Spec | None:
    """Throughput per GPU, relative to the fewest GPUs; None for a single size."""
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
    x = gpu_axis(sizes)
    y = alt.Y(
        "value:Q",
        title=f"per GPU, relative to {least} GPUs",
        axis=alt.Axis(format=".0%"),
        scale=alt.Scale(zero=True),
    )
    tips = ["strategy:N", "gpus:Q", alt.Tooltip("value:Q", format=".1%", title="relative")]
    base = alt.Chart(data(rows)).encode(x=x, y=y, color=colour, opacity=faded(names))
    points = base.mark_point(size=60, filled=True).encode(shape=shape, tooltip=tips)
    return spec(alt.layer(*picked([base.mark_line(), points], names)), HEIGHT)


def _speed(one: Answered) -> dict[str, Any]:
    result = one.result
    low, high = result.tokens_per_s_low, result.tokens_per_s_high
    return {
        "strategy": one.strategy,
        "gpus": result.gpus,
        "value": result.tokens_per_s,
        "low": low,
        "high": high,
        "interval": _interval(low, high, ",.0f"),
        "fits": result.fits_in_memory,
        "memory": result.misfit or result.memory_fit,
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
