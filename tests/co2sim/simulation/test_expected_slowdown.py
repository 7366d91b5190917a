"""Uneven nodes: what is expected of them agrees with what draws of them give, at any scale."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import integrate, special

from co2sim.hardware.cluster import Cluster, Link
from co2sim.schedule.schedule import Compute, Schedule
from co2sim.simulation import run as simulation
from co2sim.simulation.lowering import lower
from co2sim.simulation.metrics import window
from co2sim.simulation.noise import QUIET, Noise
from co2sim.simulation.run import execute, run

SIGMA = 0.05
NODES = 8


def cluster(inter: float = 2e9, nodes: int = NODES, **changes: Any) -> Cluster:
    """Nodes of one GPU; at 2 GB/s most communication of the tiny job is hidden."""
    return tiny.cluster(nodes, 1, inter=Link(inter), **changes)


def round_time(schedule: Schedule, on: Cluster, noise: Noise = QUIET) -> float:
    """Seconds of a late round."""
    slowdown = simulation.expected_slowdown(schedule, on, precision="bf16", noise=noise)
    trace = execute(schedule, on, precision="bf16", rounds=9, noise=noise, slowdown=slowdown)
    return window(trace, schedule, 4).round_time


# --- order statistics ----------------------------------------------------------------------------


def test_the_largest_of_few_normals_is_as_in_tables() -> None:
    """Closed forms for 2, 3 and 5 (David and Nagaraja 2003, section 3.2)."""
    assert simulation.expected_largest(1) == pytest.approx(0, abs=1e-12)
    assert simulation.expected_largest(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-12)
    assert simulation.expected_largest(3) == pytest.approx(1.5 / math.sqrt(math.pi), rel=1e-12)
    five = 5 / (4 * math.sqrt(math.pi)) * (1 + 6 / math.pi * math.asin(1 / 3))
    assert simulation.expected_largest(5) == pytest.approx(five, rel=1e-12)


@given(st.sampled_from([0.001, 0.036, 0.3, 1.0]), st.sampled_from([2, 64, 2048, 10_000_000]))
def test_the_slowest_is_the_mean_of_its_quantiles(sigma: float, count: int) -> None:
    """The integral of the quantile at u^(1/n), by another rule: up to 10 million nodes."""

    def quantile(u: float) -> float:
        normal = -special.ndtri(-np.expm1(np.log(u) / count))  # at u^(1/n), without rounding
        return float(np.exp(sigma * normal - sigma * sigma / 2))

    whole, _ = integrate.quad(quantile, 0, 1, limit=500, epsabs=0, epsrel=1e-9)
    assert simulation.expected_slowest(sigma, count) == pytest.approx(whole, rel=1e-6)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 10**7), st.integers(1, 10**7))
def test_more_nodes_or_more_spread_are_never_faster(
    one: float, other: float, few: int, many: int
) -> None:
    """And a single node, or equal ones, lose nothing."""
    low, high = sorted((one, other))
    few, many = sorted((few, many))
    slowest = simulation.expected_slowest(low, few)
    assert slowest >= 1 - 1e-12
    assert slowest <= simulation.expected_slowest(low, many) * (1 + 1e-12)
    assert slowest <= simulation.expected_slowest(high, few) * (1 + 1e-12)
    assert simulation.expected_slowest(high, 1) == simulation.expected_slowest(0.0, many) == 1


@given(st.integers(1, 10**6), st.floats(0, 5), st.floats(0, 5), st.floats(0, 3))
def test_slack_never_costs(count: int, slack: float, more: float, ahead: float) -> None:
    """More slack leaves less spread; none and no delay leave it all, endless slack nothing."""
    left = simulation.residual_sigma(SIGMA, count, slack, ahead)
    assert left <= SIGMA
    if count > 1:
        assert simulation.residual_sigma(SIGMA, count, slack + more, ahead) <= left
        assert simulation.residual_sigma(SIGMA, count, math.inf, ahead) == 0
    assert simulation.residual_sigma(SIGMA, count, 0.0, 0.0) == SIGMA


# --- folded expectation against unfolded draws ---------------------------------------------------

STRATEGIES = [
    ("ddp", 5e8),
    ("local_sgd(tau=4)", 1e12),
    ("diloco(tau=12,fragments=4)", 5e8),
    ("co2.published(tau=4)", 5e8),
    ("co2.published(tau=12)", 1e12),
    ("co2(tau=12,delay=2)", 5e8),
]
"""With bytes per second between nodes: fast enough to hide averages, and not."""

OTHERS = ["zero1", "zero3", "slowmo(tau=12)", "co2.published(tau=1)", "co2.published(tau=48)"]
NIGHTLY = [
    pytest.param(strategy, inter, marks=pytest.mark.nightly)
    for strategy in OTHERS
    for inter in (1e12, 5e8)
]
cases = pytest.mark.parametrize(("strategy", "inter"), [*STRATEGIES, *NIGHTLY])


@cases
def test_slow_nodes_cost_what_draws_of_them_cost(strategy: str, inter: float) -> None:
    """`node_spread` against 120 seeds of `Noise(straggle)`: within four standard errors.

    A round is convex in the time of the slowest node, so that its mean may lie above the round of
    the mean node: by less than a tenth of the loss here.
    """
    schedule, even = tiny.schedule(strategy, (NODES, 1)), cluster(inter)
    drawn = np.array(
        [round_time(schedule, even, Noise(straggle=SIGMA, seed=seed)) for seed in range(120)]
    )
    quiet = round_time(schedule, even)
    found = round_time(schedule, replace(even, node_spread=SIGMA))
    error = drawn.std() / math.sqrt(len(drawn))
    assert drawn.mean() == pytest.approx(found, abs=4 * error + 0.1 * (found - quiet))
    assert drawn.mean() >= found - 4 * error


def stepwise(schedule: Schedule, on: Cluster, rounds: int) -> NDArray[np.float64]:
    """Lengths of rounds where each node draws a factor in every step, all ranks unfolded."""
    plain = lower(
        schedule,
        on,
        precision="bf16",
        rounds=rounds,
        noise=Noise(jitter=0.5),  # only its arrays: the factors are replaced
        fold=False,
    )
    at = np.array(list(_steps(schedule)))
    drawn = np.random.default_rng(5).lognormal(
        -SIGMA * SIGMA / 2, SIGMA, (on.nodes, rounds, schedule.steps)
    )
    factors = drawn[:, :, at].reshape(on.nodes, -1)
    meetings = sum(map(len, plain.communicators.values()))
    noisy = replace(
        plain,
        class_factors=factors[[c.rank // on.gpus_per_node for c in plain.classes]].T,
        communicator_factors=np.ones((factors.shape[1], meetings)),
    )
    _, ends = run(noisy)
    last = max(n for n, op in enumerate(schedule.body) if isinstance(op.work, Compute))
    return np.diff(ends.reshape(rounds, len(schedule.body), -1)[rounds // 3 :, last].max(-1))


def _steps(schedule: Schedule) -> Iterator[int]:
    """The step that each op of the body belongs to, counted from 0."""
    step = 0
    for op in schedule.body:
        head = op.name.split(".")[0]
        step = int(head[1:]) if head[:1] == "s" and head[1:].isdigit() else step
        yield step


@cases
def test_slow_steps_cost_what_draws_of_them_cost(strategy: str, inter: float) -> None:
    """`step_spread` against 450 rounds in which each node draws its steps.

    Within four standard errors, and for averages that come late a fifth of the loss, or 0.2 % of a
    round: nodes drift apart for hundreds of rounds before anyone waits.
    """
    schedule, even = tiny.schedule(strategy, (NODES, 1)), cluster(inter)
    drawn = stepwise(schedule, even, 450)
    quiet = round_time(schedule, even)
    found = round_time(schedule, replace(even, step_spread=SIGMA))
    blocks = drawn[: len(drawn) // 20 * 20].reshape(-1, 20).mean(1)
    error = float(blocks.std()) / math.sqrt(len(blocks))
    late = strategy.startswith("co2")
    allowed = 4 * error + late * max(0.2 * (found - quiet), 2e-3 * quiet)
    assert drawn.mean() == pytest.approx(found, abs=allowed)


def test_what_is_drawn_takes_the_place_of_what_is_expected() -> None:
    """Nodes whose speeds are given, or drawn, do not spread as well."""
    schedule = tiny.schedule("ddp")
    for noise in (Noise(jitter=0.1), Noise(straggle=0.1), Noise(node_speed={0: 0.5})):
        even, uneven = (tiny.cluster(node_spread=spread) for spread in (0.0, 0.03))
        assert round_time(schedule, uneven, noise) == round_time(schedule, even, noise)
