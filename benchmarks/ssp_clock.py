"""When workers of stale-synchronous parallel training (SSP) read, compute and push: by SimPy.

The parameters lie in equal shards on servers, each with a network card of its own. In a clock a
worker reads all shards, computes, and pushes what it has learned to all servers; it goes on while
that travels, and knows what it has pushed itself. It may begin its clock c (counted from 0) once
every worker's clocks before c - s are in: s is the bound of staleness, and with s = 0 all wait for
each other in every clock.
Source: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server,
NIPS 2013, section 2.

It is no schedule of collectives: whom a worker waits for is decided by how fast the others were,
and a server answers one worker at a time.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

import simpy

from co2sim.units import Seconds

Compute = Callable[[int, int], Seconds]
"""Seconds that a worker computes in a clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """A network of workers and servers: one card each, bytes per second and seconds of latency."""

    workers: int
    servers: int
    parameter_bytes: float
    bandwidth: float = math.inf
    latency: Seconds = 0.0

    @property
    def message(self) -> Seconds:
        """How long a shard occupies the cards of a worker and of a server."""
        return self.parameter_bytes / self.servers / self.bandwidth


@dataclass(frozen=True, slots=True)
class Moment:
    """What happens to a worker in a clock: it has `read` all shards, or its push has `arrived`."""

    time: Seconds
    what: Literal["read", "arrived"]
    worker: int
    clock: int


@dataclass(slots=True)
class Course:
    """How a training went: all moments in their order, and the seconds that each worker waited."""

    moments: list[Moment] = field(default_factory=list)
    waited: list[Seconds] = field(default_factory=list)

    @property
    def seconds(self) -> Seconds:
        """Until the last push has arrived."""
        return self.moments[-1].time

    def staleness(self) -> list[int]:
        """For each read, how many clocks the slowest worker's pushes lie behind it."""
        arrived = [0] * len(self.waited)
        found = []
        for one in self.moments:
            if one.what == "arrived":
                arrived[one.worker] += 1
            else:
                found.append(one.clock - min(arrived))
        return found


def ssp(place: Servers, compute: Compute, clocks: int, bound: int) -> Course:
    """Every worker's `clocks`, at most `bound` ahead of the slowest."""
    world = simpy.Environment()
    cards = {
        name: [simpy.Resource(world) for _ in range(count)]
        for name, count in (
            ("worker in", place.workers),
            ("worker out", place.workers),
            ("server in", place.servers),
            ("server out", place.servers),
        )
    }
    arrived, course = [0] * place.workers, Course(waited=[0.0] * place.workers)
    turn = [world.event()]

    def note(what: Literal["read", "arrived"], worker: int, clock: int) -> None:
        course.moments.append(Moment(world.now, what, worker, clock))

    def send(own: simpy.Resource, other: simpy.Resource) -> Generator[Any, Any, None]:
        with own.request() as first:
            yield first
            with other.request() as second:
                yield second
                yield world.timeout(place.message)
        yield world.timeout(place.latency)

    def exchange(worker: int, way: str) -> simpy.AllOf:
        own = cards[f"worker {way}"][worker]
        theirs = cards["server out" if way == "in" else "server in"]
        start = worker * place.servers // place.workers  # else all would begin at one server
        order = [*theirs[start:], *theirs[:start]]
        return world.all_of([world.process(send(own, one)) for one in order])

    def work(worker: int) -> Generator[Any, Any, None]:
        for clock in range(clocks):
            began = world.now
            while min(arrived) < clock - bound:
                yield turn[0]
            course.waited[worker] += world.now - began
            yield exchange(worker, "in")
            note("read", worker, clock)
            yield world.timeout(compute(worker, clock))
            world.process(push(worker, clock))

    def push(worker: int, clock: int) -> Generator[Any, Any, None]:
        yield exchange(worker, "out")
        arrived[worker] = clock + 1
        note("arrived", worker, clock)
        done, turn[0] = turn[0], world.event()
        done.succeed()

    for worker in range(place.workers):
        world.process(work(worker))
    world.run()
    return course


def rounds(
    place: Servers, compute: Compute, clocks: int, tau: int, delay: int = 0
) -> tuple[list[Seconds], list[Seconds]]:
    """Workers that average after every `tau` steps by a ring: when all have taken each step.

    The average of a round travels once the last worker is there, and is used `delay` steps later
    (0: all wait for it at once). Also gives the seconds that each worker waited. The servers of
    `place` do not take part.
    """
    count = place.workers
    travels = 2 * (count - 1) / count * place.parameter_bytes / place.bandwidth
    travels += 2 * (count - 1) * place.latency
    now, waited = [0.0] * count, [0.0] * count
    done: list[Seconds] = []
    arrival: dict[int, Seconds] = {}
    for clock in range(clocks):
        now = [time + compute(worker, clock) for worker, time in enumerate(now)]
        if (clock + 1) % tau == 0:
            arrival[clock + 1 + delay] = max(now) + travels
        ready = arrival.get(clock + 1, 0.0)
        waited = [sofar + max(0.0, ready - time) for sofar, time in zip(waited, now, strict=True)]
        now = [max(time, ready) for time in now]
        done.append(max(now))
    return done, waited
