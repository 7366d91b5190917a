"""What a step of local updates is worth, and what a loss costs in time and money."""

import csv
import json
import math
import tomllib
from itertools import pairwise
from statistics import mean

import pytest
from one_sample import simulate
from places import ROOT

from co2sim import Goal, to_loss
from co2sim.common.errors import OptionError
from co2sim.prediction.step_factors import Scale, remark, step_factor
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
        strategy: found.factor
        for strategy in (
            "co2(tau=6, delay=1)",
            "co2.published(tau=12)",
            "co2.published(tau=48)",
            "co2(tau=12, delay=3)",
            "co2(tau=12, delay=1, fragments=12)",
            "slowmo(tau=12)",
        )
        if (found := step_factor(strategy, TOY, goal))
    }
    assert list(factors.values())[:5] == [1.3, 1.9, 2, 1.1, 1.2]
    assert factors["slowmo(tau=12)"] == 1.67
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
    free = simulate("a100-tcp80", "gpt2-small", "ddp", gpus=16)
    assert to_loss(free, Goal(steps=10)).cost is None  # type: ignore[union-attr]
    late = simulate("a100-tcp80", "gpt2-small", "co2.published(staleness=2)", gpus=16)
    assert to_loss(late, Goal(steps=10)) is None
    with pytest.raises(OptionError, match="no steps"):
        to_loss(free, Goal())
