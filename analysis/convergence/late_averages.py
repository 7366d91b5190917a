"""The constants of late averages: how far they let points drift apart, whole or in fragments.

A fragment is averaged for itself, but its gradient depends on all others: what couples them is a
norm in the place of omega, and `reach`, a second condition.
"""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from analysis.convergence.setting import Array, Late, Setting

_MAX_ROUNDS = 1000
"""Rounds of drift that are followed one by one; the rest has a bound."""
_CLOSE = 1e-6
"""A drift that can rise by no larger share than this is taken as risen."""


def gap_constants(setting: Setting, late: Late) -> tuple[float, float]:
    """Omega, or sqrt(C) in its place, and N, as `bound.gap_constants` has them.

    What an average of age n still has to contribute is w_n = (E - gamma) p^n + eta b_n, with
    b_n = beta (beta^n - p^n)/(beta - p); before an arrival, a step of the round itself has
    keep E - gamma. N is exact for a long run and a constant penalty.

    Source: docs/theory-proofs.md, the late average in full.
    """
    tau, d, keep, beta = setting.local_steps, late.steps, late.keep, setting.momentum
    p, counted = late.carried(tau), late.counted(tau)
    apart, before, _ = distances(setting, keep)
    eta = setting.virtual_step * (1 - p)
    rest = tau - d
    # sums of squared weights over steps, before and after the arrival
    alone = apart * apart * tau * (tau - 1) / 2
    steady = apart * apart * (keep * keep * d * rest + rest * (rest - 1) / 2)
    steady += keep * before * before * d * (d - 1) / 2
    rounds = setting.rounds
    within = (alone + (rounds - 1) * steady) / rounds
    squares = _squares(setting.virtual_step - setting.inner_step, eta, beta, p)
    older = squared_counts(setting, late) * (squares * counted + apart * apart * keep * d)
    if keep == 1 and late.predict == 0:
        in_parts = late.fragments > 1
        by_gradients = _norm(setting, late) if in_parts else _radius(setting, late)
        return by_gradients, (older + within) / counted
    by_gradients = math.sqrt(_product(setting, late))
    if late.fragments > 1:
        return by_gradients, _staggered_squares(setting, late)
    return by_gradients, (older + within) / counted


def _radius(setting: Setting, late: Late) -> float:
    """Omega of late averages with everything kept: the largest eigenvalue of a symmetric matrix.

    Source: docs/theory-proofs.md, the late average in full.
    """
    tau, d, beta = setting.local_steps, late.steps, setting.momentum
    apart, _, across = distances(setting, 1.0)
    older = setting.virtual_step * beta / (1 - beta)
    trace = (older + apart / 2) * tau + across * d
    return (trace + math.hypot(trace, across * math.sqrt(d * (tau - d)))) / 2 - apart / 2


def _product(setting: Setting, late: Late) -> float:
    """C, at least omega^2, of late averages of which not everything is kept, or some predicted.

    That of a weighted Cauchy-Schwarz inequality: the largest of any column of the sum over rows of
    c x row sum x weight. In fragments, rows count 1 in the place of c: others may be late.

    Source: docs/theory-proofs.md, the late average in full.
    """
    tau, d, keep, beta = setting.local_steps, late.steps, late.keep, setting.momentum
    p = late.carried(tau)
    apart, before, across = distances(setting, keep)
    lasting = across * p / (1 - p) + setting.virtual_step * beta / (1 - beta)
    rest = tau - d
    # sums over steps of the sums of all weights of a row, before and after the arrival
    early = d * (lasting + across) * tau + before * d * (d - 1) / 2
    later = rest * lasting * tau + apart * (rest * (rest - 1) / 2 + rest * keep * d)
    first = (lasting + across) * tau
    row = keep if late.fragments == 1 else 1.0
    same = row / keep * before * (early - first) + apart * later
    alone = apart * apart * tau * (tau - 1) / 2
    return lasting * later + (lasting + across) * row * early + max(same, alone)


