"""What collectives cost on a cluster: pure functions to seconds, and to bytes on each link.

A collective is a footprint: latency steps, and the bytes that it pushes through its links. Alone it
takes latency + the largest of bytes / bandwidth; `network` shares the links among several.

Bytes per link of a ring over m ranks with a buffer of S bytes: (m-1)/m S for all_gather and
reduce_scatter, twice that for all_reduce (Patarasuk and Yuan 2009); the ring leaves each node, and
each site, once. Latency steps follow NCCL's model (src/graph/tuning.cc). A broadcast goes once
around all ranks from its root, and a reduction to it: every hop waits for a piece before it passes
it on. Roots are costed as if they were the first of their node.
"""

import math
from dataclasses import dataclass, replace

from co2sim import shaping
from co2sim.cluster import AllReduce, Cluster
from co2sim.compute import compute_time, efficiency, kernel_time, peak_flops
from co2sim.errors import OptionError
from co2sim.schedule import LEADERS, PEERS, Collective, Group, Kind, Schedule
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


@dataclass(frozen=True, slots=True)
class Footprint:
    """One group's collective on its links, one direction.

    `intra` is bytes through each member's link inside the node, `inter` through the NICs of each
    node, `wan` through the uplink of each site; `sent` is what each member puts on any of them.
    `members_per_node` and `members_per_site` count the group's ranks there. `inter_efficiency` is
    the fraction of the payload bandwidth of the NICs that these messages attain. `step` is the one
    of the latency steps after which bytes flow; only shaped links make it matter (`shaping`).
    """

    latency: Seconds
    intra: Bytes
    inter: Bytes
    wan: Bytes
    sent: Bytes
    members_per_node: int
    members_per_site: int
    inter_efficiency: float = 1.0
    step: Seconds | None = None

    def groups(self, cluster: Cluster) -> tuple[int, int]:
        """How many groups of the kind share the NICs of a node, and the uplink of a site."""
        g = cluster.gpus_per_node
        return g // self.members_per_node, g * cluster.nodes_per_site // self.members_per_site

    def loads(self, cluster: Cluster) -> tuple[Bytes, Bytes, Bytes]:
        """Bytes on links of a GPU, of a node and of a site, with all groups of the kind."""
        on_node, on_site = self.groups(cluster)
        return self.intra, self.inter * on_node, self.wan * on_site

    def link_times(self, cluster: Cluster) -> tuple[Seconds, Seconds, Seconds]:
        """Time that the bytes need on the links of a GPU, of a node and of a site, each alone."""
        wan = cluster.wan.payload_bandwidth if cluster.wan else math.inf
        nics = cluster.inter.payload_bandwidth * self.inter_efficiency
        intra, inter, far = self.loads(cluster)
        return intra / cluster.intra.payload_bandwidth, inter / nics, far / wan

    def bound_by(self, cluster: Cluster) -> int:
        """The link that takes longest, as its place in `link_times`: it bounds the collective."""
        times = self.link_times(cluster)
        return times.index(max(times))

    def lead(self, cluster: Cluster) -> Seconds:
        """The part of the latency that comes on top of the time of the bytes."""
        if self.step is None:
            return self.latency
        link = (cluster.intra, cluster.inter, cluster.wan)[self.bound_by(cluster)]
        share = shaping.hidden_share(link, self.step) if link else 0.0
        return self.latency - share * (self.latency - cluster.call_overhead - self.step)

    def alone(self, cluster: Cluster) -> Seconds:
        """Time when nothing but the groups of the same kind is in flight, after a pause."""
        times = self.link_times(cluster)
        burst = shaping.passed(times, (cluster.intra, cluster.inter, cluster.wan))
        return max(self.latency, self.lead(cluster) + (1 - burst) * max(times))


def footprint(work: Collective, cluster: Cluster) -> Footprint:
    """Footprint of `work` for one group of the cluster."""
    found, call = _footprint(work, cluster), cluster.call_overhead
    if not call or not found.sent:  # a rank alone calls nobody
        return found
    return replace(found, latency=found.latency + call)


