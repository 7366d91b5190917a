"""What ops cost on a cluster: pure functions to seconds, and to bytes on each link.

The cost of a collective is its latency steps, and the bytes that it pushes through its links.
Alone it takes latency + the largest of bytes / bandwidth; `network` shares links among several.

Bytes per link of a ring over m ranks with a buffer of S bytes: (m-1)/m S for all_gather and
reduce_scatter, twice that for all_reduce (Patarasuk and Yuan 2009); the ring leaves each node, and
each site, once. Latency steps follow NCCL's model, and so does the choice of a protocol
(`protocols`); switches between nodes may be narrow (`crossings`). A broadcast goes once
around all ranks from its root, and a reduction to it: every hop waits for a piece before it passes
it on. Roots are costed as if they were the first of their node.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from co2sim.common.errors import OptionError, nearest
from co2sim.common.resources import remembered
from co2sim.common.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds
from co2sim.hardware.cluster import GPU, AllReduce, Cluster, Hops, KernelTimes, Protocols
from co2sim.hardware.offloading import speed
from co2sim.schedule.schedule import (
    PEERS,
    Collective,
    Compute,
    DType,
    FusedAttention,
    Gemm,
    Kernels,
    Kind,
    Schedule,
)
from co2sim.schedule.token_routing import TokenRouting
from co2sim.simulation import token_bucket
from co2sim.simulation.crossings import (
    Crossing,
    Placement,
    crossings,
    placement,
    uncongested,
    uplinks,
)

Algorithm = Literal["ring", "tree"]
Name = Literal["simple", "ll128", "ll"]

_NAMES: dict[Protocols, tuple[Name, ...]] = {
    "simple": ("simple",),
    "pci": ("simple", "ll"),
    "nvlink": ("simple", "ll128", "ll"),
}
"""LL128 needs stores of 128 bytes to arrive whole: NVLink only."""

_START: dict[Algorithm, dict[Name, Seconds]] = {
    "ring": {"simple": 8.4e-6, "ll128": 14.0e-6, "ll": 6.6e-6},
    "tree": {"simple": 8.4e-6, "ll128": 14.0e-6, "ll": 6.8e-6},
}
_HOP: dict[str, dict[Algorithm, dict[Name, Seconds]]] = {
    "nvlink": {
        "ring": {"simple": 3.4e-6, "ll128": 1.9e-6, "ll": 0.6e-6},
        "tree": {"simple": 4.0e-6, "ll128": 1.25e-6, "ll": 0.6e-6},
    },
    "pci": {
        "ring": {"simple": 5.7e-6, "ll128": 2.5e-6, "ll": 1.0e-6},
        "tree": {"simple": 4.0e-6, "ll128": 1.9e-6, "ll": 1.0e-6},
    },
    "network": {
        "ring": {"simple": 14.0e-6, "ll128": 4.0e-6, "ll": 2.7e-6},
        "tree": {"simple": 14.0e-6, "ll128": 8.5e-6, "ll": 5.0e-6},
    },
}
_SHARE: dict[Algorithm, dict[Name, float]] = {
    "ring": {"simple": 1.0, "ll128": 0.92, "ll": 0.5},
    "tree": {"simple": 1.0, "ll128": 120 / 128, "ll": 1 / 3.8},
}
_LL_MOST: dict[bool, BytesPerSecond] = {False: 39.0e9, True: 20.4e9}
"""What LL attains on up to two nodes, and on more: the smallest of the table's rows."""
_RING_LOSS_FROM = 50e9
"""Bytes/s of a node, 400 Gbit/s: the slowest links of the runs that the default of `ring_loss` was
fitted to. Slower links lose no more for each byte than these (docs/validation.md, "Slow links").
"""
_POSTS = 3
"""Posts to the network that a step of Simple takes; one in the other protocols."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """One of them on a cluster: `start` once, then the latency of each hop by the link it crosses.

    `share` is what payload attains of the payload bandwidth of a link, `most` of any.
    """

    start: Seconds
    intra: Seconds
    inter: Seconds
    wan: Seconds
    share: float
    most: BytesPerSecond | None = None


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """One group's collective on its links, one direction.

    `intra` is bytes through each member's link inside the node, `inter` through the NICs of each
    node, `wan` through the uplink of each site; `sent` is what each member puts on any of them.
    `members_per_node` and `members_per_site` count the group's ranks there. `inter_efficiency` is
    the fraction of the payload bandwidth of the NICs that these messages attain, `share` that of
    all links, by their protocol. `step` is the one of the latency steps after which bytes flow: it
    matters where links have bursts (`token_bucket`). `call` is the latency that hosts add.
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

    def bytes_per_link(self, cluster: Cluster) -> tuple[Bytes, Bytes, Bytes]:
        """Bytes on links of a GPU, of a node and of a site, with all groups of the kind."""
        on_node, on_site = self.groups(cluster)
        return self.intra, self.inter * on_node, self.wan * on_site

    def link_times(self, cluster: Cluster) -> tuple[Seconds, Seconds, Seconds]:
        """Time that the bytes need on the links of a GPU, of a node and of a site, each alone."""
        wan = cluster.wan.payload_bandwidth if cluster.wan else math.inf
        nics = cluster.inter.payload_bandwidth * self.inter_efficiency
        intra, inter, far = self.bytes_per_link(cluster)
        share = self.share
        return (
            intra / share / cluster.intra.payload_bandwidth,
            inter / share / nics,
            far / share / wan,
        )

    def tier_times(self, cluster: Cluster) -> list[Seconds]:
        """Time that the bytes need on the uplinks of a pod of each tier that they cross."""
        return [
            (1 + crossing.lost) * crossing.bytes / self.share / uplinks(crossing.pod, cluster)
            for crossing in self.tiers
        ]

    def bound_by(self, cluster: Cluster) -> int:
        """The link that takes longest, as its place in `link_times`: it bounds the collective."""
        times = self.link_times(cluster)
        return times.index(max(times))

    def exposed_latency(self, cluster: Cluster) -> Seconds:
        """The part of the latency that comes on top of the time of the bytes."""
        if self.step is None or cluster.host is None:
            return self.latency
        shaper = token_bucket.shapers(cluster)[self.bound_by(cluster)]
        share = token_bucket.hidden_share(shaper, self.step)
        return self.latency - share * (self.latency - self.call - self.step)

    def duration_alone(self, cluster: Cluster) -> Seconds:
        """Time when nothing but the groups of the same kind is in flight, after a pause."""
        times = self.link_times(cluster)
        longest = max(*times, *self.tier_times(cluster))
        if cluster.host is None:
            return self.latency + longest
        on = token_bucket.shapers(cluster)
        return token_bucket.alone(self.latency, self.exposed_latency(cluster), times, longest, on)


