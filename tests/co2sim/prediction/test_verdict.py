"""Whether a local-update method is worth it: the verdict, and the Python that trains so."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from commands import Command
from hypothesis import given
from hypothesis import strategies as st

from co2sim.prediction import driver
from co2sim.prediction.intervals import unshared
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.prediction.verdict import VAGUE, Verdict, python_line, tells, verdicts
from co2sim.strategies import parse

torch = pytest.importorskip("torch")

from realrun import algorithms  # noqa: E402 - needs torch

ONE = ("--micro-batch", "1", "--accumulation", "1")
ON = ("-c", "a100-tcp80", "-m", "gpt2-small", "-g", "16", *ONE)


def case(strategy: str) -> Question:
    """On two nodes."""
    return Question(cluster="a100-tcp80", model="gpt2-small", strategy=strategy, gpus=16)


@pytest.fixture(scope="module")
def simulated() -> dict[str, Result]:
    """Results by strategy."""
    names = ("co2.published:tau=12", "ddp", "zero2", "zero3")
    return {name: driver.run(case(name)) for name in names}


def judged(results: dict[str, Result], factor: str, *names: str) -> Verdict:
    """The verdict on the first of these strategies, with a factor of one's own."""
    goal = Goal(factors={"co2.published": float(factor)})
    return verdicts(
        [case(name) for name in names], [results[name] for name in names], driver.run, goal
    )[0]


def test_it_is_compared_with_the_fastest_synchronous_strategy_that_was_asked(
    simulated: dict[str, Result],
) -> None:
    """By the times of steps; others have no verdict."""
    asked = ("co2.published:tau=12", "zero3", "zero2")
    found = judged(simulated, "1", *asked)
    fastest = min(("zero2", "zero3"), key=lambda name: simulated[name].step_time_s)
    assert found.against == simulated[fastest].strategy
    ratio = simulated[fastest].step_time_s / simulated[asked[0]].step_time_s
    assert found.step_time_ratio == pytest.approx(ratio)
    every = verdicts([case(one) for one in asked], [simulated[one] for one in asked], driver.run)
    assert [one is None for one in every] == [False, True, True]


@pytest.mark.parametrize(
    ("worker", "inside"),
    [("gpu", "ddp"), ("node", "zero2"), ("node,inner=ddp", "ddp"), ("node,inner=zero3", "zero3")],
)
def test_without_any_it_is_compared_with_what_a_worker_runs_inside(
    worker: str, inside: str
) -> None:
    """With the same batch, simulated in addition."""
    asked = case(f"local_sgd:tau=12,worker={worker}")
    result = driver.run(asked)
    found = verdicts([asked], [result], driver.run)[0]
    other = driver.run(replace(asked, strategy=inside))
    assert found.against == other.strategy
    assert found.step_time_ratio == pytest.approx(other.step_time_s / result.step_time_s)


@pytest.mark.parametrize("share", [0.5, 0.99, 1.01, 2.0])
def test_sooner_is_the_speed_of_steps_over_the_steps_that_are_needed(
    simulated: dict[str, Result], share: float
) -> None:
    """Of a factor without a range; certain once the speeds differ by more than their own errors."""
    pair = ("co2.published:tau=12", "ddp")
    ratio = simulated[pair[1]].step_time_s / simulated[pair[0]].step_time_s
    found = judged(simulated, f"{share * ratio}", *pair)
    assert found.sooner == pytest.approx(1 / share - 1)
    reach = unshared(*(simulated[name] for name in pair))
    assert found.certain == (abs(math.log(share)) > reach)
    assert ("not worth it" in str(found)) == (share > 1 and found.certain)


def test_what_an_end_of_the_range_contradicts_is_not_certain(simulated: dict[str, Result]) -> None:
    """Certain is what holds at both ends of the factor and of what the two errors do not share.

    Both count as independent, so that the sum of their reaches is always far enough, and that of
    the factor alone never is.
    """
    name = "co2.published:tau=12"
    result = simulated[name]
    pair = [case(name), case("ddp")]
    plain = verdicts(pair, [result, simulated["ddp"]], driver.run)[0]
    assert plain.low < plain.high
    reach = math.exp(unshared(result, simulated["ddp"]))
    middle = (plain.low * plain.high) ** 0.5
    ratios = {plain.low / 1.01: False, middle: False, plain.high * 1.01: False}
    ratios |= {plain.low / reach / 1.01: True, plain.high * reach * 1.01: True}
    for ratio, certain in ratios.items():
        slower = replace(simulated["ddp"], step_time_s=ratio * result.step_time_s)
        found = verdicts(pair, [result, slower], driver.run)[0]
        assert found.certain == certain
        assert found.sooner_low < found.sooner < found.sooner_high
        assert found.certain == (found.sooner_low * found.sooner_high > 0)


