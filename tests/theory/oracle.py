"""Identities of the derivations, exact moments against simulation, limits of stability, drift."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.convergence.setting import Array, RunSize, variants
from analysis.convergence.simulate import Gaussian, Simulation
from theory import exact_moments
from theory.cells import Cells, Check
from theory.exact_moments import LateSystem, exact
from theory.problems import FAMILIES, Quadratic, run, same, select

IDENTITY = 1e-12
"""Largest relative error of the identities."""
SCORE = 4.0
"""Largest |z| of a simulated mean."""
_EDGE = 0.002
"""Largest distance of a measured from the exact edge of stability, in alpha q."""
_STABLE, _GROWING = 1.01, 1.1
"""A or drift of a run over that of half of it: at most, below an edge; at least, above it."""
_DRIFT = 0.04
"""How far measured drifts may be from those of small steps, relatively."""


class Question(NamedTuple):
    """A method: late by `delay` rounds with a restart, or by `late` of `tau` steps without."""

    family: str
    alpha: float
    beta: float
    penalty: float
    delay: int = 1
    tau: int = 5
    late: int | None = None
    keep: float = 1.0
    predict: float = 0.0


CASES = (
    Question("isotropic", 1.0, 0.0, 1.0),
    Question("spread", 0.7, 0.5, 2.0),
    Question("quadratics apart", 0.3, 0.9, 1.5),
    Question("cosine", 0.6, 0.8, 1.0),
    Question("hills apart", 0.5, 0.5, 1.0),
    Question("isotropic", 0.7, 0.5, 2.0, delay=0),
    Question("cosines apart", 0.9, 0.6, 1.0, delay=0),
    Question("spread", 0.5, 0.5, 1.0, delay=2),
)
LATE_CASES = (
    Question("isotropic", 1.0, 0.0, 1.0, late=2),
    Question("spread", 0.7, 0.5, 2.0, late=5),
    Question("quadratics apart", 0.3, 0.9, 1.5, late=3, keep=0.5),
    Question("cosine", 1.0, 0.0, 1.0, tau=4, late=2, keep=0.5, predict=0.5),
    Question("cosines apart", 0.6, 0.5, 1.0, tau=4, late=4, keep=0.75, predict=0.6),
    Question("hills apart", 1.2, 0.25, 1.0, tau=1, late=1, keep=0.3, predict=0.25),  # beta = p
)
_ROUNDS = 24


@dataclass(frozen=True)
class Watched:
    """Gaussian noise; keeps the mean of the workers and of their noisy gradients at every step."""

    inner: Gaussian
    means: list[Array] = field(default_factory=list)
    slopes: list[Array] = field(default_factory=list)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """As without a watch."""
        return self.inner.draw(rng, shape)

    def gradients(
        self, points: Array, drawn: NDArray[Any], deviation: Array
    ) -> tuple[Array, Array | None]:
        """As without a watch."""
        slopes, variances = self.inner.gradients(points, drawn, deviation)
        self.means.append(points.mean(axis=-2))
        self.slopes.append(slopes.mean(axis=-2))
        return slopes, variances


def gap_error(case: Question) -> float:
    """The largest error of the identities of the virtual iterate, relative to the largest |mean|.

    z moves by -E c_k times the averaged gradient. Checked is z - mean at every step, which follows
    from what has not reached the mean yet: W_n of the sum of a round that is n rounds old, or w_n
    with late averages; and for a delay of 1 round that z is an extrapolation of points only.

    Source: docs/theory-proofs.md, derivation, step 1, and proof for the late average, step 2.
    """
    step, tau, beta = 0.05, case.tau, case.beta
    means, slopes = (part.reshape(_ROUNDS, tau, *part.shape[1:]) for part in _watched(case, step))
    p = case.predict * (case.late or 0) / tau
    eta = case.alpha * step / ((1 - beta) * case.penalty)
    whole = eta / (1 - p)
    if case.late is None:
        left = [eta * beta ** max(0, n - case.delay) for n in range(_ROUNDS)]
    else:
        left = [
            (whole - step) * p**n + eta * sum(beta ** (j + 1) * p ** (n - 1 - j) for j in range(n))
            for n in range(_ROUNDS)
        ]
    counts = np.ones((_ROUNDS, tau))
    counts[1:, : case.late or 0] = case.keep
    sums = np.einsum("tk,tk...->t...", counts, slopes)
    virtual = means[0, 0].copy()
    errors = []
    for t in range(_ROUNDS):
        if case.late is None and case.delay == 1 and t + 1 < _ROUNDS:
            x, ahead = means[t, 0], means[t + 1, 0]
            errors.append(ahead + beta / (1 - beta) * (ahead - x) - virtual)
        for k in range(tau):
            arrived = t == 0 or k >= (case.late or 0)
            gap = sum((left[t - s - (not arrived)] * sums[s] for s in range(t)), 0 * virtual)
            weight = whole * counts[t, :k] - (step * counts[t, :k] if arrived else step)
            gap = gap + np.einsum("k,k...->...", weight, slopes[t, :k])
            errors.append(virtual - means[t, k] + gap)
            virtual = virtual - whole * counts[t, k] * slopes[t, k]
    return float(max(np.abs(error).max() for error in errors) / np.abs(means).max())


def _watched(case: Question, step: float) -> tuple[Array, Array]:
    """The mean of the workers and of their gradients, before each step of a run."""
    problem = FAMILIES[case.family](4)
    size = RunSize(
        workers=4,
        rounds=_ROUNDS,
        local_steps=case.tau,
        seeds=4,
        delay=case.delay,
        late_steps=case.late,
    )
    which = variants(
        step,
        outer_step=case.alpha,
        momentum=case.beta,
        penalty=case.penalty,
        noise=1.0,
        keep=case.keep,
        predict=case.predict,
    )
    watched = Watched(Gaussian(problem))
    run(problem, which, size, sampler=watched)
    return np.array(watched.means), np.array(watched.slopes)


def mean_error() -> float:
    """How far the mean is from that of local SGD with the same noise, relatively.

    All is kept and the outer step is 1, on a problem with linear gradients: the mean of the
    workers must move exactly as if every average had been waited for.
    """
    case = Question("isotropic", 1.0, 0.0, 1.0, delay=0)
    now, *late = (_watched(case._replace(late=d), 0.05)[0] for d in (None, 1, 3, 5))
    return max(float(np.abs(path - now).max() / np.abs(now).max()) for path in late)


# --- moments --------------------------------------------------------------------------------------


class MomentsTask(NamedTuple):
    """Simulated means to compare with exact moments, on a quadratic family."""

    family: str
    workers: int
    tau: int
    rounds: int
    seeds: int
    delay: int = 1
    late: int | None = None


def moments_plan(*, quick: bool) -> Iterator[MomentsTask]:
    """Averages that are late by rounds, then by steps."""
    sizes = ((2, 96), (5, 48), (12, 12), (3, 32))  # G and T
    chosen = {1: sizes[:2], 3: sizes[1:3], 8: sizes[2:], 16: (sizes[3], sizes[0])}
    families = ("isotropic", "spread", "quadratics apart")
    for family in families:
        for tau in (1, 8) if quick else (1, 3, 8, 16):
            for delay, (workers, rounds) in zip((1, 0), chosen[tau], strict=True):
                yield MomentsTask(family, workers, tau, rounds, 500 if quick else 4000, delay)
    for family in families:
        for tau, late in ((1, 1), (6, 2)) if quick else ((1, 1), (6, 2), (6, 6), (12, 4)):
            yield MomentsTask(family, 3, tau, 24, 1000 if quick else 4000, late=late)


_PLAIN = variants(
    np.array([0.02, 0.08, 0.02]),
    outer_step=np.array([0.5, 0.7, 1.0]),
    momentum=np.array([0.5, 0.2, 0.0]),
    penalty=np.array([1.0, 2.0, 1.0]),
    noise=np.array([1.0, 0.5, 2.0]),
)
_LATE = variants(
    np.array([0.02, 0.08, 0.05, 0.03]),
    outer_step=np.array([0.5, 1.0, 1.3, 1.0]),
    momentum=np.array([0.5, 0.0, 0.2, 0.0]),
    penalty=np.array([1.0, 1.0, 2.0, 1.0]),
    noise=np.array([1.0, 0.5, 2.0, 1.0]),
    keep=np.array([1.0, 0.5, 0.7, 0.25]),
    predict=np.array([0.0, 0.5, 0.6, 0.0]),
)


def scores(task: MomentsTask, claimed: int | None = None) -> list[list[float]]:
    """The z of simulated A, drift and |x_T|^2, by variant, against those of the delay `claimed`.

    Drift is exactly 0 with one local step: what does not vary has no z.
    """
    problem = FAMILIES[task.family](task.workers)
    which = _PLAIN if task.late is None else _LATE
    size = RunSize(
        workers=task.workers,
        rounds=task.rounds,
        local_steps=task.tau,
        seeds=task.seeds,
        delay=task.delay,
        late_steps=task.late,
    )
    expected = exact(
        problem, which, replace(size, delay=task.delay if claimed is None else claimed)
    )
    seed = [task.tau, task.late or task.delay, *task.family.encode()]
    rows = []
    for row in range(len(which)):
        measured = run(problem, select(which, slice(row, row + 1)), size, seed=[row, *seed])
        pairs = (
            (measured.gradient, expected.gradient[row]),
            (measured.drift, expected.drift[row]),
            ((measured.final**2).sum(axis=-1), expected.final[1, row].sum()),
        )
        rows.append(
            [
                float((values.mean() - mean) * np.sqrt(values.size) / values.std(ddof=1))
                for values, mean in pairs
                if values.std(ddof=1)
            ]
        )
    return rows


# --- stability ------------------------------------------------------------------------------------

_OFFSETS = np.linspace(-0.02, 0.02, 9)
"""Around the edge, in alpha q, where growth is measured."""
_EDGE_ROUNDS = 4000
_CO2 = [(a, b) for b in (0.0, 0.2, 0.4, 0.6, 0.8, 0.9) for a in (0.3, 0.5, 1.0, 1.5) if a > 1 - b]
_SLOWMO = [(a, b) for b in (0.0, 0.3, 0.6, 0.9) for a in (1.1 * (1 + b), 2.0 * (1 + b))]
"""Outer steps and momenta; a smaller alpha never gets to the edge, because q < 1 or q < 2."""


def edge_errors(pairs: Sequence[tuple[float, float]], delay: int) -> list[float]:
    """How far the alpha q at which noiseless runs stop shrinking is from the exact one."""
    exactly = np.array([exact_moments.edge(beta, delay) for _, beta in pairs])
    progress = exactly[:, None] + _OFFSETS
    alpha, beta = (np.array(part)[:, None] + 0 * _OFFSETS for part in zip(*pairs, strict=True))
    step = 1 - np.cbrt(1 - progress / alpha)
    which = variants(step.ravel(), outer_step=alpha.ravel(), momentum=beta.ravel())
    size = RunSize(workers=1, rounds=_EDGE_ROUNDS, local_steps=3, delay=delay)
    simulation = Simulation(same(1.0), which, size)
    distances = []
    for _ in range(_EDGE_ROUNDS):
        began = np.abs(simulation.mean[:, 0, 0])
        simulation.next_round()
        moved = np.abs(simulation.outer.momentum[:, 0, 0] * which.inner_step)
        distances.append(np.log(began + moved).reshape(progress.shape))
    quarter = _EDGE_ROUNDS // 4
    growth = np.mean(distances[-quarter:], axis=0) - np.mean(
        distances[quarter : 2 * quarter], axis=0
    )
    return [
        abs(float(np.interp(0.0, *line)) - edge)
        for *line, edge in zip(growth, progress, exactly, strict=True)
    ]


def disagreements(tau: int, steps: int, count: int) -> int:
    """On how many random systems Jury's conditions are not what eigenvalues of a round say."""
    rng = np.random.default_rng([tau, steps])
    alpha, beta = rng.uniform(0.05, 3, count), rng.choice([0, 1], count) * rng.random(count) * 0.98
    keep, predict = rng.uniform(0.02, 1, count), rng.choice([0, 1], count) * rng.random(count)
    load = rng.uniform(0, 2.2, count)
    which = variants(load, outer_step=alpha, momentum=beta, keep=keep, predict=predict)
    size = RunSize(workers=2, rounds=1, local_steps=tau, late_steps=steps)
    matrix = exact_moments.transition(same(1.0), which, size)[:, 0, :-1, :-1]
    radius = np.abs(np.linalg.eigvals(matrix)).max(axis=-1)
    system = LateSystem(load, tau, steps, alpha, beta, keep, predict)
    distance = np.abs(exact_moments.disagreement(system))
    by_matrix = (radius < 1) & (distance < 1)
    clear = np.abs(np.maximum(radius, distance) - 1) > 1e-9  # round-off decides there
    return int((clear & (by_matrix != exact_moments.late_is_stable(system))).sum())


