"""What a step of local updates is worth, and what a loss costs in time and money."""

import csv
import json
import math
import tomllib
from itertools import pairwise
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_sample import simulate
from places import ROOT

from co2sim import Goal, to_loss
from co2sim.common.errors import OptionError
from co2sim.prediction.step_factors import (
    Scale,
    StepFactor,
    factor_of_training,
    published_losses,
    remark,
    step_factor,
)
from co2sim.strategies import parse
from co2sim.strategies.step import title

RUNS = ROOT / "benchmarks/results/convergence-runs.csv"
CATALOG = ROOT / "co2sim/catalog/step_factors.toml"
TUNING_SEED = 100
TOY = Scale(158_720, 4)


def measured() -> dict[tuple[str, str], float]:
    """Factors by budget and strategy from the recorded runs, by a walk along the curve of DDP."""
    with RUNS.open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["seed"]) != TUNING_SEED]
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    ends: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["strategy"] == "ddp":
            curves.setdefault(row["budget"], []).append(json.loads(row["curve"]))
        elif row["validation_loss"] and row["strategy"]:
            key = (row["budget"], row["strategy"], row["outer"])
            ends.setdefault(key, []).append(float(row["validation_loss"]))
    found: dict[tuple[str, str], float] = {}
    for (budget, strategy, _), losses in ends.items():
        places = zip(*curves[budget], strict=True)
        curve = [(place[0][0], mean(loss for _, loss in place)) for place in places]
        for (x, high), (y, low) in pairwise(curve):
            if len(losses) >= 3 and low <= mean(losses) <= high:
                at = x + (y - x) * (high - mean(losses)) / (high - low)
                name = budget, title(parse(strategy))
                found[name] = min(found.get(name, math.inf), curve[-1][0] / at)
    return found


def test_the_factors_are_those_of_the_recorded_runs() -> None:
    """The catalog holds what benchmarks/results/convergence-runs.csv says, of every method."""
    entries = tomllib.loads(CATALOG.read_text())["factor"]
    held = {(e["source"].split(", ")[-1], e["strategy"]): e["factor"] for e in entries}
    assert len(held) == len(entries)
    assert {name for _, name in held} >= {
        "co2.published(tau=3)",
        "co2.published(tau=12)",
        "co2.published(tau=48)",
    }
    assert held == pytest.approx(measured(), abs=0.006)  # two decimals


def test_steps_of_data_parallelism_are_those_of_ddp() -> None:
    """Sharding changes no arithmetic: factor 1; a strategy that is not ours has none."""
    for strategy in ("ddp", "zero2", "zeropp"):
        found = step_factor(strategy, TOY)
        assert found.factor == 1
    assert step_factor("mine", TOY) is None
    assert step_factor("co2(delay=auto)", TOY) is None  # until a number is chosen
    assert remark((name, TOY) for name in ("ddp", "zero3", "mine")) == ""


def test_a_given_factor_comes_first_and_the_narrower_before_the_wider() -> None:
    """A strategy with options before its name, and both before what was measured."""
    goal = Goal(
        factors={
            "co2": 1.3,
            "co2.published": 1.9,
            "co2.published:tau=48": 2,
            "co2(tau=12,delay=3)": 1.1,
            "co2:tau=12": 1.2,
        }
    )
    factors = {
        "co2(tau=6, delay=1)": 1.3,
        "co2.published(tau=12)": 1.9,
        "co2.published(tau=48)": 2,
        "co2(tau=12, delay=3)": 1.1,
        "co2(tau=12, delay=1, fragments=12)": 1.2,
        "slowmo(tau=12)": 1.67,
    }
    assert {name: step_factor(name, TOY, goal).factor for name in factors} == factors
    assert "co2: 1.3 (given)" in remark([("co2(tau=6, delay=1)", TOY)], goal)
    assert "co2(tau=12): 1.2 (given)" in remark([("co2(tau=12, delay=1)", TOY)], goal)


def test_time_and_cost_to_a_loss_are_those_of_the_steps_it_takes() -> None:
    """Steps x step time, and steps x GPUs x step time x price; DDP takes the steps themselves."""
    prices = {"price_per_gpu": "2 USD/h"}
    for strategy, factor in (("ddp", 1.0), ("co2.published(tau=12)", 1.5)):
        result = simulate("a100-tcp80", "gpt2-small", strategy, gpus=16, overrides=prices)
        found = to_loss(result, Goal(steps=1000, factors={"co2.published": 1.5}))
        assert found.steps == 1000 * factor
        assert found.time_s == pytest.approx(1000 * factor * result.step_time_s)
        assert found.cost == pytest.approx(16 * 2 / 3600 * found.time_s)
        assert found.currency == "USD"
    free = simulate("a800-1600g", "gpt2-small", "ddp", gpus=16)
    assert to_loss(free, Goal(steps=10)).cost is None  # type: ignore[union-attr]
    late = simulate("a100-tcp80", "gpt2-small", "co2.published(staleness=2)", gpus=16)
    assert to_loss(late, Goal(steps=10)) is None
    with pytest.raises(OptionError, match="no steps"):
        to_loss(free, Goal())


# --- by published losses ----------------------------------------------------------------------


LARGE = 8_030_261_248


def rows(method: str, *, fit: bool) -> np.ndarray:
    """Published rows of a method."""
    tables = [
        one for one in published_losses()["table"] if one["method"] == method and one["fit"] is fit
    ]
    return np.array([row for one in tables for row in one["rows"]], float).reshape(-1, 6)


