"""Links and clusters, with their GPUs (`gpu`): the hardware in plain numbers, in SI units."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from co2sim.common.errors import OptionError
from co2sim.common.resources import remembered
from co2sim.common.units import BytesPerSecond, Flops, Seconds, UsdPerSecond
from co2sim.common.validation import (
    MAX_NODES,
    Bandwidth,
    Between,
    Count,
    Deviation,
    Fraction,
    Intensity,
    Multiple,
    Natural,
    Power,
    Price,
    Quantity,
    Size,
    Slowdown,
    Speed,
    Spread,
    Time,
    check,
    in_order,
    whole,
)
from co2sim.hardware.contract import Bill, Contract, bill
from co2sim.hardware.fabric import Fabric, Pod, network_cards, pods
from co2sim.hardware.failures import Failures
from co2sim.schedule.schedule import DType, Layout

FULLY_IDLE: Seconds = 5e-3
"""After so long a pause cores take as long to wake up as after any longer one."""


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """The burst of a shaped link: `size` bytes, counted as the bandwidth of the link is.

    They pass at once after a pause, or at `bandwidth` where cores are slow. What is longer than a
    burst loses `lag` of its further time, until it has lost what the burst gained.
    """

    size: Size
    bandwidth: Bandwidth | None = None
    lag: Slowdown = 0.0

    def __post_init__(self) -> None:
        """Refuse what no shaper can be."""
        check(self, "burst")


@dataclass(frozen=True, slots=True)
class Calls:
    """What cores add to a collective of each kind, on top of the `call_overhead` of all.

    Kinds are implemented differently: some sum up, some exchange more messages.
    """

    all_reduce: Time = 0.0
    reduce_scatter: Time = 0.0
    all_gather: Time = 0.0
    all_to_all: Time = 0.0

    def __post_init__(self) -> None:
        """Refuse what no time can be."""
        check(self, "calls")


@dataclass(frozen=True, slots=True)
class HostEffects:
    """What the cores of a machine do to collectives and computes.

    `one_machine`: all nodes are one machine, whose cores serve all collectives. Those in flight at
    once share what their latencies take of it, and the first after a pause of `fully_idle` takes
    `wake_up` longer. `one_core`: the streams of a rank share a core; those that also communicate go
    first. `call_interference` is what each collective takes from the compute beside it as it
    starts. `intra`, `inter` and `wan` are the bursts of these links.
    """

    one_machine: bool = False
    one_core: bool = False
    wake_up: Time = 0.0
    fully_idle: Between = FULLY_IDLE
    call_interference: Time = 0.0
    calls: Calls | None = None
    intra: TokenBucket | None = None
    inter: TokenBucket | None = None
    wan: TokenBucket | None = None

    def __post_init__(self) -> None:
        """Refuse what no machine can be."""
        check(self, "host")
        if self.wake_up and not self.one_machine:
            raise OptionError(
                f"host: wake_up is {self.wake_up:g} s, which is simulated only with one_machine ="
                " true"
            )

    @property
    def depends_on_others(self) -> bool:
        """Whether an op takes longer or shorter by what else runs: `calls` alone do not do that."""
        bursts = self.intra, self.inter, self.wan
        return self.one_machine or self.one_core or self.call_interference > 0 or any(bursts)


_PRECISIONS = (DType.BF16, DType.FP16, DType.FP32)
"""Training precisions, the default first."""
_SPEED = Quantity(unit="FLOP/s", least=1)
_WORK = Quantity(unit="FLOP", least=1)
_LARGEST: Flops = 1e27  # more than a step of any training
_ATTAINED = Quantity(most=1)
"""Of the numbers that stand in tables."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """How fast the kernels of a training step run, as fitted to published runs.

    Matrix products attain `gemm_efficiency` of peak where arithmetic bounds them, and move their
    operands at `operand_efficiency` of the memory bandwidth where that does; those over a
    vocabulary attain `vocabulary_efficiency` of peak. Flash attention attains
    `attention_efficiency` of it, counting the FLOP that it executes: one fraction, or fractions by
    length of the sequences, between which it is interpolated over log length (None: not known, and
    taken to be that of other products). Of a sequence as long as `attention_half_length` it attains
    half of that. Its backward pass attains `attention_backward` of it:
    between 0.58 and 0.66 in Triton of 2023 (triton-lang/triton pull request 1917). `call_overhead`
    is what the host needs to issue an operation, `kernel_gap` what the GPU loses between two, and
    `product_start` what every matrix product takes at least. Elementwise kernels move `elementwise`
    times the least traffic: unfused ones read and write what lies between them, too. Products in
    fp8 and below attain `narrow_efficiency` of their peak (None: `gemm_efficiency`), and those of
    experts the fraction `grouped` of what others do.
    """

    gemm_efficiency: Fraction
    operand_efficiency: Fraction = 1.0
    product_start: Time = 0.0
    elementwise: Multiple = 1.0
    vocabulary_efficiency: Fraction | None = None
    attention_efficiency: float | tuple[tuple[int, float], ...] | None = None
    attention_half_length: Natural = 0
    attention_backward: Fraction = 1.0
    call_overhead: Time = 0.0
    kernel_gap: Time = 0.0
    narrow_efficiency: Fraction | None = None
    grouped: Fraction = 1.0

    def __post_init__(self) -> None:
        """Refuse what no GPU can be."""
        check(self, "kernels")
        name, efficiency = "kernels: attention_efficiency", self.attention_efficiency
        if efficiency is None:
            return
        points = efficiency if isinstance(efficiency, tuple) else ((1, efficiency),)
        for length, attained in points:
            whole(f"{name}: length", length, 1)
            _ATTAINED.checked(f"{name} at {length}", attained)
        if not points or sorted(dict(points)) != [length for length, _ in points]:
            raise OptionError(f"{name} must be listed by rising length, at least one")

    def attention(self, length: int) -> float:
        """Fraction of peak that flash attention over sequences of `length` attains."""
        efficiency = self.attention_efficiency
        if not isinstance(efficiency, tuple):
            most = self.gemm_efficiency if efficiency is None else efficiency
            return most * length / (length + self.attention_half_length)
        lengths = [math.log(point) for point, _ in efficiency]
        return float(np.interp(math.log(length), lengths, [attained for _, attained in efficiency]))


@dataclass(frozen=True, slots=True)
class ProductSpeed:
    """How fast a GPU multiplies matrices in 16 bits, alone and cool.

    Arithmetic attains `efficiency` of peak, operands and results move at `operand_efficiency` of
    the memory bandwidth, and every product takes `start` more. In a training, where power and heat
    bound the clock, arithmetic attains `sustained` of that. In fp8 and below arithmetic attains
    `narrow` of its peak (None: as much as in 16 bits).
    """

    efficiency: Fraction
    operand_efficiency: Fraction = 1.0
    start: Time = 0.0
    sustained: Fraction = 1.0
    narrow: Fraction | None = None

    def __post_init__(self) -> None:
        """Refuse what no GPU can be."""
        check(self, "products")


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """What one implementation of flash attention attains on a GPU, as fractions of peak.

    It approaches `forward` and `backward` on long sequences, and attains half of that where they
    have `half_length` tokens. FLOP are those that it executes: half of the scores if causal.
    """

    forward: Fraction
    backward: Fraction
    half_length: Natural = 0

    def __post_init__(self) -> None:
        """Refuse what no kernel can attain."""
        check(self, "attention")


def one_efficiency(attained: float) -> tuple[tuple[Flops, float], ...]:
    """The table of a GPU whose passes of every size attain the same fraction of peak."""
    return ((1.0, attained), (_LARGEST, attained))


LEAST_CAP = 0.6
"""The fraction of its limit down to which a GPU keeps what `_OF_POWER` says: it does at 0.7, and no
more at 0.4."""

_OF_POWER = 0.61
"""By which power of its limit the speed of a GPU's products goes down. An MI300X of 750 W attains
708 TFLOP/s in bf16 and 1,273 in fp8, an MI325X of 1,000 W, with the same multiprocessors, 843 and
1,519 (ROCm blogs, measuring-max-achievable-flops-part2, table 1). It leaves 0.80 of the products at
0.7 of the limit and 0.57 at 0.4; whole trainings on a V100, of which products are a part, kept 0.88
and 0.89, and 0.47 and 0.53 (ml-energy/zeus 75a8b93, trace/summary_power_v100.csv). So it is too
fast far below the limit."""


@dataclass(frozen=True, slots=True)
class GPU:
    """One accelerator.

    `peak` is the dense speed by precision; of those below 16 bits it is that of matrix products
    alone. `efficiency` lists (FLOP of an op, attained fraction of peak) by rising FLOP; between
    entries it is interpolated over log FLOP, outside it is constant.
    Where `kernels` is known, passes over blocks are costed by it and not by `efficiency`.
    `products` and `attention`, by the name of its implementation, say how fast its kernels are: a
    software stack makes `kernels` of them (`models.stack`). `tdp` is its thermal design power,
    `power_cap` the limit that an operator set below it, which lowers the clock (`clock`), and
    `idle_power` what it draws while its processes wait (`power`).
    `generation` names the first GPU with its multiprocessors, such as "H100" for an H200: what was
    published of that GPU says how far predictions are off. `stack` names the software stack whose
    kernels these are; empty where a file of the user's states them itself, or none are known.
    `host_link` is its link to the host, one direction (`offloading`).
    """

    name: str
    memory: Size
    memory_bandwidth: Bandwidth
    peak: Mapping[str, Speed]
    efficiency: tuple[tuple[Flops, float], ...]
    memory_efficiency: Fraction = 1.0
    launch_overhead: Time = 0.0
    kernels: KernelTimes | None = None
    products: ProductSpeed | None = None
    attention: Mapping[str, AttentionSpeed] = field(default_factory=dict)
    tdp: Power | None = None
    idle_power: Power | None = None
    generation: str | None = None
    stack: str = ""
    host_link: Bandwidth | None = None
    power_cap: Power | None = None

    def __post_init__(self) -> None:
        """Refuse what no GPU can be."""
        if not self.precisions or not (self.efficiency or self.products):
            kinds = ", ".join(_PRECISIONS)
            raise OptionError(f"{self.name} needs a peak of {kinds}, and an efficiency or products")
        check(self, self.name)
        for precision, speed in self.peak.items():
            _SPEED.checked(f"{self.name}: peak {precision}", speed)
        for size, attained in self.efficiency:
            _WORK.checked(f"{self.name}: size of an efficiency", size)
            _ATTAINED.checked(f"{self.name}: efficiency at {size}", attained)
        if sorted(self.efficiency) != list(self.efficiency):
            raise OptionError(f"{self.name}: efficiencies must be listed by rising FLOP")
        in_order(self, self.name, "idle_power", "power_cap", "tdp")
        if self.power_cap is not None and self.tdp is None:
            raise OptionError(f"{self.name}: a power_cap needs its tdp, which is not known")

    @property
    def is_capped_low(self) -> bool:
        """Whether `clock` is that of a power cap for which it is too fast."""
        cap, limit = self.power_cap, self.tdp
        return cap is not None and limit is not None and cap < LEAST_CAP * limit

    @property
    def clock(self) -> float:
        """What a power cap leaves of the speed of products and of attention; 1 without one."""
        if self.power_cap is None or self.tdp is None:
            return 1.0
        return float((self.power_cap / self.tdp) ** _OF_POWER)

    @property
    def known_efficiency(self) -> tuple[tuple[Flops, float], ...]:
        """The table of efficiencies; without one, that of large matrix products at every size."""
        if self.efficiency or self.products is None:
            return self.efficiency
        attained = self.products.efficiency * self.products.sustained
        return one_efficiency(attained)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those of a whole job, from 16 bits on, the preferred one first."""
        return tuple(str(kind) for kind in _PRECISIONS if kind in self.peak)

    @property
    def preferred_precision(self) -> str:
        """What it trains in unless a user says otherwise: bf16, else fp16, else fp32."""
        return self.precisions[0]


