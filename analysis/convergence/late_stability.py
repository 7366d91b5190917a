"""Where runs with late averages stop converging, on curvature x^2/2: Jury's conditions of a cubic.

With r = 1 - gamma curvature, u = r^(tau-d) - r^tau, v = 1 - r^(tau-d), g = keep u - r^(tau-d) p and
Lambda = 1, the mean of the workers obeys per round

    (s - 1)(s - beta)(s + g) + alpha s (keep u + v s) = 0

and what a worker is from the mean is multiplied by -keep u.

Source: docs/theory.md, the late average, stability.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.convergence.objectives.problems import Array


class LateSystem(NamedTuple):
    """A quadratic under late averages; arrays are broadcast together. `load` is gamma L."""

    load: Array | float
    tau: NDArray[np.int64] | int
    steps: NDArray[np.int64] | int
    outer_step: Array | float = 1.0
    momentum: Array | float = 0.0
    keep: Array | float = 1.0
    predict: Array | float = 0.0


def cubic(system: LateSystem) -> tuple[Array, Array, Array]:
    """The coefficients of s^2, s and 1 of the mean."""
    ratio = 1 - np.asarray(system.load, dtype=float)
    left = ratio ** (system.tau - system.steps)
    kept = system.keep * (left - ratio**system.tau)
    alpha, beta = system.outer_step, system.momentum
    g = kept - left * system.predict * system.steps / system.tau
    two = g - 1 - beta + alpha * (1 - left)
    one = beta - (1 + beta) * g + alpha * kept
    return np.asarray(two), np.asarray(one), np.asarray(beta * g)


def disagreement(system: LateSystem) -> Array:
    """By what a round multiplies the distances of workers from their mean."""
    ratio = 1 - np.asarray(system.load, dtype=float)
    left = ratio ** (system.tau - system.steps)
    return np.asarray(-system.keep * (left - ratio**system.tau))


def is_stable(system: LateSystem) -> NDArray[np.bool_]:
    """Whether a round contracts: the mean by Jury's conditions, the disagreement by its factor."""
    two, one, zero = cubic(system)
    mean = (
        (1 + two + one + zero > 0)
        & (1 - two + one - zero > 0)
        & (np.abs(zero) < 1)
        & (np.abs(one - two * zero) < 1 - zero * zero)
    )
    return np.asarray(mean & (np.abs(disagreement(system)) < 1))


def edges(system: LateSystem, highest: float = 2.0, places: int = 801) -> Array:
    """The gamma L of every row of a system at which it first stops being stable; inf if never.

    `load` is not heeded. A grid up to `highest` finds the interval, bisection the place.
    """
    rows = system._replace(load=0.0)
    grid = np.linspace(0, highest, places)[1:]
    stable = np.array([is_stable(rows._replace(load=at)) for at in grid])
    first = np.argmin(stable, axis=0)
    high = grid[first]
    low = high - grid[0]
    for _ in range(50):
        middle = (low + high) / 2
        holds = is_stable(rows._replace(load=middle))
        low, high = np.where(holds, middle, low), np.where(holds, high, middle)
    return np.where(stable.all(axis=0), np.inf, low)
