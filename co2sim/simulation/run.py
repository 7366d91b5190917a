"""Simulate a schedule on a cluster: by which engine, how slow the slowest node, how many rounds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from co2sim.common.errors import ResourceError
from co2sim.common.progress import Done
from co2sim.common.resources import require_memory
from co2sim.common.units import Seconds
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import Collective, Schedule
from co2sim.simulation import event_engine, metrics
from co2sim.simulation.lowering import (
    LOCKSTEP_SPAN_BYTES,
    MAX_SPANS,
    SPAN_BYTES,
    LoweredSchedule,
    Times,
    class_count,
    lower,
    shared_works,
    span_count,
    without_communication,
)
from co2sim.simulation.noise import QUIET, Noise, RunOptions
from co2sim.simulation.one_machine import HostSimulation
from co2sim.simulation.reference_engine import Simulation
from co2sim.simulation.token_bucket import shapers
from co2sim.simulation.trace import SpanTable, Trace

# --- the engine -----------------------------------------------------------------------------------


def execute(
    schedule: Schedule,
    cluster: Cluster,
    *,
    precision: str,
    rounds: int,
    noise: Noise = QUIET,
    fold: bool = True,
    free_communication: bool = False,
    slowdown: float = 1.0,
    progress: Callable[[float], None] | None = None,
) -> Trace:
    """Simulate `rounds` rounds of `schedule` on `cluster`.

    Equal ranks are folded into one that stands for all, unless `fold` is false; nodes of different
    speed stay apart, and jitter unfolds every rank. With `free_communication` collectives take no
    time once all members are there: the baseline of exposed communication. All compute takes
    `slowdown` times as long, such as `expected_slowdown` gives. `progress` is called now and
    then with the fraction that is done. Raises OptionError where the spans would be too many.
    """
    lowered = lower(
        schedule,
        cluster,
        precision=precision,
        rounds=rounds,
        noise=noise,
        fold=fold,
        slowdown=slowdown,
    )
    return _traced(without_communication(lowered) if free_communication else lowered, progress)


def _traced(lowered: LoweredSchedule, progress: Callable[[float], None] | None) -> Trace:
    schedule = lowered.schedule
    ranks = {rank_class.rank: rank_class.count for rank_class in lowered.classes}
    spans = SpanTable(schedule.places, tuple(ranks), *run(lowered, progress))
    return Trace(schedule.name, lowered.cluster.layout, lowered.rounds, ranks, spans)


def run(lowered: LoweredSchedule, progress: Callable[[float], None] | None = None) -> Times:
    """Starts and ends, [instance, class], by the fastest engine that applies."""
    if (host := lowered.cluster.host) and host.depends_on_others:
        return HostSimulation(lowered).run(progress)
    sharing = shared_works(lowered)
    if event_engine.applies(lowered, sharing):
        return event_engine.run(lowered, sharing, progress)
    return Simulation(lowered).run(progress)


# --- the expected slowest node --------------------------------------------------------------------
#
# How stragglers slow a round down, and the slack of collectives between nodes. It is the total
# float of the critical path method (Kelley and Walker 1959): by how much a collective could end
# later without delaying the stream that computes.

_STEP = 0.02
"""Of the quadrature. The integrands are smooth and vanish at both ends: halving it changes nothing
beyond the thirteenth digit."""


@cache
def _normal() -> tuple[NDArray[np.float64], ...]:
    """Points from -10 to 13, and there the logarithms of density and distribution of a normal."""
    points = np.arange(-10.0, 13.0, _STEP)
    tails = np.array([math.erfc(abs(z) / math.sqrt(2)) / 2 for z in points])
    density = -points * points / 2 - math.log(math.sqrt(2 * math.pi))
    return points, density, np.where(points > 0, np.log1p(-tails), np.log(tails))


@cache
def expected_slowest(sigma: float, count: int) -> float:
    """Mean of the largest of `count` independent lognormal factors of mean 1.

    The integral of x over the density n phi(z) Phi(z)^(n-1) of the largest of n normals, with
    x = exp(sigma z - sigma^2 / 2). `sigma` is 0 to 1, `count` any number.
    Source: David and Nagaraja, Order Statistics, 3rd ed., 2003, eq. 3.1.1.
    """
    if count == 1 or not sigma:
        return 1.0
    points, density, below = _normal()
    weights = np.exp(density + (count - 1) * below + math.log(count) + sigma * points)
    return float(weights.sum()) * _STEP * math.exp(-sigma * sigma / 2)


@cache
def expected_largest(count: int) -> float:
    """Mean of the largest of `count` independent standard normals."""
    points, density, below = _normal()
    weights = np.exp(density + (count - 1) * below + math.log(count))
    return float((points * weights).sum()) * _STEP


def sigma_of_mean(sigma: float, steps: float) -> float:
    """Sigma of the mean of `steps` independent lognormal factors, taken as lognormal itself.

    Mean and variance are exact: the variance is that of one, divided by `steps`.
    Source: Fenton, The sum of log-normal probability distributions, IRE Trans. CS-8, 1960.
    """
    return math.sqrt(math.log1p(math.expm1(sigma * sigma) / steps))


def residual_sigma(sigma: float, count: int, slack: float, ahead: float) -> float:
    """Sigma that is left of the spread of a round where an average may come late.

    A node waits only once it is `slack` rounds ahead of the slowest, and computes `ahead` rounds
    between the launch and the use of an average; both are 0 where it waits at once. In between,
    slow and fast rounds of a node even out: times of nodes diffuse, and the slowest holds back
    those that are `slack` ahead of it. Their distances from that barrier are exponential with rate
    2 v / sigma^2 if the slowest falls back by v a round, and the largest of n such distances,
    harmonic(n) / rate, is the slack. So v = sigma^2 harmonic(n) / (2 slack), which is joined to
    v = sigma x (expected largest of n) without slack. Even without slack a delay reaches the others
    `ahead` rounds late, and meets their own ones there: by simulation it then costs as much as the
    least divisor below says, within 5 % (tests/co2sim/simulation/test_expected_slowdown.py).
    """
    if count == 1 or not sigma:
        return sigma
    if math.isinf(slack):
        return 0.0
    harmonic = math.log(count) + 0.5772156649015329 + 1 / (2 * count)
    diffusing = 1 + 2 * slack * expected_largest(count) / (sigma * harmonic)
    return sigma / max(diffusing, 1 + ahead * (1 - 1 / math.sqrt(count - 1)))


@dataclass(frozen=True, slots=True)
class Slack:
    """Of a schedule without noise: what lies between two meetings of all nodes.

    `steps` is how many optimizer steps a node takes in between, `compute` the time of these.
    `slack` is the least float of a collective between nodes, `compute_before_use` the least time
    that a node computes between the launch of one and its use.
    """

    steps: float
    compute: Seconds
    slack: Seconds
    compute_before_use: Seconds


def rounds_needed(schedule: Schedule) -> int:
    """Rounds after which the float of one in the midst of a training is known."""
    return 2 * schedule.lag + 2


def critical_path_slack(lowered: LoweredSchedule, times: Times) -> Slack:
    """The slack of a run of `rounds_needed` rounds in which all nodes are equal."""
    schedule, seconds = lowered.schedule, lowered.seconds
    size, lag = len(schedule.body), schedule.lag
    busy = dict.fromkeys(schedule.streams, 0.0)
    for op, length in zip(schedule.body, seconds, strict=True):
        busy[op.stream] += length
    main = max(busy, key=lambda stream: busy[stream])
    starts, ends = times[0][:, 0].tolist(), times[1][:, 0].tolist()
    before = _predecessors(lowered)
    floats, uses = [math.inf] * len(ends), [math.inf] * len(ends)
    for instance in range(len(ends) - 1, -1, -1):
        computes = schedule.body[instance % size].stream == main
        late = 0.0 if computes else floats[instance]
        use = starts[instance] if computes else uses[instance]
        for earlier in before[instance]:
            floats[earlier] = min(floats[earlier], starts[instance] - ends[earlier] + late)
            uses[earlier] = min(uses[earlier], use)
    first = lag * size
    far = [
        instance
        for instance in range(first, first + size)
        if _leaves(lowered, instance % size) and schedule.body[instance % size].stream != main
    ]
    meetings = _meetings(lowered, before, main, first)
    steps = max(1.0, schedule.steps / meetings) if meetings else float(schedule.steps)
    return Slack(
        steps=steps,
        compute=busy[main] * steps / schedule.steps,
        slack=min((floats[instance] for instance in far), default=0.0),
        compute_before_use=min(
            (_between(lowered, starts, ends, main, starts[n], uses[n]) for n in far), default=0.0
        ),
    )


def _leaves(lowered: LoweredSchedule, position: int) -> bool:
    work = lowered.schedule.body[position].work
    return isinstance(work, Collective) and work.group.leaves_node(lowered.cluster.layout)


def _predecessors(lowered: LoweredSchedule) -> list[list[int]]:
    """What every instance waits for: in `after`, and on its stream."""
    predecessors: list[list[int]] = []
    last: dict[str, int] = {}
    for instance, _, op, waits in lowered.schedule.instances(lowered.rounds):
        predecessors.append([*waits, *([last[op.stream]] if op.stream in last else [])])
        last[op.stream] = instance
    return predecessors


def _meetings(
    lowered: LoweredSchedule, before: Sequence[Sequence[int]], main: str, first: int
) -> int:
    """Ops of a round that compute once a collective between nodes, or what follows, has ended."""
    body, size = lowered.schedule.body, len(lowered.schedule.body)
    behind: set[int] = set()
    met = 0
    for instance in range(first + (1 + lowered.schedule.lag) * size):
        position = instance % size
        after = any(earlier in behind for earlier in before[instance])
        if body[position].stream == main:
            met += after and instance >= first + lowered.schedule.lag * size
        elif after or _leaves(lowered, position):
            behind.add(instance)
    return met


def _between(
    lowered: LoweredSchedule,
    starts: Sequence[Seconds],
    ends: Sequence[Seconds],
    main: str,
    since: Seconds,
    until: Seconds,
) -> Seconds:
    """Time that the main stream computes between two instants."""
    size = len(lowered.schedule.body)
    return sum(
        max(0.0, min(end, until) - max(start, since))
        for instance, (start, end) in enumerate(zip(starts, ends, strict=True))
        if lowered.schedule.body[instance % size].stream == main
    )


def expected_slowdown(
    schedule: Schedule, cluster: Cluster, *, precision: str, noise: Noise = QUIET
) -> float:
    """Factor on the compute time of the slowest node that all others wait for, as expected.

    Its speed and its steps spread as the cluster says. A round takes as long as on that node, which
    is exact as long as the spread changes nothing else: nodes that wait for each other in turn
    (blocks of nodes, or sites) count as if all of them met. 1 where no collective leaves its node,
    and where `noise` says what single nodes do: that takes the place of what is expected of them.
    """
    if noise.uneven or not (cluster.node_spread or cluster.step_spread):
        return 1.0
    if not any(group.leaves_node(cluster.layout) for group in schedule.groups):
        return 1.0
    per_round = 0.0
    if cluster.step_spread:
        between = _slack(schedule, cluster, precision)
        per_round = residual_sigma(
            sigma_of_mean(cluster.step_spread, between.steps),
            cluster.nodes,
            between.slack / between.compute if between.compute else 0.0,
            between.compute_before_use / between.compute if between.compute else 0.0,
        )
    return expected_slowest(math.hypot(cluster.node_spread, per_round), cluster.nodes)


def _slack(schedule: Schedule, cluster: Cluster, precision: str) -> Slack:
    """That of the schedule where all nodes are equal."""
    lowered = lower(
        schedule,
        cluster,
        precision=precision,
        rounds=rounds_needed(schedule),
        noise=QUIET,
        fold=True,
    )
    return critical_path_slack(lowered, run(lowered))


# --- as many rounds as it takes: until they repeat, or as many as are to be averaged --------------

_MAX_ROUNDS = 64
"""Where the search for a steady state ends."""
_ROUNDS_OF_JITTER = 10
"""Averaged where nothing repeats, unless the user says how many."""


class SimulationInput(Protocol):
    """What is simulated: a schedule on a cluster, such as `Stage`."""

    @property
    def schedule(self) -> Schedule: ...  # noqa: D102
    @property
    def cluster(self) -> Cluster: ...  # noqa: D102
    @property
    def precision(self) -> str: ...  # noqa: D102


@dataclass
class Simulator:
    """Simulates a case; `done` hears of the progress."""

    options: RunOptions
    prepared: SimulationInput
    done: Done | None
    _lowered: LoweredSchedule | None = field(default=None, init=False)
    """That of the last rounds."""

    @cached_property
    def slowdown(self) -> float:
        """Of the slowest node that all others wait for. Raises OptionError, see there."""
        what = self.prepared
        return expected_slowdown(
            what.schedule, what.cluster, precision=what.precision, noise=self.options.noise
        )

    def until_steady(self) -> tuple[Trace, int, bool]:
        """A trace, how many of its last rounds to measure, and whether they are a steady state.

        What is under way behind the last round may be faster than it ever is in the midst of a
        training, as no collectives of further rounds share its links: then the rounds before count.
        """
        options, prepared = self.options, self.prepared
        warm_up = max(prepared.schedule.lag, 1)
        if options.noise.jitter:
            measured = options.rounds or _ROUNDS_OF_JITTER
            return self.rounds(warm_up + measured), measured, False
        measured = options.rounds or 1
        if _repeats(options, prepared):
            return self.rounds(measured), measured, True
        behind = warm_up
        while True:
            trace = self.rounds(warm_up + measured)
            for candidate in (trace, trace.first(trace.rounds - behind)):
                if metrics.is_steady(candidate, prepared.schedule, measured):
                    return candidate, measured, True
            if warm_up >= _MAX_ROUNDS or not _fits(options, prepared, 2 * warm_up + measured):
                return trace, max(measured, trace.rounds // 2), False
            warm_up *= 2

    def rounds(self, rounds: int, *, free: bool = False) -> Trace:
        """Rounds in the midst of a training: where computing slows communication, others follow.

        Else what is under way behind the last step would be faster than it ever is.
        """
        options, prepared, done = self.options, self.prepared, self.done
        more = _trailing_rounds(options, prepared)
        if not free:  # which comes second, and is counted with the first
            _check_memory(options, prepared, rounds)
        lowered = self._lowered
        if lowered is None or lowered.rounds != rounds + more:
            lowered = self._lowered = lower(
                prepared.schedule,
                prepared.cluster,
                precision=prepared.precision,
                rounds=rounds + more,
                noise=options.noise,
                fold=options.fold,
                slowdown=self.slowdown,
            )
        trace = _traced(
            without_communication(lowered) if free else lowered,
            (lambda share: done(round(share * rounds), rounds)) if done else None,
        )
        return trace.first(rounds) if more else trace


def _repeats(options: RunOptions, prepared: SimulationInput) -> bool:
    """Whether all rounds are like the first: nothing of a round is left when the next one begins.

    All ranks end it at the same time, and no link has bytes saved that it may send at once.
    """
    schedule, cluster, noise = prepared.schedule, prepared.cluster, options.noise
    if noise.uneven or (cluster.host and any(shapers(cluster))) or not schedule.is_sequential:
        return False
    slowdowns = noise.node_slowdowns(cluster.layout)
    return class_count(cluster.layout, slowdowns, schedule, allowed=True) == 1


def _trailing_rounds(options: RunOptions, prepared: SimulationInput) -> int:
    """Rounds that are simulated behind those asked for; see `Simulator.rounds`."""
    if prepared.cluster.inter.busy_efficiency == 1 or _repeats(options, prepared):
        return 0
    return prepared.schedule.lag


def _fits(options: RunOptions, prepared: SimulationInput, rounds: int) -> bool:
    """Whether a number of rounds can be simulated here."""
    try:
        return _check_memory(options, prepared, rounds) <= MAX_SPANS
    except ResourceError:
        return False


def _check_memory(options: RunOptions, prepared: SimulationInput, rounds: int) -> int:
    """The spans of a number of rounds. Raises ResourceError if they need too much memory."""
    schedule, cluster, noise = prepared.schedule, prepared.cluster, options.noise
    rounds, ops = rounds + _trailing_rounds(options, prepared), len(schedule.body)
    spans = span_count(schedule, cluster, rounds=rounds, noise=noise, fold=options.fold)
    ranks, layout = spans // (rounds * ops), cluster.layout
    meet = all(len(group.members(0, layout)) == layout.world_size for group in schedule.groups)
    hosted = cluster.host is not None and cluster.host.depends_on_others
    in_arrays = ranks > 1 and not hosted and (meet or not cluster.interference)
    measured = options.rounds or (_ROUNDS_OF_JITTER if noise.jitter else 1)
    advice = {
        "fewer GPUs": cluster.layout.world_size > 1,
        f"rounds below {measured}": measured > 1,
        "no jitter": noise.jitter,
        "folded ranks": not options.fold,
    }
    require_memory(
        (LOCKSTEP_SPAN_BYTES if in_arrays else SPAN_BYTES) * spans,
        f"ops of a round: {ops:,}, rounds with the warm-up: {rounds:,}, simulated ranks: {ranks:,}",
        f"; take {' or '.join(words for words, helps in advice.items() if helps)}",
    )
    return spans
