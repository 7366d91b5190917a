"""The bound of averages that are used some local steps late: brute force, oracles, its commands."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.convergence import allowed, bound, late_bound, late_moments, late_stability
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.late_stability import LateSystem
from analysis.convergence.lateness import Delay, Late, delay
from analysis.convergence.objectives.families import FAMILIES, same
from analysis.convergence.objectives.problems import Array, Quadratic
from analysis.convergence.setting import Setting
from analysis.convergence.simulate import run
from analysis.convergence.variants import RunSize, variants
from co2sim.errors import OptionError

SETTING = Setting(
    smoothness=2.0,
    noise=0.5,
    heterogeneity=0.3,
    gap=1.5,
    workers=4,
    rounds=50,
    local_steps=8,
    inner_step=0.001,
    outer_step=0.6,
    momentum=0.4,
    late=Late(steps=3),
)


def impulse(setting: Setting, at: int) -> list[float]:
    """The means of a run that moves by one gradient of 1, at one step: the algorithm itself."""
    late, tau = setting.late, setting.local_steps
    assert late is not None
    gamma, alpha = setting.inner_step, setting.outer_step
    x = anchor = momentum = 0.0
    flight: tuple[float, float] | None = None
    path = []
    for t in range(setting.rounds):
        for k in range(tau + 1):
            if flight is not None and k == late.steps:
                left, moved = flight
                momentum = setting.momentum * momentum + moved / (gamma * setting.penalty)
                anchor -= alpha * gamma * momentum
                x = anchor + late.keep * (x - left) - late.predict * late.steps / tau * moved
                flight = None
            if k == tau:
                break
            path.append(x)
            if t * tau + k == at:
                x -= gamma
        flight = (x, anchor - x)
    return path


def gap_map(setting: Setting) -> tuple[Array, Array]:
    """The matrix from averaged gradients to z - mean, and what every step counts."""
    late, tau = setting.late, setting.local_steps
    assert late is not None
    size = setting.rounds * tau
    counts = np.array(
        [late.keep if step >= tau and step % tau < late.steps else 1.0 for step in range(size)]
    )
    eta = setting.outer_step * setting.inner_step / ((1 - setting.momentum) * setting.penalty)
    whole = eta / (1 - late.predict * late.steps / tau)
    columns = [
        np.where(np.arange(size) > step, -whole * counts[step], 0.0)
        - np.array(impulse(setting, step))
        for step in range(size)
    ]
    return np.array(columns).T, counts


MIXES = st.tuples(st.sampled_from([1.0, 0.75, 0.5, 0.1]), st.sampled_from([0.0, 0.25, 0.5, 0.9]))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5).flatmap(lambda tau: st.tuples(st.just(tau), st.integers(1, tau))),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.25, 0.6, 0.9]),
    st.sampled_from([1.0, 0.2, 1.7]),
    st.sampled_from([1.0, 2.0]),
    MIXES,
)
def test_constants_cover_the_exact_gap(
    steps: tuple[int, int],
    rounds: int,
    beta: float,
    alpha: float,
    penalty: float,
    mix: tuple[float, float],
) -> None:
    """C is at least the squared norm of the map from gradients to gaps, N its mean square.

    Both are weighted by what steps count. The map is that of the algorithm, run on impulses.
    """
    setting = replace(
        SETTING,
        local_steps=steps[0],
        rounds=rounds,
        momentum=beta,
        outer_step=alpha,
        penalty=penalty,
        inner_step=1.0,
        late=Late(steps=steps[1], keep=mix[0], predict=mix[1]),
    )
    exact, counts = gap_map(setting)
    assert setting.late is not None
    by_gradients, by_noise = bound.gap_constants(setting)
    root = np.sqrt(counts)
    norm = np.linalg.norm(root[:, None] * exact / root, 2) ** 2
    mean = (counts[:, None] * exact**2).sum() / (rounds * setting.late.counted(steps[0]))
    assert norm <= by_gradients * (1 + 1e-9) + 1e-12
    assert mean <= by_noise * (1 + 1e-9) + 1e-12


def test_noise_constant_is_exact() -> None:
    """N is the mean square of the map of a long run, but for its ends."""
    setting = replace(SETTING, local_steps=3, rounds=60, inner_step=1.0)
    for late in (Late(steps=2), Late(steps=3, keep=0.5, predict=0.5)):
        ruled = replace(setting, late=late)
        exact, counts = gap_map(ruled)
        mean = (counts[:, None] * exact**2).sum() / (60 * late.counted(3))
        assert mean == pytest.approx(bound.gap_constants(ruled)[1], rel=0.05)


@pytest.mark.parametrize(("alpha", "beta", "d"), [(0.6, 0.4, 3), (1.3, 0.0, 8), (0.2, 0.9, 1)])
def test_constants_of_the_page(alpha: float, beta: float, d: int) -> None:
    """With all kept C and N are those of the page, by hand."""
    setting = replace(SETTING, outer_step=alpha, momentum=beta, late=Late(steps=d))
    tau, eta, b = 8, alpha * 0.001 / (1 - beta), beta / (1 - beta)
    apart = abs(eta - 0.001)
    by_gradients = (
        (eta * b * tau) ** 2
        + eta * b * apart * (2 * d * tau + 1.5 * tau * (tau - 1))
        + apart**2 * (tau * (tau - 1) / 2 + tau * (2 * d - 1) + d * (d - 1) / 2)
    )
    by_noise = eta**2 * tau * beta**2 / (1 - beta**2) + apart**2 * ((tau - 1) / 2 + d)
    assert bound.gap_constants(setting) == pytest.approx((by_gradients, by_noise), rel=1e-12)


def test_nothing_is_stale_with_an_outer_step_of_1() -> None:
    """All kept, alpha = Lambda = 1, beta = 0: no gap, no staleness, and gamma L < 1 is enough."""
    plain = replace(SETTING, outer_step=1.0, momentum=0.0)
    assert bound.gap_constants(plain) == (0.0, 0.0)
    assert bound.largest_inner_step(plain) == pytest.approx(1 / 2.0)
    found = bound.evaluate(plain)
    assert isinstance(found, Bound)
    assert found.staleness == 0
    local = bound.evaluate(replace(plain, late=None, delay=0))
    assert isinstance(local, Bound)
    assert (found.optimization, found.noise) == (local.optimization, local.noise)
    assert found.drift > local.drift


def followed(setting: Setting) -> float:
    """The drift of the page, every round followed."""
    late, tau = setting.late, setting.local_steps
    assert late is not None
    pull, slope = setting.inner_step * math.sqrt(setting.heterogeneity), 2 * setting.inner_step
    noise = setting.inner_step**2 * setting.noise * (1 - 1 / setting.workers)
    r = u = total = 0.0
    for t in range(setting.rounds):
        u = 0.0
        for k in range(tau):
            if t and k == late.steps:
                r = late.keep * u
            total += (late.keep if t and k < late.steps else 1) * r * r
            u, r = (
                math.hypot(u + slope * r + pull, noise**0.5),
                math.hypot((1 + slope) * r + pull, noise**0.5),
            )
        if t and late.steps == tau:
            r = late.keep * u
    return total / (setting.rounds * late.counted(tau))


@pytest.mark.parametrize("rounds", [1, 2, 7, 400])
@pytest.mark.parametrize("step", [0.001, 0.03, 0.06])
@pytest.mark.parametrize("late", [Late(steps=3), Late(steps=8, keep=0.5), Late(steps=1, keep=0.2)])
def test_drift_is_what_following_every_round_gives(late: Late, step: float, rounds: int) -> None:
    """From above, to the share that may be left open."""
    setting = replace(SETTING, late=late, inner_step=step, rounds=rounds)
    exact, found = followed(setting), late_bound.drift(setting, late)
    assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-5)


def test_drift_of_any_length_is_found_at_once() -> None:
    """10^30 rounds have the drift of 10^4 where it is bounded; else there is no number."""
    long = replace(SETTING, rounds=10**30)
    short = replace(SETTING, rounds=10**4)
    assert bound.drift(long) == pytest.approx(bound.drift(short), rel=1e-3)
    assert bound.drift(replace(long, inner_step=0.2)) == math.inf


@pytest.mark.parametrize("d", [2, 4, 8])
@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_cost_of_lateness_in_drift(d: int, keep: float) -> None:
    """Small steps: 1 + 3 keep p + 3 keep^2 p^2 times the drift of waiting for unequal data.

    And 1 + 2 keep^2 p for equal data; tau is 800 so that sums are integrals. All steps count alike,
    in a recursion of its own.
    """
    tau, steps = 800, 100 * d
    unequal = equal = 0.0
    ages = keep * steps + tau - steps, keep**2 * steps + tau - steps
    for k in range(tau):
        at = k if k < steps else k - steps
        start = (ages[0], ages[1]) if k < steps else (keep * steps, keep**2 * steps)
        unequal += (start[0] + at) ** 2 / tau
        equal += (start[1] + at) / tau
    p = d / 8
    assert unequal / (tau**2 / 3) == pytest.approx(1 + 3 * keep * p + 3 * (keep * p) ** 2, rel=5e-3)
    assert equal / (tau / 2) == pytest.approx(1 + 2 * keep**2 * p, rel=5e-3)
    small = replace(
        SETTING, local_steps=tau, inner_step=1e-9, rounds=10**6, late=Late(steps=steps), noise=0.0
    )
    waiting = replace(small, late=None, delay=0)
    ratio = bound.drift(small) / bound.drift(waiting)
    assert ratio == pytest.approx(1 + 3 * p + 3 * p * p, rel=5e-3)


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("family", ["spread", "two kinds", "quadratics apart"])
def test_oracle_agrees_with_the_simulator(family: str, steps: int) -> None:
    """A, drift, last mean: the simulated means lie within 4 standard errors of the exact ones."""
    problem = FAMILIES[family](4)
    assert isinstance(problem, Quadratic)
    which = variants(
        np.array([0.02, 0.1, 0.05]),
        outer_step=np.array([0.5, 1.0, 1.2]),
        momentum=np.array([0.5, 0.0, 0.2]),
        penalty=np.array([1.0, 1.0, 2.0]),
        noise=np.array([1.0, 0.5, 2.0]),
        keep=np.array([1.0, 0.5, 0.3]),
        predict=np.array([0.0, 0.5, 0.4]),
    )
    size = RunSize(workers=4, rounds=15, local_steps=5, seeds=1500, late_steps=steps)
    outcome = run(problem, which, size)
    exact = late_moments.exact(problem, which, size, spread=True)
    for measured, expected in (
        (outcome.gradient, exact.gradient),
        (outcome.drift, exact.drift),
        ((outcome.final**2).sum(-1), exact.final[1].sum(-1)),
        (outcome.final.sum(-1), exact.final[0].sum(-1)),
    ):
        error = measured.std(axis=1, ddof=1) / math.sqrt(size.seeds)
        assert (np.abs(measured.mean(axis=1) - expected) <= 4 * error + 1e-12).all()
    np.testing.assert_allclose(outcome.spread, exact.spread, rtol=0.05, atol=1e-12)


def test_mean_is_that_of_local_sgd() -> None:
    """All kept and an outer step of 1: the mean ends where local SGD's does, to 1e-12."""
    problem = same(1.0, 0.3)
    size = RunSize(workers=4, rounds=12, local_steps=4, seeds=3, delay=0)
    local = run(problem, variants(0.1, noise=1.0), size)
    for steps in (1, 3, 4):
        # the last average has not arrived, which does not move the mean
        late = run(problem, variants(0.1, noise=1.0), replace(size, late_steps=steps))
        np.testing.assert_allclose(late.final, local.final, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(late.gradient, local.gradient, rtol=1e-12)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 6).flatmap(lambda tau: st.tuples(st.just(tau), st.integers(1, tau))),
    st.floats(0.01, 2.2),
    st.floats(0.05, 3),
    st.floats(0, 0.95),
    MIXES,
)
def test_jury_is_what_impulses_do(
    steps: tuple[int, int], load: float, alpha: float, beta: float, mix: tuple[float, float]
) -> None:
    """Stable exactly if the matrix of a round, made here by hand, has no eigenvalue above 1."""
    (tau, d), ratio = steps, 1 - load
    columns = []
    for anchor, momentum, x in np.eye(3):
        moved = anchor - x
        m = beta * momentum + moved
        ahead = anchor - alpha * m
        now = ahead + mix[0] * (ratio**d - 1) * x - mix[1] * d / tau * moved
        columns.append((ahead, m, ratio ** (tau - d) * now))
    radius = np.abs(np.linalg.eigvals(np.array(columns).T)).max()
    apart = abs(mix[0] * ratio ** (tau - d) * (ratio**d - 1))
    if min(abs(radius - 1), abs(apart - 1)) < 1e-6:
        return
    system = LateSystem(load, tau, d, alpha, beta, *mix)
    assert bool(late_stability.is_stable(system)) is bool(radius < 1 and apart < 1)


