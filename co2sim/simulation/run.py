"""Simulate a schedule on a cluster: the only place that chooses the engine."""

from collections.abc import Callable

from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import Schedule
from co2sim.simulation import event_engine
from co2sim.simulation.host_effects import HostSimulation
from co2sim.simulation.lowering import LoweredSchedule, Times, lower, shared_works
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
        free=free_communication,
        slowdown=slowdown,
    )
    times = run(lowered, progress)
    spans = SpanTable(schedule.places, tuple(c.rank for c in lowered.classes), *times)
    ranks = {c.rank: c.count for c in lowered.classes}
    return Trace(schedule.name, cluster.layout, rounds, ranks, spans)


def run(lowered: LoweredSchedule, progress: Callable[[float], None] | None = None) -> Times:
    """Starts and ends, [instance, class], by the fastest engine that applies."""
    if (host := lowered.cluster.host) and host.depends_on_others:
        return HostSimulation(lowered).run(progress)
    sharing = shared_works(lowered)
    if event_engine.applies(lowered, sharing):
        return event_engine.run(lowered, sharing, progress)
    return Simulation(lowered).run(progress)
