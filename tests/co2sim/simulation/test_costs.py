"""Costs: rooflines in closed form, collectives by every byte on every link, and their latencies."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import assume, given
from hypothesis import strategies as st

from co2sim.catalog import load_cluster
from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import AllReduce, Backend, Cluster, Link
from co2sim.hardware.fabric import Fabric, Placement, Tier
from co2sim.schedule.schedule import (
    NODE,
    PEERS,
    SITE,
    SITE_PEERS,
    WORLD,
    Collective,
    Compute,
    DType,
    Group,
    Kind,
    Layout,
    Op,
    Schedule,
    block,
    experts,
)
from co2sim.schedule.token_routing import TokenRouting
from co2sim.simulation.costs import compute_time, cost_of, traffic
from co2sim.simulation.metrics import window
from co2sim.simulation.run import execute

Message = tuple[int, int, float]
"""Sender, receiver, bytes."""

SIZE = 5040.0


def collective(kind: Kind, group: Group = WORLD, size: float = SIZE) -> Collective:
    """A collective over a buffer of so many bytes; SIZE is what many group sizes divide."""
    return Collective(kind, "x", int(size / 2), DType.BF16, group)


# --- the algorithms, message by message ----------------------------------------------------------


def ring(kind: Kind, ranks: list[int], size: float) -> Iterator[Message]:
    """Ring algorithms: the buffer in chunks, each passed on from rank to rank."""
    m = len(ranks)
    following = dict(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    if kind in {Kind.BROADCAST, Kind.REDUCE}:
        for sender, receiver in pairwise(ranks if kind is Kind.BROADCAST else ranks[::-1]):
            yield sender, receiver, size
        return
    for _ in range(2 if kind is Kind.ALL_REDUCE else 1):
        for _step in range(m - 1):
            for sender in ranks:
                yield sender, following[sender], size / m


def pairs(ranks: list[int], size: float) -> Iterator[Message]:
    """All-to-all: every rank sends every other its slice."""
    for sender in ranks:
        for receiver in ranks:
            if sender != receiver:
                yield sender, receiver, size / len(ranks)


def hierarchical(ranks: list[int], size: float, layout: Layout) -> Iterator[Message]:
    """Reduce-scatter inside the node, all-reduce each slice among peers, all-gather inside."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // layout.gpus_per_node, []).append(rank)
    local = list(nodes.values())
    for inside in local:
        yield from ring(Kind.REDUCE_SCATTER, inside, size)
        yield from ring(Kind.ALL_GATHER, inside, size)
    for place in range(len(local[0])):
        peers = [inside[place] for inside in local]
        yield from ring(Kind.ALL_REDUCE, peers, size / len(local[0]))


def double_tree(ranks: list[int], size: float, layout: Layout) -> Iterator[Message]:
    """Two binary trees over the nodes with half the buffer each; a chain inside every node."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // layout.gpus_per_node, []).append(rank)
    local = list(nodes.values())
    for order in (local, local[::-1]):
        for child in range(1, len(order)):
            up, down = order[child][0], order[(child - 1) // 2][0]
            yield up, down, size / 2
            yield down, up, size / 2
    for inside in local:
        for up, down in pairwise(inside):
            yield up, down, size
            yield down, up, size


class Count:
    """Bytes that leave every GPU inside its node, every node, and every site."""

    def __init__(self, messages: Iterator[Message], cluster: Cluster) -> None:
        """Count the messages."""
        g, per_site = cluster.gpus_per_node, cluster.nodes_per_site
        self.sent: Counter[int] = Counter()
        self.intra: Counter[int] = Counter()
        self.inter: Counter[int] = Counter()
        self.wan: Counter[int] = Counter()
        for sender, receiver, size in messages:
            self.sent[sender] += size  # type: ignore[assignment]
            here, there = sender // g, receiver // g
            if here == there:
                self.intra[sender] += size  # type: ignore[assignment]
                continue
            self.inter[here] += size  # type: ignore[assignment]
            if here // per_site != there // per_site:
                self.wan[here // per_site] += size  # type: ignore[assignment]


def most(counter: Counter[int]) -> float:
    """Bytes on the busiest link of a kind."""
    return max(counter.values(), default=0.0)


def messages(work: Collective, cluster: Cluster, rank: int = 0) -> Iterator[Message]:
    """What the group of `rank` sends, by the cluster's algorithm."""
    ranks = list(work.group.members(rank, cluster.layout))
    if work.kind is Kind.ALL_TO_ALL:
        return pairs(ranks, work.bytes)
    if work.kind is Kind.ALL_REDUCE and cluster.all_reduce == "hierarchical":
        return hierarchical(ranks, work.bytes, cluster.layout)
    return ring(work.kind, ranks, work.bytes)


