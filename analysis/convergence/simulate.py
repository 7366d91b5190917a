"""A simulator of CO2, SlowMo and local SGD, and problems for it whose constants are known.

Many variants, seeds and workers run at once: arrays have the leading axes (variants, seeds,
workers). All variants of one call see the same noise unless they are `apart`, and so do calls with
the same seed and sizes: differences between them have little noise.

Every worker i of a problem has its own f_i, and f is their mean. A point has the shape [..., d];
the points of the workers have [..., G, d]. Where all f_i are equal, any number of workers will do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from analysis.convergence.setting import Array, Outcome, RunSize, Variants
from co2sim.common.errors import OptionError
from co2sim.common.validation import whole


class Problem(Protocol):
    """What an experiment and the bound need to know."""

    @property
    def start(self) -> Array:
        """The default starting point x_0: [d]."""

    @property
    def heterogeneous(self) -> bool:
        """Whether the f_i differ."""

    def value(self, point: Array) -> Array:
        """The distance f - f_inf at points [..., d]: [...]."""

    def gradient(self, point: Array) -> Array:
        """The gradient of f: [..., d]."""

    def gradients(self, points: Array) -> Array:
        """The gradient of each worker's f_i at its own point: [..., G, d]."""


class Sampler(Protocol):
    """Where the noise of gradients comes from."""

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        """What the steps of `shape` (steps, seeds, workers) need, the same for all variants."""

    def gradients(
        self, points: Array, drawn: NDArray[Any], deviation: Array
    ) -> tuple[Array, Array | None]:
        """Noisy gradients at points [..., seeds, G, d] from what was drawn for one step.

        `deviation` is the sigma of each variant, [..., 1, 1, 1], if noise is chosen. With it come
        the variances [..., seeds, G], where the points decide them.
        """


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Added Gaussian noise, E|noise|^2 = sigma^2 in all, the same in every coordinate."""

    problem: Problem

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Standard normal numbers over sqrt(d): [*shape, d]."""
        dimension = len(self.problem.start)
        return np.asarray(rng.standard_normal((*shape, dimension)) / np.sqrt(dimension))

    def gradients(
        self, points: Array, drawn: NDArray[Any], deviation: Array
    ) -> tuple[Array, Array | None]:
        """The exact gradients plus noise."""
        return self.problem.gradients(points) + deviation * drawn, None


@dataclass(frozen=True)
class Quadratic:
    """The functions f_i = sum over coordinates of curvature_i (x - centre_i)^2 / 2.

    `curvature` and `centre` are [G, d], or [1, d] for equal workers; L is the largest curvature.
    """

    curvature: Array
    centre: Array
    start: Array

    @property
    def heterogeneous(self) -> bool:
        """Whether there are several rows."""
        return len(self.curvature) > 1

    @cached_property
    def mean_curvature(self) -> Array:
        """The Hessian of f: [d]."""
        return np.asarray(self.curvature.mean(axis=0))

    @cached_property
    def optimum(self) -> Array:
        """The minimum of f: [d]."""
        weights = self.curvature.sum(axis=0)
        flat = weights == 0
        return np.where(
            flat, 0.0, (self.curvature * self.centre).sum(axis=0) / np.where(flat, 1.0, weights)
        )

    def value(self, point: Array) -> Array:
        """The distance f - f_inf."""
        return np.asarray((self.mean_curvature * (point - self.optimum) ** 2).sum(axis=-1) / 2)

    def gradient(self, point: Array) -> Array:
        """The gradient of f."""
        return self.mean_curvature * (point - self.optimum)

    def gradients(self, points: Array) -> Array:
        """The gradients of the f_i."""
        return self.curvature * (points - self.centre)


@dataclass(frozen=True)
class Cosine:
    """The functions amplitude_i (1 - cos(frequency x)) + curvature x^2/2 + tilt_i x.

    They are nonconvex where amplitude x frequency^2 > curvature. `amplitude` is [G, 1], `tilt`
    [G, d] with mean 0 over workers, so that f has no tilt and f_inf = 0 at x = 0.
    """

    amplitude: Array
    tilt: Array
    start: Array
    frequency: float
    curvature: float

    @property
    def heterogeneous(self) -> bool:
        """Whether there are several rows."""
        return len(self.amplitude) > 1

    def value(self, point: Array) -> Array:
        """The distance f - f_inf."""
        waves = self.amplitude.mean() * (1 - np.cos(self.frequency * point))
        return np.asarray((waves + self.curvature * point**2 / 2).sum(axis=-1))

    def gradient(self, point: Array) -> Array:
        """The gradient of f."""
        waves = self.amplitude.mean() * self.frequency * np.sin(self.frequency * point)
        return np.asarray(waves + self.curvature * point)

    def gradients(self, points: Array) -> Array:
        """The gradients of the f_i."""
        waves = self.amplitude * self.frequency * np.sin(self.frequency * points)
        return np.asarray(waves + self.curvature * points + self.tilt)


