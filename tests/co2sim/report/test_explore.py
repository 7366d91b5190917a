"""The page of `co2sim explore --out`: its sliders, and the figures between what was simulated."""

import math
import random
import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")

from commands import Command

from co2sim.prediction.driver import run
from co2sim.prediction.question import OPEN_BATCH, Question
from co2sim.prediction.totals import totals_of
from co2sim.report.explore import grid as grids
from co2sim.report.explore.exploration import Control, Exploration, controls, figures, varying
from co2sim.report.explore.grid import CHOSEN, ExploreGrid, Positions, StrategyGrid, between
from co2sim.report.explore.page import asked, exactness

PREFERRED = {10, 12.5, 16, 20, 25, 32, 40, 50, 63, 80}
TOKENS = 1e10
JOB = Question(
    cluster="cloud-100g",
    model="gpt2-small",
    strategy="",
    gpus=16,
    overrides={"price_per_gpu": "2 USD/h", "failures": "meta-rsc-1"},
)
STRATEGIES = ("ddp", "co2:tau=12,delay=1,worker=node")
POSITIONS = {
    "gpus": "8, 16",
    "micro_batch": "1, 2",
    "strategy.tau": "4, 12",
    "strategy.delay": "1",
    "inter.latency": "50 us, 150 us",
}
TOLERANCE = 0.02


def question(*strategies: str, **changes: object) -> Exploration:
    """About a small model on two nodes that cost, and fail."""
    job = replace(JOB, **changes)  # type: ignore[arg-type]
    return Exploration(job, strategies or STRATEGIES, TOKENS)


def few(asked: Exploration) -> list[Control]:
    """Controls with few positions, but for the bandwidth, the price and the failures."""
    made = {control.path: control for control in controls(asked)}
    for path, values in POSITIONS.items():
        if any(asked.takes(place, path) for place in range(len(asked.strategies))):
            made[path] = varying(asked, path, values)
    return list(made.values())


@cache
def made() -> tuple[Exploration, ExploreGrid]:
    """A grid, simulated once."""
    found = question()
    return found, grids.build(found, few(found), TOLERANCE, 1)


def settings(shown: list[Control] | tuple[Control, ...], positions: Positions) -> dict[str, str]:
    """What the sliders set."""
    stops = ((c.path, c.stops[at].setting) for c, at in zip(shown, positions, strict=True))
    return {path: setting for path, setting in stops if setting is not None}


def everywhere(grid: StrategyGrid, shown: tuple[Control, ...]) -> list[Positions]:
    """All positions of what a strategy has."""
    axes = [
        range(len(control.stops)) if at in grid.controls else [control.at]
        for at, control in enumerate(shown)
    ]
    return list(product(*axes))


# ---- sliders


def test_positions_are_preferred_numbers_around_what_was_given() -> None:
    """Ten to a decade, in the unit that people read; what was given is a position of its own."""
    found = {control.path: control for control in controls(question())}
    speeds = found["inter.bandwidth"]
    assert all(stop.value for stop in speeds.stops)
    for at, stop in enumerate(speeds.stops):
        mantissa = 8 * (stop.value or 0.0)
        while mantissa >= 100:
            mantissa /= 10
        assert at == speeds.at or round(mantissa, 6) in PREFERRED
    values = [stop.value or 0.0 for stop in speeds.stops]
    now = JOB.load()[0].value.inter.bandwidth
    assert values == sorted(values)
    assert values[speeds.at] == now
    assert min(values) < now / 20
    assert max(values) > now * 3


def test_tau_and_delay_are_only_for_strategies_that_have_them() -> None:
    """Neither has a slider where none has it; it moves only those that do."""
    paths = {control.path for control in controls(question("ddp", "zero3"))}
    assert not {"strategy.tau", "strategy.delay"} & paths
    found = {
        control.path: control for control in controls(question("ddp", "local_sgd:tau=4", "co2"))
    }
    assert found["strategy.tau"].strategies == (1, 2)
    assert found["strategy.delay"].strategies == (2,)
    assert found["gpus"].strategies == (0, 1, 2)


def test_prices_may_be_given_by_name() -> None:
    """Their values are those of the catalog; a price of its own has no range."""
    asked_about = question()
    named = varying(asked_about, "price_per_gpu", "h100-median-2026-05, 3 USD/h, 1 USD/h")
    assert [stop.text for stop in named.stops][:1] == ["1 USD/h"]
    for stop in named.stops:
        case = asked_about.case(0, {"price_per_gpu": stop.text})
        assert stop.value == case.load()[0].value.price_per_gpu
    assert asked(asked_about, [named])["price"] == named.stops[0].value


# ---- figures between what was simulated