SHAPES = [(1, 1, 1), (1, 4, 1), (4, 1, 1), (2, 4, 1), (3, 2, 1), (4, 2, 2), (6, 3, 3), (5, 4, 1)]
"""Nodes, GPUs per node, sites."""


def shaped(nodes: int, gpus: int, sites: int) -> Cluster:
    """A cluster with distinct latencies: 1, 100 and 10 000 s for a step on each kind of link."""
    return tiny.cluster(
        nodes,
        gpus,
        sites=sites,
        intra=Link(10e9, 1.0),
        inter=Link(1e9, 100.0),
        wan=Link(1e8, 10_000.0) if sites > 1 else None,
    )


GROUPS = [WORLD, NODE, PEERS, SITE, SITE_PEERS, block(1), block(2), block(4)]


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    st.sampled_from(GROUPS),
    st.sampled_from(list(Kind)),
    st.sampled_from(["ring", "hierarchical"]),
)
def test_footprints_count_bytes_on_any_layout(
    shape: tuple[int, int, int], group: Group, kind: Kind, all_reduce: AllReduce
) -> None:
    """They are what the algorithm's messages add up to, link by link.

    Of sites of some nodes; blocks divide a node, or are full nodes that divide a site.
    """
    per_site, gpus, sites = shape
    assume(not group.ranks or gpus % group.ranks == 0 or per_site * gpus % group.ranks == 0)
    assume(not group.ranks or gpus % group.ranks == 0 or group.ranks % gpus == 0)
    assume(not group.ranks or all_reduce == "ring")
    cluster = replace(shaped(per_site * sites, gpus, sites), all_reduce=all_reduce)
    work = collective(kind, group)
    cost, count = cost_of(work, cluster), Count(messages(work, cluster), cluster)
    assert cost.intra == pytest.approx(most(count.intra))
    assert cost.inter == pytest.approx(most(count.inter))
    assert cost.wan == pytest.approx(most(count.wan))
    if all_reduce == "ring" or kind is not Kind.ALL_REDUCE:
        assert cost.sent == pytest.approx(most(count.sent))


