"""The schedules that a probe executes, and the times that it reads from their traces."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

from co2sim.schedule import (
    NODE,
    PEERS,
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Group,
    Kind,
    Layout,
    Op,
    Schedule,
)
from co2sim.trace import Span, Trace
from co2sim.units import Seconds
from realrun.probe.samples import Before, Slowdown

SWEPT = "swept"
"""The buffer of collectives that are timed."""

_ALONE, _UNDER = 6, 12
"""Kernels without and with communication in a round."""


def groups(layout: Layout) -> list[Group]:
    """The groups to measure: those of more than one rank, each set of ranks once."""
    found = [WORLD] if layout.world_size > 1 else []
    if layout.nodes > 1 and layout.gpus_per_node > 1:
        found = [NODE, PEERS, WORLD]
    return found


PAUSE, USE = Compute("pause", 1.0), Compute("use", 1.0)
"""Kernels before a collective, and of who waits for it, as a schedule has them."""

_AGAIN = " again"
"""At the end of the name of a collective that follows an equal one."""


def sweep(
    group: Group, kinds: Sequence[Kind], sizes: Iterable[int], *, pauses: bool = False
) -> Schedule:
    """Collectives of all kinds and sizes (bytes), before each of which all ranks meet.

    With `pauses` they compute for a while after they have met, and an equal collective follows at
    once; who sleeps has to wake up, and kernels wait for both as they do in a run.
    """
    meet = Collective(Kind.ALL_REDUCE, "meeting", 1, DType.FP32, WORLD)
    ops = []
    for size in sizes:
        for kind in kinds:
            work = Collective(kind, SWEPT, size // 4, DType.FP32, group)
            name = f"{kind} {size} {group}"
            before, pause, again = f"before {name}", f"pause before {name}", name + _AGAIN
            ops.append(Op(before, meet, "comm"))
            if not pauses:
                ops.append(Op(name, work, "comm"))
                continue
            ops += [
                Op(pause, PAUSE, "compute", (After(before),)),
                Op(name, work, "comm", (After(pause),)),
                Op(f"use of {name}", USE, "compute", (After(name),)),
                Op(again, work, "comm"),
                Op(f"use of {again}", USE, "compute", (After(again),)),
            ]
    return Schedule(f"sweep of {group}", tuple(ops))


def before(name: str, *, pauses: bool) -> Before:
    """What came before a collective of a sweep."""
    if not pauses:
        return "meeting"
    return "equal" if name.endswith(_AGAIN) else "pause"


def in_turn(prefix: str, works: Iterable[Compute]) -> Schedule:
    """Works one after the other on one stream."""
    ops = [Op(f"{prefix}{number}", work, "compute") for number, work in enumerate(works)]
    return Schedule(prefix.strip(), tuple(ops))


def crossing(count: int, nothing: Compute) -> Schedule:
    """Ops of two streams in turn, each waiting for the one before."""
    ops = [
        Op(
            f"crossing {number}",
            nothing,
            ("compute", "other")[number % 2],
            (After(f"crossing {number - 1}"),) if number else (),
        )
        for number in range(count)
    ]
    return Schedule("crossing", tuple(ops))


def overlapped(kernel: Compute, reduce: Collective, ratio: float) -> Schedule:
    """Kernels alone, then more of them under a stream of all-reduces, which goes on when they end.

    `ratio` is the time of a kernel over that of an all-reduce.
    """
    count = min(400, max(2, math.ceil(2.5 * _UNDER * ratio)))
    ops = [
        Op(f"{'alone' if number < _ALONE else 'under'} {number}", kernel, "compute", waits)
        for number in range(_ALONE + _UNDER)
        for waits in [(After(f"reduce {count - 1}", 1),) if number == 0 else ()]
    ]
    start = (After(f"alone {_ALONE - 1}"),)
    ops += [
        Op(f"reduce {number}", reduce, "comm", () if number else start) for number in range(count)
    ]
    return Schedule("compute under communication", tuple(ops))


def on_two_streams(kernel: Compute) -> Schedule:
    """Kernels on one stream, then as many on this one and on one that communicates.

    The ranks meet there first: it has to be a stream that communicates.
    """
    meet = Collective(Kind.ALL_REDUCE, "meeting", 1, DType.FP32, WORLD)
    last = _ALONE - 1
    ops = [Op("meet", meet, "comm", (After(f"under {last}", 1),))]
    for row, stream, after in (
        ("alone", "compute", "meet"),
        ("under", "compute", f"alone {last}"),
        ("beside", "comm", f"alone {last}"),
    ):
        ops += [
            Op(f"{row} {number}", kernel, stream, () if number else (After(after),))
            for number in range(_ALONE)
        ]
    return Schedule("compute on two streams", tuple(ops))


def durations(traces: Iterable[Trace], schedule: Schedule) -> dict[str, list[Seconds]]:
    """Times of every op, first rounds left out.

    Of a collective: from the last member's start to the last member's end, for every round and
    group. Of compute: the median of the slowest rank.
    """
    works = {op.name: op.work for op in schedule.body}
    spans: dict[tuple[str, object], list[Span]] = {}
    for trace in traces:
        for span in trace.spans:
            work = works[span.op]
            if not span.round:
                continue
            if isinstance(work, Collective):
                members = work.group.members(span.rank, trace.layout)
                spans.setdefault((span.op, (span.round, members)), []).append(span)
            else:
                spans.setdefault((span.op, span.rank), []).append(span)
    times: dict[str, list[Seconds]] = {}
    for (op, _), found in spans.items():
        if isinstance(works[op], Collective):
            time = max(span.end for span in found) - max(span.start for span in found)
            times.setdefault(op, []).append(time)
        else:
            time = median(span.end - span.start for span in found)
            times[op] = [max(time, *times.get(op, [0.0]))]
    return times


def slowdown(trace: Trace) -> Slowdown:
    """The slowdown of one rank in `overlapped`."""
    kernels: tuple[list[Seconds], list[Seconds]] = ([], [])
    reduces: tuple[list[Seconds], list[Seconds]] = ([], [])
    for turn in range(1, trace.rounds):
        rows = {
            row: [s for s in trace.spans if s.round == turn and s.op.startswith(row)]
            for row in ("alone", "under", "reduce")
        }
        began, ended = (_extent(rows[row]) for row in ("reduce", "under"))
        kernels[0].extend(_times(rows["alone"]))
        kernels[1].extend(_times(s for s in rows["under"] if _within(s, began)))
        reduces[0].extend(_times(s for s in rows["reduce"] if s.start >= ended[1]))
        reduces[1].extend(_times(s for s in rows["reduce"] if _within(s, ended)))
    under = reduces[1] or _times(s for s in trace.spans if s.op.startswith("reduce"))
    return Slowdown(_ratio(*kernels), _ratio(*reduces), median(under))


def times_as_long(trace: Trace) -> float:
    """Of one rank in `on_two_streams`: both streams, over one of them alone."""
    found = []
    for turn in range(1, trace.rounds):
        spans = [s for s in trace.spans if s.round == turn and s.op != "meet"]
        alone = [s for s in spans if s.op.startswith("alone")]
        (first, middle), (_, last) = _extent(alone), _extent(spans)
        found.append((last - middle) / (middle - first))
    return median(found)


def _extent(spans: Sequence[Span]) -> tuple[Seconds, Seconds]:
    return min(s.start for s in spans), max(s.end for s in spans)


def _within(span: Span, extent: tuple[Seconds, Seconds]) -> bool:
    return extent[0] <= span.start and span.end <= extent[1]


def _times(spans: Iterable[Span]) -> list[Seconds]:
    return [span.end - span.start for span in spans]


def _ratio(alone: Sequence[Seconds], overlapping: Sequence[Seconds]) -> float:
    return median(overlapping) / median(alone) if alone and overlapping else 1.0
