"""90 % intervals: where they come from, how wide they are, which runs are near, and the order."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import one_sample
import pytest
from commands import Command
from hypothesis import given
from hypothesis import strategies as st
from one_sample import simulate

import co2sim
from analysis.published import calibrate
from analysis.published.runs import training_runs
from co2sim.catalog import load_cluster, load_model
from co2sim.hardware.cluster import Cluster, Link, Scatter, Tier
from co2sim.prediction.calibrations import calibrations, figures_of, squares
from co2sim.prediction.driver import run
from co2sim.prediction.evidence import nearest
from co2sim.prediction.intervals import (
    Interval,
    RunKind,
    Situation,
    between,
    error_model,
    kind_of,
    overlaps,
    undecided,
    unshared,
)
from co2sim.prediction.likeness import shares
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.strategies import STRATEGIES, parse

CO2 = "co2.published(tau=12, worker=node, inner=zero2)"
ZEROPP = {"cluster": "dgx2-calibrated", "model": "gpt-18b", "strategy": "zeropp", "gpus": 32}


def width(result: co2sim.Result) -> float:
    """log(high / low)."""
    return math.log(result.tokens_per_s_high / result.tokens_per_s_low)


def probed(compute: float, communication: float) -> Cluster:
    """A cluster whose probe scattered so much."""
    cluster = load_cluster("a100-tcp80").value.resized(16)
    return replace(cluster, scatter=Scatter(compute, communication))


# --- kinds ---------------------------------------------------------------------------------------


def test_a_kind_is_generation_exchange_and_extent() -> None:
    """All strategies have one; a model of images, or a strategy that is not ours, has none.

    ZeRO++ without quantization exchanges what ZeRO does.
    """
    cluster, model = load_cluster("a100-roce800").value, load_model("gpt2-small").value
    one = cluster.resized(8)
    assert kind_of(cluster, parse("ddp"), model) == RunKind("A100", "gradients", "several nodes")
    assert kind_of(one, parse("fsdp"), model) == RunKind("A100", "parameters", "one node")
    assert kind_of(one, parse("fsdp:shard=1"), model) == RunKind("A100", "gradients", "one node")
    assert kind_of(one, parse("zeropp"), model) == RunKind("A100", "quantized", "one node")
    hpz = parse("zeropp(qwz=false, qgz=false)")
    assert kind_of(one, hpz, model) == RunKind("A100", "parameters", "one node")
    assert kind_of(one, parse(CO2), model) == RunKind("A100", "averages", "one node")
    for name in co2sim.strategies.STRATEGIES:
        assert kind_of(cluster, parse(name), model) is not None, name
    assert kind_of(cluster, parse("ddp"), load_model("resnet-50").value) is None


# --- where an interval comes from ----------------------------------------------------------------


def test_a_calibrated_cluster_has_the_interval_of_its_fit() -> None:
    """Quick: the factor times the scatter, with the constants' share; it holds the prediction."""
    result = one_sample.simulate(**ZEROPP)
    known = calibrations()["v100-zeropp"]
    assert result.interval_source.startswith("calibration v100-zeropp: ")
    sigma = known.scatter * math.sqrt(1 + 2 / 20)
    assert width(result) == pytest.approx(2 * known.factor * sigma)
    assert result.tokens_per_s_low < result.tokens_per_s < result.tokens_per_s_high


def test_moves_of_a_linear_model_are_those_of_error_propagation() -> None:
    """For log(prediction) = a x: the sums of squares are factor^2 a C a, on both sides."""
    slopes, covariance = np.array([2.0, -30.0]), np.array([[4e-4, 1e-5], [1e-5, 1e-6]])
    fit = replace(
        calibrations()["v100-zeropp"],
        bounds=((0.0, 1.0), (0.0, 0.1)),
        values=(0.5, 0.05),
        covariance=tuple(map(tuple, covariance.tolist())),
        factor=1.5,
    )

    def predicted(values: Mapping[str, float]) -> float:
        changes = [
            values.get(path, at) - at for path, at in zip(fit.paths, fit.values, strict=True)
        ]
        return math.exp(float(slopes @ changes))

    expected = 1.5**2 * float(slopes @ covariance @ slopes)
    (gpu,) = fit.gpus[0]
    pairs = [[(predicted(values), times) for values, times in pair] for pair in fit.moves(gpu)]
    assert squares(predicted({}), pairs) == pytest.approx((expected, expected))


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
        ("dgx2-ib1", "gpt-18b", "zero3"),
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
    here = Situation(
        exposed=result.exposed_share, nodes=result.nodes, divided=1, host=result.host_load or 0.0
    )
    assert width(result) == pytest.approx(2 * known.reach(here))


