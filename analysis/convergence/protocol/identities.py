"""The identities of the virtual iterate, checked on recorded runs of the simulator."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.convergence.objectives.families import FAMILIES
from analysis.convergence.objectives.problems import Array, Gaussian
from analysis.convergence.setting import RunSize, variants
from analysis.convergence.simulate import walk

CASES = (
    ("isotropic", 1.0, 0.0, 1.0, 1),
    ("spread", 0.7, 0.5, 2.0, 1),
    ("quadratics apart", 0.3, 0.9, 1.5, 1),
    ("cosine", 0.6, 0.8, 1.0, 1),
    ("hills apart", 0.5, 0.5, 1.0, 1),
    ("isotropic", 0.7, 0.5, 2.0, 0),
    ("cosines apart", 0.9, 0.6, 1.0, 0),
    ("spread", 0.5, 0.5, 1.0, 2),
)
"""Family, alpha, beta, Lambda, delay."""


@dataclass(frozen=True)
class Watched:
    """Gaussian noise; keeps the mean of the workers and of their noisy gradients at every step."""

    inner: Gaussian
    means: list[Array] = field(default_factory=list)
    slopes: list[Array] = field(default_factory=list)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """As without a watch."""
        return self.inner.draw(rng, shape)

    def gradients(
        self, points: Array, drawn: NDArray[Any], deviation: Array
    ) -> tuple[Array, Array | None]:
        """As without a watch."""
        slopes, variances = self.inner.gradients(points, drawn, deviation)
        self.means.append(points.mean(axis=-2))
        self.slopes.append(slopes.mean(axis=-2))
        return slopes, variances


def largest_error(family: str, alpha: float, beta: float, penalty: float, delay: int) -> float:
    """The largest error of the identities of the virtual iterate, relative to the largest |x|.

    z is made of what has not reached x yet: weights 1 up to the delay, then beta, beta^2, ... The
    sums are of the noisy gradients themselves, not of how far points moved. Checked are z_0 = x_0,
    z_{t+1} = z_t - eta D_t and, within rounds, z_{t,k} - mean_{t,k} = z_t - x_t -
    (eta - gamma) sum_{j<k} gradient_{t,j}; for delay 1 also that z is the extrapolation
    x_{t+1} + beta/(1 - beta) (x_{t+1} - x_t), of points only, and z_t - x_t = -eta Lambda m_t.

    Source: docs/theory.md, derivation, step 1.
    """
    step, size = 0.05, RunSize(workers=4, rounds=24, local_steps=5, seeds=4, delay=delay)
    rounds = size.rounds
    problem = FAMILIES[family](4)
    which = variants(step, outer_step=alpha, momentum=beta, penalty=penalty, noise=1.0)
    watched = Watched(Gaussian(problem))
    _, path = walk(problem, which, size, sampler=watched)
    eta = alpha * step / ((1 - beta) * penalty)
    shape = (rounds, size.local_steps, *path.points.shape[1:])
    means, slopes = (np.array(p).reshape(shape) for p in (watched.means, watched.slopes))
    sums, before = slopes.sum(axis=1), np.cumsum(slopes, axis=1) - slopes
    virtual = [_virtual(path.points, sums, t, eta, beta, delay) for t in range(rounds)]
    errors = [virtual[0] - path.points[0]]
    errors += [virtual[t + 1] - virtual[t] + eta * sums[t] for t in range(rounds - 1)]
    for t, z in enumerate(virtual):
        x, ahead = path.points[t], path.points[t + 1]
        errors.append(z - eta * before[t] - means[t] - (z - x - (eta - step) * before[t]))
        if delay == 1:
            errors.append(ahead + beta / (1 - beta) * (ahead - x) - z)
            errors.append(z - x + eta * penalty * path.momenta[t])
    largest = max(np.abs(error).max() for error in errors)
    return float(largest / np.abs(path.points).max())


def _virtual(points: Array, sums: Array, t: int, eta: float, beta: float, delay: int) -> Array:
    total = np.zeros_like(points[0])
    for s in range(t):
        age = t - s
        total = total + (1.0 if age <= delay else beta ** (age - delay)) * sums[s]
    return np.asarray(points[t] - eta * total)
