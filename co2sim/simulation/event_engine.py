"""The fast engine, event by event: what SimPy simulates, with fewer events.

An op that nothing slows down ends at a time that is known when it starts. So every stream runs
ahead until it waits for what is not known yet. Then nothing can come earlier than the next event:
a collective that arrives, starts or ends where others do, or a compute that they slow down. The
rules and links are those of `reference_engine`, and the tests compare all times with SimPy's.

Where one class of ranks stands for all, times are numbers. Several classes advance together in
NumPy, and times are arrays over them. Then whatever ranks wait for, and whatever slows them, has to
be the same for all of them (`applies`).
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count as numbers
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from co2sim.common.units import Bytes, Seconds
from co2sim.schedule.schedule import Collective, Group
from co2sim.simulation.costs import Processor
from co2sim.simulation.lowering import LoweredSchedule, Times, Transfer
from co2sim.simulation.network import max_min_rates

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
    """Work of an `instance`: `left` of it at `since`, done at `rate` from then on.

    `loads` are the bytes on each link. `version` counts the changes of the rate.
    """

    instance: int
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
        affected = dict.fromkeys(seeds)
        queue = list(affected)
        while queue:
            for link in queue.pop().loads:
                new = [flow for flow in self._users(link) if flow not in affected]
                affected.update(dict.fromkeys(new))
                queue.extend(new)
        if not affected:
            return
        key = self._slower, *(id(flow.loads) for flow in affected)
        if key not in self._rates:
            copies = [self._transfers[id(flow.loads)].copies for flow in affected]
            loads = [flow.loads for flow in affected]
            self._rates[key] = max_min_rates(loads, self._capacity, copies)
        for flow, rate in zip(affected, self._rates[key], strict=True):
            if rate != flow.rate:
                self._go_on(now, flow, rate)

    def _go_on(self, now: Seconds, flow: Flow, rate: float) -> None:
        end = flow.set_rate(now, rate)
        self._events.at(end, self._leave, flow, flow.version)


_Array: TypeAlias = NDArray[np.float64]

_UNKNOWN: Seconds = -1.0
_EVENTS = 1000
"""Between two reports of progress."""
_NOWHERE: Mapping[Hashable, Bytes] = MappingProxyType({})
"""The links of a compute."""


def applies(lowered: LoweredSchedule, sharing: set[int]) -> bool:
    """Whether one class stands for all ranks, or all that matters to several is of all of them.

    That is every collective that may share links, wait for its communicator or slow computes down.
    NICs that attain less while their node computes differ by node. `sharing` are the works that may
    share links or wait, by number.
    """
    if len(lowered.classes) == 1 and lowered.class_factors is None:
        return True
    if lowered.contend and lowered.cluster.inter.busy_efficiency < 1:
        return False
    schedule = lowered.schedule
    places = {index: position for position, index in enumerate(schedule.work_numbers)}
    return all(
        len(lowered.communicators[work.group]) == 1
        for index, work in enumerate(schedule.works)
        if isinstance(work, Collective)
        and (index in sharing or (lowered.slows and _takes_time(lowered, places[index])))
    )


def _takes_time(lowered: LoweredSchedule, position: int) -> bool:
    return any(transfer.takes_time for transfer in lowered.transfers[position])


def run(
    lowered: LoweredSchedule, sharing: set[int], progress: Callable[[float], None] | None = None
) -> Times:
    """Starts and ends of all rounds, where this `applies`."""
    is_one_class = len(lowered.classes) == 1 and lowered.class_factors is None
    return (_OneClass if is_one_class else _Classes)(lowered, sharing).times(progress)


# --- the queue of events, and what it drives ------------------------------------------------------


@dataclass(eq=False, slots=True)
class _CommunicatorQueue:
    """The collectives of an exclusive communicator that are ready, by number; whether one runs."""

    ready: "list[tuple[int, _InFlight]]" = field(default_factory=list)
    running: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class _Work:
    """What ops of a work take, and what others have to do with them.

    They end after `latency + seconds`, unless the `transfer` may share, or others make them
    `slowed`. `busy` says that the NICs attain less meanwhile.
    """

    latency: Seconds = 0.0
    seconds: Seconds = 0.0
    transfer: Transfer | None = None
    queue: _CommunicatorQueue | None = None
    slowed: bool = False
    busy: bool = False


_Step: TypeAlias = tuple[int, tuple[int, ...], _Work, bool]
"""The place of an op, its offsets and its work; whether its end is known at its start."""


@dataclass(eq=False, slots=True)
class _Span:
    """A time without a gap in which a stream computes."""

    end: Seconds


@dataclass(eq=False, slots=True)
class _StreamState:
    """How far a stream has come: to step `index` of the round that begins with instance `turn`.

    It has nothing else to do from `free` on, seconds or an array of them over the classes, and
    computes in `span`, the last one that is known.
    """

    turn: int
    steps: list[_Step] = field(default_factory=list)
    index: int = 0
    free: Any = 0.0
    span: _Span | None = None


def _streams(lowered: LoweredSchedule, work_of: Callable[[int], _Work]) -> list[_StreamState]:
    """The steps of every stream. `work_of` gives the work at a place; equal ones are the same."""
    schedule, works = lowered.schedule, dict[int, _Work]()
    streams = {stream: _StreamState(schedule.farthest) for stream in schedule.streams}
    for position, index in enumerate(schedule.work_numbers):
        if index not in works:
            works[index] = work_of(position)
        work = works[index]
        fixed = not work.transfer and not work.slowed
        step = position, schedule.offsets[position], work, fixed
        streams[schedule.body[position].stream].steps.append(step)
    return list(streams.values())


class _Rounds:
    """All rounds of some streams, driven by one queue of events; who waits for which instance."""

    def __init__(self, lowered: LoweredSchedule) -> None:
        self.size, self.before = len(lowered.schedule.body), lowered.schedule.farthest
        self.total = self.before + lowered.rounds * self.size
        self.events = EventQueue()
        self.waiting: dict[int, list[_StreamState]] = {}

    def run(
        self,
        streams: Sequence[_StreamState],
        advance: Callable[[list[_StreamState]], None],
        progress: Callable[[float], None] | None,
    ) -> None:
        """Run all rounds; `progress` hears of the fraction that is done."""
        if progress:
            progress(0.0)
        advance([*streams])
        while self.events.run(_EVENTS):
            if progress:
                rounds = min(stream.turn for stream in streams) - self.before
                progress(rounds / (self.total - self.before))
        if progress:
            progress(1.0)


@dataclass(eq=False, slots=True)
class _InFlight(Flow):
    """A collective, or a compute that is slowed down, and who waits for it."""

    stream: _StreamState = field(kw_only=True)
    work: _Work = field(kw_only=True)


class _Collectives:
    """Collectives that events start and end: in turn in their communicator, on shared links.

    `ended` hears of each that has ended. Computes may be slower while any is in flight: `repace`
    hears of every change of their pace.
    """

    def __init__(
        self,
        lowered: LoweredSchedule,
        events: EventQueue,
        ended: Callable[[Seconds, _InFlight], None],
        repace: Callable[[Seconds, float], None],
    ) -> None:
        self._events, self._ended, self._repace = events, ended, repace
        self.links = SharedLinks(lowered, events, self._done)
        self._slows, self._in_flight = lowered.slows, 0
        self._alone, self._beside = (
            Processor(lowered.cluster.interference, in_flight).pace for in_flight in (0, 1)
        )
        self.queues = {
            group: _CommunicatorQueue()
            for group, together in lowered.communicators.items()
            if together[0].exclusive
        }

    def come(self, now: Seconds, task: _InFlight, _: int) -> None:
        """All members have come."""
        if queue := task.work.queue:
            heappush(queue.ready, (task.instance, task))
            self._next(now, queue)
        else:
            self._start(now, task)

    def _next(self, now: Seconds, queue: _CommunicatorQueue) -> None:
        """Start the collective issued first, once nothing else happens at this instant."""
        if self._events.is_free(now):
            self._launch(now, queue, 0)
        else:
            self._events.at(now, self._launch, queue, priority=AFTER_ALL)

    def _launch(self, now: Seconds, queue: _CommunicatorQueue, _: int) -> None:
        if queue.ready and not queue.running:
            queue.running = True
            self._start(now, heappop(queue.ready)[1])

    def _start(self, now: Seconds, task: _InFlight) -> None:
        assert task.work.transfer
        self._in_flight += 1
        if self._slows and self._in_flight == 1:
            self._repace(now, self._beside)
        self.links.transfer(now, task, task.work.transfer)

    def _done(self, now: Seconds, task: _InFlight, _: int) -> None:
        self._in_flight -= 1
        if self._slows and not self._in_flight:
            self._repace(now, self._alone)
        if queue := task.work.queue:
            queue.running = False
            if queue.ready:
                self._events.at(now, self._launch, queue, priority=AFTER_ALL)
        self._ended(now, task)


# --- one class of ranks ---------------------------------------------------------------------------


class _OneClass:
    """One class stands for all ranks: times are numbers."""

    def __init__(self, lowered: LoweredSchedule, sharing: set[int]) -> None:
        self.lowered, self.sharing = lowered, sharing
        self.rounds = _Rounds(lowered)
        self.events, before = self.rounds.events, self.rounds.before
        self.collectives = _Collectives(lowered, self.events, self._end, self._repace)
        self.links, self.pace = self.collectives.links, 1.0
        self.occupies = lowered.slows and lowered.cluster.inter.busy_efficiency < 1
        self.starts, self.ends = ([_UNKNOWN] * self.rounds.total for _ in range(2))
        self.ends[:before] = [0.0] * before  # what the first rounds wait for
        self.slowed: list[_InFlight] = []
        self.streams = _streams(lowered, self._work)

    def _work(self, position: int) -> _Work:
        lowered = self.lowered
        work = lowered.schedule.body[position].work
        if not isinstance(work, Collective):
            seconds = lowered.seconds[position] * lowered.classes[0].slowdown
            slowed = lowered.slows and seconds > 0
            busy = lowered.contend and seconds > 0 and not slowed
            return _Work(0.0, seconds, slowed=slowed, busy=busy)
        (transfer,) = lowered.transfers[position]
        if not lowered.slows and lowered.schedule.work_numbers[position] not in self.sharing:
            return _Work(transfer.latency, transfer.alone)
        queue = self.collectives.queues.get(work.group)
        return _Work(transfer=transfer, queue=queue)

    def times(self, progress: Callable[[float], None] | None) -> Times:
        """Run all rounds."""
        self.rounds.run(self.streams, self._advance, progress)
        starts, ends = (
            np.array(times[self.rounds.before :])[:, None] for times in (self.starts, self.ends)
        )
        return starts, ends

    def _advance(self, streams: list[_StreamState]) -> None:
        """Let streams run ahead as far as all is known, and those that wait for what they do."""
        while streams:
            stream = streams.pop()
            streams += self._run_ahead(stream, last=not streams and not self.occupies)

    def _run_ahead(self, stream: _StreamState, *, last: bool) -> list[_StreamState]:
        """Those that waited for what a stream has done.

        Beside the `last` stream that runs ahead, computes keep their pace until the next event.
        """
        starts, ends, waiting = self.starts, self.ends, self.rounds.waiting
        woken: list[_StreamState] = []
        steps, turn, index, free = stream.steps, stream.turn, stream.index, stream.free
        count, total, size = len(steps), self.rounds.total, self.rounds.size
        while turn < total:
            position, offsets, work, fixed = steps[index]
            instance, start = turn + position, free
            for offset in offsets:
                end = ends[instance - offset]
                if end > start:
                    start = end
                elif end < 0:
                    waiting.setdefault(instance - offset, []).append(stream)
                    break
            else:
                starts[instance] = start
                index += 1
                if index == count:
                    turn, index = turn + size, 0
                end = start + work.latency + work.seconds / self.pace
                alone = work.slowed and last and not woken
                if not (fixed or (alone and self.events.is_free(end))):
                    self._begin(stream, work, instance, start)
                    break
                free = ends[instance] = end
                if work.busy:
                    self._busy(stream, start, free)
                if instance in waiting:
                    woken += waiting.pop(instance)
                continue
            break
        stream.turn, stream.index, stream.free = turn, index, free
        return woken

    def _begin(self, stream: _StreamState, work: _Work, instance: int, start: Seconds) -> None:
        """Begin what ends when others let it."""
        if work.transfer:
            task = _InFlight(instance, work.transfer.loads, stream=stream, work=work)
            self.events.at(start, self.collectives.come, task)
        else:  # where computes are slowed, no end is known in advance: this one begins now
            seconds = work.seconds
            task = _InFlight(
                instance, _NOWHERE, seconds, self.pace, start, stream=stream, work=work
            )
            if self.occupies:
                self.links.occupy(start, 1)
            self.slowed.append(task)
            self.events.at(start + seconds / self.pace, self._computed, task)

    def _end(self, now: Seconds, task: _InFlight) -> None:
        self.ends[task.instance] = task.stream.free = now
        self._advance([task.stream, *self.rounds.waiting.pop(task.instance, ())])

    def _repace(self, now: Seconds, pace: float) -> None:
        self.pace = pace
        for task in self.slowed:
            end = task.set_rate(now, pace)
            self.events.at(end, self._computed, task, task.version)

    def _computed(self, now: Seconds, task: _InFlight, version: int) -> None:
        if version == task.version:
            self.slowed.remove(task)
            if self.occupies:
                self.links.occupy(now, -1)
            self._end(now, task)

    def _busy(self, stream: _StreamState, start: Seconds, end: Seconds) -> None:
        if stream.span and stream.span.end == start:
            stream.span.end = end
        else:
            stream.span = _Span(end)
            self.events.at(start, self._occupy, stream.span)

    def _occupy(self, now: Seconds, span: _Span, _: int) -> None:
        self.links.occupy(now, 1)
        self.events.at(span.end, self._release, span)

    def _release(self, now: Seconds, span: _Span, _: int) -> None:
        if span.end > now:  # it has grown
            self.events.at(span.end, self._release, span)
        else:
            self.links.occupy(now, -1)


# --- several classes of ranks ---------------------------------------------------------------------


class _Members(NamedTuple):
    """Classes by communicator: `order` lists them, `cuts` says where each communicator begins.

    `nth` is that of each class's communicator, `factors` is jitter, [instance, nth].
    """

    order: NDArray[np.intp]
    cuts: NDArray[np.intp]
    nth: NDArray[np.intp]
    factors: _Array | None


@dataclass(eq=False, slots=True)
class _SlowedComputes:
    """A compute of all classes, by class: seconds `left` of it at `since`, and when it `ends`.

    `version` counts the changes of the pace.
    """

    stream: _StreamState
    instance: int
    left: _Array
    since: _Array
    ends: _Array
    version: int = 0

    def set_pace(self, now: Seconds, before: float, after: float) -> None:
        """Continue at another pace where it has not ended; some classes may begin only later."""
        left = self.left - np.maximum(now - self.since, 0.0) * before
        since = np.maximum(self.since, now)
        going = self.ends > now
        self.left, self.since = np.where(going, left, self.left), np.where(going, since, self.since)
        self.ends = np.where(going, since + np.maximum(left, 0.0) / after, self.ends)
        self.version += 1


class _Classes:
    """Times are arrays over the classes: what all meet in ends for all at once.

    A compute is known as soon as its last class has ended. Others may have begun what follows by
    then, so the paces of the past are kept, by the time from which each holds.
    """

    def __init__(self, lowered: LoweredSchedule, sharing: set[int]) -> None:
        self.lowered, self.sharing = lowered, sharing
        self.rounds = _Rounds(lowered)
        self.events, self.before = self.rounds.events, self.rounds.before
        self.collectives = _Collectives(lowered, self.events, self._end, self._repace)
        shape = self.rounds.total, len(lowered.classes)
        self.starts, self.ends = np.zeros(shape), np.zeros(shape)
        self.has_end = [True] * self.before + [False] * (shape[0] - self.before)
        self.slowdowns = np.array([rank_class.slowdown for rank_class in lowered.classes])
        self.factors = lowered.class_factors
        self.transfers = _few_links(lowered, sharing)
        self.alone: dict[int, _Array] = {}
        self.members: dict[Group, _Members] = {}
        self.kept: list[Transfer] = []  # rates are known by the place of their loads in memory
        self.slowed: list[_SlowedComputes] = []
        self.since, self.paces = [0.0], [1.0]
        self.streams = _streams(lowered, self._work)
        for stream in self.streams:
            stream.free = np.zeros(shape[1])

    def _work(self, position: int) -> _Work:
        lowered = self.lowered
        work, index = lowered.schedule.body[position].work, lowered.schedule.work_numbers[position]
        if not isinstance(work, Collective):
            seconds = lowered.seconds[position]
            return _Work(0.0, seconds, slowed=lowered.slows and seconds > 0)
        queue = self.collectives.queues.get(work.group)
        return _Work(transfer=self.transfers.get(index), queue=queue)

    def times(self, progress: Callable[[float], None] | None) -> Times:
        """Run all rounds."""
        self.rounds.run(self.streams, self._advance, progress)
        return self.starts[self.before :], self.ends[self.before :]

    def _advance(self, streams: list[_StreamState]) -> None:
        """Let streams run ahead as far as all is known, and those that wait for what they do."""
        while streams:
            streams += self._run_ahead(streams.pop())

    def _run_ahead(self, stream: _StreamState) -> list[_StreamState]:
        """Those that waited for what a stream has done."""
        woken: list[_StreamState] = []
        while stream.turn < self.rounds.total:
            position, offsets, work, fixed = stream.steps[stream.index]
            instance, start = stream.turn + position, stream.free
            for offset in offsets:
                if not self.has_end[instance - offset]:
                    self.rounds.waiting.setdefault(instance - offset, []).append(stream)
                    return woken
                start = np.maximum(start, self.ends[instance - offset])
            self.starts[instance] = start
            stream.index += 1
            if stream.index == len(stream.steps):
                stream.turn, stream.index = stream.turn + self.rounds.size, 0
            if work.transfer:
                self._meet(stream, work, instance, start)
                break
            body = self.lowered.schedule.body[position].work
            if isinstance(body, Collective):
                end = self._after(instance, position, body.group, start)
            else:
                seconds = work.seconds * self.slowdowns
                if self.factors is not None:
                    seconds *= self.factors[instance - self.before]
                if not fixed:
                    self._compute(stream, instance, start, seconds)
                    break
                end = start + seconds
            stream.free = end
            woken += self._know(instance, end)
        return woken

    def _know(self, instance: int, end: _Array | Seconds) -> list[_StreamState]:
        """Keep when an instance ends; gives the streams that waited for it."""
        self.ends[instance], self.has_end[instance] = end, True
        return self.rounds.waiting.pop(instance, [])

    def _after(self, instance: int, position: int, group: Group, start: _Array) -> _Array:
        """When a collective that shares nothing ends, on each class."""
        if position not in self.alone:
            transfers = self.lowered.transfers[position]
            times = [transfer.latency + transfer.alone for transfer in transfers]
            self.alone[position] = np.array(times)
        if group not in self.members:
            self.members[group] = _members(self.lowered, group)
        order, cuts, where, factors = self.members[group]
        come, took = np.maximum.reduceat(start[order], cuts), self.alone[position]
        if factors is not None:
            took = took * factors[instance - self.before]
        end: _Array = (come + took)[where]
        return end

    def _meet(self, stream: _StreamState, work: _Work, instance: int, start: _Array) -> None:
        """Put a collective of all classes on the events."""
        position, factors = (
            (instance - self.before) % self.rounds.size,
            self.lowered.communicator_factors,
        )
        transfer, op = work.transfer, self.lowered.schedule.body[position]
        assert transfer
        assert isinstance(op.work, Collective)
        if factors is not None:
            (communicator,) = self.lowered.communicators[op.work.group]
            transfer = transfer.scaled(float(factors[instance - self.before, communicator.index]))
            self.kept.append(transfer)
            work = replace(work, transfer=transfer)
        task = _InFlight(instance, transfer.loads, stream=stream, work=work)
        self.events.at(float(start.max()), self.collectives.come, task)

    def _end(self, now: Seconds, task: _InFlight) -> None:
        task.stream.free = np.full(len(self.slowdowns), now)
        self._advance([task.stream, *self._know(task.instance, now)])

    def _compute(self, stream: _StreamState, instance: int, start: _Array, seconds: _Array) -> None:
        """Begin a compute that collectives in flight slow down."""
        first = bisect_right(self.since, float(start.min())) - 1
        task = _SlowedComputes(
            stream, instance, seconds, start, start + seconds / self.paces[first]
        )
        for change in range(first + 1, len(self.since)):
            task.set_pace(self.since[change], self.paces[change - 1], self.paces[change])
        self.slowed.append(task)
        self._go_on(task)

    def _repace(self, now: Seconds, pace: float) -> None:
        for task in self.slowed:
            task.set_pace(now, self.paces[-1], pace)
            self._go_on(task)
        self.since.append(now)
        self.paces.append(pace)

    def _go_on(self, task: _SlowedComputes) -> None:
        self.events.at(float(task.ends.max()), self._computed, task, task.version)

    def _computed(self, _: Seconds, task: _SlowedComputes, version: int) -> None:
        if version == task.version:
            self.slowed.remove(task)
            task.stream.free = task.ends
            self._advance([task.stream, *self._know(task.instance, task.ends)])


def _members(lowered: LoweredSchedule, group: Group) -> _Members:
    together, factors = lowered.communicators[group], lowered.communicator_factors
    lengths = [len(communicator.members) for communicator in together]
    return _Members(
        np.array([index for communicator in together for index in communicator.members]),
        np.cumsum([0, *lengths[:-1]]),
        np.array(lowered.place[group]),
        None if factors is None else factors[:, [communicator.index for communicator in together]],
    )


def _few_links(lowered: LoweredSchedule, sharing: set[int]) -> dict[int, Transfer]:
    """What events start and end, by number of its work, on one of all links that carry the same."""
    numbers = lowered.schedule.work_numbers
    meeting = {
        index: transfers[0]
        for position, (index, transfers) in enumerate(zip(numbers, lowered.transfers, strict=True))
        if index in sharing or (lowered.slows and _takes_time(lowered, position))
    }
    if not meeting:
        return {}
    alike: dict[tuple[object, ...], Hashable] = {}
    for link, capacity in lowered.capacity.items():
        carried = [
            (transfer.loads.get(link), transfer.copies.get(link)) for transfer in meeting.values()
        ]
        alike.setdefault((capacity, *carried), link)
    kept = set(alike.values())
    return {
        index: replace(transfer, loads={k: size for k, size in transfer.loads.items() if k in kept})
        for index, transfer in meeting.items()
    }
