"""Exact moments of late averages without a restart, on quadratics with diagonal Hessians.

Every coordinate is a linear system of its own. Workers with equal functions are one kind: its mean
moves with the noise of the mean, and what its workers are apart does not touch any mean. The state
of a coordinate is (x of every kind, l of every kind, anchor, m, 1), with l the positions at the
launch; steps, arrivals and launches are matrices. They share nothing with the closed forms of the
bound.

Source: docs/theory.md, the late average.
"""

from dataclasses import dataclass

import numpy as np

from analysis.convergence.exact_moments import Moments
from analysis.convergence.objectives.problems import Array, Quadratic
from analysis.convergence.variants import RunSize, Variants
from co2sim.errors import OptionError


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Workers by what they have in common: [K, d] each, and the share of workers, [K]."""

    curvature: Array
    centre: Array
    share: Array


@dataclass(frozen=True, slots=True)
class _Maps:
    """What happens to the state: matrices [C, d, D, D], and the noise of a step as one."""

    step: Array
    noise: Array
    arrival: Array
    launch: Array


def exact(problem: Quadratic, which: Variants, size: RunSize, *, spread: bool = False) -> Moments:
    """The moments of `simulate.run` with Gaussian noise, means weighted as there.

    `spread` is NaN unless asked for. `final` is of the mean of workers. Raises OptionError for what
    is not linear.
    """
    if which.gap_aware.any() or np.isfinite(which.clip).any():
        raise OptionError("exact moments are not known with clipping or a gap-aware penalty")
    kinds = _kinds(problem, size.workers)
    maps = _maps(kinds, which, size)
    rows = _rows(problem, kinds)
    count = maps.step.shape[-1]
    state = np.zeros((len(which), len(problem.start), count, count))
    begin = np.repeat(problem.start[:, None], count, axis=1)
    begin[:, -2], begin[:, -1] = 0.0, 1.0
    state[:] = begin[:, :, None] * begin[:, None, :]
    inner = np.zeros((3, len(kinds.share), len(which), len(problem.start)))
    totals = _Totals(rows, kinds, which, size, spread=spread)
    arrival = size.late_steps
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(size.rounds):
            for k in range(size.local_steps):
                if t and k == arrival:
                    state, inner = _moved(maps.arrival, state), _kept(which, inner)
                totals.add(state, inner, k)
                state = _moved(maps.step, state) + maps.noise
                inner = _stepped(kinds, which, inner, size)
            if t and arrival == size.local_steps:
                state, inner = _moved(maps.arrival, state), _kept(which, inner)
            state = _moved(maps.launch, state)
            inner = np.stack([inner[0], inner[0], inner[0]])
    mean = rows.mean
    first = np.einsum("i,cdi->cd", mean, state[..., -1])
    second = np.einsum("i,cdij,j->cd", mean, state, mean)
    return totals.moments(np.stack([first, second]))


def transition(problem: Quadratic, which: Variants, size: RunSize) -> Array:
    """The matrix of the state over a round, from launch to launch: [C, d, D, D]."""
    maps = _maps(_kinds(problem, size.workers), which, size)
    assert size.late_steps is not None
    before = np.linalg.matrix_power(maps.step, size.late_steps)
    after = np.linalg.matrix_power(maps.step, size.local_steps - size.late_steps)
    return np.asarray(maps.launch @ after @ maps.arrival @ before)


def _kinds(problem: Quadratic, workers: int) -> _Kinds:
    rows = np.hstack([problem.curvature, problem.centre])
    if len(rows) not in {1, workers}:
        raise OptionError(f"the problem has {len(rows)} different workers, not {workers}")
    unique, counts = np.unique(rows, axis=0, return_counts=True)
    curvature, centre = np.hsplit(unique, 2)
    return _Kinds(curvature, centre, counts / len(rows))


def _maps(kinds: _Kinds, which: Variants, size: RunSize) -> _Maps:
    """The matrices of the state; p is the predicted share of a displacement."""
    number, dimension = kinds.curvature.shape
    count = 2 * number + 3
    x, launched = np.arange(number), np.arange(number, 2 * number)
    anchor, momentum, one = range(2 * number, count)
    gamma = which.inner_step[:, None, None]
    noise_each = gamma**2 * which.noise[:, None, None] / dimension  # of one worker
    step = np.tile(np.eye(count), (len(which), dimension, 1, 1))
    ratio = 1 - gamma * kinds.curvature.T  # [C, d, K]
    step[:, :, x, x] = ratio
    step[:, :, x, one] = (1 - ratio) * kinds.centre.T
    noise = np.zeros_like(step)
    noise[:, :, x, x] = noise_each / (kinds.share * size.workers)
    move = np.zeros(count)  # the anchor less the mean of workers at the launch
    move[anchor], move[launched] = 1.0, -kinds.share
    arrival = np.tile(np.eye(count), (len(which), dimension, 1, 1))
    arrival[:, :, momentum] *= which.momentum[:, None, None]
    arrival[:, :, momentum] += move / (which.inner_step * which.penalty)[:, None, None]
    change = (which.outer_step * which.inner_step)[:, None, None]
    arrival[:, :, anchor] -= change * arrival[:, :, momentum]
    assert size.late_steps is not None
    carried = (which.predict * size.late_steps / size.local_steps)[:, None, None]
    for kind in range(number):
        arrival[:, :, kind] = arrival[:, :, anchor] - carried * move
        arrival[:, :, kind, kind] += which.keep[:, None]
        arrival[:, :, kind, number + kind] -= which.keep[:, None]
    launch = np.eye(count)
    launch[launched, launched] = 0.0
    launch[launched, x] = 1.0
    return _Maps(step, noise, arrival, launch)


def _moved(matrix: Array, state: Array) -> Array:
    """Second moments after a linear map."""
    return np.asarray(matrix @ state @ np.swapaxes(matrix, -1, -2))


def _stepped(kinds: _Kinds, which: Variants, inner: Array, size: RunSize) -> Array:
    """Moments (ee, el, ll) of what a worker is from the mean of its kind: [3, K, C, d]."""
    ratio = 1 - which.inner_step[:, None] * kinds.curvature[:, None, :]
    alone = 1 - 1 / (kinds.share * size.workers)
    variance = (which.inner_step**2 * which.noise / kinds.curvature.shape[1])[:, None]
    added = alone[:, None, None] * variance
    return np.stack([ratio**2 * inner[0] + added, ratio * inner[1], inner[2]])


def _kept(which: Variants, inner: Array) -> Array:
    """The same after an arrival, of keep (e - l); l is not used again before the next launch."""
    keep = which.keep[:, None]
    return np.stack([keep**2 * (inner[0] - 2 * inner[1] + inner[2]), 0 * inner[1], inner[2]])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Linear forms of the state: the mean of workers, the slope of f, of every kind: [K, ...]."""

    mean: Array
    slope: Array
    apart: Array
    spread: Array


