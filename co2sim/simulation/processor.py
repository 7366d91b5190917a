"""How fast a rank computes, beside what else it does at the same time."""

import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from co2sim.common.units import Seconds
from co2sim.hardware.cluster import FULLY_IDLE, Cluster
from co2sim.schedule.schedule import Collective, Schedule


@dataclass(eq=False, slots=True)
class Processor:
    """That of one rank: what is under way there, and at which pace single computes go on.

    `interference` is that of the cluster. Where streams share it (`shared`), computes of those
    that also communicate go first, as threads that serve a network do. Others stand still
    meanwhile, and equals get equal parts.
    """

    interference: float
    shared: bool
    in_flight: int = 0
    _first: int = 0
    _others: int = 0

    def occupy(self, change: int, *, first: bool) -> None:
        """Count a compute that begins (1) or ends (-1)."""
        if first:
            self._first += change
        else:
            self._others += change

    def pace(self, *, first: bool) -> float:
        """Seconds of work that a compute gets done in a second; 0 where it stands still."""
        pace = 1.0 / (1.0 + self.interference) if self.in_flight else 1.0
        if not self.shared:
            return pace
        if not first and self._first:
            return 0.0
        return pace / (self._first if first else self._others)


def first_streams(schedule: Schedule, cluster: Cluster) -> AbstractSet[str] | None:
    """The streams that go first where several that compute share a processor; None elsewhere."""
    if cluster.gpu.streams == "apart":
        return None
    kinds = list(zip(schedule.works, schedule.work_streams, strict=True))
    communicate = {stream for work, stream in kinds if isinstance(work, Collective)}
    compute = {stream for work, stream in kinds if not isinstance(work, Collective)}
    return communicate if len(compute) > 1 else None


INSTANT: Seconds = 1e-9
"""What is no further apart happens at once: what begins or ends is off by so much at most."""


@dataclass(eq=False, slots=True)
class Begun:
    """The collectives of a rank, each of which takes some time from the compute beside it.

    One that begins as a compute begins is beside it, whichever is heard of first.
    """

    count: int = 0
    _now: int = 0
    _last: Seconds = -1.0

    def begin(self, now: Seconds) -> None:
        """One begins. Call it in the order of time."""
        self._now = self._now + 1 if now - self._last <= INSTANT else 1
        self.count, self._last = self.count + 1, now

    def before(self, now: Seconds) -> int:
        """How many have begun before this instant, which is not before that of the last one."""
        return self.count - (self._now if now - self._last <= INSTANT else 0)


class Hosts:
    """The hosts that all nodes share: whether they are awake.

    `wake_up` is what a collective takes longer after a pause of `fully_idle`; after a shorter one,
    in proportion less. What starts while they wake up waits for the same moment.
    """

    def __init__(self, wake_up: Seconds, fully_idle: Seconds = FULLY_IDLE) -> None:
        """Idle for as long as can be."""
        self._wake_up, self._fully_idle = wake_up, fully_idle
        self._in_flight = 0
        self._idle_since, self._awake = -math.inf, -math.inf

    def begin(self, now: Seconds) -> Seconds:
        """A collective starts: how long it waits until hosts are awake."""
        if not self._in_flight:
            idle = min(1.0, (now - self._idle_since) / self._fully_idle)
            self._awake = now + idle * self._wake_up
        self._in_flight += 1
        return max(0.0, self._awake - now)

    def end(self, now: Seconds) -> None:
        """A collective has ended."""
        self._in_flight -= 1
        self._idle_since = now
