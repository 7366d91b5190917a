"""Whether it is decided which of two predictions is the faster one."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_sample import simulate

from co2sim.prediction.intervals import between, error_model, undecided, unshared
from co2sim.prediction.result import Result

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
