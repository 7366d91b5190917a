"""The bound of runs whose outer momentum is clipped, quantized or otherwise in error.

`with_residual` needs what a run recorded, `with_noise` and `without_noise` only the clip and the
largest partial derivative, and `floor` is what no step size gets below. Theorems and their proofs:
docs/theory-proofs.md, proofs for clipping.
"""

import math
from dataclasses import dataclass, replace

from analysis.convergence import bound
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.setting import Setting
from co2sim.common.errors import OptionError
from co2sim.common.validation import above, at_least

SHARE = 0.01
"""By what share of the bound the bias of a recommended clip may raise it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What `with_residual` adds up: omega, N, and what the residual is multiplied by.

    `residual` is its factor in the gap of the virtual iterate, `last` that beside the drift.
    """

    by_gradients: float
    by_noise: float
    residual: float
    last: float


def constants(setting: Setting, decay: float = 0.0) -> Constants:
    """The constants of `with_residual`, for a running mean of the residual or, with 0, itself.

    Source: docs/theory-proofs.md, theorem 1.
    """
    by_gradients, by_noise = bound.gap_constants(setting)
    tau = setting.local_steps
    lengths = (_length(setting, k, decay) for k in range(tau))
    return Constants(
        by_gradients=by_gradients,
        by_noise=by_noise,
        residual=tau * math.sqrt(sum(length * length for length in lengths) / tau),
        last=math.sqrt(setting.most_penalty or 1.0),
    )


def _length(setting: Setting, k: int, decay: float) -> float:
    """What tau times the residual is multiplied by in the gap at step k of a round, at most.

    Without a delay, or late by local steps, the weights of residuals of age n are those of
    (1 - beta) beta^n eta/(1 - decay); terms of gamma are opposed to the first of them. With a
    penalty that varies they need not be.
    """
    eta, gamma, beta = setting.virtual_step, setting.inner_step, setting.momentum
    most, ahead = setting.most_penalty, gamma * k / setting.local_steps
    if setting.late is None and setting.delay:
        return eta * (setting.delay + decay / (1 - decay)) + ahead * math.sqrt(most or 1.0)
    early = setting.late is not None and k < setting.late.steps
    newest, older = (eta * part / (1 - decay) for part in (1 - beta, beta))
    if most is not None:
        return ahead * math.sqrt(most) + newest + older + (gamma * most if early else 0.0)
    if early:
        return ahead + abs(gamma - newest) + older
    return abs(ahead - newest) + older


def with_residual(setting: Setting, residual: float, *, decay: float = 0.0) -> Bound | Infeasible:
    """The bound of a run whose momentum had an error, of which only its size is known.

    `residual` is eps, the root of the mean over rounds of E|s|^2. s = Lambda (u - m)/tau is the
    error of a momentum m that should have been u, in units of one gradient; Lambda counts 1 if it
    varies. With a `decay` eps is that of r <- decay r + (1 - decay) s instead, which errors of
    changing sign hardly raise. What the residual adds is in the staleness and the drift term.

    Source: docs/theory-proofs.md, theorem 1.
    """
    _check(setting)
    at_least("the clipping residual", residual, 0)
    if not 0 <= decay < 1:
        raise OptionError(f"the decay of the running residual is {decay:g}; it must be in [0, 1)")
    return by_residual(setting, alone(setting), constants(setting, decay), residual)


def by_residual(
    setting: Setting, parts: Bound, used: Constants, residual: float
) -> Bound | Infeasible:
    """The sum of `with_residual`, for constants that may be wrong; `parts` are from `alone`."""
    deviation = math.sqrt(setting.noise / setting.workers)
    gap = math.sqrt(used.by_noise) * deviation + used.residual * residual
    return _added(setting, parts, used.by_gradients, gap, used.last * residual)


def alone(setting: Setting) -> Bound:
    """What needs no condition: optimization, noise and drift, for a penalty of 1 if it varies."""
    smooth, eta = setting.smoothness, setting.virtual_step
    return Bound(
        optimization=2 * setting.gap / (eta * setting.rounds * setting.local_steps),
        noise=smooth * eta * setting.noise / setting.workers,
        staleness=0.0,
        drift=smooth**2 * bound.drift(setting),
    )


