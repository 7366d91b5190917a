"""Which failures count, from when on, and that all commands count the same."""

import json
import shlex
from dataclasses import replace

import pytest
from commands import Command
from hypothesis import given
from hypothesis import strategies as st

from co2sim import Goal, Question, run, totals_of
from co2sim.catalog import load_cluster, load_failures, names
from co2sim.hardware.failures import Failures
from co2sim.prediction.counted import DEFAULT, WEEK, counted_failures, failures_of
from co2sim.prediction.step_factors import Project
from co2sim.prediction.totals import DAY

CASE = Question(cluster="dgx-h100", model="gpt2-xl", strategy="fsdp", gpus=64, micro_batch=4)
RESULT = run(CASE)
CLUSTER, MODEL = (entry.value for entry in CASE.load())
A_WEEK = RESULT.tokens_per_s * WEEK * DAY
ON = shlex.split("-c dgx-h100 -m gpt2-xl -s fsdp")


def test_failures_count_above_a_week() -> None:
    """A week of training counts none, and a little more those of published jobs."""
    assert totals_of(CASE, RESULT, A_WEEK * (1 - 1e-9)).failures is None
    above = totals_of(CASE, RESULT, A_WEEK * (1 + 1e-9)).failures
    assert above.name == load_failures(DEFAULT).value.name
    assert above.assumed


@pytest.mark.parametrize("tokens", [1e9, 1e14])
def test_failures_that_are_named_count_whatever_it_takes(tokens: float) -> None:
    """Those that a cluster names count for an hour, too, and are not called assumed."""
    case = replace(CASE, overrides={"failures": "meta-rsc-2"})
    counted = totals_of(case, RESULT, tokens).failures
    assert "RSC-2" in counted.name
    assert not counted.assumed


def test_none_count_where_none_are_wanted() -> None:
    """`failures=none` leaves the days of a training in which nothing fails."""
    case = replace(CASE, overrides={"failures": "none"})
    found = totals_of(case, RESULT, 10 * A_WEEK)
    assert found.failures is None
    assert found.days == pytest.approx(10 * WEEK)
    assert found.useful_tokens_per_s == RESULT.tokens_per_s


@pytest.mark.parametrize(("gpus", "hours"), [(8, 2111.5 * 24 / 8), (1024, 49.5), (16384, 3.093)])
def test_the_default_is_llama_3s_rate_at_any_size(gpus: int, hours: float) -> None:
    """419 interruptions in 54 days on 16,384 GPUs: one in 2,112 days of a GPU, within a percent."""
    result = replace(RESULT, gpus=gpus, nodes=-(-gpus // 8))
    counted = counted_failures(result, CLUSTER, MODEL, 30.0)
    assert counted.every / 3600 == pytest.approx(hours, rel=0.01)


def test_the_range_of_the_default_has_what_other_jobs_counted_in() -> None:
    """At each of the sizes that they were counted at: Meta's RSC-1, and ByteDance's."""
    for gpus, other in ((8, "meta-rsc-1"), (1024, "meta-rsc-1"), (9600, "bytedance-dense")):
        mine, its = (load_failures(key).value.of_job(gpus, gpus // 8) for key in (DEFAULT, other))
        rate = 1 / its.node + (1 / its.job / (gpus // 8) if its.job else 0.0)
        assert mine.rate_low * 0.99 <= rate * mine.node <= mine.rate_high * 1.01


@given(st.floats(3600.0, 1e9), st.floats(1.0, 1e3))
def test_more_failures_take_longer(between: float, times: float) -> None:
    """Days and money only grow with the rate, and useful tokens per second only fall."""
    seldom, often = (
        counted_failures(RESULT, replace(CLUSTER, failures=Failures(node=time)), MODEL, 30.0)
        for time in (between * times, between)
    )
    assert often.useful <= seldom.useful * (1 + 1e-12)


@given(st.floats(0.5, 50), st.floats(1.0, 3.0))
def test_more_tokens_take_longer_across_the_week(weeks: float, times: float) -> None:
    """Failures that begin to count make no training of more tokens shorter."""
    less, more = (totals_of(CASE, RESULT, A_WEEK * each) for each in (weeks, weeks * times))
    assert less.days <= more.days * (1 + 1e-12)


@pytest.mark.parametrize("key", names("failures"))
def test_every_entry_of_the_catalog_can_count(key: str) -> None:
    """Named by a cluster, or as what is published."""
    cluster = load_cluster("dgx-h100", {"failures": key}).value
    assert failures_of(cluster, 1.0) == load_failures(key).value


@pytest.mark.parametrize("tokens", ["1e10", "1e13"])
def test_run_plan_and_goodput_take_as_many_days(cli: Command, tokens: str) -> None:
    """The choice of a plan has the same days, with their ends, where it is run by its command."""
    asked = (*ON, "-g", "64", "--tokens", tokens, "--project", "1.5", "--json")
    choice = json.loads(cli("plan", *asked).out)["choice"]
    _, _, *again = shlex.split(choice["command"])
    ran = json.loads(cli("run", *again, "--json").out)["totals"]
    failing = json.loads(cli("goodput", *again, "--json").out)[0]["totals"]
    assert (ran["failures"] is None) == (tokens == "1e10")
    for name in ("days", "days_low", "days_high", "useful_tokens_per_s", "failures"):
        assert ran[name] == failing[name] == choice["totals"][name]


def test_a_project_takes_as_many_times_as_long() -> None:
    """All amounts are those of one training times the factor; its speed is the same."""
    one = totals_of(CASE, RESULT, 10 * A_WEEK)
    whole = totals_of(CASE, RESULT, 10 * A_WEEK, Goal(project=Project(1.5)))
    for name in ("days", "days_low", "days_high", "gpu_hours", "energy_kwh"):
        assert getattr(whole, name) == pytest.approx(1.5 * getattr(one, name))
    assert whole.useful_tokens_per_s == one.useful_tokens_per_s
