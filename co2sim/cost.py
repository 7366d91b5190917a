"""What collectives cost on a cluster: pure functions to seconds, and to bytes on each link.

A collective is a footprint: latency steps, and the bytes that it pushes through its links. Alone it
takes latency + the largest of bytes / bandwidth; `network` shares the links among several.

Bytes per link of a ring over m ranks with a buffer of S bytes: (m-1)/m S for all_gather and
reduce_scatter, twice that for all_reduce (Patarasuk and Yuan 2009); the ring leaves each node, and
each site, once. Latency steps follow NCCL's model, and so does the choice of a protocol
(`protocols`); switches between nodes may be narrow (`tiers`). A broadcast goes once
around all ranks from its root, and a reduction to it: every hop waits for a piece before it passes
it on. Roots are costed as if they were the first of their node.
"""

import math
from dataclasses import dataclass, replace

from co2sim.cluster import AllReduce, Cluster, Hops
from co2sim.compute import compute_time, efficiency, kernel_time, peak_flops
from co2sim.footprint import Footprint
from co2sim.placement import Placement, placement
from co2sim.protocols import Algorithm, Protocol, choices
from co2sim.schedule import LEADERS, PEERS, Collective, Kind, Schedule
from co2sim.tiers import crossings
from co2sim.units import Bytes, Seconds

__all__ = [
    "PIECE",
    "Footprint",
    "Traffic",
    "compute_time",
    "efficiency",
    "footprint",
    "footprints",
    "kernel_time",
    "peak_flops",
    "traffic",
]

PIECE: Bytes = 2.0**19
"""What a hop of a chain holds of a buffer before it passes it on, in each of its channels.

NCCL: a step of the Simple protocol is an eighth (NCCL_STEPS, src/include/device.h) of its buffer of
4 MiB (NCCL_BUFFSIZE), and broadcasts and reductions send single steps (BROADCAST_SLICESTEPS and
REDUCE_SLICESTEPS, src/include/collectives.h). Over Gloo, realrun's chains pass on as much.
"""


def footprint(work: Collective, cluster: Cluster) -> Footprint:
    """Footprint of `work` for one group of the cluster."""
    found, call = _footprint(work, cluster), cluster.call_overhead
    if cluster.calls:
        call += getattr(cluster.calls, work.kind, 0.0)
    if not call or not found.sent:  # a rank alone calls nobody
        return found
    return replace(found, latency=found.latency + call, call=call)


def _footprint(work: Collective, cluster: Cluster) -> Footprint:
    at = placement(work.group, cluster)
    size = work.bytes
    if at.members == 1:
        return Footprint(0.0, 0.0, 0.0, 0.0, 0.0, 1, 1)
    if work.group.name == LEADERS.name:
        return _led(replace(work, group=replace(work.group, name=PEERS.name)), cluster)
    match work.kind:
        case Kind.ALL_TO_ALL:
            return _pairwise(size, at, cluster)
        case Kind.BROADCAST | Kind.REDUCE:
            return _chain(size, at, cluster)
        case Kind.ALL_GATHER | Kind.REDUCE_SCATTER:
            pushed = size * (at.members - 1) / at.members
            return _quickest(
                [_ring(pushed, 1, at, cluster, by) for by in _by("ring", at, cluster)],
                cluster,
            )
    return _all_reduce(size, cluster.all_reduce, at, cluster)


def _by(algorithm: Algorithm, at: Placement, cluster: Cluster) -> list[Protocol]:
    return choices(algorithm, cluster, cluster.protocols, nodes=at.nodes, members=at.members)


def _simple(at: Placement, cluster: Cluster) -> Protocol:
    """The only one of what is neither a ring nor a tree."""
    (by,) = choices("ring", cluster, "simple", nodes=at.nodes, members=at.members)
    return by


def _quickest(candidates: list[Footprint], cluster: Cluster) -> Footprint:
    """What takes the least time alone, as NCCL chooses."""
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda found: found.alone(cluster))


