"""Charts of what a round and the memory of a GPU consist of, of gains, and of timelines."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any

import altair as alt
import vl_convert

from co2sim.models.memory import GIB
from co2sim.prediction.case import Case
from co2sim.prediction.figures import shared_batch
from co2sim.prediction.published import SpeedComparison
from co2sim.prediction.result import Result
from co2sim.report.chart_style import (
    BROWN,
    COLUMNS,
    CONFIG,
    FAINT,
    GREY,
    HEIGHT,
    ROW,
    SKY,
    STRATEGIES,
    TAN,
    TEXT,
    Drawn,
    Rows,
    Spec,
    by_colour,
    by_shape,
    by_strategy,
    data,
    faded,
    high,
    log_ticks,
    of_works,
    picked,
    spec,
)
from co2sim.report.line_charts import STAR, banded, gpu_axis
from co2sim.report.rounds import Round
from co2sim.report.tables import Answered
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
    values = {row["part"]: f"{row['share']:.1%}" for row in rows} if told else {}
    known = [part for part in PARTS if part in values] if told else list(PARTS)
    colours = dict(zip(PARTS, (SKY, TAN, BROWN, GREY), strict=True))
    return (
        alt.Chart(data(rows))
        .mark_bar()
        .encode(
            x=alt.X("share:Q", title="share of a round", axis=alt.Axis(format=".0%", tickCount=5)),
            y=_ALONE if told else STRATEGIES,
            color=alt.Color(
                "part:N",
                title=None,
                scale=alt.Scale(domain=known, range=[colours[part] for part in known]),
                legend=_legend(values),
            ),
            order=alt.Order("place:Q"),
            tooltip=["strategy:N", "part:N", alt.Tooltip("share:Q", format=".1%")],
        )
    )


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
    items = list(dict.fromkeys(row["item"] for row in rows))
    values = {row["item"]: f"{row['size']:.3g} GiB" for row in rows} if told else {}
    bars = (
        alt.Chart(data(rows))
        .mark_bar()
        .encode(
            x=alt.X("size:Q", title="GiB on a GPU"),
            y=_ALONE if told else STRATEGIES,
            color=alt.Color(
                "item:N",
                title=None,
                scale=alt.Scale(domain=items, range=[_OF_ITEMS.get(item, GREY) for item in items]),
                legend=_legend(values, columns=3 if told else 2),
            ),
            order=alt.Order("place:Q"),
            tooltip=["strategy:N", "item:N", alt.Tooltip("size:Q", format=".3~g", title="GiB")],
        )
    )
    rule = (
        alt.Chart(data([{"size": has}]))
        .mark_rule(strokeDash=[6, 4], strokeWidth=2, color=TEXT)
        .encode(x="size:Q", tooltip=[alt.Tooltip("size:Q", format=".4~g", title="GiB it has")])
    )
    return alt.layer(bars, rule)


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
    fixed = fixed or {}
    here = dict.fromkeys(bar.kind for one in rounds for bar in one.bars)
    kinds = [kind for kind in here if kind not in fixed]
    own = {kind: colour for kind, colour in fixed.items() if kind in here}
    lanes = max(len({bar.stream for bar in one.bars}) for one in rounds)
    return spec(timeline_bars([], kinds, 1, own), ROW * lanes)


def timeline_bars(
    rows: Rows, kinds: Sequence[str], length: float, fixed: Mapping[str, str] | None = None
) -> Drawn:
    """A round of `length` ms on one rank; `rows` are those of `TimelineBar`.

    `fixed` are further kinds with their colours.
    """
    fixed = fixed or {}
    zoom = alt.selection_interval(bind="scales", encodings=["x"])
    return (
        alt.Chart(data(rows))
        .mark_bar(height=ROW - 8)
        .encode(
            x=alt.X(
                "start:Q",
                title="ms",
                scale=alt.Scale(domain=[0, length], nice=False),
                axis=alt.Axis(tickCount=8),
            ),
            x2="end:Q",
            y=alt.Y("stream:N", sort=None, title=None),
            color=alt.Color(
                "kind:N",
                title=None,
                scale=alt.Scale(domain=[*kinds, *fixed], range=[*of_works(kinds), *fixed.values()]),
                legend=alt.Legend(columns=COLUMNS),
            ),
            tooltip=[
                "kind:N",
                alt.Tooltip("ops:N"),
                alt.Tooltip("start:Q", format=".4~g", title="start, ms"),
                alt.Tooltip("length:Q", format=".4~g", title="takes, ms"),
            ],
        )
        .add_params(zoom)
    )


_BAND = 0.18


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
    layers = [
        *_intervals(rows, x, y, log, _looks(shown, names, offers=offers)["color"], names),
        *_joined([row for row in rows if row["front"]], x, y),
        *_points(rows, x, y, unit, _looks(shown, names, offers=offers), names),
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
    size = alt.Size(
        "gpus:Q",
        title="GPUs",
        scale=alt.Scale(type="log", range=[40, 320]) if len(sizes) > 1 else alt.Undefined,
        legend=alt.Legend(values=ticks, columns=len(ticks), symbolFillColor=TEXT)
        if len(sizes) > 1
        else None,
    )
    if offers:
        return {
            "color": by_colour("cluster", clusters),
            "shape": by_shape("strategy", names),
            "size": size,
        }
    colour, shape = by_strategy(names)
    several = len(set(clusters)) > 1
    return {
        "color": colour,
        "shape": by_shape("cluster", clusters) if several else shape,
        "size": size,
    }


def _intervals(
    rows: Rows, x: alt.X, y: alt.Y, log: alt.Scale, colour: Any, names: Sequence[str]
) -> Iterator[Any]:
    """Lines across and upright."""
    thin = faded(names, 0.4, band=True)
    across = alt.X("days_low:Q", scale=log, title="days")
    for rule in _rules(rows, "days_low"):
        yield rule.encode(x=across, x2="days_high:Q", y=y, color=colour, opacity=thin)
    upright = alt.Y("cost_low:Q", scale=log)
    for rule in _rules(rows, "cost_low"):
        yield rule.encode(x=x, y=upright, y2="cost_high:Q", color=colour, opacity=thin)


def _joined(line: Rows, x: alt.X, y: alt.Y) -> Iterator[Any]:
    """What nothing beats, dashed."""
    if line:
        yield alt.Chart(data(line)).mark_line(color=TEXT, strokeDash=[4, 3]).encode(x=x, y=y)


def _points(
    rows: Rows, x: alt.X, y: alt.Y, unit: str, looks: Mapping[str, Any], names: Sequence[str]
) -> Iterator[Any]:
    """Hollow where a case does not fit in memory."""
    tips = [
        alt.Tooltip("name:N"),
        alt.Tooltip("days:Q", format=",.3~g"),
        alt.Tooltip("cost:Q", format=",.3~s", title=unit),
        alt.Tooltip("front:N", title="nothing is cheaper and faster"),
    ]
    for fits in (True, False):
        here = [row for row in rows if row["fits"] == fits]
        if here:
            marks = alt.Chart(data(here)).mark_point(filled=fits)
            yield marks.encode(x=x, y=y, opacity=faded(names), tooltip=tips, **looks)


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


def _rules(rows: Rows, known: str) -> list[Any]:
    """Lines for intervals, where any is known."""
    found = [row for row in rows if row[known] is not None]
    return [alt.Chart(data(found)).mark_rule()] if found else []


def _marks(rows: Rows, x: alt.X, y: alt.Y) -> Iterator[Any]:
    """Rings, with words below the first one and above the others, which may lie near."""
    for row in rows:
        base = alt.Chart(data([row])).encode(x=x, y=y)
        yield base.mark_point(size=700, filled=False, color=TEXT, strokeWidth=1.5)
        below = row is rows[0]
        yield base.mark_text(dy=26 if below else -26, color=TEXT, fontSize=12).encode(text="mark:N")


def _limit(name: str, value: float, log: alt.Scale) -> Any:
    """A line at the most days, or the most money."""
    rule = alt.Chart(data([{name: value}])).mark_rule(strokeDash=[2, 3], color=TEXT)
    tip = [alt.Tooltip(f"{name}:Q", title=f"the most {name}", format=",.6~g")]
    if name == "days":
        return rule.encode(x=alt.X("days:Q", scale=log), tooltip=tip)
    return rule.encode(y=alt.Y("cost:Q", scale=log), tooltip=tip)


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


def draw(
    cases: Sequence[Case],
    results: Sequence[Result],
    comparisons: Sequence[SpeedComparison],
    uneven: str = "",
) -> dict[str, bytes]:
    """The picture as PNG and SVG. Bands are 90 % intervals, stars are published.

    What does not fit in memory is not drawn, unless nothing fits. `uneven` says what makes ranks
    differ.
    """
    drawn = chart(cases, results, comparisons, uneven).to_dict()
    drawn["config"] = CONFIG | {"background": "white", "font": "sans-serif"}
    drawn["config"]["legend"] = CONFIG["legend"] | {"labelLimit": 0, "columns": 2}
    text = json.dumps(drawn).replace(TEXT, "#000000")
    return {
        "png": vl_convert.vegalite_to_png(text, scale=2),
        "svg": vl_convert.vegalite_to_svg(text).encode(),
    }


def chart(
    cases: Sequence[Case],
    results: Sequence[Result],
    comparisons: Sequence[SpeedComparison],
    uneven: str,
) -> Any:
    """The picture as Altair has it."""
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
        mark = alt.Chart(data(stars)).mark_point(shape=STAR, size=200, filled=False, strokeWidth=2)
        layers.append(mark.encode(x=x, y=y, color=by_strategy(names)[0]))
    title = alt.TitleParams(
        wrap(results[0].cluster, _WIDTH // _LETTER), fontSize=11, fontWeight="normal"
    )
    return alt.layer(*layers, title=title, width=_WIDTH, height=HEIGHT)