PIECE: Bytes = 2.0**19
"""What a hop of a chain holds of a buffer before it passes it on, in each of its channels.

NCCL: a step of the Simple protocol is an eighth (NCCL_STEPS, src/include/device.h) of its buffer of
4 MiB (NCCL_BUFFSIZE), and broadcasts and reductions send single steps (BROADCAST_SLICESTEPS and
REDUCE_SLICESTEPS, src/include/collectives.h). Over Gloo, realrun's chains pass on as much.
"""


def cost_of(work: Collective, cluster: Cluster) -> CollectiveCost:
    """CollectiveCost of `work` for one group of the cluster."""
    cost, call = _in_mesh(_cost_without_calls(work, cluster), cluster), cluster.call_overhead
    if cluster.host and cluster.host.calls:
        call += getattr(cluster.host.calls, work.kind, 0.0)
    if not call or not cost.sent:  # a rank alone makes no call
        return cost
    return replace(cost, latency=cost.latency + call, call=call)


def _in_mesh(cost: CollectiveCost, cluster: Cluster) -> CollectiveCost:
    """The cost where members reach each other by a part of their links; bytes count as more."""
    there, here = cluster.gpus_per_node, cost.members_per_node
    if cluster.intra.topology == "switch" or not 1 < here < there:
        return cost
    return replace(cost, intra=cost.intra * (there - 1) / (here - 1))