def by_node(ranks: list[int], routing: TokenRouting, cluster: Cluster) -> Iterator[Message]:
    """Every choice of experts by a token of every rank; together an input of SIZE bytes."""
    g, m, each = cluster.gpus_per_node, len(ranks), routing.count // len(ranks)
    chosen = list(combinations(range(routing.count), routing.active))
    token = SIZE / routing.active / len(chosen)
    for place, sender in enumerate(ranks):
        for found in chosen:
            homes = [ranks[expert // each] for expert in found]
            relays = {home // g: ranks[home // g * g + place % g - ranks[0]] for home in homes}
            for relay in relays.values():
                if relay != sender:
                    yield sender, relay, token
            for home in homes:
                if home != relays[home // g]:
                    yield relays[home // g], home, token
    assert m % g == 0


@pytest.mark.parametrize("shape", [(1, 4, 1), (2, 2, 1), (4, 1, 1), (4, 2, 2), (2, 4, 2)])
@pytest.mark.parametrize("active", [1, 2, 3])
def test_tokens_cross_the_network_once_for_every_node(
    shape: tuple[int, int, int], active: int
) -> None:
    """Bytes on links are those of all choices of experts; hops those of both phases."""
    cluster, (nodes, gpus, sites) = shaped(*shape), shape
    ranks = list(range(nodes * gpus))
    routing = TokenRouting(active, 2 * len(ranks), 1, by_node=True)
    work = replace(collective(Kind.ALL_TO_ALL, experts(len(ranks))), routed=routing)
    cost, count = cost_of(work, cluster), Count(by_node(ranks, routing, cluster), cluster)
    assert cost.intra == pytest.approx(most(count.intra))
    assert cost.inter == pytest.approx(most(count.inter))
    assert cost.wan == pytest.approx(most(count.wan))
    assert cost.sent == pytest.approx(most(count.sent))
    hops = (gpus - 1) + 100 * (nodes // sites - 1) + 10_000 * (nodes - nodes // sites)
    assert cost.latency == hops
    if nodes == 1:
        assert cost == cost_of(replace(work, routed=None), cluster)


def test_pods_see_as_much_less_of_tokens_as_the_network_cards() -> None:
    """Tiers carry the same part of what they carry apart."""
    cluster = tiny.cluster(8, 2, inter=Link(1e9, 1.0), fabric=Fabric(Tier(2, 2.0)))
    routing = TokenRouting(4, 32, 1, by_node=True)
    work = replace(collective(Kind.ALL_TO_ALL, experts(16)), routed=routing)
    apart, together = (cost_of(one, cluster) for one in (replace(work, routed=None), work))
    (whole,), (part,) = apart.tiers, together.tiers
    assert part.bytes / whole.bytes == pytest.approx(together.inter / apart.inter)
    assert part.bytes / whole.bytes == pytest.approx(routing.nodes(8) / 4)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 4), (2, 4), (3, 4), (8, 4), (5, 1), (16, 8)])
def test_a_tree_all_reduce_moves_the_bytes_of_two_trees(nodes: int, gpus: int) -> None:
    """The busiest NIC carries what two binary trees of half the buffer send up and down."""
    cluster = tiny.cluster(nodes, gpus, all_reduce="tree")
    work = collective(Kind.ALL_REDUCE)
    ranks = list(range(nodes * gpus))
    count = Count(double_tree(ranks, work.bytes, cluster.layout), cluster)
    cost = cost_of(work, cluster)
    assert cost.inter == pytest.approx(most(count.inter))
    assert cost.intra == pytest.approx(most(count.intra) if gpus != 2 else 2 * SIZE)


@pytest.mark.parametrize("shape", SHAPES)
def test_latencies_are_those_of_the_links_on_the_path(shape: tuple[int, int, int]) -> None:
    """A chunk of a ring hops m-1 times; rank 0 of an exchange sends to every other one in turn.

    A hierarchical all-reduce goes inside the node, between nodes and between sites, and back; a
    tree through a chain inside the node, and log2 steps between nodes.
    """
    cluster, (nodes, gpus, sites) = shaped(*shape), shape

    def hop(sender: int, receiver: int) -> int:
        one, other = sender // gpus, receiver // gpus
        per_site = nodes // sites
        return 1 if one == other else 100 if one // per_site == other // per_site else 10_000

    last = nodes * gpus - 1
    path = sum(hop(rank, rank + 1) for rank in range(last))
    assert cost_of(collective(Kind.ALL_GATHER), cluster).latency == path
    assert cost_of(collective(Kind.REDUCE_SCATTER), cluster).latency == path
    assert cost_of(collective(Kind.ALL_REDUCE), cluster).latency == 2 * path
    exchange = sum(hop(0, rank + 1) for rank in range(last))
    assert cost_of(collective(Kind.ALL_TO_ALL), cluster).latency == exchange
    by_level = replace(cluster, all_reduce="hierarchical")
    once = (gpus - 1) + 100 * (nodes - sites) + 10_000 * (sites - 1)
    assert cost_of(collective(Kind.ALL_REDUCE), by_level).latency == 2 * once
    if sites == 1:
        tree, depth = replace(cluster, all_reduce="tree"), math.ceil(math.log2(nodes))
        assert cost_of(collective(Kind.ALL_REDUCE), tree).latency == 2 * (gpus - 1 + 100 * depth)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 10**9), st.floats(0.0, 1e-3))
def test_auto_takes_the_faster_of_ring_and_tree_on_nccl_and_the_ring_on_gloo(
    nodes: int, gpus: int, elements: int, latency: float
) -> None:
    """Alone on its links, an all-reduce takes the time of the better algorithm of the backend."""
    work = Collective(Kind.ALL_REDUCE, "x", elements, DType.BF16, WORLD)
    links = {"intra": Link(10e9, latency / 10), "inter": Link(1e9, latency)}

    def alone(algorithm: str, backend: str = "nccl") -> float:
        cluster = tiny.cluster(nodes, gpus, **links, all_reduce=algorithm, backend=backend)
        cost = cost_of(work, cluster)
        return cost.latency + max(cost.intra / 10e9, cost.inter / 1e9)

    assert alone("auto") == pytest.approx(min(alone("ring"), alone("tree")))
    assert alone("auto", "gloo") == alone("ring")


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([Kind.BROADCAST, Kind.REDUCE]),
    st.sampled_from(["nccl", "gloo"]),
)
def test_a_chain_takes_what_its_pieces_take_hop_by_hop(
    nodes: int, gpus: int, pieces: int, kind: Kind, backend: Backend
) -> None:
    """A hop sends a piece once it has it, and has sent the one before."""
    cluster = tiny.cluster(
        nodes, gpus, backend=backend, intra=Link(10e9, 1e-6), inter=Link(1e9, 1e-5)
    )
    piece = 2**19 * (2 if backend == "nccl" else 1)
    hops = [cluster.intra if place % gpus else cluster.inter for place in range(1, nodes * gpus)]
    there = [0.0] * pieces
    for link in hops:
        free = 0.0
        for number, came in enumerate(there):
            free = max(free, came) + piece / link.bandwidth
            there[number] = free
    work = Collective(kind, "x", pieces * piece, DType.INT8, WORLD)
    expected = (there[-1] + sum(link.latency for link in hops)) if hops else 0.0
    assert cost_of(work, cluster).duration_alone(cluster) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("group", "shape"),
    [(block(3), (3, 4, 1)), (block(12), (6, 8, 1)), (block(4), (6, 2, 2))],
    ids=["inside a node", "over nodes", "over sites"],
)
def test_blocks_that_straddle_unevenly_are_refused(
    group: Group, shape: tuple[int, int, int]
) -> None:
    """A group whose blocks do not all have the same shape has no single footprint.

    Blocks of 3 on nodes of 4 (ranks 3, 4, 5), of 12 on nodes of 8, and of two nodes at sites of
    three (nodes 2 and 3 are at different sites).
    """
    with pytest.raises(OptionError, match=r"fill no equal parts"):
        cost_of(collective(Kind.ALL_GATHER, group), shaped(*shape))


