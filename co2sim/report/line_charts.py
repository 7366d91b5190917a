"""Charts over numbers of GPUs: of speed, and of days."""

from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from co2sim.prediction.published import SpeedComparison
from co2sim.prediction.totals import Totals
from co2sim.report.chart_style import (
    HEIGHT,
    STRATEGIES,
    Rows,
    Spec,
    by_strategy,
    data,
    faded,
    log_ticks,
    picked,
    points_of,
    row_height,
    scale_of,
    spec,
)
from co2sim.report.tables import Answered
from co2sim.studies.grid import display_name, offer_name

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
    stars = _published(comparisons, group[0], set(names))
    if alone(group) and not stars:
        return _each(rows, names, unit, ",.0f", "~s")
    layers, x, y = _over_gpus(rows, names, unit, ",.0f", "~s", map(_speed, every))
    colour, _ = by_strategy(names)
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
    if alone(group):
        return _each(rows, names, "days", ",.3~g", ",~r")
    others = (_days(one, one.totals) for one in every if one.totals)
    layers, _, _ = _over_gpus(rows, names, "days", ",.3~g", ",~r", others)
    return spec(alt.layer(*layers), HEIGHT)


def _days(one: Answered, totals: Totals) -> dict[str, Any]:
    low, high = totals.days_low, totals.days_high
    return _speed(one) | {
        "value": totals.days,
        "low": low,
        "high": high,
        "interval": _interval(low, high, ",.3g"),
    }


def alone(group: Sequence[Answered]) -> bool:
    """Whether all are of one size: then there is no line to draw."""
    return len({one.result.gpus for one in group}) == 1


def _each(rows: Rows, names: Sequence[str], unit: str, shown: str, ticks: str) -> Spec:
    """A point with its interval for each strategy, one below the other."""
    colour = by_strategy(names)[0].copy().legend(None)
    axis = alt.Axis(format=ticks, tickCount=5)
    x = alt.X("value:Q", title=unit, scale=scale_of(log=False), axis=axis)
    low = x.copy()
    low.shorthand = "low:Q"
    base = alt.Chart(data(rows)).encode(y=STRATEGIES, color=colour)
    band = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=5, opacity=2 * _BAND)
    layers = [band.encode(x=low, x2="high:Q")]
    tips = [alt.Tooltip("strategy:N"), *_tips(unit, shown)]
    for fits in (True, False):
        here = [row for row in rows if row["fits"] == fits]
        points = alt.Chart(data(here)).mark_point(size=90, filled=fits, opacity=1)
        layers += [points.encode(x=x, y=STRATEGIES, color=colour, tooltip=tips)] if here else []
    most = max(1 + row["strategy"].count(", ") for row in rows)
    return spec(alt.layer(*layers), len(rows) * row_height(most))


def _tips(unit: str, shown: str) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("gpus:Q", title="GPUs"),
        alt.Tooltip("value:Q", title=unit, format=shown),
        alt.Tooltip("interval:N", title="90 % interval"),
        alt.Tooltip("memory:N"),
    ]


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
    axis = alt.Axis(format=ticks, values=log_ticks(ends))
    y = alt.Y("value:Q", title=unit, scale=log, axis=axis)
    tips = [alt.Tooltip("strategy:N"), *_tips(unit, shown)]
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


def scaled(group: Sequence[Answered], names: Sequence[str]) -> Spec | None:
    """Throughput per GPU, relative to one node; None for a single size, or where none is known."""
    rows: Rows = [
        {
            "strategy": one.strategy,
            "gpus": one.result.gpus,
            "value": one.efficiency,
            "exposed": one.result.exposed_share,
        }
        for one in group
        if one.efficiency is not None
    ]
    sizes = sorted({row["gpus"] for row in rows})
    if len(sizes) < 2:  # noqa: PLR2004
        return None
    colour, shape = by_strategy(names)
    most = max(1.0, *(row["value"] for row in rows))
    y = alt.Y(
        "value:Q",
        title="throughput per GPU, relative to one node",
        axis=alt.Axis(format=".0%", tickCount=5),
        scale=alt.Scale(domain=[0, most], nice=False),
    )
    tips = [
        *("strategy:N", "gpus:Q"),
        alt.Tooltip("value:Q", format=".1%", title="relative to one node"),
        alt.Tooltip("exposed:Q", format=".1%", title="exposed communication"),
    ]
    base = alt.Chart(data(rows)).encode(x=gpu_axis(sizes), y=y, color=colour, opacity=faded(names))
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


def _published(comparisons: Iterable[SpeedComparison], shown: Answered, names: set[str]) -> Rows:
    """Of the cluster of a case, but for those in which something else was varied."""
    if shown.cluster not in {display_name(shown.case.cluster), offer_name(shown.case.cluster)}:
        return []
    return [
        {
            "strategy": one.cell.strategy,
            "gpus": one.cell.gpus,
            "value": one.cell.value,
            "error": one.error,
        }
        for one in comparisons
        if not one.cell.over
        and one.cell.cluster == display_name(shown.case.cluster)
        and one.cell.strategy in names
    ]
