"""Charts of pages: rounds, memory, gains, timelines, speed and days over GPUs, days against money.

And the picture of `co2sim scale`.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any

import altair as alt

from co2sim.models.memory import GIB
from co2sim.prediction.figures import shared_batch
from co2sim.prediction.published import SpeedComparison
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.totals import Totals
from co2sim.report.chart_style import (
    BAND,
    BROWN,
    COLUMNS,
    FAINT,
    GREY,
    HEIGHT,
    ROW,
    SKY,
    STAR,
    STRATEGIES,
    TAN,
    TEXT,
    Drawn,
    Encoding,
    Rows,
    Spec,
    banded,
    by_colour,
    by_shape,
    by_strategy,
    coloured,
    data,
    faded,
    fit_points,
    gpu_axis,
    high,
    interval,
    line_at,
    log_ticks,
    of_works,
    picked,
    row_height,
    scale_of,
    spec,
    stacked,
)
from co2sim.report.rounds import Round
from co2sim.report.tables import Answered
from co2sim.studies.grid import display_name, offer_name
from co2sim.studies.sensitivity import Sensitivity

PARTS = (
    "computing, nothing sent",
    "computing, communication behind it",
    "exposed communication",
    "slower ranks",
)
"""What a round is spent on."""


_ALONE = alt.Y("strategy:N", title=None, axis=None)
"""A single bar, whose name is in the title."""


def shares(group: Sequence[Answered]) -> Spec:
    """What the time of a round goes to, a bar for each strategy."""
    return spec(share_bars([(one.strategy, one.result) for one in group]), high(group))


def share_bars(named: Sequence[tuple[str, Result]], *, told: bool = False) -> Drawn:
    """As `shares`. `told` writes the values of a single result into the legend."""
    rows: Rows = [
        {"strategy": name, "part": part, "share": share, "place": place}
        for name, result in named
        for place, (part, share) in enumerate(parts(result).items())
        if share or not told
    ]
    if not told:
        return shares_of(data(rows))
    values = {row["part"]: f"{row['share']:.1%}" for row in rows}
    return shares_of(data(rows), [part for part in PARTS if part in values], _ALONE, values)


def shares_of(
    source: alt.Data,
    shown: Sequence[str] = PARTS,
    y: alt.Y = STRATEGIES,
    values: Mapping[str, str] | None = None,
) -> Drawn:
    """Bars of rows with `strategy`, `part`, `share` and the `place` of the part."""
    colours = dict(zip(PARTS, (SKY, TAN, BROWN, GREY), strict=True))
    colour = coloured("part", {part: colours[part] for part in shown}, _legend(values or {}))
    x = alt.X("share:Q", title="share of a round", axis=alt.Axis(format=".0%", tickCount=5))
    tips = ["strategy:N", "part:N", alt.Tooltip("share:Q", format=".1%")]
    return stacked(source, x, y, colour, tips)


def _legend(values: Mapping[str, str], **options: Any) -> alt.Legend:
    """A legend that tells the value behind each name, where there are any."""
    if values:
        options["labelExpr"] = f"datum.label + ': ' + ({json.dumps(values)})[datum.label]"
    return alt.Legend(**options)


def parts(result: Result) -> dict[str, float]:
    """The shares of a round, which sum to 1."""
    whole = result.round_time_s
    slower = min(result.straggler_delay_s or 0.0, whole - result.exposed_comm_s)
    computing = whole - result.exposed_comm_s - slower
    behind = min(max(0.0, result.comm_busy_s - result.exposed_comm_s), computing)
    times = (computing - behind, behind, result.exposed_comm_s, slower)
    return {part: time / whole for part, time in zip(PARTS, times, strict=True)}


def memory(group: Sequence[Answered]) -> Spec:
    """Memory of a GPU by item, a bar for each strategy, beside what the GPU has."""
    return spec(memory_bars([(one.strategy, one.result) for one in group]), high(group))


def memory_bars(named: Sequence[tuple[str, Result]], *, told: bool = False) -> Drawn:
    """As `memory`. `told` writes the values of a single result into the legend."""
    rows: Rows = [
        {"strategy": name, "item": item, "size": size / GIB, "place": place}
        for name, result in named
        for place, (item, size) in enumerate(result.memory_bytes_per_gpu.items())
        if item != "total" and size
    ]
    has = named[0][1].gpu_memory_bytes / GIB
    items = {row["item"]: _OF_ITEMS.get(row["item"], GREY) for row in rows}
    values = {row["item"]: f"{row['size']:.3g} GiB" for row in rows} if told else {}
    x = alt.X("size:Q", title="GiB on a GPU")
    colour = coloured("item", items, _legend(values, columns=3 if told else 2))
    tips = ["strategy:N", "item:N", alt.Tooltip("size:Q", format=".3~g", title="GiB")]
    bars = stacked(data(rows), x, _ALONE if told else STRATEGIES, colour, tips)
    return alt.layer(bars, memory_line(data([{"size": has}]), "size:Q"))


def memory_line(source: alt.Data, field: str) -> Drawn:
    """What a GPU has."""
    tip = alt.Tooltip(field, format=".4~g", title="GiB it has")
    rule = alt.Chart(source).mark_rule(strokeDash=[6, 4], strokeWidth=2, color=TEXT)
    return rule.encode(x=field, tooltip=[tip])


_OF_ITEMS = {
    "parameters": "#54278F",
    "gradients": "#807DBA",
    "optimizer": "#BCBDDC",
    "secondary": "#3F007D",
    "outer": "#DADAEB",
    "activations": "#4F6B1A",
    "checkpoints": "#8FA63A",
    "logits": "#C5D588",
    "tied_gradient": "#2F4010",
    "workspace": "#E2EAC0",
    "gathered": "#AE017E",
    "bucket": "#F768A1",
    "fragmentation": "#5A5A63",
    "nccl": "#9A9AA5",
    "context": "#C9C9D1",
}
"""States are violet, what the passes keep is green, buffers are pink, and the rest is grey."""


def gains(found: Sequence[Sensitivity]) -> Spec:
    """What a tenth more of each number gives."""
    rows = [{"change": one.change, "gain": one.gain} for one in found]
    chart = (
        alt.Chart(data(rows))
        .mark_bar(color=TEXT, opacity=FAINT)
        .encode(
            x=alt.X("gain:Q", title="more tokens/s", axis=alt.Axis(format="+.1~%", tickCount=5)),
            y=alt.Y("change:N", sort=None, title=None, axis=alt.Axis(labelLimit=220)),
            tooltip=["change:N", alt.Tooltip("gain:Q", format="+.2%")],
        )
    )
    return spec(chart, ROW * len(rows))


def timeline(rounds: Collection[Round], fixed: Mapping[str, str] | None = None) -> Spec:
    """A round on one rank, whose data and time axis the page fills in; it can be zoomed.

    `fixed` are kinds that come last, with their own colours.
    """
    colours = kinds_of(rounds, fixed or {})
    lanes = max(len({bar.stream for bar in one.bars}) for one in rounds)
    return spec(timeline_bars([], colours, 1).add_params(ZOOM), ROW * lanes)


def kinds_of(rounds: Iterable[Round], fixed: Mapping[str, str]) -> dict[str, str]:
    """Colours of the kinds of bars; `fixed` are kinds that come last, with their own."""
    here = dict.fromkeys(bar.kind for one in rounds for bar in one.bars)
    last = {kind: colour for kind, colour in fixed.items() if kind in here}
    return of_works([kind for kind in here if kind not in fixed]) | last


ZOOM = alt.selection_interval(bind="scales", encodings=["x"])
"""Of the time axis of a timeline."""


def timeline_bars(rows: Rows, colours: Mapping[str, str], length: float) -> Drawn:
    """A round of `length` ms on one rank; `rows` are those of `TimelineBar`."""
    x = alt.X(
        "start:Q",
        title="ms",
        scale=alt.Scale(domain=[0, length], nice=False),
        axis=alt.Axis(tickCount=8),
    )
    tips = [
        "kind:N",
        alt.Tooltip("ops:N"),
        alt.Tooltip("start:Q", format=".4~g", title="start, ms"),
        alt.Tooltip("length:Q", format=".4~g", title="takes, ms"),
    ]
    colour = coloured("kind", colours, alt.Legend(columns=COLUMNS))
    y = alt.Y("stream:N", sort=None, title=None)
    bars = alt.Chart(data(rows)).mark_bar(height=ROW - 8)
    return bars.encode(x=x, x2="end:Q", y=y, color=colour, tooltip=tips)


def front(
    every: Sequence[Answered],
    names: Sequence[str],
    marked: Mapping[str, Answered] | None = None,
    limits: Mapping[str, float] | None = None,
    *,
    hours: bool = False,
    offers: bool = False,
) -> Spec | None:
    """Days against money, with intervals; None without prices, or without totals.

    With `hours` GPU-hours stand for money where nothing has a price. `marked` are cases with the
    words beside them, `limits` the most days and the most money, by those names. The size of a
    point is the number of GPUs. With `offers` colours are those of clusters, and shapes those of
    strategies; without, the other way round.
    """
    known = [one for one in every if one.totals is not None]
    priced = [one for one in known if one.totals and one.totals.cost is not None]
    currencies = {one.totals.currency for one in priced if one.totals}
    if not known or (not priced and not hours) or len(currencies) > 1:
        return None
    shown = priced or known
    rows = [_training(one) for one in shown]
    least = {id(row) for row in _undominated([row for row in rows if row["fits"]])}
    said = {id(one): words for words, one in (marked or {}).items()}
    for row, one in zip(rows, shown, strict=True):
        row["front"] = id(row) in least
        row["mark"] = said.get(id(one))
    log = alt.Scale(type="log", nice=False, padding=24 if marked else 16)
    x = alt.X("days:Q", scale=log, title="days", axis=_axis("~r", rows, "days"))
    unit = str(currencies.pop()) if currencies else "GPU-hours"
    y = alt.Y("cost:Q", scale=log, title=unit, axis=_axis("~s", rows, "cost"))
    looks = _looks(shown, names, offers=offers)
    tips = [
        alt.Tooltip("name:N"),
        alt.Tooltip("days:Q", format=",.3~g"),
        alt.Tooltip("cost:Q", format=",.3~s", title=unit),
        alt.Tooltip("front:N", title="nothing is cheaper and faster"),
    ]
    layers = [
        *_intervals(rows, x, y, log, looks["color"], names),
        *_joined([row for row in rows if row["front"]], x, y),
        *fit_points(rows, {"x": x, "y": y, "opacity": faded(names), "tooltip": tips, **looks}),
        *_marks([row for row in rows if row["mark"]], x, y),
        *(_limit(name, value, log) for name, value in (limits or {}).items()),
    ]
    return spec(alt.layer(*picked(layers, names)), HEIGHT + 60)


def _axis(shown: str, rows: Rows, name: str) -> alt.Axis:
    """With room for a figure and its interval."""
    ends = [row[key] for row in rows for key in (name, f"{name}_low", f"{name}_high")]
    return alt.Axis(format=shown, values=log_ticks(end for end in ends if end is not None))


def _looks(
    every: Sequence[Answered], names: Sequence[str], *, offers: bool
) -> dict[str, alt.Color | alt.Shape | alt.Size]:
    """Of a point: what is a colour, a shape, and a size."""
    clusters = [one.cluster for one in every]
    sizes = sorted({one.result.gpus for one in every})
    ticks = [sizes[0], sizes[len(sizes) // 2], sizes[-1]] if len(sizes) > 3 else sizes  # noqa: PLR2004
    size = alt.Size("gpus:Q", title="GPUs", legend=None)
    if len(sizes) > 1:
        size = alt.Size(
            "gpus:Q",
            title="GPUs",
            scale=alt.Scale(type="log", range=[40, 320]),
            legend=alt.Legend(values=ticks, columns=len(ticks), symbolFillColor=TEXT),
        )
    ink = {"symbolFillColor": TEXT, "symbolStrokeColor": TEXT}
    colour, shape = by_strategy(names)
    if offers:
        colour, shape = by_colour("cluster", clusters), by_shape("strategy", names, **ink)
    elif len(set(clusters)) > 1:
        shape = by_shape("cluster", clusters, **ink)
    return {"color": colour, "shape": shape, "size": size}


def _intervals(
    rows: Rows, x: alt.X, y: alt.Y, log: alt.Scale, colour: Any, names: Sequence[str]
) -> Iterator[Any]:
    """Lines across and upright, where ends are known."""
    thin = faded(names, 0.4, band=True)
    across: Encoding = {
        "x": alt.X("days_low:Q", scale=log, title="days"),
        "x2": "days_high:Q",
        "y": y,
    }
    upright: Encoding = {"x": x, "y": alt.Y("cost_low:Q", scale=log), "y2": "cost_high:Q"}
    for low, encoding in (("days_low", across), ("cost_low", upright)):
        if ends := [row for row in rows if row[low] is not None]:
            rule = alt.Chart(data(ends)).mark_rule()
            yield rule.encode(**encoding, color=colour, opacity=thin)


def _joined(line: Rows, x: alt.X, y: alt.Y) -> Iterator[Any]:
    """What nothing beats, dashed."""
    if line:
        yield alt.Chart(data(line)).mark_line(color=TEXT, strokeDash=[4, 3]).encode(x=x, y=y)


def _training(one: Answered) -> dict[str, Any]:
    """A row; GPU-hours where there is no price."""
    found = one.totals
    assert found is not None
    free = found.cost is None
    per_day = found.gpu_hours / found.days
    ends = (found.days_low, found.days_high)
    hours = [None if days is None else days * per_day for days in ends]
    return {
        "name": f"{one.strategy}, {one.result.gpus} GPUs, {one.cluster}",
        "strategy": one.strategy,
        "cluster": one.cluster,
        "gpus": one.result.gpus,
        "days": found.days,
        "cost": found.gpu_hours if free else found.cost,
        "days_low": found.days_low,
        "days_high": found.days_high,
        "cost_low": hours[0] if free else found.cost_low,
        "cost_high": hours[1] if free else found.cost_high,
        "fits": one.result.fits_in_memory,
    }


def _marks(rows: Rows, x: alt.X, y: alt.Y) -> Iterator[Any]:
    """Rings, with words below the first one and above the others, which may lie near."""
    for row in rows:
        base = alt.Chart(data([row])).encode(x=x, y=y)
        yield base.mark_point(size=700, filled=False, color=TEXT, strokeWidth=1.5)
        below = row is rows[0]
        yield base.mark_text(dy=26 if below else -26, color=TEXT, fontSize=12).encode(text="mark:N")


def _limit(name: str, value: float, log: alt.Scale) -> Any:
    """A line at the most days, or the most money."""
    across = name == "days"
    channel = alt.X("days:Q", scale=log) if across else alt.Y("cost:Q", scale=log)
    tip = alt.Tooltip(f"{name}:Q", title=f"the most {name}", format=",.6~g")
    return line_at(channel, value, dash=(2, 3)).encode(tooltip=[tip])


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


_WIDTH = 340
_LETTER = 7
"""Pixels, about."""


def chart(
    cases: Sequence[Question],
    results: Sequence[Result],
    comparisons: Sequence[SpeedComparison],
    uneven: str = "",
) -> Any:
    """The picture of `co2sim scale`. Bands are 90 % intervals, stars are published.

    What does not fit in memory is not drawn, unless nothing fits. `uneven` says what makes ranks
    differ.
    """
    misfits = list(dict.fromkeys(one.strategy for one in results if not one.fits_in_memory))
    if not all(one.strategy in misfits for one in results):
        pairs = [pair for pair in zip(cases, results, strict=True) if pair[1].fits_in_memory]
        cases, results = [case for case, _ in pairs], [result for _, result in pairs]
    names = list(dict.fromkeys(result.strategy for result in results))
    pairs = [*zip(cases, results, strict=True)]
    panels = [
        _panel(
            [result for _, result in group],
            names,
            [
                one
                for one in comparisons
                if one.cell.cluster == cluster and one.cell.strategy in names
            ],
        )
        for cluster, group in groupby(pairs, key=lambda pair: str(pair[0].cluster))
    ]
    first, width = results[0], len(panels) * _WIDTH // _LETTER
    heading = f"{first.model}, {shared_batch(results)}, {first.precision}"
    signs = ["Bands are 90 % intervals"] if any(map(_known, results)) else []
    signs += ["stars are published"] if comparisons else []
    signs += [] if all(r.fits_in_memory for r in results) else ["hollow: does not fit in memory"]
    signs += [f"not drawn where it does not fit: {', '.join(misfits)}"] if misfits else []
    title = alt.TitleParams(
        wrap(heading + (f"; {uneven}" if uneven else ""), width),
        subtitle=wrap(", ".join(signs), width),
        anchor="middle",
    )
    return alt.hconcat(*panels, title=title).resolve_scale(y="shared")


def _known(result: Result) -> bool:
    return result.tokens_per_s_low is not None


def _panel(
    results: Sequence[Result], names: Sequence[str], comparisons: Sequence[SpeedComparison]
) -> Any:
    rows: Rows = [
        {
            "strategy": one.strategy,
            "gpus": one.gpus,
            "value": one.tokens_per_s_per_gpu,
            "low": None if one.tokens_per_s_low is None else one.tokens_per_s_low / one.gpus,
            "high": None if one.tokens_per_s_high is None else one.tokens_per_s_high / one.gpus,
            "fits": one.fits_in_memory,
        }
        for one in results
    ]
    stars: Rows = [
        {
            "strategy": one.cell.strategy,
            "gpus": one.cell.gpus,
            "value": one.cell.value / one.cell.gpus,
        }
        for one in comparisons
        if not one.cell.over
    ]
    sizes = sorted({row["gpus"] for row in (*rows, *stars)})
    x = gpu_axis(sizes)
    y = alt.Y(
        "value:Q",
        title=f"{results[0].unit}s/s per GPU",
        scale=alt.Scale(zero=True),
        axis=alt.Axis(format=",d"),
    )
    layers = banded(rows, x, y, names, [], several=len({row["gpus"] for row in rows}) > 1)
    if stars:
        layers.append(_stars(stars, x, y, names, 200, 2))
    title = alt.TitleParams(
        wrap(results[0].cluster, _WIDTH // _LETTER), fontSize=11, fontWeight="normal"
    )
    return alt.layer(*layers, title=title, width=_WIDTH, height=HEIGHT)


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
    if stars:
        tips = [
            alt.Tooltip("strategy:N"),
            alt.Tooltip("gpus:Q", title="GPUs"),
            alt.Tooltip("value:Q", title=f"published {unit}", format=",.0f"),
            alt.Tooltip("error:Q", title="predicted is off by", format="+.1%"),
        ]
        layers.append(_stars(stars, x, y, names, 160, 1.5).encode(tooltip=tips))
    return spec(alt.layer(*layers), HEIGHT)


def _stars(
    stars: Rows, x: alt.X, y: alt.Y, names: Sequence[str], size: float, width: float
) -> Drawn:
    """What was published."""
    mark = alt.Chart(data(stars)).mark_point(shape=STAR, size=size, filled=False, strokeWidth=width)
    return mark.encode(x=x, y=y, color=by_colour("strategy", names))


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
    encoding: Encoding = {"x": x, "y": STRATEGIES, "color": colour}
    tips = [alt.Tooltip("strategy:N"), *_tips(unit, shown)]
    layers = [interval(rows, "x", encoding, strokeWidth=5, opacity=2 * BAND)]
    layers += fit_points(rows, encoding | {"tooltip": tips}, size=90, opacity=1)
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


def _interval(low: float | None, high: float | None, shown: str) -> str:
    return "" if low is None or high is None else f"{low:{shown}} to {high:{shown}}"


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
