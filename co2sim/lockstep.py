"""All ranks at once, op by op in the order of issue, where what happens on links allows it.

The end of an op follows from when it starts, unless it has to share: compute with communication
that slows it down, or a collective with others on its links. Without the former, all ends are the
longest paths through the schedule, taken here for all classes of ranks in one array. Collectives
that might share go through the network in SimPy, which runs only as far as somebody waits for it.
If anybody then comes to the network earlier than it has run, the order of issue was not the order
of time, and `Overtaken` says that the schedule must be simulated event by event.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappush
from typing import TypeAlias

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import EventPriority

from co2sim import longest_path, single_class
from co2sim.communicators import Meetings
from co2sim.lowering import Communicator, Lowered, Times
from co2sim.schedule import Collective, Group
from co2sim.sharing import shared_works
from co2sim.units import Seconds

_Array: TypeAlias = NDArray[np.float64]


class Overtaken(Exception):  # noqa: N818 - it reports no mistake
    """The order of issue is not the order in which links are used."""


@dataclass(frozen=True, eq=False, slots=True)
class _Chain:
    """Computes of one stream that follow each other; only the first may have waits.

    `places` are those of the ops in the body, `seconds` is [op, class].
    """

    places: NDArray[np.intp]
    stream: str
    offsets: tuple[int, ...]
    seconds: _Array


@dataclass(frozen=True, eq=False, slots=True)
class _Meeting:
    """A collective of all communicators of its group; `shares` says that it may share links."""

    place: int
    stream: str
    offsets: tuple[int, ...]
    group: Group
    latency: _Array
    solo: _Array
    shares: bool


@dataclass(frozen=True, eq=False, slots=True)
class _Members:
    """Classes by communicator: `order` lists them, `cuts` says where each communicator begins.

    `place` is the place of each class's communicator, `factors` is jitter, [instance, place].
    """

    communicators: tuple[Communicator, ...]
    order: NDArray[np.intp]
    cuts: NDArray[np.intp]
    place: NDArray[np.intp]
    factors: _Array | None


class _Clock(simpy.Environment):
    """SimPy's, with events at absolute times: now + (time - now) may be another float."""

    def at(self, time: Seconds, call: Callable[[simpy.Event], None]) -> None:
        event = simpy.Event(self)
        event._ok, event._value = True, None  # noqa: SLF001 - as simpy.Timeout does
        event.callbacks = [call]
        heappush(self._queue, (time, EventPriority(1), next(self._eid), event))


def run(lowered: Lowered, progress: Callable[[float], None] | None = None) -> Times:
    """Starts and ends of all rounds. Raises Overtaken where that takes a simulation."""
    alone = len(lowered.classes) == 1
    sharing = shared_works(lowered)
    if alone and not lowered.class_factors and lowered.steady:
        if sharing or lowered.slows:
            return single_class.run(lowered, sharing, progress)
        return longest_path.run(lowered, progress)
    if lowered.slows or (sharing and alone):
        raise Overtaken  # one class at a time is faster in SimPy alone
    return _Run(lowered, sharing).times(progress)