@pytest.mark.slow
def test_at_knots_the_figures_are_the_simulators() -> None:
    """All of them, of every strategy, at every combination that was simulated."""
    asked, grid = made()
    for place, one in enumerate(grid.strategies):
        for point in random.Random(0).sample(list(one.points), 8):  # noqa: S311 - no secret
            case = asked.case(place, settings(grid.controls, point))
            result = run(case)
            shown = between(one, grid.controls, point)
            expected = figures(case, result, asked.goal)
            for name, end in (("slowest", "low"), ("fastest", "high")):
                exact = getattr(result, f"tokens_per_s_{end}") / result.tokens_per_s
                assert shown[name] == pytest.approx(exact)
            for name, value in shown.items():
                exact = getattr(expected, name)
                plain = exact is None or name in CHOSEN
                assert value == (exact if plain else pytest.approx(exact, rel=1e-9)), name


@pytest.mark.slow
def test_elsewhere_they_are_as_exact_as_the_page_says() -> None:
    """The error that it states is found again at other random positions, but for few of them."""
    asked, grid = made()
    assert grid.exactness.checked >= 20
    assert 0 < grid.exactness.median <= grid.exactness.largest <= TOLERANCE
    draw = random.Random(7)  # noqa: S311 - no secret
    worse = count = 0
    for place, one in enumerate(grid.strategies):
        others = [at for at in everywhere(one, grid.controls) if at not in set(one.points)]
        for positions in draw.sample(others, min(25, len(others))):
            exact = run(asked.case(place, settings(grid.controls, positions)))
            shown = between(one, grid.controls, positions)
            off = abs(shown["tokens_per_s"] / exact.tokens_per_s - 1)
            worse += off > grid.exactness.largest * (1 + 1e-6)
            assert off <= 2 * max(grid.exactness.largest, TOLERANCE)
            count += 1
    assert count >= 20
    assert worse <= 0.1 * count


