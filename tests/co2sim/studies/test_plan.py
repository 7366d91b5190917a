"""`co2sim plan` finds what simulating every candidate would find, and says what would change it."""

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny
from commands import OFFER, Command
from hypothesis import given, settings
from hypothesis import strategies as st

from co2sim.catalog import DEFAULT_STACK, load_stack
from co2sim.common import convert
from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import Cluster, Link
from co2sim.hardware.contract import Contract
from co2sim.prediction import driver
from co2sim.prediction.choose import fits
from co2sim.prediction.question import Question
from co2sim.prediction.step_factors import Goal
from co2sim.prediction.totals import totals_of
from co2sim.schedule.pipeline import PipelineSchedule
from co2sim.studies import plan as search_module
from co2sim.studies.candidates import (
    OPEN,
    OVER_SITES,
    Axes,
    Candidate,
    Objective,
    Space,
    Want,
    as_it_runs,
    candidates,
)
from co2sim.studies.grid import all_counts, display_name, offer_name, short_names, strategy_title
from co2sim.studies.plan import front, plan
from co2sim.studies.sensitivity import break_even


@pytest.fixture
def offers(tmp_path: Path) -> tuple[str, str]:
    """A dear fast network and a cheap slow one."""
    found = []
    for name, price, rate in (("fast", 3.0, 1600), ("slow", 2.0, 25)):
        path = tmp_path / f"{name}.toml"
        path.write_text(OFFER.format(name=name, price=price, rate=rate, nodes=4), "utf-8")
        found.append(str(path))
    return found[0], found[1]


def offer(
    name: str,
    price: float | None,
    bandwidth: float,
    memory: float = 1e11,
    contract: Contract | None = None,
    dearest: float | None = None,
) -> Cluster:
    """A tiny cluster of four nodes of two GPUs, at a price in USD per hour, with its high end."""
    return tiny.cluster(
        4,
        2,
        name=name,
        gpu=tiny.gpu(memory=memory, tdp=400.0, idle_power=60.0),
        node_power=500.0,
        pue=1.3,
        inter=Link(bandwidth),
        price_per_gpu=None if price is None else price / 3600,
        price_high=None if dearest is None else dearest / 3600,
        contract=contract,
    )


STRATEGIES = ("ddp", "zero3", "local_sgd(tau=12)")


def space_of(*clusters: Cluster, **changes: Any) -> Space:
    """Everything of two tiny offers."""
    fields: dict[str, Any] = {
        "job": Question(cluster="", model=tiny.model(), strategy="", global_batch=16),
        "clusters": clusters,
        "strategies": STRATEGIES,
        "gpus": [4, 8],
        "micro_batches": (1, 2),
    }
    return Space(**fields | changes)


def brute_force(space: Space, wanted: Objective) -> list[Candidate]:
    """All candidates within the limits, each simulated."""
    found = []
    for case in candidates(space).cases(space.headroom):
        result = driver.run(case)
        cluster = case.load()[0].value.resized(result.gpus)
        total = totals_of(case, result, wanted.tokens, wanted.goal)
        option = Candidate(case=case, cluster=cluster, result=result, totals=total)
        used = result.memory_bytes_per_gpu["total"]
        if option.within(wanted) and fits(used, result.gpu_memory_bytes, space.headroom):
            found.append(option)
    return found


