"""Round times of folded schedules with one communicator, for fits that ask for thousands of them.

The rules are those of `co2sim.simulator`, for one class of ranks whose collectives all meet in one
group, one at a time: streams run their ops in order, and compute slows down while a collective is
in flight. A loop over plain lists takes a hundredth of the time of a simulation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from co2sim.schedule import Collective, Schedule
from co2sim.units import Seconds

_ROUNDS = 2
"""The second one is in the steady state."""


@dataclass(frozen=True, slots=True)
class Lines:
    """A schedule by streams: places of ops in the body, and how far back they wait for others."""

    streams: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    collectives: tuple[bool, ...]
    last: int

    @classmethod
    def of(cls, schedule: Schedule) -> "Lines":
        """`last` is the place of the last compute, which ends a round."""
        body = schedule.body
        collectives = tuple(isinstance(op.work, Collective) for op in body)
        return cls(
            tuple(
                tuple(place for place, op in enumerate(body) if op.stream == stream)
                for stream in schedule.streams
            ),
            schedule.offsets,
            collectives,
            max(place for place, meets in enumerate(collectives) if not meets),
        )


def round_time(  # noqa: C901, PLR0912 - one loop over events: fits spend their time in it
    lines: Lines, seconds: Sequence[Seconds], interference: float
) -> Seconds:
    """Time of the second round, for the time that each op of the body takes alone."""
    size = len(seconds)
    ended: list[Seconds] = [math.nan] * (_ROUNDS * size)
    left = [[base * size + place for base in range(_ROUNDS) for place in line][::-1]
            for line in lines.streams]  # fmt: skip
    idle = list(range(len(left)))
    computing: dict[int, tuple[int, Seconds]] = {}  # by stream: the op, and what is left of it
    ready: list[tuple[int, int]] = []  # collectives in order of issue, with their streams
    flight: tuple[int, int, Seconds] | None = None
    now = 0.0
    while True:
        waiting = []
        for stream in idle:
            line = left[stream]
            if not line:
                continue
            number = line[-1]
            place = number % size
            if any(
                offset <= number and math.isnan(ended[number - offset])
                for offset in lines.offsets[place]
            ):
                waiting.append(stream)
                continue
            line.pop()
            if lines.collectives[place]:
                heappush(ready, (number, stream))
            else:
                computing[stream] = (number, seconds[place])
        idle = waiting
        if flight is None and ready:
            number, stream = heappop(ready)
            flight = (number, stream, now + seconds[number % size])
        if flight is None and not computing:
            break
        pace = 1.0 / (1.0 + interference) if flight else 1.0
        step = min((rest / pace for _, rest in computing.values()), default=math.inf)
        if flight:
            step = min(step, flight[2] - now)
        now += step
        for stream, (number, rest) in list(computing.items()):
            if rest / pace <= step:
                ended[number] = now
                del computing[stream]
                idle.append(stream)
            else:
                computing[stream] = (number, rest - step * pace)
        if flight and flight[2] <= now:
            ended[flight[0]] = now
            idle.append(flight[1])
            flight = None
    return ended[size + lines.last] - ended[lines.last]
