"""Exact moments on quadratics, without Monte Carlo: means, covariances, stationarity, stability.

With diagonal Hessians every coordinate is its own linear system: a round maps the state
(x, m, 1) to another plus noise, also when workers have different Hessians and centres, because all
of them start the round at the same x. Second moments of the state then obey a linear recursion.

Source: docs/theory-proofs.md, exact oracles; different workers are our extension.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.convergence.setting import Array, RunSize, Variants
from co2sim.common.errors import OptionError
from theory.problems import Quadratic

_PAIRS = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))
"""Entries of the symmetric matrix of second moments of (x, m, 1), in the order of the vector."""


@dataclass(frozen=True, slots=True)
class _Round:
    """One round, per variant and coordinate: [C, d], within the round [tau + 1, C, d].

    The mean of the workers after k steps is `pull` x + `shift` plus noise of variance `noise`.
    `squares`, `cross` and `shifts` are the means over workers of the squares of a worker's
    pull, of pull x shift and of shift squared, `own` of the variance of a worker's noise.
    """

    pull: Array
    shift: Array
    noise: Array
    squares: Array
    cross: Array
    shifts: Array
    own: Array


@dataclass(frozen=True, slots=True)
class Moments:
    """Exact expectations per variant: [C].

    `gradient` is A, `drift` the mean of E|x^i - mean|^2 over all steps, `spread` the largest
    E mean_i |grad f_i - grad f|^2 of all steps (zeta squared), `final` E x_T and E x_T^2 per
    coordinate, [2, C, d].
    """

    gradient: Array
    drift: Array
    spread: Array
    final: Array


def exact(
    problem: Quadratic,
    which: Variants,
    size: RunSize,
    *,
    spread: bool = False,
) -> Moments:
    """The moments of `simulate.run` with Gaussian noise. `spread` is NaN unless asked for.

    The number of seeds does not matter. Delay 1 is CO2, 0 SlowMo. The sum over rounds takes
    log2(rounds) matrix products, the spread a loop over rounds. Raises OptionError for other delays
    and for what is not linear.
    """
    _check(which, size.delay)
    rounds = size.rounds
    inside = _round(problem, which, size.workers, size.local_steps)
    matrix = _second(*_linear(inside, which, size.delay))
    state = np.zeros((*matrix.shape[:2], len(_PAIRS)))
    state[..., 0], state[..., 2], state[..., 5] = problem.start**2, problem.start, 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        total, last = _accumulate(matrix, state, rounds)
        square, mean = total[..., 0], total[..., 2]
        here = slice(None, -1)  # before each step, not after the last
        from_best = inside.shift - problem.optimum
        gradient = problem.mean_curvature**2 * (
            (inside.pull**2)[here].sum(0) * square
            + 2 * (inside.pull * from_best)[here].sum(0) * mean
            + rounds * (from_best**2 + inside.noise)[here].sum(0)
        )
        drift = (
            (inside.squares - inside.pull**2)[here].sum(0) * square
            + 2 * (inside.cross - inside.pull * inside.shift)[here].sum(0) * mean
            + rounds * (inside.shifts - inside.shift**2 + inside.own - inside.noise)[here].sum(0)
        )
        steps = rounds * size.local_steps
        widest = np.full(len(which), np.nan)
        if spread:
            widest = _widest(problem, inside, matrix, state, rounds)
    return Moments(
        gradient=gradient.sum(-1) / steps,
        drift=drift.sum(-1) / steps,
        spread=widest,
        final=np.stack([last[..., 2], last[..., 0]]),
    )


def is_stable(progress: float, momentum: float, delay: int = 1) -> bool:
    """Whether a round contracts. `progress` is alpha q/Lambda, with q = 1 - (1 - gamma lambda)^tau.

    These are the Jury conditions of s^2 - (1 + beta) s + beta + alpha q (CO2) and of
    s^2 - (1 + beta - alpha q) s + beta (SlowMo). Source: docs/theory-proofs.md, exact oracles.
    """
    return 0 < progress < edge(momentum, delay)


def edge(momentum: float, delay: int = 1) -> float:
    """The alpha q/Lambda at which a quadratic stops converging: 1 - beta, or 2 (1 + beta)."""
    return 1 - momentum if delay else 2 * (1 + momentum)


def stationary(progress: float, momentum: float, jump: float, delay: int = 1) -> float:
    """The stationary variance of x in one coordinate.

    `jump` is the variance of alpha gamma nu/Lambda, the noise of one outer step. Infinite beyond
    the edge. Source: docs/theory-proofs.md, exact oracles.
    """
    if not is_stable(progress, momentum, delay):
        return float("inf")
    beta = momentum
    if delay:
        rest = (1 - beta - progress) * progress * (2 + 2 * beta + progress)
        return (1 + beta + progress) * jump / rest
    return (1 + beta) * jump / ((1 - beta) * progress * (2 + 2 * beta - progress))


def transition(
    problem: Quadratic, which: Variants, workers: int, local_steps: int, delay: int = 1
) -> tuple[Array, Array]:
    """The matrix of (x, m, 1) over a round and the covariance of its noise: [C, d, 3, 3] each."""
    _check(which, delay)
    return _linear(_round(problem, which, workers, local_steps), which, delay)


def _check(which: Variants, delay: int) -> None:
    if delay not in {0, 1}:
        raise OptionError(f"delay is {delay}; exact moments are known for 0 and 1")
    if (which.most_penalty > 0).any() or np.isfinite(which.clip).any():
        raise OptionError("exact moments are not known with clipping or a gap-aware penalty")


def _round(problem: Quadratic, which: Variants, workers: int, steps: int) -> _Round:
    rows = len(problem.curvature)
    if rows not in {1, workers}:
        raise OptionError(f"the problem has {rows} different workers, not {workers}")
    ratio = 1 - which.inner_step[:, None, None] * problem.curvature
    variance = (which.inner_step**2 * which.noise / len(problem.start))[:, None, None]
    pull, noise = np.ones_like(ratio), np.zeros_like(ratio)
    moments: list[tuple[Array, ...]] = []
    for _ in range(steps + 1):
        shift = (1 - pull) * problem.centre
        parts = (pull, shift, noise / workers, pull**2, pull * shift, shift**2, noise)
        moments.append(tuple(np.broadcast_to(part, ratio.shape).mean(axis=1) for part in parts))
        noise = ratio**2 * noise + variance
        pull = pull * ratio
    return _Round(*(np.array(part) for part in zip(*moments, strict=True)))


def _linear(inside: _Round, which: Variants, delay: int) -> tuple[Array, Array]:
    """The matrix of the state (x, m, 1) over a round, and the covariance of its noise."""
    step = which.inner_step[:, None]
    scale = 1 / (step * which.penalty[:, None])
    move = (which.outer_step * which.inner_step)[:, None]
    matrix = np.zeros((*inside.pull.shape[1:], 3, 3))
    direction = np.zeros((*inside.pull.shape[1:], 3))
    matrix[..., 0, 0] = matrix[..., 2, 2] = 1
    matrix[..., 1, 0] = (1 - inside.pull[-1]) * scale
    matrix[..., 1, 1] = which.momentum[:, None]
    matrix[..., 1, 2] = -inside.shift[-1] * scale
    direction[..., 1] = np.sqrt(inside.noise[-1]) * scale
    if delay:
        matrix[..., 0, 1] = -move
    else:
        matrix[..., 0, :] -= move[..., None] * matrix[..., 1, :]
        direction[..., 0] = -move * direction[..., 1]
    return matrix, direction[..., :, None] * direction[..., None, :]


def _second(matrix: Array, noise: Array) -> Array:
    """The matrix of the vector of second moments of (x, m, 1): [..., 6, 6]."""
    lifted = np.zeros((*matrix.shape[:-2], len(_PAIRS), len(_PAIRS)))
    for row, (i, j) in enumerate(_PAIRS):
        for column, (k, n) in enumerate(_PAIRS):
            lifted[..., row, column] = matrix[..., i, k] * matrix[..., j, n]
            if k != n:
                lifted[..., row, column] += matrix[..., i, n] * matrix[..., j, k]
        lifted[..., row, -1] += noise[..., i, j]
    return lifted


def _accumulate(matrix: Array, state: Array, rounds: int) -> tuple[Array, Array]:
    """The sum of matrix^t state over t < rounds, and matrix^rounds state: by doubling."""
    total, current = np.zeros_like(state), state
    power, summed = matrix, np.broadcast_to(np.eye(matrix.shape[-1]), matrix.shape)
    left = rounds
    while left:
        if left % 2:
            total = total + (summed @ current[..., None])[..., 0]
            current = (power @ current[..., None])[..., 0]
        left //= 2
        if left:
            summed = summed + power @ summed
            power = power @ power
    return total, current


def _widest(problem: Quadratic, inside: _Round, matrix: Array, state: Array, rounds: int) -> Array:
    """The largest expected spread of all steps. The spread is a polynomial of degree 2 in x."""
    apart = problem.curvature - problem.mean_curvature
    offset = problem.curvature * problem.centre - problem.mean_curvature * problem.optimum
    second, first = (apart**2).mean(0), -2 * (apart * offset).mean(0)
    zeroth = (offset**2).mean(0)
    pull, shift, noise = (part[:-1] for part in (inside.pull, inside.shift, inside.noise))
    widest = np.zeros(matrix.shape[0])
    for _ in range(rounds):
        square, mean = state[..., 0], state[..., 2]
        centre = pull * mean + shift
        moment = pull**2 * square + 2 * pull * shift * mean + shift**2 + noise
        spread = (second * moment + first * centre + zeroth).sum(-1).max(0)
        widest = np.fmax(widest, spread)
        state = (matrix @ state[..., None])[..., 0]
    return widest


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


def late_exact(
    problem: Quadratic,
    which: Variants,
    size: RunSize,
    *,
    spread: bool = False,
    alike: bool = False,
) -> Moments:
    """The moments of `simulate.run` with Gaussian noise, means weighted as there.

    With `alike` all steps count 1 in the means instead.

    Positions are counted from the optimum, so that small distances are not lost in large squares.
    `spread` is NaN unless asked for. `final` is of the mean of workers. Raises OptionError for what
    is not linear.
    """
    if (which.most_penalty > 0).any() or np.isfinite(which.clip).any():
        raise OptionError("exact moments are not known with clipping or a gap-aware penalty")
    optimum = problem.optimum
    problem = replace(problem, centre=problem.centre - optimum, start=problem.start - optimum)
    kinds = _kinds(problem, size.workers)
    maps = _maps(kinds, which, size)
    rows = _rows(problem, kinds)
    count = maps.step.shape[-1]
    begin = np.repeat(problem.start[:, None], count, axis=1)
    begin[:, -2], begin[:, -1] = 0.0, 1.0
    weights = np.ones((size.local_steps, len(which))) if alike else _weights(which, size)
    state = np.tile(begin[:, :, None] * begin[:, None, :], (len(which), 1, 1, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        opening = _LateRound(rows, kinds, which, size, maps, weights, arrives=False)
        later = _LateRound(rows, kinds, which, size, maps, weights, arrives=True)
        gradient = drift = np.zeros(len(which))
        widest = np.full(len(which), 0.0 if spread else np.nan)
        deviation = np.zeros((len(kinds.share), len(which), len(problem.start)))
        for done in range(size.rounds):
            here = later if done else opening
            gradient = gradient + _expected(here.gradient, state)
            drift = drift + _expected(here.drift, state)
            if spread:
                widest = np.fmax(widest, here.spreads(state).max(axis=0))
            summed, deviation = here.apart(deviation)
            drift = drift + np.einsum("k,kcd->c", kinds.share, summed)
            state = _moved(here.matrix, state) + here.noise
    mean = rows.mean
    first = np.einsum("i,cdi->cd", mean, state[..., -1])
    second = np.einsum("i,cdij,j->cd", mean, state, mean)
    counted = size.rounds * weights.sum(axis=0)
    return Moments(
        gradient=gradient / counted,
        drift=drift / counted,
        spread=widest,
        final=np.stack([first + optimum, second + (2 * first + optimum) * optimum]),
    )


def late_transition(problem: Quadratic, which: Variants, size: RunSize) -> Array:
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
    groups, dimension = kinds.curvature.shape
    count = 2 * groups + 3
    x, launched = np.arange(groups), np.arange(groups, 2 * groups)
    anchor, momentum, constant = range(2 * groups, count)
    gamma = which.inner_step[:, None, None]
    noise_each = gamma**2 * which.noise[:, None, None] / dimension  # of one worker
    step = np.tile(np.eye(count), (len(which), dimension, 1, 1))
    ratio = 1 - gamma * kinds.curvature.T  # [C, d, K]
    step[:, :, x, x] = ratio
    step[:, :, x, constant] = (1 - ratio) * kinds.centre.T
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
    for kind in range(groups):
        arrival[:, :, kind] = arrival[:, :, anchor] - carried * move
        arrival[:, :, kind, kind] += which.keep[:, None]
        arrival[:, :, kind, groups + kind] -= which.keep[:, None]
    launch = np.eye(count)
    launch[launched, launched] = 0.0
    launch[launched, x] = 1.0
    return _Maps(step, noise, arrival, launch)


def _moved(matrix: Array, state: Array) -> Array:
    """Second moments after a linear map."""
    return np.asarray(matrix @ state @ np.swapaxes(matrix, -1, -2))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Linear forms of the state: the mean of workers, the slope of f, of every kind: [K, ...]."""

    mean: Array
    slope: Array
    apart: Array
    spread: Array


