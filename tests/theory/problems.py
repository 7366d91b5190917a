"""The problems of the protocol: quadratics, nonconvex functions, logistic regression."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit
from sklearn import datasets

from analysis.convergence import simulate
from analysis.convergence.setting import Array, Outcome, RunSize, Variants
from analysis.convergence.simulate import Problem, Simulation


def run(problem: Problem, which: Variants, size: RunSize, **options: Any) -> Outcome:
    """All rounds of a `Simulation`, with its options."""
    simulation = Simulation(problem, which, size, **options)
    for _ in range(size.rounds):
        simulation.next_round()
    return simulation.outcome()


def select(which: Variants, chosen: slice) -> Variants:
    """Some of the variants."""
    return Variants(*(getattr(which, field.name)[chosen] for field in fields(which)))


class Known(Problem, Protocol):
    """A problem with the constants that the bound needs."""

    @property
    def smoothness(self) -> float:
        """L: the largest Lipschitz constant of the gradients of the f_i."""

    @property
    def convex(self) -> bool:
        """Whether every f_i is convex."""

    @property
    def most_spread(self) -> float | None:
        """The largest `disagreement` anywhere; None where it is not bounded, or not known."""


class Quadratic(simulate.Quadratic):
    """With its constants."""

    @property
    def smoothness(self) -> float:
        """L."""
        return float(self.curvature.max())

    @property
    def convex(self) -> bool:
        """Whether no curvature is negative."""
        return bool((self.curvature >= 0).all())

    @property
    def most_spread(self) -> float | None:
        """Zero for equal workers; else it grows with the distance."""
        return None if self.heterogeneous else 0.0


class Cosine(simulate.Cosine):
    """With its constants."""

    @property
    def smoothness(self) -> float:
        """L = the largest amplitude x frequency^2 + curvature."""
        return float(self.amplitude.max()) * self.frequency**2 + self.curvature

    @property
    def convex(self) -> bool:
        """Whether the parabola outweighs every wave."""
        return float(self.amplitude.max()) * self.frequency**2 <= self.curvature

    @property
    def most_spread(self) -> float:
        """The largest spread. Per coordinate it is convex in sin(frequency x): an end is worst."""
        waves = (self.amplitude - self.amplitude.mean()) * self.frequency
        ends = [((sign * waves + self.tilt) ** 2).mean(axis=0) for sign in (1, -1)]
        return float(np.maximum(*ends).sum())


@dataclass(frozen=True)
class Hill:
    """The functions height_i x^2/(1 + x^2) + tilt_i x: nonconvex, and f does not grow to infinity.

    `height` is [G, 1], `tilt` [G, d] with mean 0 over workers; f_inf = 0 at x = 0.
    """

    height: Array
    tilt: Array
    start: Array

    @property
    def smoothness(self) -> float:
        """L = twice the largest height: the second derivative is largest at 0."""
        return 2 * float(self.height.max())

    @property
    def convex(self) -> bool:
        """Never: it bends down beyond 1/sqrt(3)."""
        return False

    @property
    def heterogeneous(self) -> bool:
        """Whether there are several rows."""
        return len(self.height) > 1

    @property
    def most_spread(self) -> float:
        """The largest spread; 2x/(1 + x^2)^2 is between plus and minus 9/(8 sqrt(3))."""
        slopes = (self.height - self.height.mean()) * 9 / (8 * np.sqrt(3))
        ends = [((sign * slopes + self.tilt) ** 2).mean(axis=0) for sign in (1, -1)]
        return float(np.maximum(*ends).sum())

    def value(self, point: Array) -> Array:
        """The distance f - f_inf."""
        return np.asarray((self.height.mean() * point**2 / (1 + point**2)).sum(axis=-1))

    def gradient(self, point: Array) -> Array:
        """The gradient of f."""
        return np.asarray(2 * self.height.mean() * point / (1 + point**2) ** 2)

    def gradients(self, points: Array) -> Array:
        """The gradients of the f_i."""
        return np.asarray(2 * self.height * points / (1 + points**2) ** 2 + self.tilt)


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
        """f_inf: the solver's gradient is so small that f is off by less than round-off."""

        def loss(point: Array) -> float:
            return float(self._loss(point))

        solved = minimize(loss, self.start, jac=self.gradient, method="BFGS", tol=1e-8)
        return float(solved.fun)

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

    @cached_property
    def _everything(self) -> tuple[Array, Array]:
        return self.rows.reshape(-1, self.rows.shape[2]), self.labels.reshape(-1)

    def _loss(self, point: Array) -> Array:
        every, labels = self._everything
        losses = np.logaddexp(0, -labels * (point @ every.T))
        return np.asarray(losses.mean(axis=-1) + self.ridge / 2 * (point**2).sum(axis=-1))


