"""The problems of the protocol, by name."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from analysis.convergence.objectives.logistic import breast_cancer
from analysis.convergence.objectives.problems import Array, Cosine, Hill, Problem, Quadratic

_SEED = 20240
"""Of the random Hessians and centres of the workers that differ."""


def same(*curvatures: float, start: float = 1.0) -> Quadratic:
    """A quadratic that all workers share, with its minimum at 0."""
    row = np.array([curvatures])
    return Quadratic(row, np.zeros_like(row), np.full(len(curvatures), start))


def apart(workers: int, dimension: int = 2) -> Quadratic:
    """Quadratics with other Hessians and other centres on every worker."""
    rng = np.random.default_rng(_SEED)
    shape = (workers, dimension)
    curvature = rng.uniform(0.1, 1.0, shape)
    curvature[0] = 1.0
    return Quadratic(curvature, rng.normal(size=shape), np.full(dimension, 2.0))


def two_kinds(workers: int) -> Quadratic:
    """Two kinds of workers in equal numbers: f is the same for every even number of them."""
    kinds = np.array([[1.0, 0.3], [0.3, 1.0]])
    centres = np.array([[2.0, -2.0], [-2.0, 2.0]])
    repeats = (workers // 2, 1)
    return Quadratic(np.tile(kinds, repeats), np.tile(centres, repeats), np.full(2, 2.5))


def opposed(workers: int) -> Quadratic:
    """Two kinds of workers, at the minimum of f, pulled opposite ways by opposite curvatures.

    Local steps then drift apart as fast as the constants allow, and stop where f is not least.
    """
    kinds = np.array([[1.0], [-0.8]])
    repeats = (workers // 2, 1)
    whole = Quadratic(np.tile(kinds, repeats), np.tile(1 / kinds, repeats), np.zeros(1))
    return replace(whole, start=whole.optimum)


def _rested(problem: Quadratic) -> Quadratic:
    return replace(problem, start=problem.optimum)


def _tilts(workers: int, dimension: int, size: float) -> Array:
    line = np.linspace(-size, size, workers) if workers > 1 else np.zeros(1)
    signs = np.where(np.arange(dimension) % 2, -1.0, 1.0)
    return line[:, None] * signs


def _heights(workers: int) -> Array:
    return np.linspace(0.1, 0.9, workers)[:, None]


_FLAT = np.zeros((1, 2))

FAMILIES: dict[str, Callable[[int], Problem]] = {
    "isotropic": lambda _: same(1.0, 1.0),
    "spread": lambda _: same(0.05, 0.2, 0.6, 1.0),
    "cosine": lambda _: Cosine(np.array([[0.5]]), _FLAT, np.array([2.0, -1.2]), 2.0, 0.2),
    "hill": lambda _: Hill(np.array([[0.5]]), _FLAT, np.array([1.5, -0.8])),
    "quadratics apart": apart,
    "two kinds": two_kinds,
    "cosines apart": lambda workers: Cosine(
        _heights(workers), _tilts(workers, 2, 0.8), np.array([2.0, -1.2]), 2.0, 0.2
    ),
    "hills apart": lambda workers: Hill(
        _heights(workers), _tilts(workers, 2, 0.8), np.array([1.5, -0.8])
    ),
    "isotropic at its minimum": lambda _: same(1.0, 1.0, start=0.0),
    "opposed at its minimum": opposed,
    "two kinds at their minimum": lambda workers: _rested(two_kinds(workers)),
    "logistic": lambda _: breast_cancer(),
    "logistic, minibatches": lambda _: breast_cancer(),
    "logistic by label": breast_cancer,
}
"""Made for a number of workers. `apart` and `by label`: the workers' functions differ."""
AT_MINIMUM = tuple(family for family in FAMILIES if family.endswith("minimum"))
"""Runs of these have no gap to close: noise, staleness or drift is all there is."""
