"""The bound of a clipped momentum: its constants and its limits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_bound import LATE
from test_bound import settings as all_settings
from theory.exact_moments import by_hand

from analysis.convergence import bound, clipping
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.setting import Array, Late, Setting

SETTING = replace(LATE, late=None)


@st.composite
def settings(draw: st.DrawFn) -> Setting:
    """Feasible settings that clipping is covered for, by rounds or by local steps late."""
    setting = draw(all_settings())
    late = setting.late and Late(steps=setting.late.steps)
    setting = replace(setting, late=late)
    fraction = draw(st.floats(0.05, 0.95))
    return replace(setting, inner_step=fraction * bound.largest_inner_step(setting))


def evaluated(found: Bound | Infeasible | None) -> Bound:
    """A bound that is there."""
    assert isinstance(found, Bound)
    return found


# --- by the residual ------------------------------------------------------------------------------


@given(settings(), st.sampled_from([0.0, 0.5, 0.99]))
def test_without_a_residual_it_is_the_bound_without_clipping(
    setting: Setting, decay: float
) -> None:
    """All four terms, and the edge of the condition."""
    found = evaluated(clipping.with_residual(setting, 0.0, decay=decay))
    expected = evaluated(bound.evaluate(setting))
    for name in bound.TERMS:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12)
    beyond = replace(setting, inner_step=1.001 * bound.largest_inner_step(setting))
    assert clipping.with_residual(beyond, 0.3) == bound.evaluate(beyond)


def residual_map(setting: Setting, decay: float) -> Array:
    """The gap of the virtual iterate for running residuals r, by the algorithm itself.

    A column is the gap at all steps for r_t = 1 alone: an error of the momentum of s_t = 1/(1-a)
    and s_{t+1} = -a/(1-a), gradients of 1 in round t (so that y = h - r is 0), and z that
    therefore stays.
    """
    tau = setting.local_steps
    shift = 0 if setting.late or setting.delay else 1  # else s_t is charged to round t + 1

    def column(charged: int) -> list[float]:
        errors = {charged - shift: 1 / (1 - decay), charged + 1 - shift: -decay / (1 - decay)}
        return by_hand(
            setting,
            lambda step, _: float(step // tau == charged),
            lambda t, momentum: momentum - errors.get(t, 0.0) * tau / setting.penalty,
        )

    return -np.array([column(charged) for charged in range(shift, setting.rounds)]).T


@given(settings(), st.sampled_from([0.0, 0.5, 0.9]))
@example(replace(SETTING, local_steps=4, rounds=8, late=Late(steps=2)), 0.5)
@example(replace(SETTING, local_steps=3, rounds=8, delay=0), 0.5)
@example(replace(SETTING, local_steps=3, rounds=8, delay=2), 0.9)
def test_the_constant_of_the_residual_covers_the_exact_gap(setting: Setting, decay: float) -> None:
    """The root mean square over steps of the norms of the map from residuals is at most that."""
    exact = residual_map(setting, decay)
    by_step = exact.reshape(setting.rounds, setting.local_steps, -1)
    norms = [
        np.linalg.norm(by_step[:, k], 2) if by_step.size else 0.0
        for k in range(setting.local_steps)
    ]
    allowed = clipping.constants(setting, decay).residual
    assert np.sqrt(np.mean(np.square(norms))) <= allowed * (1 + 1e-9)


@pytest.mark.parametrize(
    ("decay", "change"),
    [
        (0.0, {"delay": 1}),
        (0.5, {"delay": 2, "momentum": 0.6}),
        (0.0, {"delay": 0, "outer_step": 9.0}),
        (0.5, {"delay": 0, "outer_step": 9.0}),
        (0.0, {"late": Late(steps=2), "momentum": 0.0}),
        (0.5, {"late": Late(steps=8), "momentum": 0.0}),
    ],
)
def test_the_constant_of_the_residual_is_reached(decay: float, change: dict[str, object]) -> None:
    """By constant errors in a long run the root mean square at every step is what is allowed."""
    setting = replace(SETTING, rounds=300, **change)  # type: ignore[arg-type]
    rows = np.abs(residual_map(setting, decay)).reshape(300, setting.local_steps, -1)[-1]
    reached = math.sqrt((rows.sum(axis=1) ** 2).mean())
    allowed = clipping.constants(setting, decay).residual
    assert reached <= allowed * (1 + 1e-9)
    assert reached >= 0.9 * allowed


# --- before a run ---------------------------------------------------------------------------------


@given(settings(), st.floats(0.1, 10), st.floats(1.01, 50))
def test_clipped_noise_is_the_page(setting: Setting, largest: float, over: float) -> None:
    """The smaller of two sums, term by term by hand; none where gradients may clip, too."""
    setting = replace(setting, late=None)
    setting = replace(setting, inner_step=0.9 * bound.largest_inner_step(setting))
    tau, workers, eta, gamma = setting.local_steps, 4, setting.virtual_step, setting.inner_step
    phi = over * largest * tau / (setting.penalty * (1 - setting.momentum))
    assert clipping.threshold(setting, phi) == pytest.approx(over * largest)
    bias = 0.5 / (4 * workers * tau * (over - 1) * largest)
    free = evaluated(bound.evaluate(setting))
    by_noise, loose = bound.gap_constants(setting)[1], 1 - bound.load(setting)
    square = sum(k * k for k in range(tau)) / tau
    ramp, kick = gamma * math.sqrt(square) * bias, eta * math.sqrt(tau / workers * 0.5)
    weights = setting.delay - 1 + 1 / (1 - setting.momentum**2)
    at_end = eta**2 * tau * weights + gamma**2 * (tau - 1) / 2
    forms = [
        free.optimization
        + factor * free.noise
        + 4.0 / loose * (math.sqrt(spread * 0.5 / workers) + kick + ramp) ** 2
        + (math.sqrt(free.drift) + bias) ** 2
        for factor, spread in ((4, by_noise), (1, at_end))
    ]
    found = evaluated(clipping.with_noise(setting, largest, phi))
    assert found.total == pytest.approx(min(forms), rel=1e-6)
    assert clipping.with_noise(setting, largest, 0.999 * phi / over) is None


@given(settings(), st.floats(0.01, 1))
def test_clipped_gradients_are_slower_by_kappa(setting: Setting, part: float) -> None:
    """By M/Phi, with less room in the condition; a clip that is never reached costs nothing."""
    setting = replace(setting, late=None, noise=0.0)
    setting = replace(setting, inner_step=1e-3 * bound.largest_inner_step(setting))
    phi = part * setting.local_steps / (setting.penalty * (1 - setting.momentum))
    free = evaluated(bound.evaluate(setting))
    found = evaluated(clipping.without_noise(setting, 1.0, phi))
    assert found.total == pytest.approx(free.total / part)
    assert clipping.scaled_radius(setting, 1 / part) >= bound.gap_constants(setting)[0]
    unclipped = evaluated(clipping.without_noise(setting, 0.1 * part, phi))
    assert unclipped.total == pytest.approx(free.total, rel=1e-12)
    wide = replace(setting, inner_step=setting.inner_step * 2000)
    assert isinstance(clipping.without_noise(wide, 1.0, phi), Infeasible)


@given(settings(), st.floats(0.0, 10), st.sampled_from([0.001, 0.01, 0.3]))
def test_the_least_clip_adds_the_share(setting: Setting, largest: float, share: float) -> None:
    """Of its drift term alone, bias included, exactly that share of the bound is added."""
    setting = replace(setting, late=None)
    setting = replace(setting, inner_step=0.5 * bound.largest_inner_step(setting))
    phi = clipping.least_phi(setting, largest, share)
    free, found = bound.evaluate(setting), clipping.with_noise(setting, largest, phi)
    assert isinstance(free, Bound)
    assert evaluated(found).drift - free.drift == pytest.approx(share * free.total, rel=1e-6)


def test_the_floor_of_a_fixed_clip() -> None:
    """At least 6/7 of sigma^2/(4 G Lambda phi) where that is a sixteenth of Phi; falls with phi."""
    setting = replace(SETTING, penalty=2.0, noise=1.0)
    beyond = 16 * setting.local_steps / (4 * setting.workers * 4 * (1 - setting.momentum))
    phi = math.sqrt(beyond)  # g* = Phi/16
    lowest = 1 / (4 * 4 * 2 * phi)
    assert clipping.threshold(setting, phi) == pytest.approx(16 * lowest)
    assert 6 / 7 * lowest <= math.sqrt(clipping.floor(setting, phi)) <= lowest
    assert 0 < clipping.floor(setting, 2 * phi) < clipping.floor(setting, phi)
    assert clipping.floor(setting, 0.01 * phi) == 0.0  # the proposition says nothing
    assert clipping.floor(setting, math.inf) == 0.0
    assert clipping.floor(replace(setting, noise=0.0), phi) == 0.0
