"""Goodput event by event: failures of all and of single workers in one run, on SimPy's clock.

It knows nothing of the closed form: a job works, saves, fails at random times and restarts; while
it works, its workers fail, are away, and come back at the beginning of a round.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import simpy

from co2sim.goodput.closed_forms import Shares
from co2sim.goodput.events import Account, Job
from co2sim.goodput.parts import FailingWorkers, Goodput
from co2sim.units import Seconds

NAMES = tuple(field.name for field in fields(Shares))


class SimulatedShare(NamedTuple):
    """A mean of independent runs, with its standard error."""

    mean: float
    error: float


def simulated(
    found: Goodput, seed: int, runs: int = 20, failures: int = 400
) -> Mapping[str, SimulatedShare]:
    """Shares of the time by name, of so many runs with about so many failures each.

    Without any failure there is nothing to estimate: all is useful.
    """
    rate = found.failures_per_second
    if rate == 0:
        return {name: SimulatedShare(float(name == "useful"), 0.0) for name in NAMES}
    seeds = np.random.SeedSequence(seed).spawn(runs)
    accounts = [_run(found, failures / rate, np.random.default_rng(one)) for one in seeds]
    estimates = {}
    for name in NAMES:
        shares = np.array([getattr(account, name) / account.total for account in accounts])
        error = float(shares.std(ddof=1)) / math.sqrt(runs)
        estimates[name] = SimulatedShare(float(shares.mean()), error)
    return estimates


def _run(found: Goodput, until: Seconds, rng: np.random.Generator) -> Account:
    """One run of at least so many seconds of the job's clock, which stands still for stalls."""
    whole = found.whole
    env = simpy.Environment()
    spares = simpy.Container(env, init=whole.after.spares)
    job = Job(env, rng, whole.rate, whole.every, whole.saving, whole.after, spares)
    env.process(_work(job, found.workers, until))
    env.run()
    return job.account


def _work(
    job: Job, workers: FailingWorkers | None, until: Seconds
) -> Generator[simpy.Event, Any, None]:
    """Work from restart to failure, again and again; what runs at the end is as good as saved."""
    books, saving = job.account, job.saving
    period = job.every + saving.blocking
    while job.env.now < until:
        fails, left = job.failure(), until - job.env.now
        last = fails >= left
        works = min(fails, left)
        yield job.env.timeout(works)
        if math.isinf(period):
            kept, saves = works, 0
        else:
            done = works if last else works - saving.writing
            saves = max(0, math.floor(done / period))
            kept = saves * job.every
            if last:
                kept += min(works - saves * period, job.every)
        _book(books, workers, kept, job.rng)
        stopped = min(saves * saving.blocking, works - kept) if not last else works - kept
        books.checkpoint += stopped
        books.lost += works - kept - stopped
        if last:
            return
        books.failures += 1
        yield from job.replace()
        yield from job.restart()


def _book(
    books: Account, workers: FailingWorkers | None, time: Seconds, rng: np.random.Generator
) -> None:
    """What workers make of a time in which nothing stops all of them."""
    if workers is None or time <= 0:
        books.useful += time
        return
    work, stalls, outages = _outages(workers, time, rng)
    present = (1 - workers.absent) / workers.count  # who has no node is not simulated
    lost = present * sum(out.lost for out in outages)
    down = present * sum(min(out.ready, work) - out.began for out in outages)
    waits = present * sum(max(0.0, min(out.back, work) - out.ready) for out in outages)
    stalls *= 1 - workers.absent
    absent = workers.absent * time
    books.useful += time - lost - down - waits - stalls - absent
    books.lost += lost
    books.restart += down + stalls
    books.waiting += waits + absent
    books.failures += len(outages)


class _Outage(NamedTuple):
    """Of one worker: it loses its part of the round, is ready again, and back at the next round."""

    lost: Seconds
    began: Seconds
    ready: Seconds
    back: Seconds


def _outages(
    workers: FailingWorkers, until: Seconds, rng: np.random.Generator
) -> tuple[Seconds, Seconds, list[_Outage]]:
    """Outages in so much time, which is divided into work and stalls of all workers.

    The clock of rounds stands still for stalls.
    """
    env, found = simpy.Environment(), list[_Outage]()
    every, down = workers.round_time, workers.after.down
    away: set[int] = set()

    def outage(worker: int) -> Generator[simpy.Event, Any, None]:
        now, ready = env.now, env.now + down
        back = max(math.ceil(ready / every) * every, ready)
        found.append(_Outage(now % every, now, ready, back))
        away.add(worker)
        yield env.timeout(back - now)
        away.discard(worker)

    def strike() -> Generator[simpy.Event, Any, None]:
        while True:
            fails = float(rng.exponential(1 / (workers.rate * workers.count)))
            left = max(0.0, until - env.now - len(found) * workers.stall)
            yield env.timeout(min(fails, left))
            if fails >= left:
                return
            worker = int(rng.integers(workers.count))
            if worker not in away:  # what is down does not fail
                env.process(outage(worker))
                yield env.timeout(0)  # it is booked first

    if not workers.rate:
        return until, 0.0, found
    env.run(env.process(strike()))
    return env.now, until - env.now, found
