"""The SimPy interpreter of a schedule on a cluster.

What `single_class` and `lockstep` cannot run has one process per stream and class of ranks;
`communicators` says how they meet.
"""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import simpy
from simpy.core import EmptySchedule

from co2sim import lockstep, single_class, slack, spread
from co2sim.cluster import Cluster
from co2sim.communicators import Meetings
from co2sim.errors import OptionError
from co2sim.folding import leaves_node
from co2sim.instants import INSTANT
from co2sim.lowering import Lowered, Times, lower
from co2sim.noise import QUIET, Noise
from co2sim.schedule import Compute, Instance, Schedule
from co2sim.sharing import shared_works
from co2sim.trace import SpanTable, Trace
from co2sim.units import Seconds

_STEPS = 2000
"""Events between two reports of progress."""


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
    and then with the fraction that is done. Raises OptionError where the spans would be too many,
    or where both the cluster and `noise` say how nodes differ.
    """
    lowered = lower(
        schedule,
        cluster,
        precision=precision,
        rounds=rounds,
        noise=noise,
        fold=fold,
        free=free_communication,
        slowdown=expected_slowdown(schedule, cluster, precision=precision, noise=noise),
    )
    times = run(lowered, progress)
    spans = SpanTable(schedule.places, tuple(c.rank for c in lowered.classes), *times)
    ranks = {c.rank: c.count for c in lowered.classes}
    return Trace(schedule.name, cluster.layout, rounds, ranks, spans)


def expected_slowdown(
    schedule: Schedule, cluster: Cluster, *, precision: str, noise: Noise = QUIET
) -> float:
    """Factor on the compute time of the slowest node that all others wait for, as expected.

    Its speed and its steps spread as the cluster says. A round takes as long as on that node, which
    is exact as long as the spread changes nothing else: nodes that wait for each other in turn
    (blocks of nodes, or sites) count as if all of them met. 1 where no collective leaves its node.
    Raises OptionError where `noise` makes nodes differ, too.
    """
    if not (cluster.node_spread or cluster.step_spread):
        return 1.0
    if noise.uneven:
        raise OptionError(
            f"{cluster.name}: node_spread={cluster.node_spread:g} and"
            f" step_spread={cluster.step_spread:g} say what to expect of uneven nodes, jitter,"
            " straggle and node_speed what single ones do; give one of both, the others as 0"
        )
    if not any(leaves_node(group, cluster.layout) for group in schedule.groups):
        return 1.0
    per_round = 0.0
    if cluster.step_spread:
        between = _slack(schedule, cluster, precision)
        per_round = spread.with_slack(
            spread.mean_of(cluster.step_spread, between.steps),
            cluster.nodes,
            between.slack / between.compute if between.compute else 0.0,
            between.ahead / between.compute if between.compute else 0.0,
        )
    return spread.expected_slowest(math.hypot(cluster.node_spread, per_round), cluster.nodes)


def _slack(schedule: Schedule, cluster: Cluster, precision: str) -> slack.Slack:
    """That of the schedule where all nodes are equal."""
    lowered = lower(
        schedule,
        cluster,
        precision=precision,
        rounds=slack.rounds_needed(schedule),
        noise=QUIET,
        fold=True,
        free=False,
    )
    return slack.find(lowered, run(lowered))


def run(lowered: Lowered, progress: Callable[[float], None] | None = None) -> Times:
    """Starts and ends, [instance, class], by the fastest engine that applies."""
    sharing = shared_works(lowered)
    if single_class.applies(lowered):
        return single_class.run(lowered, sharing, progress)
    if lockstep.applies(lowered, sharing):
        return lockstep.run(lowered, progress)
    return Simulation(lowered).run(progress)


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

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.env = simpy.Environment()
        self.meetings = Meetings(self.env, lowered)
        count = lowered.rounds * len(lowered.schedule.body)
        self.spans = [_Spans([math.nan] * count, [math.nan] * count) for _ in lowered.classes]
        self.ended = 0

    def run(self, progress: Callable[[float], None] | None = None) -> Times:
        """Starts and ends, [instance, class]."""
        schedule, env = self.lowered.schedule, self.env
        by_stream: dict[str, list[Instance]] = {stream: [] for stream in schedule.streams}
        for instance in schedule.instances(self.lowered.rounds):
            by_stream[instance.op.stream].append(instance)
        for index in range(len(self.spans)):
            for instances in by_stream.values():
                env.process(self._stream(index, instances))
        if progress:
            self._step(progress)
        env.run()
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
        lowered, env, spans = self.lowered, self.env, self.spans[index]
        starts, ends, waiting = spans.starts, spans.ends, spans.waiting
        slowdown, seconds = lowered.classes[index].slowdown, lowered.seconds
        factors = lowered.class_factors[index].tolist() if lowered.class_factors else None
        size, beside = len(lowered.schedule.body), lowered.contend or lowered.slows
        for number, _, op, waits in instances:
            for wait in waits:
                if math.isnan(ends[wait]):
                    yield waiting.setdefault(wait, env.event())
            starts[number] = env.now
            if isinstance(op.work, Compute):
                work = seconds[number % size] * slowdown
                if factors:
                    work *= factors[number]
                if work and beside:
                    first = lowered.first is not None and op.stream in lowered.first
                    yield from self._compute(index, work, first=first)
                elif work:
                    yield env.timeout(work)
            elif event := self.meetings.join(index, number, op.work.group):
                yield event
            ends[number] = env.now
            self.ended += 1
            if number in waiting:
                waiting.pop(number).succeed()

    def _compute(self, index: int, work: Seconds, *, first: bool) -> Generator[simpy.Event]:
        """Compute that slows down while communication of the same ranks is in flight.

        Computes of other streams may slow it down, too, or let it stand still if they go `first`.
        The NICs of its node may attain less meanwhile.
        """
        meetings, cluster = self.meetings, self.lowered.cluster
        processor = meetings.processors[index]
        meetings.occupy(index, 1, first=first)
        if not self.lowered.slows:
            yield self.env.timeout(work)
            work = 0.0
        calls = meetings.calls[index]
        known = calls.before(self.env.now)
        while work > 0:
            if work > INSTANT:  # what ends as a collective begins has ended
                work += (calls.count - known) * cluster.call_interference
            known = calls.count
            pace = processor.pace(first=first)
            started, changed = self.env.now, meetings.change(index)
            if not pace and work > INSTANT:
                yield changed
                continue
            done = self.env.timeout(work / (pace or 1.0))
            yield done | changed
            work = 0.0 if done.processed else work - (self.env.now - started) * pace
        meetings.occupy(index, -1, first=first)
