"""Exact moments on quadratics, without Monte Carlo: means, covariances, stationarity, stability.

With diagonal Hessians every coordinate is a linear system of its own: a round maps the state
(x, m, 1) to another plus noise, also when workers have different Hessians and centres, because all
of them start the round at the same x. Second moments of the state then obey a linear recursion.

Source: docs/theory.md, exact oracles; different workers are our extension.
"""

from dataclasses import dataclass

import numpy as np

from analysis.convergence.objectives.problems import Array, Quadratic
from analysis.convergence.setting import RunSize, Variants
from co2sim.common.errors import OptionError

_PAIRS = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))
"""Entries of the symmetric matrix of second moments of (x, m, 1), in the order of the vector."""


@dataclass(frozen=True, slots=True)
class _Round:
    """One round, per variant and coordinate: [C, d], within the round [tau + 1, C, d].

    The mean of the workers after k steps is `pull` x + `shift` plus noise of variance `noise`.
    `squares`, `cross` and `shifts` are the means over workers of the squares of their own pull, of
    pull x shift and of shift squared, `own` of the variance of their own noise.
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
    s^2 - (1 + beta - alpha q) s + beta (SlowMo). Source: docs/theory.md, exact oracles.
    """
    return 0 < progress < edge(momentum, delay)


def edge(momentum: float, delay: int = 1) -> float:
    """The alpha q/Lambda at which a quadratic stops converging: 1 - beta, or 2 (1 + beta)."""
    return 1 - momentum if delay else 2 * (1 + momentum)


def stationary(progress: float, momentum: float, jump: float, delay: int = 1) -> float:
    """The stationary variance of x in one coordinate.

    `jump` is the variance of alpha gamma nu/Lambda, the noise of one outer step. Infinite beyond
    the edge. Source: docs/theory.md, exact oracles.
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
    if which.gap_aware.any() or np.isfinite(which.clip).any():
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