FEWER = settings(max_examples=settings.default.max_examples // 8)
"""Each example simulates some fifty cases."""


# --- it is the best there is --------------------------------------------------------------------


@FEWER
@given(
    prices=st.tuples(st.floats(0.5, 5), st.floats(0.5, 5)),
    bandwidths=st.tuples(st.floats(1e5, 1e9), st.floats(1e5, 1e9)),
    want=st.sampled_from(["cheapest", "fastest", "least-energy"]),
    deadline=st.one_of(st.none(), st.floats(0.01, 1.0)),
    budget=st.one_of(st.none(), st.floats(0.5, 50.0)),
    dearer=st.one_of(st.none(), st.floats(1.0, 3.0)),
    contract=st.one_of(
        st.none(),
        st.builds(
            Contract,
            term=st.floats(0, 86400.0),
            whole=st.booleans(),
            reserved=st.dictionaries(st.sampled_from(("2 h", "1 day")), st.floats(1e-4, 1e-3)),
        ),
    ),
)
def test_it_finds_what_simulating_all_candidates_finds(
    prices: tuple[float, float],
    bandwidths: tuple[float, float],
    want: Want,
    deadline: float | None,
    budget: float | None,
    dearer: float | None,
    contract: Contract | None,
) -> None:
    """The choice, its gamble, the best of another group, and the front; without simulating all."""
    space = space_of(
        offer("a", prices[0], bandwidths[0], contract=contract),
        offer("b", prices[1], bandwidths[1], dearest=dearer and dearer * prices[1]),
    )
    wanted = Objective(want=want, tokens=1e9, deadline=deadline, budget=budget)
    found, all_ = plan(space, wanted), brute_force(space, wanted)
    if not all_:
        assert found.choice is None
        all_ = brute_force(space, replace(wanted, deadline=None, budget=None))
    else:
        best = min(option.score(want) for option in all_)
        sure = [option for option in all_ if option.within(wanted, surely=True)]
        if sure:
            assert found.choice.score(want) == min(option.score(want) for option in sure)
        else:
            chances = [search_module.chance_to_keep(one, wanted) for one in front(all_)]
            mine = search_module.chance_to_keep(found.choice, wanted)
            assert mine == pytest.approx(max(chances))
        all_ = sure or all_
        gamble = None if found.choice.score(want) == best else best
        assert (found.gamble and found.gamble.score(want)) == gamble
    groups: dict[object, float] = {}
    for option in all_:
        key = display_name(option.case.cluster), strategy_title(option.case.strategy)
        groups[key] = min(groups.get(key, math.inf), option.score(want))
    ranked = sorted(groups.values())
    assert [option.score(want) for option in found.best][:2] == ranked[:2]
    clusters = {cluster for cluster, _ in groups}
    assert {display_name(option.case.cluster) for option in found.best} == clusters
    for option in found.best:  # each is the best of its cluster and strategy, or is not shown
        key = display_name(option.case.cluster), strategy_title(option.case.strategy)
        assert option.score(want) == groups[key]
    if found.choice:
        runner_up = found.runner_up and found.runner_up.score(want)
        assert runner_up == (ranked[1] if len(ranked) > 1 else None)
    shown = [(option.totals.days, option.spent) for option in found.front]
    assert shown == [(option.totals.days, option.spent) for option in front(all_)]


def test_a_budget_that_the_range_of_a_price_breaks_costs_no_more_simulations() -> None:
    """Nothing keeps it at the highest price, and no candidate is simulated to learn that."""
    objective = Objective(want="cheapest", tokens=1e9)
    cheapest = plan(space_of(offer("a", 1.0, 1e9)), objective)
    assert cheapest.choice
    space = space_of(offer("a", 1.0, 1e9, dearest=10.0))
    found = plan(space, replace(objective, budget=2 * cheapest.choice.spent))
    assert found.choice
    assert found.choice.totals.cost_high > 2 * cheapest.choice.spent
    assert found.simulated <= cheapest.simulated


RANDOM = {
    "cluster": ("dgx-h100", "a100-tcp80", "p4d.24xlarge"),
    "stack": ("", "megatron-core", "torchtitan-eager"),
    "model": ("gpt2-small", "llama3.2-1b", "tinyllama-1.1b"),
}
"""Of random offers."""
QUICK = {6, 7, 11, 17}
"""Offers of which few candidates, or all, fit in memory, and that take a second or two each."""


def random_space(chance: Random) -> Space:
    """A small one: one offer at one size, with what divides the model left open in part."""
    cluster, stack, model = (chance.choice(RANDOM[name]) for name in RANDOM)
    rate = chance.choice([10, 50, 400, 1600])
    strategies = ["zero1", "ddp", "zero2", "fsdp", "fsdp:shard=node,reduce=bf16", "zero3"]
    return Space(
        job=Question(
            cluster="",
            model=model,
            strategy="",
            stack=stack,
            global_batch=chance.choice([32, 64, 128]),
            overrides={"inter.bandwidth": f"{rate} Gbit/s"},
        ),
        clusters=(cluster,),
        strategies=tuple(chance.sample(strategies, 2)),
        gpus=[chance.choice([8, 16, 32])],
        micro_batches=tuple(sorted(chance.sample([1, 2, 4], 2))),
        recomputes=("none", chance.choice(["full", "full/2", "norms"])),
        axes=Axes(
            tp=tuple(sorted(chance.sample([1, 2, 4], 2))),
            pp=tuple(sorted(chance.sample([1, 2, 4], 2))),
            interleave=(1, 2),
            schedule=chance.choice([None, ("zb_h1",), ("zbv", "1f1b")]),
        ),
        headroom=chance.choice([0.1, 0.8]),
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.nightly) for n in range(50)]
)
def test_it_chooses_of_a_random_offer_what_exhaustive_search_does(seed: int) -> None:
    """The same candidate, or one that is as fast; with few of them simulated."""
    space = random_space(Random(seed))  # noqa: S311 - offers are no secret
    wanted = Objective(want="fastest", tokens=1e10)
    every = brute_force(space, wanted)
    found = plan(space, wanted)
    if not every:
        assert found.choice is None
        return
    assert found.choice.totals.days == min(one.totals.days for one in every)
    chosen = [one.case for one in every if one.totals.days == found.choice.totals.days]
    assert found.choice.case in chosen
    assert found.simulated <= found.candidates


