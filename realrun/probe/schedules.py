"""The schedules that a probe executes, and the times that it reads from their traces."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TypeVar

import torch.distributed as dist

from co2sim.common.units import Seconds
from co2sim.schedule.schedule import (
    NODE,
    PEERS,
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Group,
    Instance,
    Kind,
    Layout,
    Op,
    Schedule,
)
from co2sim.simulation.trace import Span, Trace
from realrun.execute.executor import execute
from realrun.execute.kernels import Burn, KernelSet, Synthetic
from realrun.execute.world import World, gather_objects
from realrun.measure import TORCH_DTYPE
from realrun.probe.samples import Before, Slowdown

SWEPT = "swept"
"""The buffer of collectives that are timed."""

TURNS = 4
"""Times in a round that kernels get all-reduces beside them."""
ALONE, TAIL = 3, 3
"""Kernels before each time, and all-reduces without kernels at the end."""
_AT_ONCE: Seconds = 1e-3
"""Between two all-reduces that follow each other: ranks do not end together."""
_KERNELS = 6
"""On two streams."""


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


GATE = Compute("gate", 1.0)
"""Holds a GPU until its host has issued what is timed: else that takes as long as its issue."""


def behind_gate(schedule: Schedule) -> Schedule:
    """The schedule, whose stream `compute` begins every round with a gate."""
    return replace(schedule, body=(Op("gate", GATE, "compute"), *schedule.body))


@dataclass(frozen=True)
class Gated(Synthetic):
    """Kernels of a schedule with a gate that is closed for some seconds. Only for GPUs."""

    kernels: KernelSet
    closed: Seconds

    def compute(self, instance: Instance, ready: Seconds) -> Seconds | None:
        """Hold the stream, or compute."""
        if instance.op.work != GATE:
            return self.kernels.compute(instance, ready)
        from realrun.execute.cuda_streams import hold  # noqa: PLC0415 - needs a GPU

        hold(self.closed)
        return None


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


def overlapped(kernel: Compute, reduce: Collective, count: int, beside: int) -> Schedule:
    """Kernels without a pause, which turn by turn run alone and beside `count` all-reduces.

    `beside` of them take about as long as those. At the end of a round all-reduces run alone.
    """
    kernels, reduces = [], []
    for turn in range(TURNS):
        names = [f"kernel {turn} {number}" for number in range(ALONE + beside)]
        waits = [After(f"tail {TAIL - 1}", 1)] if turn == 0 else []
        kernels += [
            Op(name, kernel, "compute", tuple(waits) if name == names[0] else ()) for name in names
        ]
        begin = (After(names[ALONE - 1]),)
        reduces += [
            Op(f"reduce {turn} {number}", reduce, "comm", () if number else begin)
            for number in range(count)
        ]
    end = (After(kernels[-1].name),)
    reduces += [
        Op(f"tail {number}", reduce, "comm", () if number else end) for number in range(TAIL)
    ]
    return Schedule("compute under communication", (*kernels, *reduces))


def on_two_streams(kernel: Compute) -> Schedule:
    """Kernels on one stream, then as many on this one and on one that communicates.

    The ranks meet there first: it has to be a stream that communicates.
    """
    meet = Collective(Kind.ALL_REDUCE, "meeting", 1, DType.FP32, WORLD)
    last = _KERNELS - 1
    ops = [Op("meet", meet, "comm", (After(f"under {last}", 1),))]
    for row, stream, after in (
        ("alone", "compute", "meet"),
        ("under", "compute", f"alone {last}"),
        ("beside", "comm", f"alone {last}"),
    ):
        ops += [
            Op(f"{row} {number}", kernel, stream, () if number else (After(after),))
            for number in range(_KERNELS)
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


def slowdown(traces: Sequence[Trace]) -> Slowdown:
    """That of all ranks in `overlapped`: of means, as a schedule sums up what it has.

    All-reduces begin when the last rank has come: ranks that came before compute alone until then.
    """
    kernels: tuple[list[Seconds], list[Seconds]] = ([], [])
    reduces: tuple[list[Seconds], list[Seconds]] = ([], [])
    spans = [span for trace in traces for span in trace.spans if span.round]
    met: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        if not span.op.startswith("kernel"):
            met.setdefault((span.round, span.op), []).append(span)
    bursts: dict[int, list[tuple[Seconds, Seconds]]] = {}
    for (turn, op), ranks in met.items():
        start, end = max(span.start for span in ranks), max(span.end for span in ranks)
        reduces[not op.startswith("tail")].append(end - start)
        bursts.setdefault(turn, []).append((start, end))
    extents = {turn: _joined(found) for turn, found in bursts.items()}
    for span in spans:
        if span.op.startswith("kernel"):
            near = [one for one in extents[span.round] if one[0] < span.end and span.start < one[1]]
            if not near:
                kernels[0].append(span.end - span.start)
            elif _within(span, near[0]):
                kernels[1].append(span.end - span.start)
    return Slowdown(_ratio(*kernels), _ratio(*reduces), median(reduces[1]))


def _joined(extents: Sequence[tuple[Seconds, Seconds]]) -> list[tuple[Seconds, Seconds]]:
    """Those that follow one another at once, as one."""
    found: list[tuple[Seconds, Seconds]] = []
    for start, end in sorted(extents):
        if found and start - found[-1][1] < _AT_ONCE:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


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


def _ratio(alone: Sequence[Seconds], overlapping: Sequence[Seconds]) -> float:
    """Of the means; 1 where one is missing."""
    return fmean(overlapping) / fmean(alone) if alone and overlapping else 1.0


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """A schedule whose ops are to be timed, `rounds` times in every pass."""

    label: str
    schedule: Schedule
    kernels: KernelSet
    rounds: int


def shared(world: World, value: T) -> T:
    """The value of rank 0, on all ranks."""
    box: list[T] = [value]
    if world.layout.world_size > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]


def traces(world: World, task: ProbeTask) -> list[Trace]:
    """Execute a task once more than its rounds; the traces of all ranks, on rank 0."""
    own = execute(task.schedule, task.kernels, task.rounds + 1, world)
    return gather_objects(world, own) or []  # type: ignore[return-value]


def time(world: World, task: ProbeTask) -> dict[str, list[Seconds]]:
    """`durations` of a task, on all ranks."""
    return shared(world, durations(traces(world, task), task.schedule))


def burn(world: World, precision: str) -> Burn:
    """Kernels that compute in a precision, on the device of this rank."""
    return Burn(world.device, TORCH_DTYPE[DType(precision)])