def disagreement(problem: Problem, point: Array, workers: int) -> Array:
    """The mean over G = `workers` of |grad f_i - grad f|^2 at points [..., d]: [...]."""
    everywhere = np.repeat(point[..., None, :], workers, axis=-2)
    apart = problem.gradients(everywhere) - problem.gradient(point)[..., None, :]
    return np.asarray((apart**2).sum(axis=-1).mean(axis=-1))


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

    def step(self, x: Array, due: Array | None, of: slice = slice(None)) -> Array:
        """The next x, given the sum that is due; None before the first. `of` are coordinates."""
        which = self.which
        wanted = which.momentum[:, None, None] * self.momentum[..., of]
        if due is not None:
            penalty = self._penalty(due)
            wanted = wanted + due / penalty[:, :, None]
            self.penalty = np.fmax(self.penalty, penalty.max(axis=1))
        limits = which.clip[:, None, None]
        momentum = wanted
        if np.isfinite(which.clip).any():
            momentum = np.clip(wanted, -limits, limits)
            beyond = (np.abs(wanted) > limits).sum(axis=(1, 2))
            self.clipped += beyond / self.momentum[0].size
            self._record(wanted - momentum, of)
        self.momentum[..., of] = momentum
        change = self.factor * momentum
        self.moved = np.sqrt((change**2).sum(axis=-1))
        return np.asarray(x - change)

    def _record(self, clipped: Array, of: slice) -> None:
        """Add up what was clipped; `before` keeps the sums without the last update."""
        decay = self.which.decay[:, None, None]
        smooth = decay * self.smooth[..., of] + (1 - decay) * clipped
        self.smooth[..., of] = smooth
        self.before = self.residual, self.running
        self.residual = self.residual + (clipped**2).sum(axis=-1)
        self.running = self.running + (smooth**2).sum(axis=-1)

    def _penalty(self, due: Array) -> Array:
        """Lambda of this round, [C, S], from what is known without the sum that it divides.

        Source: docs/theory-proofs.md, a penalty that varies (any rule that is known before the
        first gradient of the round); the rule itself is ours.
        """
        which = self.which
        constant = np.broadcast_to(which.penalty[:, None], due.shape[:2])
        varies = which.most_penalty > 0
        if not varies.any():
            return constant
        share = np.divide(
            self.moved, self.longest, out=np.zeros_like(self.moved), where=self.longest > 0
        )
        length = np.sqrt((due**2).sum(axis=-1)) * self.factor[:, :, 0]
        self.longest = np.fmax(self.longest, length)
        ruled = np.minimum(1 + share, which.most_penalty[:, None])
        return np.where(varies[:, None], ruled, constant)


_CHUNK = 2**22
"""Most numbers drawn ahead at once: 32 MiB."""