def growths() -> tuple[Array, Array]:
    """By how much runs grow 2 % below and above the edges that follow from Jury's conditions.

    Edges as close as 5 % to gamma L = 1 are left out: there a round hardly changes with gamma.
    """
    pairs = ((1.0, 0.0), (1.0, 0.5), (0.5, 0.9), (2.0, 0.5), (3.0, 0.0))
    mixes = ((1.0, 0.0), (0.5, 0.0), (0.5, 0.5), (0.75, 0.25))
    columns = zip(*((*pair, *mix) for pair in pairs for mix in mixes), strict=True)
    alpha, beta, keep, predict = (np.array(column) for column in columns)
    below: list[Array] = []
    above: list[Array] = []
    for steps in (1, 3):
        system = LateSystem(0.0, 3, steps, alpha, beta, keep, predict)
        edges = exact_moments.edges(system)
        there = np.isfinite(edges) & (np.abs(edges - 1) > 0.05)
        for factor, grown in ((0.98, below), (1.02, above)):
            load = np.where(np.isfinite(edges), edges, 1.0) * factor
            grown.append(_growth(system._replace(load=load))[there])
    return np.concatenate(below), np.concatenate(above)


def _growth(system: LateSystem) -> Array:
    """A or the drift of a long run over that of half of it, whichever grows more; without noise.

    The two workers have one Hessian and opposite centres, so that they always disagree.
    """
    which = variants(
        np.asarray(system.load),
        outer_step=np.asarray(system.outer_step),
        momentum=np.asarray(system.momentum),
        keep=np.asarray(system.keep),
        predict=np.asarray(system.predict),
    )
    means = []
    for rounds in (500, 1000):
        size = RunSize(
            workers=2, rounds=rounds, local_steps=int(system.tau), late_steps=int(system.steps)
        )
        outcome = run(_pulled_apart(1.0), which, size)
        means.append(np.stack([outcome.gradient[:, 0], outcome.drift[:, 0]]))
    return np.asarray((means[1] / means[0]).max(axis=0))