def test_edges_of_the_page() -> None:
    """With d = tau and beta = 0 the condition of the page is (alpha - 1) q < 1."""
    edges = late_stability.edges(LateSystem(0.0, 4, 4, np.array([3.0, 5.0])))
    q = 1 - (1 - edges) ** 4
    assert (np.array([3.0, 5.0]) - 1) * q == pytest.approx([1.0, 1.0], abs=1e-9)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", Delay(3, 0)),
        ("3 steps", Delay(3, 0)),
        ("1 step", Delay(1, 0)),
        ("1 round", Delay(None, 1)),
        ("2rounds", Delay(None, 2)),
        ("0", Delay(None, 0)),
        ("0 steps", Delay(None, 0)),
    ],
)
def test_delays_as_they_are_given(text: str, expected: Delay) -> None:
    """A number is of local steps; rounds are said; 0 is no delay."""
    assert delay(text) == expected
    assert delay(str(expected)) == expected


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "3 s", "1 turn", "auto"])
def test_wrong_delays_are_refused(text: str) -> None:
    """In one line that names the option and both units."""
    with pytest.raises(OptionError, match=r"--delay is .*; it must be a number of local steps"):
        delay(text)


@pytest.mark.parametrize(
    "change",
    [
        {"late": Late(steps=9)},
        {"late": Late(steps=3, predict=0.5), "most_penalty": 2.0},
    ],
)
def test_what_is_not_covered_is_refused(change: dict[str, object]) -> None:
    """A delay beyond the round, and prediction with a penalty that varies."""
    with pytest.raises(OptionError):
        replace(SETTING, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"steps": 0}, {"keep": 0.0}, {"keep": 1.1}, {"predict": 1.0}])
