"""The timeline of a round for a page: few enough bars, however many ops there are."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from co2sim.common.units import Seconds
from co2sim.prediction import driver
from co2sim.prediction.question import Question
from co2sim.schedule.schedule import Collective, Schedule, Work
from co2sim.simulation.metrics import window
from co2sim.simulation.trace import Trace

_PIXELS = 1500
"""Gaps and ops shorter than one of this many parts of a round do not show."""


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
    """A round on a rank; its length and bars in ms."""

    length: float
    bars: tuple[TimelineBar, ...]

    def to_dict(self) -> dict[str, Any]:
        """For the page, which finds the length of each bar by itself."""
        bars = [bar.to_dict() for bar in self.bars]
        for bar in bars:
            del bar["length"]
        return {"length": self.length, "bars": bars}


def last_round(case: Question) -> Round:
    """The last round of a simulation; see `round_of`."""
    return round_of(*driver.trace(case))


def round_of(schedule: Schedule, trace: Trace, rank: int = 0, parts: int = _PIXELS) -> Round:
    """The last round of a trace: from the end of the last compute op before it on.

    `place` is that of the rank among those traced. What began before the round, or ends behind it,
    is cut. Ops of one kind with no visible gap between them are one bar, and so are those that are
    too short to show, and begin in the same one of the `parts` of the round: there are at most
    three bars on a stream for each part.
    """
    during = window(trace, schedule, 1)
    starts, ends = (times[..., rank].ravel() for times in trace.grid(schedule))
    shown = np.flatnonzero((ends > during.start) & (starts < during.end))
    places = shown % len(schedule.body)
    kinds = np.array(schedule.work_numbers)[places]
    starts = np.maximum(starts[shown], during.start) - during.start
    ends = np.minimum(ends[shown], during.end) - during.start
    streams = np.array([schedule.streams.index(stream) for _, stream in schedule.places])[places]
    names = [kind_of(work) for work in schedule.works]
    kind_names = list(dict.fromkeys(names))
    kinds = np.array([kind_names.index(name) for name in names])[kinds]
    bars: list[TimelineBar] = []
    for row, stream in enumerate(schedule.streams):
        indices = np.flatnonzero(streams == row)
        indices = indices[np.lexsort((ends[indices], starts[indices]))]
        for first, last, longest in _rows(
            kinds[indices], starts[indices], ends[indices], during.round_time / parts
        ):
            begin, finish = indices[first], indices[last]
            name = schedule.places[places[begin]][0]
            if first != last:
                end = schedule.places[places[finish]][0]
                name = f"{name} to {end} ({last - first + 1} ops)"
            kind = kind_names[kinds[indices[longest]]]
            start, end_s = float(starts[begin]), float(ends[finish])
            bars.append(TimelineBar(stream, kind, name, 1e3 * start, 1e3 * end_s))
    return Round(1e3 * during.round_time, tuple(bars))


def _rows(
    kinds: NDArray[np.intp], starts: NDArray[np.float64], ends: NDArray[np.float64], gap: Seconds
) -> list[tuple[int, int, int]]:
    """The first and the last of those in one bar, and one of the kind that takes the longest."""
    if not len(kinds):
        return []
    breaks = (kinds[1:] != kinds[:-1]) | (starts[1:] - ends[:-1] >= gap)
    firsts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    lasts = [*(first - 1 for first in firsts[1:]), len(kinds) - 1]
    rows: list[tuple[int, int, int]] = []
    most, part = gap, -1  # of the bar before: its longest row, and where it begins
    for first, last in zip(firsts, lasts, strict=True):
        length, begins = float(ends[last] - starts[first]), int(starts[first] / gap)
        if max(length, most) < gap and begins == part:
            before, _, longest = rows.pop()
            rows.append((before, last, first if length > most else longest))
            most = max(length, most)
        else:
            rows.append((first, last, first))
            most, part = length, begins
    return rows


def kind_of(work: Work) -> str:
    """What an op does, in a word: its kernel or its collective."""
    return f"{work.kind}".replace("_", "-") if isinstance(work, Collective) else work.kernel
