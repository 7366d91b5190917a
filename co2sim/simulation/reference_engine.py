"""The reference: a SimPy process for each stream and class of ranks, and how these meet."""

import heapq
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import simpy
from simpy.core import EmptySchedule
from simpy.events import EventPriority

from co2sim.common.units import Seconds
from co2sim.schedule.schedule import Compute, Group, Instance
from co2sim.simulation.costs import Processor
from co2sim.simulation.lowering import NOTHING, Communicator, LoweredSchedule, Times, Transfer
from co2sim.simulation.network import Network

_AFTER_ALL_ELSE = EventPriority(9)
"""SimPy priority behind everything else that happens at the same instant."""

_Start: TypeAlias = Callable[[], None]


@dataclass(eq=False, slots=True)
class _Queue:
    """Of one communicator: who has come to which collective, and which of them wait to start."""

    arrived: dict[int, tuple[list[int], simpy.Event]] = field(default_factory=dict)
    ready: list[tuple[int, _Start]] = field(default_factory=list)
    busy: bool = False


class Communicators:
    """All communicators of a simulation, and the network below them.

    `processors` say what is under way on each class of ranks, where that slows compute.
    """

    def __init__(self, env: simpy.Environment, lowered: LoweredSchedule) -> None:
        """Start without a class under way to any collective."""
        self._env, self._lowered = env, lowered
        self._network = self._make_network()
        self._queues = [_Queue() for together in lowered.communicators.values() for _ in together]
        self._size = len(lowered.schedule.body)
        classes = range(len(lowered.classes))
        self.processors = [self._make_processor() for _ in classes]
        self._changed: list[simpy.Event | None] = [None for _ in classes]
        self._computing = {lowered.folding.node(index): 0 for index in classes}
        self._busy = dict.fromkeys(self._computing, False)

    def _make_network(self) -> Network:
        return Network(self._env, self._lowered.capacity)

    def _make_processor(self) -> Processor:
        return Processor(self._lowered.cluster.interference)

    def _transfer(self, instance: int, nth: int) -> Transfer:
        return self._lowered.transfers[instance % self._size][nth]

    def join(self, index: int, instance: int, group: Group) -> simpy.Event | None:
        """A class arrives at a collective; the event fires when it has ended for all members.

        None where that takes no time: one class stands for all members, and communication is free.
        """
        lowered = self._lowered
        nth = lowered.place[group][index]
        communicator = lowered.communicators[group][nth]
        if lowered.free and len(communicator.members) == 1:
            return None
        arrived = self._queues[communicator.index].arrived
        here, event = arrived.setdefault(instance, ([], self._env.event()))
        here.append(index)
        if len(here) == len(communicator.members):
            del arrived[instance]
            self._come(communicator, nth, instance, event)
        return event

    def _come(
        self, communicator: Communicator, nth: int, instance: int, event: simpy.Event
    ) -> None:
        """All members have come: start as soon as the communicator is free."""
        start: _Start = partial(self._start, communicator, nth, instance, event)
        if not communicator.exclusive:
            start()
            return
        queue = self._queues[communicator.index]
        heapq.heappush(queue.ready, (instance, start))
        self._next(queue)

    def _next(self, queue: _Queue) -> None:
        """Start the collective issued first among those that are ready at this instant."""

        def launch(_: simpy.Event) -> None:
            if queue.ready and not queue.busy:
                queue.busy = True
                heapq.heappop(queue.ready)[1]()

        self._last(launch)

    def _start(
        self, communicator: Communicator, nth: int, instance: int, event: simpy.Event
    ) -> None:
        transfer = self._transfer(instance, nth)
        factors = self._lowered.communicator_factors
        if factors is not None and transfer is not NOTHING:
            transfer = transfer.scaled(float(factors[instance, communicator.index]))
        queue = self._queues[communicator.index]

        def done() -> None:
            event.succeed()
            self._count(communicator, -1)
            if communicator.exclusive:
                queue.busy = False
                self._next(queue)

        self._count(communicator, 1)
        if transfer.takes_time:
            self._network.transfer(transfer, done)
        else:
            done()

    def _last(self, call: Callable[[simpy.Event], None]) -> None:
        """Call it when all else that happens at this instant has happened."""
        last = simpy.Event(self._env)
        last._ok, last._value = True, None  # noqa: SLF001 - the documented way to a custom priority
        assert last.callbacks is not None
        last.callbacks.append(call)
        self._env.schedule(last, priority=_AFTER_ALL_ELSE)

    # --- communication and computing slow each other down -----------------------------------------

    def change(self, index: int) -> simpy.Event:
        """An event at which what slows the compute of a class down may be another."""
        event = self._changed[index] or self._env.event()
        self._changed[index] = event
        return event

    def _count(self, communicator: Communicator, change: int) -> None:
        """Count collectives in flight on the members, and tell who computes there."""
        if self._lowered.slows:
            for index in communicator.members:
                if self.processors[index].communicate(change):
                    self._tell(index)

    def _tell(self, index: int) -> None:
        """Let the computes of a class find out how fast they continue."""
        event = self._changed[index]
        if event is not None:
            event.succeed()
            self._changed[index] = None

    def occupy(self, index: int, change: int) -> None:
        """Count computes: NICs of their node attain less meanwhile."""
        node, inter = self._lowered.folding.node(index), self._lowered.cluster.inter
        self._computing[node] += change

        def resize(_: simpy.Event) -> None:
            self._busy[node] = self._computing[node] > 0
            share = inter.busy_efficiency if self._busy[node] else 1.0
            self._network.resize(("nic", node), inter.payload_bandwidth * share)

        if inter.busy_efficiency < 1 and self._busy[node] != (self._computing[node] > 0):
            self._last(resize)  # ops that follow each other at once do not let go in between


