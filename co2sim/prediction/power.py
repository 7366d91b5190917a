"""The power of a cluster that trains, from the times of a simulation.

A GPU draws `COMPUTING` of its TDP while it computes, and its idle power while it waits for
collectives that nothing hides, or for slower ranks:

    P = c * COMPUTING * tdp + (1 - c) * idle_power,   c = 1 - (exposed + straggler delay) / round

All of the cluster: pue * (GPUs * P + nodes * node_power). A part of a node pays for the whole rest
of it. What switches beyond the nodes and storage draw is not counted.

That power is high while GPUs compute and near idle while they communicate: Choukse et al., Power
Stabilization for AI Training Datacenters, arXiv 2508.14318, 2025.

`COMPUTING`, 0.85: Morrison et al., Holistically Evaluating the Environmental Impact of Creating
Language Models, ICLR 2025, arXiv 2503.05804, logged the power of GPUs that trained models of 20
million to 13 billion parameters: it fluctuates between about 15 % and about 85 % of the maximum.
Short peaks reach the TDP or exceed it (Patel et al., ASPLOS 2024, doi 10.1145/3620666.3651329), so
that 1 bounds the average from above. It is one number for all kernels: steps that wait for memory
or for the host draw less.

Idle power is that of a GPU with a loaded process: 26 to 50 W above that of an empty one on H100 and
A100 (Vadari, arXiv 2605.23918, 2026). It is a number of each GPU of the catalog.
"""

from collections.abc import Iterable, Mapping

from co2sim.common.units import Seconds, Watts, scaled
from co2sim.hardware.cluster import GPU, Cluster
from co2sim.prediction.result import Result

COMPUTING = 0.85
"""Fraction of its TDP that a GPU draws while it computes; sources above."""

NEEDED = ("gpu.tdp", "gpu.idle_power", "node_power", "pue")
"""The numbers of a cluster that its power needs."""

_REST = 0.5
"""Of the TDP of its GPUs, what a node draws besides: 2.8 kW beside 8 x 700 W (`dgx-h100`)."""


def missing(cluster: Cluster) -> tuple[str, ...]:
    """Which of the numbers that power needs the cluster does not have."""
    gpu = cluster.gpu
    values = gpu.tdp, gpu.idle_power, cluster.node_power, cluster.pue
    return tuple(name for name, value in zip(NEEDED, values, strict=True) if value is None)


def examples(cluster: Cluster) -> Mapping[str, str]:
    """An example of each number that is needed, for a node as large as the cluster's."""
    tdp = 700.0 if cluster.gpu.tdp is None else cluster.gpu.tdp
    idle, rest = 0.15 * tdp, _REST * tdp * cluster.gpus_per_node
    texts = scaled(tdp, "W"), scaled(idle, "W"), scaled(rest, "W"), "1.2"
    return dict(zip(NEEDED, texts, strict=True))


def sets(cluster: Cluster, lacking: Iterable[str]) -> str:
    """How to give the numbers that a cluster lacks: options of a command line."""
    of_its_size = examples(cluster)
    return " ".join(f"--set {name}={of_its_size[name]!r}" for name in lacking)


def computing_share(result: Result) -> float:
    """The part of a round in which an average GPU computes."""
    waits = result.exposed_comm_s + (result.straggler_delay_s or 0.0)
    return max(0.0, 1 - waits / result.round_time_s)


def gpu_power(gpu: GPU, computing: float) -> Watts | None:
    """The average power of a GPU that computes for this part of the time; None: not known."""
    if gpu.tdp is None or gpu.idle_power is None:
        return None
    busy = max(COMPUTING * (gpu.power_cap or gpu.tdp), gpu.idle_power)
    return computing * busy + (1 - computing) * gpu.idle_power


def power(result: Result, cluster: Cluster) -> Watts | None:
    """The average power of all nodes, at the meter of the site; None where a number is missing."""
    return _at_the_meter(cluster, computing_share(result))


def least_energy(cluster: Cluster, seconds: Seconds, computing: Seconds) -> float | None:
    """J at the meter while GPUs compute for a part of the time at least; None where not known.

    With uneven nodes some always wait, and only waiting counts.
    """
    uneven = cluster.node_spread or cluster.step_spread
    share = 0.0 if uneven or not seconds else min(1.0, computing / seconds)
    watts = _at_the_meter(cluster, share)
    return None if watts is None else watts * seconds


def _at_the_meter(cluster: Cluster, computing: float) -> Watts | None:
    one = gpu_power(cluster.gpu, computing)
    if one is None or cluster.node_power is None or cluster.pue is None:
        return None
    layout = cluster.layout
    return cluster.pue * (layout.world_size * one + layout.nodes * cluster.node_power)
