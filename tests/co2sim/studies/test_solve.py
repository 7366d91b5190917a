"""`co2sim solve` answers the inverse question: what it finds reaches the target, no less does."""

import json
import math
import re
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

from co2sim.common.units import parse
from co2sim.hardware.cluster import Cluster
from co2sim.prediction import driver
from co2sim.prediction.goodput import goodput_of
from co2sim.prediction.intervals import efficiency_ends, error_model
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
    """The figure at a bandwidth, solved for, and run again: the same within the search."""
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
    assert first.low <= bandwidth * (1 + 1e-3)
    if not first.open_low:
        assert figure(first.low) == pytest.approx(goal, rel=1e-2)
        less = figure(first.low * (1 - 1.5e-3))
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
    assert span.low == pytest.approx(expected, rel=2e-3)
    assert span.low >= expected * (1 - 1e-9)
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


# --- ranges of ratios ---------------------------------------------------------------------------


@given(st.floats(0.01, 0.999), st.floats(0.3, 3.0), st.integers(2, 64))
def test_the_range_of_an_efficiency_has_no_shared_error(
    ratio: float, speed: float, nodes: int
) -> None:
    """GPUs that are all faster, or slower, change neither the ratio nor its range."""
    alone = driver.run(tiny_case("ddp"))
    many = replace(alone, gpus=4 * nodes, nodes=nodes, tokens_per_s_per_gpu=ratio)
    many = replace(many, tokens_per_s=1.0, tokens_per_s_low=0.2, tokens_per_s_high=5.0)
    alone = replace(alone, tokens_per_s_per_gpu=1.0)
    faster = [
        replace(result, tokens_per_s_per_gpu=result.tokens_per_s_per_gpu * speed)
        for result in (many, alone)
    ]
    ends = efficiency_ends(many, alone)
    assert ends is not None
    assert efficiency_ends(*faster) == pytest.approx(ends, rel=1e-9)
    assert ends[0] <= ratio <= ends[1]


def test_a_ratio_is_no_surer_than_it_was_measured_but_surer_than_its_sides() -> None:
    """One of the same speed is as sure as published numbers; none is wider than the throughput."""
    scaling = error_model().scaling
    assert scaling is not None
    low, high = scaling.ends(1.0, 8)
    assert low == pytest.approx(math.exp(-scaling.factor * scaling.any))
    assert high == pytest.approx(1 / low)
    assert scaling.waiting(0.0, 8) == (0.0, 0.0)
    case = Question(cluster="dgx-h100", model="gpt2-xl", strategy="fsdp", gpus=64)
    many, alone = (driver.run(replace(case, gpus=gpus)) for gpus in (64, 8))
    ends = efficiency_ends(many, alone)
    assert ends is not None
    assert many.tokens_per_s_low is not None
    assert many.tokens_per_s_high is not None
    assert ends[1] / ends[0] < many.tokens_per_s_high / many.tokens_per_s_low


def test_the_edge_of_a_ratio_has_a_range_on_both_sides() -> None:
    """Where the number can make up for what is not shared, no end says that none is enough."""
    case = Question(cluster="dgx-h100", model="gpt2-xl", strategy="fsdp", gpus=32)
    solved = found_for(case, "inter.bandwidth", "efficiency=85%", "1 Gbit/s", "100 Tbit/s")
    (answer,) = solved.answers
    assert answer.hoped[0].low < answer.met[0].low < answer.sure[0].low
    assert answer.sure[0].open_high


@FEWER
@given(
    st.floats(1e-9, 1e15),
    st.sampled_from(["up", "down"]),
    st.sampled_from(["inter.bandwidth", "inter.latency"]),
)
def test_a_value_is_rounded_to_the_side_that_meets_the_target(
    value: float, way: str, path: str
) -> None:
    """To three digits; what is written is read again as the same number."""
    axis, up = axis_of(tiny_case("ddp"), path), way == "up"
    rounded = axis.rounded(value, up=up)
    assert rounded == pytest.approx(value, rel=1e-2)
    assert (rounded >= value * (1 - 1e-9)) if up else (rounded <= value * (1 + 1e-9))
    assert parse(axis.written(rounded), axis.unit) == pytest.approx(rounded, rel=1e-8)


# --- the first screen ---------------------------------------------------------------------------

SCREENS = [
    "inter.bandwidth -c dgx-h100 -m llama3-8b -g 64 -s co2:tau=48,worker=node -s fsdp -s zero3",
    "inter.bandwidth -c dgx-h100 -m gpt2-xl -g 64 -s fsdp",
    "gpus --for days=30 --tokens 2T -c dgx-h100 -m llama3-8b -s fsdp --set price_per_gpu=2USD/h",
    "strategy.tau --for exposed=5%,1% -c a100-tcp80 -m gpt2-xl -g 64 -s local_sgd:tau=1 -s co2",
    "micro_batch --for fits -c dgx-h100 -m llama3-8b -s fsdp",
]


@pytest.mark.parametrize("asked", SCREENS[1:3])
def test_the_answer_is_on_a_screen(asked: str, cli: Command) -> None:
    """At most 15 lines of 100 columns; all of it is longer, and begins with the same answer.

    To the accuracy of a crossing, which is looked for from other values.
    """
    ended = cli("solve", *shlex.split(asked))
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 100
    every = cli("solve", *shlex.split(asked), "--full").out.splitlines()
    assert len(every) > len(lines)
    number = re.compile(r"\d+(?:\.\d+)?")
    assert number.sub("", every[0]) == number.sub("", lines[0])
    found, again = ([float(text) for text in number.findall(line[0])] for line in (lines, every))
    assert again == pytest.approx(found, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [SCREENS[0], *SCREENS[3:]])
def test_the_answer_of_several_cases_is_on_a_screen(asked: str, cli: Command) -> None:
    """The same with strategies and values beside each other."""
    ended = cli("solve", *shlex.split(asked))
    assert ended.code == 0, ended.err
    assert len(ended.out.splitlines()) <= 15
    assert max(map(len, ended.out.splitlines())) <= 100


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


def test_gpus_of_a_pipeline_fill_its_stages() -> None:
    """Only whole nodes are looked at that GPUs which train on the same samples fill."""
    case = Question(
        cluster="dgx-h100", model="gpt2-xl", strategy="zero1", tp=8, pp=3, global_batch=480
    )
    axis = axis_of(case, "gpus")
    assert axis.step == 24  # 8 GPUs a node, 24 that train on the same samples
    assert axis.low == 24
