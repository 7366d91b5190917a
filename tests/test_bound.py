"""The convergence bound: constants against brute force, oracles against simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from analysis.convergence import bound, exact_moments
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.objectives.logistic import Minibatches, breast_cancer
from analysis.convergence.objectives.problems import Array, Cosine, Hill, Quadratic
from analysis.convergence.setting import Setting
from analysis.convergence.simulate import Trajectory, run, walk
from analysis.convergence.variants import RunSize, variants
from co2sim.errors import OptionError

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


def quadratic(*curvatures: float) -> Quadratic:
    """The same for all workers, from (1, 1, ...)."""
    row = np.array([curvatures])
    return Quadratic(row, np.zeros_like(row), np.ones(len(curvatures)))


def unlike_workers(workers: int = 4, dimension: int = 3) -> Quadratic:
    """Other Hessians and centres on every worker."""
    rng = np.random.default_rng(5)
    shape = (workers, dimension)
    return Quadratic(rng.uniform(0.2, 1, shape), rng.normal(size=shape), np.full(dimension, 1.5))


def effect(delay: int, beta: float, age: int) -> float:
    """What is still to come of an average `age` rounds old, by following the recursion."""
    momentum, moved = 0.0, 0.0
    for turn in range(age):
        momentum = beta * momentum + (turn == delay)
        moved += (1 - beta) * momentum
    return 1 - moved


def gap_map(setting: Setting) -> Array:
    """The matrix that maps all averaged gradients of a run to all z - x."""
    tau, eta = setting.local_steps, setting.virtual_step
    size = setting.rounds * tau
    found = np.zeros((size, size))
    for t in range(setting.rounds):
        for k in range(tau):
            row = t * tau + k
            for s in range(t):
                weight = effect(setting.delay, setting.momentum, t - s)
                found[row, s * tau : (s + 1) * tau] = -eta * weight
            found[row, t * tau : row] = setting.inner_step - eta
    return found


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(2, 12),
    st.floats(0, 0.9),
    st.floats(0.1, 2),
    st.floats(1, 3),
    st.integers(0, 3),
)
def test_constants_cover_the_exact_gap(
    tau: int, rounds: int, beta: float, alpha: float, penalty: float, delay: int
) -> None:
    """C is at least the squared norm of the map from gradients to gaps, N its mean square."""
    setting = replace(
        SETTING,
        local_steps=tau,
        rounds=rounds,
        momentum=beta,
        outer_step=alpha,
        penalty=penalty,
        delay=delay,
        inner_step=1.0,
    )
    exact = gap_map(setting)
    by_gradients, by_noise = bound.gap_constants(setting)
    assert np.linalg.norm(exact, 2) ** 2 <= by_gradients * (1 + 1e-9) + 1e-12
    assert (exact**2).sum() / len(exact) <= by_noise * (1 + 1e-9) + 1e-12


def test_constants_are_nearly_reached_without_momentum() -> None:
    """One step a round and no momentum: C and N are the exact values of an endless run."""
    setting = replace(SETTING, local_steps=1, momentum=0.0, outer_step=1.0, inner_step=1.0)
    exact = gap_map(setting)
    by_gradients, by_noise = bound.gap_constants(setting)
    assert np.linalg.norm(exact, 2) ** 2 == pytest.approx(by_gradients, rel=1e-9)
    assert (exact**2).sum() / len(exact) == pytest.approx(by_noise, rel=0.05)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("delay", [0, 1])
def test_constants_are_those_of_the_page(beta: float, delay: int) -> None:
    """CO2 and SlowMo have the published formulas: SlowMo's momentum terms carry a beta more."""
    setting = replace(SETTING, momentum=beta, delay=delay)
    tau, eta = setting.local_steps, setting.virtual_step
    apart = abs(eta - setting.inner_step)
    part = eta / (1 - beta) * (1 if delay else beta)
    square = eta**2 * tau / (1 - beta**2) * (1 if delay else beta**2)
    pairs = tau * (tau - 1)
    by_gradients = part**2 * tau**2 + 1.5 * part * apart * pairs + apart**2 * pairs / 2
    expected = (by_gradients, square + apart**2 * (tau - 1) / 2)
    assert bound.gap_constants(setting) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_split_is_the_best_of_a_grid() -> None:
    """The closed form of K is the least over all (c, rho) that satisfy the condition."""
    setting = replace(SETTING, inner_step=0.5 * bound.largest_inner_step(SETTING))
    free = 1 - setting.smoothness * setting.virtual_step
    gap = setting.smoothness**2 * bound.gap_constants(setting)[0]
    grid = np.linspace(1e-4, free - 1e-4, 200_001)
    rho = grid * (free - grid) / gap - 1
    best = ((1 + 1 / rho[rho > 0]) / grid[rho > 0]).min()
    assert 1 / (1 - bound.load(setting)) == pytest.approx(best, rel=1e-6)
    c, ratio = bound.split(setting)
    assert (1 + 1 / ratio) / c == pytest.approx(best, rel=1e-6)
    assert (1 + ratio) * gap / c + setting.smoothness * setting.virtual_step <= 1 - c + 1e-12


