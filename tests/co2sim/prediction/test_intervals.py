"""90 % intervals: where they come from, how wide they are, and the order."""

import json
import math
import re
from dataclasses import replace

import one_sample
import pytest
from commands import Command
from hypothesis import given
from hypothesis import strategies as st
from one_sample import simulate

import co2sim
from analysis.published.runs import training_runs
from co2sim.catalog import load_cluster, load_stack
from co2sim.hardware.cluster import Cluster, Scatter
from co2sim.prediction.driver import run
from co2sim.prediction.evidence import nearest
from co2sim.prediction.intervals import (
    Interval,
    alike,
    distance,
    error_model,
    overlaps,
    undecided,
    unshared,
)
from co2sim.prediction.likeness import shares
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.strategies import STRATEGIES


def width(result: co2sim.Result) -> float:
    """log(high / low)."""
    return math.log(result.tokens_per_s_high / result.tokens_per_s_low)


def probed(compute: float, communication: float) -> Cluster:
    """A cluster whose probe scattered so much."""
    cluster = load_cluster("a100-tcp80").value.resized(16)
    return replace(cluster, scatter=Scatter(compute, communication))


# --- where an interval comes from ----------------------------------------------------------------


def test_a_probed_cluster_has_the_interval_of_its_probe() -> None:
    """Wider with either scatter, and of no width without one."""

    def found(compute: float, communication: float) -> float:
        return width(one_sample.simulate(probed(compute, communication), "gpt2-small", "ddp"))

    assert found(0.0, 0.0) == 0
    assert 0 < found(0.02, 0.0) < found(0.02, 0.05) < found(0.04, 0.05)
    told = one_sample.simulate(probed(0.02, 0.05), "gpt2-small", "ddp").interval_source
    assert told.startswith("probe: ")
    assert re.findall(r"[0-9.]+%", told) == ["2.0%", "5.0%"]


def test_hidden_communication_that_may_become_exposed_widens_a_full_interval_below() -> None:
    """CO2 hides its average: quick sees none of it, full sees it come out on a slower network."""
    cluster = replace(probed(0.0, 0.5), inter=replace(probed(0, 0).inter, bandwidth=2e9))
    job = {
        "cluster": cluster,
        "model": "gpt2-xl",
        "strategy": "co2.published(tau=4, worker=node, inner=ddp)",
    }
    quick, full = (one_sample.simulate(**job, interval=how) for how in ("quick", "full"))
    assert full.tokens_per_s_low < quick.tokens_per_s_low


@pytest.mark.parametrize(
    ("cluster", "model", "strategy"),
    [
        ("dgx-b200", "gpt2-small", "ddp"),
        ("a100-roce800", "resnet-50", "ddp"),
        ("dgx2-calibrated", "gpt-18b", "zeropp"),
    ],
)
def test_elsewhere_the_interval_is_that_of_errors_on_published_runs(
    cluster: str, model: str, strategy: str
) -> None:
    """As far to both sides as the model of errors says, with the runs that are behind it."""
    result = one_sample.simulate(cluster, model, strategy, gpus=16)
    assert result.tokens_per_s_low * (result.tokens_per_s_high or 0) == pytest.approx(
        result.tokens_per_s**2
    )
    known = error_model()
    assert f"{known.runs} published training runs" in result.interval_source
    here = alike(result)
    assert width(result) == pytest.approx(2 * known.reach(here))


@given(
    st.floats(0, 0.9),
    st.floats(0, 1),
    st.sampled_from([1, 2, 16, 500]),
    st.sampled_from([1, 8, 64]),
    st.sampled_from(["exposed", "host"]),
)
def test_an_interval_is_smooth(
    exposed: float, host: float, nodes: int, divided: int, what: str
) -> None:
    """One percent more of anything changes its width by less than three percent."""
    here = replace(alike(FSDP), exposed=exposed, host=host, nodes=nodes, divided=divided)
    more = replace(here, **{what: min(1.0, 1.01 * getattr(here, what))})
    reach = error_model().reach
    assert reach(more) == pytest.approx(reach(here), rel=0.03)


def test_a_run_of_the_site_tells_what_an_unknown_stack_does() -> None:
    """An unknown stack is less sure than a known one, and as sure once a like run is measured."""
    like = alike(FSDP)
    unknown = replace(like, spread=load_stack("unknown").value.spread)
    reach = error_model().reach
    assert reach(unknown) > 1.05 * reach(like)
    assert reach(unknown, [unknown]) == pytest.approx(reach(like, [like]), rel=0.1)


def test_intervals_that_overlap_leave_the_order_undecided() -> None:
    """Those that touch, too; a prediction without interval is never called undecided."""
    one, other = Interval(1.0, 2.0, ""), Interval(2.0, 3.0, "")
    assert overlaps(one, other)
    assert overlaps(other, one)
    assert not overlaps(one, Interval(2.1, 3.0, ""))
    assert not overlaps(one, Interval(None, None, ""))


