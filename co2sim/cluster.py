"""GPUs, links and clusters: the hardware in plain numbers, in SI units."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from co2sim.errors import OptionError
from co2sim.quantities import (
    Bandwidth,
    Burst,
    Count,
    Factor,
    Fraction,
    Price,
    Size,
    Speed,
    Time,
    check,
)
from co2sim.ranges import at_least, fraction
from co2sim.schedule import Layout
from co2sim.units import Bytes, BytesPerSecond, Flops

Backend = Literal["nccl", "gloo"]
"""nccl: the collectives of a communicator run one at a time. gloo: those in flight share links."""

Communicators = Literal["group", "stream"]
"""Who has a communicator: every group, as in training frameworks, or every stream and group."""

Hops = Literal["pipelined", "in_turn"]
"""pipelined: a ring moves data inside nodes and between them at once. in_turn: one after the
other, as where a large buffer is collected inside the node before it leaves it."""

AllReduce = Literal["auto", "ring", "tree", "hierarchical"]
"""auto: what the backend picks; see `cost`."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """How fast the kernels of a training step run, as fitted to published runs.

    Matrix products attain `gemm_efficiency` of peak where arithmetic bounds them, and move their
    operands at `operand_efficiency` of the memory bandwidth where that does; those over a
    vocabulary attain `vocabulary_efficiency` of peak. `call_overhead` is what the host needs to
    issue an operation, `kernel_gap` what the GPU loses between two.
    """

    gemm_efficiency: Fraction
    operand_efficiency: Fraction = 1.0
    vocabulary_efficiency: Fraction | None = None
    call_overhead: Time = 0.0
    kernel_gap: Time = 0.0

    def __post_init__(self) -> None:
        """Refuse what no GPU can be."""
        check(self, "kernels")


@dataclass(frozen=True, slots=True)
class GPU:
    """One accelerator.

    `peak` is the dense speed by precision. `efficiency` lists (FLOP of an op, attained fraction of
    peak) by rising FLOP; between entries it is interpolated over log FLOP, outside it is constant.
    Where `kernels` is known, passes over blocks are costed by it and not by `efficiency`.
    """

    name: str
    memory: Size
    memory_bandwidth: Bandwidth
    peak: Mapping[str, Speed]
    efficiency: tuple[tuple[Flops, float], ...]
    memory_efficiency: Fraction = 1.0
    launch_overhead: Time = 0.0
    kernels: KernelTimes | None = None

    def __post_init__(self) -> None:
        """Refuse what no GPU can be."""
        if not self.peak or not self.efficiency:
            raise OptionError(f"{self.name} needs a peak and an efficiency")
        check(self, self.name)
        for precision, speed in self.peak.items():
            at_least(f"{self.name}: peak {precision} in FLOP/s", speed, 1)
        for size, attained in self.efficiency:
            at_least(f"{self.name}: size of an efficiency in FLOP", size, 1)
            fraction(f"{self.name}: efficiency at {size}", attained)
        if sorted(self.efficiency) != list(self.efficiency):
            raise OptionError(f"{self.name}: efficiencies must be listed by rising FLOP")


@dataclass(frozen=True, slots=True)
class Link:
    """A link, one direction: `efficiency` is the fraction of `bandwidth` that payload attains.

    Fractions of that are left to some collectives: `exchange_efficiency` to an all-to-all with its
    many small messages, `relay_efficiency` where one rank of a node both receives and sends for all
    of them, and `busy_efficiency` to all while GPUs of the node compute. `burst` is what a shaper
    lets pass at once after a pause (see `shaping`), counted as `bandwidth` is.
    """

    bandwidth: Bandwidth
    latency: Time = 0.0
    efficiency: Fraction = 1.0
    exchange_efficiency: Fraction = 1.0
    relay_efficiency: Fraction = 1.0
    busy_efficiency: Fraction = 1.0
    burst: Burst = 0.0

    def __post_init__(self) -> None:
        """Refuse what no link can be."""
        check(self, "link")

    @property
    def payload_bandwidth(self) -> BytesPerSecond:
        """Payload bytes per second."""
        return self.bandwidth * self.efficiency

    @property
    def payload_burst(self) -> Bytes:
        """Payload bytes of a burst."""
        return self.burst * self.efficiency


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of identical GPUs.

    `intra` is one GPU's link to the others of its node, `inter` all NICs of one node together,
    `wan` the uplink of one site. `interference` is the fraction by which compute slows down while
    communication of the same rank is in flight. `channels` is how many rings NCCL spreads a buffer
    over: twice what it finds (src/graph/connect.cc), at least one for every network card.
    `call_overhead` is what hosts add to every collective, however many steps it has: they launch it
    and notice its end. `currency` is that of `price_per_gpu`.
    """

    name: str
    gpu: GPU
    nodes: Count
    gpus_per_node: Count
    intra: Link
    inter: Link
    backend: Backend = "nccl"
    communicators: Communicators = "group"
    channels: Count = 2
    all_reduce: AllReduce = "auto"
    hops: Hops = "pipelined"
    interference: Factor = 0.0
    call_overhead: Time = 0.0
    sites: Count = 1
    wan: Link | None = None
    price_per_gpu: Price | None = None
    currency: str = "USD"

    def __post_init__(self) -> None:
        """Refuse what no cluster can be."""
        check(self, self.name)
        for where, link in (("intra", self.intra), ("wan", self.wan)):
            if link and link != Link(
                link.bandwidth, link.latency, link.efficiency, burst=link.burst
            ):
                raise OptionError(
                    f"{self.name}: {where} has no exchange_efficiency, relay_efficiency or"
                    " busy_efficiency other than 1; only inter has"
                )
        if self.sites > 1 and self.wan is None:
            raise OptionError(f"{self.name}: {self.sites} sites need a wan between them")
        if self.nodes % self.sites:
            raise OptionError(
                f"{self.name}: {self.nodes} nodes do not divide into {self.sites} equal sites"
            )

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