@pytest.mark.parametrize(
    ("stack", "asked", "expected"),
    [
        ("megatron-core", None, {"1f1b"}),
        ("colossalai", None, {"1f1b", "zbv"}),
        ("megatron-core", ("zb_h1", "dualpipe"), {"1f1b", "zb_h1", "dualpipe"}),
    ],
)
def test_schedules_are_those_of_the_stack_or_those_asked(
    stack: str, asked: tuple[PipelineSchedule, ...] | None, expected: set[str]
) -> None:
    """Without stages there is one only, and interleaved stages are in no V."""
    job = Question(cluster="", model="gpt2-small", strategy="", stack=stack, global_batch=64)
    space = Space(
        job=job,
        clusters=("dgx-h100",),
        strategies=("zero1",),
        gpus=[16],
        axes=Axes(tp=(1,), schedule=asked),
    )
    cases = [setup.case for setup in candidates(space).setups]
    assert {case.schedule for case in cases} == expected
    assert {case.schedule for case in cases if case.pp == 1} == {"1f1b"}
    assert not [case for case in cases if case.in_v and case.interleave > 1]


@FEWER
@given(
    bandwidths=st.tuples(st.floats(1e5, 1e9), st.floats(1e5, 1e9)),
    want=st.sampled_from(["cheapest", "fastest"]),
    deadline=st.floats(0.02, 0.5),
)
def test_without_counts_every_whole_number_of_nodes_is_tried(
    bandwidths: tuple[float, float], want: Want, deadline: float
) -> None:
    """The choice, the gamble and the best of another offer are those of all counts given."""
    offers = offer("a", 2.0, bandwidths[0]), offer("b", 2.1, bandwidths[1])
    space = space_of(*offers, gpus=None, job=replace(space_of().job, global_batch=48))
    wanted = Objective(want=want, tokens=1e9, deadline=deadline)
    found, named = plan(space, wanted), plan(replace(space, gpus=[2, 4, 6, 8]), wanted)
    for option in ("choice", "gamble", "rival"):
        ours, theirs = getattr(found, option), getattr(named, option)
        assert (ours and ours.case) == (theirs and theirs.case)


@pytest.mark.parametrize("nodes", [3, 64, 1000])
def test_counts_of_a_large_offer_are_near_each_other(nodes: int) -> None:
    """All nodes up to 64; of more the first ones, all, and none a tenth away from the next."""
    case = Question(cluster=tiny.cluster(nodes, 2), model=tiny.model(), strategy="ddp")
    counts = [size // 2 for size in all_counts(case)]
    assert counts[0] == 1
    assert counts[-1] == nodes
    assert all(b - a == 1 or b / a < 1.15 for a, b in pairwise(counts))
    assert len(counts) == nodes if nodes <= 64 else len(counts) < 100


# --- what would change it -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategies", "overrides", "what", "moved"),
    [
        (
            "gpt2-xl",
            ("fsdp", "zero2"),
            {},
            "inter.bandwidth",
            lambda value: {"inter.bandwidth": f"{value!r} B/s"},
        ),
        (
            "gpt2-small",
            ("zero1", "local_sgd(tau=12,worker=node)"),
            {"failures": "meta-rsc-1", "failures.node": "5 days"},
            "the rate of failures",
            lambda times: {"failures.node": f"{5 / times!r} days"},
        ),
    ],
    ids=["bandwidth", "failures"],
)
def test_at_a_break_even_both_take_as_long(
    offers: tuple[str, str],
    model: str,
    strategies: tuple[str, ...],
    overrides: dict[str, str],
    what: str,
    moved: Callable[[float], dict[str, str]],
) -> None:
    """With the bandwidth that is named, and with so many times as many failures."""
    job = Question(cluster="", model=model, strategy="", global_batch=128, overrides=overrides)
    space = Space(job=job, clusters=offers[:1], strategies=strategies, gpus="32")
    wanted = Objective(want="fastest", tokens=1e11, goal=Goal(factors={"local_sgd": 1.2}))
    found = plan(space, wanted)
    options = found.choice, found.runner_up
    values = [turn.at for turn in break_even(*options, wanted) if turn.what.startswith(what)]
    assert values
    for value in values:
        days = []
        for option in options:
            case = replace(option.case, overrides={**option.case.overrides, **moved(value)})
            total = totals_of(case, driver.run(case), wanted.tokens, wanted.goal)
            days.append(total.days)
        assert days[0] == pytest.approx(days[1], rel=5e-3)


