"""What collectives send through the switches between nodes: rails and spines that may be narrow.

Pods are consecutive nodes, filled one after the other. A ring, a chain and a tree leave each pod
once, with what the busiest node sends. With pods of k nodes and an oversubscription of o its
uplinks take o / k times as long as the network cards: no loss unless o exceeds k. Of an all-to-all
over m nodes the part (m - k) / (m - 1) leaves the pod, and o counts in full. `congestion` slows
down a ring as much as its slowest hop, which crosses.
"""

from dataclasses import dataclass

from co2sim.cluster import Cluster, Tier
from co2sim.units import Bytes, BytesPerSecond


@dataclass(frozen=True, slots=True)
class Crossing:
    """One group's collective on a tier: `bytes` through the uplinks of each pod.

    `members` is how many of its ranks a full pod has, `share` the part of what a node sends that
    crosses.
    """

    tier: Tier
    bytes: Bytes
    members: int
    share: float

    @property
    def slowdown(self) -> float:
        """Of the network cards, by congestion."""
        return 1 + self.share * (self.tier.congestion - 1)

    def groups(self, cluster: Cluster) -> int:
        """How many groups of the kind share the uplinks of a pod."""
        return cluster.gpus_per_node * self.tier.nodes // self.members


def crossings(
    cluster: Cluster,
    members: int,
    per_node: int,
    per_site: int,
    inter: Bytes,
    exchanged: Bytes | None = None,
) -> tuple[Crossing, ...]:
    """The tiers that a group crosses whose busiest node sends `inter` bytes to others.

    `exchanged` is the buffer of an all-to-all. A group of consecutive ranks is taken to fill pods
    from the first on, or to lie inside one; one that meets `per_site` ranks of each site has no
    more of them in a pod of that site.
    """
    found = []
    for tier in cluster.inter.tiers:
        sites = -(-tier.nodes // cluster.nodes_per_site)  # that a pod reaches
        here = min(per_node * tier.nodes, per_site * sites)
        if here >= members:
            continue
        if exchanged is None:
            found.append(Crossing(tier, inter, here, 1.0))
        else:
            away = exchanged * here * (members - here) / members
            found.append(Crossing(tier, away, here, (members - here) / (members - per_node)))
    return tuple(found)


def uplinks(tier: Tier, cluster: Cluster) -> BytesPerSecond:
    """Payload bytes per second that leave a pod at most."""
    return tier.nodes * cluster.inter.payload_bandwidth / tier.oversubscription
