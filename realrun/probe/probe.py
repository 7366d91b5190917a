"""Measure on all ranks what a cluster file states: by executing schedules, as a run does.

So the overhead of the executor is part of every time. Every rank calls these functions, and all get
the same answer. Sizes and kinds take turns, several times, since the speed of machines drifts.
"""

import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median, stdev

import torch
from scipy.stats import trim_mean

from co2sim.common.units import Bytes, Flops, Seconds
from co2sim.hardware.cluster import FULLY_IDLE
from co2sim.schedule.schedule import WORLD, Collective, Compute, Group, Kind, Op, Schedule
from realrun.execute.kernels import KernelSet, Sleep, Synthetic
from realrun.execute.world import World, describe
from realrun.lab.time_dilation import dilation
from realrun.measure import Say
from realrun.probe.samples import ComputeSample, Measured, Sample, Slowdown
from realrun.probe.schedules import (
    ALONE,
    PAUSE,
    SWEPT,
    TAIL,
    TURNS,
    USE,
    Gated,
    ProbeTask,
    before,
    behind_gate,
    burn,
    crossing,
    groups,
    in_turn,
    on_two_streams,
    overlapped,
    shared,
    slowdown,
    sweep,
    time,
    times_as_long,
    traces,
)

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
        lines = Path("/proc/cpuinfo").read_text().splitlines() if _is_linux() else []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        hardware = f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"
        threads = torch.get_num_threads()
        hardware += f", {threads} thread{'s' if threads > 1 else ''} a rank"
    return f"{hardware}, torch {about['torch']}"


def _is_linux() -> bool:
    return Path("/proc/cpuinfo").is_file()


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
    tasks = [*sweeps, *burns, *_overheads(world)]
    for turn in range(_PASSES):
        for task in tasks:
            say(f"{task.label}, pass {turn + 1} of {_PASSES}")
            for op, found in time(world, task).items():
                times.setdefault(op, []).append(found)
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
    launch = _middle(seconds, "empty ")
    return Measured(
        layout=world.layout,
        backend=world.backend,
        machine=shared(world, machine(world)),
        generation=shared(world, generation(world.device)),
        memory=shared(world, memory(world)),
        collectives=collectives,
        compute=compute,
        copies=_samples(works, seconds, drifts, "copy "),
        launch=launch,
        handover=max(0.0, _middle(seconds, "crossing ") - launch),
        slowdowns=slower,
        together=beside,
    )


def _sweeps(
    world: World, max_size: Bytes, budget: Seconds, most: int, *, pauses: bool
) -> list[ProbeTask]:
    """A sweep for every group: sizes, and rounds up to `most`, as its share of time allows."""
    found = []
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
        found.append(ProbeTask(f"collectives of {group}", schedule, kernels, rounds))
    return found


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
    found = []
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
        found.append(_task(world, f"kernels in {name}", works, kernels, _ROUNDS))
    if named:
        copies = in_turn("copy ", [Compute("probe", 0.0, size) for size in _COPIED[device]])
        found.append(_task(world, "memory", copies, burn(world, named[0]), 4))
    return found


def _overheads(world: World) -> list[ProbeTask]:
    """Ops that do next to nothing, on one stream, and each waiting for another stream."""
    on_gpu = world.device.type == "cuda"
    kernels: KernelSet = burn(world, "fp32") if on_gpu else _Idle()
    nothing = Compute("empty", 0.0, 2.0 if on_gpu else 0.0)
    empty = in_turn("empty ", [nothing] * _EMPTY_OPS)
    return [
        _task(world, "overhead of an op", empty, kernels, 2),
        _task(world, "overhead of a wait", crossing(_EMPTY_OPS, nothing), kernels, 2),
    ]


def _task(
    world: World, label: str, schedule: Schedule, kernels: KernelSet, rounds: int
) -> ProbeTask:
    """A task whose times are those of the device, not of a host that issues it."""
    if world.device.type == "cuda":
        kernels = Gated(kernels, _ISSUE * len(schedule.body))
        schedule = behind_gate(schedule)
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
    found = [
        ComputeSample(work, seconds[op], drifts[op])
        for op, work in works.items()
        if op.startswith(prefix) and isinstance(work, Compute)
    ]
    return tuple(sorted(found, key=lambda sample: sample.work.flops + sample.work.memory_bytes))


def _middle(seconds: dict[str, Seconds], prefix: str) -> Seconds:
    return median(time for op, time in seconds.items() if op.startswith(prefix))


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
    found = []
    for reduce in dict.fromkeys(chosen):
        count = min(_MAX_AT_ONCE, max(1, round(_BESIDE / reduce.seconds)))
        beside = min(_MAX_AT_ONCE, math.ceil(count * reduce.seconds / kernel.seconds) + 1)
        schedule = overlapped(kernel.work, reduce.work, count, beside)
        once = TURNS * (ALONE + beside) * kernel.seconds + TAIL * reduce.seconds
        rounds = min(_MAX_ROUNDS, max(_MIN_ROUNDS, int(budget / len(_SHORT_AND_LONG) / once)))
        task = ProbeTask("", schedule, burn(world, precision), rounds)
        ranks = traces(world, task)
        found.append(
            shared(world, slowdown(ranks) if ranks else Slowdown(1.0, 1.0, reduce.seconds))
        )
    return tuple(found)


def together(world: World, precision: str, kernels: Sequence[ComputeSample]) -> float:
    """How many times as long kernels of two streams take at once as those of one of them alone."""
    kernel = min(kernels, key=partial(_away, 0.005))
    task = ProbeTask("", on_two_streams(kernel.work), burn(world, precision), _PAIR_ROUNDS)
    ranks = [times_as_long(trace) for trace in traces(world, task)]
    return shared(world, median(ranks) if ranks else 1.0)


def _away(wanted: Seconds, sample: Sample | ComputeSample) -> float:
    return abs(math.log(sample.seconds / wanted))