def _rows(problem: Quadratic, kinds: _Kinds) -> _Rows:
    """The forms; `slope` is [d, D], `apart` [K, D], `spread` (grad f_i - grad f) is [K, d, D]."""
    number, dimension = kinds.curvature.shape
    count = 2 * number + 3
    mean = np.zeros(count)
    mean[:number] = kinds.share
    one = np.zeros(count)
    one[-1] = 1.0
    slope = problem.mean_curvature[:, None] * (mean - problem.optimum[:, None] * one)
    apart = np.eye(count)[:number] - mean
    each = kinds.curvature[..., None] * (mean - kinds.centre[..., None] * one)
    assert slope.shape == (dimension, count)
    return _Rows(mean, slope, apart, each - slope)


class _Totals:
    """Weighted sums of expectations, step by step."""

    def __init__(
        self, rows: _Rows, kinds: _Kinds, which: Variants, size: RunSize, *, spread: bool
    ) -> None:
        assert size.late_steps is not None
        self.rows, self.kinds, self.arrival = rows, kinds, size.late_steps
        self.keep, self.spread = which.keep, spread
        early = size.late_steps * which.keep
        self.counted = size.rounds * (early + size.local_steps - size.late_steps)
        self.gradient = np.zeros(len(which))
        self.drift = np.zeros(len(which))
        self.widest = np.full(len(which), 0.0 if spread else np.nan)

    def add(self, state: Array, inner: Array, k: int) -> None:
        """Add a step."""
        weight = self.keep if k < self.arrival else 1.0
        rows, share = self.rows, self.kinds.share
        slope = np.einsum("di,cdij,dj->c", rows.slope, state, rows.slope)
        apart = np.einsum("k,ki,cdij,kj->c", share, rows.apart, state, rows.apart, optimize=True)
        own = np.einsum("k,kcd->c", share, inner[0])
        self.gradient = self.gradient + weight * slope
        self.drift = self.drift + weight * (apart + own)
        if self.spread:
            form = np.einsum("k,kdi,kdj->dij", share, rows.spread, rows.spread)
            self.widest = np.fmax(self.widest, np.einsum("dij,cdij->c", form, state))

    def moments(self, final: Array) -> Moments:
        """The means."""
        return Moments(
            gradient=self.gradient / self.counted,
            drift=self.drift / self.counted,
            spread=self.widest,
            final=final,
        )
