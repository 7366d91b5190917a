"""Measure how kernels, and kernels and all-reduces, slow each other down."""

import math
from collections.abc import Sequence
from functools import partial
from statistics import median

from co2sim.common.units import Seconds
from co2sim.schedule.schedule import WORLD, Kind
from realrun.execute.world import World
from realrun.probe.execution import ProbeTask, burn, shared, traces
from realrun.probe.samples import ComputeSample, Sample, Slowdown
from realrun.probe.schedules import (
    ALONE,
    TAIL,
    TURNS,
    on_two_streams,
    overlapped,
    slowdown,
    times_as_long,
)

_SHORT_AND_LONG: tuple[Seconds, Seconds] = (0.003, 0.1)
"""Of all-reduces: calls count in short ones, and in long ones bytes."""
_KERNEL: Seconds = 0.008
"""Of kernels beside them: short, so that those alone and those beside see the same machine."""
_BESIDE: Seconds = 0.1
"""Of the all-reduces that kernels get beside them at once."""
_MOST_AT_ONCE = 100
"""All-reduces, and kernels: where they are much shorter, a turn is."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 64
_ROUNDS = 5
"""On two streams."""


def slowdowns(
    world: World,
    precision: str,
    kernels: Sequence[ComputeSample],
    collectives: Sequence[Sample],
    budget: Seconds,
) -> tuple[Slowdown, ...]:
    """How much longer kernels take while all-reduces of their rank follow one another, and they."""
    kernel = min(kernels, key=partial(_away, _KERNEL))
    reduces = [s for s in collectives if s.work.kind is Kind.ALL_REDUCE and s.work.group == WORLD]
    chosen = [min(reduces, key=partial(_away, seconds)) for seconds in _SHORT_AND_LONG]
    found = []
    for reduce in dict.fromkeys(chosen):
        count = min(_MOST_AT_ONCE, max(1, round(_BESIDE / reduce.seconds)))
        beside = min(_MOST_AT_ONCE, math.ceil(count * reduce.seconds / kernel.seconds) + 1)
        schedule = overlapped(kernel.work, reduce.work, count, beside)
        once = TURNS * (ALONE + beside) * kernel.seconds + TAIL * reduce.seconds
        rounds = min(_MOST_ROUNDS, max(_LEAST_ROUNDS, int(budget / len(_SHORT_AND_LONG) / once)))
        task = ProbeTask("", schedule, burn(world, precision), rounds)
        ranks = traces(world, task)
        found.append(
            shared(world, slowdown(ranks) if ranks else Slowdown(1.0, 1.0, reduce.seconds))
        )
    return tuple(found)


def together(world: World, precision: str, kernels: Sequence[ComputeSample]) -> float:
    """How many times as long kernels of two streams take at once as those of one of them alone."""
    kernel = min(kernels, key=partial(_away, 0.005))
    task = ProbeTask("", on_two_streams(kernel.work), burn(world, precision), _ROUNDS)
    ranks = [times_as_long(trace) for trace in traces(world, task)]
    return shared(world, median(ranks) if ranks else 1.0)


def _away(wanted: Seconds, sample: Sample | ComputeSample) -> float:
    return abs(math.log(sample.seconds / wanted))