def distances(setting: Setting, keep: float) -> tuple[float, float, float]:
    """|E - gamma|, |keep E - gamma|, and the first across rounds: the largest for any penalty.

    With a penalty that varies in [1, Lambda] a gradient counts 1/penalty. Two steps of a round have
    the same penalty; where two rounds meet, |E x - gamma|/sqrt(x) for x in [1/Lambda, 1] is what
    counts, which rises with x but for its sign.

    Source: docs/theory-proofs.md, a penalty that varies.
    """
    whole, gamma, most = setting.virtual_step, setting.inner_step, setting.most_penalty or 1.0
    steps = (whole, whole / most)
    root = math.sqrt(most)
    return (
        max(abs(step - gamma) for step in steps),
        max(abs(keep * step - gamma) for step in steps),
        max(abs(whole - gamma), abs(whole / root - gamma * root)),
    )


def _squares(apart: float, eta: float, beta: float, p: float) -> float:
    """The sum of w_n^2 over n >= 1; `apart` is E - gamma."""
    both = 1 - beta * p
    return (
        (apart * p) ** 2 / (1 - p * p)
        + 2 * apart * eta * beta * p / (both * (1 - p * p))
        + (eta * beta) ** 2 * (1 + beta * p) / (both * (1 - beta * beta) * (1 - p * p))
    )


def squared_counts(setting: Setting, late: Late) -> float:
    """The mean over rounds of the sum of c_k^2; in fragments that of the largest."""
    tau, later = setting.local_steps, _squared(late, setting.local_steps)
    if late.fragments == 1:
        return later + (tau - later) / setting.rounds
    ends = (start - later + _squared(late, tau - start) for start in late.launches(tau))
    return later + max(ends) / setting.rounds


def _squared(late: Late, steps: int) -> float:
    """The sum of c_k^2 over the first steps since a launch."""
    early = min(late.steps, steps)
    return late.keep**2 * early + steps - early


def drift(setting: Setting, late: Late) -> float:
    """The mean of r^2, weighted by c_k: the bound of E mean_i |x^i - mean|^2.

    At an arrival workers are left with `keep` times u, what they added since the launch. Rounds are
    followed one by one. A round maps the r that it begins with to that of the next, increasing and
    with the Lipschitz constant `_contraction`: that bounds what all later rounds can add. Infinite
    where it is too large for a number.

    Source: docs/theory-proofs.md, the late average in full.
    """
    if late.fragments > 1:
        return _staggered_drift(setting, late)
    total, length = _round(setting, late, None)
    rate, rounds = _contraction(setting, late), setting.rounds
    for done in range(1, rounds):
        here, after = _round(setting, late, length)
        total += here
        rise, length = after - length, after
        if not math.isfinite(total) or not math.isfinite(length):
            return math.inf
        left = rounds - 1 - done
        reach = rise * _geometric(rate, left) if rise else 0.0
        if reach == math.inf:
            return reach
        if abs(reach) <= _CLOSE * length or done == _MAX_ROUNDS:
            total += left * _round(setting, late, length + max(reach, 0.0))[0] if left else 0.0
            break
    mean = total / (rounds * late.counted(setting.local_steps))
    return mean if math.isfinite(mean) else math.inf


def bounded_below(setting: Setting) -> float | None:
    """The gamma below which late drift stays bounded in T; None where it is bounded already.

    Source: docs/theory-proofs.md, proof for the late average, step 5.
    """
    late = setting.late
    if late is None or late.fragments > 1 or _contraction(setting, late) < 1:
        return None
    low, high = 0.0, setting.inner_step
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        contracts = _contraction(replace(setting, inner_step=middle), late) < 1
        low, high = (middle, high) if contracts else (low, middle)
    return low


_HALVINGS = 60


def step_growth(setting: Setting) -> float:
    """What a step multiplies distances by, at most: 1 for convex functions and gamma <= 2/L."""
    pull = setting.inner_step * setting.smoothness
    return 1.0 if setting.convex and pull <= 2 else 1 + pull  # noqa: PLR2004 - the formula's


def _contraction(setting: Setting, late: Late) -> float:
    """By what a period multiplies differences of r: keep a^(tau-d) (that of d steps since launch).

    With a = 1 what d steps add is gamma L d times r, else (1 + gamma L)^d - 1 times.
    """
    growth, d = step_growth(setting), late.steps
    pull = setting.inner_step * setting.smoothness
    try:
        added = d * pull if growth == 1 else growth**d - 1
        return late.keep * added * growth ** (setting.local_steps - d)
    except OverflowError:
        return math.inf


