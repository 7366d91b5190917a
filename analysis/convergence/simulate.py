"""A simulator of CO2, SlowMo and local SGD: many variants, seeds and workers at once.

Arrays have the leading axes (variants, seeds, workers). All variants of one call see the same
noise unless they are `apart`, and so do calls with the same seed and sizes: differences between
them have little noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.convergence.objectives.problems import Array, Gaussian, Problem, Sampler
from analysis.convergence.setting import Late, Outcome, RunSize, Variants
from co2sim.common.errors import OptionError
from co2sim.common.validation import whole


class InnerSteps:
    """The local steps of a round, and what is measured on the way."""

    def __init__(
        self, problem: Problem, sampler: Sampler, which: Variants, workers: int, steps: int
    ) -> None:
        self.problem, self.sampler = problem, sampler
        self.workers, self.count = workers, steps
        self.size = which.inner_step[:, None, None, None]
        self.deviation = np.sqrt(which.noise)[:, None, None, None]
        self.gradient: Array = np.zeros(1)
        self.drift: Array = np.zeros(1)
        self.spread = np.zeros(len(which))
        self.variance = which.noise.copy()

    def steps(self, x: Array, drawn: NDArray[Any]) -> Array:
        """The sum D of the averaged gradients of a round that begins at x: [C, S, d]."""
        points = np.repeat(x[:, :, None, :], self.workers, axis=2)
        mean = x
        for step in range(self.count):
            mean = self.step(points, mean, drawn[step])
        return (x - mean) / self.size[:, :, 0]

    def step(
        self, points: Array, mean: Array, drawn: NDArray[Any], weight: Array | float = 1.0
    ) -> Array:
        """Measure, with a weight, and move the workers [C, S, G, d]; their new mean."""
        self._measure(points, mean, weight)
        noisy, variance = self.sampler.gradients(points, drawn, self.deviation)
        if variance is not None:
            self.variance = np.fmax(self.variance, variance.mean(axis=(1, 2)))
        noisy *= self.size
        points -= noisy
        return np.asarray(points.mean(axis=2))

    def _measure(self, points: Array, mean: Array, weight: Array | float) -> None:
        slope = self.problem.gradient(mean)
        self.gradient = self.gradient + weight * np.einsum("csd,csd->cs", slope, slope)
        if self.workers > 1:
            apart = points - mean[:, :, None, :]
            square = np.einsum("csgd,csgd->cs", apart, apart) / self.workers
            self.drift = self.drift + weight * square
        if self.problem.heterogeneous:
            spread = self.problem.spread(mean).mean(axis=1)
            self.spread = np.fmax(self.spread, spread)


class OuterUpdate:
    """Penalty, momentum, clipping and the outer step."""

    def __init__(self, which: Variants, seeds: int, dimension: int) -> None:
        shape = (len(which), seeds, dimension)
        self.which = which
        self.momentum = np.zeros(shape)
        self.moved = np.zeros(shape[:2])
        self.longest = np.zeros(shape[:2])
        self.penalty = np.ones(len(which))
        self.clipped = np.zeros(len(which))
        self.factor = (which.outer_step * which.inner_step)[:, None, None]
        self.smooth = np.zeros(shape)
        self.residual, self.running = np.zeros(shape[:2]), np.zeros(shape[:2])
        self.before = self.residual, self.running

    def step(self, x: Array, due: Array | None) -> Array:
        """The next x, given the sum that is due; None before the first."""
        which = self.which
        self.momentum = which.momentum[:, None, None] * self.momentum
        if due is not None:
            penalty = self._penalty(due)
            self.momentum = self.momentum + due / penalty[:, :, None]
            self.penalty = np.fmax(self.penalty, penalty.max(axis=1))
        limits = which.clip[:, None, None]
        if np.isfinite(which.clip).any():
            self.clipped += (np.abs(self.momentum) > limits).mean(axis=(1, 2))
            wanted = self.momentum
            self.momentum = np.clip(wanted, -limits, limits)
            self._record(wanted - self.momentum)
        change = self.factor * self.momentum
        self.moved = np.sqrt((change**2).sum(axis=-1))
        return np.asarray(x - change)

    def _record(self, clipped: Array) -> None:
        """Add up what was clipped; `before` keeps the sums without the last update."""
        decay = self.which.decay[:, None, None]
        self.smooth = decay * self.smooth + (1 - decay) * clipped
        self.before = self.residual, self.running
        self.residual = self.residual + (clipped**2).sum(axis=-1)
        self.running = self.running + (self.smooth**2).sum(axis=-1)

    def _penalty(self, due: Array) -> Array:
        """Lambda of this round, [C, S], from what is known without the sum that it divides.

        Source: docs/theory.md, bound (any rule that is known before the first gradient of the
        round); the rule itself is ours.
        """
        which = self.which
        constant = np.broadcast_to(which.penalty[:, None], due.shape[:2])
        if not which.gap_aware.any():
            return constant
        share = np.divide(
            self.moved, self.longest, out=np.zeros_like(self.moved), where=self.longest > 0
        )
        length = np.sqrt((due**2).sum(axis=-1)) * self.factor[:, :, 0]
        self.longest = np.fmax(self.longest, length)
        return np.where(which.gap_aware[:, None], 1 + share, constant)


class LateRuns:
    """The state of a run: workers, their anchor, and the average that travels.

    `points` are the workers, [C, S, G, d]; `anchor` and `mean` are [C, S, d].
    """

    def __init__(
        self,
        problem: Problem,
        which: Variants,
        size: RunSize,
        sampler: Sampler,
        seed: int | Sequence[int],
        apart: bool,  # noqa: FBT001
    ) -> None:
        assert size.late_steps is not None
        self.arrival = size.late_steps
        lates = [
            Late(steps=self.arrival, keep=float(keep), predict=float(predict))
            for keep, predict in zip(which.keep, which.predict, strict=True)
        ]
        self.size, self.which = size, which
        self.rng = np.random.default_rng(seed)
        self.local = InnerSteps(problem, sampler, which, size.workers, size.local_steps)
        self.outer = OuterUpdate(which, size.seeds, len(problem.start))
        shape = (len(which), size.seeds, len(problem.start))
        self.anchor: Array = np.broadcast_to(problem.start, shape).copy()
        self.mean = self.anchor
        self.points = np.repeat(self.anchor[:, :, None, :], size.workers, axis=2)
        self.shape = ((len(which),) if apart else ()) + (size.seeds, size.workers)
        self.counted = np.array([late.counted(size.local_steps) for late in lates])
        self.carried = np.array([late.carried(size.local_steps) for late in lates])[:, None, None]
        self.launched: tuple[Array, Array] | None = None
        self.done = 0

    def next_round(self) -> None:
        """Take the local steps of a round, use what arrives between them, launch at the end."""
        steps = self.size.local_steps
        drawn: NDArray[np.float64] = self.local.sampler.draw(self.rng, (steps, *self.shape))
        early = self.which.keep[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            for k in range(steps):
                if k == self.arrival:
                    self._arrive()
                weight = early if k < self.arrival else 1.0
                self.mean = self.local.step(self.points, self.mean, drawn[k], weight)
            if self.arrival == steps:
                self._arrive()
            self.launched = (self.points.copy(), self.anchor - self.mean)
        self.done += 1

    def _arrive(self) -> None:
        """Move the anchor, and the workers with it: they keep a part of what they did meanwhile."""
        if self.launched is None:
            return
        left, moved = self.launched
        self.anchor = self.outer.step(self.anchor, moved / self.local.size[:, :, 0])
        ahead = self.anchor - self.carried * moved
        kept = self.which.keep[:, None, None, None] * (self.points - left)
        self.points = ahead[:, :, None, :] + kept
        self.mean = np.asarray(self.points.mean(axis=2))

    def outcome(self) -> Outcome:
        """What was measured until here; `final` is the last mean of the workers."""
        local, outer, shape = self.local, self.outer, self.mean.shape[:2]
        counted = (self.done * self.counted)[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            value = local.problem.value(self.mean)
        return Outcome(
            gradient=np.broadcast_to(local.gradient / counted, shape).copy(),
            drift=np.broadcast_to(local.drift / counted, shape).copy(),
            value=value,
            spread=local.spread,
            variance=local.variance,
            clipped=outer.clipped / max(1, self.done - 1),
            penalty=outer.penalty,
            residual=outer.residual / self.done,
            running=outer.running / self.done,
            final=self.mean,
        )


_CHUNK = 2**22
"""Most numbers drawn ahead at once: 32 MiB."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Every round of a run: x_t, m_t (T + 1 of each) and D_t: [rounds, C, S, d]."""

    points: Array
    momenta: Array
    sums: Array


