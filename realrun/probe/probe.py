"""Measure on all ranks what a cluster file states: by executing schedules, as a run does.

So the overhead of the executor is part of every time. Every rank calls these functions, and all get
the same answer. Sizes and kinds take turns, several times, since the speed of machines drifts.
"""

import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TypeVar

import torch
import torch.distributed as dist
from scipy.stats import trim_mean

from co2sim.common.units import Bytes, Flops, Seconds
from co2sim.hardware.cluster import FULLY_IDLE
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
from realrun.execute.kernels import Burn, KernelSet, Sleep, Synthetic
from realrun.execute.matmul_speed import joined
from realrun.execute.world import World, describe, gather_objects
from realrun.lab.time_dilation import dilation
from realrun.measure import TORCH_DTYPE, Say
from realrun.probe.fit import Before, ComputeSample, Measured, Sample, Slowdown

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
    groups_to_measure = [WORLD] if layout.world_size > 1 else []
    if layout.nodes > 1 and layout.gpus_per_node > 1:
        groups_to_measure = [NODE, PEERS, WORLD]
    return groups_to_measure


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
    ops = [Op(f"{prefix}{index}", work, "compute") for index, work in enumerate(works)]
    return Schedule(prefix.strip(), tuple(ops))


GATE = Compute("gate", 1.0)
"""Holds a GPU until its host has issued what is timed: else that takes as long as its issue."""


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


def overlapped(kernel: Compute, reduce: Collective, count: int, beside: int) -> Schedule:
    """Kernels without a pause, which turn by turn run alone and beside `count` all-reduces.

    `beside` of them take about as long as those. At the end of a round all-reduces run alone.
    """
    kernels, reduces = [], []
    for turn in range(TURNS):
        names = [f"kernel {turn} {index}" for index in range(ALONE + beside)]
        waits = [After(f"tail {TAIL - 1}", 1)] if turn == 0 else []
        kernels += [
            Op(name, kernel, "compute", tuple(waits) if name == names[0] else ()) for name in names
        ]
        begin = (After(names[ALONE - 1]),)
        reduces += [
            Op(f"reduce {turn} {index}", reduce, "comm", () if index else begin)
            for index in range(count)
        ]
    end = (After(kernels[-1].name),)
    reduces += [Op(f"tail {index}", reduce, "comm", () if index else end) for index in range(TAIL)]
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
            Op(f"{row} {index}", kernel, stream, () if index else (After(after),))
            for index in range(_KERNELS)
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
    for (op, _), group_spans in spans.items():
        if isinstance(works[op], Collective):
            time = max(span.end for span in group_spans) - max(span.start for span in group_spans)
            times.setdefault(op, []).append(time)
        else:
            time = median(span.end - span.start for span in group_spans)
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
    extents = {turn: joined(extents_of_turn, _AT_ONCE) for turn, extents_of_turn in bursts.items()}
    for span in spans:
        if span.op.startswith("kernel"):
            near = [
                extent
                for extent in extents[span.round]
                if extent[0] < span.end and span.start < extent[1]
            ]
            if not near:
                kernels[0].append(span.end - span.start)
            elif _within(span, near[0]):
                kernels[1].append(span.end - span.start)
    return Slowdown(_ratio(*kernels), _ratio(*reduces), median(reduces[1]))


def times_as_long(trace: Trace) -> float:
    """Of one rank in `on_two_streams`: both streams, over one of them alone."""
    ratios = []
    for turn in range(1, trace.rounds):
        spans = [s for s in trace.spans if s.round == turn and s.op != "meet"]
        alone = [s for s in spans if s.op.startswith("alone")]
        (first, middle), (_, last) = _extent(alone), _extent(spans)
        ratios.append((last - middle) / (middle - first))
    return median(ratios)


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
    trace = execute(task.schedule, task.kernels, task.rounds + 1, world)
    return gather_objects(world, trace) or []  # type: ignore[return-value]


def time(world: World, task: ProbeTask) -> dict[str, list[Seconds]]:
    """`durations` of a task, on all ranks."""
    return shared(world, durations(traces(world, task), task.schedule))


def burn(world: World, precision: str) -> Burn:
    """Kernels that compute in a precision, on the device of this rank."""
    return Burn(world.device, TORCH_DTYPE[DType(precision)])


_GENERATIONS = {(7, 0): "V100", (8, 0): "A100", (9, 0): "H100", (10, 0): "B200"}
"""NVIDIA's GPUs for training by compute capability (CUDA C++ Programming Guide, section 17)."""


