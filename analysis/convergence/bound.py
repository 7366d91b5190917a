"""The convergence bound of CO2 with explicit constants: four terms, or "infeasible".

The steps are those of docs/theory-proofs.md. The largest feasible step has a closed form.
"""

import math
from dataclasses import asdict, dataclass, replace

from scipy.optimize import minimize_scalar

from analysis.convergence.setting import LARGEST, SMALLEST, Late, Setting
from co2sim.common.errors import OptionError

_SMALLEST_FRACTION = 1e-60
"""Smallest fraction of the largest feasible step that `tuned` considers."""
_EDGE = 1e-9
"""How close to the largest feasible step `tuned` comes, relatively."""
_BEYOND = 1e4
"""Above the logarithm of every finite bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An upper bound of A, the mean of E|grad f|^2 over all steps of all rounds, by term.

    A variable penalty has multiplied every term by its largest value. With late averages of which
    less than all is kept, steps before an arrival count `keep` times in the mean.
    """

    optimization: float
    noise: float
    staleness: float
    drift: float

    @property
    def total(self) -> float:
        """The bound."""
        return self.optimization + self.noise + self.staleness + self.drift

    @property
    def dominant(self) -> str:
        """The name of the largest term."""
        return max(TERMS, key=lambda name: float(getattr(self, name)))


TERMS = ("optimization", "noise", "staleness", "drift")


def plain(terms: "Bound | Infeasible | None") -> dict[str, float] | None:
    """The terms and their sum, for JSON; None without a bound."""
    return {**asdict(terms), "total": terms.total} if isinstance(terms, Bound) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """A setting outside the condition of the theorem, which then gives no bound.

    `load` is L eta + 2 L omega, which has to be below 1.
    """

    load: float
    largest_inner_step: float


def gap_constants(setting: Setting) -> tuple[float, float]:
    """Omega and N: how far the virtual iterate is from the averaged one, by gradients and by noise.

    The mean over all steps of |gradient| |gap by gradients| is at most omega times that of
    |gradient|^2; the mean of |gap by noise|^2 is at most N times the variance of an averaged
    gradient. An average counts with weight 1 until it is used and with 1, beta, beta^2, ... times
    the rest of its effect from then on, so that weights sum to delay - 1 + 1/(1 - beta) and their
    squares to delay - 1 + 1/(1 - beta^2).

    Source: docs/theory-proofs.md, derivation, step 3; for late averages see `late_gap_constants`.
    """
    if setting.late is not None:
        return late_gap_constants(setting, setting.late)
    tau, beta, eta = setting.local_steps, setting.momentum, setting.virtual_step
    apart = _distances(setting, 1.0)[0]
    weights = setting.delay - 1 + 1 / (1 - beta)
    squares = setting.delay - 1 + 1 / (1 - beta**2)
    by_gradients = eta * tau * weights + apart * (tau - 1) / 2
    # a product overflows to infinity, ** raises
    return by_gradients, eta * eta * tau * squares + apart * apart * (tau - 1) / 2


def drift(setting: Setting) -> float:
    """The mean over k = 0 ... tau-1 of r_k^2, the bound of E mean_i |x^i - mean|^2.

    A step x - gamma grad f_i(x) of a convex function with gamma <= 2/L brings points no further
    apart, so distances grow by the factor a = 1, else a = 1 + gamma L. This holds for heterogeneous
    workers, too: x^i - mean is split at the averaged point, where the first part is a nonexpansive
    map of every f_i and only the second is heterogeneity. Infinite where it is too large for a
    number.

    Source: docs/theory-proofs.md, derivation, step 4.
    """
    if setting.late is not None:
        return late_drift(setting, setting.late)
    step, growth = setting.inner_step, _growth(setting)
    pull = step * math.sqrt(setting.heterogeneity)
    spread = step * step * setting.noise * (1 - 1 / setting.workers)
    square = total = 0.0
    if pull or spread:
        for _ in range(setting.local_steps - 1):
            length = growth * math.sqrt(square) + pull
            square = length * length + spread
            total += square
    return total / setting.local_steps


def load(setting: Setting) -> float:
    """L eta + 2 L omega. The theorem holds where it is below 1. Proportional to gamma.

    Source: docs/theory.md, bound.
    """
    by_gradients, _ = gap_constants(setting)
    return setting.smoothness * (setting.virtual_step + 2 * by_gradients)


