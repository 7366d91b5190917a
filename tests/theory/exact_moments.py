"""Exact moments on quadratics, without Monte Carlo: means, covariances, stationarity, stability.

With diagonal Hessians every coordinate is its own linear system: a round maps the state of workers,
anchor and momentum to another plus noise, also when workers have different Hessians and centres.
Second moments of the state then obey a linear recursion.

Source: docs/theory-proofs.md, exact oracles; different workers are our extension.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.convergence.setting import Array, RunSize, Setting, Variants
from co2sim.common.errors import OptionError
from theory.problems import Known, Quadratic


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


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Workers by what they have in common: [K, d] each, and the share of workers, [K]."""

    curvature: Array
    centre: Array
    share: Array


@dataclass(frozen=True, slots=True)
class _Maps:
    """What happens to the state of D = 2 K + 3: [C, d, D, D], and the noise of a step as one.

    `begin` [D, n] makes the state from what is left of it between two rounds, and `end` [.., n, D]
    that of the state: all, or anchor, momentum and 1 where workers restart from the anchor.
    """

    step: Array
    noise: Array
    arrival: Array
    begin: Array
    end: Array


def exact(
    problem: Known, which: Variants, size: RunSize, *, spread: bool = False, alike: bool = False
) -> Moments:
    """The moments of `simulate.run` with Gaussian noise on a quadratic, means weighted as there.

    With `alike` all steps count 1 in the means instead. The number of seeds does not matter.
    Averages are late by 0 or 1 rounds, or by steps. Positions are counted from the optimum, so that
    small distances are not lost in large squares. Sums over rounds take log2(rounds) products of
    matrices. `spread` is NaN unless asked for: it takes a loop over rounds. Raises OptionError for
    what is not linear.
    """
    assert isinstance(problem, Quadratic)
    if (which.most_penalty > 0).any() or np.isfinite(which.clip).any():
        raise OptionError("exact moments are not known with clipping or a gap-aware penalty")
    optimum = problem.optimum
    problem = replace(problem, centre=problem.centre - optimum, start=problem.start - optimum)
    kinds = _kinds(problem, size.workers)
    maps = _maps(kinds, which, size)
    rows = _rows(problem, kinds)
    count = maps.begin.shape[1]
    begin = np.repeat(problem.start[:, None], count, axis=1)
    begin[:, -2], begin[:, -1] = 0.0, 1.0
    weights = np.ones((size.local_steps, len(which))) if alike else _weights(which, size)
    state = np.tile(begin[:, :, None] * begin[:, None, :], (len(which), 1, 1, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        opening = _Round(rows, kinds, which, size, maps, np.ones_like(weights), arrives=False)
        later = _Round(rows, kinds, which, size, maps, weights, arrives=True)
        gradient, drift = _expected(opening.forms, state)
        widest = np.full(len(which), np.nan)
        if spread:
            widest = _expected(opening.spreads, state).max(axis=0)
        summed, deviation = opening.apart(np.zeros_like(later.added[0]))
        drift = drift + np.einsum("k,kcd->c", kinds.share, summed)
        state = _moved(opening.matrix, state) + opening.noise
        forms, matrix, noise = _repeated(later, size.rounds - 1)
        gradient, drift = np.stack([gradient, drift]) + _expected(forms, state)
        last = _moved(matrix, state) + noise
        for _ in range(size.rounds - 1 if spread else 0):
            widest = np.fmax(widest, _expected(later.spreads, state).max(axis=0))
            state = _moved(later.matrix, state) + later.noise
        summed = later.apart_in_all(deviation, size.rounds - 1)
        drift = drift + np.einsum("k,kcd->c", kinds.share, summed)
    mean = rows.mean @ maps.begin
    first = np.einsum("i,cdi->cd", mean, last[..., -1])
    second = np.einsum("i,cdij,j->cd", mean, last, mean)
    counted = size.rounds * weights.sum(axis=0)
    return Moments(
        gradient=gradient / counted,
        drift=drift / counted,
        spread=widest,
        final=np.stack([first + optimum, second + (2 * first + optimum) * optimum]),
    )


def transition(problem: Quadratic, which: Variants, size: RunSize) -> Array:
    """The matrix of what is left of the state over a round in which an average is used."""
    kinds = _kinds(problem, size.workers)
    maps, weights = _maps(kinds, which, size), _weights(which, size)
    return _Round(_rows(problem, kinds), kinds, which, size, maps, weights, arrives=True).matrix


def edge(momentum: float, delay: int = 1) -> float:
    """The alpha q/Lambda at which a quadratic stops converging: 1 - beta, or 2 (1 + beta).

    With q = 1 - (1 - gamma lambda)^tau; by the Jury conditions of s^2 - (1 + beta) s + beta +
    alpha q (CO2) and of s^2 - (1 + beta - alpha q) s + beta (SlowMo). Source:
    docs/theory-proofs.md, exact oracles.
    """
    return 1 - momentum if delay else 2 * (1 + momentum)


def _kinds(problem: Quadratic, workers: int) -> _Kinds:
    rows = np.hstack([problem.curvature, problem.centre])
    if len(rows) not in {1, workers}:
        raise OptionError(f"the problem has {len(rows)} different workers, not {workers}")
    unique, counts = np.unique(rows, axis=0, return_counts=True)
    curvature, centre = np.hsplit(unique, 2)
    return _Kinds(curvature, centre, counts / len(rows))


def _maps(kinds: _Kinds, which: Variants, size: RunSize) -> _Maps:
    """The matrices of the state; p is the predicted share of a displacement.

    Raises OptionError for a delay of 2 rounds or more.
    """
    if size.delay not in {0, 1} and not size.late_steps:
        raise OptionError(f"delay is {size.delay}; exact moments are known for 0 and 1")
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
    late = size.late_steps
    move = np.zeros(count)  # the anchor less the mean of workers at the launch
    move[anchor], move[launched if late else x] = 1.0, -kinds.share
    change = (which.outer_step * which.inner_step)[:, None, None]
    used = np.tile(np.eye(count), (len(which), dimension, 1, 1))
    if not late and size.delay:
        used[:, :, anchor] -= change * np.eye(count)[momentum]  # that of the round before
    used[:, :, momentum] *= which.momentum[:, None, None]
    used[:, :, momentum] += move / (which.inner_step * which.penalty)[:, None, None]
    if late or not size.delay:
        used[:, :, anchor] -= change * used[:, :, momentum]
    if not late:
        begin = np.zeros((count, 3))
        begin[: anchor + 1, 0] = begin[momentum, 1] = begin[constant, 2] = 1.0
        return _Maps(step, noise, used, begin, used[:, :, anchor:])
    carried = (which.predict * late / size.local_steps)[:, None, None]
    for kind in range(groups):
        used[:, :, kind] = used[:, :, anchor] - carried * move
        used[:, :, kind, kind] += which.keep[:, None]
        used[:, :, kind, groups + kind] -= which.keep[:, None]
    launch = np.eye(count)
    launch[launched, launched] = 0.0
    launch[launched, x] = 1.0
    return _Maps(step, noise, used, np.eye(count), launch)


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
    """What every step of a round with an arrival counts: [tau, C]; of others 1."""
    late = np.arange(size.local_steps) < (size.late_steps or 0)
    return np.where(late[:, None], which.keep, 1.0)


def _expected(form: Array, state: Array) -> Array:
    """The expectations of quadratic forms [..., C, d, n, n], summed over coordinates."""
    return np.asarray(np.einsum("...cdij,cdij->...c", form, state))


class _Round:
    """A round as a whole, with or without the arrival of a late average in it.

    `matrix` and `noise` lead from its beginning to the next; `forms` are two quadratic forms of the
    state at its beginning, of A and of drift, whose expectations are weighted sums over its steps,
    and `spreads` one for each step. The last entry of the state is 1, which takes up what does not
    depend on the state.
    """

    def __init__(
        self,
        rows: _Rows,
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
        spread = np.einsum("k,kdi,kdj->dij", kinds.share, rows.spread, rows.spread)
        slope = np.einsum("di,dj->dij", rows.slope, rows.slope)
        apart = np.einsum("k,ki,kj->ij", kinds.share, rows.apart, rows.apart)
        matrix, noise = (
            np.broadcast_to(maps.begin, (*maps.step.shape[:2], *maps.begin.shape)),
            0 * maps.noise,
        )
        forms, spreads = [], []
        for k in range(size.local_steps + 1):
            if k == self.arrival:
                matrix, noise = maps.arrival @ matrix, _moved(maps.arrival, noise)
            if k == size.local_steps:
                break
            weight = self.weights[k][:, None, None, None]
            forms.append([weight * _seen(form, matrix, noise) for form in (slope, apart)])
            spreads.append(_seen(spread, matrix, noise))
            matrix, noise = maps.step @ matrix, _moved(maps.step, noise) + maps.noise
        self.forms, self.spreads = np.sum(forms, axis=0), np.array(spreads)
        self.matrix, self.noise = maps.end @ matrix, _moved(maps.end, noise)
        nothing = np.zeros((len(kinds.share), *matrix.shape[:2]))
        alone = (1 - 1 / (kinds.share * size.workers))[:, None, None]
        variance = (which.inner_step**2 * which.noise / matrix.shape[1])[:, None]
        self.pulled = self._follow(nothing + 1, nothing)
        self.added = self._follow(nothing, nothing + alone * variance)

    def apart(self, variance: Array) -> tuple[Array, Array]:
        """What workers are from the mean of their kind, by its variance at the launch: [K, C, d].

        Weighted and summed over the steps, and at the end of the round.
        """
        (slope, rest), (further, last) = self.pulled, self.added
        if self.size.late_steps is None:  # all restart from the anchor
            return further, 0 * last
        return slope * variance + further, rest * variance + last

    def apart_in_all(self, variance: Array, rounds: int) -> Array:
        """The first of `apart` over so many equal rounds together: by doubling."""
        (slope, rest), (further, last) = self.pulled, self.added
        if self.size.late_steps is None:
            return rounds * further
        total = 0 * further
        while rounds:
            if rounds % 2:
                total = total + slope * variance + further
                variance = rest * variance + last
            slope, further = slope + slope * rest, 2 * further + slope * last
            rest, last = rest * rest, rest * last + last
            rounds //= 2
        return total

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
    """Quadratic forms of the state after a map, as those of the state before it."""
    before = np.swapaxes(matrix, -1, -2) @ form @ matrix
    before[..., -1, -1] += np.einsum("...ij,...ij->...", form, noise)
    return np.asarray(before)


def _repeated(turn: _Round, rounds: int) -> tuple[Array, Array, Array]:
    """The forms of equal rounds together, and matrix and noise over all of them: by doubling."""
    forms, matrix, noise = turn.forms, turn.matrix, turn.noise
    total, power, added = 0 * forms, 0 * matrix + np.eye(matrix.shape[-1]), 0 * noise
    while rounds:
        if rounds % 2:
            total = total + _seen(forms, power, added)
            power, added = matrix @ power, _moved(matrix, added) + noise
        forms = forms + _seen(forms, matrix, noise)
        matrix, noise = matrix @ matrix, _moved(matrix, noise) + noise
        rounds //= 2
    return total, power, added


def by_hand(
    setting: Setting,
    gradient: Callable[[int, float], float],
    applied: Callable[[int, float], float] = lambda _, momentum: momentum,
) -> list[float]:
    """The x of every step of one worker, a number at a time from 0 on: the algorithm itself.

    `gradient` gets the step and x; `applied` the round and the momentum that is wanted.
    """
    late, tau = setting.late, setting.local_steps
    gamma, alpha = setting.inner_step, setting.outer_step
    x = anchor = momentum = 0.0
    flight: list[tuple[float, float]] = []
    path = []
    for t in range(setting.rounds):
        for k in range(tau + 1):
            if late and k == late.steps:
                left, moved, keep = (*flight.pop(), late.keep) if flight else (anchor, 0.0, 1.0)
                wanted = setting.momentum * momentum + moved / (gamma * setting.penalty)
                momentum = applied(t, wanted)
                anchor -= alpha * gamma * momentum
                x = anchor + keep * (x - left) - late.predict * late.steps / tau * moved
            if k == tau:
                break
            path.append(x)
            x -= gamma * gradient(t * tau + k, x)
        flight.append((x, anchor - x))
        if not late:
            due = flight.pop(0)[1] if len(flight) > setting.delay else 0.0
            momentum = applied(t, setting.momentum * momentum + due / (gamma * setting.penalty))
            anchor -= alpha * gamma * momentum
            x = anchor
    return path


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
