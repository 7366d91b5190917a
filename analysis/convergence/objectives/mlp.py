"""A small neural network on scikit-learn's digits: its gradients, and estimates of its constants.

Nothing here is exact as it is for `problems`: L is the largest curvature that was met, f_inf is
taken as 0, and what follows from them is a trend.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.convergence.objectives.problems import Array, scikit_learn

_HIDDEN = 16
_CLASSES = 10
_ITERATIONS = 12
_SMALL = 1e-4
"""Length of the step of a finite difference."""


@dataclass(frozen=True, eq=False)
class MLP:
    """One hidden layer of tanh and a softmax, on images [G, n, 64] with labels [G, n].

    Workers that share all images have G = 1. Points are all parameters in a row, [..., d].
    """

    images: Array
    labels: NDArray[np.int64]
    start: Array

    @property
    def smoothness(self) -> float:
        """Not known; see `curvature`."""
        return float("nan")

    @property
    def convex(self) -> bool:
        """Not."""
        return False

    @property
    def heterogeneous(self) -> bool:
        """Whether workers have different images."""
        return len(self.images) > 1

    @property
    def most_spread(self) -> float | None:
        """Zero for workers that share all images; else not known."""
        return None if self.heterogeneous else 0.0

    def value(self, point: Array) -> Array:
        """The mean loss over all images: [...]."""
        images, labels = self._everything()
        _, likely = self._forward(point, images)
        picked = np.take_along_axis(
            likely, np.broadcast_to(labels[:, None], (*likely.shape[:-1], 1)), -1
        )
        return np.asarray(-np.log(np.maximum(picked[..., 0], 1e-300)).mean(axis=-1))

    def gradient(self, point: Array) -> Array:
        """The gradient of f."""
        images, labels = self._everything()
        return self.slope(point, images, labels)

    def gradients(self, points: Array) -> Array:
        """The gradients of the f_i at [..., G, d]."""
        images, labels = (self.images, self.labels) if self.heterogeneous else self._everything()
        return self.slope(points, images, labels)

    def spread(self, point: Array) -> Array:
        """The mean of |grad f_i - grad f|^2."""
        each = self.gradients(np.repeat(point[..., None, :], len(self.images), axis=-2))
        apart = each - self.gradient(point)[..., None, :]
        return np.asarray((apart**2).sum(axis=-1).mean(axis=-1))

    def slope(self, point: Array, images: Array, labels: NDArray[np.int64]) -> Array:
        """The gradient on given images [..., n, 64], for points [..., d]."""
        hidden, likely = self._forward(point, images)
        wanted = np.eye(_CLASSES)[labels]
        out = (likely - wanted) / images.shape[-2]
        _, _, second, _ = _unpacked(point, images.shape[-1])
        inner = out @ np.swapaxes(second, -1, -2) * (1 - hidden**2)
        turned = np.swapaxes(np.broadcast_to(images, (*inner.shape[:-1], images.shape[-1])), -1, -2)
        parts = (
            turned @ inner,
            inner.sum(axis=-2),
            np.swapaxes(hidden, -1, -2) @ out,
            out.sum(axis=-2),
        )
        return np.concatenate([part.reshape(*point.shape[:-1], -1) for part in parts], axis=-1)

    def curvature(self, point: Array, rng: np.random.Generator) -> float:
        """The largest eigenvalue of the Hessian of f in magnitude: an estimate by iteration."""
        direction = rng.standard_normal(point.shape)
        largest = 0.0
        for _ in range(_ITERATIONS):
            direction /= np.linalg.norm(direction)
            ahead, behind = point + _SMALL * direction, point - _SMALL * direction
            direction = (self.gradient(ahead) - self.gradient(behind)) / (2 * _SMALL)
            largest = float(np.linalg.norm(direction))
        return largest

    def _everything(self) -> tuple[Array, NDArray[np.int64]]:
        return self.images.reshape(-1, self.images.shape[-1]), self.labels.reshape(-1)

    @staticmethod
    def _forward(point: Array, images: Array) -> tuple[Array, Array]:
        first, bias, second, last = _unpacked(point, images.shape[-1])
        hidden = np.tanh(images @ first + bias[..., None, :])
        scores = hidden @ second + last[..., None, :]
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return hidden, scores / scores.sum(axis=-1, keepdims=True)


def _unpacked(point: Array, inputs: int) -> tuple[Array, Array, Array, Array]:
    ends = np.cumsum([inputs * _HIDDEN, _HIDDEN, _HIDDEN * _CLASSES])
    first, bias, second, last = np.split(point, ends, axis=-1)
    lead = point.shape[:-1]
    return (
        first.reshape(*lead, inputs, _HIDDEN),
        bias,
        second.reshape(*lead, _HIDDEN, _CLASSES),
        last,
    )


@dataclass(frozen=True, slots=True)
class Batches:
    """Gradients of images drawn with replacement from a worker's own."""

    problem: MLP
    size: int

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Indices of images: [*shape, size]."""
        return rng.integers(self.problem.images.shape[1], size=(*shape, self.size))

    def gradients(
        self, points: Array, drawn: NDArray[Any], deviation: Array
    ) -> tuple[Array, Array | None]:
        """The means over the drawn images. Their variances are estimated elsewhere."""
        del deviation
        workers = np.arange(points.shape[-2])[:, None] if self.problem.heterogeneous else 0
        images, labels = self.problem.images[workers, drawn], self.problem.labels[workers, drawn]
        return self.problem.slope(points, images, labels), None

    def variance(self, point: Array, rng: np.random.Generator, draws: int = 200) -> float:
        """Sigma squared at a point [d], estimated from minibatches of all workers."""
        workers = len(self.problem.images)
        drawn = self.draw(rng, (1, draws, workers))[0]
        points = np.broadcast_to(point, (draws, workers, len(point)))
        slopes, _ = self.gradients(points, drawn, np.zeros(1))
        return float(slopes.var(axis=0, ddof=1).sum(axis=-1).mean())


@cache
def digits(workers: int = 1) -> MLP:
    """The 1,797 images, standardized; with several workers ordered by label and cut in parts."""
    raw, target = scikit_learn().load_digits(return_X_y=True)
    images = (raw - raw.mean()) / raw.std()
    labels = target.astype(np.int64)
    if workers > 1:
        order = np.argsort(labels, kind="stable")[: len(labels) // workers * workers]
        images, labels = images[order], labels[order]
    inputs = images.shape[1]
    rng = np.random.default_rng(0)
    start = np.concatenate(
        [
            rng.standard_normal(inputs * _HIDDEN) / np.sqrt(inputs),
            np.zeros(_HIDDEN),
            rng.standard_normal(_HIDDEN * _CLASSES) / np.sqrt(_HIDDEN),
            np.zeros(_CLASSES),
        ]
    )
    return MLP(images.reshape(workers, -1, inputs), labels.reshape(workers, -1), start)
