"""The constants of the bound for averages that are used late, without a restart.

A step before an arrival counts `keep`, every other one 1: c_k. In the first round nothing arrives,
and all steps count 1. Source: docs/theory.md, the late average.
"""

import math

from analysis.convergence.setting import Late, Setting

_MOST_ROUNDS = 1000
"""Rounds of drift that are followed one by one; the rest has a bound."""
_CLOSE = 1e-6
"""A drift that can rise by no larger share than this is taken as risen."""


def late_gap_constants(setting: Setting, late: Late) -> tuple[float, float]:
    """C and N: how far the virtual iterate is from the averaged one, by gradients and by noise.

    What an average of age n still has to contribute is w_n = (E - gamma) p^n + eta b_n, with
    b_n = beta (beta^n - p^n)/(beta - p); before an arrival, a step of the round itself has
    keep E - gamma. C is that of a weighted Cauchy-Schwarz inequality: the largest of any column of
    the sum over rows of c x row sum x weight. N is exact for a long run and a constant penalty.

    Source: docs/theory.md, the late average, C and N.
    """
    tau, d, keep, beta = setting.local_steps, late.steps, late.keep, setting.momentum
    p, counted = late.carried(tau), late.counted(tau)
    apart, before = _distances(setting, late)
    eta = setting.virtual_step * (1 - p)
    lasting = apart * p / (1 - p) + eta * beta / ((1 - beta) * (1 - p))
    rest = tau - d
    # sums over steps of the sums of all weights of a row, before and after the arrival
    early = d * (lasting + apart) * tau + before * d * (d - 1) / 2
    later = rest * lasting * tau + apart * (rest * (rest - 1) / 2 + rest * keep * d)
    first = (lasting + apart) * tau
    same = before * (early - first) + apart * later
    alone = apart * apart * tau * (tau - 1) / 2
    by_gradients = lasting * later + (lasting + apart) * keep * early + max(same, alone)
    steady = apart * apart * (keep * keep * d * rest + rest * (rest - 1) / 2)
    steady += keep * before * before * d * (d - 1) / 2
    rounds = setting.rounds
    within = (alone + (rounds - 1) * steady) / rounds
    squares = _squares(setting.virtual_step - setting.inner_step, eta, beta, p)
    older = squared_counts(setting, late) * (squares * counted + apart * apart * keep * d)
    return by_gradients, (older + within) / counted


def _distances(setting: Setting, late: Late) -> tuple[float, float]:
    """|E - gamma| and |keep E - gamma|, the largest for a penalty that varies."""
    steps = [setting.virtual_step]
    if setting.most_penalty is not None:
        steps.append(setting.virtual_step / setting.most_penalty)
    gamma = setting.inner_step
    return (
        max(abs(step - gamma) for step in steps),
        max(abs(late.keep * step - gamma) for step in steps),
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
    """The mean over rounds of the sum of c_k^2."""
    later = late.keep**2 * late.steps + setting.local_steps - late.steps
    return later + (setting.local_steps - later) / setting.rounds


def late_drift(setting: Setting, late: Late) -> float:
    """The mean of r^2, weighted by c_k: the bound of E mean_i |x^i - mean|^2.

    At an arrival workers are left with `keep` times u, what they added since the launch. Rounds are
    followed one by one. A round maps the r that it begins with to that of the next, increasing and
    with the Lipschitz constant `_contraction`: that bounds what all later rounds can add. Infinite
    where it is too large for a number.

    Source: docs/theory.md, the late average, drift.
    """
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
        if abs(reach) <= _CLOSE * length or done == _MOST_ROUNDS:
            total += left * _round(setting, late, length + max(reach, 0.0))[0] if left else 0.0
            break
    mean = total / (rounds * late.counted(setting.local_steps))
    return mean if math.isfinite(mean) else math.inf


def _growth(setting: Setting) -> float:
    """What a step multiplies distances by, at most: 1 for convex functions and gamma <= 2/L."""
    pull = setting.inner_step * setting.smoothness
    return 1.0 if setting.convex and pull <= 2 else 1 + pull  # noqa: PLR2004 - the formula's


def _contraction(setting: Setting, late: Late) -> float:
    """By what a period multiplies differences of r: keep a^(tau-d) (that of d steps since launch).

    With a = 1 what d steps add is gamma L d times r, else (1 + gamma L)^d - 1 times.
    """
    growth, d = _growth(setting), late.steps
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
    growth, slope = _growth(setting), step * setting.smoothness
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