def _geometric(rate: float, count: int) -> float:
    """At least the sum of rate^j over j = 1 ... count; infinite where it is too large."""
    if rate < 1:
        return rate * (1 - rate**count) / (1 - rate)
    try:
        return count * float(rate) ** count
    except OverflowError:
        return math.inf


def _round(setting: Setting, late: Late, length: float | None) -> tuple[float, float]:
    """The sum of c_k r_k^2 over a round that begins with r = `length`, and r at its end.

    None is the first round: it begins with 0, and nothing arrives in it.
    """
    step = setting.inner_step
    growth, slope = step_growth(setting), step * setting.smoothness
    pull = step * math.sqrt(setting.heterogeneity)
    spread = step * step * setting.noise * (1 - 1 / setting.workers)
    arrival = setting.local_steps + 1 if length is None else late.steps
    r, added, total = length or 0.0, 0.0, 0.0
    for k in range(setting.local_steps):
        if k == arrival:
            r = late.keep * added
        total += (late.keep if k < arrival <= setting.local_steps else 1.0) * r * r
        if k < arrival:
            reach = added + slope * r + pull
            added = math.sqrt(reach * reach + spread)
        reach = growth * r + pull
        r = math.sqrt(reach * reach + spread)
    return total, late.keep * added if arrival == setting.local_steps else r


# --- fragments ------------------------------------------------------------------------------------


def reach(setting: Setting) -> float:
    """Gamma L nu: by what a period multiplies the disagreement of workers; below 1, or no bound.

    0 where averages are whole, and where workers do not drift apart.

    Source: docs/theory.md, fragments.
    """
    late = setting.late
    if late is None or late.fragments == 1 or not _drifts(setting):
        return 0.0
    return setting.inner_step * setting.smoothness * _nu(setting.local_steps, late.steps)


def _drifts(setting: Setting) -> bool:
    """Whether something drives workers apart."""
    return setting.heterogeneity > 0 or (setting.noise > 0 and setting.workers > 1)


@lru_cache(1024)
def _nu(tau: int, d: int) -> float:
    """The norm of the matrix 1{j < k} + 1{k < d}."""
    return _matrix_norm(0.0, 1.0, tau, d)


def _norm(setting: Setting, late: Late) -> float:
    """Omega of fragments with everything kept: the norm of b + D (1{j < k} + 1{k < d}).

    Source: docs/theory.md, fragments.
    """
    older = setting.virtual_step * setting.momentum / (1 - setting.momentum)
    apart = abs(setting.virtual_step - setting.inner_step)
    scale = max(older, apart)
    return scale and scale * _matrix_norm(
        older / scale, apart / scale, setting.local_steps, late.steps
    )


@lru_cache(1024)
def _matrix_norm(everywhere: float, part: float, tau: int, d: int) -> float:
    """At least the norm of everywhere + part (1{j < k} + 1{k < d}), tau x tau, to 1e-12.

    The largest ratio of B^T B x to x, for an x above 0, is no less than the largest eigenvalue of
    a matrix without negative entries (Collatz and Wielandt).
    """
    early = np.arange(tau) < d

    def once(x: Array) -> Array:
        rows = everywhere * x.sum() + part * (np.cumsum(x) - x + early * x.sum())
        below = rows.sum() - np.cumsum(rows)
        columns: Array = everywhere * rows.sum() + part * (below + rows[early].sum())
        return columns

    x, most = np.ones(tau), math.inf
    for _ in range(_MOST_POWERS):
        after = once(x)
        ratios = after / x
        most = min(most, float(ratios.max()))
        if ratios.max() - ratios.min() <= _PRECISE * most:
            break
        x = after / after.max()
    return math.sqrt(most) * (1 + _PRECISE)


_MOST_POWERS, _PRECISE = 200, 1e-12