def _added(
    setting: Setting, parts: Bound, by_gradients: float, gap: float, beside_drift: float
) -> Bound | Infeasible:
    """The four terms, from omega, what else is in the gap, and what is beside the drift."""
    load = setting.smoothness * (setting.virtual_step + 2 * by_gradients)
    if infeasible := bound.outside(setting, load):
        return infeasible
    factor = setting.most_penalty or 1.0
    far = setting.smoothness * gap
    apart = math.sqrt(parts.drift) + beside_drift
    return Bound(
        optimization=factor * parts.optimization,
        noise=factor * parts.noise,
        staleness=factor * far * far / (1 - load),
        drift=factor * apart * apart,
    )


def covers_residuals(setting: Setting) -> bool:
    """Whether Theorem 1 is about how averages are late: not where less than everything is kept."""
    late = setting.late
    return late is None or (late.keep == 1 and late.predict == 0)


def _check(setting: Setting) -> None:
    if setting.late is not None and not covers_residuals(setting):
        raise OptionError(
            "the bound of a momentum with an error covers late averages with keep 1 and predict 0"
            f" only; keep is {setting.late.keep:g}, predict {setting.late.predict:g}"
        )


# --- before a run: from the clip and the largest partial derivative ------------------------------


def threshold(setting: Setting, phi: float) -> float:
    """Phi = Lambda (1 - beta) phi/tau: mean gradients of a round are never clipped below it."""
    return setting.penalty * (1 - setting.momentum) * phi / setting.local_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseConstants:
    """What `with_noise` adds up.

    `at_step` and `at_end` are N and N', for noise that is applied at its own step or at the end of
    a round; `kick` is what the clipped part of the noise is multiplied by in the gap, and `bias`
    the largest mean of what is clipped off a round, of which the gap has `ramp` times as much.
    `square` is its factor in the noise term.
    """

    by_gradients: float
    at_step: float
    at_end: float
    kick: float
    ramp: float
    bias: float
    square: float


def noise_constants(setting: Setting, largest: float, phi: float) -> NoiseConstants:
    """The constants of `with_noise`. Source: docs/theory-proofs.md, clipped noise."""
    tau, eta, gamma = setting.local_steps, setting.virtual_step, setting.inner_step
    by_gradients, by_noise = bound.gap_constants(setting)
    apart = eta - gamma
    within = (tau - 1) / 2
    above_largest = threshold(setting, phi) - largest
    return NoiseConstants(
        by_gradients=by_gradients,
        at_step=by_noise,
        at_end=max(0.0, by_noise - apart * apart * within) + gamma * gamma * within,
        kick=eta * math.sqrt(tau),
        ramp=gamma * math.sqrt((tau - 1) * (2 * tau - 1) / 6),
        bias=setting.noise / (4 * setting.workers * tau * above_largest),
        square=4.0,
    )


def with_noise(setting: Setting, largest: float, phi: float) -> Bound | Infeasible | None:
    """The bound where noise is clipped and mean gradients are not; None if they may be.

    `largest` is M: no partial derivative of any f_i exceeds it at any point that a worker visits.

    Source: docs/theory-proofs.md, clipped noise.
    """
    _check_prior(setting, largest, phi)
    if threshold(setting, phi) <= largest:
        return None
    return by_noise(setting, alone(setting), noise_constants(setting, largest, phi))


def by_noise(setting: Setting, parts: Bound, used: NoiseConstants) -> Bound | Infeasible:
    """The smaller of two sums: with noise that counts at its own step, and at its round's end."""
    deviation = math.sqrt(setting.noise / setting.workers)
    bounds = []
    for spread, square in ((used.at_step, used.square), (used.at_end, 1.0)):
        gap = (math.sqrt(spread) + used.kick) * deviation + used.ramp * used.bias
        form = replace(parts, noise=square * parts.noise)
        terms = _added(setting, form, used.by_gradients, gap, used.bias)
        if isinstance(terms, Infeasible):
            return terms
        bounds.append(terms)
    return min(bounds, key=lambda form: form.total)


def slowdown(setting: Setting, largest: float, phi: float) -> float:
    """Kappa: at most by what clipping divides the sum of a round's gradients, of any element."""
    return max(1.0, largest / threshold(setting, phi))