def generation(device: torch.device) -> str | None:
    """The first GPU with the same multiprocessors; None for others, and for CPUs."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return _GENERATIONS.get(torch.cuda.get_device_capability(device))


def machine(world: World) -> str:
    """What this ran on, as a text: hardware, torch, threads."""
    about = describe(world.device, world.backend)
    hardware = about["hardware"]
    if world.device.type == "cpu":
        about_cores = Path("/proc/cpuinfo")
        lines = about_cores.read_text().splitlines() if about_cores.is_file() else []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        hardware = f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"
        threads = torch.get_num_threads()
        hardware += f", {threads} thread{'s' if threads > 1 else ''} a rank"
    return f"{hardware}, torch {about['torch']}"


def memory(world: World) -> Bytes:
    """Memory of one rank: the GPU's, or its share of the node's."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages / world.layout.gpus_per_node


_PASSES = 3
_ROUNDS, _ROUNDS_OF_MEANS = 8, 64
"""The most rounds of a pass; one more warms up. Means need many: a rare late wake-up counts."""

_SMALLEST = 2**12
_FACTOR = 4
"""From one size to the next."""

_KINDS_COST = 4.0
"""A sweep of all kinds takes this many times as long as its largest all-reduce (ring: 3 x 4/3)."""

_PAUSE: Seconds = 1.2 * FULLY_IDLE
"""Before a collective where means count."""
_USE: Seconds = 0.3e-3
"""Of a kernel that waits for a collective: short, so that it is over when the next one ends."""
_LONG_PAUSE: Seconds = 30e-3
"""Before large ones: what a rank does after local steps takes longer, as its core has been idle."""

_KERNEL: Seconds = 0.1
"""The longest kernel."""
_MIN_FLOPS: Mapping[str, Flops] = {"cpu": 2.0**21, "cuda": 2.0**30}
"""Of the smallest kernel: on a GPU less than a row of the matrices that it multiplies is a row."""
_COPIED = {
    "cpu": tuple(2.0**power for power in (20, 22, 24, 26, 28)),
    "cuda": tuple(2.0**power for power in (24, 26, 28, 30, 32)),
}
_LONG_ENOUGH: Seconds = 1e-3
"""Of a kernel that says how long larger ones take: not the time of issuing it."""
_EMPTY_OPS = 200
_ISSUE: Seconds = 1e-4
"""More than a host needs to issue an op: 44 us between events on an H100, a kernel included."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: no kernels if there is no precision. `budget` bounds the time, roughly.

    Of repetitions the median counts, or with `means` the mean without the shortest and the longest
    tenth: many small collectives take the sum of their times, late wake-ups included. Where rates
    are stated, `beyond` is a size that does not pass with a burst.
    """

    precisions: tuple[str, ...]
    max_size: Bytes
    budget: Seconds
    means: bool = False
    beyond: Bytes | None = None


class _Idle(Synthetic):
    """Computes nothing."""

    def compute(self, instance: object, ready: Seconds) -> None:
        """Be done."""


def probe(world: World, plan: Plan, say: Say = lambda _: None) -> Measured:
    """Measure everything. Raises what `execute` raises."""
    say("how long things take")
    most = _ROUNDS_OF_MEANS if plan.means else _ROUNDS
    budget = plan.budget / dilation()
    sweeps = _sweeps(world, plan.max_size, 0.6 * budget, most, pauses=plan.means)
    burns = _burns(world, plan.precisions, 0.25 * budget)
    times: dict[str, list[list[Seconds]]] = {}
    if plan.beyond:
        sweeps += [_beyond(group, plan.beyond) for group in groups(world.layout)]
    tasks = [*sweeps, *burns, _overhead(world)]
    for turn in range(_PASSES):
        for task in tasks:
            say(f"{task.label}, pass {turn + 1} of {_PASSES}")
            for op, lasted in time(world, task).items():
                times.setdefault(op, []).append(lasted)
    middle = _mean if plan.means else median
    seconds = {op: middle(list(chain.from_iterable(passes))) for op, passes in times.items()}
    drifts = {op: _drift(passes) for op, passes in times.items()}
    works = {op.name: op.work for task in tasks for op in task.schedule.body}
    collectives = tuple(
        Sample(work, seconds[op], drifts[op], before(op, pauses=plan.means))
        for op, work in works.items()
        if isinstance(work, Collective) and work.buffer == SWEPT
    )
    compute = {name: _samples(works, seconds, drifts, f"{name} ") for name in plan.precisions}
    slower: tuple[Slowdown, ...] = ()
    beside: float | None = None
    if plan.precisions and world.layout.world_size > 1:
        say("compute and communication side by side")
        kernels = compute[plan.precisions[0]]
        slower = slowdowns(world, plan.precisions[0], kernels, collectives, 0.3 * budget)
        if world.device.type == "cpu":
            beside = together(world, plan.precisions[0], kernels)
    return Measured(
        layout=world.layout,
        backend=world.backend,
        machine=shared(world, machine(world)),
        generation=shared(world, generation(world.device)),
        memory=shared(world, memory(world)),
        collectives=collectives,
        compute=compute,
        copies=_samples(works, seconds, drifts, "copy "),
        launch=median(time for op, time in seconds.items() if op.startswith("empty ")),
        slowdowns=slower,
        together=beside,
    )


