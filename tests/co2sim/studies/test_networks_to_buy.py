"""`co2sim fabric`: prices by hand, and the choice, which is the cheapest that loses little."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from co2sim.catalog.facts import rates
from co2sim.common import convert
from co2sim.common.errors import OptionError
from co2sim.prediction import driver
from co2sim.prediction.ownership import Part
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.report.text.fabric import plain, screen
from co2sim.report.text.screen import Screen
from co2sim.studies.fabric import OFF, Network, Networks, Training, Tried, bench, networks
from co2sim.studies.run_all import Failure

HERE = ("fabric", "-c", "dgx-h100", "-m", "gpt2-small")
FEW = ("--nics", "8,2", "--oversubscription", "1,4", "--jobs", "1")


def case(strategy: str = "fsdp", gpus: int = 512, **sets: str) -> Question:
    """GPT-2 small on DGX H100, one sample a GPU; two underscores in a name are a dot."""
    overrides = {name.replace("__", "."): text for name, text in sets.items()}
    return Question(
        cluster="dgx-h100",
        model="gpt2-small",
        strategy=strategy,
        gpus=gpus,
        global_batch=gpus,
        overrides=overrides,
    )


def price(name: str) -> float:
    """Of the catalog."""
    return float(rates("ownership")[name].value.split()[0])


# --- which networks, and what they cost -----------------------------------------------------------


def test_a_network_has_the_price_and_the_power_of_its_parts() -> None:
    """64 nodes of 8 cards without oversubscription: 16 leaves, 8 spines, 1,024 links."""
    tried = Tried(oversubscription=(1,), nics=(8,))
    network = bench([case()], tried).networks[0]
    assert (network.tiers, network.links) == ((16, 8), 1024)
    usd = 512 * price("nic") + 1024 * price("link") + 24 * price("switch")
    assert network.usd == pytest.approx(usd / 512)
    watts = 512 * price("nic_power") + 24 * 1000 * price("switch_power")
    assert network.watts == pytest.approx(watts / 512)
    nodes = 512 * float(rates("nodes")["h100"].value.split()[0]) * (1 + price("spares"))
    others = 1024 * price("link") + 24 * price("switch")
    assert network.share == pytest.approx(usd / (nodes + others))


def test_cards_are_halved_and_equal_networks_are_there_once() -> None:
    """With one card a node 64 nodes have one switch, whatever the oversubscription."""
    made = bench([case()]).networks
    assert [network.nics for network in made] == [8] * 4 + [4] * 4 + [2] * 4 + [1]
    assert [network.oversubscription for network in made] == [1, 2, 4, 8] * 3 + [None]
    assert made[-1].tiers == (1,)


def test_a_tier_of_spines_is_there_where_leaves_do_not_suffice() -> None:
    """Switches of 8 ports join 32 nodes by two tiers; 64 need a third."""
    tried = Tried(oversubscription=(1, 3), nics=(1,), ports=8)
    two, three = (bench([case(gpus=8 * nodes)], tried).networks[0] for nodes in (32, 64))
    assert len(two.tiers) == 2
    assert len(three.tiers) == 3
    assert "fabric.spine.oversubscription" in three.changes


def test_what_cannot_be_wired_is_left_out_and_said() -> None:
    """A leaf of 8 ports has no uplink beside 8 cards; with one card it has."""
    made = bench([case(gpus=64)], Tried(oversubscription=(1,), nics=(8, 1), ports=8))
    assert [network.nics for network in made.networks] == [1]
    assert [name for name, _ in made.unwired] == ["8 x 400G, 1:1"]
    with pytest.raises(OptionError, match="no network of switches with 8 ports"):
        bench([case(gpus=128)], Tried(oversubscription=(1,), nics=(8,), ports=8))


def test_with_rails_each_card_of_a_node_has_its_own_leaf() -> None:
    """At 3:1 a leaf has 48 ports down: to 6 nodes of 8 cards, or to one card of 48 nodes."""
    shared, railed = (
        bench([case(gpus=768)], Tried(oversubscription=(3,), nics=(8,), rails=rails)).networks[0]
        for rails in (False, True)
    )
    assert shared.tiers == (16, 4)
    assert railed.tiers == (2 * 8, 4)


def test_rails_of_which_a_switch_joins_all_nodes_have_no_spines() -> None:
    """64 nodes on 8 switches of 64 ports, whatever the oversubscription."""
    (only,) = bench([case()], Tried(nics=(8,), rails=True)).networks
    assert (only.tiers, only.name) == ((8,), "8 x 400G, no spines")


def test_leaves_have_what_is_set_of_them_and_one_switch_has_not() -> None:
    """The ports of a switch are those of the command, where none are set."""
    made = bench([case(fabric__leaf__background="0.3")], Tried(oversubscription=(4,)))
    leaves = [one.load()[0].value.fabric for one in made.cases]
    found = [fabric and fabric.leaf and fabric.leaf.background for fabric in leaves]
    assert found == [0.3, 0.3, 0.3, None]


def test_ratios_are_read_as_they_are_said() -> None:
    """3:1 is 3."""
    assert convert.declared(Tried, {"oversubscription": "1,3:1"}) == {"oversubscription": (1, 3)}


def test_fast_cards_have_their_speed_in_digits() -> None:
    """3,200 Gbit/s by 3 cards; three digits below."""
    made = bench([case(fabric__nics="3")], Tried(oversubscription=(1,))).networks
    assert made[0].name == "3 x 1,067G, 1:1"


# --- which is chosen ------------------------------------------------------------------------------


def result() -> Result:
    """Of any case: what is chosen rests on paces and prices only."""
    return driver.run(case(gpus=16), progress=False)


RESULT = result()


def answer_of(priced: Sequence[tuple[float, float]], loses: float) -> Networks:
    """Networks of these prices and paces, with one strategy."""
    best = max(pace for _, pace in priced)
    made = [
        Network(
            nics=1,
            card=50e9,
            oversubscription=float(number),
            leaf_nodes=1,
            tiers=(1,),
            links=1,
            parts={"links": Part(usd, 0.0)},
            gpus=1,
            share=0.1,
            changes={"fabric.switch_ports": "64"},
        )
        for number, (usd, _) in enumerate(priced, 1)
    ]
    trained = [
        Training(
            strategy="fsdp",
            network=network,
            case=case(),
            result=RESULT,
            factor=1.0,
            pace=pace,
            lost=1 - pace / best,
            days=1 / pace,
            usd=usd / pace,
        )
        for network, (usd, pace) in zip(made, priced, strict=True)
    ]
    return Networks(
        tried=Tried(loses=loses),
        gpus=1,
        gpus_per_node=1,
        cards=1,
        planned=len(made),
        networks=made,
        unwired=(),
        trainings=trained,
        tokens=None,
    )


@given(
    st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)), min_size=1, max_size=12),
    st.floats(0, 0.9),
)
def test_no_cheaper_network_loses_as_little(
    priced: Sequence[tuple[float, float]], loses: float
) -> None:
    """The chosen one is within what may be lost; each that costs less is not."""
    found = answer_of(priced, loses)
    chosen, best = found.chosen("fsdp"), max(pace for _, pace in priced)
    assert 1 - chosen.pace / best <= loses
    for usd, pace in priced:
        assert usd >= chosen.network.usd or 1 - pace / best > loses
    cheapest = found.cheapest
    assert cheapest is not None
    assert cheapest.usd == min(usd / pace for usd, pace in priced)


def test_the_cheapest_training_fits_in_memory() -> None:
    """One that does not is only as fast as if it did."""
    found = answer_of([(1, 1), (2, 1)], 0.05)
    first, second = found.trainings
    full = replace(RESULT, fits_in_memory=False)
    without = replace(found, trainings=[replace(first, result=full), second])
    assert without.cheapest is without.trainings[1]
    assert without.chosen("fsdp") is without.trainings[1]


def test_no_network_is_recommended_for_what_fits_on_none() -> None:
    """The answer and its JSON say so, and the table has its row."""
    found = answer_of([(1, 1), (2, 1)], 0.05)
    full = replace(RESULT, fits_in_memory=False, gpu_memory_bytes=1.0)
    lacking = replace(found, trainings=[replace(one, result=full) for one in found.trainings])
    shown, values = screen(lacking), plain(lacking)
    assert shown.answer[0] == "No network is recommended for what does not fit in memory: fsdp."
    assert [row[0] for row in shown.table] == ["fsdp"]
    assert values["chosen"] == {"fsdp": None}
    assert values["cheapest"] is None


def test_an_answer_of_some_networks_says_of_how_many_it_is() -> None:
    """As where others failed, or after control-C."""
    found = replace(answer_of([(1, 1), (2, 1)], 0.05), planned=7)
    assert screen(found).answer[0].startswith("Not all networks were simulated. Of 2 of 7 networks")
    assert plain(found)["networks_planned"] == 7


def test_losses_are_near_where_their_error_would_turn_them() -> None:
    """4.3 % and 6 % may be 5 %; 4.2 %, 6.2 % and none may not. The error is that of the docs."""
    paces = [1, *(1 - lost for lost in (0.042, 0.043, 0.06, 0.062))]
    found = answer_of([(1, pace) for pace in paces], 0.05)
    assert found.near == 2
    said = dict(screen(found).rows)["network"]
    assert "2 of 5 cases may lose more or less than 5 %, as such predictions are 18 % off" in said
    validation = (ROOT / "docs/validation.md").read_text("utf-8")
    assert f"| all | | 35 | {100 * OFF:g} % |" in validation


def screen_of(asked: Question, tried: Tried) -> Screen:
    """With the same result everywhere."""
    made = bench([asked], tried)
    return screen(made.answer(dict.fromkeys(range(len(made.cases)), RESULT), None))


def test_what_would_turn_the_answer_is_said_where_leaves_have_uplinks() -> None:
    """Of scattered neighbours and hashed paths it stays; with one switch there is nothing."""
    tried = Tried(oversubscription=(8,), nics=(1, 8))
    for asked in (case(fabric__placement="scattered"), case(fabric__paths="hashed")):
        found = screen_of(asked, tried)
        assert found.rows[: found.least] == [("turns", found.rows[0][1])]
    found = screen_of(case(), tried)
    assert "fabric.placement=scattered" in dict(found.rows)["turns"]
    assert found.least == 0
    assert "turns" not in dict(screen_of(case(gpus=64), tried).rows)


def test_a_network_that_cannot_be_wired_is_no_silent_baseline() -> None:
    """72 cards a node: the line that says what is compared with stays on the screen."""
    racks = replace(case(), cluster="gb200-nvl72", gpus=576)
    found = screen_of(racks, Tried(oversubscription=(2,)))
    (network,) = found.rows[: found.least]
    assert "saves: beside 36 x 400G, 2:1" in network[1]
    assert "72 x 400G, 2:1 cannot be wired with 64 ports a switch" in network[1]


def test_cards_that_gpus_cannot_share_evenly_are_remarked() -> None:
    """3 cards of 8 GPUs; 4 are shared by pairs."""
    said = dict(screen_of(case(gpus=64), Tried(nics=(4, 3))).rows)["network"]
    assert "8 GPUs are taken to share 3 cards evenly" in said


# --- what networks do to speeds -------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zeropp"])
def test_fewer_cards_are_never_faster(strategy: str) -> None:
    """Nor is more oversubscription where neighbours stand anywhere."""
    sets = {"fabric__placement": "scattered"}
    tried = Tried(oversubscription=(1, 4, 8), nics=(8, 4, 2))
    found = networks([case(strategy, **sets)], tried, progress=False)
    paces = {(one.network.nics, one.network.oversubscription): one.pace for one in found.trainings}
    for ratio in (1, 4, 8):
        for more, fewer in pairwise((8, 4, 2)):
            assert paces[fewer, ratio] <= paces[more, ratio] * (1 + 1e-9)
    for nics in (8, 4, 2):
        for less, more in pairwise((1, 4, 8)):
            assert paces[nics, more] <= paces[nics, less] * (1 + 1e-9)
    assert paces[8, 8] < paces[8, 1]


def test_all_cards_without_oversubscription_are_as_fast_as_the_cluster() -> None:
    """The network that the cluster has where nothing is said."""
    asked = case()
    found = networks([asked], Tried(oversubscription=(1,), nics=(8,)), progress=False)
    alone = driver.run(asked, progress=False)
    assert found.trainings[0].result.tokens_per_s == pytest.approx(alone.tokens_per_s)


def test_steps_of_local_updates_count_as_what_they_are_worth() -> None:
    """With half of the worth it takes twice as long, and costs twice as much."""
    tried = Tried(oversubscription=(1,), nics=(8,))
    one, two = (
        networks(
            [case("co2(tau=4,delay=1)", 64)],
            tried,
            tokens=1e9,
            goal=Goal(factors={"co2": factor}),
            progress=False,
        ).trainings[0]
        for factor in (1.0, 2.0)
    )
    assert one.pace == pytest.approx(2 * two.pace)
    assert two.days is not None
    assert one.days is not None
    assert two.days == pytest.approx(2 * one.days)
    assert two.usd == pytest.approx(2 * (one.usd or math.nan))


def test_networks_without_a_result_of_each_strategy_are_left_out() -> None:
    """As after control-C: what is complete is answered."""
    tried = Tried(oversubscription=(1,), nics=(8, 4))
    made = bench([case("ddp", 64), case("fsdp", 64)], tried)
    outcomes = dict.fromkeys((0, 1, 2), RESULT)
    assert made.complete(outcomes) == [0]
    assert made.complete({}) == []


def test_a_strategy_that_runs_on_no_network_leaves_the_answer_of_the_others() -> None:
    """Its row says why; the others are compared on every network."""
    tried = Tried(oversubscription=(1,), nics=(8, 4))
    made = bench([case("ddp", 64), case("co2", 64)], tried)
    fails = Failure("co2", OptionError("no such tau"))
    outcomes = {0: RESULT, 1: fails, 2: RESULT, 3: fails}
    assert made.complete(outcomes) == [0, 1]
    found = made.answer(outcomes, None)
    assert found.strategies == ["ddp"]
    (name,) = plain(found)["refused"]
    assert plain(found)["refused"] == {name: "no such tau"}
    assert screen(found).rows[0] == ("refused", f"{name} runs on no network: no such tau")


# --- the command ----------------------------------------------------------------------------------


def test_words_tables_and_json_have_the_same_figures(cli: Command) -> None:
    """Speeds and prices of every network, and the chosen one in the first lines."""
    words = (*HERE, "-g", "512", "-s", "ddp", "-s", "zeropp", *FEW)
    found: dict[str, Any] = json.loads(cli(*words, "--json").out)
    assert len(found["networks"]) == 4
    assert len(found["trainings"]) == 8
    brief, full = cli(*words).out, cli(*words, "--full").out
    assert brief.count("\n") <= 15
    for one in found["trainings"]:
        assert f"{one['tokens_per_s']:,.0f}" in full
    for network in found["networks"]:
        assert f"{network['usd_per_gpu']:,.0f}" in full
    for one in found["chosen"].values():
        assert f"{one['network']} (" in " ".join(brief.split())
    assert found["cheapest"]["usd"] == min(one["usd"] for one in found["trainings"])


def test_the_picture_is_drawn(cli: Command, tmp_path: Path) -> None:
    """As PNG, or SVG with the names of the strategies."""
    pytest.importorskip("altair")
    words = (*HERE, "-g", "512", "-s", "ddp", "-s", "zeropp", *FEW)
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<svg")):
        path = tmp_path / f"networks.{kind}"
        assert cli(*words, "--figure", str(path)).code == 0
        content = path.read_bytes()
        assert content.startswith(start)
        assert kind == "png" or b"zeropp" in content


def test_the_answer_is_there_where_the_picture_fails(
    cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drawing that ends the process takes no answer with it."""
    pytest.importorskip("altair")

    def fails(*_: object, **__: object) -> bytes:
        raise OptionError("no memory")

    monkeypatch.setattr("co2sim.report.chart_style.picture", fails)
    words = (*HERE, "-g", "64", "-s", "ddp", "--nics", "8", "--jobs", "1")
    ended = cli(*words, "--figure", str(tmp_path / "networks.png"))
    assert ended.out.startswith("Of 1 network the cheapest")
    assert (ended.code, ended.err) == (2, "error: no memory\n")


def test_the_command_answers_for_the_strategies_that_run(cli: Command) -> None:
    """The other is said in one line on each stream; alone it is an error without any answer."""
    few = (*HERE, "-g", "64", "--nics", "8", "--oversubscription", "1", "--jobs", "1", "--pp", "2")
    why = "pp=2: tau and delay are not chosen for it; give numbers"
    ended = cli(*few, "-s", "ddp", "-s", "co2", "--json")
    assert json.loads(ended.out)["refused"] == {"co2(tau=auto)": why}
    line = f"error: runs on no network: co2(tau=auto): {why}; the others are above\n"
    assert (ended.code, ended.err) == (1, line)
    alone = cli(*few, "-s", "co2")
    assert (alone.code, alone.out) == (2, "")
    assert alone.err == f"error: co2(tau=auto) runs on no network: {why}\n"