@pytest.mark.parametrize("shape", [(2, 2, 1), (3, 4, 1), (4, 2, 2), (1, 4, 1), (4, 1, 2)])
def test_traffic_of_a_round_counts_every_group_on_the_nic(shape: tuple[int, int, int]) -> None:
    """Bytes through a node's NICs, and a site's uplink, are those of all groups that use them."""
    cluster = shaped(*shape)
    works = [collective(kind, group) for kind in Kind for group in (WORLD, NODE, PEERS, block(2))]
    works = [w for w in works if cluster.layout.gpus_per_node % (w.group.ranks or 1) == 0]
    body = tuple(Op(f"op{n}", work, "comm") for n, work in enumerate(works))
    found = traffic(Schedule("all", body), cluster)
    nic = wan = gpu = 0.0
    for work in works:
        groups = {work.group.members(rank, cluster.layout) for rank in range(shape[0] * shape[1])}
        counts = [Count(messages(work, cluster, members.start), cluster) for members in groups]
        nic += most(sum((count.inter for count in counts), Counter()))
        wan += most(sum((count.wan for count in counts), Counter()))
        gpu += most(sum((count.sent for count in counts), Counter()))
    assert found.nic == pytest.approx(nic)
    assert found.wan == pytest.approx(wan)
    assert found.gpu == pytest.approx(gpu)


# --- compute -------------------------------------------------------------------------------------


@given(st.floats(0, 1e15), st.floats(0, 1e12))
def test_compute_takes_the_slower_of_arithmetic_and_memory(flops: float, size: float) -> None:
    """The roofline, plus the launch overhead."""
    gpu = tiny.gpu(
        efficiency=((1.0, 0.5),), memory_efficiency=0.8, memory_bandwidth=2e12, launch_overhead=1e-6
    )
    expected = max(flops / (1e12 * 0.5) if flops else 0.0, size / (2e12 * 0.8)) + 1e-6
    assert compute_time(Compute("x", flops, size), gpu, "bf16") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flops", "fraction"),
    [(1e6, 0.2), (1e9, 0.2), (1e10, 0.3), (10**10.5, 0.35), (1e11, 0.4), (1e14, 0.4)],
)
def test_efficiency_is_linear_in_the_logarithm_of_the_work(flops: float, fraction: float) -> None:
    """Between the entries of the table it is interpolated over log FLOP, outside it is constant."""
    gpu = tiny.gpu(efficiency=((1e9, 0.2), (1e11, 0.4)))
    took = compute_time(Compute("x", flops), gpu, "bf16")
    assert took == pytest.approx(flops / (1e12 * fraction))