def largest_inner_step(setting: Setting) -> float:
    """The gamma below which the setting, otherwise unchanged, is feasible."""
    return setting.inner_step / load(setting)


def evaluate(setting: Setting) -> Bound | Infeasible:
    """The four terms, or why there are none.

    Source: docs/theory.md, bound, and docs/theory-proofs.md, steps 2 to 5.
    """
    taken = load(setting)
    if not taken < 1:
        return Infeasible(load=taken, largest_inner_step=largest_inner_step(setting))
    smooth, eta = setting.smoothness, setting.virtual_step
    averaged = setting.noise / setting.workers
    factor = setting.most_penalty or 1.0
    _, by_noise = gap_constants(setting)
    counted, share = float(setting.local_steps), 1.0
    if setting.late is not None:
        counted = setting.late.counted(setting.local_steps)
        share = squared_counts(setting, setting.late) / counted
    return Bound(
        optimization=factor * 2 * setting.gap / (eta * setting.rounds * counted),
        noise=factor * smooth * eta * averaged * share,
        staleness=factor * smooth**2 * by_noise * averaged / (1 - taken),
        drift=factor * smooth**2 * drift(setting),
    )


def tuned(setting: Setting) -> Setting:
    """The setting with the inner step that minimizes the bound.

    Without noise and drift the bound falls up to the largest feasible step, which is not feasible
    itself: the step is then just below it, and the bound there its infimum to within 1e-9. Raises
    OptionError without a gap: the bound then falls to 0 with the step, and no step is best.
    """
    if setting.gap == 0:
        raise OptionError(
            "gap is 0: the bound falls to 0 with the inner step, none is best; give an inner step,"
            " or a gap above 0"
        )
    largest = math.log(largest_inner_step(setting))
    lower = max(largest + math.log(_SMALLEST_FRACTION), math.log(SMALLEST) + _EDGE)
    upper = min(largest + math.log1p(-_EDGE), math.log(LARGEST) - _EDGE)
    if upper <= lower:
        raise OptionError(
            f"the largest feasible inner step is {math.exp(largest):g}; it must be from"
            f" {SMALLEST:g} to {LARGEST:g}"
        )

    def total(position: float) -> float:
        bound = evaluate(replace(setting, inner_step=math.exp(position)))
        if isinstance(bound, Bound) and math.isfinite(bound.total):
            return math.log(bound.total)
        return _BEYOND + position - lower

    best = minimize_scalar(total, bounds=(lower, upper), method="bounded")
    position = min((float(best.x), upper), key=total)
    return replace(setting, inner_step=math.exp(position))


def has_best_step(setting: Setting) -> bool:
    """Whether an inner step below the largest feasible one minimizes the bound."""
    return setting.noise > 0 or (setting.heterogeneity > 0 and setting.local_steps > 1)


def rate_step(setting: Setting, scale: float) -> Setting:
    """The setting with the step of the rate form: eta = scale sqrt(G/(T tau)).

    `scale` = sqrt(2 Delta/(L sigma^2)) makes the optimization and the noise term least together.

    Source: docs/theory.md, rate form.
    """
    eta = scale * math.sqrt(setting.workers / (setting.rounds * setting.local_steps))
    unit = replace(setting, inner_step=1.0).virtual_step
    return replace(setting, inner_step=eta / unit)


def published(setting: Setting) -> float | Infeasible:
    """The published bound of SlowMo, whose shape the theorem of CO2 has; its step size is fixed.

    The inner step is set to alpha gamma/(1 - beta) = sqrt(G/(T tau)); V, the variance of the
    averaged direction, is sigma^2/G, and the effect of the base optimizer is L^2 times `drift`. The
    horizon condition is checked; `load` is then the factor by which tau T is too short.

    Source: Wang et al., SlowMo, ICLR 2020, arXiv 1910.00643, Theorem 1.
    """
    chosen = rate_step(replace(setting, penalty=1.0, most_penalty=None), 1.0)
    workers, tau = chosen.workers, chosen.local_steps
    beta, alpha = chosen.momentum, chosen.outer_step
    steps = tau * chosen.rounds
    widest = max(3 * tau * (1 - beta - alpha) / alpha, 4 * tau * beta / (1 - beta), 1.0)
    least = workers * chosen.smoothness**2 * (1 + math.sqrt(3) * widest)
    if steps < least:
        return Infeasible(load=least / steps, largest_inner_step=chosen.inner_step)
    noise = chosen.noise * chosen.smoothness
    return (
        (2 * chosen.gap + noise) / math.sqrt(workers * steps)
        + chosen.smoothness**2 * drift(chosen)
        + 4 * noise * chosen.smoothness * (tau - 1) / steps * ((1 - beta) / alpha - 1) ** 2
        + 8 * noise * chosen.smoothness * tau / steps * beta**2 / (1 - beta**2)
    )


