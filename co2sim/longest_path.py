"""The ends of all ops where one class of ranks shares no link: longest paths through the schedule.

The same sums as `lockstep` takes, in the same order, one op at a time: for one class that is faster
than arrays.
"""

from collections.abc import Callable

import numpy as np

from co2sim.lowering import Lowered, Times
from co2sim.schedule import Compute
from co2sim.units import Seconds


def run(lowered: Lowered, progress: Callable[[float], None] | None = None) -> Times:
    """Starts and ends of all rounds, without jitter."""
    schedule, streams = lowered.schedule, lowered.schedule.streams
    tracks = {stream: track for track, stream in enumerate(streams)}
    places = {number: place for place, number in enumerate(schedule.work_numbers)}
    costs = {number: _seconds(lowered, place) for number, place in places.items()}
    steps = [
        (tracks[op.stream], offsets, *costs[number])
        for op, offsets, number in zip(
            schedule.body, schedule.offsets, schedule.work_numbers, strict=True
        )
    ]
    before = max((offset for _, offsets, _, _ in steps for offset in offsets), default=0)
    starts: list[Seconds] = []
    ends = [0.0] * before  # what the first rounds wait for has ended
    free = [0.0] * len(streams)
    for turn in range(lowered.rounds):
        for track, offsets, latency, seconds in steps:
            start = free[track]
            for offset in offsets:
                if ends[-offset] > start:  # noqa: PLR1730 - a call of max takes longer
                    start = ends[-offset]
            end = free[track] = start + latency + seconds
            starts.append(start)
            ends.append(end)
        if progress:
            progress((turn + 1) / lowered.rounds)
    return np.array(starts).reshape(-1, 1), np.array(ends[before:]).reshape(-1, 1)


def _seconds(lowered: Lowered, place: int) -> tuple[Seconds, Seconds]:
    """Latency, and what follows it."""
    if isinstance(lowered.schedule.body[place].work, Compute):
        return 0.0, lowered.seconds[place] * lowered.classes[0].slowdown
    (transfer,) = lowered.transfers[place]
    return transfer.latency, transfer.alone
