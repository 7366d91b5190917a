"""Functions of one or two coordinates whose gradients are piecewise linear along rotated axes."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from analysis.convergence.objectives.problems import Array


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
        at = np.array([self._slope(u, self._mean) for u in ends.T]).T
        first, second = at[:, :-1], at[:, 1:]
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

    def spread(self, point: Array) -> Array:
        """The mean of |grad f_i - grad f|^2."""
        apart = self.gradients(np.repeat(point[..., None, :], len(self.slopes), axis=-2))
        square = (apart - self.gradient(point)[..., None, :]) ** 2
        return np.asarray(square.sum(axis=-1).mean(axis=-1))
