"""The simulator of the theorem's algorithm against exact moments; stability; problems."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit
from theory import exact_moments
from theory.problems import FAMILIES, Known, Minibatches, breast_cancer, run, same

from analysis.convergence.setting import Array, RunSize, variants
from analysis.convergence.simulate import disagreement
from analysis.convergence.trends import Batches, digits
from co2sim.common.errors import OptionError

THREE = variants(
    np.array([0.02, 0.1, 0.05]),
    outer_step=np.array([0.5, 1.0, 1.2]),
    momentum=np.array([0.5, 0.0, 0.2]),
    penalty=np.array([1.0, 1.0, 2.0]),
    noise=np.array([1.0, 0.5, 2.0]),
    keep=np.array([1.0, 0.5, 0.3]),
    predict=np.array([0.0, 0.5, 0.4]),
)


# --- the simulator against exact moments ----------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "delay", "late"),
    [
        ("spread", 1, None),
        ("quadratics apart", 0, None),
        ("quadratics apart", 1, None),
        ("spread", 1, 1),
        ("two kinds", 1, 3),
        ("quadratics apart", 1, 5),
    ],
)
def test_oracle_agrees_with_the_simulator(family: str, delay: int, late: int | None) -> None:
    """A, drift, last mean: simulated means lie within 4 standard errors of the exact ones."""
    problem = FAMILIES[family](4)
    size = RunSize(workers=4, rounds=15, local_steps=5, seeds=1000, delay=delay, late_steps=late)
    outcome = run(problem, THREE, size)
    exact = exact_moments.exact(problem, THREE, size, spread=True)
    for measured, expected in (
        (outcome.gradient, exact.gradient),
        (outcome.drift, exact.drift),
        ((outcome.final**2).sum(-1), exact.final[1].sum(-1)),
        (outcome.final.sum(-1), exact.final[0].sum(-1)),
    ):
        error = measured.std(axis=1, ddof=1) / math.sqrt(size.seeds)
        assert (np.abs(measured.mean(axis=1) - expected) <= 4 * error + 1e-12).all()
    np.testing.assert_allclose(outcome.spread, exact.spread, rtol=0.06, atol=1e-12)
    np.testing.assert_allclose(outcome.value, problem.value(outcome.final))


def test_gap_aware_penalty_is_its_rule() -> None:
    """1 + |last change| over the largest |alpha x average| before; in [1, 1 + 1/(1 - beta)]."""
    beta = np.array([0.0, 0.5, 0.8])
    steps = variants(0.05, outer_step=0.5, momentum=beta, noise=1.0, most_penalty=np.inf)
    size = RunSize(workers=2, rounds=50, local_steps=4, seeds=20)
    outcome = run(same(1.0, 0.3), steps, size)
    assert (outcome.penalty > 1.2).all()
    assert (outcome.penalty <= 1 + 1 / (1 - beta) + 1e-12).all()
    # by hand, without noise, in one dimension: q is what a round takes off x
    q, x, change, longest, momentum, penalties = 1 - 0.9**2, 1.0, 0.0, 0.0, 0.0, [1.0]
    due: float | None = None
    for _ in range(6):
        began, used = x, due
        if used is not None:
            penalties.append(1 + (abs(change) / longest if longest else 0.0))
            longest = max(longest, 0.5 * used)
            momentum = 0.5 * momentum + used / penalties[-1]
            change = 0.5 * momentum
            x -= change
        due = q * began
    rule = variants(0.1, outer_step=0.5, momentum=0.5, most_penalty=np.inf)
    found = run(same(1.0), rule, RunSize(workers=1, rounds=6, local_steps=2))
    assert found.final.item() == pytest.approx(x)
    assert found.penalty.item() == pytest.approx(max(penalties))


def test_clipping_and_delay() -> None:
    """Clipping tames what diverges and is counted; delay 0 is the synchronous update."""
    steps = variants(0.1, outer_step=1.0, momentum=0.5, clip=np.array([np.inf, 1.0]))
    size = RunSize(workers=2, rounds=200, local_steps=16)
    late = run(same(1.0), steps, size)
    assert late.gradient[0, 0] > 1e3
    assert late.gradient[1, 0] < 10
    assert late.clipped.tolist()[0] == 0
    assert 0 < late.clipped[1] <= 1
    calm = run(same(1.0), steps, replace(size, delay=0))
    assert calm.gradient[0, 0] < 1
    one_round = replace(size, rounds=2, local_steps=2, delay=0)
    hard = run(same(1.0), variants(0.1, clip=0.5), one_round)  # 1.9 becomes 0.5, and so does 1.71
    assert hard.final.ravel() == pytest.approx([0.9])
    assert hard.clipped == 1
    with pytest.raises(OptionError, match="gap-aware"):
        run(same(1.0), variants(0.1, most_penalty=np.inf), replace(size, delay=0))
    with pytest.raises(OptionError, match="-1"):
        run(same(1.0), steps, replace(size, delay=-1))


# --- stability -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "progress", "delay"), [(0.5, 0.2, 1), (0, 0.5, 1), (0.5, 1.2, 0)])
def test_stationary_variance(beta: float, progress: float, delay: int) -> None:
    """The closed form of docs/theory-proofs.md is the limit of the recursion."""
    step, tau = 0.1, 3
    alpha = progress / (1 - (1 - step) ** tau)
    steps = variants(step, outer_step=alpha, momentum=beta, noise=1.0)
    size = RunSize(workers=2, rounds=50_000, local_steps=tau, delay=delay)
    long = exact_moments.exact(same(1.0), steps, size)
    jump = (alpha * step) ** 2 * sum((1 - step) ** (2 * j) for j in range(tau)) / 2
    if delay:
        rest = (1 - beta - progress) * progress * (2 + 2 * beta + progress)
        expected = (1 + beta + progress) * jump / rest
    else:
        expected = (1 + beta) * jump / ((1 - beta) * progress * (2 + 2 * beta - progress))
    assert progress < exact_moments.edge(beta, delay)
    assert long.final[1].item() == pytest.approx(expected, rel=1e-9)


# --- problems ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "workers"),
    [
        ("spread", 2),
        ("quadratics apart", 4),
        ("opposed at its minimum", 2),
        ("cosines apart", 2),
        ("hills apart", 2),
        ("logistic", 4),
        ("logistic by label", 4),
    ],
)
def test_problems_keep_their_constants(family: str, workers: int) -> None:
    """Gradients are those of the value and the mean of the workers'; L and f_inf are as stated."""
    problem = FAMILIES[family](workers)
    rng = np.random.default_rng(3)
    dimension = len(problem.start)
    points = rng.normal(scale=0.7, size=(60, dimension))
    direction = rng.normal(size=dimension)
    ahead, behind = points + 1e-5 * direction, points - 1e-5 * direction
    slope = (problem.value(ahead) - problem.value(behind)) / 2e-5
    np.testing.assert_allclose(slope, problem.gradient(points) @ direction, atol=1e-6)
    tiled = np.repeat(points[:, None, :], workers, axis=1)
    each = np.broadcast_to(problem.gradients(tiled), tiled.shape)
    mean = each.mean(axis=1)
    np.testing.assert_allclose(mean, problem.gradient(points), atol=1e-10)
    spread = ((each - mean[:, None, :]) ** 2).sum(-1).mean(-1)
    np.testing.assert_allclose(spread, disagreement(problem, points, workers), atol=1e-10)
    assert problem.heterogeneous is bool(spread.max() > 1e-12)
    if family != "opposed at its minimum":  # its minimum is a saddle of one worker
        assert (problem.value(points) >= -1e-12).all()
    check_smoothness(problem, tiled, each, rng)