# --- switches between nodes -------------------------------------------------------------------


KINDS = [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BROADCAST]


def tiered(nodes: int = 8, gpus: int = 2, **tiers: Any) -> Cluster:
    """Nodes of two GPUs with 1 GB/s between them."""
    return tiny.cluster(
        nodes, gpus, inter=Link(1e9, 1e-6), fabric=Fabric(**tiers) if tiers else None
    )


SOME_NODES = [
    WORLD,
    PEERS,
    block(8),
    Group("replicas", 8),
    Group("block", 4, 2),
    Group("peers", 6, 4),
]
"""Of two GPUs a node: blocks of 4 nodes, and groups of every fourth node, some with strides."""


@pytest.mark.parametrize("placed", ["packed", "cyclic"])
@pytest.mark.parametrize("pod", [3, 4, 5, 6, 7])
@pytest.mark.parametrize("group", SOME_NODES, ids=str)
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_bytes_that_leave_pods_are_counted_message_by_message(
    kind: Kind, group: Group, pod: int, placed: Placement
) -> None:
    """Of all groups of the kind, by pod, also where groups and pods do not line up."""
    on = tiered(24, leaf=Tier(pod), placement=placed)
    work, many = collective(kind, group, 1e6), -(-24 // pod)
    sent, said = np.zeros(many), np.zeros(many)
    (crossing,) = cost_of(work, on).tiers or (None,)
    for members in {group.members(rank, on.layout) for rank in range(48)}:
        for sender, receiver, size in messages(work, on, members[0]):
            nodes = sender // 2, receiver // 2
            here, there = (n % many if placed == "cyclic" else n // pod for n in nodes)
            if here != there:
                sent[here] += size
        if crossing:
            for there, size in crossing.of_group([rank // 2 for rank in members], 24).items():
                said[there] += size
    assert said == pytest.approx(sent)
    assert (crossing.bytes if crossing else 0.0) == pytest.approx(max(sent))


def test_a_ring_feels_an_oversubscription_beyond_the_nodes_of_a_pod() -> None:
    """It leaves the pod of 4 once: 4 is no loss, 12 takes three times as long."""
    work, plain = collective(Kind.ALL_GATHER, size=1e6), tiered()
    nics = cost_of(work, plain).link_times(plain)[1]
    for factor, expected in ((4.0, 1.0), (12.0, 3.0)):
        on = tiered(leaf=Tier(4, oversubscription=factor))
        found = cost_of(work, on)
        assert found.duration_alone(on) == pytest.approx(found.latency + expected * nics)


def test_congestion_slows_what_crosses() -> None:
    """A ring as its slowest hop; of an exchange the part that leaves the pod."""
    on = tiered(leaf=Tier(4, congestion=1.5))
    plain = tiered()
    for kind, factor in ((Kind.ALL_GATHER, 1.5), (Kind.ALL_TO_ALL, 1 + 0.5 * 4 / 7)):
        work = collective(kind, size=1e6)
        nics = cost_of(work, plain).link_times(plain)[1]
        found = cost_of(work, on)
        assert found.duration_alone(on) == pytest.approx(found.latency + factor * nics)


def test_a_ring_of_scattered_ranks_crosses_at_every_hop() -> None:
    """Over all orders of 8 nodes in pods of 4, 4/7 of the hops leave a pod."""
    work = collective(Kind.ALL_GATHER, size=1e6)
    on = tiered(leaf=Tier(4, 12.0), placement="scattered")
    cost = cost_of(work, on)
    orders = [np.random.default_rng(seed).permutation(8) // 4 for seed in range(4000)]
    crossed = np.mean([np.sum(one != np.roll(one, 1)) / 2 for one in orders])  # out of a pod
    (found,) = cost.tiers
    assert found.bytes / cost.inter == pytest.approx(crossed, rel=0.02)
    assert found.bytes / cost.inter == pytest.approx(4 * 4 / 7)


def test_hashed_rings_are_as_slow_as_the_busiest_uplink() -> None:
    """Two flows on two uplinks, in two pods: 1.75 flows meet on the busiest."""
    work = collective(Kind.ALL_GATHER, size=1e6)
    plain = tiered()
    nics = cost_of(work, plain).link_times(plain)[1]
    on = tiered(leaf=Tier(4, 4.0), nics=2, paths="hashed")
    found = cost_of(work, on)
    assert found.duration_alone(on) == pytest.approx(found.latency + 1.75 * nics)


@given(
    st.sampled_from(KINDS),
    st.sampled_from([WORLD, PEERS]),
    st.sampled_from(["packed", "scattered", "cyclic"]),
    st.floats(0.25, 16),
    st.integers(1, 4),
)
def test_hashed_paths_are_never_faster_than_spread_ones(
    kind: Kind, group: Group, placement: Placement, over: float, flows: int
) -> None:
    """On leaves of any oversubscription, with any number of connections."""
    work, leaf = collective(kind, group, 1e6), Tier(4, over)
    about: dict[str, Any] = {"leaf": leaf, "placement": placement, "nics": 2, "flows": flows}
    spread, hashed = tiered(**about), tiered(**about, paths="hashed")
    least = cost_of(work, spread).duration_alone(spread)
    assert cost_of(work, hashed).duration_alone(hashed) >= least * (1 - 1e-9)


def test_of_a_shared_leaf_a_job_has_all_uplinks() -> None:
    """Two of four nodes: they have twice the uplinks that they would have alone."""
    work = collective(Kind.ALL_TO_ALL, size=1e6)
    half, alone = tiered(leaf=Tier(4, 8.0), share=0.5), tiered(leaf=Tier(2, 8.0))
    one, other = (cost_of(work, on).tier_times(on)[0] for on in (half, alone))
    assert one == pytest.approx(other / 2)


@given(
    st.sampled_from(tiny.VARIANTS),
    st.sampled_from([(4, 1), (4, 2), (6, 2)]),
    st.floats(1, 50),
    st.floats(1, 50),
    st.sampled_from(["oversubscription", "congestion"]),
)
def test_narrower_tiers_are_never_faster(
    strategy: str, shape: tuple[int, int], one: float, other: float, which: str
) -> None:
    """A round of any strategy, with two tiers of which one gets narrower."""
    schedule = tiny.schedule(strategy, shape)
    low, high = sorted((one, other))

    def took(factor: float) -> float:
        on = tiered(*shape, leaf=Tier(1, 2.0, 1.1), spine=Tier(2, **{which: factor}))
        trace = execute(schedule, on, precision="bf16", rounds=8)
        return window(trace, schedule, 4).round_time

    assert took(low) <= took(high) * (1 + 1e-9)


@given(
    st.sampled_from(tiny.VARIANTS),
    st.sampled_from([(4, 1), (4, 2), (8, 2)]),
    st.sampled_from(["packed", "scattered", "cyclic"]),
    st.sampled_from(["leaf", "spine"]),
)
def test_fabrics_that_block_nothing_change_no_time(
    strategy: str, shape: tuple[int, int], placement: Placement, tiers: str
) -> None:
    """A round of any strategy, on two and three tiers with an uplink for each network card."""
    schedule = tiny.schedule(strategy, shape)
    spine = Tier(4) if tiers == "spine" else None
    times = []
    for on in (tiered(*shape), tiered(*shape, leaf=Tier(2), spine=spine, placement=placement)):
        trace = execute(schedule, on, precision="bf16", rounds=6)
        times.append(window(trace, schedule, 3).round_time)
    assert times[1] == pytest.approx(times[0], rel=1e-9)


# --- protocols of NCCL ------------------------------------------------------------------------


US = 1e-6
H100 = load_cluster("dgx-h100", {"inter.ring_loss": "0"}).value.resized(512)
"""64 nodes of 8. A ring attains the 82.4 % of 450 GB/s of NVLink, a little less than the cards."""
BANDWIDTH = 450e9 * 0.824


def alone(work: Collective, on: Cluster) -> float:
    """Seconds when nothing else is in flight."""
    return cost_of(work, on).duration_alone(on)


# Hops of a ring over 512 ranks: 448 inside nodes, 63 between them; of a tree up and down: 7 inside
# the node and 6 = log2(64) between nodes, twice.
SIMPLE_RING = 448 * 3.4 + 63 * 14.0
LL128_RING = 14.0 + 448 * 1.9 + 63 * 4.0
LL_RING = 6.6 + 448 * 1.0 + 63 * 2.7  # a post takes 1 us, longer than a hop by LL (0.6 us)
LL_TREE = 6.8 + 2 * (7 * 0.6 + 6 * 5.0)


@pytest.mark.parametrize(
    ("size", "latency", "share"),
    [(1e3, LL_RING, 0.5), (200e6, LL128_RING, 0.92), (20e9, 8.4 + SIMPLE_RING, 1.0)],
)
def test_a_gather_takes_the_protocol_that_is_fastest(
    size: float, latency: float, share: float
) -> None:
    """LL for a kilobyte, LL128 for a layer, Simple for what takes 50 ms on 512 H100."""
    for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        found = cost_of(collective(kind, size=size), H100)
        assert found.latency == pytest.approx(latency * US)
        if share != 0.5:  # LL attains 20.4 GB/s at most
            assert found.share == share
        else:
            assert found.share == pytest.approx(20.4e9 / BANDWIDTH)


@pytest.mark.parametrize(
    ("gpus", "latency"),
    [
        (8, 6.6 + 2 * 7 * 0.6),  # the ring: it starts earlier than a tree
        (16, 6.8 + 2 * (7 * 0.6 + 5.0)),
        (512, LL_TREE),
        (16384, 6.8 + 2 * (7 * 0.6 + 11 * 5.0)),
    ],
)
def test_the_norm_of_gradients_is_a_tree_of_a_few_hops(gpus: int, latency: float) -> None:
    """A blocking all-reduce of 4 bytes, as clipping and logging need: 15 to 125 us."""
    on = H100.resized(gpus)
    norm = Collective(Kind.ALL_REDUCE, "norm", 1, DType.FP32, WORLD)
    assert alone(norm, on) == pytest.approx(latency * US, rel=1e-3)
    assert alone(norm, on) < alone(norm, replace(on, protocols="simple"))


def test_posts_of_a_slow_host_bound_the_hops_of_a_ring() -> None:
    """2 us with AMD's processors: 6 us a hop by Simple, 2 by the others; none inside a node."""
    amd = replace(H100, network_overhead=2e-6)
    found = cost_of(collective(Kind.ALL_GATHER, size=200e6), amd)
    assert found.latency == pytest.approx((14.0 + 448 * 2.0 + 63 * 4.0) * US)
    large = cost_of(collective(Kind.ALL_GATHER, size=100e9), amd)
    assert large.latency == pytest.approx((8.4 + 448 * 6.0 + 63 * 14.0) * US)
    two = cost_of(collective(Kind.ALL_GATHER, size=200e6), amd.resized(16))
    assert two.latency == pytest.approx((14.0 + 14 * 2.0 + 4.0) * US)
    inside = collective(Kind.ALL_GATHER, NODE, 200e6)
    assert cost_of(inside, amd) == cost_of(inside, H100)


def test_nodes_without_nvlink_have_no_ll128() -> None:
    """PCI has Simple and LL: 5.7 and 1.0 us a hop."""
    pci = replace(H100, protocols="pci", intra=replace(H100.intra, latency=5.7e-6))
    inside = collective(Kind.ALL_GATHER, NODE, 1e3)
    assert cost_of(inside, pci).latency == pytest.approx((6.6 + 7 * 1.0) * US)
    large = collective(Kind.ALL_GATHER, NODE, 1e9)
    assert cost_of(large, pci).latency == pytest.approx((8.4 + 7 * 5.7) * US)
    assert cost_of(large, pci).share == 1


@given(
    st.sampled_from([Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER]),
    st.floats(2, 1e11),
    st.floats(1, 10),
    st.sampled_from([(1, 8), (2, 8), (64, 8), (16, 1)]),
)
def test_a_choice_is_never_slower_and_larger_buffers_never_faster(
    kind: Kind, size: float, factor: float, shape: tuple[int, int]
) -> None:
    """Beyond the 8.4 us that Simple starts with, and slower hops of trees by it, 4 for 3.4 us."""
    on = replace(H100, nodes=shape[0], gpus_per_node=shape[1], network_overhead=0.0)
    plain = replace(on, protocols="simple")
    few, many = collective(kind, size=size), collective(kind, size=size * factor)
    start = (8.4 + 2 * 7 * 0.6 * (kind is Kind.ALL_REDUCE)) * US
    assert alone(few, on) <= (alone(few, plain) + start) * (1 + 1e-12)
    assert alone(few, on) <= alone(many, on) * (1 + 1e-12)