def run(
    problem: Problem,
    which: Variants,
    size: RunSize,
    *,
    seed: int | Sequence[int] = 0,
    sampler: Sampler | None = None,
    apart: bool = False,
) -> Outcome:
    """Run all variants from the problem's start; noise is Gaussian unless a sampler is given.

    With `apart` every variant has its own noise, else all have the same.
    What diverges becomes infinite or NaN, without a warning. Raises OptionError for a negative
    delay, and for a gap-aware penalty without delay.
    """
    kind = _Runs if size.late_steps is None else LateRuns
    simulation = kind(problem, which, size, sampler or Gaussian(problem), seed, apart)
    for _ in range(size.rounds):
        simulation.next_round()
    return simulation.outcome()


def walk(
    problem: Problem,
    which: Variants,
    size: RunSize,
    *,
    seed: int | Sequence[int] = 0,
    sampler: Sampler | None = None,
) -> tuple[Outcome, Trajectory]:
    """As `run` without `apart`, and every round with it; for averages that are late by rounds."""
    simulation = _Runs(problem, which, size, sampler or Gaussian(problem), seed, apart=False)
    rounds = [simulation.next_round() for _ in range(size.rounds)]
    points, momenta, sums = (np.array(part) for part in zip(*rounds, strict=True))
    last = simulation.x[None]
    return simulation.outcome(), Trajectory(np.concatenate([points, last]), momenta, sums)


