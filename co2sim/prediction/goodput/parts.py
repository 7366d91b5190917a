"""What stops all of a training, what stops one worker of it, and what follows for its goodput."""

import math
from dataclasses import dataclass

from scipy.special import gammainc

from co2sim.common.units import Bytes, BytesPerSecond, Seconds
from co2sim.models.workload import Optimizer
from co2sim.prediction.goodput.closed_forms import Restart, Saving, Shares, apart, inside, together


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What is trained, in numbers.

    `workers` go on without one of them; with 1 every failure stops all. `round_time` is that of a
    round of local updates, or of a step. `outer_bytes` is the outer state of local updates: anchor,
    momentum, and an average under way. A worker reads the state of a peer at `peer_bandwidth`.
    """

    gpus: int
    nodes: int
    parameters: int
    round_time: Seconds
    workers: int = 1
    outer_bytes: Bytes = 0.0
    peer_bandwidth: BytesPerSecond = math.inf
    optimizer: Optimizer = "adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeJob:
    """What stops all: `rate` in failures per second, `every` the work between two checkpoints."""

    rate: float
    every: Seconds
    saving: Saving
    after: Restart

    def shares(self) -> Shares:
        """Of the time. Without failures, or without checkpoints (`every` infinite), all is useful.

        Raises OptionError where nothing gets done.
        """
        if math.isinf(self.every):
            return Shares(useful=1.0, checkpoint=0.0, lost=0.0, restart=0.0, waiting=0.0)
        return together(self.rate, self.every, self.saving, self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingWorkers:
    """What stops one of `count` workers: failures per second of one, and what follows.

    All stand still for `stall` at each. `absent` is the share of workers for which there is no
    node.
    """

    rate: float
    count: int
    round_time: Seconds
    after: Restart
    stall: Seconds
    absent: float

    def shares(self) -> Shares:
        """Of the time of all workers while no failure stops all."""
        found = apart(self.rate, self.count, self.round_time, self.after, self.stall)
        return inside(_absent(self.absent), found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Shares of the time, and what they follow from.

    `low` and `high` are the useful share where rates and restarts are at the ends of their range,
    with the same interval between checkpoints. `workers` is None where every failure stops all.
    """

    shares: Shares
    low: float
    high: float
    whole: WholeJob
    workers: FailingWorkers | None
    checkpoint_bytes: Bytes

    @property
    def useful(self) -> float:
        """The share of the time that is work which lasts."""
        return self.shares.useful

    @property
    def failures_per_second(self) -> float:
        """Of anything: what stops all, and what stops one worker."""
        workers = self.workers
        return self.whole.rate + (workers.rate * workers.count if workers else 0.0)


def shares_of(whole: WholeJob, workers: FailingWorkers | None) -> Shares:
    """Shares of all the time."""
    found = whole.shares()
    return found if workers is None else inside(found, workers.shares())


def missing(load: float, spares: int) -> float:
    """Nodes that are missing on average, with `load` under repair and so many spares.

    The excess of a Poisson count over `spares` (M/G/infinity): E[(X - s)+] = load P(X >= s) -
    s P(X >= s + 1). As long as few are away: those away are taken to fail on.
    """
    if not spares:
        return load
    return load * float(gammainc(spares, load)) - spares * float(gammainc(spares + 1, load))


def _absent(share: float) -> Shares:
    """A share of the time that waits."""
    waiting = min(share, 1.0)
    return Shares(useful=1 - waiting, checkpoint=0.0, lost=0.0, restart=0.0, waiting=waiting)
