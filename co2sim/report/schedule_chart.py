"""A picture of a schedule: its ops by stream, and what waits for what."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import altair as alt

from co2sim.report.chart_style import COLUMNS, TEXT, WORKS, Drawn, Rows, cycled, data
from co2sim.report.rounds import kind_of
from co2sim.schedule import Op, Schedule
from co2sim.units import counted

_ROW = 20
_COLUMN = 120
_TOLD = 8
"""Waits that a tooltip names."""
_KINDS = 3
"""Kinds of work that a legend names for ops in a row."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Ops of one stream in a row: only the first one waits, and only the last one is waited for."""

    ops: tuple[Op, ...]

    @property
    def name(self) -> str:
        more = len(self.ops) - 1
        return f"{self.ops[0].name} and {more:,} more" if more else self.ops[0].name

    @property
    def stream(self) -> str:
        return self.ops[0].stream

    def to_row(self) -> dict[str, str]:
        kinds = list(dict.fromkeys(kind_of(op.work) for op in self.ops))
        after = self.ops[0].after
        more = len(after) - _TOLD
        waits = ", ".join(map(str, after[:_TOLD])) + (f" and {more} more" if more > 0 else "")
        last = self.ops[-1]
        return {
            "op": self.name,
            "stream": self.stream,
            "kind": ", ".join(kinds[:_KINDS]) + (", ..." if len(kinds) > _KINDS else ""),
            "work": str(last.work) if len(self.ops) == 1 else f"up to {last.name}",
            "after": waits or "its stream alone",
        }


def graph(schedule: Schedule, first: int) -> tuple[Drawn, list[str]]:
    """The first ops from top to bottom in order of issue, and remarks on what the picture shows.

    Streams are columns. A line goes from an op to one on another stream that waits for it. Ops in a
    row of a stream that no other stream waits for are one point.
    """
    runs = _runs(schedule)[:first]
    rows = [run.to_row() for run in runs]
    names = [run.name for run in runs]
    streams = list(dict.fromkeys(run.stream for run in runs))
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    y = alt.Y(
        "op:N",
        title=None,
        scale=alt.Scale(type="point", domain=names),
        axis=alt.Axis(labelLimit=260, ticks=False, domain=False, grid=True),
    )
    x = alt.X(
        "stream:N",
        title=None,
        scale=alt.Scale(type="point", domain=streams),
        axis=alt.Axis(orient="top", labelAngle=0, labelLimit=_COLUMN - 10, domain=False),
    )
    waits, hidden = _waits(runs)
    lines: list[tuple[Rows, dict[str, Any]]] = [
        (_follow(runs), {"opacity": 0.25, "strokeWidth": 1})
    ]
    lines += [
        ([row for row in waits if not row["earlier"]], {"opacity": 0.7}),
        ([row for row in waits if row["earlier"]], {"opacity": 0.7, "strokeDash": [4, 3]}),
    ]
    rules = [
        alt.Chart(data(here)).mark_rule(color=TEXT, **style).encode(x=x, y=y, x2="to", y2="for")
        for here, style in lines
        if here
    ]
    points = (
        alt.Chart(data(rows))
        .mark_point(filled=True, size=110, opacity=1)
        .encode(
            x=x,
            y=y,
            color=alt.Color(
                "kind:N",
                title=None,
                scale=alt.Scale(domain=kinds, range=cycled(WORKS, len(kinds))),
                legend=alt.Legend(columns=COLUMNS),
            ),
            tooltip=["op:N", "stream:N", "work:N", alt.Tooltip("after:N", title="waits for")],
        )
    )
    chart = alt.layer(*rules, points).properties(
        width=_COLUMN * len(streams), height=_ROW * max(len(runs), 2)
    )
    return chart, _remarks(schedule, runs, hidden, waits)


def _runs(schedule: Schedule) -> list[_Stretch]:
    streams = {op.name: op.stream for op in schedule.body}
    awaited = {
        wait.op for op in schedule.body for wait in op.after if streams[wait.op] != op.stream
    }
    found: list[list[Op]] = []
    for op in schedule.body:
        waits = any(streams[wait.op] != op.stream for wait in op.after)
        last = found[-1][-1] if found else None
        if last and last.stream == op.stream and last.name not in awaited and not waits:
            found[-1].append(op)
        else:
            found.append([op])
    return [_Stretch(tuple(ops)) for ops in found]


def _follow(runs: Sequence[_Stretch]) -> Rows:
    """A stream runs its ops one by one."""
    own: dict[str, list[_Stretch]] = {}
    for run in runs:
        own.setdefault(run.stream, []).append(run)
    return [
        {"op": one.name, "stream": one.stream, "for": other.name, "to": other.stream}
        for along in own.values()
        for one, other in pairwise(along)
    ]


def _waits(runs: Sequence[_Stretch]) -> tuple[Rows, int]:
    """The waits for ops of other streams, and how many are for ops that are not shown."""
    known = {op.name: run for run in runs for op in run.ops}
    asked = [(wait, run) for run in runs for wait in run.ops[0].after]
    found = [
        {
            "op": known[wait.op].name,
            "stream": known[wait.op].stream,
            "for": run.name,
            "to": run.stream,
            "earlier": bool(wait.rounds_ago),
        }
        for wait, run in asked
        if wait.op in known and known[wait.op].stream != run.stream
    ]
    return found, sum(wait.op not in known for wait, _ in asked)


def _remarks(schedule: Schedule, runs: Sequence[_Stretch], hidden: int, waits: Rows) -> list[str]:
    ops, whole = sum(len(run.ops) for run in runs), len(schedule.body)
    shown = f"The {counted(whole, 'op')}" if ops == whole else f"{ops:,} of {counted(whole, 'op')}"
    remarks = [f"{shown} of a round, in order of issue; streams are columns."]
    if waits:
        remarks.append("Lines: the lower op waits for the upper one.")
    if any(row["earlier"] for row in waits):
        remarks.append("Dashed: the upper op waits for the lower one of an earlier round.")
    if hidden:
        remarks.append(f"{counted(hidden, 'wait')} for ops further down.")
    return remarks