class _Runs:
    """The state of a run: draws noise ahead, takes local steps, applies averages when they are due.

    `x` is [C, S, d].
    """

    def __init__(
        self,
        problem: Problem,
        which: Variants,
        size: RunSize,
        sampler: Sampler,
        seed: int | Sequence[int],
        apart: bool,  # noqa: FBT001
    ) -> None:
        whole("delay", size.delay)
        if size.delay == 0 and which.gap_aware.any():
            raise OptionError("a gap-aware penalty needs a delay of at least 1")
        dimension = len(problem.start)
        self.size = size
        self.rng = np.random.default_rng(seed)
        self.local = InnerSteps(problem, sampler, which, size.workers, size.local_steps)
        self.outer = OuterUpdate(which, size.seeds, dimension)
        self.x: Array = np.broadcast_to(problem.start, (len(which), size.seeds, dimension)).copy()
        self.shape = ((len(which),) if apart else ()) + (size.seeds, size.workers)
        per_round = size.local_steps * math.prod(self.shape) * dimension
        self.ahead = max(1, min(size.rounds, _CHUNK // per_round))
        self.drawn: NDArray[Any] = np.zeros(0)
        self.waiting: list[Array] = []
        self.done = 0

    def next_round(self) -> tuple[Array, Array, Array]:
        """Take one round: the x that it began with, its momentum, and its sum of gradients D."""
        count = self.size.local_steps
        place = self.done % self.ahead * count
        if place == 0:
            self.drawn = self.local.sampler.draw(self.rng, (self.ahead * count, *self.shape))
        began = self.x
        with np.errstate(over="ignore", invalid="ignore"):
            total = self.local.steps(began, self.drawn[place : place + count])
            self.waiting.append(total)
            due = self.waiting.pop(0) if len(self.waiting) > self.size.delay else None
            self.x = self.outer.step(began, due)
        self.done += 1
        return began, self.outer.momentum, total

    def outcome(self) -> Outcome:
        """What was measured until here."""
        local, outer, shape = self.local, self.outer, self.x.shape[:2]
        steps = self.done * self.size.local_steps
        # without a delay the last update moves no point that was visited
        residual, running = (outer.residual, outer.running) if self.size.delay else outer.before
        with np.errstate(over="ignore", invalid="ignore"):
            value = local.problem.value(self.x)
        return Outcome(
            gradient=np.broadcast_to(local.gradient / steps, shape).copy(),
            drift=np.broadcast_to(local.drift / steps, shape).copy(),
            value=value,
            spread=local.spread,
            variance=local.variance,
            clipped=outer.clipped / self.done,
            penalty=outer.penalty,
            residual=residual / self.done,
            running=running / self.done,
            final=self.x,
        )
