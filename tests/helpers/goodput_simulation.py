"""Goodput event by event, as an oracle of the closed forms, of which it knows nothing.

A job works, saves, fails at random times and restarts; while it works, its workers fail, are away,
and come back at the beginning of a round.
"""

import math
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from co2sim.prediction.goodput import FailingWorkers, WholeJob

NAMES = ("useful", "checkpoint", "lost", "restart", "waiting")


def simulated(
    whole: WholeJob, workers: FailingWorkers | None, seed: int, runs: int, failures: int
) -> Mapping[str, tuple[float, float]]:
    """Mean and standard error of the shares of the time, of runs with about so many failures."""
    rate = whole.rate + whole.preempted.rate
    rate += workers.all_rates * workers.count if workers else 0.0
    shares = []
    for one in np.random.SeedSequence(seed).spawn(runs):
        job = Job(whole, workers, failures / rate, np.random.default_rng(one))
        job.env.run(job.env.process(job.run()))
        shares.append([job.spent[name] / math.fsum(job.spent.values()) for name in NAMES])
    means, spread = np.mean(shares, axis=0), np.std(shares, axis=0, ddof=1)
    return {n: (means[i], spread[i] / math.sqrt(runs)) for i, n in enumerate(NAMES)}


@dataclass
class Job:
    """One run of at least `until` seconds; `spent` are seconds by name."""

    whole: WholeJob
    workers: FailingWorkers | None
    until: float
    rng: np.random.Generator
    spent: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.env = simpy.Environment()
        self.spares = simpy.Container(self.env, init=self.whole.after.spares)

    def failure(self) -> tuple[float, bool]:
        """Seconds until something stops all, and whether that is a preemption."""
        fails, taken = (
            float(self.rng.exponential(1 / rate)) if rate else math.inf
            for rate in (self.whole.rate, self.whole.preempted.rate)
        )
        return min(fails, taken), taken < fails

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Work from restart to failure; what runs at the end is as good as saved."""
        every, saving = self.whole.every, self.whole.saving
        period = every + saving.blocking
        while self.env.now < self.until:
            (fails, taken), left = self.failure(), self.until - self.env.now
            last, works = fails >= left, min(fails, left)
            yield self.env.timeout(works)
            on_notice = taken and self.whole.preempted.saving is not None
            if math.isinf(period):
                kept, saves = works, 0
            else:
                whole = last or on_notice
                safe = works if whole else works - saving.writing
                saves = max(0, math.floor(safe / period))
                kept = saves * every + (min(works - saves * period, every) if whole else 0)
            stopped = works - kept if last or on_notice else saves * saving.blocking
            self.work(kept)
            self.spent += Counter(checkpoint=stopped, lost=works - kept - stopped)
            if last:
                return
            yield from self.restart(taken=taken)

    def restart(self, *, taken: bool) -> Generator[simpy.Event, Any, None]:
        """All until work goes on, which begins again where something fails meanwhile."""
        after, preempted = self.whole.after, self.whole.preempted
        while True:
            if not taken:
                yield from self.replace()
            steps = [("restart", after.down)]
            if taken:
                steps = [("checkpoint", preempted.saving or 0.0)]
                steps += [("waiting", preempted.replacement)]
                steps += [("restart", after.restart + after.reload)]
            fails, next_taken = self.failure()
            for name, length in steps:
                passes = min(fails, length)
                yield self.env.timeout(passes)
                self.spent[name] += passes
                fails -= passes
                if passes < length:
                    break
            else:
                return
            taken = next_taken

    def replace(self) -> Generator[simpy.Event, Any, None]:
        """Take a spare node, or wait until one is back."""
        if not self.whole.after.repair:
            return

        def repair() -> Generator[simpy.Event, Any, None]:
            yield self.env.timeout(float(self.rng.exponential(self.whole.after.repair)))
            yield self.spares.put(1)

        self.env.process(repair())
        began = self.env.now
        yield self.spares.get(1)
        self.spent["waiting"] += self.env.now - began

    def work(self, time: float) -> None:
        """What workers make of a time in which nothing stops all of them."""
        workers = self.workers
        if workers is None or time <= 0:
            self.spent["useful"] += time
            return
        worked, outages, taken = _outages(workers, time, self.rng)
        there = 1 - workers.absent  # who has no node is not simulated
        one = there / workers.count
        node = workers.preempted.replacement
        waited = one * sum(max(0.0, min(node, worked - began)) for began in taken)
        books = Counter(
            lost=one * sum(began % workers.round_time for began, _, _ in outages),
            restart=one * sum(min(ready, worked) - began for began, ready, _ in outages)
            - waited
            + there * (time - worked),
            waiting=one * sum(max(0.0, min(b, worked) - r) for _, r, b in outages)
            + waited
            + workers.absent * time,
        )
        books["useful"] = time - math.fsum(books.values())
        self.spent.update(books)


def _outages(
    workers: FailingWorkers, time: float, rng: np.random.Generator
) -> tuple[float, list[tuple[float, float, float]], list[float]]:
    """The part of the time that is no stall of all, and when workers fail, are ready, and are back.

    Last when workers are preempted. The clock of rounds stands still for stalls.
    """
    env, every = simpy.Environment(), workers.round_time
    found: list[tuple[float, float, float]] = []
    preempted: list[float] = []
    away: set[int] = set()

    def outage(worker: int) -> Generator[simpy.Event, Any, None]:
        after, ready = workers.after, env.now + workers.after.down
        if rng.random() * workers.all_rates < workers.preempted.rate:
            preempted.append(env.now)
            ready = env.now + workers.preempted.replacement + after.restart + after.reload
        back = max(math.ceil(ready / every) * every, ready)
        found.append((env.now, ready, back))
        away.add(worker)
        yield env.timeout(back - env.now)
        away.discard(worker)

    def strike() -> Generator[simpy.Event, Any, None]:
        while True:
            fails = float(rng.exponential(1 / (workers.all_rates * workers.count)))
            left = max(0.0, time - env.now - len(found) * workers.stall)
            yield env.timeout(min(fails, left))
            if fails >= left:
                return
            worker = int(rng.integers(workers.count))
            if worker not in away:  # what is down does not fail
                env.process(outage(worker))
                yield env.timeout(0)  # it is booked first

    env.run(env.process(strike()))
    return env.now, found, preempted
