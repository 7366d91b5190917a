"""One class of ranks that stands for all, event by event: what SimPy simulates, with fewer events.

An op that nothing slows down ends at a time that is known when it starts. So every stream runs
ahead until it waits for what is not known yet. Then nothing can come earlier than the next event:
a collective that arrives, starts or ends where others do, or a compute that they slow down. The
rules are those of `communicators`; links are those of `flows`. The tests compare all times with
those of SimPy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from co2sim.flows import LAST, Agenda, Flow, Links
from co2sim.lowering import Lowered, Times, Transfer
from co2sim.schedule import Collective, Group
from co2sim.units import Seconds

_UNKNOWN: Seconds = -1.0
_EVENTS = 1000
"""Between two reports of progress."""


@dataclass(eq=False, slots=True)
class _Queue:
    """The collectives of an exclusive communicator that are ready, by number; whether one runs."""

    ready: "list[tuple[int, _Task]]" = field(default_factory=list)
    running: bool = False


class _Step(NamedTuple):
    """An op of the body: what it takes, and what others have to do with it.

    It ends after `latency + seconds`, unless its `transfer` may share, or communication makes it
    `slowed`. `busy` says that the NICs attain less meanwhile.
    """

    place: int
    offsets: tuple[int, ...]
    latency: Seconds
    seconds: Seconds
    transfer: Transfer | None = None
    queue: _Queue | None = None
    slowed: bool = False
    busy: bool = False


@dataclass(eq=False, slots=True)
class _Span:
    """A time without a gap in which a stream computes."""

    end: Seconds


@dataclass(eq=False, slots=True)
class _Stream:
    """How far a stream has come: to step `index` of the round that begins with instance `turn`.

    It has nothing else to do from `free` on, and computes in `span`, the last one that is known.
    """

    steps: list[_Step] = field(default_factory=list)
    turn: int = 0
    index: int = 0
    free: Seconds = 0.0
    span: _Span | None = None


@dataclass(eq=False, slots=True)
class _Task(Flow):
    """A collective, or a compute that is slowed down, and who waits for it."""

    stream: _Stream = field(kw_only=True)
    step: _Step = field(kw_only=True)


def run(
    lowered: Lowered, sharing: set[int], progress: Callable[[float], None] | None = None
) -> Times:
    """Starts and ends of all rounds, without jitter, and on links without bursts.

    `sharing` are the works that may share links or wait for their communicator, by number.
    """
    return _Run(lowered, sharing).times(progress)


class _Run:
    def __init__(self, lowered: Lowered, sharing: set[int]) -> None:
        self.size = len(lowered.schedule.body)
        self.total = lowered.rounds * self.size
        self.starts, self.ends = [_UNKNOWN] * self.total, [_UNKNOWN] * self.total
        self.slows = lowered.contend and lowered.cluster.interference > 0
        self.streams = _streams(lowered, sharing, slows=self.slows)
        self.waiting: dict[int, list[_Stream]] = {}
        self.agenda = Agenda()
        self.links = Links(lowered, self.agenda, self._done)
        self.pace = 1.0 / (1.0 + lowered.cluster.interference)
        self.in_flight = 0
        self.slowed: list[_Task] = []

    def times(self, progress: Callable[[float], None] | None) -> Times:
        self._advance([*self.streams])
        while self.agenda.run(_EVENTS):
            if progress:
                progress(min(stream.turn for stream in self.streams) / self.total)
        if progress:
            progress(1.0)
        return np.array(self.starts).reshape(-1, 1), np.array(self.ends).reshape(-1, 1)

    # --- streams ----------------------------------------------------------------------------------

    def _advance(self, streams: list[_Stream]) -> None:
        """Let streams run ahead as far as all is known, and those that wait for what they do."""
        starts, ends, waiting = self.starts, self.ends, self.waiting
        while streams:
            stream = streams.pop()
            while stream.turn < self.total:
                step = stream.steps[stream.index]
                number, start = stream.turn + step.place, stream.free
                for offset in step.offsets:
                    if offset <= number:
                        end = ends[number - offset]
                        if end < 0:
                            waiting.setdefault(number - offset, []).append(stream)
                            break
                        start = max(start, end)
                else:
                    starts[number] = start
                    stream.index += 1
                    if stream.index == len(stream.steps):
                        stream.turn, stream.index = stream.turn + self.size, 0
                    if self._goes_on(stream, step, number, start):
                        ends[number] = stream.free
                        if number in waiting:
                            streams += waiting.pop(number)
                        continue
                break

    def _goes_on(self, stream: _Stream, step: _Step, number: int, start: Seconds) -> bool:
        """Whether the end of a step is known when it starts: then the stream is free."""
        if step.transfer:
            task = _Task(number, step.transfer.loads, stream=stream, step=step)
            self.agenda.at(start, self._come, task)
            return False
        if step.slowed:
            task = _Task(number, _NOWHERE, step.seconds, stream=stream, step=step)
            self.agenda.at(start, self._compute, task)
            return False
        stream.free = start + step.latency + step.seconds
        if step.busy:
            if stream.span and stream.span.end == start:
                stream.span.end = stream.free
            else:
                stream.span = _Span(stream.free)
                self.agenda.at(start, self._occupy, stream.span)
        return True

    def _done(self, now: Seconds, task: _Task, _: int) -> None:
        self.ends[task.number] = task.stream.free = now
        self._advance([task.stream, *self.waiting.pop(task.number, ())])
        if self.slows and task.step.transfer:
            self._count(now, -1)
        if queue := task.step.queue:
            queue.running = False
            self._next(now, queue)

    # --- communicators ----------------------------------------------------------------------------

    def _come(self, now: Seconds, task: _Task, _: int) -> None:
        if queue := task.step.queue:
            heappush(queue.ready, (task.number, task))
            self._next(now, queue)
        else:
            self._start(now, task)

    def _next(self, now: Seconds, queue: _Queue) -> None:
        """Start the collective issued first, once nothing else happens at this instant."""
        if self.agenda.is_free(now):
            self._launch(now, queue, 0)
        else:
            self.agenda.at(now, self._launch, queue, priority=LAST)

    def _launch(self, now: Seconds, queue: _Queue, _: int) -> None:
        if queue.ready and not queue.running:
            queue.running = True
            self._start(now, heappop(queue.ready)[1])

    def _start(self, now: Seconds, task: _Task) -> None:
        assert task.step.transfer
        if self.slows:
            self._count(now, 1)
        self.links.transfer(now, task, task.step.transfer)

    # --- communication and computing slow each other down -----------------------------------------

    def _count(self, now: Seconds, change: int) -> None:
        """Count collectives in flight; computing is slower while there are any."""
        before, self.in_flight = self.in_flight > 0, self.in_flight + change
        if before != (self.in_flight > 0):
            for task in self.slowed:
                self._go_on(now, task)

    def _compute(self, now: Seconds, task: _Task, _: int) -> None:
        self.links.occupy(now, 1)
        self.slowed.append(task)
        self._go_on(now, task)

    def _go_on(self, now: Seconds, task: _Task) -> None:
        end = task.set_rate(now, self.pace if self.in_flight else 1.0)
        self.agenda.at(end, self._computed, task, task.version)

    def _computed(self, now: Seconds, task: _Task, version: int) -> None:
        if version == task.version:
            self.slowed.remove(task)
            self.links.occupy(now, -1)
            self._done(now, task, 0)

    def _occupy(self, now: Seconds, span: _Span, _: int) -> None:
        self.links.occupy(now, 1)
        self.agenda.at(span.end, self._release, span)

    def _release(self, now: Seconds, span: _Span, _: int) -> None:
        if span.end > now:  # it has grown
            self.agenda.at(span.end, self._release, span)
        else:
            self.links.occupy(now, -1)


_NOWHERE: Mapping[object, float] = MappingProxyType({})
"""The links of a compute."""


def _streams(lowered: Lowered, sharing: set[int], *, slows: bool) -> list[_Stream]:
    """The steps of every stream; `slows` says that communication slows computing down."""
    schedule = lowered.schedule
    queues: dict[Group, _Queue] = {
        group: _Queue() for group, (one,) in lowered.communicators.items() if one.exclusive
    }
    costs: dict[int, tuple[Any, ...]] = {}
    streams = {stream: _Stream() for stream in schedule.streams}
    for place, (op, offsets, number) in enumerate(
        zip(schedule.body, schedule.offsets, schedule.work_numbers, strict=True)
    ):
        if number not in costs:
            seconds = lowered.seconds[place] * lowered.classes[0].slowdown
            contends = lowered.contend and seconds > 0
            costs[number] = 0.0, seconds, None, None, contends and slows, contends and not slows
            if isinstance(op.work, Collective):
                (one,) = lowered.transfers[place]
                meets = number in sharing or slows
                queue = queues.get(op.work.group)
                costs[number] = one.latency, one.alone, *((one, queue) if meets else ())
        streams[op.stream].steps.append(_Step(place, offsets, *costs[number]))
    return list(streams.values())