def _footprint(work: Collective, cluster: Cluster) -> Footprint:
    spread = _spread(work.group, cluster)
    size = work.bytes
    if spread.members == 1:
        return Footprint(0.0, 0.0, 0.0, 0.0, 0.0, 1, 1)
    if work.group == LEADERS:
        return _led(replace(work, group=PEERS), cluster)
    match work.kind:
        case Kind.ALL_TO_ALL:
            return _pairwise(size, spread, cluster)
        case Kind.BROADCAST | Kind.REDUCE:
            return _chain(size, spread, cluster)
        case Kind.ALL_GATHER | Kind.REDUCE_SCATTER:
            return _ring(size * (spread.members - 1) / spread.members, 1, spread, cluster)
    return _all_reduce(size, cluster.all_reduce, spread, cluster)


def _led(work: Collective, cluster: Cluster) -> Footprint:
    """What the first ranks of all nodes do: as peers would, but one group has the NICs alone.

    With several ranks in a node it enters and leaves the node at the same one.
    """
    found = _footprint(work, cluster)
    g = cluster.gpus_per_node
    relay = cluster.inter.relay_efficiency if g > 1 else 1.0
    return replace(
        found,
        members_per_node=g,
        members_per_site=g * cluster.nodes_per_site,
        inter_efficiency=found.inter_efficiency * relay,
    )


@dataclass(frozen=True, slots=True)
class _Spread:
    """Ranks of a group: in all, on each of its nodes, at each of its sites."""

    members: int
    per_node: int
    per_site: int

    @property
    def nodes(self) -> int:
        return self.members // self.per_node

    @property
    def sites(self) -> int:
        return self.members // self.per_site