@pytest.mark.slow
def test_positions_are_added_until_the_tolerance_is_met_or_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of bandwidth and latency, both interpolated; the words say which of both ended it."""
    asked = question("ddp", overrides={})
    made = {control.path: control for control in controls(asked)}
    speeds = made["inter.bandwidth"]
    assert speeds.continuous
    assert made["inter.latency"].continuous
    latencies = [f"{2.0**power} ms" for power in range(-4, 6)]
    many = replace(varying(asked, "inter.latency", ", ".join(latencies)), continuous=True)
    grid = grids.build(asked, [speeds, many], 0.008, 1)
    assert grid.exactness.checked
    assert grid.exactness.met
    assert grid.exactness.largest <= 0.008
    text = exactness(grid)[0]
    for figure in (f"{grid.exactness.largest:.2%}", f"{grid.exactness.checked}", "0.80%"):
        assert f" {figure} " in text
    size = len(grid.strategies[0].points)
    monkeypatch.setattr(grids, "MAX_CASES", size - 1)
    less = grids.build(asked, [speeds, many], 0.008, 1)
    assert len(less.strategies[0].points) < size
    assert not less.exactness.met
    assert less.exactness.largest > 0.01
    assert "20,000" in exactness(less)[0]


@pytest.mark.slow
def test_price_and_failures_are_arithmetic_on_what_was_simulated() -> None:
    """Moved, they change no case, and give what `totals_of` says with that price and failures."""
    asked, grid = made()
    paths = [control.path for control in grid.controls]
    price, failing = paths.index("price_per_gpu"), paths.index("failures.node")
    assert grid.failures == failing
    for place, one in enumerate(grid.strategies):
        assert not {price, failing} & set(one.controls)
        point = one.points[len(one.points) // 2]
        shown = between(one, grid.controls, point)
        for stop in (0, grid.controls[failing].at, len(grid.controls[failing].stops) - 1):
            at = list(point)
            at[failing], at[price] = stop, (stop * 3) % len(grid.controls[price].stops)
            case = asked.case(place, settings(grid.controls, tuple(at)))
            expected = totals_of(case, run(case), TOKENS)
            corner = stop * len(one.points) + list(one.points).index(point)
            useful = 1 - one.lost["lost"][corner]
            assert useful == pytest.approx(expected.goodput)
            days = TOKENS * shown["factor"] / shown["tokens_per_s"] / useful / 86400
            assert days == pytest.approx(expected.days)
            rate = grid.controls[price].stops[at[price]].value or 0.0
            gpus = grid.controls[0].stops[at[0]].value or 0.0
            assert days * 86400 * gpus * rate == pytest.approx(expected.cost)
            slow = shown["slowest"] * (1 - one.lost["lost_most"][corner]) / useful
            wider = math.hypot(math.log(slow), math.log(shown["factor_high"]))
            assert days * math.exp(wider) == pytest.approx(expected.days_high)


def test_a_page_knows_what_failures_take_where_none_are_named() -> None:
    """At every position as a training of more than a week counts them; with `none` nothing."""
    for overrides in ({}, {"failures": "none"}):
        asked = question("ddp", global_batch=16, overrides=overrides)
        shown = [varying(asked, "gpus", "8, 16"), *few(asked)[2:3]]
        grid = grids.build(asked, shown, TOLERANCE, 1)
        (one,) = grid.strategies
        assert grid.failures is None
        for place, point in enumerate(one.points):
            case = asked.case(0, settings(grid.controls, point))
            long = totals_of(case, run(case), 1e17)
            lost = one.lost["lost"][place]
            assert lost == (None if overrides else pytest.approx(1 - long.goodput))


def test_a_position_that_cannot_be_simulated_says_why() -> None:
    """Others are shown; between two knots, of which one failed, nothing is."""
    asked = question("ddp", global_batch=24, overrides={})
    shown = [varying(asked, "gpus", "8, 16"), *few(asked)[2:3]]
    grid = grids.build(asked, shown, TOLERANCE, 1)
    (one,) = grid.strategies
    wrong = {point[0] for at, point in enumerate(one.points) if at in one.failed}
    assert wrong == {1}
    assert all("16 GPUs" in text for text in one.failed.values())
    assert between(one, grid.controls, (0, 1)) is not None
    assert between(one, grid.controls, (1, 1)) is None


OPEN_JOB = {**OPEN_BATCH, "cluster": "dgx-h100", "model": "llama3.2-1b", "overrides": {}}


def test_what_is_open_is_chosen_at_each_position() -> None:
    """Batch, micro-batch and recomputation are those that `co2sim run` takes there."""
    asked = question("fsdp", **OPEN_JOB)
    shown = [
        varying(asked, "gpus", "8, 64"),
        varying(asked, "inter.bandwidth", "25 Gbit/s, 3.2 Tbit/s"),
    ]
    (one,) = grids.build(asked, shown, 0.1, 1).strategies
    for at, point in enumerate(one.points):
        result = run(asked.case(0, settings(shown, point)))
        assert one.values["samples"][at] == result.global_batch
        assert one.values["micro_batch"][at] == result.micro_batch
        assert one.values["micro_steps"][at] == result.accumulation
        assert one.values["recompute"][at] == result.recompute
    assert len(set(one.values["micro_batch"])) > 1


def test_positions_of_tau_name_the_strategy_with_it() -> None:
    """No row says tau=12 where the slider says 4, also where nothing can be simulated."""
    asked = question("co2:tau=12,delay=1,worker=node", global_batch=24, overrides={})
    shown = [varying(asked, "gpus", "8, 16"), varying(asked, "strategy.tau", "4, 48")]
    (one,) = grids.build(asked, shown, TOLERANCE, 1).strategies
    assert {point[0] for at, point in enumerate(one.points) if at in one.failed} == {1}
    for point, name in zip(one.points, one.values["strategy"], strict=True):
        assert f"tau={shown[1].stops[point[1]].text}," in name


def test_a_page_opens_at_several_nodes() -> None:
    """Where the size that was asked for is none of its positions: at the largest."""
    sizes = varying(question(gpus=None), "gpus", "8, 16, 32")
    assert sizes.stops[sizes.at].text == "32"


def test_control_c_keeps_what_is_done() -> None:
    """The page has the positions that were simulated; others say why there is nothing."""

    def stop(words: str) -> None:
        assert re.search(r"about \d", words)
        raise KeyboardInterrupt

    asked = question("ddp", overrides={})
    shown = [one for one in controls(asked) if one.path in {"gpus", "inter.bandwidth"}]
    grid = grids.build(asked, shown, 1e-4, 1, stop)
    (one,) = grid.strategies
    assert grid.ended
    assert 0 < len(one.points) - len(one.failed) <= grid.simulated
    assert "Control-C ended it" in exactness(grid)[0]


# ---- the command


@pytest.mark.slow
def test_the_command_writes_a_page_that_holds_its_grid(cli: Command) -> None:
    """And says how many cases that took."""
    words = "explore -c cloud-100g -m gpt2-small -s ddp -g 8 --vary gpus=8,16 --vary micro_batch=1"
    done = cli(*words.split(), "--jobs", "1", "-o", "p.html")
    assert done.code == 0, done.err
    assert "1.00%" in done.out
    text = Path("p.html").read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert "co2sim explore -c cloud-100g" in text
    assert "<h1>GPT-2 small on 16 AWS p3dn.24xlarge" in text
