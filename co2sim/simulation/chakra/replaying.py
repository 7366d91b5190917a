"""What a trace takes on a cluster, by simulation."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from co2sim.common.errors import OptionError
from co2sim.common.progress import Done
from co2sim.common.units import Bytes, Seconds, counted
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import Layout, Schedule
from co2sim.simulation import metrics
from co2sim.simulation.chakra.reading import Imported
from co2sim.simulation.collective_cost import traffic
from co2sim.simulation.compute_cost import peak_flops
from co2sim.simulation.metrics import Window
from co2sim.simulation.noise import RunOptions
from co2sim.simulation.steady_state import Simulator
from co2sim.simulation.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Figures of a trace on a cluster; times in seconds, those of communication per round."""

    schedule: str
    cluster: str
    gpus: int
    nodes: int
    precision: str
    steps_per_round: int
    round_time_s: Seconds
    step_time_s: Seconds
    comm_busy_s: Seconds
    exposed_comm_s: Seconds
    wire_bytes_per_gpu_per_step: Bytes
    nic_bytes_per_node_per_step: Bytes
    breakdown_s: dict[str, Seconds]
    steady: bool
    rounds_simulated: int

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Replayed:
    """What is simulated."""

    schedule: Schedule
    cluster: Cluster
    precision: str


def replay(
    trace: Imported, cluster: Cluster, precision: str | None = None, done: Done | None = None
) -> Replay:
    """Simulate the schedule of a trace on as many GPUs of a cluster as it has ranks.

    A trace that co2sim wrote is repeated until its rounds do, as `co2sim run` does; one of others
    runs once, from its start to the end of its last node. `precision` defaults to what the GPU
    trains in. Raises OptionError where the cluster does not fit: its nodes, if it is a trace of
    co2sim, must be as large as those of the trace.
    """
    cluster = cluster.resized(trace.ranks)
    if trace.layout and trace.layout != cluster.layout:
        raise OptionError(
            f"the trace is of {_words(trace.layout)}, and {trace.ranks} GPUs of {cluster.name} are"
            f" {_words(cluster.layout)}; they must be the same, as ranks meet by their nodes"
        )
    precision = precision or cluster.gpu.preferred_precision
    peak_flops(cluster.gpu, precision)
    schedule = trace.schedule
    simulator = Simulator(RunOptions(), _Replayed(schedule, cluster, precision), done)
    if trace.layout:
        found, rounds, steady = simulator.until_steady()
    else:
        found, rounds, steady = simulator.rounds(1), 1, True
    free = simulator.rounds(found.rounds, free=True)
    during, without = (_window(trace, one, rounds) for one in (found, free))
    sent = traffic(schedule, cluster)
    return Replay(
        schedule=schedule.name,
        cluster=cluster.name,
        gpus=trace.ranks,
        nodes=cluster.nodes,
        precision=precision,
        steps_per_round=schedule.steps,
        round_time_s=during.round_time,
        step_time_s=during.round_time / schedule.steps,
        comm_busy_s=metrics.communication(found, schedule, during).busy,
        exposed_comm_s=max(0.0, during.round_time - without.round_time),
        wire_bytes_per_gpu_per_step=sent.gpu / schedule.steps,
        nic_bytes_per_node_per_step=sent.nic / schedule.steps,
        breakdown_s=metrics.breakdown(found, schedule),
        steady=steady,
        rounds_simulated=found.rounds,
    )


def _window(trace: Imported, found: Trace, rounds: int) -> Window:
    """The rounds that are measured; of a trace of others, all of it."""
    if trace.layout:
        return metrics.window(found, trace.schedule, rounds)
    return Window(0.0, float(np.nanmax(found.grid(trace.schedule).ends)), 1)


def _words(layout: Layout) -> str:
    sites = f" at {counted(layout.sites, 'site')}" if layout.sites > 1 else ""
    return f"{counted(layout.nodes, 'node')} of {counted(layout.gpus_per_node, 'GPU')}{sites}"
