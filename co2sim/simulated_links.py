"""The links of a simulation: what each carries a second, and which have a shaper."""

from collections.abc import Hashable

from co2sim.cluster import Cluster, Link, Tier
from co2sim.folding import Folding
from co2sim.shaping import HOST, Shaper
from co2sim.tiers import uplinks
from co2sim.units import BytesPerSecond


def capacities(cluster: Cluster, folding: Folding) -> dict[Hashable, BytesPerSecond]:
    """Payload bytes per second of every link, and seconds per second of a shared host."""
    found: dict[Hashable, float] = {}
    for index in range(len(folding.classes)):
        found["gpu", index] = cluster.intra.payload_bandwidth
        found["nic", folding.node(index)] = cluster.inter.payload_bandwidth
        for tier in cluster.inter.tiers:
            found[tier, pod_of(tier, folding, index)] = uplinks(tier, cluster)
    if cluster.hosts == "shared":
        found[HOST] = 1.0
    if cluster.wan:
        speed = cluster.wan.payload_bandwidth
        found.update({("wan", site): speed for site in range(cluster.sites)})
    return found


def pod_of(tier: Tier, folding: Folding, index: int) -> int:
    """The pod of a class; folded ones share one."""
    return 0 if folding.folded else folding.node(index) // tier.nodes


def shapers(cluster: Cluster, folding: Folding) -> dict[Hashable, Shaper]:
    """Those of the links that have one."""
    found: dict[Hashable, Link] = {}
    for index in range(len(folding.classes)):
        found["gpu", index] = cluster.intra
        found["nic", folding.node(index)] = cluster.inter
    if cluster.wan:
        found.update({("wan", site): cluster.wan for site in range(cluster.sites)})
    return {at: Shaper.of(link) for at, link in found.items() if link.burst}