def test_shares_out_of_range_are_refused(change: dict[str, float]) -> None:
    """What is thrown away altogether has no bound, what is predicted has to die out."""
    with pytest.raises(OptionError):
        replace(Late(steps=1), **change)  # type: ignore[arg-type]


def test_a_penalty_that_varies_multiplies() -> None:
    """By its largest value; the distances of both ends of its range count."""
    small = replace(SETTING, outer_step=1.0, momentum=0.0, inner_step=1e-4)
    constant, variable = bound.evaluate(small), bound.evaluate(replace(small, most_penalty=2.0))
    assert isinstance(constant, Bound)
    assert isinstance(variable, Bound)
    assert variable.optimization == pytest.approx(2 * constant.optimization)
    apart = 1e-4 / 2
    expected = apart**2 * (8 * 7 / 2 + 8 * 5 + 3)
    assert bound.gap_constants(replace(small, most_penalty=2.0))[0] == pytest.approx(expected)


@pytest.mark.parametrize("mix", [(1.0, 0.0), (0.5, 0.5), (0.75, 0.25), (0.3, 0.0)])
@pytest.mark.parametrize("tune", [True, False])
def test_allowed_delay_is_the_last_of_all_that_hold(
    mix: tuple[float, float], *, tune: bool
) -> None:
    """Bisection finds what trying every delay does, for what is allowed and what is feasible."""
    late = Late(steps=1, keep=mix[0], predict=mix[1])
    setting = replace(SETTING, late=late, local_steps=12, inner_step=0.02, momentum=0.0)
    waiting = replace(setting, late=None, delay=0)
    base = bound.evaluate(bound.tuned(waiting) if tune else waiting)
    assert isinstance(base, Bound)
    totals = []
    for d in range(1, 13):
        each = replace(setting, late=replace(late, steps=d))
        found = bound.evaluate(bound.tuned(each) if tune else each)
        totals.append(found.total if isinstance(found, Bound) else math.inf)
    for price in (0.02, 0.3, 1.0):
        answer = allowed.allowed(setting, price, tune=tune)
        held = [total / base.total - 1 <= price for total in totals]
        assert answer.steps == (held.index(False) if False in held else 12)
        assert answer.feasible == sum(math.isfinite(total) for total in totals)
        assert answer.lines[-1].delay == Delay(None, 1)


def test_allowed_delay_without_a_bound() -> None:
    """Where even waiting has no bound, or costs nothing, that is what is said."""
    lost = allowed.allowed(replace(SETTING, inner_step=5.0), 0.5, tune=False)
    assert (lost.steps, lost.feasible) == (None, None)
    free = replace(SETTING, noise=0.0, heterogeneity=0.0, gap=0.0, outer_step=1.0, momentum=0.0)
    assert allowed.allowed(free, 0.0, tune=False).steps == 8


def test_infeasible_says_where_it_would_be() -> None:
    """Beyond the condition there is no number, and a hair below its edge there is."""
    edge = bound.largest_inner_step(SETTING)
    assert isinstance(bound.evaluate(replace(SETTING, inner_step=edge * 1.001)), Infeasible)
    assert isinstance(bound.evaluate(replace(SETTING, inner_step=edge * 0.999)), Bound)
