"""Measure how kernels, and kernels and all-reduces, slow each other down."""

import math
from collections.abc import Sequence
from functools import partial
from statistics import median

from co2sim.schedule import WORLD, Kind
from co2sim.units import Seconds
from realrun.execute.world import World
from realrun.probe.execution import ProbeTask, burn, shared, traces
from realrun.probe.samples import ComputeSample, Sample, Slowdown
from realrun.probe.tasks import on_two_streams, overlapped, slowdown, times_as_long

_SHORT_AND_LONG: tuple[Seconds, Seconds] = (0.003, 0.1)
"""Of all-reduces: calls count in short ones, and in long ones bytes."""
_ROUNDS = 5


def slowdowns(
    world: World,
    precision: str,
    kernels: Sequence[ComputeSample],
    collectives: Sequence[Sample],
) -> tuple[Slowdown, ...]:
    """How much longer kernels take while all-reduces of their rank follow one another, and they."""
    kernel = min(kernels, key=partial(_away, 0.02))
    reduces = [s for s in collectives if s.work.kind is Kind.ALL_REDUCE and s.work.group == WORLD]
    chosen = [min(reduces, key=partial(_away, seconds)) for seconds in _SHORT_AND_LONG]
    found = []
    for reduce in dict.fromkeys(chosen):
        schedule = overlapped(kernel.work, reduce.work, kernel.seconds / reduce.seconds)
        ranks = [
            slowdown(trace)
            for trace in traces(world, ProbeTask("", schedule, burn(world, precision), _ROUNDS))
        ]
        middle = [
            median(getattr(one, name) for one in ranks) if ranks else 1.0
            for name in ("compute", "communication", "seconds")
        ]
        found.append(shared(world, Slowdown(*middle)))
    return tuple(found)


def together(world: World, precision: str, kernels: Sequence[ComputeSample]) -> float:
    """How many times as long kernels of two streams take at once as those of one of them alone."""
    kernel = min(kernels, key=partial(_away, 0.005))
    task = ProbeTask("", on_two_streams(kernel.work), burn(world, precision), _ROUNDS)
    ranks = [times_as_long(trace) for trace in traces(world, task)]
    return shared(world, median(ranks) if ranks else 1.0)


def _away(wanted: Seconds, sample: Sample | ComputeSample) -> float:
    return abs(math.log(sample.seconds / wanted))