def without_noise(setting: Setting, largest: float, phi: float) -> Bound | Infeasible:
    """The bound of a run without noise, whose gradients may be clipped: kappa times as slow.

    `largest` is as in `with_noise`. Source: docs/theory-proofs.md, clipped gradients.
    """
    _check_prior(setting, largest, phi)
    kappa = slowdown(setting, largest, phi)
    parts = alone(replace(setting, noise=0.0))
    return by_slowdown(setting, parts, kappa, scaled_radius(setting, kappa))


def by_slowdown(
    setting: Setting, parts: Bound, kappa: float, by_gradients: float
) -> Bound | Infeasible:
    """Kappa times optimization and drift."""
    terms = _added(setting, parts, by_gradients, 0.0, 0.0)
    if isinstance(terms, Infeasible):
        return terms
    return replace(terms, optimization=kappa * terms.optimization, drift=kappa * terms.drift)


def scaled_radius(setting: Setting, kappa: float) -> float:
    """Omega of `without_noise`: steps apart from gamma count by their square roots."""
    eta, gamma, root = setting.virtual_step, setting.inner_step, math.sqrt(kappa)
    inside = (setting.local_steps - 1) / 2
    apart = max(abs(eta - gamma), abs(eta / root - gamma * root))
    return bound.gap_constants(setting)[0] + (apart - abs(eta - gamma)) * inside


def prior(setting: Setting, largest: float, phi: float) -> Bound | Infeasible | None:
    """The bound of a clip before any run; None where noise and gradients may both be clipped."""
    if setting.noise:
        return with_noise(setting, largest, phi)
    return without_noise(setting, largest, phi)


def least_phi(setting: Setting, largest: float, share: float = SHARE) -> float:
    """The least clip whose bias adds at most this share to the bound, in the drift term.

    It is in units of a sum of gradients, and grows as T^(1/4) with a step that falls as T^(-1/2).
    What `with_noise` adds besides, in the other terms, is of second order in the step. Raises
    OptionError where there is no bound.

    Source: docs/theory-proofs.md, clipped noise, how large a clip has to be.
    """
    _check_prior(setting, largest, 1.0)
    free = bound.evaluate(setting)
    if isinstance(free, Infeasible):
        raise OptionError(
            f"no clip can be recommended: the load is {free.load:.4g}, and no bound holds"
        )
    beyond = 0.0
    if setting.noise:
        bias = math.sqrt(free.drift + share * free.total) - math.sqrt(free.drift)
        beyond = setting.noise / (4 * setting.workers * setting.local_steps * bias)
    unit = setting.local_steps / (setting.penalty * (1 - setting.momentum))
    return unit * (largest + beyond)


def floor(setting: Setting, phi: float) -> float:
    """What A does not stay below in the limit of many rounds, with some noise on some quadratic.

    It holds for any step sizes that do not change with the rounds, and is 0 where the proposition
    says nothing.

    Source: docs/theory-proofs.md, what a fixed clip costs.
    """
    if math.isinf(phi):
        return 0.0
    lowest = setting.noise / (4 * setting.workers * setting.penalty * phi)
    limit = threshold(setting, phi)
    if not lowest or 2 * lowest >= limit:
        return 0.0
    rare = (1 - setting.momentum) * lowest / limit
    return (lowest * max(0.0, (1 - rare) ** 2 - lowest / (4 * (limit - 2 * lowest)))) ** 2


def _check_prior(setting: Setting, largest: float, phi: float) -> None:
    if setting.late is not None:
        raise OptionError(
            "before a run, the bound with a clip covers delays in rounds only; train, and give"
            " the clipping residual"
        )
    if setting.most_penalty is not None:
        raise OptionError(
            "before a run, the bound with a clip covers a constant penalty only; train, and give"
            " the clipping residual"
        )
    at_least("the largest partial derivative", largest, 0)
    above("phi", phi, 0)


def start_gradient(setting: Setting) -> float:
    """sqrt(2 L Delta): no gradient of f is longer where f is not above its value at the start."""
    return math.sqrt(2 * setting.smoothness * setting.gap)
