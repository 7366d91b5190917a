"""Problems whose constants are known: L, f_inf, and how much the workers' functions differ.

Every worker i has its own f_i, and f is their mean. A point has the shape [..., d]; the points of
the workers have [..., G, d]. Where all f_i are equal, any number of workers will do.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Problem(Protocol):
    """What an experiment and the bound need to know."""

    @property
    def start(self) -> Array:
        """The default starting point x_0: [d]."""

    @property
    def smoothness(self) -> float:
        """L: the largest Lipschitz constant of the gradients of the f_i."""

    @property
    def convex(self) -> bool:
        """Whether every f_i is convex."""

    @property
    def heterogeneous(self) -> bool:
        """Whether the f_i differ."""

    @property
    def most_spread(self) -> float | None:
        """The largest `disagreement` anywhere; None where it is not bounded, or not known."""

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
    def smoothness(self) -> float:
        """L."""
        return float(self.curvature.max())

    @property
    def convex(self) -> bool:
        """Whether no curvature is negative."""
        return bool((self.curvature >= 0).all())

    @property
    def heterogeneous(self) -> bool:
        """Whether there are several rows."""
        return len(self.curvature) > 1

    @property
    def most_spread(self) -> float | None:
        """Zero for equal workers; else it grows with the distance."""
        return None if self.heterogeneous else 0.0

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
    def smoothness(self) -> float:
        """L = the largest amplitude x frequency^2 + curvature."""
        return float(self.amplitude.max()) * self.frequency**2 + self.curvature

    @property
    def convex(self) -> bool:
        """Whether the parabola outweighs every wave."""
        return float(self.amplitude.max()) * self.frequency**2 <= self.curvature

    @property
    def heterogeneous(self) -> bool:
        """Whether there are several rows."""
        return len(self.amplitude) > 1

    @property
    def most_spread(self) -> float:
        """The largest spread. Per coordinate it is convex in sin(frequency x): an end is worst."""
        waves = (self.amplitude - self.amplitude.mean()) * self.frequency
        ends = [((sign * waves + self.tilt) ** 2).mean(axis=0) for sign in (1, -1)]
        return float(np.maximum(*ends).sum())

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