__all__ = ["GPU", "Cluster", "KernelTimes", "Link", "Scatter"]

Backend = Literal["nccl", "gloo"]
"""nccl: the collectives of a communicator run one at a time. gloo: those in flight share links."""

Communicators = Literal["group", "stream"]
"""Who has a communicator: every group, as in training frameworks, or every stream and group."""

Hops = Literal["pipelined", "in_turn"]
"""pipelined: a ring moves data inside nodes and between them at once. in_turn: one after the
other, as where a large buffer is collected inside the node before it leaves it."""

AllReduce = Literal["auto", "ring", "tree", "hierarchical"]
"""auto: what the backend picks; see `simulation.costs`."""

Protocols = Literal["simple", "nvlink", "pci"]
"""Which protocols of NCCL carry a message. simple: always Simple, whose hops take the `latency` of
the links. nvlink, pci: the fastest of those that nodes with such links have; see `protocols`."""

_layout = lru_cache(64)(Layout)
"""The same one for the same numbers: every collective that is costed asks for it."""


Topology = Literal["switch", "mesh"]
"""How the GPUs of a node are linked; see `Link`."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link, one direction: `efficiency` is the fraction of `bandwidth` that payload attains.

    Fractions of that are left to some collectives: `exchange_efficiency` to an all-to-all with its
    many small messages, `relay_efficiency` where one rank of a node both receives and sends for all
    of them, and `busy_efficiency` to all while GPUs of the node compute. With every doubling of its
    nodes a ring takes `ring_loss` of its time longer, of the time on 400 Gbit/s where `bandwidth`
    is less: the slowest link, or the busiest switch on its way, holds all of it back.

    `topology` is that of the links inside a node. switch: any GPU may use all of its bandwidth to
    any others. mesh: it has an equal part to each of the others, so that few of them use little.
    """

    bandwidth: Bandwidth
    latency: Time = 0.0
    efficiency: Fraction = 1.0
    exchange_efficiency: Fraction = 1.0
    relay_efficiency: Fraction = 1.0
    busy_efficiency: Fraction = 1.0
    ring_loss: Slowdown = 0.0
    topology: Topology = "switch"

    def __post_init__(self) -> None:
        """Refuse what no link can be."""
        check(self, "link")

    @property
    def payload_bandwidth(self) -> BytesPerSecond:
        """Payload bytes per second."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, slots=True)
class Scatter:
    """How far single times were off when the cluster was measured.

    Standard deviations of log(predicted / measured), of kernels and of collectives.
    """

    compute: Deviation
    communication: Deviation

    def __post_init__(self) -> None:
        """Refuse what is no standard deviation."""
        check(self, "scatter")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of identical GPUs.

    `intra` is one GPU's link to the others of its node, `inter` all NICs of one node together,
    `wan` the uplink of one site, and `fabric` the switches between nodes. `interference` is the
    fraction by which compute slows down while communication of the same rank is in flight.
    `channels` is how many rings NCCL spreads a buffer over: twice what it finds
    (src/graph/connect.cc), at least one for every network card. `network_overhead` is what the host
    of a node needs to post a message (`protocols`), and `call_overhead` what hosts add to every
    collective, however many steps it has: they launch it and notice its end. `host` is what the
    cores of a machine add that serves all ranks itself, as in a lab. `stack` is the software stack
    of the catalog that runs on it unless another is asked for; empty: the default of all.
    `currency` is that of `price_per_gpu` and of the `contract`, which says what is billed beside
    hours of the GPUs that train. `scatter` is known where a probe measured the cluster, `failures`
    where it is known how often its parts fail. Where that is not known, trainings of more than a
    week count those of published jobs if `count_failures` says so.

    Nodes differ: the compute time of each has a lognormal factor of mean 1 with sigma `node_spread`
    for as long as the job runs, and a new one with sigma `step_spread` in every step. All that meet
    in a collective wait for the expected slowest (`spread`).

    `node_power` is what a node draws but for its GPUs, `pue` what the site draws for each watt of
    the nodes, `grid_intensity` the CO2 equivalents of its electricity. Prices and intensities have
    a range, `_low` to `_high`, where one is published.

    `host_memory_bandwidth` is a GPU's part of that of its host's memory. `host_link_efficiency` is
    the fraction of the GPU's `host_link` that transfers attain, `host_optimizer_efficiency` that of
    the memory bandwidth which an optimizer on the host attains (`offloading`).
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
    protocols: Protocols = "simple"
    network_overhead: Time = 0.0
    interference: Slowdown = 0.0
    node_spread: Spread = 0.0
    step_spread: Spread = 0.0
    call_overhead: Time = 0.0
    sites: Count = 1
    wan: Link | None = None
    fabric: Fabric | None = None
    price_per_gpu: Price | None = None
    price_low: Price | None = None
    price_high: Price | None = None
    currency: str = "USD"
    contract: Contract | None = None
    node_power: Power | None = None
    pue: Multiple | None = None
    grid_intensity: Intensity | None = None
    grid_intensity_low: Intensity | None = None
    grid_intensity_high: Intensity | None = None
    scatter: Scatter | None = None
    failures: Failures | None = None
    count_failures: bool = True
    host: HostEffects | None = None
    host_memory_bandwidth: Bandwidth | None = None
    host_link_efficiency: Fraction | None = None
    host_optimizer_efficiency: Fraction | None = None
    stack: str = ""

    def __post_init__(self) -> None:
        """Refuse what no cluster can be."""
        check(self, self.name)
        in_order(self, self.name, "price_low", "price_per_gpu", "price_high")
        if self.contract and self.price_per_gpu is None:
            raise OptionError(
                f"{self.name}: a contract needs the price of an hour; give price_per_gpu, such as"
                " '2.5 USD/h'"
            )
        ends = "grid_intensity_low", "grid_intensity", "grid_intensity_high"
        in_order(self, self.name, *ends)
        for where, link in (("intra", self.intra), ("wan", self.wan)):
            if link and replace(link, topology="switch") != Link(
                link.bandwidth, link.latency, link.efficiency
            ):
                raise OptionError(
                    f"{self.name}: {where} has no exchange_efficiency, relay_efficiency or"
                    " busy_efficiency other than 1, and no ring_loss, rail or spine; only"
                    " inter has"
                )
        assert self.pods is not None  # which refuses what cannot be wired
        if self.host and self.host.wan and self.wan is None:
            raise OptionError(
                f"{self.name}: the host has a burst of wan, but the cluster has no wan"
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
        return _layout(self.nodes, self.gpus_per_node, self.sites)

    @property
    def cards(self) -> int:
        """Network cards of a node."""
        return network_cards(self.fabric, self.inter.bandwidth, self.gpus_per_node)

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The tiers of switches that have uplinks, from the nodes on."""
        if self.fabric is None:
            return ()
        return pods(self.fabric, self.inter.bandwidth, self.cards)

    @property
    def nodes_per_site(self) -> int:
        """Nodes at one site."""
        return self.nodes // self.sites

    def bill(self, seconds: Seconds, price: UsdPerSecond | None = None) -> Bill | None:
        """What all GPUs are billed for a time, at `price` or the cluster's; None without one."""
        price = self.price_per_gpu if price is None else price
        if price is None:
            return None
        return bill(price * self.spot, self.contract, self.layout.world_size, seconds)

    @property
    def spot(self) -> float:
        """The price of nodes that may be taken away, over that of nodes that stay: 1 for these."""
        failures = self.failures
        if failures is None or failures.preemption is None or self.contract is not None:
            return 1.0
        return failures.spot_price or 1.0

    def resized(self, gpus: int) -> "Cluster":
        """The same kind of cluster with `gpus` GPUs: full nodes, or part of a single one.

        Sizes beyond `nodes` are allowed: that is the what-if. What one site can hold is at one
        site. Where the contract is about the whole, that stays billed. Raises OptionError when full
        nodes or equal sites cannot hold `gpus`.
        """
        return self._resized(gpus)

    @remembered(objects=1, most=256)
    def _resized(self, gpus: int) -> "Cluster":
        per_node = min(gpus, self.gpus_per_node)
        if gpus < 1 or gpus % per_node:
            raise OptionError(
                f"{gpus} GPUs do not fill nodes of {self.gpus_per_node}; use a multiple of"
                f" {self.gpus_per_node}, or 1 to {self.gpus_per_node} (nodes that are used in part:"
                " --set gpus_per_node=N)"
            )
        nodes = gpus // per_node
        if nodes > MAX_NODES:
            raise OptionError(
                f"{gpus:,} GPUs are {nodes:,} nodes of {per_node}; at most {MAX_NODES:,} nodes"
                " can be simulated"
            )
        sites = 1 if nodes <= self.nodes // self.sites else self.sites
        if nodes % sites:
            raise OptionError(
                f"{gpus} GPUs are {nodes} nodes, which do not divide into {sites} equal sites"
            )
        sizes = nodes, per_node, sites
        if sizes == (self.nodes, self.gpus_per_node, self.sites):
            return self
        intra = self.intra
        if intra.topology == "mesh" and 1 < per_node < self.gpus_per_node:
            share = (per_node - 1) / (self.gpus_per_node - 1)
            intra = replace(intra, bandwidth=intra.bandwidth * share)
        contract = self.contract
        if contract and contract.whole:
            whole = max(contract.least_gpus, self.layout.world_size)
            contract = replace(contract, least_gpus=whole)
        return replace(
            self,
            nodes=nodes,
            gpus_per_node=per_node,
            sites=sites,
            intra=intra,
            contract=contract,
        )
