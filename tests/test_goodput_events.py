"""Goodput: closed forms against failures one by one on a clock, at settings drawn at random."""

import math
from dataclasses import astuple

import numpy as np
import pytest

from co2sim.goodput import events
from co2sim.goodput.check import simulated
from co2sim.goodput.closed_forms import Restart, Saving, Shares, apart, together
from co2sim.goodput.parts import FailingWorkers, Goodput, WholeJob, shares_of

HOUR = 3600.0
RUNS = 30
NAMES = ("useful", "checkpoint", "lost", "restart", "waiting")

SETTINGS = [
    pytest.param(range(3), marks=pytest.mark.slow, id="few"),
    pytest.param(range(3, 50), marks=pytest.mark.nightly, id="others"),
]


def fractions(account: events.Account) -> dict[str, float]:
    """Of the time that was booked."""
    return {name: getattr(account, name) / account.total for name in NAMES}


def agree(found: list[dict[str, float]], expected: Shares) -> None:
    """The useful share is within 3 standard errors of the mean of independent runs.

    The others are within 4: of 400 shares one or two are farther off than 3 by chance.
    """
    for name, share in zip(NAMES, astuple(expected), strict=True):
        values = np.array([one[name] for one in found])
        error = values.std(ddof=1) / math.sqrt(len(values))
        most = 3 if name == "useful" else 4
        assert abs(values.mean() - share) <= most * error + 1e-6, (name, values.mean(), error)


@pytest.mark.parametrize("numbers", SETTINGS)
def test_events_agree_where_all_stop(numbers: range) -> None:
    """Shares of the time are within standard errors."""
    for number in numbers:
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


@pytest.mark.parametrize("numbers", SETTINGS)
def test_events_agree_where_the_others_go_on(numbers: range) -> None:
    """Shares of the time are within standard errors."""
    for number in numbers:
        rng = np.random.default_rng(100 + number)
        mean = 10 ** rng.uniform(4, 6)
        round_time = mean * 10 ** rng.uniform(-4, 0.3)
        workers = int(rng.integers(1, 17))
        after = Restart(detection=mean * rng.uniform(0, 0.1), reload=mean * rng.uniform(0, 0.3))
        stall = mean * rng.uniform(0, 0.05)
        found = [
            fractions(
                events.apart(
                    1 / mean, workers, round_time, after, stall, 100 + 1600 // workers, seed
                )
            )
            for seed in range(RUNS * number, RUNS * (number + 1))
        ]
        agree(found, apart(1 / mean, workers, round_time, after, stall))


@pytest.mark.parametrize("numbers", SETTINGS)
def test_events_agree_with_failures_of_all_and_of_workers_together(numbers: range) -> None:
    """The useful share is within 3 standard errors.

    Workers fail up to ten times as often as all, and are away for up to a tenth of their life.
    """
    for number in numbers:
        rng = np.random.default_rng(1000 + number)
        mean = 10 ** rng.uniform(4, 5.5)
        every = mean * 10 ** rng.uniform(-2, -0.5)
        count = int(rng.integers(2, 65))
        whole = WholeJob(
            rate=1 / mean,
            every=every,
            saving=Saving(blocking=every * rng.uniform(0, 0.1), writing=every * rng.uniform(0, 1)),
            after=Restart(
                detection=mean * rng.uniform(0, 0.05), restart=mean * rng.uniform(0, 0.05)
            ),
        )
        life = mean * count * 10 ** rng.uniform(-1, 1)
        workers = FailingWorkers(
            rate=1 / life,
            count=count,
            round_time=min(mean, life) * 10 ** rng.uniform(-4, -2),
            after=Restart(restart=min(mean, life) * rng.uniform(0, 0.02)),
            stall=life / count * rng.uniform(0, 0.05),
            absent=0.1 * float(rng.integers(2)),
        )
        alone = number % 3 == 0
        parts = (whole, None if alone else workers)
        shares = shares_of(*parts)
        found = Goodput(
            shares=shares,
            low=0.0,
            high=1.0,
            whole=parts[0],
            workers=parts[1],
            checkpoint_bytes=0.0,
        )
        booked = simulated(found, seed=1000 + number, runs=40, failures=200)
        for name, estimate in booked.items():
            most = 3 if name == "useful" else 4
            off = abs(estimate.mean - getattr(shares, name))
            assert off <= most * estimate.error + 2e-5, (name, estimate, getattr(shares, name))


def test_events_repeat_with_their_seed() -> None:
    """The same seed, the same shares; they account for all of the time."""
    parts = WholeJob(rate=1 / HOUR, every=600.0, saving=Saving(blocking=9.0), after=Restart()), None
    found = Goodput(
        shares=shares_of(*parts),
        low=0.0,
        high=1.0,
        whole=parts[0],
        workers=None,
        checkpoint_bytes=0.0,
    )
    first, again = simulated(found, 1, runs=3), simulated(found, 1, runs=3)
    assert first == again
    assert sum(one.mean for one in first.values()) == pytest.approx(1, abs=1e-9)
    assert first != simulated(found, 2, runs=3)


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