def check_smoothness(problem: Known, points: Array, each: Array, rng: np.random.Generator) -> None:
    """No gradient changes faster than L, and one nearly as fast; convex ones are monotone."""
    fastest, signs = 0.0, []
    moves = [*np.eye(points.shape[-1])[:4], rng.normal(size=points.shape[-1])]
    near = np.concatenate([points, 1e-3 * points])
    each = np.concatenate([each, np.broadcast_to(problem.gradients(1e-3 * points), each.shape)])
    for move in moves:
        further = np.broadcast_to(problem.gradients(near + 1e-4 * move), each.shape) - each
        speeds = np.linalg.norm(further, axis=-1) / (1e-4 * np.linalg.norm(move))
        fastest = max(fastest, float(speeds.max()))
        signs.append((further @ move).min())
    assert fastest <= problem.smoothness * (1 + 1e-6)
    if points.shape[-1] <= 4:
        assert fastest >= 0.95 * problem.smoothness
        assert problem.convex is bool(min(signs) >= -1e-12)


def test_minibatches_are_unbiased_and_their_variance_is_exact() -> None:
    """Averaged over many draws, gradients and variances are those that are stated."""
    problem = breast_cancer()
    sampler = Minibatches(problem, 4)
    rng = np.random.default_rng(0)
    point = rng.normal(scale=0.2, size=31)
    draws = 10_000
    points = np.broadcast_to(point, (1, draws, 1, 31))
    drawn = sampler.draw(rng, (1, draws, 1))
    found, variance = sampler.gradients(points, drawn[0], np.zeros((1, 1, 1, 1)))
    assert variance is not None
    errors = ((found - problem.gradient(point)) ** 2).sum(-1)
    assert errors.mean() == pytest.approx(variance[0, 0, 0], rel=0.05)
    error = found.std(axis=1) / math.sqrt(draws)
    assert (np.abs(found.mean(axis=1) - problem.gradient(point)) < 4.5 * error).all()
    margins = problem.labels[0] * (problem.rows[0] @ point)
    by_hand = -(problem.labels[0] * expit(-margins)) @ problem.rows[0] / 569 + 0.01 * point
    np.testing.assert_allclose(problem.gradient(point), by_hand, atol=1e-12)


def test_gradients_of_the_network() -> None:
    """They are those of the loss; of workers with other images the mean is that of all."""
    rng = np.random.default_rng(0)
    network, parted = digits(), digits(4)
    point = network.start
    step = 1e-5 * rng.standard_normal(point.shape)
    slope = (network.value(point + step) - network.value(point - step)) / 2
    assert slope == pytest.approx(network.gradient(point) @ step, rel=1e-5)
    each = parted.gradients(np.repeat(point[None], 4, axis=0))
    np.testing.assert_allclose(each.mean(axis=0), parted.gradient(point), atol=1e-12)
    assert disagreement(parted, point, 4) == pytest.approx(
        ((each - each.mean(axis=0)) ** 2).sum(-1).mean()
    )
    sampler = Batches(network, 16)
    drawn = sampler.draw(rng, (1, 1000, 1))[0]
    points = np.broadcast_to(point, (1000, 1, len(point)))
    slopes, _ = sampler.gradients(points, drawn, np.zeros(1))
    length = np.linalg.norm(slopes.mean(axis=(0, 1)) - network.gradient(point))
    assert length < 1.5 * math.sqrt(sampler.variance(point, rng) / 1000)
    curvature = network.curvature(point, rng)
    ahead = network.gradient(point + step) - network.gradient(point)
    assert np.linalg.norm(ahead) <= 1.05 * curvature * np.linalg.norm(step)
    assert curvature < 50
