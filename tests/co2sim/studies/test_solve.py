"""`co2sim solve` answers the inverse question: what it finds reaches the target, no less does."""

import json
import math
import shlex
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tiny
from commands import Command
from hypothesis import given, settings
from hypothesis import strategies as st

from co2sim.hardware.cluster import Cluster
from co2sim.prediction import driver
from co2sim.prediction.goodput import goodput_of
from co2sim.prediction.question import Question
from co2sim.simulation.noise import Noise
from co2sim.studies.candidates import command_of
from co2sim.studies.sensitivity import MORE, levers
from co2sim.studies.solve import Solved, solve, spans
from co2sim.studies.targets import METRICS, Axis, Target, View, axis_of, target_of


def roomy(nodes: int, per_node: int, **changes: Any) -> Cluster:
    """The tiny cluster with GPUs that have room for the driver and NCCL."""
    return tiny.cluster(nodes, per_node, gpu=tiny.gpu(memory=1e11), **changes)


def tiny_case(strategy: str, **changes: object) -> Question:
    """The tiny model on four nodes of one GPU, or what is said instead."""
    fields = {"cluster": roomy(4, 1), "model": tiny.model(), "strategy": strategy}
    return Question(**{**fields, **changes})  # type: ignore[arg-type]


def found_for(case: Question, path: str, target: str, low: str, high: str, **more: Any) -> Solved:
    """The answer."""
    return solve(case, axis_of(case, path, low, high), target_of(target), **more)


# --- it inverts `run` ---------------------------------------------------------------------------

FEWER = settings(max_examples=settings.default.max_examples // 4)
"""Each example solves, with some fifty simulations."""
STRATEGIES = ["ddp", "zero1", "zero3", "zeropp", "fsdp", "local_sgd(tau=3)", "co2(tau=2,delay=1)"]


@FEWER
@given(
    st.sampled_from(STRATEGIES),
    st.floats(1e7, 1e10),
    st.sampled_from([(4, 1), (2, 2), (3, 4)]),
    st.sampled_from(["tokens_per_s", "step", "mfu", "exposed"]),
)
def test_what_it_finds_gives_the_target(
    strategy: str, bandwidth: float, layout: tuple[int, int], name: str
) -> None:
    """The figure at a bandwidth, solved for, and run again: the same within 0.1 %."""
    case = tiny_case(strategy, cluster=roomy(*layout))
    axis = axis_of(case, "inter.bandwidth", f"{bandwidth / 20!r} B/s", f"{bandwidth * 20!r} B/s")
    metric = METRICS[name]

    def figure(value: float) -> float:
        return metric.of(View(driver.run(axis.at(case, value))))

    goal = figure(bandwidth)
    if goal <= 0:  # nothing is exposed: any bandwidth beyond will do
        return
    answer = solve(case, axis, Target(name, (goal,))).answers[0]
    assert answer.met, "the bandwidth itself meets it"
    first = answer.met[0]
    assert first.open_high
    assert first.low <= bandwidth * (1 + 1e-6)
    if not first.open_low:
        assert figure(first.low) == pytest.approx(goal, rel=1e-3)
        less = figure(first.low * (1 - 1e-5))
        assert not Target(name, (goal,)).met(less, goal), "no less does"


@FEWER
@given(st.integers(1, 12), st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99]))
def test_a_blocking_average_needs_the_bandwidth_of_its_closed_form(tau: int, share: float) -> None:
    """Four ranks, 2000 fp32 numbers: 2 (n-1)/n S / B is at most (1 - u) / u of the computing."""
    case = tiny_case(f"local_sgd(tau={tau})")
    free = driver.run(replace(case, cluster=roomy(4, 1, inter=tiny.Link(1e30))))
    expected = 1.5 * 8000 * share / ((1 - share) * free.round_time_s)
    target = f"utilization={100 * share}%"
    (answer,) = found_for(case, "inter.bandwidth", target, "1 MB/s", "1e6 GB/s").answers
    (span,) = answer.met
    assert span.low == pytest.approx(expected, rel=1e-6)
    assert span.open_high


