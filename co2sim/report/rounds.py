"""The timeline of a round for a page: few enough bars, however many ops there are."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from co2sim import study
from co2sim.case import Case
from co2sim.metrics import window
from co2sim.schedule import Collective, Work
from co2sim.units import Seconds

_PIXELS = 1500
"""Shorter gaps than one of so many parts of a round do not show."""


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """Ops of one kind in a row on a stream, from `start` to `end` in ms of the round."""

    stream: str
    kind: str
    ops: str
    start: float
    end: float

    def to_dict(self) -> dict[str, Any]:
        """For the page."""
        return {
            "stream": self.stream,
            "kind": self.kind,
            "ops": self.ops,
            "start": round(self.start, 6),
            "end": round(self.end, 6),
            "length": round(self.end - self.start, 6),
        }


@dataclass(frozen=True, slots=True)
class Round:
    """The last round of a simulation on its first rank."""

    length: float
    bars: tuple[TimelineBar, ...]

    def to_dict(self) -> dict[str, Any]:
        """For the page."""
        return {"length": self.length, "bars": [bar.to_dict() for bar in self.bars]}


def last_round(case: Case) -> Round:
    """Simulate, and take the last round: from the end of the last compute op before it on.

    What began before it, or ends behind it, is cut. Ops of one kind with no visible gap between
    them are one bar.
    """
    schedule, trace = study.trace(case)
    during = window(trace, schedule, 1)
    starts, ends = (times[..., 0].ravel() for times in trace.grid(schedule))
    shown = np.flatnonzero((ends > during.start) & (starts < during.end))
    places = shown % len(schedule.body)
    kinds = np.array(schedule.work_numbers)[places]
    starts = np.maximum(starts[shown], during.start) - during.start
    ends = np.minimum(ends[shown], during.end) - during.start
    streams = np.array([schedule.streams.index(stream) for _, stream in schedule.places])[places]
    names = [_kind(work) for work in schedule.works]
    known = list(dict.fromkeys(names))
    kinds = np.array([known.index(name) for name in names])[kinds]
    bars: list[TimelineBar] = []
    for number, stream in enumerate(schedule.streams):
        own = np.flatnonzero(streams == number)
        own = own[np.lexsort((ends[own], starts[own]))]
        for first, last in _rows(kinds[own], starts[own], ends[own], during.round_time / _PIXELS):
            one, other = own[first], own[last]
            name = schedule.places[places[one]][0]
            if first != last:
                end = schedule.places[places[other]][0]
                name = f"{name} to {end} ({last - first + 1} ops)"
            kind, start, end_s = known[kinds[one]], float(starts[one]), float(ends[other])
            bars.append(TimelineBar(stream, kind, name, 1e3 * start, 1e3 * end_s))
    return Round(1e3 * during.round_time, tuple(bars))


def _rows(
    kinds: NDArray[np.intp], starts: NDArray[np.float64], ends: NDArray[np.float64], gap: Seconds
) -> list[tuple[int, int]]:
    """The first and the last of those in a row: of one kind, with no gap that shows."""
    if not len(kinds):
        return []
    breaks = (kinds[1:] != kinds[:-1]) | (starts[1:] - ends[:-1] >= gap)
    firsts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    return list(zip(firsts, [*(first - 1 for first in firsts[1:]), len(kinds) - 1], strict=True))


def _kind(work: Work) -> str:
    return f"{work.kind}".replace("_", "-") if isinstance(work, Collective) else work.kernel