def _rows(problem: Quadratic, kinds: _Kinds) -> _Rows:
    """The forms; `slope` is [d, D], `apart` [K, D], `spread` (grad f_i - grad f) is [K, d, D]."""
    groups, dimension = kinds.curvature.shape
    count = 2 * groups + 3
    mean = np.zeros(count)
    mean[:groups] = kinds.share
    constant = np.zeros(count)
    constant[-1] = 1.0
    slope = problem.mean_curvature[:, None] * mean  # positions are counted from the optimum
    apart = np.eye(count)[:groups] - mean
    each = kinds.curvature[..., None] * (mean - kinds.centre[..., None] * constant)
    assert slope.shape == (dimension, count)
    return _Rows(mean, slope, apart, each - slope)


def _weights(which: Variants, size: RunSize) -> Array:
    """What every step of a round counts: [tau, C]."""
    late = np.arange(size.local_steps) < (size.late_steps or 0)
    return np.where(late[:, None], which.keep, 1.0)


def _expected(form: Array, state: Array) -> Array:
    """The expectation of a quadratic form [C, d, D, D], summed over coordinates."""
    return np.asarray(np.einsum("cdij,cdij->c", form, state))


class _LateRound:
    """A round as a whole, with or without an arrival in it.

    `matrix` and `noise` lead from its beginning to the next; `gradient` and `drift` are quadratic
    forms of the state at its beginning whose expectations are weighted sums over its steps. The
    last entry of the state is 1, which takes up what does not depend on the state.
    """

    def __init__(
        self,
        rows: "_Rows",
        kinds: _Kinds,
        which: Variants,
        size: RunSize,
        maps: _Maps,
        weights: Array,
        *,
        arrives: bool,
    ) -> None:
        self.kinds, self.which, self.size = kinds, which, size
        self.arrival = size.late_steps if arrives else None
        self.weights = weights
        self.spread = np.einsum("k,kdi,kdj->dij", kinds.share, rows.spread, rows.spread)
        slope = np.einsum("di,dj->dij", rows.slope, rows.slope)
        apart = np.einsum("k,ki,kj->ij", kinds.share, rows.apart, rows.apart)
        matrix = np.zeros_like(maps.step) + np.eye(maps.step.shape[-1])
        noise = np.zeros_like(matrix)
        self.gradient, self.drift = np.zeros_like(matrix), np.zeros_like(matrix)
        self.before: list[tuple[Array, Array]] = []
        for k in range(size.local_steps + 1):
            if k == self.arrival:
                matrix, noise = maps.arrival @ matrix, _moved(maps.arrival, noise)
            if k == size.local_steps:
                break
            weight = self.weights[k][:, None, None, None]
            self.gradient += weight * _seen(slope, matrix, noise)
            self.drift += weight * _seen(apart, matrix, noise)
            self.before.append((matrix, noise))
            matrix, noise = maps.step @ matrix, _moved(maps.step, noise) + maps.noise
        self.matrix, self.noise = maps.launch @ matrix, _moved(maps.launch, noise)
        nothing = np.zeros((len(kinds.share), *matrix.shape[:2]))
        alone = (1 - 1 / (kinds.share * size.workers))[:, None, None]
        variance = (which.inner_step**2 * which.noise / matrix.shape[1])[:, None]
        self.pulled = self._follow(nothing + 1, nothing)
        self.added = self._follow(nothing, nothing + alone * variance)

    def spreads(self, state: Array) -> Array:
        """The expected spread at every step: [tau, C]."""
        moments = (_moved(matrix, state) + noise for matrix, noise in self.before)
        return np.array([np.einsum("dij,cdij->c", self.spread, each) for each in moments])

    def apart(self, variance: Array) -> tuple[Array, Array]:
        """What workers are from the mean of their kind, by its variance at the launch: [K, C, d].

        Weighted and summed over the steps, and at the end of the round.
        """
        (slope, rest), (further, last) = self.pulled, self.added
        return slope * variance + further, rest * variance + last

    def _follow(self, variance: Array, added: Array) -> tuple[Array, Array]:
        """The same from a variance, with a variance added by every step."""
        which = self.which
        ratio = 1 - which.inner_step[:, None] * self.kinds.curvature[:, None, :]
        keep = which.keep[:, None]
        both = launched = variance
        total = np.zeros_like(variance)
        for k in range(self.size.local_steps + 1):
            if k == self.arrival:
                variance = keep**2 * (variance - 2 * both + launched)
            if k == self.size.local_steps:
                break
            total = total + self.weights[k][:, None] * variance
            variance, both = ratio**2 * variance + added, ratio * both
        return total, variance


