"""The SimPy interpreter of a schedule on a cluster.

What `lockstep` cannot run has one process per stream and class of ranks; `communicators` says how
they meet.
"""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import simpy
from simpy.core import EmptySchedule

from co2sim import lockstep
from co2sim.cluster import Cluster
from co2sim.communicators import Meetings
from co2sim.lowering import Lowered, Times, lower
from co2sim.noise import QUIET, Noise
from co2sim.schedule import Compute, Instance, Schedule
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
    and then with the fraction that is done. Raises OptionError where the spans would be too many.
    """
    lowered = lower(
        schedule,
        cluster,
        precision=precision,
        rounds=rounds,
        noise=noise,
        fold=fold,
        free=free_communication,
    )
    try:
        times = lockstep.run(lowered, progress)
    except lockstep.Overtaken:
        times = _Simulation(lowered).run(progress)
    ops = tuple((op.name, op.stream) for op in schedule.body)
    spans = SpanTable(ops, tuple(c.rank for c in lowered.classes), *times)
    ranks = {c.rank: c.count for c in lowered.classes}
    return Trace(schedule.name, cluster.layout, rounds, ranks, spans)


@dataclass(slots=True)
class _Spans:
    """When a class of ranks starts and ends every instance, and who waits for what has not ended.

    Ends are NaN until then.
    """

    starts: list[Seconds]
    ends: list[Seconds]
    waiting: dict[int, simpy.Event] = field(default_factory=dict)


class _Simulation:
    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.env = simpy.Environment()
        self.meetings = Meetings(self.env, lowered)
        count = lowered.rounds * len(lowered.schedule.body)
        self.spans = [_Spans([math.nan] * count, [math.nan] * count) for _ in lowered.classes]
        self.ended = 0

    def run(self, progress: Callable[[float], None] | None) -> Times:
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
        size = len(lowered.schedule.body)
        for number, _, op, waits in instances:
            for wait in waits:
                if math.isnan(ends[wait]):
                    yield waiting.setdefault(wait, env.event())
            starts[number] = env.now
            if isinstance(op.work, Compute):
                work = seconds[number % size] * slowdown
                if factors:
                    work *= factors[number]
                if work and lowered.contend:
                    yield from self._compute(index, work)
                elif work:
                    yield env.timeout(work)
            elif event := self.meetings.join(index, number, op.work.group):
                yield event
            ends[number] = env.now
            self.ended += 1
            if number in waiting:
                waiting.pop(number).succeed()

    def _compute(self, index: int, work: Seconds) -> Generator[simpy.Event]:
        """Compute that slows down while communication of the same ranks is in flight.

        The NICs of its node may attain less meanwhile.
        """
        meetings, interference = self.meetings, self.lowered.cluster.interference
        meetings.occupy(index, 1)
        if not interference:
            yield self.env.timeout(work)
            work = 0.0
        while work > 0:
            pace = 1.0 / (1.0 + interference) if meetings.in_flight[index] else 1.0
            started, done = self.env.now, self.env.timeout(work / pace)
            yield done | meetings.change(index)
            work = 0.0 if done.processed else work - (self.env.now - started) * pace
        meetings.occupy(index, -1)