@pytest.mark.parametrize("steps", [1, 3])
def test_whole_numbers_are_found_exactly(steps: int) -> None:
    """The least tau that exposes at most 10 %, as a search from 1 on finds it."""
    cluster = roomy(4, 1, inter=tiny.Link(1.5 * 8000 / (steps * tiny.local_step())))
    case = tiny_case("local_sgd(tau=1)", cluster=cluster)
    (answer,) = found_for(case, "strategy.tau", "exposed=10%", "1", "70").answers
    shares = (
        (tau, driver.run(replace(case, strategy=f"local_sgd(tau={tau})")).exposed_share)
        for tau in range(1, 71)
    )
    assert answer.met[0].low == next(tau for tau, share in shares if share <= 0.1)


def test_gpus_are_full_nodes() -> None:
    """Of nodes of four GPUs only multiples of four are looked at, and found."""
    case = tiny_case("ddp", cluster=roomy(2, 4))
    axis = axis_of(case, "gpus")
    assert (axis.low, axis.step) == (4, 4)
    solved = solve(case, axis, target_of("tokens_per_s=1e9"))
    for count, _ in solved.points:
        assert count % 4 == 0
    (span,) = solved.answers[0].met
    before, there = (
        driver.run(replace(case, gpus=round(n))).tokens_per_s for n in (span.low - 4, span.low)
    )
    assert before < 1e9 <= there


# --- crossings ----------------------------------------------------------------------------------


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=4, max_size=12),
    st.floats(0.01, 0.99),
    st.sampled_from(["mfu", "exposed"]),
)
def test_every_crossing_between_points_is_found(
    heights: list[float | None], value: float, name: str
) -> None:
    """Against a dense look at a figure of straight pieces, some of which are missing."""
    axis = Axis("x", "", 1.0, 100.0)
    knots = np.geomspace(1, 100, len(heights))
    target = Target(name, (value,))

    def figure(x: float) -> float | None:
        place = min(max(int(np.searchsorted(knots, x, side="right")) - 1, 0), len(knots) - 2)
        low, high = heights[place], heights[place + 1]
        if low is None or high is None:
            return heights[int(np.argmin(np.abs(knots - x)))] if x in knots else None
        part = math.log(x / knots[place]) / math.log(knots[place + 1] / knots[place])
        return low + (high - low) * min(max(part, 0.0), 1.0)

    found = list(spans(figure, [float(x) for x in knots], axis, target, value))
    for one, other in pairwise(found):
        assert one.low <= one.high < other.low <= other.high
    for x in knots:
        inside = any(span.low <= x <= span.high for span in found)
        assert inside == target.met(figure(float(x)), value)
    for span in found:
        for edge in (span.low, span.high):
            assert target.met(figure(edge), value), "the edge itself meets the target"


@pytest.mark.slow
def test_pessimists_need_more_than_optimists() -> None:
    """The ends of the interval of tokens/s give an interval of the answer around it."""
    case = Question(
        cluster="a100-tcp80-calibrated", model="transnormer-7b", strategy="zero2", gpus=64
    )
    goal = f"tokens_per_s={driver.run(case).tokens_per_s!r}"
    solved = found_for(case, "inter.bandwidth", goal, "1 Gbit/s", "10 Tbit/s")
    (answer,) = solved.answers
    assert answer.hoped[0].low < answer.met[0].low
    assert not answer.sure or answer.met[0].low < answer.sure[0].low


@pytest.mark.slow
def test_what_does_not_fit_in_memory_is_no_answer() -> None:
    """The micro-batches that give an MFU are those that fit, up to the largest that fits."""
    case = Question(cluster="dgx-h100", model="gpt2-xl", strategy="ddp", gpus=16)
    memory = found_for(case, "micro_batch", "fits", "1", "64").answers[0]
    assert memory.sure is None, "the interval of tokens/s is none of memory"
    fits = memory.met[0].high
    solved = found_for(case, "micro_batch", "mfu=10%", "1", "64")
    assert solved.answers[0].met[-1].high == fits
    assert solved.large > 0
    assert solved.best[0] <= fits


