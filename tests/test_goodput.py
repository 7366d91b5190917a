"""Goodput: closed forms against events on a clock, and against what is known of them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from co2sim.errors import OptionError
from co2sim.goodput import events
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

HOUR = 3600.0
RUNS = 30
NAMES = ("useful", "checkpoint", "lost", "restart", "waiting")


def fractions(account: events.Account) -> dict[str, float]:
    """Of the time that was booked."""
    return {name: getattr(account, name) / account.total for name in NAMES}


def of_shares(shares: Shares) -> dict[str, float]:
    """The same of closed forms."""
    return {name: getattr(shares, name) for name in NAMES}


def agree(found: list[dict[str, float]], expected: Shares) -> None:
    """The useful share is within 3 standard errors of the mean of independent runs.

    The others are within 4: of 400 shares one or two are farther off than 3 by chance.
    """
    for name, share in of_shares(expected).items():
        values = np.array([one[name] for one in found])
        error = values.std(ddof=1) / math.sqrt(len(values))
        most = 3 if name == "useful" else 4
        assert abs(values.mean() - share) <= most * error + 1e-6, (name, values.mean(), error)


@pytest.mark.parametrize("number", range(50))
def test_events_agree_where_all_stop(number: int) -> None:
    """50 settings drawn at random: shares of the time within standard errors."""
    rng = np.random.default_rng(number)
    mean = 10 ** rng.uniform(3, 5)  # 17 minutes to 28 hours between failures
    every = mean * 10 ** rng.uniform(-1.5, 0)
    saving = Saving(
        blocking=every * rng.uniform(0, 0.2),
        writing=every * rng.uniform(0, 1) * rng.integers(2),
    )
    after = Restart(
        detection=mean * rng.uniform(0, 0.1),
        restart=mean * rng.uniform(0, 0.2),
        reload=mean * rng.uniform(0, 0.1),
        spares=int(rng.integers(0, 4)),
        repair=mean * rng.uniform(0, 2) * rng.integers(2),
    )
    found = [
        fractions(events.together(1 / mean, every, saving, after, 200 * mean, seed))
        for seed in range(RUNS * number, RUNS * (number + 1))
    ]
    agree(found, together(1 / mean, every, saving, after))


@pytest.mark.parametrize("number", range(50))
def test_events_agree_where_the_others_go_on(number: int) -> None:
    """50 settings drawn at random: shares of the time within standard errors."""
    rng = np.random.default_rng(100 + number)
    mean = 10 ** rng.uniform(4, 6)
    round_time = mean * 10 ** rng.uniform(-4, 0.3)
    workers = int(rng.integers(1, 17))
    after = Restart(detection=mean * rng.uniform(0, 0.1), reload=mean * rng.uniform(0, 0.3))
    stall = mean * rng.uniform(0, 0.05)
    found = [
        fractions(
            events.apart(1 / mean, workers, round_time, after, stall, 100 + 1600 // workers, seed)
        )
        for seed in range(RUNS * number, RUNS * (number + 1))
    ]
    agree(found, apart(1 / mean, workers, round_time, after, stall))


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


def test_events_account_for_all_of_the_time() -> None:
    """What is booked at the last safe copy is the time on the clock, to 1e-9 of it."""
    account = events.together(
        1 / HOUR,
        600.0,
        Saving(blocking=20.0),
        Restart(restart=300.0, spares=1, repair=2 * HOUR),
        500 * HOUR,
        0,
    )
    assert account.total == pytest.approx(500 * HOUR, rel=2e-3)  # what is under way is not booked
    assert account.total <= 500 * HOUR * (1 + 1e-9)


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
