"""Switches between nodes: what crosses them, and what narrow ones cost."""

from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from test_costs import messages

from co2sim.hardware.cluster import Cluster, Link, Tier
from co2sim.schedule.schedule import PEERS, WORLD, Collective, DType, Group, Kind
from co2sim.simulation.costs import cost_of
from co2sim.simulation.metrics import window
from co2sim.simulation.run import execute

KINDS = [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BROADCAST]


def cluster(nodes: int = 8, gpus: int = 2, **tiers: Any) -> Cluster:
    """Nodes of two GPUs with 1 GB/s between them."""
    return tiny.cluster(nodes, gpus, inter=Link(1e9, 1e-6, **tiers))


def collective(kind: Kind, group: Group = WORLD) -> Collective:
    """Over a buffer of a megabyte."""
    return Collective(kind, "x", 500_000, DType.BF16, group)


@pytest.mark.parametrize("group", [WORLD, PEERS])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_leave_a_pod_are_counted_message_by_message(kind: Kind, group: Group) -> None:
    """The busiest of two pods of 4 nodes, with all groups of the kind."""
    on = cluster(rail=Tier(4))
    work = collective(kind, group)
    sent = [0.0, 0.0]
    for rank in range(on.gpus_per_node if group == PEERS else 1):
        for sender, receiver, size in messages(work, on, rank):
            here, there = (one // on.gpus_per_node // 4 for one in (sender, receiver))
            if here != there:
                sent[here] += size
    (found,) = cost_of(work, on).tiers
    assert found.bytes * found.groups(on) == pytest.approx(max(sent))


def test_a_ring_feels_an_oversubscription_beyond_the_nodes_of_a_pod() -> None:
    """It leaves the pod of 4 once: 4 is no loss, 12 takes three times as long."""
    work, plain = collective(Kind.ALL_GATHER), cluster()
    nics = cost_of(work, plain).link_times(plain)[1]
    for factor, expected in ((4.0, 1.0), (12.0, 3.0)):
        on = cluster(rail=Tier(4, oversubscription=factor))
        found = cost_of(work, on)
        assert found.duration_alone(on) == pytest.approx(found.latency + expected * nics)


def test_congestion_slows_what_crosses() -> None:
    """A ring as its slowest hop; of an exchange the part that leaves the pod."""
    on = cluster(spine=Tier(4, congestion=1.5))
    plain = cluster()
    for kind, factor in ((Kind.ALL_GATHER, 1.5), (Kind.ALL_TO_ALL, 1 + 0.5 * 4 / 7)):
        work = collective(kind)
        nics = cost_of(work, plain).link_times(plain)[1]
        found = cost_of(work, on)
        assert found.duration_alone(on) == pytest.approx(found.latency + factor * nics)


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
        on = cluster(*shape, rail=Tier(1, 2.0, 1.1), spine=Tier(2, **{which: factor}))
        trace = execute(schedule, on, precision="bf16", rounds=8)
        return window(trace, schedule, 4).round_time

    assert took(low) <= took(high) * (1 + 1e-9)