_MAX_ROUNDS = 1000
"""Rounds of drift that are followed one by one; the rest has a bound."""
_CLOSE = 1e-6
"""A drift that can rise by no larger share than this is taken as risen."""


def late_gap_constants(setting: Setting, late: Late) -> tuple[float, float]:
    """Omega, or sqrt(C) in its place, and N, as `gap_constants` has them.

    What an average of age n still has to contribute is w_n = (E - gamma) p^n + eta b_n, with
    b_n = beta (beta^n - p^n)/(beta - p); before an arrival, a step of the round itself has
    keep E - gamma. N is exact for a long run and a constant penalty.

    Source: docs/theory.md, the late average, the constants.
    """
    tau, d, keep, beta = setting.local_steps, late.steps, late.keep, setting.momentum
    p, counted = late.carried(tau), late.counted(tau)
    apart, before, _ = _distances(setting, keep)
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
    by_gradients = (
        _late_radius(setting, late)
        if keep == 1 and late.predict == 0
        else math.sqrt(late_product(setting, late))
    )
    return by_gradients, (older + within) / counted


def _late_radius(setting: Setting, late: Late) -> float:
    """Omega of late averages with everything kept: the largest eigenvalue of a symmetric matrix.

    Source: docs/theory.md, the late average, the constants.
    """
    tau, d, beta = setting.local_steps, late.steps, setting.momentum
    apart, _, across = _distances(setting, 1.0)
    older = setting.virtual_step * beta / (1 - beta)
    trace = (older + apart / 2) * tau + across * d
    return (trace + math.hypot(trace, across * math.sqrt(d * (tau - d)))) / 2 - apart / 2


def late_product(setting: Setting, late: Late) -> float:
    """C, at least omega^2, of late averages of which not everything is kept, or some predicted.

    That of a weighted Cauchy-Schwarz inequality: the largest of any column of the sum over rows of
    c x row sum x weight.

    Source: docs/theory.md, the late average, the constants.
    """
    tau, d, keep, beta = setting.local_steps, late.steps, late.keep, setting.momentum
    p = late.carried(tau)
    apart, before, across = _distances(setting, keep)
    lasting = across * p / (1 - p) + setting.virtual_step * beta / (1 - beta)
    rest = tau - d
    # sums over steps of the sums of all weights of a row, before and after the arrival
    early = d * (lasting + across) * tau + before * d * (d - 1) / 2
    later = rest * lasting * tau + apart * (rest * (rest - 1) / 2 + rest * keep * d)
    first = (lasting + across) * tau
    same = before * (early - first) + apart * later
    alone = apart * apart * tau * (tau - 1) / 2
    return lasting * later + (lasting + across) * keep * early + max(same, alone)


def _distances(setting: Setting, keep: float) -> tuple[float, float, float]:
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
        if abs(reach) <= _CLOSE * length or done == _MAX_ROUNDS:
            total += left * _round(setting, late, length + max(reach, 0.0))[0] if left else 0.0
            break
    mean = total / (rounds * late.counted(setting.local_steps))
    return mean if math.isfinite(mean) else math.inf


def bounded_below(setting: Setting) -> float | None:
    """The gamma below which late drift stays bounded in T; None where it is bounded already.

    Source: docs/theory-proofs.md, the late average, drift.
    """
    if setting.late is None or _contraction(setting, setting.late) < 1:
        return None
    low, high = 0.0, setting.inner_step
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        contracts = _contraction(replace(setting, inner_step=middle), setting.late) < 1
        low, high = (middle, high) if contracts else (low, middle)
    return low


_HALVINGS = 60


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