def _carried(found: Footprint, by: Protocol, cluster: Cluster) -> Footprint:
    """The footprint of a message by a protocol that may not fill the links."""
    if not by.start and by.share == 1:
        return found
    share = by.share
    if by.most is not None:  # of the bandwidth of the bus: of what every rank pushes
        share = min(share, by.most * max(found.link_times(cluster)) / found.sent)
    return replace(found, latency=found.latency + by.start, share=share)


def _led(work: Collective, cluster: Cluster) -> Footprint:
    """What the first ranks of all nodes do: as peers would, but one group has the NICs alone.

    With several ranks in a node it enters and leaves the node at the same one. Of groups with a
    stride there are as many in a node.
    """
    found = _footprint(work, cluster)
    g = cluster.gpus_per_node // work.group.stride
    relay = cluster.inter.relay_efficiency if g > 1 else 1.0
    return replace(
        found,
        members_per_node=g,
        members_per_site=g * cluster.nodes_per_site,
        inter_efficiency=found.inter_efficiency * relay,
    )


def _tree_out(size: Bytes, nodes: int) -> Bytes:
    """What the busiest node sends in two binary trees, each of half the buffer.

    It is inside one tree, sending up and to two children, and a leaf of the other; with two nodes
    each is one tree's root, with three one is a root with two children.
    """
    return size * {1: 0.0, 2: 1.0, 3: 1.5}.get(nodes, 2.0)


def _ring(
    pushed: Bytes,
    passes: int,
    at: Placement,
    cluster: Cluster,
    by: Protocol,
    hops: Hops | None = None,
) -> Footprint:
    """Every member pushes `pushed` bytes to the next; the ring leaves each node and site once."""
    steps = _steps(at.members - at.nodes, at.nodes - at.sites, at.sites - 1, by)
    intra = pushed if at.per_node > 1 else 0.0
    before = 0.0
    if (hops or cluster.hops) == "in_turn" and at.nodes > 1:
        before, intra = intra / cluster.intra.payload_bandwidth, 0.0
    tiers = crossings(cluster, at.members, at.per_node, at.per_site, pushed)
    found = Footprint(
        latency=passes * steps + before,
        intra=intra,
        inter=pushed if at.nodes > 1 else 0.0,
        wan=pushed if at.sites > 1 else 0.0,
        sent=pushed,
        members_per_node=at.per_node,
        members_per_site=at.per_site,
        inter_efficiency=1 / max((one.slowdown for one in tiers), default=1.0),
        tiers=tiers,
        step=_first_step(at, by) if cluster.backend == "gloo" else None,
    )
    return _carried(found, by, cluster)


def _first_step(at: Placement, by: Protocol) -> Seconds:
    """The latency of one message to the farthest member."""
    return _steps(at.nodes == 1, at.nodes > 1 and at.sites == 1, at.sites > 1, by)


def _chain(size: Bytes, at: Placement, cluster: Cluster) -> Footprint:
    """A buffer passes every hop from end to end, in pieces; the slowest hop is busy with it all."""
    piece = min(size, PIECE * (cluster.channels if cluster.backend == "nccl" else 1))
    wan = cluster.wan.payload_bandwidth if cluster.wan else math.inf
    hops = (
        [piece / cluster.intra.payload_bandwidth] * (at.members - at.nodes)
        + [piece / cluster.inter.payload_bandwidth] * (at.nodes - at.sites)
        + [piece / wan] * (at.sites - 1)
    )
    ring = _ring(size, 1, at, cluster, _simple(at, cluster), hops="pipelined")
    return replace(ring, latency=ring.latency + sum(hops) - max(hops), step=None)


