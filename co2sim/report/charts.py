"""Charts of pages: rounds, memory, gains, timelines, speed and days over GPUs, days against money.

And the picture of `co2sim scale`.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from textwrap import wrap
from typing import Any, Literal

import altair as alt
import numpy as np

from co2sim.prediction.figures import shared_batch
from co2sim.prediction.published import SpeedComparison
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_memory import StepMemory
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
    Ranged,
    Rows,
    Spec,
    banded,
    by_colour,
    by_shape,
    by_strategy,
    coloured,
    data,
    ends_of,
    faded,
    figure_row,
    figure_tips,
    fit_points,
    gpu_axis,
    high,
    interval,
    line_at,
    log_ticks,
    of_works,
    picked,
    scale_of,
    spec,
    stacked,
)
from co2sim.report.rounds import Round
from co2sim.report.tables import Answered
from co2sim.studies.grid import display_name, offer_name
from co2sim.studies.sensitivity import Sensitivity
from co2sim.training.memory import GIB

PARTS = (
    "computing, nothing sent",
    "computing, communication behind it",
    "exposed communication",
    "slower ranks",
)
"""What a round is spent on."""


_ALONE = alt.Y("strategy:N", title=None, axis=None)
"""A single bar, whose name is in the title."""


def shares(named: Sequence[tuple[str, Result]], *, in_legend: bool = False) -> Drawn:
    """What the time of a round goes to, a bar for each result behind its name.

    `in_legend` writes the values of a single result into the legend.
    """
    rows: Rows = [
        {"strategy": name, "part": part, "share": share, "place": order}
        for name, result in named
        for order, (part, share) in enumerate(parts(result).items())
        if share or not in_legend
    ]
    if not in_legend:
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


def memory(named: Sequence[tuple[str, Result]], *, in_legend: bool = False) -> Drawn:
    """Memory of a GPU by item, a bar for each result, beside what the GPU has; see `shares`."""
    rows: Rows = [
        {"strategy": name, "item": item, "size": size / GIB, "place": order}
        for name, result in named
        for order, (item, size) in enumerate(result.memory_bytes_per_gpu.items())
        if item != "total" and size
    ]
    capacity = named[0][1].gpu_memory_bytes / GIB
    items = {row["item"]: _OF_ITEMS.get(row["item"], GREY) for row in rows}
    values = {row["item"]: f"{row['size']:.3g} GiB" for row in rows} if in_legend else {}
    x = alt.X("size:Q", title="GiB on a GPU")
    colour = coloured("item", items, _legend(values, columns=3 if in_legend else 2))
    tips = ["strategy:N", "item:N", alt.Tooltip("size:Q", format=".3~g", title="GiB")]
    bars = stacked(data(rows), x, _ALONE if in_legend else STRATEGIES, colour, tips)
    return alt.layer(bars, memory_line(data([{"size": capacity}]), "size:Q"))


def memory_line(source: alt.Data, field: str, along: Literal["x", "y"] = "x") -> Drawn:
    """What a GPU has, where bytes are along this channel."""
    tip = alt.Tooltip(field, format=".4~g", title="GiB it has")
    rule = alt.Chart(source).mark_rule(strokeDash=[6, 4], strokeWidth=2, color=TEXT)
    return rule.encode(**{along: field}, tooltip=[tip])


def step_memory(memory: StepMemory) -> Spec:
    """What a GPU holds over a step by item, one above the other, beside what it has.

    What PyTorch does not allocate is as at the peak. Between its bends an item is a straight line.
    """
    line, bends = memory.line, memory.line.bends
    items = {name: line.items[name] for name in _OF_ITEMS if name in line.items}
    items |= {name: sizes for name, sizes in line.items.items() if name not in _OF_ITEMS}
    items |= {name: np.full(len(line.moments), size) for name, size in memory.beside.items()}
    rows: Rows = [
        {"moment": moment, "item": name, "size": round(float(sizes[moment]) / GIB, 3), "place": i}
        for i, (name, sizes) in enumerate(items.items())
        for moment in bends
    ]
    scale = alt.Scale(domain=[0, len(line.moments) - 1], nice=False)
    x = alt.X("moment:Q", title=None, scale=scale, axis=_passes(line.milestones, bends[-1]))
    y = alt.Y("size:Q", title="GiB on a GPU", stack="zero")
    colours = {name: _OF_ITEMS.get(name, GREY) for name in items}
    areas = alt.Chart(data(rows)).mark_area()
    colour = coloured("item", colours, alt.Legend(columns=2, symbolType="square"))
    stack = areas.encode(x=x, y=y, color=colour, order=alt.Order("place:Q"), tooltip=["item:N"])
    beside = sum(memory.beside.values())
    whole: Rows = [
        {
            "moment": moment,
            "name": line.moments[moment],
            "size": (line.total[moment] + beside) / GIB,
        }
        for moment in bends
    ]
    tips = [
        alt.Tooltip("name:N", title="moment"),
        alt.Tooltip("size:Q", format=".4~g", title="GiB in all"),
    ]
    only = alt.condition(f"datum.moment == {line.peak}", alt.value(1), alt.value(0))
    points = alt.Chart(data(whole)).mark_point(filled=True, size=60, color=TEXT)
    points = points.encode(x=x, y="size:Q", opacity=only, tooltip=tips)
    room = memory_line(data([{"size": memory.room / GIB}]), "size:Q", "y")
    return spec(alt.layer(stack, points, room), HEIGHT)


def _passes(milestones: Mapping[str, int], last: int) -> alt.Axis:
    """An axis of moments that names the passes in their middle, and the update."""
    loss = milestones["end of the forward pass"] + 1
    names = {loss // 2: "forward", loss: "loss", (loss + last) // 2: "backward", last: "update"}
    if "forward of the loss" not in milestones:
        del names[loss]
    label = f"({json.dumps({str(place): name for place, name in names.items()})})[datum.value]"
    return alt.Axis(values=[*names], labelExpr=label, grid=False, labelOverlap=True)


_OF_ITEMS = {
    "parameters": "#54278F",
    "gradients": "#807DBA",
    "optimizer": "#BCBDDC",
    "update": "#6A51A3",
    "secondary": "#3F007D",
    "outer": "#DADAEB",
    "activations": "#4F6B1A",
    "checkpoints": "#8FA63A",
    "outputs": "#6E7F2A",
    "logits": "#C5D588",
    "casts": "#2F4010",
    "workspace": "#E2EAC0",
    "gathered": "#AE017E",
    "bucket": "#F768A1",
    "reduction": "#C51B8A",
    "unreduced": "#FBB4C9",
    "cached": "#36363D",
    "fragmentation": "#5A5A63",
    "nccl": "#9A9AA5",
    "context": "#C9C9D1",
}
"""States are violet, what the passes keep is green, buffers are pink, and the rest is grey."""


def gains(levers: Sequence[Sensitivity]) -> Spec:
    """What a tenth more of each number gives."""
    rows = [{"change": lever.change, "gain": lever.gain} for lever in levers]
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
    lanes = max(len({bar.stream for bar in shown.bars}) for shown in rounds)
    return spec(timeline_bars([], colours, 1).add_params(ZOOM), ROW * lanes)


def kinds_of(rounds: Iterable[Round], fixed: Mapping[str, str]) -> dict[str, str]:
    """Colours of the kinds of bars; `fixed` are kinds that come last, with their own."""
    here = dict.fromkeys(bar.kind for shown in rounds for bar in shown.bars)
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
    trained = [entry for entry in every if entry.totals is not None]
    priced = [entry for entry in trained if _cost(entry)]
    currencies = {entry.totals.currency for entry in priced if entry.totals}
    if not trained or (not priced and not hours) or len(currencies) > 1:
        return None
    shown = priced or trained
    rows = [_training(entry) for entry in shown]
    least = {id(row) for row in _undominated([row for row in rows if row["fits"]])}
    words_of = {id(entry): words for words, entry in (marked or {}).items()}
    for row, entry in zip(rows, shown, strict=True):
        row["front"] = id(row) in least
        row["mark"] = words_of.get(id(entry))
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
    undominated = alt.Chart(data([row for row in rows if row["front"]]))
    joined = undominated.mark_line(color=TEXT, strokeDash=[4, 3]).encode(x=x, y=y)
    layers = [
        *_intervals(rows, x, y, log, looks["color"], names),
        *([joined] if least else []),
        *fit_points(rows, {"x": x, "y": y, "opacity": faded(names), "tooltip": tips, **looks}),
        *_marks(rows, x, y),
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
    clusters = [entry.cluster for entry in every]
    sizes = sorted({entry.result.gpus for entry in every})
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


def _training(entry: Answered) -> dict[str, Any]:
    """A row; GPU-hours where there is no price."""
    totals = entry.totals
    assert totals is not None
    per_day = totals.gpu_hours / totals.days
    ends = (totals.days, totals.days_low, totals.days_high)
    hours = [None if days is None else days * per_day for days in ends]
    spent = _cost(entry) or hours
    return {
        "name": f"{entry.strategy}, {entry.result.gpus} GPUs, {entry.cluster}",
        "strategy": entry.strategy,
        "cluster": entry.cluster,
        "gpus": entry.result.gpus,
        **dict(zip(("days", "days_low", "days_high"), ends, strict=True)),
        **dict(zip(("cost", "cost_low", "cost_high"), spent, strict=True)),
        "fits": entry.fits,
    }


def _marks(rows: Rows, x: alt.X, y: alt.Y) -> Iterator[Any]:
    """Rings with words, below and above in turn, the last one below.

    Words go away from the next ring, and inwards at the sides.
    """
    marked = sorted((row for row in rows if row["mark"]), key=itemgetter("days"))
    days = [row[end] for row in rows for end in ("days", "days_low", "days_high") if row[end]]
    for order, row in enumerate(marked):
        base = alt.Chart(data([row])).encode(x=x, y=y)
        yield base.mark_point(size=700, filled=False, color=TEXT, strokeWidth=1.5)
        below = (len(marked) - order) % 2 == 1
        near = [m["days"] for m in marked if m is not row and (m["cost"] < row["cost"]) == below]
        words = base.mark_text(
            dy=30 if below else -26,
            align=_away(row["days"], near, (min(days), max(days))),
            lineBreak="\n",
            color=TEXT,
            fontSize=12,
        )
        yield words.encode(text="mark:N")


def _away(
    value: float, near: Sequence[float], ends: tuple[float, float]
) -> Literal["left", "center", "right"]:
    """How words at a value are aligned, beside other rings of a chart with these ends."""
    here, low, high = map(math.log, (value, *ends))
    share = (here - low) / (high - low) if high > low else 0.5
    if share < _SIDE or share > 1 - _SIDE:
        return "left" if share < _SIDE else "right"
    if not near:
        return "center"
    return "left" if min(near, key=lambda ring: abs(math.log(ring / value))) < value else "right"


_SIDE = 0.25
"""The share of a chart at its left, or its right."""


def _limit(name: str, value: float, log: alt.Scale) -> Any:
    """A line at the most days, or the most money."""
    across = name == "days"
    channel = alt.X("days:Q", scale=log) if across else alt.Y("cost:Q", scale=log)
    tip = alt.Tooltip(f"{name}:Q", title=f"the most {name}", format=",.6~g")
    return line_at(channel, value, dash=(2, 3)).encode(tooltip=[tip])


def _undominated(rows: Rows) -> Rows:
    """Those that no other one beats in both days and money."""
    front: Rows = []
    for row in sorted(rows, key=itemgetter("days", "cost")):
        if not front or row["cost"] < front[-1]["cost"]:
            front.append(row)
    return front


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
    misfits = list(dict.fromkeys(r.strategy for r in results if not r.fits_in_memory))
    pairs = [*zip(cases, results, strict=True)]
    pairs = [(case, result) for case, result in pairs if result.fits_in_memory] or pairs
    results = [result for _, result in pairs]
    names = list(dict.fromkeys(result.strategy for result in results))
    entries = [Answered(str(case.cluster), r.strategy, case, r, None) for case, r in pairs]
    panels = [
        _panel(list(group), names, _published(comparisons, cluster, names))
        for cluster, group in groupby(entries, key=lambda entry: entry.cluster)
    ]
    first, width = results[0], len(panels) * _WIDTH // _LETTER
    heading = f"{first.model}, {shared_batch(results)}, {first.precision}"
    signs = ["Bands are 90 % intervals"] if any(r.tokens_per_s_low for r in results) else []
    signs += ["stars are published"] if comparisons else []
    signs += [] if all(r.fits_in_memory for r in results) else ["hollow: more memory than there is"]
    signs += (
        [f"not drawn where more memory is needed than there is: {', '.join(misfits)}"]
        if misfits
        else []
    )
    title = alt.TitleParams(
        wrap(heading + (f"; {uneven}" if uneven else ""), width),
        subtitle=wrap(", ".join(signs), width),
        anchor="middle",
    )
    return alt.hconcat(*panels, title=title).resolve_scale(y="shared")


def _panel(group: Sequence[Answered], names: Sequence[str], stars: Rows) -> Any:
    measure = Measure("", f"{group[0].result.unit}s/s per GPU", ",d", _per_gpu)
    rows = measure.rows(group)
    stars = [
        {key: star[key] for key in ("strategy", "gpus")} | {"value": star["value"] / star["gpus"]}
        for star in stars
    ]
    sizes = sorted({row["gpus"] for row in (*rows, *stars)})
    x = gpu_axis(sizes)
    y = alt.Y(
        "value:Q",
        title=measure.unit,
        scale=alt.Scale(zero=True),
        axis=alt.Axis(format=measure.ticks),
    )
    layers = banded(rows, x, y, names, [], several=len({row["gpus"] for row in rows}) > 1)
    if stars:
        layers.append(_stars(stars, x, y, names, 200, 2))
    title = alt.TitleParams(
        wrap(group[0].result.cluster, _WIDTH // _LETTER), fontSize=11, fontWeight="normal"
    )
    return alt.layer(*layers, title=title, width=_WIDTH, height=HEIGHT)


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a case with its interval, in `unit`; None where it is not known.

    `ticks` is the format of its axis.
    """

    title: str
    unit: str
    ticks: str
    of: Callable[[Answered], Ranged | None]

    def rows(self, group: Iterable[Answered]) -> Rows:
        """Of the cases that have it, over their GPUs."""
        rows = []
        for entry in group:
            result = entry.result
            if figure := self.of(entry):
                memory = result.memory_word
                fits, gpus = result.fits_in_memory, result.gpus
                row = figure_row(entry.strategy, figure, fits=fits, memory=memory, gpus=gpus)
                rows.append(row)
        return rows