@given(st.floats(0.01, 100), st.floats(1, 100))
def test_a_wide_range_and_one_with_both_answers_tell_nothing(low: float, width: float) -> None:
    """Whatever its middle is; and what a range tells, every range inside of it tells, too."""
    high = low * width
    if low < 1 < high or width > VAGUE * 1.0001:
        assert not tells(low, high)
    elif width < VAGUE * 0.9999:
        assert tells(low, high)
    if tells(low, high):
        assert tells(low * width**0.25, high / width**0.25)


def test_a_lower_bound_of_the_factor_never_makes_it_certainly_sooner(
    simulated: dict[str, Result],
) -> None:
    """How many steps are needed at the most is not known of a toy."""
    name = "co2.published:tau=12"
    toy = replace(simulated[name], parameters=158_720)
    slow = replace(simulated["ddp"], parameters=158_720, step_time_s=100 * toy.step_time_s)
    found = verdicts([case(name), case("ddp")], [toy, slow], driver.run)[0]
    assert found.high is None
    assert found.sooner > 0
    assert not found.certain


def test_json_text_and_page_have_the_same_verdict(cli: Command, tmp_path: Path) -> None:
    """The last lines of the answer are the verdict and the Python of the JSON."""
    words = ("run", *ON, "-s", "co2:tau=12,delay=3", "-s", "zero2")
    code, out, err = cli(*words, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert "verdict" not in told[1]
    page = tmp_path / "page.html"
    code, out, _ = cli(*words, "--report", str(page), "--full")
    lines = out.splitlines()
    assert lines[-1].endswith(f": {told[0]['verdict']['python']}")
    whole = " ".join(" ".join(lines).split())
    assert f"verdict: {Verdict(**told[0]['verdict'])}" in whole
    assert "CO2(model, optimizer, tau=12, delay=3)" in page.read_text()


@pytest.mark.parametrize(
    ("strategy", "line"),
    [
        (
            "co2:tau=12,delay=1,worker=node,inner=ddp",
            'CO2(model, optimizer, tau=12, delay=1, worker="node")',
        ),
        (
            "co2.published:tau=48,staleness=2",
            "CO2.published(model, optimizer, tau=48, staleness=2)",
        ),
        ("diloco:tau=100,dtype=int4", 'DiLoCo(model, optimizer, tau=100, dtype="int4")'),
    ],
)
def test_the_line_names_the_algorithm_and_what_is_not_its_default(strategy: str, line: str) -> None:
    """As a user would write it."""
    found, why = python_line(parse(strategy))
    assert (found.partition("  #")[0], why) == (line, "")


@pytest.mark.parametrize(
    "strategy",
    [
        *("local_sgd:dtype=fp16", "co2.published:worker=node,average=leader"),
        "slowmo:worker=node,inner=zero1",
    ],
)
def test_what_nothing_trains_has_a_reason_and_no_line(strategy: str) -> None:
    """Options of the simulator alone."""
    line, why = python_line(parse(strategy))
    assert line is None
    assert "not trained" in why


TRAINED = [
    "co2(tau=8,delay=2,fragments=4,preview=true,keep=0.5)",
    "co2.published(tau=9,staleness=3,dtype=bf16)",
    "diloco(tau=7,fragments=3,delay=6,dtype=int8)",
    *(one for one in tiny.VARIANTS if "tau" in one and "node" not in one),
]
"""Strategies with local steps on GPUs, with every option that their training has."""


@pytest.mark.parametrize("text", TRAINED)
def test_the_line_makes_an_algorithm_with_the_numbers_of_the_strategy(text: str) -> None:
    """Whatever the options, it runs as printed where the names of the package are imported."""
    strategy = parse(text)
    line, _ = python_line(strategy)
    model = torch.nn.Linear(50, 2)
    names = {name: getattr(algorithms, name) for name in algorithms.__all__}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = eval(line, names | {"model": model, "optimizer": optimizer})  # noqa: S307 - it is ours
    try:
        assert type(made).__name__ == line.partition("(")[0].partition(".")[0]
        assert made.loop.tau == strategy.tau
        delay = getattr(strategy, "delay", None)
        if delay:
            assert made.stats().delay == delay
        assert made.loop.rule.staleness == getattr(strategy, "staleness", made.loop.rule.staleness)
    finally:
        made.close()