def test_where_the_host_is_slow_less_is_sure() -> None:
    """Its load is what it needs for what the GPU needs, and is small for long passes."""
    long, short = (
        one_sample.simulate("dgx-h100", "llama3.2-1b", "ddp", gpus=8, micro_batch=4, tp=tp)
        for tp in (1, 8)
    )
    assert short.host_load > 3 * long.host_load
    assert width(short) > 1.3 * width(long)


# --- published runs beside an answer ----------------------------------------------------------


@pytest.mark.parametrize("paper", ["torchtitan_h100", "nanotron", "deepspeed_azure"])
def test_a_published_run_is_the_nearest_to_itself(paper: str) -> None:
    """At distance 0, and further ones follow."""
    one = next(one for one in training_runs() if one.paper == paper and one.headline)
    case = one.case()
    near = nearest(case, run(case))
    assert near[0].distance == pytest.approx(0, abs=1e-6)
    assert one.tokens_per_s_per_gpu in {
        found.run.published for found in near if found.distance < 1e-6
    }
    distances = [found.distance for found in near]
    assert distances == sorted(distances)


def test_nothing_is_near_a_local_update_on_a_gpu_of_players(cli: Command) -> None:
    """And the first line of an answer says so; near a published run it says nothing."""
    case = Question(cluster="rtx3090-10x8", model="tiny-5m", strategy="diloco(tau=20)", gpus=16)
    result = run(case)
    assert result.unlike_published
    assert result.nearest_published == nearest(case, result)[0].distance
    place = ("-c", "rtx3090-10x8", "-m", "tiny-5m", "-s", "diloco:tau=20", "-g", "16")
    for command in ("run", "scale"):
        first = " ".join(cli(command, *place)[1].split())[:250]  # a title takes several lines
        assert "published run is near" in first
    known = Question(cluster="dgx-h100", model="llama3-8b", strategy="fsdp", gpus=64)
    assert run(known).nearest_published is not None
    assert not run(known).unlike_published


def test_evidence_is_in_the_json_if_it_is_asked_for(cli: Command) -> None:
    """With source, setting, published and predicted throughput, and distance."""
    job = ("run", "-c", "dgx-h100", "-m", "llama3-8b", "-s", "fsdp", "-g", "64", "--json")
    assert "evidence" not in json.loads(cli(*job)[1])
    (first, *_) = json.loads(cli(*job, "--evidence")[1])["evidence"]
    assert first["run"]["source"]
    assert first["run"]["published"] > 0
    assert first["distance"] >= 0


def test_every_strategy_shares_something_or_nothing() -> None:
    """Local updates share whole steps."""
    assert {shares(name) for name in STRATEGIES} == {"nothing", "states", "parameters", "steps"}


# --- which of two is faster -------------------------------------------------------------------


JOB = {"model": "llama3-8b", "gpus": 64}
FSDP = simulate("dgx-h100", strategy="fsdp", **JOB)  # type: ignore[arg-type]


def slower(result: Result, times: float) -> Result:
    """The same run at another speed, with its interval."""
    low, high = result.tokens_per_s_low, result.tokens_per_s_high
    speeds = {"tokens_per_s": result.tokens_per_s / times}
    speeds |= {"tokens_per_s_low": low / times, "tokens_per_s_high": high / times}
    return replace(result, **speeds)  # type: ignore[arg-type]


def test_what_two_runs_share_does_not_make_them_undecided() -> None:
    """On one cluster a third is decided, though the intervals overlap; on two it is not."""
    third = slower(FSDP, 1.35)
    assert third.tokens_per_s_high > FSDP.tokens_per_s_low
    assert not undecided(FSDP, third)
    for other in ({"cluster": "another"}, {"stack": "another"}, {"model": "another"}):
        assert undecided(FSDP, replace(third, **other))


@given(st.floats(1, 3))
def test_the_order_of_two_does_not_matter(times: float) -> None:
    """Undecided one way is undecided the other way; equal ones always are."""
    other = slower(FSDP, times)
    assert undecided(FSDP, other) == undecided(other, FSDP)
    assert undecided(FSDP, FSDP)
    if undecided(FSDP, other):
        assert undecided(FSDP, slower(FSDP, (1 + times) / 2))


def test_less_alike_runs_share_less() -> None:
    """Other strategies, sizes and batches are farther, so that more has to lie between them."""
    ddp = simulate("dgx-h100", strategy="zero2", **JOB)  # type: ignore[arg-type]
    assert distance(alike(FSDP), alike(ddp)) == pytest.approx(2)
    more = replace(FSDP, gpus=FSDP.gpus * 4)
    assert distance(alike(FSDP), alike(more)) == pytest.approx(1)
    assert unshared(FSDP, FSDP) < unshared(FSDP, more) < unshared(FSDP, ddp)
    assert unshared(FSDP, replace(FSDP, cluster="another")) == math.inf