def _staggered_squares(setting: Setting, late: Late) -> float:
    """N of fragments with less than everything kept: of the fragment with the largest sum.

    Sums of w_n^2 are those of an endless run. A row counts as much as the fragment that counts most
    at its step, which is `keep` only where all are late.
    """
    tau, d, keep, rounds = setting.local_steps, late.steps, late.keep, setting.rounds
    p, (apart, before, _) = late.carried(tau), distances(setting, keep)
    eta = setting.virtual_step * (1 - p)
    squares = _squares(setting.virtual_step - setting.inner_step, eta, setting.momentum, p)
    usual, launches = _squared(late, tau), late.launches(tau)
    calendar = np.arange(tau)
    counts = np.full(tau, keep)
    for start in launches:
        counts[(calendar - start) % tau >= d] = 1.0
    largest = 0.0
    for start in launches:
        since = (calendar - start) % tau
        again, early = since == calendar - start, since < d
        earlier = squares * (start + (rounds - 1) * usual)
        # rounds but the first: what is older, then what is the round's own
        launched = np.where(again, (rounds - 1) * usual, start + max(rounds - 2, 0) * usual)
        lasting = np.where(
            early,
            earlier + apart**2 * launched + (rounds - 1) * before**2 * since,
            earlier + (rounds - 1) * apart**2 * (keep**2 * d + since - d),
        )
        first = np.where(
            early,
            apart**2 * start + before**2 * since,
            squares * start + apart**2 * (keep**2 * d + since - d),
        )
        first = np.where(again, first, apart**2 * calendar)
        total = first.sum() + (counts @ lasting if rounds > 1 else 0.0)
        largest = max(largest, float(total))
    return largest / (rounds * late.counted(tau))


def _staggered_drift(setting: Setting, late: Late) -> float:
    """R^2 over the weighted number of steps; infinite where `reach` is 1 or more.

    R^2 is at least the sum over steps of E mean_i |x^i - mean|^2. Sums are those of the fragment
    with the largest.

    Source: docs/theory.md, fragments.
    """
    if not _drifts(setting):
        return 0.0
    x, step = reach(setting), setting.inner_step
    if not x < 1:
        return math.inf
    steps = setting.rounds * setting.local_steps
    lengths, squares, products = _windows(setting.local_steps, setting.rounds, late)
    spread = step * step * setting.noise * (1 - 1 / setting.workers)
    pulled = step * math.sqrt(setting.heterogeneity * lengths)
    noise = math.sqrt(spread * products)
    linear = x * pulled + step * setting.smoothness * noise
    rest = pulled * pulled + spread * squares
    rest += 2 * step * math.sqrt(setting.heterogeneity * steps) * noise
    root = (linear + math.sqrt(linear * linear + (1 - x * x) * rest)) / (1 - x * x)
    return root * root / (setting.rounds * late.counted(setting.local_steps))


@lru_cache(1024)
def _windows(tau: int, rounds: int, late: Late) -> tuple[float, float, float]:
    """Sums over all steps of (sum q)^2, of sum q^2, and of g; the largest of any fragment.

    q are the weights of the local steps that are still in x^i - mean, and g the squared weights of
    what a step and all before it share in later ones.

    Source: docs/theory-proofs.md, the bound of fragments.
    """
    d, keep = late.steps, late.keep
    whole, usual = late.counted(tau), _squared(late, tau)

    def sums(length: int, before: tuple[float, float] | None) -> Array:
        """Over the first `length` steps of a round after one with these sums of q and q^2."""
        k = np.arange(length)
        if before is None:  # the first round: nothing has been launched
            held = length + d - 1.0 - k
            return np.array([(k * k).sum(), k.sum(), (held * held * k).sum()])
        early, held, after = k < d, tau + d - 1.0 - k, d - 1.0 - k
        length_ = np.where(early, before[0] + k, keep * d + k - d)
        square = np.where(early, before[1] + k, keep * keep * d + k - d)
        held_squares = keep * keep * d + k - d
        shared = after**2 * before[1] + k * (after + keep * keep * tau) ** 2
        product = np.where(early, shared, held**2 * held_squares)
        return np.array([(length_**2).sum(), square.sum(), product.sum()])

    most = np.zeros(3)
    for start in late.launches(tau):
        first, usually = (float(start), float(start)), (whole, usual)
        total = sums(start, None)
        if rounds > 1:
            total = total + sums(tau, first) + sums(tau - start, usually)
            total = total + float(rounds - 2) * sums(tau, usually)
        else:
            total = total + sums(tau - start, first)
        most = np.maximum(most, total)
    return float(most[0]), float(most[1]), float(most[2])
