"""Simulate a schedule on a cluster: the only place that chooses between the three engines."""

import math
from collections.abc import Callable

from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import Schedule
from co2sim.simulation import array_engine, event_engine, stragglers
from co2sim.simulation.host_effects import HostSimulation
from co2sim.simulation.lowering import Lowered, Times, leaves_node, lower, shared_works
from co2sim.simulation.noise import QUIET, Noise
from co2sim.simulation.reference_engine import Simulation
from co2sim.simulation.trace import SpanTable, Trace


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
        per_round = stragglers.with_slack(
            stragglers.mean_of(cluster.step_spread, between.steps),
            cluster.nodes,
            between.slack / between.compute if between.compute else 0.0,
            between.ahead / between.compute if between.compute else 0.0,
        )
    return stragglers.expected_slowest(math.hypot(cluster.node_spread, per_round), cluster.nodes)


def _slack(schedule: Schedule, cluster: Cluster, precision: str) -> stragglers.Slack:
    """That of the schedule where all nodes are equal."""
    lowered = lower(
        schedule,
        cluster,
        precision=precision,
        rounds=stragglers.rounds_needed(schedule),
        noise=QUIET,
        fold=True,
        free=False,
    )
    return stragglers.find(lowered, run(lowered))


def run(lowered: Lowered, progress: Callable[[float], None] | None = None) -> Times:
    """Starts and ends, [instance, class], by the fastest engine that applies."""
    if lowered.cluster.host:
        return HostSimulation(lowered).run(progress)
    sharing = shared_works(lowered)
    if event_engine.applies(lowered):
        return event_engine.run(lowered, sharing, progress)
    if array_engine.applies(lowered, sharing):
        return array_engine.run(lowered, progress)
    return Simulation(lowered).run(progress)
