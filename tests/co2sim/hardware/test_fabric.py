"""Fabrics: how they are wired, what hashing costs, and how many switches they need."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from co2sim.common.errors import OptionError
from co2sim.hardware.fabric import Fabric, Tier, busiest, fat_tree, imbalance, network, pods

CARD = 50e9


def wired(cards: int = 8, **values: Any) -> Any:
    """The tiers of a fabric on nodes with network cards of 400 Gbit/s."""
    return pods(Fabric(**values), cards * CARD, cards)


# --- wiring --------------------------------------------------------------------------------------


def test_ports_say_how_many_nodes_a_leaf_joins() -> None:
    """64 ports: 32 down and 32 up are 4 nodes of 8 cards, or by rails 32 nodes on 8 leaves."""
    (leaf,) = wired(leaf=Tier(), switch_ports=64)
    assert (leaf.nodes, leaf.switches, leaf.down, leaf.uplinks) == (4, 1, 32, 32)
    (rail,) = wired(leaf=Tier(), switch_ports=64, rails=True)
    assert (rail.nodes, rail.switches, rail.down, rail.uplinks) == (32, 8, 32, 32)
    (narrow,) = wired(leaf=Tier(oversubscription=3), switch_ports=64)
    assert (narrow.nodes, narrow.down, narrow.uplinks) == (6, 48, 16)
    assert narrow.bandwidth == 2  # of nodes


def test_three_tiers_are_those_of_llama_3() -> None:
    """Racks of two nodes, and pods of 192 racks behind 1:7 (arXiv 2407.21783, section 3.3.1)."""
    rack, pod = wired(leaf=Tier(2), spine=Tier(384, 7.0))
    assert (rack.nodes, rack.bandwidth) == (2, 2.0)
    assert (pod.nodes, pod.down) == (384, 192)
    assert pod.bandwidth == pytest.approx(384 / 7)


tiers = st.builds(Tier, st.none(), st.sampled_from([1.0, 1.5, 2.0, 3.0, 7.0]))
fabrics = st.builds(
    Fabric,
    tiers,
    st.none() | tiers,
    switch_ports=st.sampled_from([8, 16, 32, 64, 128]),
    rails=st.booleans(),
)


@given(fabrics, st.sampled_from([1, 2, 4, 8]), st.integers(1, 3000))
def test_no_switch_has_more_links_than_ports(fabric: Fabric, cards: int, nodes: int) -> None:
    """Every link has two ends, at a network card or a port of a switch that is counted."""
    ports = fabric.switch_ports
    assert ports is not None
    try:
        tiers = pods(fabric, cards * CARD, cards)
        found = network(fabric, nodes, cards, CARD, 64)
    except OptionError:
        reject()
    for tier in tiers:
        assert tier.down + tier.uplinks <= ports
        assert tier.uplinks >= 1
    assert 2 * found.links - nodes * cards <= found.switches * ports


@given(st.sampled_from([8, 16, 32, 64]), st.sampled_from([1, 2, 4]), st.integers(1, 64))
def test_tiers_that_block_nothing_cost_what_a_fat_tree_does(
    ports: int, cards: int, pieces: int
) -> None:
    """Where leaves are full: two tiers of half of the ports down, and three."""
    half = ports // 2
    leaf = half // cards
    two = min(pieces, ports) * leaf
    found = network(Fabric(Tier(), switch_ports=ports), two, cards, CARD, 64)
    assert found == fat_tree(two * cards, ports)
    three = (min(pieces, half - 2) + 2) * half * leaf
    found = network(Fabric(Tier(), Tier(), switch_ports=ports), three, cards, CARD, 64)
    assert found == fat_tree(three * cards, ports)


REFUSED = [
    {"leaf": Tier()},
    {"spine": Tier(8)},
    {"share": 0.5},
    {"placement": "scattered"},
    {"leaf": Tier(8), "switch_ports": 64},
    {"leaf": Tier(4, 100.0), "switch_ports": 64},
    {"leaf": Tier(), "switch_ports": 8},
    {"leaf": Tier(8), "spine": Tier(12)},
    {"leaf": Tier(8), "spine": Tier(8)},
]


@pytest.mark.parametrize("values", REFUSED)
def test_fabrics_that_cannot_be_built_are_refused_in_one_line(values: dict[str, Any]) -> None:
    """Ports that do not suffice, leaves without uplinks, and tiers that do not fit each other."""
    with pytest.raises(OptionError) as caught:
        wired(**values)
    assert "\n" not in str(caught.value)


def test_more_nodes_than_two_tiers_join_are_refused() -> None:
    """64 ports of a spine reach 64 leaves of 4 nodes."""
    fabric = Fabric(Tier(), switch_ports=64)
    assert network(fabric, 256, 8, CARD, 64).tiers == (64, 32)
    with pytest.raises(OptionError):
        network(fabric, 257, 8, CARD, 64)


@pytest.mark.parametrize("leaf", [None, Tier()])
def test_rails_of_one_leaf_each_need_no_spine(leaf: Tier | None) -> None:
    """32 nodes of 8 cards: two rails a switch of 64 ports, and no links but those of the cards."""
    found = network(Fabric(leaf, switch_ports=64, rails=True), 32, 8, CARD, 64)
    assert (found.tiers, found.links) == ((4,), 256)
    above = network(Fabric(Tier(), switch_ports=64, rails=True), 33, 8, CARD, 64)
    assert above.tiers == (16, 8)


# --- hashed paths --------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 4))
def test_the_busiest_uplink_is_counted_exactly(flows: int, uplinks: int) -> None:
    """Over all ways in which flows may be hashed."""
    ways = [
        max(np.bincount(way, minlength=uplinks)) for way in product(range(uplinks), repeat=flows)
    ]
    least, chances = busiest(flows, uplinks, 1)
    assert min(ways) >= least
    for most, chance in enumerate(chances, least):
        assert chance == pytest.approx(np.mean([way <= most for way in ways]), abs=2e-9)
    assert imbalance(flows, uplinks, 1) == pytest.approx(np.mean(ways) * uplinks / flows)


def test_two_flows_on_two_uplinks_meet_half_of_the_time() -> None:
    """The busiest has 1.5 of them in the mean; of two switches 1.75."""
    assert imbalance(2, 2, 1) == pytest.approx(1.5)
    assert imbalance(2, 2, 2) == pytest.approx(1.75)


@pytest.mark.parametrize("uplinks", [4, 32, 128])
def test_many_flows_are_as_independent_as_they_are_taken_to_be(uplinks: int) -> None:
    """At the number from which on the exact count is left."""
    exact, quick = imbalance(512, uplinks, 8), imbalance(513, uplinks, 8)
    assert quick == pytest.approx(exact, rel=0.03)


@given(st.integers(1, 400), st.integers(1, 64), st.integers(1, 64))
def test_an_imbalance_is_between_none_and_one_uplink_for_all(
    flows: int, uplinks: int, switches: int
) -> None:
    """It falls towards 1 where flows are many."""
    found = imbalance(flows, uplinks, switches)
    assert 1 - 1e-6 <= found <= uplinks * (1 + 1e-6)