def test_outside_the_condition_there_is_no_number() -> None:
    """Without momentum the condition is gamma L (2 tau + 1) < 1; beyond it, "infeasible"."""
    plain = replace(SETTING, momentum=0.0, outer_step=1.0)
    largest = bound.largest_inner_step(plain)
    assert largest == pytest.approx(1 / (plain.smoothness * (2 * plain.local_steps + 1)))
    assert isinstance(bound.evaluate(replace(plain, inner_step=largest * 0.999)), Bound)
    beyond = bound.evaluate(replace(plain, inner_step=largest * 1.001))
    assert isinstance(beyond, Infeasible)
    assert beyond.largest_inner_step == pytest.approx(largest)


def test_special_cases() -> None:
    """Local SGD has no gap at all; a variable penalty multiplies by its largest value."""
    local = replace(SETTING, delay=0, momentum=0.0, outer_step=1.0)
    assert bound.gap_constants(local) == (0.0, 0.0)
    found = bound.evaluate(local)
    assert isinstance(found, Bound)
    assert found.staleness == 0.0
    assert found.optimization == pytest.approx(2 * 1.5 / (0.001 * 50 * 8))
    assert found.noise == pytest.approx(2 * 0.001 * 0.5 / 4)
    small = replace(SETTING, inner_step=1e-4, outer_step=1.0, momentum=0.0)
    constant, variable = bound.evaluate(small), bound.evaluate(replace(small, most_penalty=2.0))
    assert isinstance(constant, Bound)
    assert isinstance(variable, Bound)
    assert variable.optimization == pytest.approx(2 * constant.optimization)
    assert variable.staleness > 2 * constant.staleness


def test_convex_drift_is_a_sum() -> None:
    """Convex: the distance grows by gamma zeta a step and the noise adds its variance."""
    mixed = replace(SETTING, convex=True, heterogeneity=4.0, noise=0.0)
    assert bound.drift(mixed) == pytest.approx(np.mean([(0.001 * 2 * k) ** 2 for k in range(8)]))
    same = replace(SETTING, convex=True)
    assert bound.drift(same) == pytest.approx(np.mean([1e-6 * 0.5 * 0.75 * k for k in range(8)]))


def test_tuned_step_and_rate() -> None:
    """The tuned step beats its neighbours; the rate form falls like 1/sqrt(T)."""
    best = bound.tuned(SETTING)
    least = bound.evaluate(best)
    assert isinstance(least, Bound)
    for factor in (0.8, 1.2):
        other = bound.evaluate(replace(best, inner_step=best.inner_step * factor))
        assert isinstance(other, Infeasible) or other.total > least.total
    totals = []
    for rounds in (10_000, 40_000):
        setting = bound.rate_step(replace(SETTING, rounds=rounds), math.sqrt(2 * 1.5 / (2 * 0.5)))
        found = bound.evaluate(setting)
        assert isinstance(found, Bound)
        assert found.optimization == pytest.approx(found.noise)
        totals.append(found.optimization + found.noise)
    assert totals[0] == pytest.approx(2 * totals[1])


def test_published_bound_of_slowmo() -> None:
    """Local SGD at a long horizon: (2 Delta + L sigma^2)/sqrt(G tau T) and drift; short: none."""
    local = replace(SETTING, delay=0, momentum=0.0, outer_step=1.0, rounds=10_000, workers=1)
    found = bound.published(local)
    assert isinstance(found, float)
    assert found == pytest.approx((2 * 1.5 + 2 * 0.5) / math.sqrt(80_000))
    assert isinstance(bound.published(replace(local, rounds=1, local_steps=2)), Infeasible)


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


def test_late_share() -> None:
    """CO2's N = eta^2 tau/(1 - beta^2) + d^2 (tau - 1)/2: the share of the first part, by hand."""
    setting = replace(SETTING, inner_step=1.0, outer_step=1.0, momentum=0.5, local_steps=5)
    first, rest = 2.0**2 * 5 / (1 - 0.5**2), 1.0**2 * 4 / 2
    assert bound.gap_constants(setting)[1] == pytest.approx(first + rest)
    assert bound.late_share(setting) == pytest.approx(first / (first + rest))
    assert bound.late_share(replace(setting, delay=0, momentum=0.0)) == 0.0


