"""Charts of what a round and the memory of a GPU consist of, of gains, and of timelines."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from co2sim.console.figures import COLOURS
from co2sim.memory import GIB
from co2sim.report.chart_style import (
    PALETTE,
    ROW,
    STRATEGIES,
    TEXT,
    Rows,
    Spec,
    cycled,
    data,
    high,
    spec,
)
from co2sim.report.study import Answered
from co2sim.result import Result

PARTS = (
    "computing, nothing sent",
    "computing, communication behind it",
    "exposed communication",
    "slower ranks",
)
"""What a round is spent on."""


def shares(group: Sequence[Answered]) -> Spec:
    """What the time of a round goes to, a bar for each strategy."""
    rows = [
        {"strategy": one.strategy, "part": part, "share": share, "place": place}
        for one in group
        for place, (part, share) in enumerate(parts(one.result).items())
    ]
    colours = [COLOURS[5], COLOURS[2], COLOURS[1], COLOURS[7]]
    chart = (
        alt.Chart(data(rows))
        .mark_bar()
        .encode(
            x=alt.X("share:Q", title="share of a round", axis=alt.Axis(format=".0%")),
            y=STRATEGIES,
            color=alt.Color(
                "part:N", title=None, scale=alt.Scale(domain=list(PARTS), range=colours)
            ),
            order=alt.Order("place:Q"),
            tooltip=["strategy:N", "part:N", alt.Tooltip("share:Q", format=".1%")],
        )
    )
    return spec(chart, high(group))


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
    rows: Rows = [
        {"strategy": one.strategy, "item": item, "size": size / GIB, "place": place}
        for one in group
        for place, (item, size) in enumerate(one.result.memory_bytes_per_gpu.items())
        if item != "total" and size
    ]
    has = group[0].result.gpu_memory_bytes / GIB
    items = list(dict.fromkeys(row["item"] for row in rows))
    bars = (
        alt.Chart(data(rows))
        .mark_bar()
        .encode(
            x=alt.X("size:Q", title="GiB on a GPU"),
            y=STRATEGIES,
            color=alt.Color(
                "item:N",
                title=None,
                scale=alt.Scale(domain=items, range=cycled(_MEMORY, len(items))),
                legend=alt.Legend(columns=2),
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
    return spec(alt.layer(bars, rule), high(group))


_MEMORY = [COLOURS[at] for at in (0, 5, 2, 4, 1, 3, 7)]


def gains(rows: Sequence[Mapping[str, Any]]) -> Spec:
    """What a tenth more of each number gives; `rows` have a `change` and a `gain`."""
    chart = (
        alt.Chart(data(rows))
        .mark_bar(color=COLOURS[0])
        .encode(
            x=alt.X("gain:Q", title="more tokens/s", axis=alt.Axis(format="+.1~%")),
            y=alt.Y("change:N", sort=None, title=None, axis=alt.Axis(labelLimit=220)),
            tooltip=["change:N", alt.Tooltip("gain:Q", format="+.2%")],
        )
    )
    return spec(chart, ROW * len(rows))


def timeline(kinds: Sequence[str], lanes: int) -> Spec:
    """A round on one rank, whose data and time axis the page fills in; it can be zoomed."""
    zoom = alt.selection_interval(bind="scales", encodings=["x"])
    chart = (
        alt.Chart(data([]))
        .mark_bar(height=ROW - 8)
        .encode(
            x=alt.X("start:Q", title="ms", scale=alt.Scale(domain=[0, 1], nice=False)),
            x2="end:Q",
            y=alt.Y("stream:N", sort=None, title=None),
            color=alt.Color(
                "kind:N",
                title=None,
                scale=alt.Scale(domain=list(kinds), range=cycled(PALETTE, len(kinds))),
                legend=alt.Legend(columns=2),
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
    return spec(chart, ROW * lanes)
