"""The SimPy interpreter of a schedule: one process per stream and class of ranks."""

import heapq
import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import simpy
from simpy.events import EventPriority

from co2sim.cluster import Cluster
from co2sim.cost import compute_time, footprints
from co2sim.folding import fold as fold_ranks
from co2sim.network import Network
from co2sim.noise import QUIET, Noise
from co2sim.schedule import Collective, Compute, Group, Instance, Schedule
from co2sim.trace import Span, Trace
from co2sim.units import Bytes, Seconds

_STEPS = 10_000
"""Events between two reports of progress."""
_AFTER_ALL_ELSE = EventPriority(9)
"""SimPy priority behind everything else that happens at the same instant."""


def execute(
    schedule: Schedule,
    cluster: Cluster,
    *,
    precision: str,
    rounds: int,
    noise: Noise = QUIET,
    fold: bool = True,
    free_communication: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Trace:
    """Simulate `rounds` rounds of `schedule` on `cluster`.

    Equal ranks are folded into one that stands for all, unless `fold` is false; nodes of different
    speed stay apart, and jitter unfolds every rank. With `free_communication` collectives take no
    time once all members are there: the baseline of exposed communication. `progress` is called now
    and then with the fraction that is done.
    """
    made = _Run(schedule, cluster, precision, rounds, noise, fold, free_communication)
    return made.trace(progress)


_Start: TypeAlias = Callable[[], None]


@dataclass(slots=True)
class _Progress:
    """What one class of ranks has finished, and who waits for what it has not."""

    finished: set[int] = field(default_factory=set)
    waiting: dict[int, simpy.Event] = field(default_factory=dict)
    in_flight: int = 0
    changed: simpy.Event | None = None


@dataclass(frozen=True, slots=True)
class _Transfer:
    loads: Mapping[Hashable, Bytes]
    copies: Mapping[Hashable, int]
    latency: Seconds
    solo: Seconds


@dataclass(eq=False, slots=True)
class _Communicator:
    """A group of ranks that meet: the classes among them, and what is ready to start.

    `exclusive` communicators run one collective at a time.
    """

    members: tuple[int, ...]
    exclusive: bool
    jitter: Sequence[float] | None
    transfers: dict[int, _Transfer] = field(default_factory=dict)
    arrived: dict[int, tuple[list[int], simpy.Event]] = field(default_factory=dict)
    ready: list[tuple[int, _Start]] = field(default_factory=list)
    busy: bool = False

    @property
    def alone(self) -> bool:
        """Whether one class stands for all members: it has nobody to wait for."""
        return len(self.members) == 1


class _Run:
    def __init__(
        self,
        schedule: Schedule,
        cluster: Cluster,
        precision: str,
        rounds: int,
        noise: Noise,
        fold: bool,  # noqa: FBT001 - private, passed on from the keyword of `execute`
        free: bool,  # noqa: FBT001
    ) -> None:
        self.env = simpy.Environment()
        self.schedule, self.cluster, self.rounds, self.free = schedule, cluster, rounds, free
        works = {id(op.work): op.work for op in schedule.body}
        self.seconds = {
            key: compute_time(work, cluster.gpu, precision)
            for key, work in works.items()
            if isinstance(work, Compute)
        }
        collectives = [work for work in works.values() if isinstance(work, Collective)]
        self.footprints = footprints(collectives, cluster)
        self.folding = fold_ranks(
            cluster.layout,
            noise.node_slowdowns(cluster.layout),
            schedule,
            allowed=fold and not noise.jitter,
        )
        self.classes = self.folding.classes
        self.progress = [_Progress() for _ in self.classes]
        count = rounds * len(schedule.body) if noise.jitter else 0
        self.jitter = [
            noise.op_slowdowns(1, c.rank, count) if count else None for c in self.classes
        ]
        self.communicators = self._communicators(noise, count)
        self.network = Network(self.env, self._capacities())
        self.contend = not free and bool(
            cluster.interference or (cluster.inter.busy_efficiency < 1 and cluster.nodes > 1)
        )
        self.computing = {self.folding.node(index): 0 for index in range(len(self.classes))}
        self.busy = dict.fromkeys(self.computing, False)
        self.spans: list[Span] = []

    def _communicators(self, noise: Noise, count: int) -> dict[tuple[Group, int], _Communicator]:
        """The communicator of every group and class. One stream alone never needs the lock."""
        streams: dict[Group, set[str]] = {}
        for op in self.schedule.body:
            if isinstance(op.work, Collective):
                streams.setdefault(op.work.group, set()).add(op.stream)
        meetings = [
            (group, members) for group in streams for members in self.folding.meetings(group)
        ]
        found = {}
        for number, (group, members) in enumerate(meetings):
            jitter = noise.op_slowdowns(2, number, count) if count else None
            shared = self.cluster.communicators == "group" and len(streams[group]) > 1
            exclusive = self.cluster.backend == "nccl" and shared
            communicator = _Communicator(members, exclusive, jitter)
            found.update({(group, index): communicator for index in members})
        return found

    # --- what it costs --------------------------------------------------------------------------

    def _capacities(self) -> dict[Hashable, float]:
        cluster = self.cluster
        found: dict[Hashable, float] = {}
        for index in range(len(self.classes)):
            found["gpu", index] = cluster.intra.payload_bandwidth
            found["nic", self.folding.node(index)] = cluster.inter.payload_bandwidth
        if cluster.wan:
            speed = cluster.wan.payload_bandwidth
            found.update({("wan", site): speed for site in range(cluster.sites)})
        return found

    def _transfer(self, communicator: _Communicator, work: Collective) -> _Transfer:
        """Bytes on every link; a folded rank stands for all groups that share its node and site."""
        cluster = self.cluster
        somebody = self.classes[communicator.members[0]].rank
        if self.free or len(work.group.members(somebody, cluster.layout)) == 1:
            return _Transfer({}, {}, 0.0, 0.0)
        cost = self.footprints[id(work)]
        loads: dict[Hashable, float] = {}
        copies: dict[Hashable, int] = {}
        intra, nic, wan = cost.loads(cluster)
        nic /= cost.inter_efficiency  # the time of the link that the messages take
        on_node, on_site = cost.groups(cluster)
        for index in communicator.members:
            loads["gpu", index] = intra
            node = self.folding.node(index)
            if self.folding.folded:
                loads["nic", node], copies["nic", node] = nic, on_node
                loads["wan", 0], copies["wan", 0] = wan, on_site
            else:
                loads["nic", node] = cost.inter / cost.inter_efficiency
                loads["wan", node // cluster.nodes_per_site] = cost.wan
        loads = {link: size for link, size in loads.items() if size}
        capacity = self.network.capacity
        solo = max((size / capacity[link] for link, size in loads.items()), default=0.0)
        return _Transfer(loads, copies, cost.latency, solo)

    # --- running --------------------------------------------------------------------------------

    def trace(self, progress: Callable[[float], None] | None) -> Trace:
        by_stream: dict[str, list[Instance]] = {stream: [] for stream in self.schedule.streams}
        for instance in self.schedule.instances(self.rounds):
            by_stream[instance.op.stream].append(instance)
        for index in range(len(self.classes)):
            for instances in by_stream.values():
                self.env.process(self._stream(index, instances))
        total = self.rounds * len(self.schedule.body) * len(self.classes)
        while progress and self.env.peek() < math.inf:
            progress(len(self.spans) / total)
            with suppress(simpy.core.EmptySchedule):
                for _ in range(_STEPS):
                    self.env.step()
        self.env.run()
        ranks = {c.rank: c.count for c in self.classes}
        return Trace(self.schedule.name, self.cluster.layout, self.rounds, ranks, tuple(self.spans))

    def _stream(self, index: int, instances: Sequence[Instance]) -> Generator[simpy.Event]:
        env, seconds, record = self.env, self.seconds, self.spans.append
        progress, jitter = self.progress[index], self.jitter[index]
        finished, waiting = progress.finished, progress.waiting
        rank, slowdown = self.classes[index].rank, self.classes[index].slowdown
        for number, turn, op, waits in instances:
            for wait in waits:
                if wait not in finished:
                    yield waiting.setdefault(wait, env.event())
            start = env.now
            if isinstance(op.work, Compute):
                work = seconds[id(op.work)] * slowdown
                if jitter:
                    work *= jitter[number]
                if work and self.contend:
                    yield from self._compute(index, work)
                elif work:
                    yield env.timeout(work)
            elif not (self.free and self.communicators[op.work.group, index].alone):
                yield self._join(index, number, op.work)
            record(Span(rank, turn, op.name, op.stream, start, env.now))
            finished.add(number)
            if number in waiting:
                waiting.pop(number).succeed()

    def _compute(self, index: int, work: Seconds) -> Generator[simpy.Event]:
        """Compute that slows down while communication of the same ranks is in flight.

        The NICs of its node may attain less meanwhile.
        """
        progress = self.progress[index]
        self._occupy(self.folding.node(index), 1)
        if not self.cluster.interference:
            yield self.env.timeout(work)
            work = 0.0
        while work > 0:
            if progress.changed is None:
                progress.changed = self.env.event()
            pace = 1.0 / (1.0 + self.cluster.interference) if progress.in_flight else 1.0
            started, done = self.env.now, self.env.timeout(work / pace)
            yield done | progress.changed
            work = 0.0 if done.processed else work - (self.env.now - started) * pace
        self._occupy(self.folding.node(index), -1)

    def _occupy(self, node: int, change: int) -> None:
        """Count the ranks of a node that compute, and let its NICs attain less meanwhile."""
        self.computing[node] += change
        inter = self.cluster.inter

        def resize(_: simpy.Event) -> None:
            self.busy[node] = self.computing[node] > 0
            share = inter.busy_efficiency if self.busy[node] else 1.0
            self.network.resize(("nic", node), inter.payload_bandwidth * share)

        if inter.busy_efficiency < 1 and self.busy[node] != (self.computing[node] > 0):
            self._last(resize)  # ops that follow each other at once do not let go in between

    def _join(self, index: int, number: int, work: Collective) -> simpy.Event:
        """Arrive at a collective; the event fires when it has ended for everybody."""
        communicator = self.communicators[work.group, index]
        here, event = communicator.arrived.setdefault(number, ([], self.env.event()))
        here.append(index)
        if len(here) == len(communicator.members):
            del communicator.arrived[number]
            start: _Start = partial(self._start, communicator, number, work, event)
            if communicator.exclusive:
                heapq.heappush(communicator.ready, (number, start))
                self._next(communicator)
            else:
                start()
        return event

    def _next(self, communicator: _Communicator) -> None:
        """Start the collective issued first among those that are ready at this instant."""

        def launch(_: simpy.Event) -> None:
            if communicator.ready and not communicator.busy:
                communicator.busy = True
                heapq.heappop(communicator.ready)[1]()

        self._last(launch)

    def _last(self, call: Callable[[simpy.Event], None]) -> None:
        """Call it when all else that happens at this instant has happened."""
        last = simpy.Event(self.env)
        last._ok, last._value = True, None  # noqa: SLF001 - the documented way to a custom priority
        assert last.callbacks is not None
        last.callbacks.append(call)
        self.env.schedule(last, priority=_AFTER_ALL_ELSE)

    def _start(
        self, communicator: _Communicator, number: int, work: Collective, event: simpy.Event
    ) -> None:
        key = id(work)
        if key not in communicator.transfers:
            communicator.transfers[key] = self._transfer(communicator, work)
        transfer = communicator.transfers[key]
        loads, latency, solo = transfer.loads, transfer.latency, transfer.solo
        if communicator.jitter:
            factor = communicator.jitter[number]
            loads = {link: size * factor for link, size in loads.items()}
            latency, solo = latency * factor, solo * factor

        def done() -> None:
            event.succeed()
            self._traffic(communicator, -1)
            if communicator.exclusive:
                communicator.busy = False
                self._next(communicator)

        self._traffic(communicator, 1)
        if solo or latency:
            self.network.transfer(loads, latency, solo, done, transfer.copies)
        else:
            done()

    def _traffic(self, communicator: _Communicator, change: int) -> None:
        if not self.cluster.interference:
            return
        for index in communicator.members:
            progress = self.progress[index]
            was = progress.in_flight > 0
            progress.in_flight += change
            if progress.changed is not None and was != (progress.in_flight > 0):
                progress.changed.succeed()
                progress.changed = None
