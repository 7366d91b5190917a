"""Where the time of a round goes: computing, communicating, waiting, idle."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from analysis.measured.spans import active_starts
from co2sim.common.units import Seconds
from co2sim.schedule.schedule import Schedule
from co2sim.simulation import metrics
from co2sim.simulation.trace import Trace


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Seconds of a round, averaged over the ranks; they sum to the round time.

    `compute`: at least one compute op runs. `communication`: none does, but a collective is active.
    `waiting`: neither, but the rank waits in a collective for its last member. `idle`: the rest.
    """

    compute: Seconds
    communication: Seconds
    waiting: Seconds
    idle: Seconds


def time_breakdown(trace: Trace, schedule: Schedule, rounds: int) -> TimeBreakdown:
    """Where the time of the last `rounds` rounds of a trace went."""
    during = metrics.window(trace, schedule, rounds)
    starts = active_starts(trace, schedule)
    active: dict[Hashable, list[Any]] = {rank: [] for rank in trace.ranks}
    whole: dict[Hashable, list[Any]] = {rank: [] for rank in trace.ranks}
    compute: dict[Hashable, list[Any]] = {rank: [] for rank in trace.ranks}
    for span in trace.spans:
        if span.end <= during.start or span.start >= during.end:
            continue
        start = starts.get((span.op, span.round, span.rank))
        if start is None:
            compute[span.rank].append(span)
        else:
            active[span.rank].append(span._replace(start=start))
            whole[span.rank].append(span)
    sums = [0.0, 0.0, 0.0]
    for rank in trace.ranks:
        computing = metrics.busy(compute[rank], during)
        moving = metrics.busy([*compute[rank], *active[rank]], during)
        sums[0] += computing
        sums[1] += moving - computing
        sums[2] += metrics.busy([*compute[rank], *whole[rank]], during) - moving
    computing, moving, waiting = (total / len(trace.ranks) for total in sums)
    idle = during.round_time - computing - moving - waiting
    rounding = 1e-9 * during.round_time
    return TimeBreakdown(computing, moving, waiting, idle if idle > rounding else 0.0)