def test_half_of_the_condition_only_moves_its_edge() -> None:
    """With a factor of C the condition changes as 2 L sqrt(C) does, and terms only through it."""
    part = 2.0 * SETTING.virtual_step
    whole = bound.load(SETTING)
    assert bound.load(SETTING, 0.25) == pytest.approx(part + (whole - part) / 2)
    right, wrong = bound.evaluate(SETTING), bound.evaluate(SETTING, 0.25)
    assert isinstance(right, Bound)
    assert isinstance(wrong, Bound)
    assert (wrong.optimization, wrong.noise, wrong.drift) == (
        right.optimization,
        right.noise,
        right.drift,
    )
    assert wrong.staleness < right.staleness


@pytest.mark.parametrize(
    "change",
    [
        {"momentum": 1.0},
        {"inner_step": 0.0},
        {"noise": -1.0},
        {"workers": 0},
        {"penalty": 0.5},
        {"penalty": 2.0, "most_penalty": 2.0},
        {"penalty": math.inf},
        {"most_penalty": 0.0},
        {"most_penalty": math.inf},
        {"smoothness": math.inf},
        {"smoothness": 1e308},
        {"smoothness": 1e-308},
        {"gap": math.nan},
        {"rounds": 10**400},
        {"local_steps": 10**9},
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, float]) -> None:
    """Every field says what it allows, in one line."""
    with pytest.raises(OptionError) as refused:
        replace(SETTING, **change)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 120


def test_extremes_are_numbers() -> None:
    """Drift too large for a number is infinite, and constants may lie 60 powers of ten apart."""
    wild = replace(
        SETTING, delay=0, outer_step=1.0, momentum=0.0, local_steps=2000, inner_step=0.45
    )
    found = bound.evaluate(wild)
    assert isinstance(found, Bound)
    assert found.drift == math.inf
    largest = replace(SETTING, inner_step=1e60, outer_step=1e60, momentum=1 - 1e-16)
    assert isinstance(bound.evaluate(largest), Infeasible)


@pytest.mark.parametrize("rounds", [10**3, 10**12, 10**30])
def test_tuned_step_is_the_analytic_one(rounds: int) -> None:
    """At long horizons the best bound is 2 sqrt(2 Delta L sigma^2/(G T tau)), to 1 %."""
    plain = replace(SETTING, rounds=rounds, local_steps=1, outer_step=1.0, momentum=0.0, delay=0)
    best = bound.evaluate(bound.tuned(plain))
    assert isinstance(best, Bound)
    analytic = 2 * math.sqrt(2 * 1.5 * 2 * 0.5 / (4 * rounds))
    assert analytic <= best.total * (1 + 1e-9)
    assert best.total <= 1.01 * analytic


def test_limits_of_tuning() -> None:
    """Without noise the infimum is at the edge of the condition; without a gap no step is best."""
    quiet = replace(SETTING, noise=0.0)
    assert not bound.has_best_step(quiet)
    found = bound.tuned(quiet)
    largest = bound.largest_inner_step(quiet)
    assert found.inner_step == pytest.approx(largest, rel=1e-8)
    assert isinstance(bound.evaluate(found), Bound)
    with pytest.raises(OptionError, match="gap is 0"):
        bound.tuned(replace(SETTING, gap=0.0))


@pytest.mark.parametrize(
    ("noise", "heterogeneity", "tau", "expected"),
    [(0.5, 0.0, 1, True), (0.0, 0.5, 2, True), (0.0, 0.5, 1, False), (0.0, 0.0, 2, False)],
)
def test_noise_and_drift_make_a_best_step(
    noise: float, heterogeneity: float, tau: int, *, expected: bool
) -> None:
    """Heterogeneous workers drift only if they take two steps or more."""
    setting = replace(
        SETTING, noise=noise, heterogeneity=heterogeneity, local_steps=tau, rounds=10**6
    )
    assert bound.has_best_step(setting) is expected
    tuned = bound.tuned(setting).inner_step
    at_edge = tuned > (1 - 1e-6) * bound.largest_inner_step(setting)
    assert at_edge is not expected


def recorded(alpha: float, beta: float, penalty: float, delay: int) -> tuple[Trajectory, float]:
    """A short noisy run, and its eta."""
    steps = variants(0.05, outer_step=alpha, momentum=beta, penalty=penalty, noise=1.0)
    size = RunSize(workers=3, rounds=12, local_steps=4, seeds=2, delay=delay)
    _, path = walk(quadratic(1.0, 0.3), steps, size)
    return path, alpha * 0.05 / ((1 - beta) * penalty)


