"""The constants of averages in fragments, against the recursion of one fragment as matrices."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.convergence import bound, late_averages
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.bound_report import why_infeasible
from analysis.convergence.setting import Array, Late, Setting

RECOMMENDED = Setting(
    smoothness=10.0,
    noise=1.0,
    gap=5.0,
    workers=8,
    rounds=1000,
    local_steps=12,
    inner_step=0.005,
    late=Late(steps=1, keep=0.5, predict=0.5, fragments=12),
)


@st.composite
def settings(draw: st.DrawFn) -> Setting:
    """Settings in two fragments or more, with a load below 1."""
    tau = draw(st.integers(2, 8))
    steps = draw(st.integers(1, tau))
    keep = draw(st.sampled_from([1.0, 1.0, 0.75, 0.5, 0.1]))
    predict = draw(st.sampled_from([0.0, 1 - keep, 0.9]))
    late = Late(steps=steps, keep=keep, predict=predict, fragments=draw(st.integers(2, tau)))
    return Setting(
        smoothness=2.0,
        noise=0.5,
        heterogeneity=draw(st.sampled_from([0.0, 0.3])),
        gap=1.5,
        workers=draw(st.integers(2, 4)),
        rounds=draw(st.integers(1, 9)),
        local_steps=tau,
        inner_step=0.001,
        outer_step=draw(st.sampled_from([0.3, 1.0, 4.0, 100.0])),
        momentum=draw(st.sampled_from([0.0, 0.4, 0.9])),
        late=late,
    )


def late_of(setting: Setting) -> Late:
    """How averages are late."""
    assert setting.late
    return setting.late


def response(setting: Setting, start: int, *, mean: bool) -> Array:
    """What each gradient adds to x of a fragment, [step, gradient], that launches after `start`.

    That of the mean of workers, or of one worker's distance from it.
    """
    late, tau = late_of(setting), setting.local_steps
    steps = setting.rounds * tau
    x = np.zeros(steps)
    left, anchor, momentum, moved = (np.zeros(steps) for _ in range(4))
    rows = []
    for now in range(steps):
        since = now - start
        if since >= late.steps and (since - late.steps) % tau == 0:
            momentum = setting.momentum * momentum + moved / setting.penalty
            anchor = anchor - setting.outer_step * momentum
            x = late.keep * (x - left) + (anchor - late.carried(tau) * moved if mean else 0.0)
        if since >= 0 and since % tau == 0:
            left, moved = x.copy(), anchor - x
        rows.append(x.copy())
        x = x - setting.inner_step * (np.arange(steps) == now)
    return np.array(rows)


def counts_of(setting: Setting, start: int) -> Array:
    """What each step counts for a fragment."""
    late = late_of(setting)
    since = np.arange(setting.rounds * setting.local_steps) - start
    early = (since >= 0) & (since % setting.local_steps < late.steps)
    return np.where(early, late.keep, 1.0)


def gaps(setting: Setting) -> list[tuple[Array, Array, Array]]:
    """By fragment, z - mean as a matrix of gradients, its counts, and the largest of all."""
    starts = late_of(setting).launches(setting.local_steps)
    counts = [counts_of(setting, start) for start in starts]
    most = np.max(counts, axis=0)
    steps = len(most)
    before = np.tril(np.ones((steps, steps)), -1)
    return [
        (
            -setting.virtual_step * before * count - response(setting, start, mean=True),
            count,
            most,
        )
        for start, count in zip(starts, counts, strict=True)
    ]


@given(settings())
def test_omega_and_n_cover_the_gap_of_every_fragment(setting: Setting) -> None:
    """Omega the norm of weights, and N their squares, summed as the proof does."""
    by_gradients, by_noise = bound.gap_constants(setting)
    length = setting.rounds * late_of(setting).counted(setting.local_steps)
    for gap, count, most in gaps(setting):
        weights = np.abs(np.sqrt(most)[:, None] * gap / np.sqrt(count))
        assert np.linalg.norm(weights, 2) <= by_gradients * (1 + 1e-9)
        assert (most @ gap**2).sum() / length <= by_noise * (1 + 1e-9)


@given(settings())
def test_windows_are_the_local_progress_that_workers_still_hold(setting: Setting) -> None:
    """Their sums and those of their squares are the largest of any fragment; nu is their norm."""
    tau, late = setting.local_steps, late_of(setting)
    sums = np.zeros(2)
    for start in late.launches(tau):
        held = -response(setting, start, mean=False) / setting.inner_step
        sums = np.maximum(sums, [(held.sum(axis=1) ** 2).sum(), (held**2).sum()])
        nu = late_averages.reach(setting) / (setting.inner_step * setting.smoothness)
        assert np.linalg.norm(held, 2) <= nu * (1 + 1e-9)
    lengths, squares, _ = late_averages._windows(tau, setting.rounds, late)
    assert [lengths, squares] == pytest.approx(list(sums))


def test_the_recommended_setting_has_the_constants_of_the_page() -> None:
    """E = 1.043 gamma, Omega = 0.394 gamma, load 1.83 gamma L, gamma L < 1/7.96 = 0.126."""
    gamma, length = RECOMMENDED.inner_step, RECOMMENDED.smoothness
    omega, _ = bound.gap_constants(RECOMMENDED)
    assert RECOMMENDED.virtual_step / gamma == pytest.approx(1.043, abs=5e-4)
    assert omega / gamma == pytest.approx(0.394, abs=5e-4)
    assert bound.load(RECOMMENDED) / (gamma * length) == pytest.approx(1.83, abs=5e-3)
    assert bound.largest_inner_step(RECOMMENDED) * length == pytest.approx(1 / 7.963, rel=1e-4)
    reached = bound.evaluate(bound.tuned(RECOMMENDED))
    assert isinstance(reached, Bound)
    assert reached.total == pytest.approx(0.191, abs=5e-4)


@given(settings(), st.floats(0.05, 0.99))
def test_a_step_is_feasible_where_both_conditions_hold(setting: Setting, share: float) -> None:
    """Just within the largest step there is a finite bound, beyond it none, and it is said why."""
    edge = bound.largest_inner_step(setting)
    within = bound.evaluate(replace(setting, inner_step=share * edge))
    beyond = replace(setting, inner_step=1.001 * edge)
    assert isinstance(within, Bound)
    assert math.isfinite(within.total)
    assert isinstance(bound.evaluate(beyond), Infeasible)
    assert ("omega" in why_infeasible(beyond)) is (bound.load(beyond) >= 1)
    assert ("nu" in why_infeasible(beyond)) is (late_averages.reach(beyond) >= 1)


@pytest.mark.parametrize("change", [{"workers": 1}, {"noise": 0.0}])
def test_workers_that_cannot_drift_apart_need_no_second_condition(change: dict[str, float]) -> None:
    """One alone, and several without noise on equal data: no drift, and the load decides."""
    setting = replace(RECOMMENDED, **change)  # type: ignore[arg-type]
    assert bound.drift(setting) == 0.0
    assert bound.largest_inner_step(setting) == pytest.approx(
        setting.inner_step / bound.load(setting)
    )


def test_many_rounds_take_no_longer_than_few() -> None:
    """1e60 rounds: the optimization term dies out, all others stay."""
    reached = bound.evaluate(replace(RECOMMENDED, rounds=10**60))
    assert isinstance(reached, Bound)
    assert reached.optimization < 1e-50
    assert reached.drift == pytest.approx(bound.evaluate(RECOMMENDED).drift, rel=0.01)  # type: ignore[union-attr]
