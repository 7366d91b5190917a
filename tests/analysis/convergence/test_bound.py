"""The convergence bound, of averages a round late and some steps late: constants, terms, tuning."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from theory.exact_moments import by_hand

from analysis.convergence import bound, bound_report
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.setting import Array, Delay, Late, Setting, delay
from co2sim.common.errors import OptionError

SETTING = Setting(
    smoothness=2.0,
    noise=0.5,
    gap=1.5,
    workers=4,
    rounds=50,
    local_steps=8,
    inner_step=0.001,
    outer_step=0.6,
    momentum=0.4,
)
LATE = replace(SETTING, heterogeneity=0.3, late=Late(steps=3))


@st.composite
def settings(draw: st.DrawFn) -> Setting:
    """Settings: averages some rounds late, or some local steps."""
    tau = draw(st.integers(1, 5))
    late = st.builds(
        Late,
        steps=st.integers(1, tau),
        keep=st.sampled_from([1.0, 0.75, 0.5, 0.1]),
        predict=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    )
    return replace(
        LATE,
        local_steps=tau,
        rounds=draw(st.integers(1, 8)),
        momentum=draw(st.sampled_from([0.0, 0.25, 0.6, 0.9])),
        outer_step=draw(st.sampled_from([0.2, 1.0, 1.7])),
        penalty=draw(st.sampled_from([1.0, 2.0])),
        delay=draw(st.integers(0, 3)),
        late=draw(st.none() | late),
    )


# --- constants: how far the virtual iterate is from the mean --------------------------------------


def gap_map(setting: Setting) -> tuple[Array, Array]:
    """The matrix from averaged gradients to z - mean, and what every step counts."""
    tau, size = setting.local_steps, setting.rounds * setting.local_steps
    counts = np.ones(size)
    if late := setting.late:
        counts = np.array(
            [late.keep if s >= tau and s % tau < late.steps else 1.0 for s in range(size)]
        )
    steps = np.arange(size)
    columns = [
        np.where(steps > step, -setting.virtual_step * counts[step], 0.0)
        - by_hand(setting, lambda s, _, step=step: float(s == step))  # type: ignore[misc]
        for step in range(size)
    ]
    return np.array(columns).T, counts


def is_whole(setting: Setting) -> bool:
    """Whether everything is kept and nothing predicted, so that omega is known."""
    return setting.late is None or (setting.late.keep == 1 and setting.late.predict == 0)


@given(settings())
@example(replace(LATE, local_steps=4, rounds=6, late=Late(steps=2, keep=0.5, predict=0.5)))
@example(replace(SETTING, local_steps=3, rounds=8, delay=2))
def test_constants_cover_the_exact_gap(setting: Setting) -> None:
    """Omega is at least the numerical radius of the map from gradients to gaps, N its mean square.

    The radius is that of the magnitudes of all elements. Where not all is kept it is C, at least
    the squared norm of the map.
    """
    unit = replace(setting, inner_step=1.0)
    exact, counts = gap_map(unit)
    root = np.sqrt(counts)
    by_gradients, by_noise = bound.gap_constants(unit)
    scaled = np.abs(root[:, None] * exact / root)
    radius = np.linalg.eigvalsh((scaled + scaled.T) / 2)[-1]
    assert radius <= by_gradients * (1 + 1e-9) + 1e-12
    if not is_whole(unit):
        assert np.linalg.norm(scaled, 2) <= by_gradients * (1 + 1e-9) + 1e-12
    counted = unit.late.counted(unit.local_steps) if unit.late else unit.local_steps
    mean = (counts[:, None] * exact**2).sum() / (unit.rounds * counted)
    assert mean <= by_noise * (1 + 1e-9) + 1e-12


@given(settings(), st.sampled_from([1.0, 1.5, 4.0, 30.0]), st.integers(0, 2**32 - 1))
@example(replace(LATE, outer_step=1.0, momentum=0.0, local_steps=1, late=Late(steps=1)), 30.0, 0)
def test_constants_cover_penalties_that_vary(setting: Setting, most: float, seed: int) -> None:
    """Gradients and gaps of a round count by the root of what its average is divided by.

    Penalties are random in [1, most], or at one of the ends; the map is that of one penalty, with
    what the anchor moves divided by that of the round.
    """
    late = setting.late and replace(setting.late, predict=0.0)
    unit = replace(setting, inner_step=1.0, penalty=1.0, late=late)
    rng = np.random.default_rng(seed)
    share = np.repeat(
        rng.choice([1.0, 1 / most, rng.uniform(1 / most, 1)], unit.rounds), unit.local_steps
    )
    whole, counts = gap_map(unit)
    still, _ = gap_map(replace(unit, outer_step=1e-12))  # the anchor hardly moves
    varied = still + (whole - still) * share
    root = np.sqrt(counts * share)
    scaled = np.abs(root[:, None] * varied / root)
    radius = np.linalg.eigvalsh((scaled + scaled.T) / 2)[-1]
    by_gradients, _ = bound.gap_constants(replace(unit, most_penalty=most))
    assert radius <= by_gradients * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize(
    ("alpha", "beta", "tau", "delay", "late"),
    [
        (0.6, 0.4, 3, 1, None),
        (1.3, 0.4, 4, 2, None),
        (1.0, 0.0, 5, 1, None),
        (0.6, 0.4, 3, 1, Late(steps=2)),
        (1.7, 0.25, 4, 1, Late(steps=2, predict=0.5)),
        (1.7, 0.5, 5, 1, Late(steps=2, keep=0.5, predict=0.25)),
        (1.0, 0.0, 4, 1, Late(steps=1, keep=0.1, predict=0.9)),
    ],
)
def test_constants_are_no_larger_than_they_must_be(
    alpha: float, beta: float, tau: int, delay: int, late: Late | None
) -> None:
    """Omega is the numerical radius of a long run, and N the mean square of its last round.

    Where not all is kept and no weights cancel, C is exactly the largest column of the weighted
    sums of a Cauchy-Schwarz inequality: rows of the map, with all steps of earlier rounds counted
    1, are summed, and then columns.
    """
    setting = replace(
        SETTING,
        local_steps=tau,
        rounds=40,
        outer_step=alpha,
        momentum=beta,
        inner_step=1.0,
        delay=delay,
        late=late,
    )
    exact, counts = gap_map(setting)
    size = np.abs(exact)
    by_gradients, _ = bound.gap_constants(setting)
    if is_whole(setting):
        radius = np.linalg.eigvalsh((size + size.T) / 2)[-1]
        assert by_gradients * 0.98 <= radius <= by_gradients
    else:
        turn = np.arange(len(counts)) // tau
        rows = np.where(turn[:, None] > turn, size / counts, size).sum(axis=1)
        columns = ((counts * rows)[:, None] * size).sum(axis=0) / counts
        assert by_gradients == pytest.approx(math.sqrt(columns.max()), rel=1e-5)
    _, endless = bound.gap_constants(replace(setting, rounds=10**12))
    counted = late.counted(tau) if late else tau
    last_round = (counts[:, None] * exact**2)[-tau:].sum() / counted
    assert endless == pytest.approx(last_round, rel=1e-5)


# --- drift ---------------------------------------------------------------------------------------


def followed(setting: Setting) -> float:
    """The drift of the page, every step of every round followed."""
    late, tau = setting.late, setting.local_steps
    arrival, keep = (late.steps, late.keep) if late else (0, 1.0)
    slope = setting.inner_step * setting.smoothness
    growth = 1.0 if setting.convex and slope <= 2 else 1 + slope
    pull = setting.inner_step * math.sqrt(setting.heterogeneity)
    noise = setting.inner_step * math.sqrt(setting.noise * (1 - 1 / setting.workers))
    r = total = 0.0
    for t in range(setting.rounds if late else 1):
        u = 0.0
        for k in range(tau):
            if t and k == arrival:
                r = keep * u
            total += (keep if t and k < arrival else 1) * r * r
            u, r = math.hypot(u + slope * r + pull, noise), math.hypot(growth * r + pull, noise)
        if t and arrival == tau:
            r = keep * u
    return total / (setting.rounds * late.counted(tau) if late else tau)


@given(
    late=st.sampled_from([None, Late(steps=3), Late(steps=8, keep=0.5), Late(steps=1, keep=0.2)]),
    step=st.sampled_from([0.001, 0.03, 0.06, 1.0, 1.01]),
    rounds=st.sampled_from([1, 2, 7, 400]),
    convex=st.booleans(),
    noise=st.sampled_from([0.0, 0.5]),
    heterogeneity=st.sampled_from([0.0, 0.3]),
)
@example(late=Late(steps=3), step=0.06, rounds=400, convex=False, noise=0.5, heterogeneity=0.3)
@example(late=Late(steps=8), step=0.03, rounds=400, convex=True, noise=0.5, heterogeneity=0.3)
@example(late=None, step=1.0, rounds=1, convex=True, noise=0.5, heterogeneity=0.3)
def test_drift_is_what_following_every_round_gives(
    *, late: Late | None, step: float, rounds: int, convex: bool, noise: float, heterogeneity: float
) -> None:
    """From above, to the share that may be left open."""
    setting = replace(LATE, late=late, inner_step=step, rounds=rounds, convex=convex)
    setting = replace(setting, noise=noise, heterogeneity=heterogeneity)
    exact, found = followed(setting), bound.drift(setting)
    if math.isfinite(found):
        assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-5)
    else:
        assert late is not None
        assert step > 0.05
        assert exact > 1e3 or rounds > 1


# --- the four terms and their condition ----------------------------------------------------------


@given(setting=settings(), fraction=st.floats(0.05, 0.95), convex=st.booleans())
def test_terms_are_those_of_the_page(setting: Setting, fraction: float, *, convex: bool) -> None:
    """With c_k the counts of steps: docs/theory-proofs.md, the late average in full."""
    step = fraction * bound.largest_inner_step(setting)
    setting = replace(setting, inner_step=step, convex=convex)
    found = bound.evaluate(setting)
    assert isinstance(found, Bound)
    late, tau, eta = setting.late, setting.local_steps, setting.virtual_step
    counts = np.ones((setting.rounds, tau))
    if late:
        counts[1:, : late.steps] = late.keep
    counted = late.counted(tau) if late else tau
    by_gradients, by_noise = bound.gap_constants(setting)
    taken = 2.0 * eta + 2 * 2.0 * by_gradients
    assert taken == pytest.approx(fraction)
    assert found.optimization == pytest.approx(2 * 1.5 / (eta * setting.rounds * counted))
    squares = (counts**2).sum(axis=1).mean() / counted
    assert found.noise == pytest.approx(2.0 * eta * 0.5 / 4 * squares)
    assert found.staleness == pytest.approx(4.0 * by_noise * 0.5 / 4 / (1 - taken))
    assert found.drift == pytest.approx(4.0 * bound.drift(setting))
    parts = {name: getattr(found, name) for name in bound.TERMS}
    assert found.total == pytest.approx(sum(parts.values()))
    assert parts[found.dominant] == max(parts.values())


@pytest.mark.parametrize("setting", [replace(SETTING, momentum=0.0, outer_step=1.0), LATE])
def test_outside_the_condition_there_is_no_number(setting: Setting) -> None:
    """A hair below the edge there is a bound, a hair beyond "infeasible" with the edge."""
    largest = bound.largest_inner_step(setting)
    if setting.late is None:  # without momentum the condition is gamma L (2 tau + 1) < 1
        assert largest == pytest.approx(1 / (setting.smoothness * (2 * setting.local_steps + 1)))
    assert isinstance(bound.evaluate(replace(setting, inner_step=largest * 0.999)), Bound)
    beyond = bound.evaluate(replace(setting, inner_step=largest * 1.001))
    assert isinstance(beyond, Infeasible)
    assert (beyond.largest_inner_step, beyond.load) == pytest.approx((largest, 1.001))
    wild = replace(SETTING, inner_step=1e60, outer_step=1e60, momentum=1 - 1e-16)
    assert isinstance(bound.evaluate(wild), Infeasible)


# --- the best step, the rate form, and the published bound ---------------------------------------


@pytest.mark.parametrize("setting", [SETTING, LATE])
def test_the_tuned_step_is_the_best_of_a_grid(setting: Setting) -> None:
    """No step of a fine grid over five decades has a smaller bound."""
    best = bound.evaluate(bound.tuned(setting))
    assert isinstance(best, Bound)
    largest = bound.largest_inner_step(setting)
    grid = [
        bound.evaluate(replace(setting, inner_step=largest * 10**-e))
        for e in np.arange(0.01, 5, 0.02)
    ]
    totals = [found.total for found in grid if isinstance(found, Bound)]
    assert best.total <= min(totals) * (1 + 1e-9)
    assert best.total == pytest.approx(min(totals), rel=1e-2)


def test_limits_of_tuning() -> None:
    """Without noise the infimum is at the edge of the condition; without a gap no step is best."""
    quiet = replace(SETTING, noise=0.0)
    found = bound.tuned(quiet)
    assert found.inner_step == pytest.approx(bound.largest_inner_step(quiet), rel=1e-8)
    assert isinstance(bound.evaluate(found), Bound)
    with pytest.raises(OptionError, match="gap"):
        bound.tuned(replace(SETTING, gap=0.0))
    with pytest.raises(OptionError, match="1e-60"):
        bound.tuned(replace(SETTING, smoothness=1e60, outer_step=1e60))


def test_published_bound_of_slowmo() -> None:
    """Its four parts, by hand: Wang et al., ICLR 2020, theorem 1; the penalty is not in it."""
    alpha, beta, tau, rounds, workers = 0.5, 0.3, 4, 10_000, 2
    setting = replace(
        SETTING,
        outer_step=alpha,
        momentum=beta,
        local_steps=tau,
        rounds=rounds,
        workers=workers,
        penalty=3.0,
    )
    steps = tau * rounds
    gamma = math.sqrt(workers / steps) * (1 - beta) / alpha
    drift = bound.drift(replace(setting, inner_step=gamma))
    noise = 0.5 * 2.0
    expected = (
        (2 * 1.5 + noise) / math.sqrt(workers * steps)
        + 4.0 * drift
        + 4 * noise * 2.0 * (tau - 1) / steps * ((1 - beta) / alpha - 1) ** 2
        + 8 * noise * 2.0 * tau / steps * beta**2 / (1 - beta**2)
    )
    assert bound.published(setting) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("alpha", "beta", "tau", "widest"),
    [
        (1.0, 0.5, 3, 4 * 3 * 0.5 / 0.5),
        (0.1, 0.5, 3, 3 * 3 * (1 - 0.5 - 0.1) / 0.1),
        (1.0, 0.0, 3, 1.0),
    ],
)
def test_published_horizon(alpha: float, beta: float, tau: int, widest: float) -> None:
    """The published bound holds from tau T = G L^2 (1 + sqrt(3) max{...}) on, and not before.

    The maximum of 3 tau (1 - beta - alpha)/alpha, 4 tau beta/(1 - beta) and 1 is by hand.
    """
    setting = replace(SETTING, outer_step=alpha, momentum=beta, local_steps=tau, workers=64)
    least = math.ceil(64 * 2.0**2 * (1 + math.sqrt(3) * widest) / tau)
    assert isinstance(bound.published(replace(setting, rounds=least)), float)
    unbounded = bound.published(replace(setting, rounds=least - 1))
    assert isinstance(unbounded, Infeasible)
    assert 1 < unbounded.load < 1.01


# --- the longest delay that is allowed -----------------------------------------------------------


@pytest.mark.parametrize("mix", [(1.0, 0.0), (0.5, 0.5)])
@pytest.mark.parametrize("tune", [True, False])
def test_allowed_delay_is_the_last_of_all_that_hold(
    mix: tuple[float, float], *, tune: bool
) -> None:
    """Bisection finds what trying every delay does, for what is allowed and what is feasible."""
    late = Late(steps=1, keep=mix[0], predict=mix[1])
    setting = replace(LATE, late=late, local_steps=12, inner_step=0.02, momentum=0.0)
    waiting = replace(setting, late=None, delay=0)
    base = bound.evaluate(bound.tuned(waiting) if tune else waiting)
    assert isinstance(base, Bound)
    totals = []
    for d in range(1, 13):
        each = replace(setting, late=replace(late, steps=d))
        found = bound.evaluate(bound.tuned(each) if tune else each)
        totals.append(found.total if isinstance(found, Bound) else math.inf)
    for price in (0.02, 0.3, 1.0):
        answer = bound_report.allowed(setting, price, tune=tune)
        held = [total / base.total - 1 <= price for total in totals]
        assert answer["steps"] == (held.index(False) if False in held else 12)
        assert answer["feasible_steps"] == sum(math.isfinite(total) for total in totals)
        *lines, restart = answer["delays"]
        shown = {delay(line["delay"]).steps or 0 for line in lines}
        assert shown == {0, 1, 2, 4, 8, 12, answer["steps"], answer["feasible_steps"]}
        assert restart["delay"] == "1 round"
        prices = [line["price"] for line in lines]
        assert prices[0] == 0
        assert prices == pytest.approx(
            [0, *(totals[d - 1] / base.total - 1 for d in sorted(shown)[1:])]
        )


# --- delays as they are written ------------------------------------------------------------------


@given(st.integers(0, 10**17), st.sampled_from(["", " steps", "steps", " rounds", " round"]))
@example(1, " step")
def test_delays_as_they_are_given(count: int, unit: str) -> None:
    """A number is of local steps; rounds are said; 0 is no delay; what is shown is read again."""
    found = delay(f"{count}{unit}")
    in_rounds = unit.strip().startswith("round") or count == 0
    assert found == (Delay(None, count) if in_rounds else Delay(count, 0))
    assert delay(str(found)) == found
    assert str(found).endswith("s") is (count != 1)
