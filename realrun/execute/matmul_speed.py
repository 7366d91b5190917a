"""How fast the processors of a run multiplied matrices while it was measured.

Clocks change, and virtual machines share their cores: a processor may be slower than when it was
probed. Reading needs no torch.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from co2sim.common.units import Flops, FlopsPerSecond, Seconds
from co2sim.hardware.cluster import GPU
from co2sim.prediction.question import Question
from co2sim.schedule.schedule import Collective, Compute, Schedule
from co2sim.simulation.costs import compute_time
from co2sim.simulation.trace import Span, Trace


@dataclass(frozen=True, slots=True)
class Products:
    """Products of large matrices within an op, one after the other: how many, and their time."""

    count: int = 0
    seconds: Seconds = 0.0

    def __add__(self, other: "Products") -> "Products":
        return Products(self.count + other.count, self.seconds + other.seconds)


Timed: TypeAlias = Mapping[tuple[str, int], Products]
"""Those of every op, by its name and round."""


def each_round(trace: Trace, schedule: Schedule, timed: Timed, rounds: int) -> list[Seconds]:
    """Mean time of a product of a rank, in each of the last rounds in which it made any.

    Ops beside which the rank communicated are left out, unless there were no others in that round.
    """
    works = {op.name: op.work for op in schedule.body}
    collectives = (span for span in trace.spans if isinstance(works[span.op], Collective))
    busy = joined((span.start, span.end) for span in collectives)
    every: dict[int, Products] = {}
    alone: dict[int, Products] = {}
    for span in trace.spans:
        made = timed.get((span.op, span.round))
        if made is None or span.round < trace.rounds - rounds:
            continue
        every[span.round] = every.get(span.round, Products()) + made
        if not _beside(span, busy):
            alone[span.round] = alone.get(span.round, Products()) + made
    counted = (alone.get(turn, made) for turn, made in sorted(every.items()))
    return [made.seconds / made.count for made in counted]


def joined(
    extents: Iterable[tuple[Seconds, Seconds]], gap: Seconds = 0.0
) -> list[tuple[Seconds, Seconds]]:
    """The times during which there was one at least, in order; pauses up to `gap` do not count."""
    times: list[tuple[Seconds, Seconds]] = []
    for start, end in sorted(extents):
        if times and start - times[-1][1] <= gap:
            times[-1] = (times[-1][0], max(times[-1][1], end))
        else:
            times.append((start, end))
    return times


def _beside(span: Span, busy: Sequence[tuple[Seconds, Seconds]]) -> bool:
    last = bisect_left(busy, span.end, key=lambda extent: extent[0]) - 1
    return last >= 0 and busy[last][1] > span.start


def slowest(flops: Flops, ranks: Sequence[Sequence[Seconds]], lag: int) -> FlopsPerSecond | None:
    """From the time of a product of `flops` in each round of each rank; None if one made none.

    A rank begins a round when all have ended the one `lag` rounds before the last, as schedules do
    whose averages arrive so late: without lag each round is as slow as its slowest rank, and with
    it a rank that was slow may catch up.
    """
    rounds = min(map(len, ranks))
    if not rounds:
        return None
    ends = [[0.0] * len(ranks)] * (1 + lag)
    for times in zip(*(times[-rounds:] for times in ranks), strict=True):
        met = max(ends[-1 - lag])
        ends.append([max(end, met) + time for end, time in zip(ends[-1], times, strict=True)])
    return flops * rounds / max(ends[-1])


def beside(speed: FlopsPerSecond, gpu: GPU, precision: str) -> float:
    """A speed of large products, as a fraction of what a GPU's file says."""
    alone = replace(gpu, launch_overhead=0.0)
    return speed * compute_time(Compute("product", _LARGE), alone, precision) / _LARGE


_LARGE: Flops = 1e12
"""Of a kernel that is as fast as any."""


def at_speed(case: Question, speed: FlopsPerSecond) -> Question:
    """A record's case on GPUs that multiply large matrices so fast, all else in proportion."""
    cluster = case.load()[0].value
    gpu = cluster.gpu
    ratio = beside(speed, gpu, case.precision or gpu.preferred_precision)
    peak = {name: value * ratio for name, value in gpu.peak.items()}
    changed = replace(gpu, peak=peak, memory_bandwidth=gpu.memory_bandwidth * ratio)
    return replace(case, cluster=replace(cluster, gpu=changed))