def speed(unit: str) -> Measure:
    """Throughput in these units a second."""
    return Measure(f"{unit}s/s of all GPUs", f"{unit}s/s", "~s", _speed)


def cost(currency: str) -> Measure:
    """Money for the tokens that were asked for."""
    return Measure(f"Cost, {currency}", currency, "~s", _cost)


def _speed(entry: Answered) -> Ranged:
    result = entry.result
    return result.tokens_per_s, result.tokens_per_s_low, result.tokens_per_s_high


def _per_gpu(entry: Answered) -> Ranged:
    value, *ends = _speed(entry)
    gpus = entry.result.gpus
    low, high = (None if end is None else end / gpus for end in ends)
    return value / gpus, low, high


def _days(entry: Answered) -> Ranged | None:
    totals = entry.totals
    return None if totals is None else (totals.days, totals.days_low, totals.days_high)


def _cost(entry: Answered) -> Ranged | None:
    totals = entry.totals
    if totals is None or totals.cost is None:
        return None
    return totals.cost, totals.cost_low, totals.cost_high


DAYS = Measure("Days", "days", ",~r", _days)
"""Those of the training that was asked for."""


_GPUS = alt.Tooltip("gpus:Q", title="GPUs")


def over_gpus(
    group: Sequence[Answered],
    names: Sequence[str],
    measure: Measure,
    every: Sequence[Answered] = (),
    comparisons: Iterable[SpeedComparison] = (),
) -> Spec:
    """A figure over GPUs, one line a strategy; bands are 90 % intervals, stars are published.

    All cases of the group are of one cluster; `names` are the strategies of the page, and the axis
    has room for `every` case of it, so that clusters can be compared. Where all are of one size
    there is a point with its interval for each strategy, one below the other.
    """
    rows, shown = measure.rows(group), group[0]
    stars: Rows = []
    # nothing is published of those in which something else was varied
    if shown.cluster in {display_name(shown.case.cluster), offer_name(shown.case.cluster)}:
        stars = _published(comparisons, display_name(shown.case.cluster), names)
    if len({entry.result.gpus for entry in group}) == 1 and not stars:
        return _points(rows, names, measure)
    ends = ends_of(measure.rows(every))
    sizes = sorted({row["gpus"] for row in rows})
    domain = [min(ends), max(ends)] if ends else alt.Undefined
    log = alt.Scale(type="log", nice=False, padding=10, domain=domain)
    axis = alt.Axis(format=measure.ticks, values=log_ticks(ends))
    x, y = gpu_axis(sizes), alt.Y("value:Q", title=measure.unit, scale=log, axis=axis)
    layers = banded(rows, x, y, names, figure_tips(measure.unit, _GPUS), several=len(sizes) > 1)
    if stars:
        tips = [
            alt.Tooltip("strategy:N"),
            alt.Tooltip("gpus:Q", title="GPUs"),
            alt.Tooltip("value:Q", title=f"published {measure.unit}", format=",.0f"),
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


def _points(rows: Rows, names: Sequence[str], measure: Measure) -> Spec:
    colour = by_strategy(names)[0].copy().legend(None)
    axis = alt.Axis(format=measure.ticks, tickCount=5)
    x = alt.X("value:Q", title=measure.unit, scale=scale_of(log=False), axis=axis)
    encoding: Encoding = {"x": x, "y": STRATEGIES, "color": colour}
    layers = [interval(rows, "x", encoding, strokeWidth=5, opacity=2 * BAND)]
    layers += fit_points(
        rows, encoding | {"tooltip": figure_tips(measure.unit, _GPUS)}, size=90, opacity=1
    )
    return spec(alt.layer(*layers), high([row["strategy"] for row in rows]))


def efficiency(group: Sequence[Answered], names: Sequence[str]) -> Spec | None:
    """Throughput per GPU, relative to one node; None for a single size, or where none is known."""
    rows = [
        figure_row(
            entry.strategy,
            (entry.efficiency.value, *(entry.efficiency.ends or (None, None))),
            fits=entry.fits,
            memory=entry.result.memory_word,
            gpus=entry.result.gpus,
            shown=str(entry.efficiency),
            exposed=f"{entry.result.exposed_share:.1%}",
        )
        for entry in group
        if entry.efficiency is not None
    ]
    sizes = sorted({row["gpus"] for row in rows})
    if len(sizes) < 2:  # noqa: PLR2004
        return None
    most = max(1.0, *(row["value"] for row in rows), *(row["high"] or 0.0 for row in rows))
    y = alt.Y(
        "value:Q",
        title="throughput per GPU, relative to one node",
        axis=alt.Axis(format=".0%", tickCount=5),
        scale=alt.Scale(domain=[0, most], nice=False),
    )
    exposed = alt.Tooltip("exposed:N", title="exposed communication")
    tips = [*figure_tips("relative to one node", _GPUS)[:3], exposed]
    return spec(alt.layer(*banded(rows, gpu_axis(sizes), y, names, tips, several=True)), HEIGHT)


def _published(
    comparisons: Iterable[SpeedComparison], cluster: str, names: Collection[str]
) -> Rows:
    """Throughputs of these strategies on a cluster."""
    return [
        {
            "strategy": comparison.cell.strategy,
            "gpus": comparison.cell.gpus,
            "value": comparison.cell.value,
            "error": comparison.error,
        }
        for comparison in comparisons
        if not comparison.cell.over
        and comparison.cell.cluster == cluster
        and comparison.cell.strategy in names
    ]