def _seen(form: Array, matrix: Array, noise: Array) -> Array:
    """A quadratic form of the state after a map, as one of the state before it."""
    before = np.swapaxes(matrix, -1, -2) @ form @ matrix
    before[..., -1, -1] += np.einsum("...ij,...ij->...", form, noise)
    return np.asarray(before)


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
    square = g - 1 - beta + alpha * (1 - left)
    linear = beta - (1 + beta) * g + alpha * kept
    return np.asarray(square), np.asarray(linear), np.asarray(beta * g)


def disagreement(system: LateSystem) -> Array:
    """By what a round multiplies the distances of workers from their mean."""
    ratio = 1 - np.asarray(system.load, dtype=float)
    left = ratio ** (system.tau - system.steps)
    return np.asarray(-system.keep * (left - ratio**system.tau))


def late_is_stable(system: LateSystem) -> NDArray[np.bool_]:
    """Whether a round contracts: the mean by Jury's conditions, the disagreement by its factor."""
    square, linear, last = cubic(system)
    mean = (
        (1 + square + linear + last > 0)
        & (1 - square + linear - last > 0)
        & (np.abs(last) < 1)
        & (np.abs(linear - square * last) < 1 - last * last)
    )
    return np.asarray(mean & (np.abs(disagreement(system)) < 1))


def edges(system: LateSystem, highest: float = 2.0, places: int = 801) -> Array:
    """The gamma L of every row of a system at which it first stops being stable; inf if never.

    `load` is not heeded. A grid up to `highest` finds the interval, bisection the place.
    """
    rows = system._replace(load=0.0)
    grid = np.linspace(0, highest, places)[1:]
    stable = np.array([late_is_stable(rows._replace(load=load)) for load in grid])
    first = np.argmin(stable, axis=0)
    high = grid[first]
    low = high - grid[0]
    for _ in range(50):
        middle = (low + high) / 2
        holds = late_is_stable(rows._replace(load=middle))
        low, high = np.where(holds, middle, low), np.where(holds, high, middle)
    return np.where(stable.all(axis=0), np.inf, low)
