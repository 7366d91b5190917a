"""What a collective puts on links, and how long that takes alone."""

import math
from dataclasses import dataclass

from co2sim import shaping
from co2sim.cluster import Cluster
from co2sim.tiers import Crossing, uplinks
from co2sim.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Footprint:
    """One group's collective on its links, one direction.

    `intra` is bytes through each member's link inside the node, `inter` through the NICs of each
    node, `wan` through the uplink of each site; `sent` is what each member puts on any of them.
    `members_per_node` and `members_per_site` count the group's ranks there. `inter_efficiency` is
    the fraction of the payload bandwidth of the NICs that these messages attain, `share` that of
    all links, by their protocol. `step` is the one of the latency steps after which bytes flow: it
    matters where links are shaped (`shaping`). `call` is the part of the latency that hosts add.
    """

    latency: Seconds
    intra: Bytes
    inter: Bytes
    wan: Bytes
    sent: Bytes
    members_per_node: int
    members_per_site: int
    inter_efficiency: float = 1.0
    share: float = 1.0
    tiers: tuple[Crossing, ...] = ()
    step: Seconds | None = None
    call: Seconds = 0.0

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
        intra, inter, far = (load / self.share for load in self.loads(cluster))
        return intra / cluster.intra.payload_bandwidth, inter / nics, far / wan

    def tier_times(self, cluster: Cluster) -> list[Seconds]:
        """Time that the bytes need on the uplinks of a pod of each tier that they cross."""
        return [
            one.bytes * one.groups(cluster) / self.share / uplinks(one.tier, cluster)
            for one in self.tiers
        ]

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
        return self.latency - share * (self.latency - self.call - self.step)

    def alone(self, cluster: Cluster) -> Seconds:
        """Time when nothing but the groups of the same kind is in flight, after a pause."""
        times = self.link_times(cluster)
        links = (cluster.intra, cluster.inter, cluster.wan)
        burst, longest = shaping.passed(times, links), max(*times, *self.tier_times(cluster))
        lag = shaping.lagged(burst, max(link.burst_lag for link in links if link))
        steps = max(self.latency, self.lead(cluster) + (1 - burst + lag) * longest)
        return steps + burst * shaping.held(times, links)