def _cost_without_calls(work: Collective, cluster: Cluster) -> CollectiveCost:
    ranks = placement(work.group, cluster)
    size = work.bytes
    if ranks.members == 1:
        return CollectiveCost(0.0, 0.0, 0.0, 0.0, 0.0, 1, 1)
    if work.group.led:
        return _leaders_only(replace(work, group=replace(work.group, name=PEERS.name)), cluster)
    match work.kind:
        case Kind.ALL_TO_ALL:
            return _exchange(work, ranks, cluster)
        case Kind.BROADCAST | Kind.REDUCE:
            return _chain(size, ranks, cluster)
        case Kind.ALL_GATHER | Kind.REDUCE_SCATTER:
            pushed = size * (ranks.members - 1) / ranks.members
            protocols = _candidates("ring", ranks, cluster, cluster.protocols)
            rings = [_ring(pushed, 1, ranks, cluster, each) for each in protocols]
            return _quickest(rings, cluster)
    return _all_reduce(size, cluster.all_reduce, ranks, cluster)


def _candidates(
    algorithm: Algorithm, ranks: Placement, cluster: Cluster, protocols: Protocols
) -> list[Protocol]:
    """The protocols, of `protocols`, that a collective among `ranks` may take.

    Hops take as long as the links of the cluster say for a ring by Simple, others in proportion.
    In rings that leave the node every hop takes at least as long as the host posts a message; with
    one rank in each node all hops cross the network, and take as long as those of a tree.
    """
    wan = cluster.wan.latency if cluster.wan else cluster.inter.latency
    if cluster.backend != "nccl" or protocols == "simple":
        return [Protocol(0.0, cluster.intra.latency, cluster.inter.latency, wan, 1.0)]
    candidates = []
    for name in _NAMES[protocols]:
        outside: Algorithm = "tree" if ranks.nodes == ranks.members else algorithm
        far = _HOP["network"][outside][name] / _HOP["network"]["ring"]["simple"]
        near = _HOP[protocols][algorithm][name] / _HOP[protocols]["ring"]["simple"]
        intra = cluster.intra.latency * near
        if algorithm == "ring" and ranks.nodes > 1:
            posts = _POSTS if name == "simple" else 1
            intra = max(intra, posts * cluster.network_overhead)
        candidates.append(
            Protocol(
                _START[algorithm][name],
                intra,
                cluster.inter.latency * far,
                wan * far,
                _SHARE[algorithm][name],
                _LL_MOST[ranks.nodes > 2] if name == "ll" else None,  # noqa: PLR2004 - see there
            )
        )
    return candidates


def _simple(ranks: Placement, cluster: Cluster) -> Protocol:
    """The only one of what is neither a ring nor a tree."""
    (protocol,) = _candidates("ring", ranks, cluster, "simple")
    return protocol


def _quickest(candidates: list[CollectiveCost], cluster: Cluster) -> CollectiveCost:
    """What takes the least time alone, as NCCL chooses."""
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda cost: cost.duration_alone(cluster))


def _with_protocol(cost: CollectiveCost, protocol: Protocol, cluster: Cluster) -> CollectiveCost:
    """The cost of a message by a protocol that may not fill the links."""
    if not protocol.start and protocol.share == 1:
        return cost
    share = protocol.share
    if protocol.most is not None:  # of the bandwidth of the bus: of what every rank pushes
        share = min(share, protocol.most * max(cost.link_times(cluster)) / cost.sent)
    return replace(cost, latency=cost.latency + protocol.start, share=share)