class Simulation:
    """The state of a run: workers, their anchor, and the averages that travel.

    `points` are the workers, [C, S, G, d]; `anchor` and `mean` are [C, S, d]. Averages that are
    late by rounds are used at the end of a round, where all workers restart from the anchor;
    those that are late by local steps are used between steps, without a restart.

    It begins at the start of the problem; noise is Gaussian unless a sampler is given. With `apart`
    every variant has its own noise, else all have the same. What diverges becomes infinite or NaN,
    without a warning. Raises OptionError for a negative delay, and for a gap-aware penalty without
    delay.
    """

    def __init__(
        self,
        problem: Problem,
        which: Variants,
        size: RunSize,
        *,
        seed: int | Sequence[int] = 0,
        sampler: Sampler | None = None,
        apart: bool = False,
    ) -> None:
        whole("delay", size.delay)
        self.restarts = size.late_steps is None
        if self.restarts and size.delay == 0 and (which.most_penalty > 0).any():
            raise OptionError("a gap-aware penalty needs a delay of at least 1")
        dimension, steps = len(problem.start), size.local_steps
        self.problem, self.sampler = problem, sampler or Gaussian(problem)
        self.size, self.which = size, which
        self.rng = np.random.default_rng(seed)
        self.outer = OuterUpdate(which, size.seeds, dimension)
        # what is measured on the way
        self.gradient = self.drift = np.zeros((len(which), size.seeds))
        self.spread, self.variance = np.zeros(len(which)), which.noise.copy()
        shape = (len(which), size.seeds, dimension)
        self.anchor: Array = np.broadcast_to(problem.start, shape).copy()
        self.mean = self.anchor
        self.points = np.repeat(self.anchor[:, :, None, :], size.workers, axis=2)
        # before the arrival of a late average steps count less
        arrival, parts = size.late_steps or 0, size.fragments
        self.counted = which.keep * arrival + steps - arrival
        self.carried = (which.predict * arrival / steps)[:, None, None]
        ends = [dimension * part // parts for part in range(parts + 1)]
        self.spans = [slice(*pair) for pair in pairwise(ends)]
        self.starts = [steps * (part + 1) // parts for part in range(parts)]
        self.shape = ((len(which),) if apart else ()) + (size.seeds, size.workers)
        self.ahead = max(1, min(size.rounds, _CHUNK // (steps * math.prod(self.shape) * dimension)))
        self.drawn: NDArray[Any] = np.zeros(0)
        self.launched: list[Array] = []
        self.left, self.moved = self.points.copy(), 0 * self.anchor
        self.done = 0

    def next_round(self) -> None:
        """Take the local steps of a round, launch its average, use what is due."""
        steps, late = self.size.local_steps, self.size.late_steps
        first = self.done % self.ahead * steps
        if first == 0:
            self.drawn = self.sampler.draw(self.rng, (self.ahead * steps, *self.shape))
        with np.errstate(over="ignore", invalid="ignore"):
            for k in range(steps):
                self._measure(self._weights(k) if late else None)
                self._step(self.drawn[first + k])
                if late:
                    self._average(self.done * steps + k + 1, late)
            if self.restarts:
                self.launched.append(self.anchor - self.mean)
                self._restart()
        self.done += 1

    def _weights(self, k: int) -> Array:
        """The root of what step k of a round counts, by coordinate: [C, d]."""
        steps, late = self.size.local_steps, self.size.late_steps or 0
        counts = np.ones((len(self.which), len(self.problem.start)))
        for start, span in zip(self.starts, self.spans, strict=True):
            since = self.done * steps + k - start
            if since >= 0 and since % steps < late:
                counts[:, span] = self.which.keep[:, None]
        return np.sqrt(counts)

    def _measure(self, weights: Array | None) -> None:
        """A and the drift of this step, with roots of weights, and the spread."""
        slope = self.problem.gradient(self.mean)
        if weights is not None:
            slope = slope * weights[:, None, :]
        self.gradient = self.gradient + np.einsum("csd,csd->cs", slope, slope)
        if self.size.workers > 1:
            apart = self.points - self.mean[:, :, None, :]
            if weights is not None:
                apart *= weights[:, None, None, :]
            self.drift = self.drift + np.einsum("csgd,csgd->cs", apart, apart) / self.size.workers
        if self.problem.heterogeneous:
            spread = disagreement(self.problem, self.mean, self.size.workers).mean(axis=1)
            self.spread = np.fmax(self.spread, spread)

    def _step(self, drawn: NDArray[Any]) -> None:
        """Move the workers by their noisy gradients."""
        deviation = np.sqrt(self.which.noise)[:, None, None, None]
        noisy, variance = self.sampler.gradients(self.points, drawn, deviation)
        if variance is not None:
            self.variance = np.fmax(self.variance, variance.mean(axis=(1, 2)))
        noisy *= self.which.inner_step[:, None, None, None]
        self.points -= noisy
        self.mean = np.asarray(self.points.mean(axis=2))

    def _restart(self) -> None:
        """Move the anchor, by the average that is due if there is one, and all workers to it."""
        due = None
        if len(self.launched) > self.size.delay:
            due = self.launched.pop(0) / self.which.inner_step[:, None, None]
        self.anchor = self.outer.step(self.anchor, due)
        self.mean = self.anchor
        self.points = np.repeat(self.anchor[:, :, None, :], self.size.workers, axis=2)

    def _average(self, now: int, late: int) -> None:
        """After `now` local steps: use the averages that are due, and launch others."""
        steps = self.size.local_steps
        for start, span in zip(self.starts, self.spans, strict=True):
            since = now - start
            if since >= late and (since - late) % steps == 0:
                self._arrive(span)
            if since >= 0 and since % steps == 0:
                self.left[..., span] = self.points[..., span]
                self.moved[..., span] = self.anchor[..., span] - self.mean[..., span]

    def _arrive(self, span: slice) -> None:
        """Move the anchor, and the workers with it: they keep a part of what they did meanwhile."""
        moved = self.moved[..., span]
        due = moved / self.which.inner_step[:, None, None]
        anchor = self.outer.step(self.anchor[..., span], due, span)
        self.anchor[..., span] = anchor
        ahead = anchor - self.carried * moved
        kept = self.points[..., span] - self.left[..., span]
        kept *= self.which.keep[:, None, None, None]
        self.points[..., span] = ahead[:, :, None, :] + kept
        self.mean = np.asarray(self.points.mean(axis=2))

    def outcome(self) -> Outcome:
        """What was measured until here; `final` is the last mean of the workers."""
        outer = self.outer
        counted = (self.done * self.counted)[:, None]
        updates = self.done if self.restarts else max(1, self.done - 1)
        # where workers restart without a delay the last update moves no point that was visited
        at_once = self.restarts and self.size.delay == 0
        residual, running = outer.before if at_once else (outer.residual, outer.running)
        with np.errstate(over="ignore", invalid="ignore"):
            value = self.problem.value(self.mean)
        return Outcome(
            gradient=self.gradient / counted,
            drift=self.drift / counted,
            value=value,
            spread=self.spread,
            variance=self.variance,
            clipped=outer.clipped / updates,
            penalty=outer.penalty,
            residual=residual / self.done,
            running=running / self.done,
            final=self.mean,
        )
