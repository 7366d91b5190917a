"""The convergence bound of CO2 with explicit constants: four terms, or "infeasible".

The steps are those of docs/theory-proofs.md. The largest feasible step has a closed form.
"""

import math
from dataclasses import asdict, dataclass, replace

from scipy.optimize import minimize_scalar

from analysis.convergence import late_averages
from analysis.convergence.setting import LARGEST, SMALLEST, Setting
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

    `load` is L eta + 2 L omega, which has to be below 1, as has `reach`, gamma L nu, of fragments.
    """

    load: float
    largest_inner_step: float
    reach: float = 0.0


def gap_constants(setting: Setting) -> tuple[float, float]:
    """Omega and N: how far the virtual iterate is from the averaged one, by gradients and by noise.

    The mean over all steps of |gradient| |gap by gradients| is at most omega times that of
    |gradient|^2; the mean of |gap by noise|^2 is at most N times the variance of an averaged
    gradient. An average counts with weight 1 until it is used and with 1, beta, beta^2, ... times
    the rest of its effect from then on, so that weights sum to delay - 1 + 1/(1 - beta) and their
    squares to delay - 1 + 1/(1 - beta^2).

    Source: docs/theory-proofs.md, derivation, step 3; for late averages see `late_averages`.
    """
    if setting.late is not None:
        return late_averages.gap_constants(setting, setting.late)
    tau, beta, eta = setting.local_steps, setting.momentum, setting.virtual_step
    apart = late_averages.distances(setting, 1.0)[0]
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
        return late_averages.drift(setting, setting.late)
    step, growth = setting.inner_step, late_averages.step_growth(setting)
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

    Source: docs/theory.md, averages late by whole rounds.
    """
    by_gradients, _ = gap_constants(setting)
    return setting.smoothness * (setting.virtual_step + 2 * by_gradients)


def largest_inner_step(setting: Setting) -> float:
    """The gamma below which the setting, otherwise unchanged, is feasible."""
    return setting.inner_step / max(load(setting), late_averages.reach(setting))


def outside(setting: Setting, load: float) -> Infeasible | None:
    """Which condition a setting with this load does not meet, if any."""
    reach = late_averages.reach(setting)
    if load < 1 and reach < 1:
        return None
    return Infeasible(
        load=load, largest_inner_step=setting.inner_step / max(load, reach), reach=reach
    )


def evaluate(setting: Setting) -> Bound | Infeasible:
    """The four terms, or why there are none.

    Source: docs/theory.md, averages late by whole rounds, and docs/theory-proofs.md, steps 2 to 5.
    """
    taken = load(setting)
    if infeasible := outside(setting, taken):
        return infeasible
    smooth, eta = setting.smoothness, setting.virtual_step
    averaged = setting.noise / setting.workers
    factor = setting.most_penalty or 1.0
    _, by_noise = gap_constants(setting)
    counted, share = float(setting.local_steps), 1.0
    if setting.late is not None:
        counted = setting.late.counted(setting.local_steps)
        share = late_averages.squared_counts(setting, setting.late) / counted
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

    Source: docs/theory.md, averages late by whole rounds, rate.
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