def _leaders_only(work: Collective, cluster: Cluster) -> CollectiveCost:
    """What the first ranks of all nodes do: as peers would, but one group has NICs and uplinks.

    With several ranks in a node it enters and leaves the node at the same one. Of groups with a
    stride there are as many in a node.
    """
    cost = _cost_without_calls(work, cluster)
    g = cluster.gpus_per_node // work.group.stride
    relay = cluster.inter.relay_efficiency if g > 1 else 1.0
    return replace(
        cost,
        members_per_node=g,
        members_per_site=g * cluster.nodes_per_site,
        inter_efficiency=cost.inter_efficiency * relay,
        tiers=tuple(
            replace(tier, bytes=tier.bytes / g, groups=tier.groups // g) for tier in cost.tiers
        ),
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
    ranks: Placement,
    cluster: Cluster,
    protocol: Protocol,
    hops: Hops | None = None,
) -> CollectiveCost:
    """Every member pushes `pushed` bytes to the next; the ring leaves each node and site once.

    All of its links are as slow as the slowest: the more nodes, the more it loses, in time for each
    byte as on links of 400 Gbit/s where they are slower.
    """
    steps = _steps(
        ranks.members - ranks.nodes, ranks.nodes - ranks.sites, ranks.sites - 1, protocol
    )
    intra = pushed if ranks.per_node > 1 else 0.0
    before = 0.0
    if (hops or cluster.hops) == "in_turn" and ranks.nodes > 1:
        before, intra = intra / cluster.intra.payload_bandwidth, 0.0
    share = min(cluster.inter.bandwidth / _RING_LOSS_FROM, 1.0)
    lost = share * cluster.inter.ring_loss * math.log2(ranks.nodes)
    tiers = tuple([replace(tier, lost=lost) for tier in crossings(cluster, ranks, pushed)])
    cost = CollectiveCost(
        latency=passes * steps + before,
        intra=intra,
        inter=pushed if ranks.nodes > 1 else 0.0,
        wan=pushed if ranks.sites > 1 else 0.0,
        sent=pushed,
        members_per_node=ranks.per_node,
        members_per_site=ranks.per_site,
        inter_efficiency=uncongested(tiers) / (1 + lost),
        tiers=tiers,
        step=_first_step(ranks, protocol) if cluster.backend == "gloo" else None,
    )
    return _with_protocol(cost, protocol, cluster)


def _first_step(ranks: Placement, protocol: Protocol) -> Seconds:
    """The latency of one message to the farthest member."""
    return _steps(ranks.nodes == 1, ranks.nodes > 1 and ranks.sites == 1, ranks.sites > 1, protocol)


def _chain(size: Bytes, ranks: Placement, cluster: Cluster) -> CollectiveCost:
    """A buffer passes every hop from end to end, in pieces; the slowest hop is busy with it all."""
    piece = min(size, PIECE * (cluster.channels if cluster.backend == "nccl" else 1))
    wan = cluster.wan.payload_bandwidth if cluster.wan else math.inf
    hops = (
        [piece / cluster.intra.payload_bandwidth] * (ranks.members - ranks.nodes)
        + [piece / cluster.inter.payload_bandwidth] * (ranks.nodes - ranks.sites)
        + [piece / wan] * (ranks.sites - 1)
    )
    ring = _ring(size, 1, ranks, cluster, _simple(ranks, cluster), hops="pipelined")
    return replace(ring, latency=ring.latency + sum(hops) - max(hops), step=None)


def _pairwise(size: Bytes, ranks: Placement, cluster: Cluster) -> CollectiveCost:
    """Every member sends an equal part of its buffer to each other one, one after the other."""
    m, k, q = ranks.members, ranks.per_node, ranks.per_site
    protocol = _simple(ranks, cluster)
    inter = size * k * (m - k) / m
    tiers = crossings(cluster, ranks, inter, exchanged=size)
    return CollectiveCost(
        latency=_steps(k - 1, q - k, m - q, protocol),
        intra=size * (k - 1) / m,
        inter=inter,
        wan=size * q * (m - q) / m,
        sent=size * (m - 1) / m,
        members_per_node=k,
        members_per_site=q,
        inter_efficiency=cluster.inter.exchange_efficiency * uncongested(tiers),
        tiers=tiers,
        step=_first_step(ranks, protocol) if cluster.backend == "gloo" else None,
    )


def _exchange(work: Collective, ranks: Placement, cluster: Cluster) -> CollectiveCost:
    if work.routed and work.routed.by_node and ranks.nodes > 1:
        return _by_node(work.routed, work.bytes, ranks, cluster)
    return _pairwise(work.bytes, ranks, cluster)


def _by_node(
    routed: TokenRouting, size: Bytes, ranks: Placement, cluster: Cluster
) -> CollectiveCost:
    """Tokens cross the network once for every node with some of their experts, as a pipeline.

    A member sends to those with its place on other nodes; they pass a token on inside the node, to
    each of its experts there. Both at once: arXiv 2412.19437, section 3.2.2. All nodes are taken to
    be as busy as the busiest member, but a node gets a token once at most.
    """
    k, q = ranks.per_node, ranks.per_site
    apart = _pairwise(size, ranks, cluster)
    crossing = min(routed.nodes(ranks.nodes), ranks.nodes / routed.load) / routed.active
    intra, inter = size * (k - 1) / k, apart.inter * crossing
    return replace(
        apart,
        latency=_steps(k - 1, q // k - 1, ranks.nodes - q // k, _simple(ranks, cluster)),
        intra=intra,
        inter=inter,
        wan=apart.wan * crossing,
        sent=intra + inter / k,
        tiers=tuple(
            replace(tier, unit=tier.unit * crossing, bytes=tier.bytes * crossing)
            for tier in apart.tiers
        ),
    )


def _all_reduce(
    size: Bytes, algorithm: AllReduce, ranks: Placement, cluster: Cluster
) -> CollectiveCost:
    """An all-reduce by one of its algorithms.

    ring: around all ranks, twice. tree: up and down two trees of nodes (Sanders, Speck and Traeff
    2009). hierarchical: in the node, among peers, in the node, as a pipeline. auto is what the
    backend does: NCCL takes the faster of ring and tree, Gloo the ring.
    """
    if algorithm == "auto":
        names: tuple[AllReduce, ...] = ("ring", "tree") if cluster.backend == "nccl" else ("ring",)
        candidates = [_all_reduce(size, name, ranks, cluster) for name in names]
        return _quickest(candidates, cluster)
    pushed = 2 * size * (ranks.members - 1) / ranks.members
    if algorithm == "ring":
        protocols = _candidates("ring", ranks, cluster, cluster.protocols)
        return _quickest([_ring(pushed, 2, ranks, cluster, each) for each in protocols], cluster)
    if algorithm == "tree":
        protocols = _candidates("tree", ranks, cluster, cluster.protocols)
        trees = [_tree(size, pushed, ranks, cluster, each) for each in protocols]
        return _quickest(trees, cluster)
    protocol = _simple(ranks, cluster)
    between = 2 * size * (ranks.nodes - 1) / ranks.nodes
    steps = _steps(ranks.per_node - 1, ranks.nodes - ranks.sites, ranks.sites - 1, protocol)
    tiers = crossings(cluster, ranks, between)
    return replace(
        _ring(pushed, 2, ranks, cluster, protocol),
        latency=2 * steps,
        intra=2 * size * (ranks.per_node - 1) / ranks.per_node,
        inter=between,
        wan=between if ranks.sites > 1 else 0.0,
        inter_efficiency=uncongested(tiers),
        tiers=tiers,
    )


def _tree(
    size: Bytes, pushed: Bytes, ranks: Placement, cluster: Cluster, protocol: Protocol
) -> CollectiveCost:
    depth, far = (math.ceil(math.log2(n)) for n in (ranks.nodes // ranks.sites, ranks.sites))
    out = _tree_out(size, ranks.nodes)
    tiers = crossings(cluster, ranks, out)
    cost = replace(
        _ring(pushed, 2, ranks, cluster, protocol),
        share=1.0,
        latency=2 * _steps(ranks.per_node - 1, depth, far, protocol),
        intra=2 * size if ranks.per_node > 1 else 0.0,
        inter=out,
        wan=_tree_out(size, ranks.sites),
        inter_efficiency=uncongested(tiers),
        tiers=tiers,
    )
    return _with_protocol(cost, protocol, cluster)


@remembered(objects=2, most=16)
def costs_of(schedule: Schedule, cluster: Cluster) -> list[CollectiveCost | None]:
    """CollectiveCost of every work in `schedule.works`, None for compute."""
    return [
        cost_of(work, cluster) if isinstance(work, Collective) else None for work in schedule.works
    ]


def _steps(intra: int, inter: int, wan: int, protocol: Protocol) -> Seconds:
    """Latency of sequential hops by the kind of link they cross."""
    return intra * protocol.intra + inter * protocol.inter + wan * protocol.wan


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes sent in a round: per GPU on any link, per node by its NICs, per site over the WAN.

    `by_collective` is what a GPU sends by the kind of a collective and its group.
    """

    gpu: Bytes
    nic: Bytes
    wan: Bytes
    by_collective: Mapping[str, Bytes]


def traffic(schedule: Schedule, cluster: Cluster, places: Iterable[int] | None = None) -> Traffic:
    """What one round of `schedule` sends; with `places` what the ops at these places send."""
    numbers = schedule.work_numbers
    chosen = Counter(numbers if places is None else [numbers[position] for position in places])
    sent: dict[str, Bytes] = {}
    nic = wan = 0.0
    for index, (work, cost) in enumerate(
        zip(schedule.works, costs_of(schedule, cluster), strict=True)
    ):
        if cost and (times := chosen[index]):
            _, far, farthest = cost.bytes_per_link(cluster)
            sent[work.label] = sent.get(work.label, 0.0) + times * cost.sent
            nic, wan = nic + times * far, wan + times * farthest
    return Traffic(sum(sent.values()), nic, wan, sent)


def peak_flops(gpu: GPU, precision: str) -> FlopsPerSecond:
    """Dense peak speed. Raises OptionError when the GPU has no such precision."""
    if precision not in gpu.peak:
        raise OptionError(
            f"{gpu.name} has no {precision} in our catalog; {nearest(precision, gpu.peak)}"
        )
    return gpu.peak[precision]


def efficiency(gpu: GPU, flops: float) -> float:
    """Fraction of peak that an op of `flops` FLOP attains: the GPU's table over log FLOP."""
    table = gpu.known_efficiency
    sizes = [math.log(size) for size, _ in table]
    attained = np.interp(math.log(flops), sizes, [fraction for _, fraction in table])
    return gpu.clock * float(attained)


@dataclass(frozen=True, slots=True)
class KernelParts:
    """What a GPU spends on the kernels of a pass."""

    products: Seconds
    attention: Seconds
    elementwise: Seconds


def kernel_time(
    kernels: Kernels, gpu: GPU, times: KernelTimes, precision: str, exchanged: Seconds = 0.0
) -> Seconds:
    """A pass over a block: the slower of the GPU and of the host that issues its operations.

    The host continues issuing while the GPU exchanges something for `exchanged` seconds. The GPU
    loses a gap after each operation.
    """
    parts = kernel_parts(kernels, gpu, times, precision)
    device = parts.products + parts.attention + parts.elementwise
    device += kernels.calls * times.kernel_gap
    return max(device, kernels.calls * times.call_overhead - exchanged)


def kernel_parts(kernels: Kernels, gpu: GPU, times: KernelTimes, precision: str) -> KernelParts:
    """Times of the matrix products, of flash attention, and of elementwise kernels of a pass.

    The latter move memory and hardly compute. A product whose arithmetic takes as long as its
    memory traffic overlaps them in part: the two add like the sides of a right angle.
    """
    peak = gpu.clock * peak_flops(gpu, precision)
    memory = gpu.memory_bandwidth * times.operand_efficiency
    if kernels.vocabulary and times.vocabulary_efficiency is not None:
        flops = sum([product.flops for product in kernels.products])
        products = flops / (peak * times.vocabulary_efficiency)
    else:
        wide = peak * times.gemm_efficiency
        products = sum(
            [
                math.hypot(
                    product.flops
                    / (_narrow(product, gpu, times) if product.narrow else wide)
                    / (times.grouped if product.grouped else 1.0),
                    product.bytes / memory,
                )
                for product in kernels.products
            ]
        )
    products += times.product_start * sum([product.count for product in kernels.products])
    fused = kernels.attention
    attention = _attention_time(fused, peak, memory, times) if fused else 0.0
    moved = kernels.elementwise_bytes * times.elementwise
    moved += kernels.cast_bytes + kernels.adapter_bytes
    elementwise = moved / (gpu.memory_bandwidth * gpu.memory_efficiency)
    return KernelParts(products, attention, elementwise)


def _narrow(product: Gemm, gpu: GPU, times: KernelTimes) -> FlopsPerSecond:
    """The speed of a product's arithmetic in a type other than that of most products."""
    narrow = product.narrow not in set(DType) and times.narrow_efficiency
    return gpu.clock * peak_flops(gpu, product.narrow) * (narrow or times.gemm_efficiency)


def _attention_time(
    work: FusedAttention, peak: FlopsPerSecond, memory: BytesPerSecond, times: KernelTimes
) -> Seconds:
    """Flash attention at its own efficiency; where none is known, as any other product."""
    forward, backward = work.flops / peak, work.backward / peak
    if times.attention_efficiency is not None:
        return (forward + backward / times.attention_backward) / times.attention(work.length)
    return math.hypot((forward + backward) / times.gemm_efficiency, work.bytes / memory)


def compute_time(work: Compute, gpu: GPU, precision: str, exchanged: Seconds = 0.0) -> Seconds:
    """Roofline: the slower of arithmetic and memory traffic, plus the launch overhead.

    Where both say what kernels a pass consists of, `kernel_time` instead, which takes `exchanged`;
    parts take their sum.
    """
    if work.parts:
        return sum(compute_time(part, gpu, precision) for part in work.parts)
    if work.kernels and gpu.kernels:
        return kernel_time(work.kernels, gpu, gpu.kernels, precision, exchanged)
    arithmetic = 0.0
    if work.flops:
        arithmetic = work.flops / (peak_flops(gpu, precision) * efficiency(gpu, work.flops))
    memory = work.memory_bytes / (gpu.memory_bandwidth * gpu.memory_efficiency)
    return max(arithmetic, memory) + gpu.launch_overhead


def work_time(work: Compute, cluster: Cluster, precision: str, exchanged: Seconds = 0.0) -> Seconds:
    """That of `compute_time` on the GPU; of its host, or of the link to it, that of the bytes."""
    if work.place == "gpu":
        return compute_time(work, cluster.gpu, precision, exchanged)
    return work.memory_bytes / speed(cluster, work.place)


@dataclass(eq=False, slots=True)
class Processor:
    """That of one rank. `interference` is that of the cluster, `in_flight` counts collectives."""

    interference: float
    in_flight: int = 0

    def communicate(self, change: int) -> bool:
        """Count a collective that begins (1) or ends (-1); whether the pace of computes changes."""
        before = self.in_flight > 0
        self.in_flight += change
        return before != (self.in_flight > 0)

    @property
    def pace(self) -> float:
        """Seconds of work that a compute gets done in a second."""
        return 1.0 / (1.0 + self.interference) if self.in_flight else 1.0
