"""What it costs that nodes are not equally fast: the expected slowest of many, in closed form.

Nothing is drawn here, and nothing grows with the number of nodes; `noise` draws.
"""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

_STEP = 0.02
"""Of the quadrature. The integrands are smooth and vanish at both ends: halving it changes nothing
beyond the thirteenth digit."""


@cache
def _normal() -> tuple[NDArray[np.float64], ...]:
    """Points from -10 to 13, and there the logarithms of density and distribution of a normal."""
    points = np.arange(-10.0, 13.0, _STEP)
    tails = np.array([math.erfc(abs(z) / math.sqrt(2)) / 2 for z in points])
    density = -points * points / 2 - math.log(math.sqrt(2 * math.pi))
    return points, density, np.where(points > 0, np.log1p(-tails), np.log(tails))


@cache
def expected_slowest(sigma: float, count: int) -> float:
    """Mean of the largest of `count` independent lognormal factors of mean 1.

    The integral of x over the density n phi(z) Phi(z)^(n-1) of the largest of n normals, with
    x = exp(sigma z - sigma^2 / 2). `sigma` is 0 to 1, `count` any number.
    Source: David and Nagaraja, Order Statistics, 3rd ed., 2003, eq. 3.1.1.
    """
    if count == 1 or not sigma:
        return 1.0
    points, density, below = _normal()
    weights = np.exp(density + (count - 1) * below + math.log(count) + sigma * points)
    return float(weights.sum()) * _STEP * math.exp(-sigma * sigma / 2)


@cache
def expected_largest(count: int) -> float:
    """Mean of the largest of `count` independent standard normals."""
    points, density, below = _normal()
    weights = np.exp(density + (count - 1) * below + math.log(count))
    return float((points * weights).sum()) * _STEP


def mean_of(sigma: float, steps: float) -> float:
    """Sigma of the mean of `steps` independent lognormal factors, taken as lognormal itself.

    Mean and variance are exact: the variance is that of one, divided by `steps`.
    Source: Fenton, The sum of log-normal probability distributions, IRE Trans. CS-8, 1960.
    """
    return math.sqrt(math.log1p(math.expm1(sigma * sigma) / steps))


def with_slack(sigma: float, count: int, slack: float, ahead: float) -> float:
    """Sigma that is left of the spread of a round where an average may come late.

    A node waits only once it is `slack` rounds ahead of the slowest, and computes `ahead` rounds
    between the launch and the use of an average; both are 0 where it waits at once. In between,
    slow and fast rounds of a node even out: times of nodes diffuse, and the slowest holds back
    those that are `slack` ahead of it. Their distances from that barrier are exponential with rate
    2 v / sigma^2 if the slowest falls back by v a round, and the largest of n such distances,
    harmonic(n) / rate, is the slack. So v = sigma^2 harmonic(n) / (2 slack), which is joined to
    v = sigma x (expected largest of n) without slack. Even without slack a delay reaches the others
    `ahead` rounds late, and meets their own ones there: by simulation it then costs as much as the
    least divisor below says, within 5 % (tests/test_spread.py).
    """
    if count == 1 or not sigma:
        return sigma
    if math.isinf(slack):
        return 0.0
    harmonic = math.log(count) + 0.5772156649015329 + 1 / (2 * count)
    diffusing = 1 + 2 * slack * expected_largest(count) / (sigma * harmonic)
    return sigma / max(diffusing, 1 + ahead * (1 - 1 / math.sqrt(count - 1)))