@pytest.mark.parametrize(
    ("alpha", "beta", "penalty", "delay"),
    [(1, 0, 1, 1), (0.7, 0.5, 2, 1), (0.3, 0.9, 1.5, 1), (0.7, 0.5, 2, 0), (0.6, 0.4, 1, 3)],
)
def test_virtual_iterate_is_exact(alpha: float, beta: float, penalty: float, delay: int) -> None:
    """z_0 = x_0, z_{t+1} = z_t - eta D_t, and for CO2 z_t - x_t = -eta Lambda m_t, to 1e-12."""
    path, eta = recorded(alpha, beta, penalty, delay)
    x, sums = path.points, path.sums
    z = [
        x[t] - eta * sum((effect(delay, beta, t - s) * sums[s] for s in range(t)), 0 * x[0])
        for t in range(12)
    ]
    np.testing.assert_allclose(z[0], x[0], atol=1e-12)
    for t in range(11):
        np.testing.assert_allclose(z[t + 1], z[t] - eta * sums[t], atol=1e-12)
    if delay == 1:
        np.testing.assert_array_equal(x[1], x[0])
        for t in range(12):
            extrapolated = x[t + 1] + beta / (1 - beta) * (x[t + 1] - x[t])
            np.testing.assert_allclose(z[t], extrapolated, atol=1e-12)
            np.testing.assert_allclose(z[t] - x[t], -eta * penalty * path.momenta[t], atol=1e-12)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("problem", [quadratic(1.0, 0.2), unlike_workers()])
def test_oracle_agrees_with_the_simulator(problem: Quadratic, delay: int) -> None:
    """A, drift, last point: the simulated means lie within 4 standard errors of the exact ones."""
    steps = variants(
        np.array([0.02, 0.1, 0.02]),
        outer_step=np.array([0.5, 0.7, 1.0]),
        momentum=np.array([0.5, 0.2, 0.0]),
        penalty=np.array([1.0, 2.0, 1.0]),
        noise=np.array([1.0, 0.5, 2.0]),
    )
    size = RunSize(workers=4, rounds=30, local_steps=5, seeds=1500, delay=delay)
    outcome = run(problem, steps, size)
    exact = exact_moments.exact(problem, steps, size, spread=True)
    for measured, expected in (
        (outcome.gradient, exact.gradient),
        (outcome.drift, exact.drift),
        ((outcome.final**2).sum(-1), exact.final[1].sum(-1)),
    ):
        error = measured.std(axis=1, ddof=1) / math.sqrt(size.seeds)
        assert (np.abs(measured.mean(axis=1) - expected) < 4 * error).all()
    np.testing.assert_allclose(outcome.spread, exact.spread, rtol=0.05, atol=1e-12)


@pytest.mark.parametrize(("beta", "progress", "delay"), [(0.5, 0.2, 1), (0, 0.5, 1), (0.5, 1.2, 0)])
def test_stationary_variance(beta: float, progress: float, delay: int) -> None:
    """The closed form is the limit of the recursion; beyond the edge there is none."""
    step, tau = 0.1, 3
    alpha = progress / (1 - (1 - step) ** tau)
    steps = variants(step, outer_step=alpha, momentum=beta, noise=1.0)
    size = RunSize(workers=2, rounds=50_000, local_steps=tau, delay=delay)
    long = exact_moments.exact(quadratic(1.0), steps, size)
    jump = (alpha * step) ** 2 * sum((1 - step) ** (2 * j) for j in range(tau)) / 2
    expected = exact_moments.stationary(progress, beta, jump, delay)
    assert long.final[1].item() == pytest.approx(expected, rel=1e-9)
    assert math.isinf(exact_moments.stationary(exact_moments.edge(beta, delay), beta, jump, delay))
    matrix, _ = exact_moments.transition(quadratic(1.0), steps, 2, tau, delay)
    radius = np.abs(np.linalg.eigvals(matrix[0, 0, :2, :2])).max()
    assert (radius < 1) is np.bool_(exact_moments.is_stable(progress, beta, delay))


