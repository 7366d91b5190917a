"""Latencies of collectives are those of NCCL's tuning model, worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from co2sim.catalog import load_cluster
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import NODE, WORLD, Collective, DType, Group, Kind
from co2sim.simulation.costs import cost_of

US = 1e-6
H100 = load_cluster("dgx-h100", {"inter.ring_loss": "0"}).value.resized(512)
"""64 nodes of 8. A ring attains the 82.4 % of 450 GB/s of NVLink, a little less than the cards."""
BANDWIDTH = 450e9 * 0.824


def collective(kind: Kind, size: float, group: Group = WORLD) -> Collective:
    """Over a buffer of `size` bytes."""
    return Collective(kind, "x", int(size / 2), DType.BF16, group)


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
        found = cost_of(collective(kind, size), H100)
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
    found = cost_of(collective(Kind.ALL_GATHER, 200e6), amd)
    assert found.latency == pytest.approx((14.0 + 448 * 2.0 + 63 * 4.0) * US)
    large = cost_of(collective(Kind.ALL_GATHER, 100e9), amd)
    assert large.latency == pytest.approx((8.4 + 448 * 6.0 + 63 * 14.0) * US)
    two = cost_of(collective(Kind.ALL_GATHER, 200e6), amd.resized(16))
    assert two.latency == pytest.approx((14.0 + 14 * 2.0 + 4.0) * US)
    inside = collective(Kind.ALL_GATHER, 200e6, NODE)
    assert cost_of(inside, amd) == cost_of(inside, H100)


def test_nodes_without_nvlink_have_no_ll128() -> None:
    """PCI has Simple and LL: 5.7 and 1.0 us a hop."""
    pci = replace(H100, protocols="pci", intra=replace(H100.intra, latency=5.7e-6))
    inside = collective(Kind.ALL_GATHER, 1e3, NODE)
    assert cost_of(inside, pci).latency == pytest.approx((6.6 + 7 * 1.0) * US)
    large = collective(Kind.ALL_GATHER, 1e9, NODE)
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
    few, many = collective(kind, size), collective(kind, size * factor)
    start = (8.4 + 2 * 7 * 0.6 * (kind is Kind.ALL_REDUCE)) * US
    assert alone(few, on) <= (alone(few, plain) + start) * (1 + 1e-12)
    assert alone(few, on) <= alone(many, on) * (1 + 1e-12)
