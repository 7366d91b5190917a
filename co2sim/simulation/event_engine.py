"""The fast engine, event by event: what SimPy simulates, with fewer events.

An op that nothing slows down ends at a time that is known when it starts. So every stream runs
ahead until it waits for what is not known yet. Then nothing can come earlier than the next event:
a collective that arrives, starts or ends where others do, or a compute that they slow down. The
rules and links are those of `reference_engine`, and the tests compare all times with SimPy's.

Times are numbers where one class of ranks stands for all, and arrays over the classes elsewhere.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from heapq import heappop, heappush
from itertools import count as numbers
from operator import add
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from co2sim.common.units import Bytes, Seconds
from co2sim.schedule.schedule import Collective, Group
from co2sim.simulation.compute_cost import Processor
from co2sim.simulation.lowering import LoweredSchedule, Times
from co2sim.simulation.network import Transfer, max_min_rates

AFTER_ALL = 9
"""Priority behind all that happens at the same instant, which has 1."""

Callback: TypeAlias = Callable[[Seconds, Any, int], None]
"""What happens: when, to what, of which version."""


class EventQueue:
    """What is to happen, in the order of time, of priority, and in which it was put there."""

    def __init__(self) -> None:
        """Start with nothing to do."""
        self._events: list[tuple[Seconds, int, int, Callback, Any, int]] = []
        self._tickets = numbers()

    def at(
        self, time: Seconds, happen: Callback, what: object, version: int = 0, priority: int = 1
    ) -> None:
        """Let something happen at a time."""
        heappush(self._events, (time, priority, next(self._tickets), happen, what, version))

    def is_free(self, until: Seconds) -> bool:
        """Whether nothing happens until then, nor at that instant."""
        return not self._events or self._events[0][0] > until

    def run(self, most: int) -> bool:
        """Let a number of things happen; whether there are more."""
        events = self._events
        for _ in range(most):
            if not events:
                return False
            now, _, _, happen, what, version = heappop(events)
            happen(now, what, version)
        return bool(events)


@dataclass(eq=False, slots=True)
class Flow:
    """Work of instance `number`: `left` of it at `since`, done at `rate` from then on.

    `loads` are the bytes on each link. `version` counts the changes of the rate.
    """

    number: int
    loads: Mapping[Hashable, Bytes]
    left: float = 1.0
    rate: float = 0.0
    since: Seconds = 0.0
    version: int = 0

    def set_rate(self, now: Seconds, rate: float) -> Seconds:
        """Continue at another rate; when it will be done."""
        self.left -= self.rate * (now - self.since)
        self.rate, self.since, self.version = rate, now, self.version + 1
        return now + max(self.left, 0.0) / rate


class SharedLinks:
    """The links, and the flows on them; `done` is called with a flow that has arrived."""

    def __init__(self, lowered: LoweredSchedule, events: EventQueue, done: Callback) -> None:
        """Start with no flow in flight, and no compute under way."""
        self._events, self._done = events, done
        self._capacity = dict(lowered.capacity)
        self._nic = "nic", lowered.folding.node(0)
        self._full, self._left = self._capacity[self._nic], lowered.cluster.inter.busy_efficiency
        self._computing, self._slower = 0, False
        self._flows: list[Flow] = []
        self._transfers: dict[int, Transfer] = {}
        self._rates: dict[tuple[int, ...], list[float]] = {}

    def transfer(self, now: Seconds, flow: Flow, transfer: Transfer) -> None:
        """Start a flow, which enters its links after its latency."""
        begin = now + transfer.latency
        if transfer.solo <= 0:
            self._events.at(begin, self._done, flow)
            return
        end = begin + transfer.alone
        if not self._flows and not self._slower and self._events.is_free(end):
            self._events.at(end, self._done, flow)  # no flow comes before it is gone
        else:
            self._transfers[id(flow.loads)] = transfer
            self._events.at(begin, self._enter, flow)

    def occupy(self, now: Seconds, change: int) -> None:
        """Count what computes; the NICs attain less while anything does."""
        self._computing += change
        if self._left < 1 and self._slower != (self._computing > 0):
            self._events.at(now, self._resize, None, priority=AFTER_ALL)

    def _resize(self, now: Seconds, _: None, __: int) -> None:
        self._slower = self._computing > 0
        capacity = self._full * self._left if self._slower else self._full
        if capacity != self._capacity[self._nic]:
            self._capacity[self._nic] = capacity
            self._share(now, self._users(self._nic))

    def _enter(self, now: Seconds, flow: Flow, _: int) -> None:
        flow.since = now
        alone = not (self._slower and self._nic in flow.loads)
        if alone and self._flows:
            alone = all(flow.loads.keys().isdisjoint(other.loads) for other in self._flows)
        self._flows.append(flow)
        if alone:
            self._go_on(now, flow, 1 / self._transfers[id(flow.loads)].solo)
        else:
            self._share(now, [flow])

    def _leave(self, now: Seconds, flow: Flow, version: int) -> None:
        if version == flow.version:
            self._flows.remove(flow)
            if self._flows:
                self._share(now, [other for link in flow.loads for other in self._users(link)])
            self._done(now, flow, 0)

    def _users(self, link: Hashable) -> list[Flow]:
        return [flow for flow in self._flows if link in flow.loads]

    def _share(self, now: Seconds, seeds: Sequence[Flow]) -> None:
        """New rates for all flows that share links with `seeds`, directly or through others."""
        found = dict.fromkeys(seeds)
        queue = list(found)
        while queue:
            for link in queue.pop().loads:
                new = [flow for flow in self._users(link) if flow not in found]
                found.update(dict.fromkeys(new))
                queue.extend(new)
        if not found:
            return
        key = self._slower, *(id(flow.loads) for flow in found)
        if key not in self._rates:
            copies = [self._transfers[id(flow.loads)].copies for flow in found]
            loads = [flow.loads for flow in found]
            self._rates[key] = max_min_rates(loads, self._capacity, copies)
        for flow, rate in zip(found, self._rates[key], strict=True):
            if rate != flow.rate:
                self._go_on(now, flow, rate)

    def _go_on(self, now: Seconds, flow: Flow, rate: float) -> None:
        end = flow.set_rate(now, rate)
        self._events.at(end, self._leave, flow, flow.version)


_Array: TypeAlias = NDArray[np.float64]

_UNKNOWN: Seconds = -1.0
_EVENTS = 1000
"""Between two reports of progress."""


@dataclass(eq=False, slots=True)
class _CommunicatorQueue:
    """The collectives of an exclusive communicator that are ready, by number; whether one runs."""

    ready: "list[tuple[int, _InFlight]]" = field(default_factory=list)
    running: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class _Work:
    """What ops of a work take, and what others have to do with them.

    They end after `latency + seconds`, unless the `transfer` may share, or others make them
    `slowed`. `busy` says that the NICs attain less meanwhile. `parts` are the times of several ops.
    """

    latency: Seconds
    seconds: Seconds
    transfer: Transfer | None = None
    queue: _CommunicatorQueue | None = None
    slowed: bool = False
    busy: bool = False
    parts: tuple[Seconds, ...] = ()


_Step: TypeAlias = tuple[int, int, tuple[int, ...], _Work, bool]
"""The places of the first and the last op of a run, its offsets and its work, as one op.

