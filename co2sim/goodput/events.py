"""The same as `goodput`, event by event: failures at random times, on SimPy's clock."""

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from co2sim.goodput.closed_forms import Restart, Saving
from co2sim.units import Seconds


@dataclass
class Account:
    """Seconds by what they were spent on; they sum to the time that passed."""

    useful: Seconds = 0.0
    checkpoint: Seconds = 0.0
    lost: Seconds = 0.0
    restart: Seconds = 0.0
    waiting: Seconds = 0.0
    failures: int = 0

    @property
    def total(self) -> Seconds:
        """All of them."""
        return math.fsum((self.useful, self.checkpoint, self.lost, self.restart, self.waiting))


@dataclass
class Job:
    """One job of which all stop at a failure."""

    env: simpy.Environment
    rng: np.random.Generator
    rate: float
    every: Seconds
    saving: Saving
    after: Restart
    spares: simpy.Container
    account: Account = field(default_factory=Account)

    def failure(self) -> Seconds:
        """Seconds of work until the next one."""
        return float(self.rng.exponential(1 / self.rate)) if self.rate else math.inf

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Work for ever; what is safe is booked when it is."""
        books, since_safe = self.account, 0.0  # seconds since the copy that is safe was begun
        period = self.every + self.saving.blocking
        while True:
            # the next copy is safe `writing` after its period has ended
            left = period + self.saving.writing - since_safe
            fails = self.failure()
            if fails >= left:
                yield self.env.timeout(left)
                books.useful += self.every
                books.checkpoint += self.saving.blocking
                since_safe = self.saving.writing
                continue
            yield self.env.timeout(fails)
            books.lost += since_safe + fails
            books.failures += 1
            since_safe = 0.0
            yield from self.replace()
            yield from self.restart()

    def restart(self) -> Generator[simpy.Event, Any, None]:
        """Detection, restart and reload, begun anew where something fails meanwhile."""
        while True:
            fails = self.failure()
            if fails >= self.after.down:
                yield self.env.timeout(self.after.down)
                self.account.restart += self.after.down
                return
            yield self.env.timeout(fails)
            self.account.restart += fails
            self.account.failures += 1
            yield from self.replace()

    def replace(self) -> Generator[simpy.Event, Any, None]:
        """Take a spare node, or wait until one is back."""
        if not self.after.repair:
            return
        self.env.process(self._repair())
        began = self.env.now
        yield self.spares.get(1)
        self.account.waiting += self.env.now - began

    def _repair(self) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(float(self.rng.exponential(self.after.repair)))
        yield self.spares.put(1)


def together(
    rate: float, every: Seconds, saving: Saving, after: Restart, until: Seconds, seed: int
) -> Account:
    """`goodput.together` by events: at least `until` seconds, up to the next copy that is safe.

    The time of the account is what has been booked: all work up to the last safe copy or failure.
    """
    env = simpy.Environment()
    spares = simpy.Container(env, init=after.spares)
    job = Job(env, np.random.default_rng(seed), rate, every, saving, after, spares)
    env.process(job.run())
    env.run(until)
    return job.account


def apart(
    rate: float,
    workers: int,
    round_time: Seconds,
    after: Restart,
    stall: Seconds,
    failures: int,
    seed: int,
) -> Account:
    """`goodput.apart` by events, to the last of so many failures of every worker.

    Seconds are those of all workers together.
    """
    rng, account = np.random.default_rng(seed), Account()
    env = simpy.Environment()

    def worker() -> Generator[simpy.Event, Any, None]:
        for _ in range(failures):
            joined = env.now
            yield env.timeout(float(rng.exponential(1 / rate)))
            within = (env.now - joined) % round_time
            account.useful += env.now - joined - within
            account.lost += within
            failed = env.now
            account.failures += 1
            account.restart += stall * workers  # all stand still, and no clock of theirs runs
            yield env.timeout(after.down)
            account.restart += env.now - failed
            until_next = -(within + after.down) % round_time
            yield env.timeout(until_next)
            account.waiting += until_next

    for _ in range(workers):
        env.process(worker())
    env.run()
    return account