def logs(found: np.ndarray) -> np.ndarray:
    """Ln factors of rows: by the tokens at which DDP has the loss, E + A / N^a + B / D^b.

    Source: Hoffmann et al. 2022, arXiv 2203.15556.
    """
    tokens, ddp, loss = found[:, 3], found[:, 4], found[:, 5]
    alike = ((410.7 / tokens**0.28 + loss - ddp) / 410.7) ** (-1 / 0.28)
    return np.asarray(np.log(tokens / alike))


def test_the_law_is_the_least_squares_of_the_published_rows() -> None:
    """Its numbers in the catalog, its deviation, and what late averages cost."""
    law = published_losses()["law"]
    found = np.vstack([rows("diloco", fit=True), rows("streaming", fit=True)])
    terms = (np.ones(len(found)), np.log(found[:, 1]), np.log(found[:, 2] / 30))
    matrix = np.column_stack([*terms, np.log(found[:, 0] / 1e9)])
    solved = np.linalg.lstsq(matrix, logs(found), rcond=None)[0]
    held = [law[name] for name in ("constant", "workers", "tau", "parameters")]
    assert solved == pytest.approx(held, abs=1e-4)
    off = logs(found) - matrix @ solved
    assert off.std(ddof=4) == pytest.approx(law["deviation"], abs=5e-4)
    beside = rows("streaming", fit=False)
    late = logs(rows("late", fit=False)) - logs(beside[beside[:, 1] == 2])
    assert math.exp(late.mean()) == pytest.approx(law["late"], abs=5e-3)
    assert [found[:, 0].min(), found[:, 0].max()] == law["sizes"]
    assert found[:, 1].max() == law["most_workers"]
    assert sorted(set(found[:, 2])) == law["taus"]


def test_ranges_hold_nearly_all_published_factors() -> None:
    """At least nine rows of ten: two standard deviations."""
    found = np.vstack([rows("diloco", fit=True), rows("streaming", fit=True)])
    within = []
    for row, factor in zip(found, np.exp(logs(found)), strict=True):
        told = factor_of_training(int(row[0]), int(row[1]), int(row[2]))
        within.append(told.low <= factor <= told.high)
    assert np.mean(within) >= 0.9


@given(st.integers(10_000_000, 10**12), st.integers(1, 1000), st.integers(1, 1000), st.booleans())
def test_more_workers_longer_rounds_and_smaller_models_never_need_fewer_steps(
    parameters: int,
    workers: int,
    tau: int,
    late: bool,  # noqa: FBT001
) -> None:
    """And ranges hold their factors."""
    told = factor_of_training(parameters, workers, tau, late=late)
    assert told.low < told.factor < told.high
    assert factor_of_training(parameters, workers + 1, tau, late=late).factor >= told.factor
    assert factor_of_training(parameters, workers, tau + 1, late=late).factor >= told.factor
    assert factor_of_training(parameters * 2, workers, tau, late=late).factor <= told.factor


def of(strategy: str, parameters: int, workers: int) -> StepFactor:
    """The factor of a strategy, which is known, with its range around it."""
    found = step_factor(strategy, Scale(parameters, workers))
    assert found.low <= found.factor <= (math.inf if found.high is None else found.high)
    return found


@pytest.mark.parametrize("parameters", [158_720, LARGE])
def test_one_worker_needs_the_steps_of_ddp(parameters: int) -> None:
    """It averages with none; of DiLoCo's outer step with one worker losses are published."""
    for strategy in (
        "local_sgd(tau=12)",
        "co2.published(tau=100)",
        "co2.published(tau=12, staleness=2)",
    ):
        found = of(strategy, parameters, 1)
        assert found.factor == 1
        assert "one worker" in found.source
    assert of("diloco(tau=30)", LARGE, 1).factor < 1


def test_the_size_chooses_between_the_toy_and_published_losses() -> None:
    """The toy below 10 million parameters; above, at most the wide end of other methods' ranges."""
    toy, large = of("diloco(tau=100)", 9_999_999, 4), of("diloco(tau=100)", 10_000_000, 4)
    assert (toy.factor, toy.high, toy.measured) == (2.33, None, "diloco(tau=12)")
    assert large.measured is None
    assert large.factor < toy.factor
    late, own = of("co2.published(tau=100)", LARGE, 8), of("diloco(tau=100)", LARGE, 8)
    assert late.factor == pytest.approx(own.factor * 1.2)
    assert late.high == 4.21
    assert late.low == own.low
    assert "with co2" in late.source
    assert "158,720" in late.source
    assert of("local_sgd(tau=12)", LARGE, 2).factor == 1  # no gain that was published of another
    assert step_factor("co2.published(staleness=2)", Scale(LARGE, 8)) is None
    assert of("diloco(tau=100, fragments=3, delay=3)", LARGE, 8) == own


def test_what_is_beyond_all_published_trainings_is_said_and_has_a_wider_range() -> None:
    """Sizes from four times the largest, workers, and tau; a short round counts as 30 steps."""
    inside = of("diloco(tau=100)", LARGE, 8)
    assert inside.beyond == ()
    for strategy, parameters, workers, said in (
        ("diloco(tau=100)", 70 * 10**9, 8, "70 billion parameters"),
        ("diloco(tau=100)", LARGE, 16, "16 workers"),
        ("diloco(tau=500)", LARGE, 8, "tau=500"),
        ("diloco(tau=12)", LARGE, 8, "tau=12 (the factor is that of tau=30)"),
    ):
        found = of(strategy, parameters, workers)
        assert found.beyond == (said,)
        assert found.high / found.low > inside.high / inside.low
        assert f"no published training had {said}" in remark(
            [(strategy, Scale(parameters, workers))]
        )
    assert of("diloco(tau=100)", 40 * 10**9, 8).beyond == ()
