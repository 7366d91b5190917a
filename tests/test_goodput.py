"""Goodput: closed forms against events on a clock, and against what is known of them."""

import math

import numpy as np
import pytest
from goodput_simulation import NAMES, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from co2sim.errors import OptionError
from co2sim.goodput.closed_forms import (
    Rates,
    Restart,
    Saving,
    Shares,
    apart,
    best_interval,
    daly,
    erlang_loss,
    together,
    young,
)
from co2sim.goodput.parts import FailingWorkers, WholeJob, shares_of


def of_shares(shares: Shares) -> dict[str, float]:
    """By name."""
    return {name: getattr(shares, name) for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["all", "workers", "both"])
@pytest.mark.parametrize("number", range(4))
def test_events_agree_with_the_closed_forms(number: int, fails: str) -> None:
    """Settings drawn at random: the useful share is within 3 standard errors, others within 4."""
    rng = np.random.default_rng(1000 + number)
    mean = 10 ** rng.uniform(4, 5.5)
    every = mean * 10 ** rng.uniform(-2, -0.5)
    after = {"detection": mean * rng.uniform(0, 0.05), "restart": mean * rng.uniform(0, 0.05)}
    if fails == "all":
        after |= {"spares": int(rng.integers(0, 4)), "repair": mean * rng.uniform(0, 2)}
    whole = WholeJob(
        rate=0.0 if fails == "workers" else 1 / mean,
        every=math.inf if fails == "workers" else every,
        saving=Saving(blocking=every * rng.uniform(0, 0.1), writing=every * rng.uniform(0, 1)),
        after=Restart(**after),
    )
    count = int(rng.integers(2, 65))
    life = mean * count * 10 ** rng.uniform(-1, 1)
    longest = 0.3 if fails == "workers" else -2
    workers = FailingWorkers(
        rate=1 / life,
        count=count,
        round_time=min(mean, life) * 10 ** rng.uniform(-4, longest),
        after=Restart(restart=min(mean, life) * rng.uniform(0, 0.02)),
        stall=life / count * rng.uniform(0, 0.05),
        absent=0.1 * float(rng.integers(2)),
    )
    parts = (whole, None if fails == "all" else workers)
    found = simulated(*parts, seed=1000 + number, runs=30, failures=200)
    for name, share in of_shares(shares_of(*parts)).items():
        value, error = found[name]
        most = 3 if name == "useful" else 4
        assert abs(value - share) <= most * error + 2e-5, (name, share, value, error)


@given(
    st.floats(1e-7, 1e-3),
    st.floats(10.0, 1e4),
    st.floats(0.0, 100.0),
    st.floats(0.0, 10.0),
    st.floats(0.0, 600.0),
    st.integers(0, 5),
    st.floats(0.0, 1e5),
)
def test_shares_sum_to_one(
    rate: float,
    every: float,
    blocking: float,
    writing: float,
    down: float,
    spares: int,
    repair: float,
) -> None:
    """All of the time is accounted for, to 1e-9, and nothing is negative."""
    after = Restart(restart=down, spares=spares, repair=repair)
    for shares in (
        together(rate, every, Saving(blocking=blocking, writing=writing), after),
        apart(rate, 4, every, after, blocking),
    ):
        values = list(of_shares(shares).values())
        assert sum(values) == pytest.approx(1, abs=1e-9)
        assert min(values) >= -1e-9


@given(st.floats(1e-7, 1e-3), st.floats(1.0, 600.0))
def test_the_best_interval_is_the_best(rate: float, blocking: float) -> None:
    """No interval a little longer or shorter has more useful time; Young and Daly come near it."""
    saving, after = Saving(blocking=blocking), Restart(restart=100.0)
    best = best_interval(rate, saving)

    def useful(every: float) -> float:
        return together(rate, every, saving, after).useful

    assert useful(best) >= useful(best * 1.01)
    assert useful(best) >= useful(best / 1.01)
    assert useful(best) >= useful(daly(rate, blocking)) - 1e-12
    if rate * blocking < 0.01:
        assert daly(rate, blocking) == pytest.approx(best, rel=0.01)
        assert young(rate, blocking) == pytest.approx(best, rel=0.1)


def test_a_copy_in_the_background_costs_what_is_lost_meanwhile() -> None:
    """With a write as long as the period a failure loses up to two periods; without, up to one."""
    after = Restart()
    now = together(1e-6, 100.0, Saving(blocking=0.0), after)
    late = together(1e-6, 100.0, Saving(blocking=0.0, writing=100.0), after)
    assert now.lost == pytest.approx(1e-6 * 50, rel=1e-3)
    assert late.lost == pytest.approx(1e-6 * 150, rel=1e-3)


def test_erlang_loss_is_that_of_the_tables() -> None:
    """B(1, 1) = 1/2; B(2, 1) = 1/5; B(10, 5) = 0.018385 (Erlang 1917)."""
    assert erlang_loss(1, 1.0) == pytest.approx(1 / 2)
    assert erlang_loss(2, 1.0) == pytest.approx(1 / 5)
    assert erlang_loss(10, 5.0) == pytest.approx(0.018385, abs=5e-7)
    assert erlang_loss(3, 0.0) == 0


@settings(max_examples=20)
@given(st.floats(1e-7, 1e-4), st.integers(1, 64))
def test_workers_apart_lose_no_more_than_their_own(rate: float, workers: int) -> None:
    """Short rounds, no stall: useful is the part of the time that a worker is up."""
    after = Restart(restart=600.0)
    found = apart(rate, workers, 1e-3, after)
    assert found.useful == pytest.approx(1 / (1 + rate * 600.0), rel=1e-4)


def test_rates_add_up() -> None:
    """A rate of the job does not fall with its size."""
    rates = Rates(gpu=1e-9, node=2e-8, switch=1e-8, job=1e-6)
    assert rates.of(16, 2, 1) == pytest.approx(16e-9 + 4e-8 + 1e-8 + 1e-6)


def test_hopeless_and_wrong_numbers_are_refused() -> None:
    """One line that says what."""
    with pytest.raises(OptionError, match="nothing gets done"):
        together(1.0, 1e6, Saving(blocking=1.0), Restart())
    with pytest.raises(OptionError, match="write less often"):
        together(1e-6, 10.0, Saving(blocking=0.0, writing=20.0), Restart())
    with pytest.raises(OptionError, match="failures of a node per second is -1"):
        Rates(node=-1)
