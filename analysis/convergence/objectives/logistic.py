"""Logistic regression on real data: scikit-learn's breast-cancer set, 569 rows, 30 features."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from analysis.convergence.objectives.problems import Array, scikit_learn
from co2sim.common.errors import OptionError

_MAX_STEPS = 100
_SOLVED = 1e-10
"""Norm of the gradient at which f_inf counts as exact: f is off by its square over 2 ridge."""


@dataclass(frozen=True, eq=False)
class Logistic:
    """The mean of log(1 + exp(-label <row, x>)) over a worker's rows, plus ridge |x|^2/2.

    `rows` are [G, n, d] and `labels` [G, n], +1 or -1, the same number n for every worker, or
    [1, n, d] and [1, n] for workers that share all rows. Convex. f_inf comes from a solver.
    """

    rows: Array
    labels: Array
    ridge: float
    start: Array

    @property
    def smoothness(self) -> float:
        """L = the largest eigenvalue of rows^T rows/(4n) of any worker, plus ridge."""
        grams = np.swapaxes(self.rows, 1, 2) @ self.rows / self.rows.shape[1]
        return float(np.linalg.eigvalsh(grams)[:, -1].max()) / 4 + self.ridge

    @property
    def convex(self) -> bool:
        """Always."""
        return True

    @property
    def heterogeneous(self) -> bool:
        """Whether workers have different rows."""
        return len(self.rows) > 1

    @property
    def most_spread(self) -> float | None:
        """Zero for workers that share all rows; else not known."""
        return None if self.heterogeneous else 0.0

    @cached_property
    def least(self) -> float:
        """f_inf, by Newton's method; from 0 its steps need no damping here."""
        point = np.zeros(self.rows.shape[2])
        for _ in range(_MAX_STEPS):
            slope = self.gradient(point)
            if np.linalg.norm(slope) <= _SOLVED:
                return float(self._loss(point))
            point = point - np.linalg.solve(self._hessian(point), slope)
        raise OptionError(f"Newton's method found no minimum with ridge {self.ridge:g}")

    def value(self, point: Array) -> Array:
        """The distance f - f_inf."""
        return np.asarray(self._loss(point) - self.least)

    def gradient(self, point: Array) -> Array:
        """The gradient of f."""
        every, labels = self._everything
        pulls = _pulls(point @ every.T, labels)
        return np.asarray(self.ridge * point - pulls @ every / len(labels))

    def gradients(self, points: Array) -> Array:
        """The gradients of the f_i: one matrix product per worker."""
        if not self.heterogeneous:
            return self.gradient(points)
        workers, count, dimension = self.rows.shape
        lined = np.swapaxes(points.reshape(-1, workers, dimension), 0, 1)
        pulls = _pulls(lined @ np.swapaxes(self.rows, 1, 2), self.labels[:, None, :])
        slopes = -pulls @ self.rows / count + self.ridge * lined
        return np.asarray(np.swapaxes(slopes, 0, 1).reshape(points.shape))

    def spread(self, point: Array) -> Array:
        """The mean of |grad f_i - grad f|^2."""
        each = self.gradients(
            np.broadcast_to(
                point[..., None, :], (*point.shape[:-1], len(self.rows), point.shape[-1])
            )
        )
        apart = each - self.gradient(point)[..., None, :]
        return np.asarray((apart**2).sum(axis=-1).mean(axis=-1))

    @cached_property
    def _everything(self) -> tuple[Array, Array]:
        return self.rows.reshape(-1, self.rows.shape[2]), self.labels.reshape(-1)

    def _loss(self, point: Array) -> Array:
        every, labels = self._everything
        losses = np.logaddexp(0, -labels * (point @ every.T))
        return np.asarray(losses.mean(axis=-1) + self.ridge / 2 * (point**2).sum(axis=-1))

    def _hessian(self, point: Array) -> Array:
        every, _ = self._everything
        likely = expit(every @ point)
        weighted = every * (likely * (1 - likely))[:, None]
        return np.asarray(every.T @ weighted / len(every) + self.ridge * np.eye(every.shape[1]))


@dataclass(frozen=True, slots=True)
class Minibatches:
    """Gradients of rows drawn with replacement, for workers that share all rows.

    Their variance depends on the point, and is computed exactly from all rows.
    """

    problem: Logistic
    size: int

    def __post_init__(self) -> None:
        if self.problem.heterogeneous:
            raise OptionError("minibatches are drawn for workers that share all rows")

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Indices of rows: [*shape, size]."""
        return rng.integers(self.problem.rows.shape[1], size=(*shape, self.size))

    def gradients(
        self, points: Array, drawn: NDArray[Any], deviation: Array
    ) -> tuple[Array, Array | None]:
        """The means over the drawn rows, and the variances of these means."""
        del deviation
        rows, labels = self.problem.rows[0], self.problem.labels[0]
        seen = rows[drawn.astype(np.int64)]
        margins = (seen @ points[..., None])[..., 0]
        pulls = _pulls(margins, labels[drawn.astype(np.int64)])
        slopes = -(pulls[..., None, :] @ seen)[..., 0, :] / self.size + self.problem.ridge * points
        every = _pulls(points @ rows.T, labels)
        squares = every**2 @ (rows**2).sum(axis=-1) / len(labels)
        mean = every @ rows / len(labels)
        return slopes, (squares - (mean**2).sum(axis=-1)) / self.size


def _pulls(margins: Array, labels: Array) -> Array:
    """Minus the derivative of log(1 + exp(-label margin))."""
    return np.asarray(labels * expit(-labels * margins))


@cache
def breast_cancer(workers: int = 1, ridge: float = 0.01) -> Logistic:
    """The breast-cancer set with standardized features and a constant one.

    With several workers the rows are ordered by label and cut into `workers` equal parts (a few
    rows are left out), so that most workers see one label only. All start at 0.
    """
    raw, target = scikit_learn().load_breast_cancer(return_X_y=True)
    features = (raw - raw.mean(axis=0)) / raw.std(axis=0)
    rows = np.concatenate([features, np.ones((len(features), 1))], axis=1)
    labels = 2.0 * target - 1
    if workers > 1:
        order = np.argsort(labels, kind="stable")[: len(labels) // workers * workers]
        rows, labels = rows[order], labels[order]
    dimension = rows.shape[1]
    return Logistic(
        rows.reshape(workers, -1, dimension),
        labels.reshape(workers, -1),
        ridge,
        np.zeros(dimension),
    )