@dataclass(frozen=True, slots=True)
class Minibatches:
    """Gradients of rows drawn with replacement, for workers that share all rows.

    Their variance depends on the point, and is computed exactly from all rows.
    """

    problem: Logistic
    size: int

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
    raw, target = datasets.load_breast_cancer(return_X_y=True)
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


@dataclass(frozen=True)
class Pieces:
    """The functions f_i = sum over axes of F_i(u), u = turn @ x; F_i' is piecewise linear.

    `breaks` [d, m] rise along the last axis; `slopes` [G, d, m + 1] are those of F_i' between them,
    the outer ones of their mean above 0; `tilt` [G, d] has mean 0 over workers; `offset` [d] is the
    mean of F_i' at the first break. Workers may be one row. `turn` is orthonormal, so that a clip
    by element does not respect the axes.
    """

    breaks: Array
    slopes: Array
    tilt: Array
    offset: Array
    turn: Array
    start: Array

    @property
    def smoothness(self) -> float:
        """L: the largest magnitude of a slope."""
        return float(np.abs(self.slopes).max())

    @property
    def convex(self) -> bool:
        """Whether no slope is negative."""
        return bool((self.slopes >= 0).all())

    @property
    def heterogeneous(self) -> bool:
        """Whether there are several rows."""
        return len(self.slopes) > 1

    @property
    def most_spread(self) -> float | None:
        """That of the tilts, if slopes are equal; else it grows with the distance."""
        if (self.slopes == self.slopes[0]).all():
            return float((self.tilt**2).mean(axis=0).sum())
        return None

    @cached_property
    def _mean(self) -> Array:
        return np.asarray(self.slopes.mean(axis=0))

    @cached_property
    def _least(self) -> float:
        """The least value of the sum over axes, by all breaks and all zeros of F'."""
        ends = np.concatenate([self.breaks[:, :1] - 1e6, self.breaks, self.breaks[:, -1:] + 1e6], 1)
        heights = np.array([self._slope(u, self._mean) for u in ends.T]).T
        first, second = heights[:, :-1], heights[:, 1:]
        crossing = first * second < 0
        share = np.where(crossing, first / np.where(crossing, first - second, 1.0), 0.0)
        zeros = ends[:, :-1] + share * np.diff(ends, axis=1)
        points = np.concatenate([self.breaks, zeros], axis=1).T
        values = np.array([self._height(u) for u in points])
        inside = np.concatenate([np.ones_like(self.breaks, bool), crossing], axis=1).T
        return float(np.where(inside, values, np.inf).min(axis=0).sum())

    def _slope(self, u: Array, slopes: Array) -> Array:
        """F' at u [..., d], for slopes [..., d, m + 1]."""
        total = self.offset + slopes[..., 0] * (u - self.breaks[:, 0])
        for j in range(self.breaks.shape[1]):
            beyond = np.maximum(u - self.breaks[:, j], 0)
            total = total + (slopes[..., j + 1] - slopes[..., j]) * beyond
        return np.asarray(total)

    def _height(self, u: Array) -> Array:
        """The mean F at u [..., d], by axis."""
        first = u - self.breaks[:, 0]
        total = self.offset * first + self._mean[:, 0] * first**2 / 2
        for j in range(self.breaks.shape[1]):
            beyond = np.maximum(u - self.breaks[:, j], 0)
            total = total + (self._mean[:, j + 1] - self._mean[:, j]) * beyond**2 / 2
        return np.asarray(total)

    def value(self, point: Array) -> Array:
        """The distance f - f_inf."""
        return np.asarray(self._height(point @ self.turn.T).sum(axis=-1) - self._least)

    def gradient(self, point: Array) -> Array:
        """The gradient of f."""
        return np.asarray(self._slope(point @ self.turn.T, self._mean) @ self.turn)

    def gradients(self, points: Array) -> Array:
        """The gradients of the f_i."""
        along = self._slope(points @ self.turn.T, self.slopes) + self.tilt
        return np.asarray(along @ self.turn)


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

FAMILIES: dict[str, Callable[[int], Known]] = {
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