def test_what_binds_is_what_moves_the_figure() -> None:
    """The number named raises the figure asked for, more than any other does."""
    alone = {"interference": "0", "node_spread": "0"}
    case = Question(
        cluster="dgx-h100", model="gpt2-small", strategy="zero1", gpus=64, overrides=alone
    )
    solved = found_for(case, "inter.bandwidth", "utilization=99.9%", "1 Gbit/s", "100 Tbit/s")
    name, better = solved.binds
    assert better > solved.best[1]
    assert name in {"intra.bandwidth", "intra.latency", "inter.latency"}


# --- levers and commands ------------------------------------------------------------------------


def test_levers_are_what_a_tenth_more_gives() -> None:
    """The same as a run with the number changed; the strongest is first."""
    price = {"price_per_gpu": "2 USD/h"}
    case = Question(
        cluster="a100-tcp80", model="gpt2-small", strategy="ddp", gpus=16, overrides=price
    )
    found = levers(case)
    gains = [lever.gain for lever in found]
    assert gains == sorted(gains, reverse=True)
    by_name = {lever.change: lever for lever in found}
    before = driver.run(case).tokens_per_s
    wider = replace(case, overrides={**price, "inter.bandwidth": f"{80 * MORE} Gbit/s"})
    gain = driver.run(wider).tokens_per_s / before - 1
    assert by_name["inter.bandwidth"].gain == pytest.approx(gain, rel=1e-6)
    more = driver.run(replace(case, gpus=24)).tokens_per_s
    gpus = gain * before / ((more - before) / 8)
    assert by_name["inter.bandwidth"].gpus == pytest.approx(gpus, rel=1e-6)
    assert by_name["inter.bandwidth"].worth_per_hour == pytest.approx(2 * gpus, rel=1e-6)
    assert by_name["inter.latency"].gain > 0


@pytest.mark.parametrize(
    "case",
    [
        Question(cluster="a100-tcp80", model="gpt2-small", strategy="ddp"),
        Question(
            cluster="a100-tcp80",
            model="gpt2-small",
            strategy="co2.published(tau=12,worker=node)",
            gpus=16,
            micro_batch=2,
            accumulation=2,
            precision="fp16",
            recompute="full",
            overrides={"inter.bandwidth": "25 Gbit/s", "model.seq_len": "512"},
            noise=Noise(jitter=0.1, seed=3, node_speed={1: 0.9}),
            rounds=2,
            fold=False,
        ),
    ],
)
def test_the_command_of_a_case_repeats_it(case: Question, cli: Command) -> None:
    """What it prints is the result of the case, to the last digit, and a verdict if it has one."""
    _, *arguments = shlex.split(command_of(case))
    ended = cli(*arguments, "--json")
    assert ended.code == 0, ended.err
    printed = json.loads(ended.out)
    printed.pop("verdict", None)
    assert printed == json.loads(json.dumps(driver.run(case).to_dict()))


# --- the command --------------------------------------------------------------------------------


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_goodput_is_solved_for_and_inverted() -> None:
    """At the mean time between failures that is found, the useful share is the one asked for."""
    case = Question(
        cluster="dgx-h100",
        model="gpt2-small",
        strategy="ddp",
        gpus=64,
        overrides={"failures": "meta-rsc-1"},
    )
    solved = found_for(case, "failures.node", "goodput=90%", "1 h", "1000 days")
    (span,) = solved.answers[0].met
    assert span.open_high
    there = solved.axis.at(case, span.low)
    cluster, model = there.load()
    found = goodput_of(driver.run(there), cluster.value, model.value)
    assert found.useful == pytest.approx(0.9, rel=1e-3)
