"""Owning beside renting: a hand computation, published counts, and what holds of any numbers."""

import json
import math
import tomllib
from dataclasses import fields, replace
from datetime import date
from typing import Any

import pytest
from commands import Command
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from places import ROOT

from co2sim.catalog import load_cluster
from co2sim.catalog.facts import Rate, rates
from co2sim.common.units import parse
from co2sim.hardware.fabric import fat_tree
from co2sim.prediction import power
from co2sim.prediction.ownership import Cards, Costs, Machine, ownership, spread

HERE = ("own", "-c", "dgx-h100", "-g", "256", "--years", "3")
MANY = settings(max_examples=settings.default.max_examples // 16)  # type: ignore[union-attr]
MACHINE = Machine(
    gpus=256, nodes=32, ports=8, port_speed=50e9, sites=1,
    working=595.0, waiting=105.0, most=700.0, node_power=2800.0, pue=1.58,
)  # fmt: skip
COSTS = Costs(
    node=38750, nic=2188, nic_power=33, switch=36000, switch_ports=64, switch_power=1100,
    link=1300, colocation=195, electricity=0.09, gpus_per_engineer=250,
    engineer=135520 / 31557600, spares=0.05, resale=0.7, capital=0.11, rent=2.95 / 3600,
)  # fmt: skip
DEARER = ("node", "switch", "link", "colocation", "electricity", "engineer", "spares", "capital")


def answer(cli: Command, *more: str) -> dict[str, Any]:
    """What `--json` prints."""
    ended = cli(*HERE, *more, "--json")
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def table(name: str) -> dict[str, float]:
    """The first words of the values of a table of the catalog, as numbers."""
    text = (ROOT / "co2sim" / "catalog" / f"{name}.toml").read_text()
    return {key: float(row["value"].split()[0]) for key, row in tomllib.loads(text).items()}


def test_256_h100_for_three_years_by_hand(cli: Command) -> None:
    """The sum of parts, from the tables alone: 32 nodes, 8 leaves, 4 spines, 512 links."""
    own, hours = table("ownership"), 3 * 8766
    paid = 256 * table("nodes")["h100"] * (1 + own["spares"])
    paid += 12 * own["switch"] + 512 * own["link"]
    sold = paid * own["resale"] ** 3
    rest = 32 * 2.8 + 12 * own["switch_power"]
    busy, idle = 256 * 0.85 * 0.7, 256 * 0.105
    kwh = 1.58 * hours * (rest + 0.7 * busy + 0.3 * idle)
    total = (
        paid - sold + own["capital"] * 3 * (paid + sold) / 2
        + 36 * own["colocation"] * (256 * 0.7 + rest)
        + kwh * table("electricity")["virginia"]
        + 3 * own["engineer"] * 256 / own["gpus_per_engineer"]
    )  # fmt: skip
    found = answer(cli, "--utilization", "70%")
    assert found["usd"] == pytest.approx(total, rel=1e-9)
    assert found["usd_per_used_gpu_hour"] == pytest.approx(total / (256 * hours * 0.7), rel=1e-9)


def test_a_network_is_priced_by_its_parts(cli: Command) -> None:
    """4 of 8 cards a node, 2:1: a leaf has 40 ports to 10 nodes, 20 up; 4 leaves, 2 spines."""
    own = table("ownership")
    fabric = {"switch_ports": "64", "nics": "4", "leaf.oversubscription": "2"}
    sets = [text for name, value in fabric.items() for text in ("--set", f"fabric.{name}={value}")]
    parts = answer(cli, *sets, "--set", "inter.bandwidth=1600 Gbit/s")["parts"]
    assert parts["network cards"] == pytest.approx(-32 * 4 * own["nic"])
    assert parts["links"] == pytest.approx((32 * 4 + 4 * 20) * own["link"])
    assert parts["leaf switches"] == pytest.approx(4 * own["switch"])
    assert parts["spine switches"] == pytest.approx(2 * own["switch"])
    nodes = 256 * table("nodes")["h100"] - 32 * 4 * own["nic"]
    assert parts["spare parts"] == pytest.approx(own["spares"] * nodes)


@MANY
@given(st.integers(1, 8), st.sampled_from((25e9, 50e9, 100e9)))
def test_nodes_with_other_cards_cost_and_draw_the_difference(cards: int, speed: float) -> None:
    """Of cards alone, with their spare parts; as many as they are sold with cost nothing."""
    bought = replace(MACHINE, ports=cards, port_speed=speed)
    usual = ownership(COSTS, replace(bought, sold=Cards(cards, speed)), 3, 0.7)
    assert "network cards" not in usual.parts
    other = ownership(COSTS, replace(bought, sold=Cards(cards + 2, speed)), 3, 0.7)
    less = 32 * 2 * COSTS.nic * math.sqrt(speed / 50e9)
    assert other.parts["network cards"] == pytest.approx(-less)
    assert other.paid == pytest.approx(usual.paid - less * (1 + COSTS.spares))
    assert other.power_kw == pytest.approx(usual.power_kw - 32 * 2 * COSTS.nic_power / 1000)


def test_trees_have_the_switches_of_published_designs() -> None:
    """32 leaves and 16 spines for 1,024 GPUs, 96 switches for 2,048 (E. Cheah, August 2024)."""
    assert fat_tree(1024, 64).tiers == (32, 16)
    assert fat_tree(2048, 64).switches == 96
    assert fat_tree(1024, 64).links == 2048
    assert fat_tree(64, 64).tiers == (1,)


@MANY
@given(st.integers(1, 300), st.sampled_from((4, 8)))
def test_a_tree_has_a_port_for_both_ends_of_every_link(ends: int, ports: int) -> None:
    """Links have two ends: at a node, or at a switch."""
    assume(ends <= (ports // 2) ** 2 * ports)
    tree = fat_tree(ends, ports)
    assert 2 * tree.links - ends <= tree.switches * ports
    assert tree.links >= ends


shares = st.floats(0.01, 1)


@MANY
@given(shares, shares)
def test_more_use_never_makes_an_hour_dearer(one: float, other: float) -> None:
    """What is paid anyway is divided by more hours."""
    low, high = sorted((one, other))
    dear = ownership(COSTS, MACHINE, 3, low).per_used_hour
    assert ownership(COSTS, MACHINE, 3, high).per_used_hour <= dear * (1 + 1e-12)


@MANY
@given(st.floats(1.0, 20.0), st.floats(0.25, 10))
def test_at_the_break_even_both_cost_the_same(rent: float, years: float) -> None:
    """Owning for the hours used there costs the rent of these hours."""
    costs = replace(COSTS, rent=rent / 3600)
    even = ownership(costs, MACHINE, years, 1.0).break_even
    assume(even <= 1)
    assert ownership(costs, MACHINE, years, even).per_used_hour == pytest.approx(rent, rel=1e-9)


@MANY
@given(st.floats(1.0, 20.0), st.floats(0.25, 10), shares)
def test_with_the_resale_that_turns_it_both_cost_the_same(
    rent: float, years: float, utilization: float
) -> None:
    """What is sold is a part of the price at the end; a resale of each year that leaves it."""
    costs = replace(COSTS, rent=rent / 3600)
    even = ownership(costs, MACHINE, years, utilization).kept_to_win
    assert even is not None
    assume(1e-6 < even < 1)
    turned = ownership(replace(costs, resale=even ** (1 / years)), MACHINE, years, utilization)
    assert turned.per_used_hour == pytest.approx(rent, rel=1e-6)


@MANY
@given(st.floats(0.25, 10), shares)
def test_a_contract_at_its_price_is_a_rent_that_is_always_used(years: float, used: float) -> None:
    """Every hour billed is every hour used: at that rent, owning wins from full use on."""
    price = ownership(COSTS, MACHINE, years, used).per_hour
    always = ownership(replace(COSTS, rent=price / 3600), MACHINE, years, 1.0)
    more = (1 - used) * MACHINE.pue * (MACHINE.working - MACHINE.waiting) / 1000
    assert always.per_hour == pytest.approx(price + more * COSTS.electricity)


@MANY
@given(st.sampled_from(DEARER), st.floats(1, 3))
def test_dearer_parts_never_make_owning_win_earlier(name: str, factor: float) -> None:
    """The break-even rises with every price."""
    more: dict[str, Any] = {name: min(getattr(COSTS, name) * factor, 1e9)}
    assume(name not in {"spares", "capital"} or more[name] <= 1)
    dear = ownership(replace(COSTS, **more), MACHINE, 3, 0.7)
    assert dear.break_even >= ownership(COSTS, MACHINE, 3, 0.7).break_even * (1 - 1e-12)


def test_a_rent_below_the_electricity_never_loses() -> None:
    """No utilization makes owning cheaper."""
    cheap = replace(COSTS, rent=1e-9)
    assert ownership(cheap, MACHINE, 3, 0.7).break_even == math.inf


def test_one_node_and_several_sites_have_their_own_networks() -> None:
    """No switch for one node; two sites of 16 nodes have a tree each."""
    one = replace(MACHINE, gpus=8, nodes=1)
    assert ownership(COSTS, one, 3, 0.7).network.switches == 0
    two = ownership(COSTS, replace(MACHINE, sites=2), 3, 0.7).network
    assert two.tiers == tuple(2 * count for count in fat_tree(128, 64).tiers)


def test_ranges_join_as_independent_errors() -> None:
    """Two numbers that each move a figure by a factor of e move it by e to the root of 2."""
    low, high = spread(1.0, [(1 / math.e, math.e), (math.e, 1 / math.e)])
    assert (low, high) == (pytest.approx(math.exp(-math.sqrt(2))), pytest.approx(1 / low))
    assert spread(1.0, [(0.5, math.inf)]) == (pytest.approx(0.5), math.inf)
    assert spread(math.inf, [(0.5, math.inf)]) == (0.5, math.inf)


UNITS = {"nodes": "USD", "electricity": "USD/kWh"}


def test_every_number_has_a_source_a_date_and_ends_around_it() -> None:
    """Of nodes, electricity, prices, grids and all else."""
    for kind in ("nodes", "electricity", "ownership", "prices", "grids"):
        for name, rate in rates(kind).items():  # type: ignore[arg-type]
            value, *ends = (
                None if text is None else float(text.split()[0])
                for text in (rate.value, rate.low, rate.high)
            )
            assert all(end is None for end in ends) or ends[0] <= value <= ends[1], name
            assert rate.date[:2] == "20"
            assert len(rate.source) > 20
            if kind in UNITS:
                assert parse(rate.value, UNITS[kind]) == value  # type: ignore[arg-type]


def test_every_number_of_owning_can_be_set(cli: Command) -> None:
    """A number that is set has no range, and says so; the rent is the cluster's price."""
    asked = {one.name: None for one in fields(Costs)} | {"rent": None}
    found = answer(cli)["numbers"]
    assert found.keys() == asked.keys()
    for name in asked.keys() - {"rent"}:
        changed = answer(cli, "--set", f"own.{name}={found[name]['value']}")["numbers"][name]
        assert (changed["low"], changed["source"]) == (None, "set by the user")
    rented = answer(cli, "--set", "price_per_gpu=4 USD/h")
    assert rented["rent_usd_per_gpu_hour"] == pytest.approx(4)


def test_the_answer_fits_a_screen_and_its_tables_follow_on_request(cli: Command) -> None:
    """At most 15 lines; all parts with their prices are in the full output."""
    assert cli(*HERE).out.count("\n") <= 15
    full = cli(*HERE, "--full").out
    assert all(part in full for part in answer(cli)["parts"])


def test_prices_of_more_than_two_years_ago_are_marked() -> None:
    """By the month, and by the year where no month is known."""
    now = date(2026, 11, 30)
    for text, old in (("2024-10-31", True), ("2024-11", False), ("2023", True), ("2026-05", False)):
        rate = Rate(name="", value="", date=text, source="")
        assert (rate.dated(now) != text[:7]) == old


def test_an_example_of_the_power_of_a_node_grows_with_its_gpus() -> None:
    """Of a DGX H100 it is what was measured there, of a rack of 72 GPUs of 1.2 kW 43.2 kW."""
    node, rack = load_cluster("dgx-h100"), load_cluster("gb200-nvl72").value
    measured = next(fact.value for fact in node.facts if fact.path == "node_power")
    assert power.examples(node.value)["node_power"] == measured
    assert parse(power.examples(rack)["node_power"], "W") == pytest.approx(0.5 * 72 * 1200)


def test_a_rack_draws_what_a_rack_draws() -> None:
    """All GPUs at their TDP, and the rest: 120 to 135 kW."""
    for name in ("gb200-nvl72", "gb300-nvl72", "nd-gb200-v6"):
        rack = load_cluster(name).value
        assert rack.node_power is not None
        assert rack.gpu.tdp is not None
        assert 120e3 <= rack.node_power + rack.gpus_per_node * rack.gpu.tdp <= 135e3