def _spread(group: Group, cluster: Cluster) -> _Spread:
    layout = cluster.layout
    members = group.members(0, layout)
    per_node = max(1, min(len(members), layout.gpus_per_node // members.step))
    per_site = min(len(members), per_node * cluster.nodes_per_site)
    block = group.ranks  # other groups are spread evenly on any layout
    if block and not (
        _divides(block, layout.gpus_per_node)
        and _divides(block, layout.gpus_per_node * cluster.nodes_per_site)
    ):
        raise OptionError(
            f"group {group} is not spread evenly over nodes of {layout.gpus_per_node} GPUs and"
            f" sites of {cluster.nodes_per_site} nodes"
        )
    return _Spread(len(members), per_node, per_site)


def _tree_out(size: Bytes, nodes: int) -> Bytes:
    """What the busiest node sends in two binary trees, each of half the buffer.

    It is inside one tree, sending up and to two children, and a leaf of the other; with two nodes
    each is one tree's root, with three one is a root with two children.
    """
    return size * {1: 0.0, 2: 1.0, 3: 1.5}.get(nodes, 2.0)


def _divides(one: int, other: int) -> bool:
    """Whether the smaller number divides the larger."""
    return max(one, other) % min(one, other) == 0


def _ring(pushed: Bytes, passes: int, at: _Spread, cluster: Cluster) -> Footprint:
    """Every member pushes `pushed` bytes to the next; the ring leaves each node and site once."""
    hops = _steps(at.members - at.nodes, at.nodes - at.sites, at.sites - 1, cluster)
    intra = pushed if at.per_node > 1 else 0.0
    before = 0.0
    if cluster.hops == "in_turn" and at.nodes > 1:
        before, intra = intra / cluster.intra.payload_bandwidth, 0.0
    return Footprint(
        latency=passes * hops + before,
        intra=intra,
        inter=pushed if at.nodes > 1 else 0.0,
        wan=pushed if at.sites > 1 else 0.0,
        sent=pushed,
        members_per_node=at.per_node,
        members_per_site=at.per_site,
        step=_first_step(at, cluster) if cluster.backend == "gloo" else None,
    )


def _first_step(at: _Spread, cluster: Cluster) -> Seconds:
    """The latency of one message to the farthest member."""
    return _steps(at.nodes == 1, at.nodes > 1 and at.sites == 1, at.sites > 1, cluster)


def _chain(size: Bytes, at: _Spread, cluster: Cluster) -> Footprint:
    """A buffer passes every hop from end to end, in pieces; the slowest hop is busy with it all."""
    piece = min(size, PIECE * (cluster.channels if cluster.backend == "nccl" else 1))
    wan = cluster.wan.payload_bandwidth if cluster.wan else math.inf
    hops = (
        [piece / cluster.intra.payload_bandwidth] * (at.members - at.nodes)
        + [piece / cluster.inter.payload_bandwidth] * (at.nodes - at.sites)
        + [piece / wan] * (at.sites - 1)
    )
    ring = _ring(size, 1, at, replace(cluster, hops="pipelined"))
    return replace(ring, latency=ring.latency + sum(hops) - max(hops), step=None)


def _pairwise(size: Bytes, at: _Spread, cluster: Cluster) -> Footprint:
    """Every member sends an equal part of its buffer to each other one, one after the other."""
    m, k, q = at.members, at.per_node, at.per_site
    return Footprint(
        latency=_steps(k - 1, q - k, m - q, cluster),
        intra=size * (k - 1) / m,
        inter=size * k * (m - k) / m,
        wan=size * q * (m - q) / m,
        sent=size * (m - 1) / m,
        members_per_node=k,
        members_per_site=q,
        inter_efficiency=cluster.inter.exchange_efficiency,
        step=_first_step(at, cluster) if cluster.backend == "gloo" else None,
    )


def _all_reduce(size: Bytes, algorithm: AllReduce, at: _Spread, cluster: Cluster) -> Footprint:
    """An all-reduce by one of its algorithms.

    ring: around all ranks, twice. tree: up and down two trees of nodes (Sanders, Speck and Traeff
    2009). hierarchical: in the node, among peers, in the node, as a pipeline. auto is what the
    backend does: NCCL takes the faster of ring and tree, Gloo the ring.
    """
    if algorithm == "auto":
        names: tuple[AllReduce, ...] = ("ring", "tree") if cluster.backend == "nccl" else ("ring",)
        candidates = [_all_reduce(size, name, at, cluster) for name in names]
        return min(candidates, key=lambda found: found.alone(cluster))
    ring = _ring(2 * size * (at.members - 1) / at.members, 2, at, cluster)
    if algorithm == "ring":
        return ring
    if algorithm == "tree":
        depth = math.ceil(math.log2(at.nodes // at.sites))
        return replace(
            ring,
            latency=2 * _steps(at.per_node - 1, depth, math.ceil(math.log2(at.sites)), cluster),
            intra=2 * size if at.per_node > 1 else 0.0,
            inter=_tree_out(size, at.nodes),
            wan=_tree_out(size, at.sites),
        )
    between = 2 * size * (at.nodes - 1) / at.nodes
    return replace(
        ring,
        latency=2 * _steps(at.per_node - 1, at.nodes - at.sites, at.sites - 1, cluster),
        intra=2 * size * (at.per_node - 1) / at.per_node,
        inter=between,
        wan=between if at.sites > 1 else 0.0,
    )


def footprints(schedule: Schedule, cluster: Cluster) -> list[Footprint | None]:
    """Footprint of every work in `schedule.works`, None for compute.

    Those of the same kind, size and group are computed once.
    """
    costs: dict[tuple[Kind, Bytes, Group], Footprint] = {}
    found: list[Footprint | None] = []
    for work in schedule.works:
        if not isinstance(work, Collective):
            found.append(None)
            continue
        key = (work.kind, work.bytes, work.group)
        if key not in costs:
            costs[key] = footprint(work, cluster)
        found.append(costs[key])
    return found


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
    known = footprints(schedule, cluster)
    found = [cost for number in schedule.work_numbers if (cost := known[number])]
    loads = [footprint.loads(cluster) for footprint in found]
    return Traffic(
        gpu=sum(footprint.sent for footprint in found),
        nic=sum(nic for _, nic, _ in loads),
        wan=sum(wan for _, _, wan in loads),
    )
