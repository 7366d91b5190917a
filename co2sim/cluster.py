"""GPUs, links and clusters: what the hardware can do, as plain numbers in SI units."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from co2sim.errors import OptionError
from co2sim.schedule import Layout
from co2sim.units import Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds, UsdPerSecond

Backend = Literal["nccl", "gloo"]
"""nccl: the collectives of a communicator run one at a time. gloo: those in flight share links."""

Communicators = Literal["group", "stream"]
"""Who has a communicator: every group, as in training frameworks, or every stream and group."""

Hops = Literal["pipelined", "in_turn"]
"""pipelined: a ring moves data inside nodes and between them at once. in_turn: one after the
other, as where a large buffer is collected inside the node before it leaves it."""

AllReduce = Literal["auto", "ring", "tree", "hierarchical"]
"""auto: what the backend picks; see `cost`."""

_MOST = 1_000_000
"""Nodes, GPUs of a node, or sites: far beyond any machine, and still quick to count."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """How fast the kernels of a training step run, as fitted to published runs.

    Matrix products attain `gemm_efficiency` of peak where arithmetic bounds them, and move their
    operands at `operand_efficiency` of the memory bandwidth where that does; those over a
    vocabulary attain `vocabulary_efficiency` of peak. `call_overhead` is what the host needs to
    issue an operation, `kernel_gap` what the GPU loses between two.
    """

    gemm_efficiency: float
    operand_efficiency: float = 1.0
    vocabulary_efficiency: float | None = None
    call_overhead: Seconds = 0.0
    kernel_gap: Seconds = 0.0

    def __post_init__(self) -> None:
        """Refuse what no GPU can be."""
        _fraction("kernels", gemm_efficiency=self.gemm_efficiency)
        _fraction("kernels", operand_efficiency=self.operand_efficiency)
        if self.vocabulary_efficiency is not None:
            _fraction("kernels", vocabulary_efficiency=self.vocabulary_efficiency)
        _not_negative(
            "kernels",
            call_overhead=self.call_overhead,
            kernel_gap=self.kernel_gap,
        )


@dataclass(frozen=True, slots=True)
class GPU:
    """One accelerator.

    `peak` is the dense speed by precision. `efficiency` lists (FLOP of an op, attained fraction of
    peak) by rising FLOP; between entries it is interpolated over log FLOP, outside it is constant.
    Where `kernels` is known, passes over blocks are costed by it and not by `efficiency`.
    """

    name: str
    memory: Bytes
    memory_bandwidth: BytesPerSecond
    peak: Mapping[str, FlopsPerSecond]
    efficiency: tuple[tuple[Flops, float], ...]
    memory_efficiency: float = 1.0
    launch_overhead: Seconds = 0.0
    kernels: KernelTimes | None = None

    def __post_init__(self) -> None:
        """Refuse what no GPU can be."""
        if not self.peak or not self.efficiency:
            raise OptionError(f"{self.name} needs a peak and an efficiency")
        _at_least_one(self.name, memory=self.memory, memory_bandwidth=self.memory_bandwidth)
        _at_least_one(self.name, **{f"peak {kind}": speed for kind, speed in self.peak.items()})
        _at_least_one(self.name, **{f"efficiency of {s} FLOP": s for s, _ in self.efficiency})
        _fraction(self.name, memory_efficiency=self.memory_efficiency)
        _fraction(self.name, **{f"efficiency at {size}": f for size, f in self.efficiency})
        _not_negative(self.name, launch_overhead=self.launch_overhead)
        if sorted(self.efficiency) != list(self.efficiency):
            raise OptionError(f"{self.name}: efficiencies must be listed by rising FLOP")


@dataclass(frozen=True, slots=True)
class Link:
    """A link, one direction: `efficiency` is the fraction of `bandwidth` that payload attains.

    Fractions of that are left to some collectives: `exchange_efficiency` to an all-to-all with its
    many small messages, `relay_efficiency` where one rank of a node both receives and sends for all
    of them, and `busy_efficiency` to all while GPUs of the node compute.
    """

    bandwidth: BytesPerSecond
    latency: Seconds = 0.0
    efficiency: float = 1.0
    exchange_efficiency: float = 1.0
    relay_efficiency: float = 1.0
    busy_efficiency: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what no link can be."""
        _at_least_one("link", bandwidth=self.bandwidth)
        _not_negative("link", latency=self.latency)
        _fraction("link", efficiency=self.efficiency)
        _fraction("link", exchange_efficiency=self.exchange_efficiency)
        _fraction("link", relay_efficiency=self.relay_efficiency)
        _fraction("link", busy_efficiency=self.busy_efficiency)

    @property
    def payload_bandwidth(self) -> BytesPerSecond:
        """Payload bytes per second."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of identical GPUs.

    `intra` is one GPU's link to the others of its node, `inter` all NICs of one node together,
    `wan` the uplink of one site. `interference` is the fraction by which compute slows down while
    communication of the same rank is in flight. `channels` is how many rings NCCL spreads a buffer
    over: twice what it finds (src/graph/connect.cc), at least one for every network card.
    `currency` is that of `price_per_gpu`.
    """

    name: str
    gpu: GPU
    nodes: int
    gpus_per_node: int
    intra: Link
    inter: Link
    backend: Backend = "nccl"
    communicators: Communicators = "group"
    channels: int = 2
    all_reduce: AllReduce = "auto"
    hops: Hops = "pipelined"
    interference: float = 0.0
    sites: int = 1
    wan: Link | None = None
    price_per_gpu: UsdPerSecond | None = None
    currency: str = "USD"

    def __post_init__(self) -> None:
        """Refuse what no cluster can be."""
        counts = {"nodes": self.nodes, "gpus_per_node": self.gpus_per_node, "sites": self.sites}
        counts["channels"] = self.channels
        for name, count in counts.items():
            if not 1 <= count <= _MOST:
                raise OptionError(f"{self.name}: {name} is {count}; it must be 1 to {_MOST}")
        _not_negative(self.name, interference=self.interference)
        _not_negative(self.name, price_per_gpu=self.price_per_gpu or 0.0)
        for where, link in (("intra", self.intra), ("wan", self.wan)):
            if link and link != Link(link.bandwidth, link.latency, link.efficiency):
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


def _at_least_one(what: str, **values: float) -> None:
    for name, value in values.items():
        if not 1 <= value < math.inf:
            raise OptionError(f"{what}: {name} is {value:g} in SI units; it must be at least 1")


def _not_negative(what: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise OptionError(f"{what}: {name} is {value}; it must be 0 or more and finite")


def _fraction(what: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value <= 1:
            raise OptionError(f"{what}: {name} is {value}; it must be above 0 and at most 1")