def _pairwise(size: Bytes, at: Placement, cluster: Cluster) -> Footprint:
    """Every member sends an equal part of its buffer to each other one, one after the other."""
    m, k, q = at.members, at.per_node, at.per_site
    by = _simple(at, cluster)
    inter = size * k * (m - k) / m
    tiers = crossings(cluster, m, k, q, inter, exchanged=size)
    slowdown = max((one.slowdown for one in tiers), default=1.0)
    return Footprint(
        latency=_steps(k - 1, q - k, m - q, by),
        intra=size * (k - 1) / m,
        inter=inter,
        wan=size * q * (m - q) / m,
        sent=size * (m - 1) / m,
        members_per_node=k,
        members_per_site=q,
        inter_efficiency=cluster.inter.exchange_efficiency / slowdown,
        tiers=tiers,
        step=_first_step(at, by) if cluster.backend == "gloo" else None,
    )


def _all_reduce(size: Bytes, algorithm: AllReduce, at: Placement, cluster: Cluster) -> Footprint:
    """An all-reduce by one of its algorithms.

    ring: around all ranks, twice. tree: up and down two trees of nodes (Sanders, Speck and Traeff
    2009). hierarchical: in the node, among peers, in the node, as a pipeline. auto is what the
    backend does: NCCL takes the faster of ring and tree, Gloo the ring.
    """
    if algorithm == "auto":
        names: tuple[AllReduce, ...] = ("ring", "tree") if cluster.backend == "nccl" else ("ring",)
        candidates = [_all_reduce(size, name, at, cluster) for name in names]
        return _quickest(candidates, cluster)
    pushed = 2 * size * (at.members - 1) / at.members
    if algorithm == "ring":
        rings = [_ring(pushed, 2, at, cluster, by) for by in _by("ring", at, cluster)]
        return _quickest(rings, cluster)
    if algorithm == "tree":
        trees = [_tree(size, pushed, at, cluster, by) for by in _by("tree", at, cluster)]
        return _quickest(trees, cluster)
    by = _simple(at, cluster)
    between = 2 * size * (at.nodes - 1) / at.nodes
    return replace(
        _ring(pushed, 2, at, cluster, by),
        latency=2 * _steps(at.per_node - 1, at.nodes - at.sites, at.sites - 1, by),
        intra=2 * size * (at.per_node - 1) / at.per_node,
        inter=between,
        wan=between if at.sites > 1 else 0.0,
        tiers=crossings(cluster, at.members, at.per_node, at.per_site, between),
    )


def _tree(size: Bytes, pushed: Bytes, at: Placement, cluster: Cluster, by: Protocol) -> Footprint:
    depth, far = (math.ceil(math.log2(many)) for many in (at.nodes // at.sites, at.sites))
    out = _tree_out(size, at.nodes)
    found = replace(
        _ring(pushed, 2, at, cluster, by),
        share=1.0,
        latency=2 * _steps(at.per_node - 1, depth, far, by),
        intra=2 * size if at.per_node > 1 else 0.0,
        inter=out,
        wan=_tree_out(size, at.sites),
        tiers=crossings(cluster, at.members, at.per_node, at.per_site, out),
    )
    return _carried(found, by, cluster)


def footprints(schedule: Schedule, cluster: Cluster) -> list[Footprint | None]:
    """Footprint of every work in `schedule.works`, None for compute."""
    return [
        footprint(work, cluster) if isinstance(work, Collective) else None
        for work in schedule.works
    ]


def _steps(intra: int, inter: int, wan: int, by: Protocol) -> Seconds:
    """Latency of sequential hops by the kind of link they cross."""
    return intra * by.intra + inter * by.inter + wan * by.wan


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes sent in a round: per GPU on any link, per node by its NICs, per site over the WAN."""

    gpu: Bytes
    nic: Bytes
    wan: Bytes


def traffic(schedule: Schedule, cluster: Cluster) -> Traffic:
    """What one round of `schedule` sends."""
    known = footprints(schedule, cluster)
    each = [(cost.sent, *cost.loads(cluster)[1:]) if cost else None for cost in known]
    found = [sent for number in schedule.work_numbers if (sent := each[number])]
    gpu, nic, wan = (sum(one) for one in zip(*found, strict=True)) if found else (0.0, 0.0, 0.0)
    return Traffic(gpu, nic, wan)