@pytest.mark.parametrize(
    "problem",
    [
        quadratic(1.0, 0.3),
        unlike_workers(),
        Cosine(np.array([[0.5], [0.7]]), np.array([[0.2], [-0.2]]), np.ones(1), 3.0, 0.1),
        Hill(np.array([[0.5], [0.7]]), np.array([[0.2], [-0.2]]), np.ones(1)),
        breast_cancer(),
        breast_cancer(4),
    ],
)
def test_problems_keep_their_constants(problem: Quadratic | Cosine | Hill) -> None:
    """Gradients are those of the value and the mean of the workers'; L and f_inf are as stated."""
    rng = np.random.default_rng(3)
    dimension = len(problem.start)
    points = rng.normal(scale=0.7, size=(200, dimension))
    direction = rng.normal(size=dimension)
    step = 1e-5
    ahead, behind = points + step * direction, points - step * direction
    slope = (problem.value(ahead) - problem.value(behind)) / (2 * step)
    np.testing.assert_allclose(slope, problem.gradient(points) @ direction, atol=1e-6)
    workers = 4 if dimension in {3, 31} else 2
    tiled = np.repeat(points[:, None, :], workers, axis=1)
    each = problem.gradients(tiled)
    mean = np.broadcast_to(each, tiled.shape).mean(axis=1)
    np.testing.assert_allclose(mean, problem.gradient(points), atol=1e-10)
    spread = ((each - mean[:, None, :]) ** 2).sum(-1).mean(-1)
    np.testing.assert_allclose(spread, problem.spread(points), atol=1e-10)
    if problem.most_spread is not None:
        assert (spread <= problem.most_spread + 1e-9).all()
    assert (problem.value(points) >= -1e-12).all()
    further = problem.gradients(tiled + 1e-4 * rng.normal(size=dimension)) - each
    lengths = np.linalg.norm(further, axis=-1)
    rng = np.random.default_rng(3)
    rng.normal(size=(200, dimension)), rng.normal(size=dimension)
    moved = 1e-4 * np.linalg.norm(rng.normal(size=dimension))
    assert (lengths <= problem.smoothness * moved * (1 + 1e-9)).all()


def test_minibatches_are_unbiased_and_their_variance_is_exact() -> None:
    """Averaged over many draws, gradients and variances are those that are stated."""
    problem = breast_cancer()
    sampler = Minibatches(problem, 4)
    rng = np.random.default_rng(0)
    point = rng.normal(scale=0.2, size=31)
    draws = 20_000
    points = np.broadcast_to(point, (1, draws, 1, 31))
    drawn = sampler.draw(rng, (1, draws, 1))
    found, variance = sampler.gradients(points, drawn[0], np.zeros((1, 1, 1, 1)))
    assert variance is not None
    apart = ((found - problem.gradient(point)) ** 2).sum(-1)
    assert apart.mean() == pytest.approx(variance[0, 0, 0], rel=0.05)
    error = found.std(axis=1) / math.sqrt(draws)
    assert (np.abs(found.mean(axis=1) - problem.gradient(point)) < 4.5 * error).all()
    margins = problem.labels[0] * (problem.rows[0] @ point)
    by_hand = -(problem.labels[0] * expit(-margins)) @ problem.rows[0] / 569 + 0.01 * point
    np.testing.assert_allclose(problem.gradient(point), by_hand, atol=1e-12)


def test_gap_aware_penalty_stays_in_its_range() -> None:
    """It begins with 1, lies in [1, 1 + 1/(1 - beta)], and is at work."""
    beta = np.array([0.0, 0.5, 0.8])
    steps = variants(0.05, outer_step=0.5, momentum=beta, noise=1.0, gap_aware=True)
    size = RunSize(workers=2, rounds=50, local_steps=4, seeds=20)
    outcome = run(quadratic(1.0, 0.3), steps, size)
    assert (outcome.penalty > 1.2).all()
    assert (outcome.penalty <= 1 + 1 / (1 - beta) + 1e-12).all()


def test_clipping_and_delay() -> None:
    """Clipping tames what diverges and is counted; delay 0 is the synchronous update."""
    steps = variants(0.1, outer_step=1.0, momentum=0.5, clip=np.array([np.inf, 1.0]))
    size = RunSize(workers=2, rounds=200, local_steps=16)
    late = run(quadratic(1.0), steps, size)
    assert late.gradient[0, 0] > 1e3
    assert late.gradient[1, 0] < 10
    assert late.clipped.tolist()[0] == 0
    assert 0 < late.clipped[1] <= 1
    calm = run(quadratic(1.0), steps, replace(size, delay=0))
    assert calm.gradient[0, 0] < 1
    with pytest.raises(OptionError, match="gap-aware"):
        run(quadratic(1.0), variants(0.1, gap_aware=True), replace(size, delay=0))
    with pytest.raises(OptionError, match="delay is -1"):
        run(quadratic(1.0), steps, replace(size, delay=-1))
