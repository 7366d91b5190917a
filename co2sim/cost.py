"""What work costs on a cluster: pure functions from work to seconds, and to bytes on each link.

A collective is a footprint: latency steps, and the bytes that it pushes through its links. Alone it
takes latency + the largest of bytes / bandwidth; `network` shares the links among several.

Bytes per link of a ring over m ranks with a buffer of S bytes: (m-1)/m S for all_gather and
reduce_scatter, twice that for all_reduce (Patarasuk and Yuan 2009); the ring leaves each node, and
each site, once. Latency steps follow NCCL's model (src/graph/tuning.cc).
"""

import math
from dataclasses import dataclass

import numpy as np

from co2sim.cluster import GPU, Cluster
from co2sim.errors import OptionError, nearest
from co2sim.schedule import Collective, Compute, Group, Kind, Schedule
from co2sim.units import Bytes, FlopsPerSecond, Seconds


def peak_flops(gpu: GPU, precision: str) -> FlopsPerSecond:
    """Dense peak speed. Raises OptionError when the GPU does not compute in `precision`."""
    if precision not in gpu.peak:
        raise OptionError(f"{gpu.name} has no {precision}; {nearest(precision, gpu.peak)}")
    return gpu.peak[precision]


def efficiency(gpu: GPU, flops: float) -> float:
    """Fraction of peak that an op of `flops` FLOP attains: the GPU's table over log FLOP."""
    sizes = [math.log(size) for size, _ in gpu.efficiency]
    return float(np.interp(math.log(flops), sizes, [fraction for _, fraction in gpu.efficiency]))


def compute_time(work: Compute, gpu: GPU, precision: str) -> Seconds:
    """Roofline: the slower of arithmetic and memory traffic, plus the launch overhead."""
    arithmetic = 0.0
    if work.flops:
        arithmetic = work.flops / (peak_flops(gpu, precision) * efficiency(gpu, work.flops))
    memory = work.memory_bytes / (gpu.memory_bandwidth * gpu.memory_efficiency)
    return max(arithmetic, memory) + gpu.launch_overhead


@dataclass(frozen=True, slots=True)
class Footprint:
    """One group's collective on its links, one direction.

    `intra` is bytes through each member's link inside the node, `inter` through the NICs of each
    node, `wan` through the uplink of each site; `sent` is what each member puts on any of them.
    `members_per_node` and `members_per_site` count the group's ranks there.
    """

    latency: Seconds
    intra: Bytes
    inter: Bytes
    wan: Bytes
    sent: Bytes
    members_per_node: int
    members_per_site: int


def footprint(work: Collective, cluster: Cluster) -> Footprint:
    """Footprint of `work` for one group of the cluster."""
    m, k, q = _spread(work.group, cluster)
    size, nodes, sites = work.bytes, m // k, m // q
    if m == 1:
        return Footprint(0.0, 0.0, 0.0, 0.0, 0.0, 1, 1)
    if work.kind is Kind.ALL_TO_ALL:
        return Footprint(
            latency=_steps(k - 1, m - k - (m - q), m - q, cluster),
            intra=size * (k - 1) / m,
            inter=size * k * (m - k) / m,
            wan=size * q * (m - q) / m,
            sent=size * (m - 1) / m,
            members_per_node=k,
            members_per_site=q,
        )
    passes = 2 if work.kind is Kind.ALL_REDUCE else 1
    ring = passes * size * ((m - 1) / m if work.kind is not Kind.BROADCAST else 1.0)
    intra, inter = (ring if k > 1 else 0.0), (ring if nodes > 1 else 0.0)
    latency = passes * _steps(m - nodes, nodes - sites, sites - 1, cluster)
    if work.kind is Kind.ALL_REDUCE and cluster.all_reduce == "tree":
        depth = math.ceil(math.log2(nodes / sites)) if nodes > sites else 0
        latency = 2 * _steps(k - 1, depth, math.ceil(math.log2(sites)), cluster)
        intra, inter = (2 * size if k > 1 else 0.0), 2 * size * (nodes - 1) / nodes
    elif work.kind is Kind.ALL_REDUCE and cluster.all_reduce == "hierarchical":
        latency = 2 * _steps(k - 1, nodes - sites, sites - 1, cluster)
        intra, inter = 2 * size * (k - 1) / k, 2 * size * (nodes - 1) / nodes
    return Footprint(
        latency=latency,
        intra=intra,
        inter=inter,
        wan=inter if sites > 1 else 0.0,
        sent=ring,
        members_per_node=k,
        members_per_site=q,
    )


def _spread(group: Group, cluster: Cluster) -> tuple[int, int, int]:
    """Members of a group: in all, on one node, at one site."""
    layout = cluster.layout
    members = group.members(0, layout)
    per_node = max(1, min(len(members), layout.gpus_per_node // members.step))
    per_site = min(len(members), per_node * cluster.nodes_per_site)
    if len(members) % per_node or len(members) % per_site:
        raise OptionError(
            f"group {group} of {len(members)} ranks is not spread evenly over nodes of"
            f" {layout.gpus_per_node} and {cluster.sites} sites"
        )
    return len(members), per_node, per_site


def _steps(intra: int, inter: int, wan: int, cluster: Cluster) -> Seconds:
    """Latency of sequential hops by the kind of link they cross."""
    far = cluster.wan.latency if cluster.wan else cluster.inter.latency
    return intra * cluster.intra.latency + inter * cluster.inter.latency + wan * far


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes sent in a round: per GPU on any link, per node by its NICs, per site over the WAN."""

    gpu: Bytes
    nic: Bytes
    wan: Bytes


def traffic(schedule: Schedule, cluster: Cluster) -> Traffic:
    """What one round of `schedule` sends."""
    works = [op.work for op in schedule.body if isinstance(op.work, Collective)]
    prints = {
        id(work): footprint(work, cluster) for work in {id(work): work for work in works}.values()
    }
    found = [prints[id(work)] for work in works]
    g = cluster.gpus_per_node
    return Traffic(
        gpu=sum(f.sent for f in found),
        nic=sum(f.inter * g / f.members_per_node for f in found),
        wan=sum(f.wan * g * cluster.nodes_per_site / f.members_per_site for f in found),
    )