_STEPS = 2000
"""Events between two reports of progress."""


@dataclass(slots=True)
class _Spans:
    """When a class of ranks starts and ends every instance, and who waits for what has not ended.

    Ends are NaN until then.
    """

    starts: list[Seconds]
    ends: list[Seconds]
    waiting: dict[int, simpy.Event] = field(default_factory=dict)


class Simulation:
    """SimPy, event by event: the reference that the faster engines are compared with."""

    def __init__(self, lowered: LoweredSchedule, env: simpy.Environment | None = None) -> None:
        self.lowered = lowered
        self.env = env or simpy.Environment()
        self.communicators = self._make_communicators()
        count = lowered.rounds * len(lowered.schedule.body)
        self.spans = [_Spans([math.nan] * count, [math.nan] * count) for _ in lowered.classes]
        self.ended = 0

    def _make_communicators(self) -> Communicators:
        return Communicators(self.env, self.lowered)

    @property
    def beside(self) -> bool:
        """Whether computes and what is beside them may slow each other down."""
        return self.lowered.contend

    def run(self, progress: Callable[[float], None] | None = None) -> Times:
        """Starts and ends, [instance, class]."""
        self.begin()
        if progress:
            self._step(progress)
        self.env.run()
        return self.times()

    def begin(self) -> None:
        """Put what is to be done into the environment."""
        schedule, env = self.lowered.schedule, self.env
        by_stream: dict[str, list[Instance]] = {stream: [] for stream in schedule.streams}
        for instance in schedule.instances(self.lowered.rounds):
            by_stream[instance.op.stream].append(instance)
        for index in range(len(self.spans)):
            for instances in by_stream.values():
                env.process(self._stream(index, instances))

    def times(self) -> Times:
        """Starts and ends of all that was done, [instance, class]."""
        starts, ends = (np.array([getattr(c, n) for c in self.spans]) for n in ("starts", "ends"))
        return starts.T, ends.T

    def _step(self, progress: Callable[[float], None]) -> None:
        """Run, and say how far it has come."""
        total = len(self.spans) * len(self.lowered.schedule.body) * self.lowered.rounds
        with suppress(EmptySchedule):
            while True:
                progress(self.ended / total)
                for _ in range(_STEPS):
                    self.env.step()
        progress(1.0)

    def _stream(self, index: int, instances: Sequence[Instance]) -> Generator[simpy.Event]:
        """What one class of ranks does on one stream."""
        env, spans = self.env, self.spans[index]
        starts, ends, waiting = spans.starts, spans.ends, spans.waiting
        beside = self.beside
        for instance, _, op, waits in instances:
            for wait in waits:
                if math.isnan(ends[wait]):
                    yield waiting.setdefault(wait, env.event())
            starts[instance] = env.now
            if isinstance(op.work, Compute):
                if beside:
                    yield from self._compute(index, instance)
                elif work := self.seconds(index, instance):
                    yield env.timeout(work)
            elif event := self.communicators.join(index, instance, op.work.group):
                yield event
            ends[instance] = env.now
            self.ended += 1
            if instance in waiting:
                waiting.pop(instance).succeed()

    def seconds(self, index: int, instance: int) -> Seconds:
        """What an instance of a compute takes alone on a class of ranks."""
        lowered = self.lowered
        seconds = lowered.seconds[instance % len(lowered.schedule.body)]
        seconds *= lowered.classes[index].slowdown
        factors = lowered.class_factors
        return seconds if factors is None else seconds * float(factors[instance, index])

    def _compute(self, index: int, instance: int) -> Generator[simpy.Event]:
        """Compute that slows down while communication of the same ranks is in flight.

        The NICs of its node may attain less meanwhile.
        """
        communicators, work = self.communicators, self.seconds(index, instance)
        if not work:
            return
        communicators.occupy(index, 1)
        if not self.lowered.slows:
            yield self.env.timeout(work)
            work = 0.0
        while work > 0:
            pace = communicators.processors[index].pace
            started, changed = self.env.now, communicators.change(index)
            done = self.env.timeout(work / pace)
            yield done | changed
            work = 0.0 if done.processed else work - (self.env.now - started) * pace
        communicators.occupy(index, -1)