Last, whether its end is known at its start.
"""


@dataclass(eq=False, slots=True)
class _Span:
    """A time without a gap in which a stream computes."""

    end: Seconds


@dataclass(eq=False, slots=True)
class _StreamState:
    """How far a stream has come: to step `index` of the round that begins with instance `turn`.

    It has nothing else to do from `free` on, and computes in `span`, the last one that is known.
    """

    steps: list[_Step] = field(default_factory=list)
    turn: int = 0
    index: int = 0
    free: Seconds = 0.0
    span: _Span | None = None


@dataclass(eq=False, slots=True)
class _InFlight(Flow):
    """A collective, or a compute that is slowed down, and who waits for it."""

    stream: _StreamState = field(kw_only=True)
    work: _Work = field(kw_only=True)


def applies(lowered: LoweredSchedule) -> bool:
    """Whether one class stands for all ranks, without jitter."""
    return len(lowered.classes) == 1 and not lowered.class_factors


def run(
    lowered: LoweredSchedule, sharing: set[int], progress: Callable[[float], None] | None = None
) -> Times:
    """Starts and ends of all rounds, where this `applies`.

    `sharing` are the works that may share links or wait for their communicator, by number.
    """
    return _EventEngine(lowered, sharing).times(progress)


class _EventEngine:
    def __init__(self, lowered: LoweredSchedule, sharing: set[int]) -> None:
        self.size, self.before = len(lowered.schedule.body), lowered.schedule.farthest
        self.total = self.before + lowered.rounds * self.size
        self.starts, self.ends = [_UNKNOWN] * self.total, [_UNKNOWN] * self.total
        self.ends[: self.before] = [0.0] * self.before  # what the first rounds wait for
        self.slows = lowered.slows
        runs = _runs(lowered)
        several = [run for run in runs if len(run) > 1]
        self.long = _LongRuns(lowered, several) if several else None
        self.streams = _streams(lowered, sharing, runs, self.long)
        for stream in self.streams:
            stream.turn = self.before
        self.waiting: dict[int, list[_StreamState]] = {}
        self.events = EventQueue()
        self.links = SharedLinks(lowered, self.events, self._done)
        self.processor = Processor(lowered.cluster.interference)
        self.slowed: list[_InFlight] = []

    def times(self, progress: Callable[[float], None] | None) -> Times:
        self._run(progress)
        starts, ends = (
            np.array(times[self.before :]).reshape(-1, self.size)
            for times in (self.starts, self.ends)
        )
        if self.long:
            self.long.fill(starts, ends)
        return starts.reshape(-1, 1), ends.reshape(-1, 1)

    def _run(self, progress: Callable[[float], None] | None) -> None:
        if progress:
            progress(0.0)
        self._advance([*self.streams])
        while self.events.run(_EVENTS):
            if progress:
                rounds = min(stream.turn for stream in self.streams) - self.before
                progress(rounds / (self.total - self.before))
        if progress:
            progress(1.0)

    # --- streams ----------------------------------------------------------------------------------

    def _advance(self, streams: list[_StreamState]) -> None:
        """Let streams run ahead as far as all is known, and those that wait for what they do."""
        while streams:
            streams += self._run_ahead(streams.pop())

    def _run_ahead(self, stream: _StreamState) -> list[_StreamState]:
        """Those that waited for what a stream has done."""
        starts, ends, waiting, woken = self.starts, self.ends, self.waiting, list[_StreamState]()
        steps, turn, index, free = stream.steps, stream.turn, stream.index, stream.free
        count, total = len(steps), self.total
        while turn < total:
            first, last, offsets, work, known = steps[index]
            number, start = turn + first, free
            for offset in offsets:
                end = ends[number - offset]
                if end > start:
                    start = end
                elif end < 0:
                    waiting.setdefault(number - offset, []).append(stream)
                    break
            else:
                starts[number] = start
                index += 1
                if index == count:
                    turn, index = turn + self.size, 0
                number += last - first
                if known:
                    if work.parts:
                        free = ends[number] = reduce(add, work.parts, start)
                    else:
                        free = ends[number] = start + work.latency + work.seconds
                    if work.busy and work.seconds:
                        self._busy(stream, start, free)
                    if number in waiting:
                        woken += waiting.pop(number)
                    continue
                self._begin(stream, work, number, start)
            break
        stream.turn, stream.index, stream.free = turn, index, free
        return woken

    def _begin(self, stream: _StreamState, work: _Work, number: int, start: Seconds) -> None:
        """Put what ends when others let it on the events."""
        if work.transfer:
            task = _InFlight(number, work.transfer.loads, stream=stream, work=work)
            self.events.at(start, self._come, task)
        else:
            task = _InFlight(number, _NOWHERE, work.seconds, stream=stream, work=work)
            self.events.at(start, self._compute, task)

    def _busy(self, stream: _StreamState, start: Seconds, end: Seconds) -> None:
        if stream.span and stream.span.end == start:
            stream.span.end = end
        else:
            stream.span = _Span(end)
            self.events.at(start, self._occupy, stream.span)

    def _done(self, now: Seconds, task: _InFlight, _: int) -> None:
        self.ends[task.number] = task.stream.free = now
        self._advance([task.stream, *self.waiting.pop(task.number, ())])
        if self.slows and task.work.transfer:
            self._count(now, -1)
        if queue := task.work.queue:
            queue.running = False
            if queue.ready:
                self._next(now, queue)

    # --- communicators ----------------------------------------------------------------------------

    def _come(self, now: Seconds, task: _InFlight, _: int) -> None:
        if queue := task.work.queue:
            heappush(queue.ready, (task.number, task))
            self._next(now, queue)
        else:
            self._start(now, task)

    def _next(self, now: Seconds, queue: _CommunicatorQueue) -> None:
        """Start the collective issued first, once nothing else happens at this instant."""
        if self.events.is_free(now):
            self._launch(now, queue, 0)
        else:
            self.events.at(now, self._launch, queue, priority=AFTER_ALL)

    def _launch(self, now: Seconds, queue: _CommunicatorQueue, _: int) -> None:
        if queue.ready and not queue.running:
            queue.running = True
            self._start(now, heappop(queue.ready)[1])

    def _start(self, now: Seconds, task: _InFlight) -> None:
        assert task.work.transfer
        if self.slows:
            self._count(now, 1)
        self.links.transfer(now, task, task.work.transfer)

    # --- communication and computing slow each other down -----------------------------------------

    def _count(self, now: Seconds, change: int) -> None:
        """Count collectives in flight; computing is slower beside them."""
        if self.processor.communicate(change):
            for task in self.slowed:
                self._go_on(now, task)

    def _compute(self, now: Seconds, task: _InFlight, _: int) -> None:
        self.links.occupy(now, 1)
        self.slowed.append(task)
        self._go_on(now, task)

    def _go_on(self, now: Seconds, task: _InFlight) -> None:
        end = task.set_rate(now, self.processor.pace)
        self.events.at(end, self._computed, task, task.version)

    def _computed(self, now: Seconds, task: _InFlight, version: int) -> None:
        if version == task.version:
            self.slowed.remove(task)
            self.links.occupy(now, -1)
            self._done(now, task, 0)

    def _occupy(self, now: Seconds, span: _Span, _: int) -> None:
        self.links.occupy(now, 1)
        self.events.at(span.end, self._release, span)

    def _release(self, now: Seconds, span: _Span, _: int) -> None:
        if span.end > now:  # it has grown
            self.events.at(span.end, self._release, span)
        else:
            self.links.occupy(now, -1)


_NOWHERE: Mapping[object, float] = MappingProxyType({})
"""The links of a compute."""


class _LongRuns:
    """Ops of runs of several computes: the engine knows when the first starts and the last ends.

    Times are added up one by one, so that they are the same to the last bit as op by op.
    """

    def __init__(self, lowered: LoweredSchedule, runs: Sequence[tuple[int, ...]]) -> None:
        slowdown = lowered.classes[0].slowdown
        self.seconds = {
            run: tuple([lowered.seconds[place] * slowdown for place in run]) for run in runs
        }
        alike: dict[int, list[tuple[int, ...]]] = {}
        for run in runs:
            alike.setdefault(len(run), []).append(run)
        self._places = [np.array(same) for same in alike.values()]
        self._seconds = [np.array([self.seconds[r] for r in same]) for same in alike.values()]

    def fill(self, starts: _Array, ends: _Array) -> None:
        """Write the times within runs, [round, place]."""
        for places, seconds in zip(self._places, self._seconds, strict=True):
            times = np.empty((len(starts), *places.shape))
            times[..., 0] = starts[:, places[:, 0]]
            times[..., 1:] = seconds[:, :-1]
            np.cumsum(times, axis=-1, out=times)
            starts[:, places] = times
            ends[:, places[:, :-1]] = times[..., 1:]


def _runs(lowered: LoweredSchedule) -> Sequence[tuple[int, ...]]:
    """The runs of the schedule; where computes are slowed down, every op alone."""
    schedule = lowered.schedule
    return [(place,) for place in range(len(schedule.body))] if lowered.slows else schedule.runs


def _streams(
    lowered: LoweredSchedule,
    sharing: set[int],
    runs: Sequence[tuple[int, ...]],
    long: _LongRuns | None,
) -> list[_StreamState]:
    """The steps of every stream: its runs."""
    schedule, slows = lowered.schedule, lowered.slows
    queues: dict[Group, _CommunicatorQueue] = {
        group: _CommunicatorQueue()
        for group, (one,) in lowered.communicators.items()
        if one.exclusive
    }
    busy = lowered.contend and not slows
    body, offsets, work_numbers = schedule.body, schedule.offsets, schedule.work_numbers
    works: dict[int, _Work] = {}
    streams = {stream: _StreamState() for stream in schedule.streams}
    for run in runs:
        place = run[0]
        op, number = body[place], work_numbers[place]
        if len(run) > 1 and long:
            work = _Work(0.0, sum(long.seconds[run]), busy=busy, parts=long.seconds[run])
        elif number in works:
            work = works[number]
        elif isinstance(op.work, Collective):
            (one,) = lowered.transfers[place]
            shared = (one, queues.get(op.work.group)) if number in sharing or slows else ()
            work = works[number] = _Work(one.latency, one.alone, *shared)
        else:
            seconds = lowered.seconds[place] * lowered.classes[0].slowdown
            work = works[number] = _Work(0.0, seconds, slowed=slows and seconds > 0, busy=busy)
        known = not work.transfer and not work.slowed
        streams[op.stream].steps.append((place, run[-1], offsets[place], work, known))
    return list(streams.values())


# --- several classes of ranks, where all that is shared is a collective of all --------------------


def applies_to_classes(lowered: LoweredSchedule, sharing: set[int]) -> bool:
    """Whether whatever may wait for others is a collective of all classes, and slows no compute."""
    if lowered.slows or lowered.contend:
        return False
    return all(
        len(lowered.communicators[work.group]) == 1
        for number, work in enumerate(lowered.schedule.works)
        if number in sharing and isinstance(work, Collective)
    )


def run_classes(
    lowered: LoweredSchedule, sharing: set[int], progress: Callable[[float], None] | None = None
) -> Times:
    """The same as `run` for several classes, where that `applies_to_classes`."""
    return _ClassesEngine(lowered, sharing).times(progress)


class _Members(NamedTuple):
    """Classes by communicator: `order` lists them, `cuts` says where each communicator begins.

    `place` is the place of each class's communicator, `factors` is jitter, [instance, place].
    """

    order: NDArray[np.intp]
    cuts: NDArray[np.intp]
    place: NDArray[np.intp]
    factors: _Array | None


class _ClassesEngine(_EventEngine):
    """Times are arrays over the classes: what all meet in ends for all at once."""

    def __init__(self, lowered: LoweredSchedule, sharing: set[int]) -> None:
        schedule, self.lowered, self.sharing = lowered.schedule, lowered, sharing
        self.size, self.before = len(schedule.body), schedule.farthest
        self.total = self.before + lowered.rounds * self.size
        shape = self.total, len(lowered.classes)
        self.start_times, self.end_times = np.zeros(shape), np.zeros(shape)
        self.known = [True] * self.before + [False] * (self.total - self.before)
        self.slows = False
        self.slowdowns = np.array([one.slowdown for one in lowered.classes])
        self.factors = np.stack(lowered.class_factors, axis=1) if lowered.class_factors else None
        self.queues = {
            group: _CommunicatorQueue()
            for group, together in lowered.communicators.items()
            if together[0].exclusive
        }
        self.transfers = _few_links(lowered, sharing)
        self.alone: dict[int, _Array] = {}
        self.members: dict[Group, _Members] = {}
        self.kept: list[Transfer] = []  # rates are known by the place of their loads in memory
        self.streams = []
        self.free: dict[int, _Array] = {}
        for stream in schedule.streams:
            places = [place for place, op in enumerate(schedule.body) if op.stream == stream]
            steps = [(place, place, schedule.offsets[place], _IDLE, False) for place in places]
            self.streams.append(_StreamState(steps, self.before))
            self.free[id(self.streams[-1])] = np.zeros(shape[1])
        self.waiting = {}
        self.events = EventQueue()
        self.links = SharedLinks(lowered, self.events, self._done)

    def times(self, progress: Callable[[float], None] | None) -> Times:
        self._run(progress)
        return self.start_times[self.before :], self.end_times[self.before :]

    def _run_ahead(self, stream: _StreamState) -> list[_StreamState]:
        woken: list[_StreamState] = []
        while stream.turn < self.total:
            place, _, offsets, _, _ = stream.steps[stream.index]
            number, start = stream.turn + place, self.free[id(stream)]
            for offset in offsets:
                if not self.known[number - offset]:
                    self.waiting.setdefault(number - offset, []).append(stream)
                    return woken
                start = np.maximum(start, self.end_times[number - offset])
            self.start_times[number] = start
            stream.index += 1
            if stream.index == len(stream.steps):
                stream.turn, stream.index = stream.turn + self.size, 0
            work = self.lowered.schedule.body[place].work
            if isinstance(work, Collective):
                if self.lowered.schedule.work_numbers[place] in self.sharing:
                    self._meet(stream, number, work.group, float(start.max()))
                    break
                end = self._after(number, place, work.group, start)
            else:
                seconds = self.lowered.seconds[place] * self.slowdowns
                if self.factors is not None:
                    seconds *= self.factors[number - self.before]
                end = start + seconds
            self.free[id(stream)] = end
            woken += self._know(number, end)
        return woken

    def _know(self, number: int, end: _Array | Seconds) -> list[_StreamState]:
        """Keep when an instance ends; gives the streams that waited for it."""
        self.end_times[number], self.known[number] = end, True
        return self.waiting.pop(number, [])

    def _after(self, number: int, place: int, group: Group, start: _Array) -> _Array:
        """When a collective that shares nothing ends, on each class."""
        if place not in self.alone:
            transfers = self.lowered.transfers[place]
            self.alone[place] = np.array([one.latency + one.alone for one in transfers])
        if group not in self.members:
            self.members[group] = _members(self.lowered, group)
        order, cuts, where, factors = self.members[group]
        come, took = np.maximum.reduceat(start[order], cuts), self.alone[place]
        if factors is not None:
            took = took * factors[number - self.before]
        end: _Array = (come + took)[where]
        return end

    def _meet(self, stream: _StreamState, number: int, group: Group, come: Seconds) -> None:
        (one,), factors = self.lowered.communicators[group], self.lowered.communicator_factors
        work_number = self.lowered.schedule.work_numbers[(number - self.before) % self.size]
        transfer = self.transfers[work_number]
        if factors:
            transfer = transfer.scaled(float(factors[one.number][number - self.before]))
            self.kept.append(transfer)
        work = _Work(transfer.latency, transfer.alone, transfer, self.queues.get(group))
        task = _InFlight(number, transfer.loads, stream=stream, work=work)
        self.events.at(come, self._come, task)

    def _done(self, now: Seconds, task: _InFlight, _: int) -> None:
        self.free[id(task.stream)] = np.full(len(self.slowdowns), now)
        self._advance([task.stream, *self._know(task.number, now)])
        if queue := task.work.queue:
            queue.running = False
            if queue.ready:
                self._next(now, queue)


_IDLE = _Work(0.0, 0.0)


def _members(lowered: LoweredSchedule, group: Group) -> _Members:
    together, factors = lowered.communicators[group], lowered.communicator_factors
    lengths = [len(one.members) for one in together]
    return _Members(
        np.array([index for one in together for index in one.members]),
        np.cumsum([0, *lengths[:-1]]),
        np.array(lowered.place[group]),
        np.stack([factors[one.number] for one in together], axis=1) if factors else None,
    )


def _few_links(lowered: LoweredSchedule, sharing: set[int]) -> dict[int, Transfer]:
    """What is shared, by number of its work, on one of all links that carry the same."""
    found = {
        number: transfers[0]
        for number, transfers in zip(lowered.schedule.work_numbers, lowered.transfers, strict=True)
        if number in sharing
    }
    alike: dict[tuple[object, ...], Hashable] = {}
    for link, capacity in lowered.capacity.items():
        carried = [(one.loads.get(link), one.copies.get(link)) for one in found.values()]
        alike.setdefault((capacity, *carried), link)
    kept = set(alike.values())
    return {
        number: replace(one, loads={k: size for k, size in one.loads.items() if k in kept})
        for number, one in found.items()
    }