def _sweeps(
    world: World, max_size: Bytes, budget: Seconds, most: int, *, pauses: bool
) -> list[ProbeTask]:
    """A sweep for every group: sizes, and rounds up to `most`, as its share of time allows."""
    tasks = []
    every = groups(world.layout)
    for group in every:
        share = budget / len(every) / _PASSES
        sizes = [_SMALLEST, _SMALLEST * _FACTOR]
        first = _trial(world, group, sizes[0])
        while True:
            last = _trial(world, group, sizes[-1])
            cost = _KINDS_COST * last + 2 * len(Kind) * len(sizes) * first
            following = _FACTOR * sizes[-1]
            if following > max_size or 2 * _FACTOR * _KINDS_COST * last > share:
                break
            sizes.append(following)
        if pauses:
            cost = 2 * cost + _PAUSE / dilation() * len(Kind) * len(sizes)
        rounds = min(most, max(1, int(share / cost) - 1))
        schedule = sweep(group, list(Kind), sizes, pauses=pauses)
        kernels = _pausing(_PAUSE) if pauses else _Idle()
        tasks.append(ProbeTask(f"collectives of {group}", schedule, kernels, rounds))
    return tasks


def _beyond(group: Group, size: Bytes) -> ProbeTask:
    """What does not pass with a burst, after a long pause; no chains, which their hops bind."""
    kinds = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.ALL_TO_ALL)
    schedule = sweep(group, kinds, [int(size)], pauses=True)
    return ProbeTask(f"large collectives of {group}", schedule, _pausing(_LONG_PAUSE), _ROUNDS)


def _pausing(pause: Seconds) -> Sleep:
    """What a sweep computes: pauses by the clock of the machine, whose cores go idle."""
    return Sleep({PAUSE: pause / dilation(), USE: _USE / dilation()})


def _trial(world: World, group: Group, size: int) -> Seconds:
    """About how long an all-reduce takes, connections made."""
    schedule = sweep(group, [Kind.ALL_REDUCE], [size])
    times = time(world, ProbeTask("", schedule, _Idle(), 3))
    return min(times[schedule.body[-1].name])


def _burns(world: World, precisions: Iterable[str], budget: Seconds) -> list[ProbeTask]:
    """Kernels of rising size for every precision, and copies."""
    tasks = []
    named, device = list(precisions), world.device.type
    for name in named:
        kernels = burn(world, name)
        size, once = 2.0**28, 0.0
        while once < _LONG_ENOUGH / dilation():
            trial = Schedule("trial", (Op("trial", Compute("probe", size), "compute"),))
            (once,) = time(world, _task(world, "", trial, kernels, 2))["trial"]
            per_flop = once / size
            size *= _FACTOR
        most = min(_KERNEL, budget / 40 / len(named)) / per_flop
        least = _MIN_FLOPS[device]
        steps = max(3, int(math.log(max(1.0, most / least), _FACTOR)) + 1)
        # Falling: a small kernel right after a large one is slow, as few are in a schedule.
        sizes = [least * _FACTOR**step for step in reversed(range(steps))]
        works = in_turn(f"{name} ", [Compute("probe", size) for size in sizes])
        tasks.append(_task(world, f"kernels in {name}", works, kernels, _ROUNDS))
    if named:
        copies = in_turn("copy ", [Compute("probe", 0.0, size) for size in _COPIED[device]])
        tasks.append(_task(world, "memory", copies, burn(world, named[0]), 4))
    return tasks


