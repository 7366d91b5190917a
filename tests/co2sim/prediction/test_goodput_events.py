"""Goodput: closed forms against failures one by one on a clock, at settings drawn at random."""

import math

import numpy as np
import pytest
from goodput_simulation import NAMES, simulated

from co2sim.prediction.goodput import (
    FailingWorkers,
    Preemption,
    Restart,
    Saving,
    Shares,
    WholeJob,
    shares_of,
)


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


@pytest.mark.slow
@pytest.mark.parametrize("copies", ["none", "on notice", "both", "too late"])
@pytest.mark.parametrize("number", range(3))
def test_preemptions_agree_with_the_closed_forms(number: int, copies: str) -> None:
    """With copies on notice, without, and with failures beside them: within 4 standard errors."""
    rng = np.random.default_rng(2000 + number)
    mean = 10 ** rng.uniform(4, 5.5)
    every = mean * 10 ** rng.uniform(-1.5, -0.3)
    blocking, writing = every * rng.uniform(0, 0.1), every * rng.uniform(0, 1)
    later = mean * rng.uniform(0, 0.1)
    kept = FailingWorkers(
        rate=0.3 / mean,
        count=8,
        round_time=mean * 10 ** rng.uniform(-3, -1),
        after=Restart(detection=later / 2, restart=later),
        stall=mean * rng.uniform(0, 0.003),
        absent=0.0,
        preempted=Preemption(rate=0.7 / mean, replacement=later * 2),
    )
    whole = WholeJob(
        rate=0.0 if copies in {"none", "on notice"} else 0.6 / mean,
        every=math.inf if copies in {"none", "on notice"} else every,
        saving=Saving(blocking=blocking, writing=writing),
        after=Restart(detection=later / 3, restart=later),
        preempted=Preemption(
            rate=0.0 if copies == "none" else 1.4 / mean,
            saving=None if copies == "too late" else blocking + writing,
            replacement=later * 3,
        ),
    )
    parts = (whole, kept if copies == "none" else None)
    found = simulated(*parts, seed=2000 + number, runs=30, failures=300)
    for name, share in of_shares(shares_of(*parts)).items():
        value, error = found[name]
        assert abs(value - share) <= 4 * error + 2e-5, (name, share, value, error)
