"""Where the ranks of a group stand, and what of its traffic leaves pods through their uplinks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, BytesPerSecond
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.fabric import Pod, imbalance
from co2sim.schedule.schedule import Group, Layout


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks of a group: in all, on each of its nodes, at each of its sites; how many those are."""

    group: Group
    members: int
    per_node: int
    per_site: int
    nodes: int
    sites: int


def placement(group: Group, cluster: Cluster) -> Placement:
    """Of a group. Raises OptionError for ranks that do not stand evenly on nodes and sites."""
    layout = cluster.layout
    members = group.members(0, layout)
    per_node = max(1, min(len(members), layout.gpus_per_node // members.step))
    on_site = layout.gpus_per_node * cluster.nodes_per_site // members.step
    per_site = max(1, min(len(members), on_site))
    block = group.ranks * group.stride  # other groups are spread evenly on any layout
    if block and not (
        _divides(block, layout.gpus_per_node)
        and _divides(block, layout.gpus_per_node * cluster.nodes_per_site)
    ):
        raise OptionError(
            f"{block} consecutive GPUs that exchange something ({group}) fill no equal parts of"
            f" nodes of {layout.gpus_per_node} GPUs, nor of sites of {cluster.nodes_per_site} nodes"
        )
    count = len(members)
    return Placement(group, count, per_node, per_site, count // per_node, count // per_site)


def _divides(first: int, other: int) -> bool:
    """Whether the smaller number divides the larger."""
    return max(first, other) % min(first, other) == 0


@dataclass(frozen=True, slots=True)
class Crossing:
    """A kind of collective on a tier: `bytes` of all its groups through a pod's uplinks.

    The pod is the busiest; `groups` of the kind send through it. `unit` is what a group sends for
    each hop of its ring that leaves a pod, or, if `exchanged`, the buffer of an all-to-all. `share`
    is the part of what a node sends that crosses, the largest of all groups, `flows` the
    connections that each switch of the pod hashes, `hashed` the factor by which flows that meet on
    uplinks are slower than network cards, and `lost` the part of its time that a ring loses.
    """

    pod: Pod
    unit: Bytes
    exchanged: bool
    bytes: Bytes
    groups: int
    share: float
    flows: int = 1
    hashed: float = 1.0
    lost: float = 0.0

    @property
    def slowdown(self) -> float:
        """Of the network cards, by congestion and by hashed paths."""
        return self.hashed * (1 + self.share * (self.pod.tier.congestion - 1))

    def of_group(self, nodes: Sequence[int], nodes_per_site: int) -> dict[int, Bytes]:
        """Bytes that a group sends through the uplinks of pods, by pod; its ranks are on `nodes`.

        The nodes are in the order of its ring. Those of a scattered job each send their part.
        """
        pods = pods_of(self.pod, np.asarray(nodes), nodes_per_site)
        if self.pod.fabric.placement == "scattered":
            counts = Counter(pods[np.unique(nodes, return_index=True)[1]].tolist())
            return {pod: self.unit * self.share * count for pod, count in counts.items()}
        units = _Leaving.of(pods[np.newaxis], exchanged=self.exchanged).units
        return {pod: self.unit * count for pod, count in enumerate(units.tolist()) if count}


def pods_of(pod: Pod, nodes: NDArray[np.int64], nodes_per_site: int) -> NDArray[np.int64]:
    """Which pods of a kind nodes are in: each site has its own. Scattered nodes fill them, too."""
    at_site = -(-nodes_per_site // pod.ours)
    site, node = nodes // nodes_per_site, nodes % nodes_per_site
    inside = node % at_site if pod.fabric.placement == "cyclic" else node // pod.ours
    pods: NDArray[np.int64] = site * at_site + inside
    return pods


@dataclass(frozen=True, slots=True)
class _Leaving:
    """What groups of a kind send out of pods, by pod: in units, and how many of them they are.

    A unit is a hop of a ring, or the buffer of an all-to-all; `pairs` of ranks send to each other
    in it. `share` is the largest part of what a rank sends to other nodes.
    """

    units: NDArray[np.float64]
    groups: NDArray[np.float64]
    pairs: NDArray[np.float64]
    share: float

    @classmethod
    def of(cls, pods: NDArray[np.int64], *, exchanged: bool, per_node: int = 1) -> "_Leaving":
        """That of groups whose members, in the order of their rings, are in `pods`, by group."""
        many, members = pods.shape
        count = int(pods.max()) + 1
        if not exchanged:
            hops = np.bincount(pods[pods != np.roll(pods, -1, 1)], minlength=count).astype(float)
            return cls(hops, hops, hops, 1.0 if hops.any() else 0.0)
        keys, here = np.unique(pods + count * np.arange(many)[:, np.newaxis], return_counts=True)
        pairs = here * (members - here)
        on, parted = keys % count, here < members
        share = (members - here[parted].min()) / (members - per_node) if parted.any() else 0.0
        units, groups, both = (
            np.bincount(on, weights, count).astype(float)
            for weights in (pairs / members, parted, pairs)
        )
        return cls(units, groups, both, min(1.0, share))


@lru_cache(1024)
def _leaving(group: Group, layout: Layout, pod: Pod, *, exchanged: bool) -> _Leaving:
    """What all groups of a kind send out of pods; of a scattered job the mean, in what nodes send.

    Ranks of other jobs stand in order, by node, packed or in turn on all pods.
    """
    g, per_site = layout.gpus_per_node, layout.nodes // layout.sites
    left, rows = np.ones(layout.world_size, dtype=bool), list[range]()
    while left.any():
        rows.append(group.members(int(left.argmax()), layout))
        left[rows[-1].start : rows[-1].stop : rows[-1].step] = False
    nodes = np.array(rows) // g
    per_node = int((nodes[0] == nodes[0, 0]).sum())
    if pod.fabric.placement != "scattered":
        pods = pods_of(pod, nodes, per_site)
        return _Leaving.of(pods, exchanged=exchanged, per_node=per_node)
    share = max(0.0, (per_site - pod.ours) / max(1, per_site - 1))
    groups = np.array([g * pod.ours / per_node])
    return _Leaving(groups * share, groups, groups * share, share)


def crossings(
    cluster: Cluster, ranks: Placement, inter: Bytes, exchanged: Bytes | None = None
) -> tuple[Crossing, ...]:
    """The tiers that groups cross of which each node sends `inter` bytes to others.

    `exchanged` is the buffer of an all-to-all.
    """
    crossed = []
    for pod in cluster.pods:
        if ranks.nodes == 1 or pod.ours >= cluster.nodes_per_site * ranks.sites:
            continue
        pairs = exchanged is not None and pod.fabric.placement != "scattered"
        unit = exchanged if pairs and exchanged else inter
        leaving = _leaving(ranks.group, cluster.layout, pod, exchanged=pairs)
        busiest = leaving.units.argmax()
        if units := float(leaving.units[busiest]):
            groups, senders = int(leaving.groups[busiest]), float(leaving.pairs[busiest])
            crossing = Crossing(pod, unit, pairs, unit * units, groups, leaving.share)
            flows = _flows(crossing, ranks, cluster, senders)
            slower = _hashed(crossing, ranks, cluster, inter, flows)
            crossed.append(replace(crossing, flows=flows, hashed=slower))
    return tuple(crossed)


def _flows(crossing: Crossing, ranks: Placement, cluster: Cluster, pairs: float) -> int:
    """Connections that a switch of a pod hashes, where `pairs` of members send to each other.

    In a ring a node sends out of a pod, by as many network cards as its ranks have.
    """
    pod = crossing.pod
    if not crossing.exchanged:
        pairs *= max(1.0, pod.cards * ranks.per_node / cluster.gpus_per_node)
    connections = pod.fabric.flows or max(1, cluster.channels // pod.cards)
    return max(1, round(pairs * connections / pod.switches))


def _hashed(
    crossing: Crossing, ranks: Placement, cluster: Cluster, inter: Bytes, flows: int
) -> float:
    """How much longer the busiest uplink takes than network cards, in the mean; at least as long.

    A node sends `inter` bytes for a group.
    """
    pod = crossing.pod
    if pod.fabric.paths == "spread":
        return 1.0
    switches = pod.switches * -(-cluster.nodes_per_site // pod.ours)
    least = inter * cluster.gpus_per_node / ranks.per_node / (crossing.bytes / pod.bandwidth)
    return imbalance(flows, pod.uplinks, switches, least) / least


def uncongested(tiers: Sequence[Crossing]) -> float:
    """The fraction of the network cards' bandwidth that the most congested tier leaves."""
    return 1 / max((crossing.slowdown for crossing in tiers), default=1.0)


def uplinks(pod: Pod, cluster: Cluster) -> BytesPerSecond:
    """Payload bytes per second that leave a pod at most."""
    return pod.bandwidth * cluster.inter.payload_bandwidth