# --- the command --------------------------------------------------------------------------------


def arguments(offers: tuple[str, str], *more: str) -> tuple[str, ...]:
    """A small plan."""
    small = ("-m", "gpt2-small", "--global-batch", "64", "-s", "ddp", "-s", "fsdp")
    return ("plan", "--tokens", "1e10", "-c", offers[0], "-c", offers[1], *small, *more)


@pytest.mark.slow
def test_the_answer_comes_in_words_and_its_commands_run(
    cli: Command, offers: tuple[str, str]
) -> None:
    """The choice first; the command that repeats it gives the same tokens/s."""
    found = json.loads(cli(*arguments(offers, "--json")).out)
    assert found["answer"][0].startswith("Take ")
    choice = found["choice"]
    again = json.loads(cli(*shlex.split(choice["command"])[1:], "--json").out)
    assert again["tokens_per_s"] == choice["result"]["tokens_per_s"]
    assert again["totals"]["days"] == choice["totals"]["days"]
    assert again["totals"]["cost"] == choice["totals"]["cost"]
    shown = cli(*arguments(offers, "--full"))
    assert shown.code == 0
    assert shown.out.startswith("Take ")
    assert choice["command"] in shown.out
    assert "torchrun --nnodes" in shown.out


@pytest.mark.slow
def test_control_c_answers_with_what_there_is(
    cli: Command, offers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the third candidate: an answer, a line that more was to come, exit code 130."""
    real, calls = search_module.run_on, []

    def stopping(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return real(*given, **named)

    monkeypatch.setattr(search_module, "run_on", stopping)
    ended = cli(*arguments(offers, "--full"))
    assert ended.code == 130
    assert ended.out.startswith("Stopped after 3 of ")
    assert "So far the best: " in ended.out
    assert "were not looked at" in ended.out
    assert "what was found until then is above" in ended.err


def test_local_updates_of_one_worker_are_no_candidate() -> None:
    """They are their inner steps by another name: one node of two is left out, and says why."""
    job = Question(cluster="dgx-h100", model="gpt2-small", strategy="ddp", global_batch=64)
    strategies = ("local_sgd:tau=12,worker=node",)
    found = candidates(Space(job=job, clusters=("dgx-h100",), strategies=strategies, gpus="8,16"))
    assert {one.case.gpus for one in found.setups} == {16}
    assert "two workers" in found.impossible["local_sgd(tau=12, worker=node) on 8 GPUs"]


def test_an_offer_is_called_by_its_name_up_to_a_colon(tmp_path: Path) -> None:
    """A file by the name in it; what the catalog has by its key; in short a file by its stem."""
    paths = []
    for key, name in (("a", "offer A: 4 nodes"), ("b", "offer B"), ("c", "offer A: dearer")):
        paths.append(str(tmp_path / f"{key}.toml"))
        Path(paths[-1]).write_text(OFFER.format(name=name, price=3, rate=400, nodes=4), "utf-8")
    assert [offer_name(path) for path in paths] == ["offer A", "offer B", "offer A"]
    assert offer_name("dgx-h100") == "dgx-h100"
    assert list(short_names([*paths, "dgx-h100"]).values()) == ["a", "b", "c", "dgx-h100"]
    alike = str(tmp_path / "other" / "b.toml")
    Path(alike).parent.mkdir()
    Path(alike).write_text(Path(paths[1]).read_text("utf-8"), "utf-8")
    assert list(short_names([paths[1], alike]).values()) == [paths[1], alike]


# --- what divides the model -----------------------------------------------------------------------


def meshes(model: str, strategy: str, gpus: int, axes: Axes = OPEN, **job: Any) -> set[str]:
    """What is tried, as texts."""
    given = {"global_batch": 512} | job
    case = Question(cluster="dgx-h100", model=model, strategy=strategy, **given)
    space = Space(job=case, clusters=("dgx-h100",), strategies=(strategy,), gpus=[gpus], axes=axes)
    return {one.case.mesh_words() for one in candidates(space).setups}


def test_published_layouts_are_tried() -> None:
    """NeMo's of Llama 3 70B and 405B, and experts on all GPUs of a node."""
    nemo = {"stack": "megatron-core"}
    assert "tp 4 + sp, cp 2, pp 4 x 5 chunks" in meshes("llama3-70b", "zero1", 128, **nemo)
    assert "tp 8 + sp, cp 2, pp 9 x 7 chunks" in meshes(
        "llama3-405b", "zero1", 2304, global_batch=1008, **nemo
    )
    assert "ep 8" in meshes("qwen3-30b-a3b", "fsdp", 64)


@pytest.mark.parametrize(("tokens", "most"), [(8192, 1), (32768, 1), (131072, 4)])
def test_torchtitan_divides_long_sequences_alone(tokens: int, most: int) -> None:
    """Its published runs leave each GPU 32,768 tokens, and predictions of them are far off."""
    longer = {"model.seq_len": str(tokens)}
    found = meshes("llama3-8b", "fsdp", 64, Axes(tp=(1,), pp=(1,)), overrides=longer)
    assert found == {"", *(f"cp {count}" for count in (2, 4, 8) if count <= most)}


def test_what_a_user_gives_is_all_that_is_tried() -> None:
    """One number or several; what the job says holds, too."""
    given = Axes(tp=(2, 4), cp=(1,), pp=(1,), sequence_parallel=False)
    assert meshes("llama3-8b", "zero1", 16, given) == {"tp 2", "tp 4"}
    assert meshes("llama3-8b", "fsdp", 16, tp=4, cp=2) == {"tp 4 + sp, cp 2"}


def test_gpus_that_do_not_divide_a_batch_in_words_take_one_near() -> None:
    """96 GPUs do not divide 512 samples, and take 576; a number of samples stays as it is."""
    job = Question(cluster="dgx-h100", model="llama3-8b", strategy="", global_batch="auto")
    space = Space(job=job, clusters=("dgx-h100",), strategies=("fsdp",), gpus=[64, 96])
    alone = [one for one in candidates(space).setups if not one.case.mesh_words()]
    assert {(one.case.gpus, one.global_batch) for one in alone} == {(64, 512), (96, 576)}
    given = replace(space, job=replace(job, global_batch=512), gpus=[96])
    with pytest.raises(OptionError, match="--global-batch 480"):
        given.batch_for(96)


@given(
    value=st.floats(1, 100),
    down=st.floats(1.01, 10),
    up=st.floats(1.01, 10),
    place=st.sampled_from([0.05, 0.5, 0.95]),
)
def test_the_chance_to_miss_a_limit_is_what_the_interval_leaves(
    value: float, down: float, up: float, place: float
) -> None:
    """At the good end of a 90 % interval 95 %, at the prediction half, at the bad end 5 %."""
    ends = value / down, value * up
    limit = {0.05: ends[0], 0.5: value, 0.95: ends[1]}[place]
    assert search_module.chance_to_miss(value, ends, limit) == pytest.approx(1 - place)


@pytest.mark.parametrize("days", [1, 92])
def test_a_deadline_may_be_a_date(days: int) -> None:
    """Of so many days from today; one that is over is refused."""
    today = datetime.now(UTC).date()
    reader = convert.reader(Objective, "deadline")
    assert reader
    assert reader.read("--deadline", f"{today + timedelta(days)}") == days
    with pytest.raises(OptionError, match="after today"):
        reader.read("--deadline", f"{today - timedelta(days - 1)}")


def test_sites_are_tried_as_workers() -> None:
    """Where GPUs are at several of them, and nobody said what to try."""
    job = Question(cluster="", model="gpt2-small", strategy="")
    space = Space(job=job, clusters=("two-sites-wan",), gpus=[32, 64])
    tried = {(one.case.gpus, one.case.strategy) for one in candidates(space).setups}
    over = {(gpus, how) for gpus, how in tried if "worker=site" in str(how)}
    stack = load_stack(DEFAULT_STACK).value
    assert over == {(64, as_it_runs(how, stack)) for how in OVER_SITES}


def test_of_several_stacks_the_best_is_that_of_the_best_alone(offers: tuple[str, str]) -> None:
    """A plan with two of them chooses what the better of two plans chooses."""
    stacks = ("torchtitan", "megatron-core")
    job = Question(cluster="", model="gpt2-small", strategy="", global_batch=64)
    wanted = Objective(want="fastest", tokens=1e10)
    fields: dict[str, Any] = {"clusters": offers[:1], "strategies": ("ddp", "fsdp"), "gpus": [16]}
    alone = [plan(Space(job=replace(job, stack=one), **fields), wanted).choice for one in stacks]
    together = plan(Space(job=job, stacks=stacks, **fields), wanted).choice
    assert together.totals.days == min(one.totals.days for one in alone if one)
    assert str(together.case.stack) in stacks