def _pulled_apart(start: float) -> Quadratic:
    return Quadratic(np.ones((2, 1)), np.array([[1.0], [-1.0]]), np.full(1, start))


# --- what a late average costs --------------------------------------------------------------------


def drift_errors() -> list[float]:
    """How far drifts over those of waiting are from what small steps give, relatively.

    Source: docs/theory-proofs.md, what a late average costs.
    """
    tau, errors = 32, []
    size = RunSize(workers=2, rounds=500, local_steps=tau, delay=0)
    for steps in (tau // 4, tau // 2, tau):
        for keep in (1.0, 0.5):
            p, kept = steps / tau, keep * steps / tau
            cases = (
                (same(1.0, start=0.0), 1.0, 1 + 2 * keep * kept),
                (_pulled_apart(0.0), 0.0, 1 + 3 * kept + 3 * kept * kept if p else 1.0),
            )
            for problem, noise, expected in cases:
                which = variants(1e-6, noise=noise, keep=keep)
                waiting = exact(problem, which, size).drift[0]
                late = replace(size, late_steps=steps)
                drift = exact(problem, which, late, alike=True).drift[0]
                errors.append(abs(float(drift / waiting) / expected - 1))
    return errors


def checks(cells: Cells, *, quick: bool) -> Iterator[Check]:
    """Whether the simulator does what the derivations and the oracle say."""
    tasks = list(moments_plan(quick=quick))
    rows = list(zip(tasks, cells(scores, [(task,) for task in tasks]), strict=True))
    for words, cases in (("", CASES), ("late averages: ", LATE_CASES)):
        errors = [gap_error(case) for case in cases]
        errors += [mean_error()] if words else []
        claim = "the gap, and with all kept the mean of local SGD," if words else "identities"
        yield Check(
            f"{words}{claim} hold to {IDENTITY:g}",
            max(errors) <= IDENTITY,
            f"largest relative error {max(errors):.1e} on {len(cases)} settings",
        )
        by_variant = [
            row for task, lines in rows if bool(task.late) == bool(words) for row in lines
        ]
        z = [abs(each) for row in by_variant for each in row]
        yield Check(
            f"{words}simulator against oracle: |z| < {SCORE:g}",
            max(z) < SCORE,
            f"largest {max(z):.2f} of {len(z)} z on {len(by_variant)} settings",
        )
    distances = [*edge_errors(_CO2, 1), *edge_errors(_SLOWMO, 0)]
    yield Check(
        f"edge of stability within {_EDGE:g} for every (alpha, beta)",
        bool(max(distances) <= _EDGE),
        f"largest distance {max(distances):.1e} on {len(distances)}",
    )
    sizes = ((1, 1), (4, 1), (4, 3), (12, 4), (12, 12), (7, 5))
    wrong = sum(disagreements(*size, 3_334) for size in sizes)
    below, above = growths()
    yield Check(
        "late averages: Jury's conditions are those of the matrices, and runs 2 % beside their"
        " edges do as they say",
        bool(wrong == 0 and below.max() <= _STABLE and above.min() >= _GROWING),
        f"{wrong} of {6 * 3_334:,} systems differ; of {len(below)} edges runs grow at most"
        f" x {below.max():.4f} below, at least x {above.min():.2f} above",
    )
    errors = drift_errors()
    yield Check(
        "late averages cost drift: 1 + 2 keep^2 p times that of waiting for equal data,"
        " 1 + 3 keep p + 3 keep^2 p^2 for unequal data",
        max(errors) <= _DRIFT,
        f"within {max(errors):.1%} on {len(errors)} (p, keep)",
    )
