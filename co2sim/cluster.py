"""GPUs, links and clusters: what the hardware can do, as plain numbers in SI units."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from co2sim.errors import OptionError
from co2sim.schedule import Layout
from co2sim.units import Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds, UsdPerSecond

Backend = Literal["nccl", "gloo"]
"""nccl: the collectives of a group run one at a time. gloo: those in flight share the links."""

AllReduce = Literal["auto", "ring", "tree", "hierarchical"]
"""auto: what the backend picks; see `cost`."""


@dataclass(frozen=True, slots=True)
class GPU:
    """One accelerator.

    `peak` is the dense speed by precision. `efficiency` lists (FLOP of an op, attained fraction of
    peak) by rising FLOP; between entries it is interpolated over log FLOP, outside it is constant.
    """

    name: str
    memory: Bytes
    memory_bandwidth: BytesPerSecond
    peak: Mapping[str, FlopsPerSecond]
    efficiency: tuple[tuple[Flops, float], ...]
    memory_efficiency: float = 1.0
    launch_overhead: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """A link, one direction: `efficiency` is the fraction of `bandwidth` that payload attains."""

    bandwidth: BytesPerSecond
    latency: Seconds = 0.0
    efficiency: float = 1.0

    @property
    def payload_bandwidth(self) -> BytesPerSecond:
        """Payload bytes per second."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of identical GPUs.

    `intra` is one GPU's link to the others of its node, `inter` all NICs of one node together,
    `wan` the uplink of one site. `interference` is the fraction by which compute slows down while
    communication of the same rank is in flight.
    """

    name: str
    gpu: GPU
    nodes: int
    gpus_per_node: int
    intra: Link
    inter: Link
    backend: Backend = "nccl"
    all_reduce: AllReduce = "auto"
    interference: float = 0.0
    sites: int = 1
    wan: Link | None = None
    price_per_gpu: UsdPerSecond | None = None

    @property
    def layout(self) -> Layout:
        """Placement of one rank per GPU."""
        return Layout(self.nodes, self.gpus_per_node)

    @property
    def nodes_per_site(self) -> int:
        """Nodes at one site."""
        return self.nodes // self.sites

    def resized(self, gpus: int) -> "Cluster":
        """The same kind of cluster with `gpus` GPUs: full nodes, or part of a single one.

        Sizes beyond `nodes` are allowed: that is the what-if. With fewer nodes than sites every
        node is a site. Raises OptionError when full nodes or equal sites cannot hold `gpus`.
        """
        per_node = min(gpus, self.gpus_per_node)
        if gpus < 1 or gpus % per_node:
            raise OptionError(
                f"{gpus} GPUs do not fill nodes of {self.gpus_per_node}; use a multiple of"
                f" {self.gpus_per_node}, or 1 to {self.gpus_per_node}"
            )
        nodes = gpus // per_node
        sites = min(self.sites, nodes)
        if nodes % sites:
            raise OptionError(
                f"{gpus} GPUs are {nodes} nodes, which do not divide into {sites} equal sites"
            )
        return replace(self, nodes=nodes, gpus_per_node=per_node, sites=sites)