@given(st.floats(0, 0.9), st.floats(0, 12), st.floats(0, 8), st.floats(0, 3), st.integers(0, 3))
def test_an_interval_is_smooth(
    exposed: float, nodes: float, divided: float, host: float, what: int
) -> None:
    """One percent more of anything changes its width by less than three percent."""

    def reach(factors: list[float]) -> float:
        return error_model().reach(
            Situation(
                exposed=exposed * factors[0],
                nodes=2**nodes * factors[1],  # type: ignore[arg-type]
                divided=2**divided * factors[2],  # type: ignore[arg-type]
                host=host * factors[3],
            )
        )

    more = [1.01 if place == what else 1.0 for place in range(4)]
    assert reach(more) == pytest.approx(reach([1.0] * 4), rel=0.03)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpus": 1024}, ""),
        ({"gpus": 2048}, "2,048 GPUs"),
        ({"overrides": {"inter.bandwidth": "1 Gbit/s"}}, "125 Mbit/s a GPU"),
        ({"overrides": {"inter.latency": "20 us"}}, ""),
        ({"overrides": {"inter.latency": "50 us"}}, "there 14 us"),
        ({"precision": "fp32"}, "32 bits a number, there 16"),
        ({"strategy": "zero3"}, "zero3, there fsdp"),
        ({"strategy": "fsdp:shard=node", "gpus": 8}, ""),
    ],
)
def test_far_from_the_fitted_runs_the_interval_is_no_longer_that_of_the_fit(
    changes: dict[str, Any], reason: str
) -> None:
    """It says what is far, and is that of errors on published runs: always wider."""
    job = {"cluster": "h100-3200g", "model": "mpt-7b", "strategy": "fsdp", "gpus": 128}
    job["stack"] = "composer-2023"
    here = one_sample.simulate(**job)
    found = one_sample.simulate(**job | changes)
    assert here.interval_source.startswith("calibration mpt-fsdp")
    if not reason:
        assert found.interval_source == here.interval_source
        assert width(found) == pytest.approx(width(here))
        return
    assert found.interval_source.startswith("far from calibration mpt-fsdp (")
    assert reason in found.interval_source
    assert width(found) > 3 * width(here)


def test_intervals_that_overlap_leave_the_order_undecided() -> None:
    """Those that touch, too; a prediction without interval is never called undecided."""
    one, other = Interval(1.0, 2.0, ""), Interval(2.0, 3.0, "")
    assert overlaps(one, other)
    assert overlaps(other, one)
    assert not overlaps(one, Interval(2.1, 3.0, ""))
    assert not overlaps(one, Interval(None, None, ""))


# --- which runs are near -----------------------------------------------------------------------


def test_the_narrowest_place_between_nodes_counts() -> None:
    """Switches that are crossed divide what a card has, and a site has one uplink."""
    cluster, model = load_cluster("h100-3200g").value.resized(64), load_model("mpt-7b").value
    narrow = replace(cluster.inter, spine=Tier(4, oversubscription=4.0, congestion=1.5))
    tiered = replace(cluster, inter=narrow)
    assert figures_of(tiered, model, "bf16")["inter"] == pytest.approx(4e11 / 6)
    assert figures_of(tiered.resized(32), model, "bf16")["inter"] == pytest.approx(4e11)
    sites = replace(cluster, sites=2, wan=Link(1e9, 0.01))
    assert figures_of(sites, model, "bf16")["inter_latency"] == 0.01
    assert figures_of(sites, model, "bf16")["inter"] == pytest.approx(8e9 / 32)


# --- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", ["normal", "cauchy"])
def test_conformal_intervals_hold_90_percent_whatever_the_distribution(draw: str) -> None:
    """Of a further value, over many samples of 40: 37 / 41 = 0.902, heavy tails included."""
    chance = np.random.default_rng(3)
    sample = getattr(chance, f"standard_{draw}")
    inside = [
        abs(values[-1]) <= (calibrate.conformal_factor(values[:-1]) or 0.0)
        for values in sample((4000, 41))
    ]
    assert np.mean(inside) == pytest.approx(37 / 41, abs=0.015)


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
    pairs = error_model().pairs
    assert unshared(FSDP, FSDP) == pairs.reach(0)
    ddp = simulate("dgx-h100", strategy="zero2", **JOB)  # type: ignore[arg-type]
    assert between(FSDP, ddp) == pytest.approx(2)
    assert unshared(FSDP, ddp) == pytest.approx(pairs.reach(2))
    more = replace(FSDP, gpus=FSDP.gpus * 4)
    assert between(FSDP, more) == pytest.approx(1)
    assert unshared(FSDP, replace(FSDP, cluster="another")) == math.inf
