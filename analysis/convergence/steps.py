"""The local and the outer steps of simulated runs: many variants, seeds and workers at once."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.convergence.objectives.problems import Array, Problem, Sampler
from analysis.convergence.variants import Variants


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
            self.momentum = np.clip(self.momentum, -limits, limits)
        change = self.factor * self.momentum
        self.moved = np.sqrt((change**2).sum(axis=-1))
        return np.asarray(x - change)

    def _penalty(self, due: Array) -> Array:
        """Lambda of this round, [C, S], from what is known without the sum that it divides.

        Source: docs/theory.md, bound (any rule that knows only x_{s,0}, s <= t); the rule
        itself is ours.
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