class _Run:
    def __init__(self, lowered: Lowered, sharing: set[int]) -> None:
        self.lowered, self.steps = lowered, _steps(lowered, sharing)
        self.size = len(lowered.schedule.body)
        shape = (lowered.rounds * self.size, len(lowered.classes))
        self.starts, self.ends = np.zeros(shape), np.zeros(shape)
        self.free = {stream: np.zeros(shape[1]) for stream in lowered.schedule.streams}
        self.last: dict[str, int] = {}
        self.factors = np.stack(lowered.class_factors, axis=1) if lowered.class_factors else None
        self.members = {
            group: _members(together, lowered.place[group], lowered.communicator_factors)
            for group, together in lowered.communicators.items()
        }
        self.clock = _Clock()
        self.meetings = Meetings(self.clock, lowered)
        self.pending: dict[int, int] = {}
        self.reached: Seconds = 0.0

    def times(self, progress: Callable[[float], None] | None) -> Times:
        lowered, steps = self.lowered, self.steps
        for turn in range(lowered.rounds):
            with np.errstate(divide="ignore"):  # the rate of what takes no time
                for step in steps:
                    if isinstance(step, _Chain):
                        self._compute(step, turn * self.size)
                    else:
                        self._meet(step, turn * self.size + step.place)
            if progress:
                progress((turn + 1) / lowered.rounds)
        for number in list(self.pending):
            self._finish(number)
        return self.starts, self.ends

    def _ready(self, step: _Chain | _Meeting, number: int) -> _Array:
        """When an instance can start on each class."""
        if self.last.get(step.stream) in self.pending:
            self._finish(self.last[step.stream])
        ready = self.free[step.stream]
        for offset in step.offsets:
            if offset <= number:
                if number - offset in self.pending:
                    self._finish(number - offset)
                ready = np.maximum(ready, self.ends[number - offset])
        return ready

    def _compute(self, chain: _Chain, base: int) -> None:
        numbers = base + chain.places
        times = np.empty((len(numbers) + 1, len(self.lowered.classes)))
        times[0] = self._ready(chain, int(numbers[0]))
        times[1:] = chain.seconds
        if self.factors is not None:
            times[1:] *= self.factors[numbers]
        np.add.accumulate(times, axis=0, out=times)
        self.starts[numbers], self.ends[numbers] = times[:-1], times[1:]
        self.free[chain.stream] = times[-1]
        self.last[chain.stream] = int(numbers[-1])
        if self.lowered.contend:
            self._occupy(times[0].tolist(), times[-1].tolist())

    def _meet(self, step: _Meeting, number: int) -> None:
        members = self.members[step.group]
        ready = self._ready(step, number)
        self.starts[number] = ready
        self.last[step.stream] = number
        come = np.maximum.reduceat(ready[members.order], members.cuts)
        if step.shares:
            self._share(members, number, come)
            return
        latency, solo = step.latency, step.solo
        if members.factors is not None:
            factors = members.factors[number]
            latency, solo = latency * factors, solo * factors
        ends = come + latency + 1.0 / (1.0 / solo)  # as the network: by the rate of a flow
        self.free[step.stream] = self.ends[number] = ends[members.place]

    # --- collectives that may share links: through the network -----------------------------------

    def _occupy(self, starts: Sequence[Seconds], ends: Sequence[Seconds]) -> None:
        """While a class computes, the NICs of its node attain less."""
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start < self.reached:
                raise Overtaken
            if end > start:
                self.clock.at(start, partial(self._count, index, 1))
                self.clock.at(end, partial(self._count, index, -1))

    def _count(self, index: int, change: int, _: simpy.Event) -> None:
        self.meetings.occupy(index, change)

    def _share(self, members: _Members, number: int, come: _Array) -> None:
        self.pending[number] = len(members.communicators)
        for place, (one, time) in enumerate(zip(members.communicators, come.tolist(), strict=True)):
            # who comes at the very instant is issued later than all that the network knows, and so
            # would have been let through behind them
            if time < self.reached:
                raise Overtaken
            self.clock.at(time, partial(self._start, one, place, number))

    def _start(self, one: Communicator, place: int, number: int, _: simpy.Event) -> None:
        event = self.clock.event()
        assert event.callbacks is not None
        event.callbacks.append(partial(self._end, one, number))
        self.meetings.start(one, place, number, event)

    def _end(self, one: Communicator, number: int, _: simpy.Event) -> None:
        self.ends[number, list(one.members)] = self.clock.now
        self.pending[number] -= 1

    def _finish(self, number: int) -> None:
        """Run the network until a collective has ended in all communicators."""
        while self.pending[number]:
            self.clock.step()
        del self.pending[number]
        self.reached = self.clock.now
        stream = self.lowered.schedule.body[number % self.size].stream
        if self.last[stream] == number:
            self.free[stream] = self.ends[number]


def _members(
    together: tuple[Communicator, ...],
    place: Sequence[int],
    factors: Sequence[_Array] | None,
) -> _Members:
    lengths = [len(one.members) for one in together]
    jitter = np.stack([factors[one.number] for one in together], axis=1) if factors else None
    return _Members(
        together,
        np.array([index for one in together for index in one.members]),
        np.cumsum([0, *lengths[:-1]]),
        np.array(place),
        jitter,
    )


def _steps(lowered: Lowered, sharing: set[int]) -> list[_Chain | _Meeting]:
    """The body: runs of computes in one stream in one piece, and collectives."""
    schedule = lowered.schedule
    slowdowns = np.array([c.slowdown for c in lowered.classes])
    chains: dict[str, list[int]] = {}
    found: list[list[int] | _Meeting] = []
    costs: dict[int, tuple[_Array, _Array]] = {}
    for place, (op, number) in enumerate(zip(schedule.body, schedule.work_numbers, strict=True)):
        if isinstance(op.work, Collective):
            chains.pop(op.stream, None)
            if number not in costs:
                transfers = lowered.transfers[place]
                latency = np.array([transfer.latency for transfer in transfers])
                costs[number] = latency, np.array([transfer.solo for transfer in transfers])
            shares = number in sharing
            offsets = schedule.offsets[place]
            meeting = _Meeting(place, op.stream, offsets, op.work.group, *costs[number], shares)
            found.append(meeting)
        elif op.stream in chains and not schedule.offsets[place]:
            chains[op.stream].append(place)
        else:
            chains[op.stream] = [place]
            found.append(chains[op.stream])
    seconds = np.array(lowered.seconds)
    return [
        each
        if isinstance(each, _Meeting)
        else _Chain(
            np.array(each),
            schedule.body[each[0]].stream,
            schedule.offsets[each[0]],
            seconds[each][:, None] * slowdowns,
        )
        for each in found
    ]