def _overhead(world: World) -> ProbeTask:
    """Ops that do next to nothing."""
    on_gpu = world.device.type == "cuda"
    kernels: KernelSet = burn(world, "fp32") if on_gpu else _Idle()
    nothing = Compute("empty", 0.0, 2.0 if on_gpu else 0.0)
    return _task(world, "overhead of an op", in_turn("empty ", [nothing] * _EMPTY_OPS), kernels, 2)


def _task(
    world: World, label: str, schedule: Schedule, kernels: KernelSet, rounds: int
) -> ProbeTask:
    """A task whose times are those of the device, not of a host that issues it."""
    if world.device.type == "cuda":
        kernels = Gated(kernels, _ISSUE * len(schedule.body))
        schedule = replace(schedule, body=(Op("gate", GATE, "compute"), *schedule.body))
    return ProbeTask(label, schedule, kernels, rounds)


def _mean(times: Sequence[Seconds]) -> Seconds:
    return float(trim_mean(times, 0.1))


def _drift(passes: Sequence[Sequence[Seconds]]) -> float:
    """The standard deviation of the logarithms of the medians of passes."""
    return stdev(math.log(median(times)) for times in passes)


def _samples(
    works: dict[str, Compute | Collective],
    seconds: dict[str, Seconds],
    drifts: dict[str, float],
    prefix: str,
) -> tuple[ComputeSample, ...]:
    """By rising size."""
    samples = [
        ComputeSample(work, seconds[op], drifts[op])
        for op, work in works.items()
        if op.startswith(prefix) and isinstance(work, Compute)
    ]
    return tuple(sorted(samples, key=lambda sample: sample.work.flops + sample.work.memory_bytes))


_SHORT_AND_LONG: tuple[Seconds, Seconds] = (0.003, 0.1)
"""Of all-reduces: calls count in short ones, and in long ones bytes."""
_SHORT_KERNEL: Seconds = 0.008
"""Of kernels beside them: short, so that those alone and those beside see the same machine."""
_BESIDE: Seconds = 0.1
"""Of the all-reduces that kernels get beside them at once."""
_MAX_AT_ONCE = 100
"""All-reduces, and kernels: where they are much shorter, a turn is."""
_MIN_ROUNDS, _MAX_ROUNDS = 3, 64
_PAIR_ROUNDS = 5
"""On two streams."""


def slowdowns(
    world: World,
    precision: str,
    kernels: Sequence[ComputeSample],
    collectives: Sequence[Sample],
    budget: Seconds,
) -> tuple[Slowdown, ...]:
    """How much longer kernels take while all-reduces of their rank follow one another, and they."""
    kernel = min(kernels, key=partial(_away, _SHORT_KERNEL))
    reduces = [s for s in collectives if s.work.kind is Kind.ALL_REDUCE and s.work.group == WORLD]
    chosen = [min(reduces, key=partial(_away, seconds)) for seconds in _SHORT_AND_LONG]
    measured = []
    for reduce in dict.fromkeys(chosen):
        count = min(_MAX_AT_ONCE, max(1, round(_BESIDE / reduce.seconds)))
        beside = min(_MAX_AT_ONCE, math.ceil(count * reduce.seconds / kernel.seconds) + 1)
        schedule = overlapped(kernel.work, reduce.work, count, beside)
        once = TURNS * (ALONE + beside) * kernel.seconds + TAIL * reduce.seconds
        rounds = min(_MAX_ROUNDS, max(_MIN_ROUNDS, int(budget / len(_SHORT_AND_LONG) / once)))
        task = ProbeTask("", schedule, burn(world, precision), rounds)
        ranks = traces(world, task)
        measured.append(
            shared(world, slowdown(ranks) if ranks else Slowdown(1.0, 1.0, reduce.seconds))
        )
    return tuple(measured)


def together(world: World, precision: str, kernels: Sequence[ComputeSample]) -> float:
    """How many times as long kernels of two streams take at once as those of one of them alone."""
    kernel = min(kernels, key=partial(_away, 0.005))
    task = ProbeTask("", on_two_streams(kernel.work), burn(world, precision), _PAIR_ROUNDS)
    ranks = [times_as_long(trace) for trace in traces(world, task)]
    return shared(world, median(ranks) if ranks else 1.0)


def _away(wanted: Seconds, sample: Sample | ComputeSample) -> float:
    return abs(math.log(sample.seconds / wanted))
