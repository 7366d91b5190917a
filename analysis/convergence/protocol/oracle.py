"""The oracle layer of the protocol: identities, exact moments against simulation, stability."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from analysis.convergence import exact_moments
from analysis.convergence.exact_moments import LateSystem, Moments
from analysis.convergence.objectives.families import FAMILIES, same
from analysis.convergence.objectives.problems import Array, Gaussian, Problem, Quadratic
from analysis.convergence.setting import Late, RunSize, Variants, select, variants
from analysis.convergence.simulate import run, walk

CASES = (
    ("isotropic", 1.0, 0.0, 1.0, 1),
    ("spread", 0.7, 0.5, 2.0, 1),
    ("quadratics apart", 0.3, 0.9, 1.5, 1),
    ("cosine", 0.6, 0.8, 1.0, 1),
    ("hills apart", 0.5, 0.5, 1.0, 1),
    ("isotropic", 0.7, 0.5, 2.0, 0),
    ("cosines apart", 0.9, 0.6, 1.0, 0),
    ("spread", 0.5, 0.5, 1.0, 2),
)
"""Family, alpha, beta, Lambda, delay."""


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


def largest_error(family: str, alpha: float, beta: float, penalty: float, delay: int) -> float:
    """The largest error of the identities of the virtual iterate, relative to the largest |x|.

    z is made of what has not reached x yet: weights 1 up to the delay, then beta, beta^2, ... The
    sums are of the noisy gradients themselves, not of how far points moved. Checked are z_0 = x_0,
    z_{t+1} = z_t - eta D_t and, within rounds, z_{t,k} - mean_{t,k} = z_t - x_t -
    (eta - gamma) sum_{j<k} gradient_{t,j}; for delay 1 also that z is the extrapolation
    x_{t+1} + beta/(1 - beta) (x_{t+1} - x_t), of points only, and z_t - x_t = -eta Lambda m_t.

    Source: docs/theory-proofs.md, derivation, step 1.
    """
    step, size = 0.05, RunSize(workers=4, rounds=24, local_steps=5, seeds=4, delay=delay)
    rounds = size.rounds
    problem = FAMILIES[family](4)
    which = variants(step, outer_step=alpha, momentum=beta, penalty=penalty, noise=1.0)
    watched = Watched(Gaussian(problem))
    _, path = walk(problem, which, size, sampler=watched)
    eta = alpha * step / ((1 - beta) * penalty)
    shape = (rounds, size.local_steps, *path.points.shape[1:])
    means, slopes = (np.array(p).reshape(shape) for p in (watched.means, watched.slopes))
    sums, before = slopes.sum(axis=1), np.cumsum(slopes, axis=1) - slopes
    virtual = [_virtual(path.points, sums, t, eta, beta, delay) for t in range(rounds)]
    errors = [virtual[0] - path.points[0]]
    errors += [virtual[t + 1] - virtual[t] + eta * sums[t] for t in range(rounds - 1)]
    for t, z in enumerate(virtual):
        x, ahead = path.points[t], path.points[t + 1]
        errors.append(z - eta * before[t] - means[t] - (z - x - (eta - step) * before[t]))
        if delay == 1:
            errors.append(ahead + beta / (1 - beta) * (ahead - x) - z)
            errors.append(z - x + eta * penalty * path.momenta[t])
    largest = max(np.abs(error).max() for error in errors)
    return float(largest / np.abs(path.points).max())


def _virtual(points: Array, sums: Array, t: int, eta: float, beta: float, delay: int) -> Array:
    total = np.zeros_like(points[0])
    for s in range(t):
        age = t - s
        total = total + (1.0 if age <= delay else beta ** (age - delay)) * sums[s]
    return np.asarray(points[t] - eta * total)


LATE_CASES = (
    ("isotropic", 1.0, 0.0, 1.0, 5, 2, 1.0, 0.0),
    ("spread", 0.7, 0.5, 2.0, 5, 5, 1.0, 0.0),
    ("quadratics apart", 0.3, 0.9, 1.5, 5, 3, 0.5, 0.0),
    ("cosine", 1.0, 0.0, 1.0, 4, 2, 0.5, 0.5),
    ("cosines apart", 0.6, 0.5, 1.0, 4, 4, 0.75, 0.6),
    ("hills apart", 1.2, 0.25, 1.0, 1, 1, 0.3, 0.25),
)
"""Family, alpha, beta, Lambda, tau, d, keep, predict; in the last beta = p."""
_GAP_ROUNDS = 16


def gap_error(  # noqa: PLR0917 - a row of LATE_CASES
    family: str,
    alpha: float,
    beta: float,
    penalty: float,
    tau: int,
    late: int,
    keep: float,
    predict: float,
) -> float:
    """The largest error of z - mean at any step, relative to the largest |mean|.

    z moves by -E c_k times the averaged gradient. What the gap should be follows from the weights
    w_n of the page. Source: docs/theory-proofs.md, the late average, gap.
    """
    step = 0.05
    which = variants(
        step,
        outer_step=alpha,
        momentum=beta,
        penalty=penalty,
        noise=1.0,
        keep=keep,
        predict=predict,
    )
    problem = FAMILIES[family](4)
    size = RunSize(workers=4, rounds=_GAP_ROUNDS, local_steps=tau, seeds=4, late_steps=late)
    watched = Watched(Gaussian(problem))
    run(problem, which, size, sampler=watched)
    shape = (_GAP_ROUNDS, tau, *watched.means[0].shape)
    means, slopes = (np.array(part).reshape(shape) for part in (watched.means, watched.slopes))
    p = predict * late / tau
    eta = alpha * step / ((1 - beta) * penalty)
    whole = eta / (1 - p)
    left = [
        (whole - step) * p**n + eta * sum(beta ** (j + 1) * p ** (n - 1 - j) for j in range(n))
        for n in range(_GAP_ROUNDS + 1)
    ]
    counts = np.ones((_GAP_ROUNDS, tau))
    counts[1:, :late] = keep
    sums = np.einsum("tk,tk...->t...", counts, slopes)
    virtual = means[0, 0].copy()
    error = 0.0
    for t in range(_GAP_ROUNDS):
        for k in range(tau):
            arrived = t == 0 or k >= late
            gap = sum((left[t - s - (not arrived)] * sums[s] for s in range(t)), 0 * virtual)
            weight = whole * counts[t, :k] - (step * counts[t, :k] if arrived else step)
            gap = -gap - np.einsum("k,k...->...", weight, slopes[t, :k])
            error = max(error, float(np.abs(virtual - means[t, k] - gap).max()))
            virtual = virtual - whole * counts[t, k] * slopes[t, k]
    return error / float(np.abs(means).max())


def mean_error() -> float:
    """How far the mean is from that of local SGD with the same noise, relatively.

    All is kept and the outer step is 1, on a problem with linear gradients: the mean of the
    workers must move exactly as if every average had been waited for.
    """
    problem = FAMILIES["isotropic"](4)
    which = variants(0.05, noise=1.0)
    size = RunSize(workers=4, rounds=_GAP_ROUNDS, local_steps=5, seeds=4, delay=0)
    paths = []
    for late in (None, 1, 3, 5):
        watched = Watched(Gaussian(problem))
        run(problem, which, replace(size, late_steps=late), sampler=watched)
        paths.append(np.array(watched.means))
    largest = max(float(np.abs(path - paths[0]).max()) for path in paths[1:])
    return largest / float(np.abs(paths[0]).max())


_SMALL_STEP, _DRIFT_ROUNDS = 1e-6, 500
"""Where the drift has its limit, and the start, without late averages, no longer counts."""


@dataclass(frozen=True, slots=True)
class LateIdentityTask:
    """To check the gap of the virtual iterate, and that a mean can be that of local SGD."""

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return _SMALL_WORK

    def measure(self) -> "LateIdentityCell":
        """Check them."""
        return LateIdentityCell(self, tuple(gap_error(*case) for case in LATE_CASES), mean_error())


@dataclass(frozen=True, slots=True)
class LateIdentityCell:
    """The largest relative errors: of the gap, by case, and of the mean beside local SGD's."""

    task: LateIdentityTask
    errors: tuple[float, ...]
    mean: float
    kind: Literal["late identities"] = "late identities"


@dataclass(frozen=True, slots=True, kw_only=True)
class LateMomentsTask:
    """To compare simulated means with exact moments, on a quadratic family."""

    family: str
    workers: int
    local_steps: int
    late_steps: int
    rounds: int
    seeds: int

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return self.rounds * self.local_steps

    def measure(self) -> "LateMomentsCell":
        """Compare them: A, drift and |mean|^2 at the end."""
        problem = FAMILIES[self.family](self.workers)
        assert isinstance(problem, Quadratic)
        which = _moments_variants()
        size = RunSize(
            workers=self.workers,
            rounds=self.rounds,
            local_steps=self.local_steps,
            seeds=self.seeds,
            late_steps=self.late_steps,
        )
        exact = exact_moments.late_exact(problem, which, size)
        seed = (self.local_steps, self.late_steps, *self.family.encode())
        return LateMomentsCell(self, z_scores(problem, which, size, exact, seed))


@dataclass(frozen=True, slots=True)
class LateMomentsCell:
    """The z of simulated means against exact moments, by variant."""

    task: LateMomentsTask
    scores: tuple[tuple[float, ...], ...]
    kind: Literal["late moments"] = "late moments"


def _moments_variants() -> Variants:
    return variants(
        np.array([0.02, 0.08, 0.05, 0.03]),
        outer_step=np.array([0.5, 1.0, 1.3, 1.0]),
        momentum=np.array([0.5, 0.0, 0.2, 0.0]),
        penalty=np.array([1.0, 1.0, 2.0, 1.0]),
        noise=np.array([1.0, 0.5, 2.0, 1.0]),
        keep=np.array([1.0, 0.5, 0.7, 0.25]),
        predict=np.array([0.0, 0.5, 0.6, 0.0]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LateDriftTask:
    """To measure what late averages cost in drift, beside waiting for the average."""

    local_steps: int

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return _SMALL_WORK

    def measure(self) -> "LateDriftCell":
        """Measure it for several delays."""
        lines = []
        for steps in (self.local_steps // 4, self.local_steps // 2, self.local_steps):
            for keep in (1.0, 0.5):
                late = Late(steps=steps, keep=keep)
                lines.append(
                    LateDrift(
                        share=steps / self.local_steps,
                        keep=keep,
                        alike=_drift_ratio(self.local_steps, late, unlike=False),
                        unlike=_drift_ratio(self.local_steps, late, unlike=True),
                    )
                )
        return LateDriftCell(self, tuple(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class LateDrift:
    """The drift with late averages over that of waiting, for workers alike and unlike.

    `share` is p = d/tau. Both are means over all steps alike.
    """

    share: float
    keep: float
    alike: float
    unlike: float

    @property
    def expected(self) -> tuple[float, float]:
        """What small steps give: docs/theory.md, what a late average costs."""
        p, kept = self.share, self.keep * self.share
        return 1 + 2 * self.keep * kept, 1 + 3 * kept + 3 * kept * kept if p else 1.0


@dataclass(frozen=True, slots=True)
class LateDriftCell:
    """The drifts."""

    task: LateDriftTask
    lines: tuple[LateDrift, ...]
    kind: Literal["late drift"] = "late drift"


def _drift_ratio(local_steps: int, late: Late, *, unlike: bool) -> float:
    """By exact moments, with small steps: on a slope that differs, or with noise alone."""
    problem = same(1.0, start=0.0)
    if unlike:
        problem = Quadratic(np.ones((2, 1)), np.array([[1.0], [-1.0]]), np.zeros(1))
    which = variants(_SMALL_STEP, noise=0.0 if unlike else 1.0, keep=late.keep)
    size = RunSize(workers=2, rounds=_DRIFT_ROUNDS, local_steps=local_steps, delay=0)
    waiting = exact_moments.exact(problem, which, size).drift[0]
    size = replace(size, late_steps=late.steps)
    return float(exact_moments.late_exact(problem, which, size, alike=True).drift[0] / waiting)


_LATE_SIZES = ((1, 1), (4, 1), (4, 3), (12, 4), (12, 12), (7, 5))
"""Tau and d of the systems whose stability is asked for."""
_EDGES = ((1.0, 0.0), (1.0, 0.5), (0.5, 0.9), (2.0, 0.5), (3.0, 0.0))
"""Outer steps and momenta whose edges are measured."""
_LATE_MIXES = ((1.0, 0.0), (0.5, 0.0), (0.5, 0.5), (0.75, 0.25))
"""What is kept, and what is predicted."""
_LATE_EDGE_ROUNDS = 500
"""Half of the rounds of a run beside an edge."""
_BESIDE = 0.02
"""How far from the edge runs are looked at, relatively."""
_FLAT = 0.05
"""Edges as close to gamma L = 1 are not looked at: there a round hardly changes with gamma."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateStabilityTask:
    """To compare Jury's conditions with eigenvalues of random systems, and with runs."""

    systems: int

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return _SMALL_WORK

    def measure(self) -> "LateStabilityCell":
        """Compare them."""
        wrong = [
            _disagreements(tau, steps, self.systems // len(_LATE_SIZES))
            for tau, steps in _LATE_SIZES
        ]
        return LateStabilityCell(self, sum(wrong), tuple(_late_edges()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LateEdge:
    """An edge of stability in gamma L, and what runs do 2 % below and above it.

    `below` and `above` are A or the drift of a long run over that of half of it.
    """

    tau: int
    steps: int
    alpha: float
    beta: float
    keep: float
    predict: float
    exact: float
    below: float
    above: float


@dataclass(frozen=True, slots=True)
class LateStabilityCell:
    """On how many random systems Jury's conditions and eigenvalues disagree, and edges."""

    task: LateStabilityTask
    wrong: int
    edges: tuple[LateEdge, ...]
    kind: Literal["late stability"] = "late stability"


def _disagreements(tau: int, steps: int, count: int) -> int:
    """How often Jury's conditions are not what the eigenvalues of a round's matrix say."""
    rng = np.random.default_rng([tau, steps])
    alpha, beta = rng.uniform(0.05, 3, count), rng.choice([0, 1], count) * rng.random(count) * 0.98
    keep, predict = rng.uniform(0.02, 1, count), rng.choice([0, 1], count) * rng.random(count)
    load = rng.uniform(0, 2.2, count)
    which = variants(load, outer_step=alpha, momentum=beta, keep=keep, predict=predict)
    size = RunSize(workers=2, rounds=1, local_steps=tau, late_steps=steps)
    matrix = exact_moments.late_transition(same(1.0), which, size)[:, 0, :-1, :-1]
    radius = np.abs(np.linalg.eigvals(matrix)).max(axis=-1)
    system = LateSystem(load, tau, steps, alpha, beta, keep, predict)
    own = np.abs(exact_moments.disagreement(system))
    by_matrix = (radius < 1) & (own < 1)
    clear = np.abs(np.maximum(radius, own) - 1) > 1e-9  # noqa: PLR2004 - round-off decides there
    return int((clear & (by_matrix != exact_moments.late_is_stable(system))).sum())


def _late_edges() -> Iterator[LateEdge]:
    """Edges by Jury's conditions, and runs beside them."""
    for tau, steps in ((3, 1), (3, 3)):
        cells = [(*pair, *mix) for pair in _EDGES for mix in _LATE_MIXES]
        alpha, beta, keep, predict = (np.array(part) for part in zip(*cells, strict=True))
        system = LateSystem(0.0, tau, steps, alpha, beta, keep, predict)
        exact = exact_moments.edges(system)
        growths = []
        for factor in (1 - _BESIDE, 1 + _BESIDE):
            load = np.where(np.isfinite(exact), exact, 1.0) * factor
            growths.append(_growth(system._replace(load=load)))
        for place, cell in enumerate(cells):
            if np.isfinite(exact[place]) and abs(exact[place] - 1) > _FLAT:
                yield LateEdge(
                    tau=tau,
                    steps=steps,
                    alpha=cell[0],
                    beta=cell[1],
                    keep=cell[2],
                    predict=cell[3],
                    exact=float(exact[place]),
                    below=float(growths[0][place]),
                    above=float(growths[1][place]),
                )


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
    problem = Quadratic(np.ones((2, 1)), np.array([[1.0], [-1.0]]), np.ones(1))
    means = []
    for rounds in (_LATE_EDGE_ROUNDS, 2 * _LATE_EDGE_ROUNDS):
        size = RunSize(
            workers=2, rounds=rounds, local_steps=int(system.tau), late_steps=int(system.steps)
        )
        found = run(problem, which, size)
        means.append(np.stack([found.gradient[:, 0], found.drift[:, 0]]))
    return np.asarray((means[1] / means[0]).max(axis=0))


LateOracleTask = LateIdentityTask | LateMomentsTask | LateStabilityTask | LateDriftTask
LateOracleCell = LateIdentityCell | LateMomentsCell | LateStabilityCell | LateDriftCell


def late_oracle_plan(*, quick: bool) -> Iterator[LateOracleTask]:
    """Everything about late averages that needs no bound."""
    yield LateIdentityTask()
    yield LateStabilityTask(systems=20_000)
    yield LateDriftTask(local_steps=32)
    for family in ("isotropic", "spread", "quadratics apart"):
        for tau, steps in ((1, 1), (6, 2)) if quick else ((1, 1), (6, 2), (6, 6), (12, 4)):
            yield LateMomentsTask(
                family=family,
                workers=3,
                local_steps=tau,
                late_steps=steps,
                rounds=24,
                seeds=1000 if quick else 4000,
            )


IDENTITY = 1e-12
"""Largest relative error of the identities."""
SCORE = 4.0
"""Largest |z| of a simulated mean."""
EDGE = 0.002
"""Largest distance of a measured from the exact edge of stability, in alpha q."""
_OFFSETS = np.linspace(-0.02, 0.02, 9)
"""Around the edge, in alpha q, where growth is measured."""
_EDGE_ROUNDS = 4000
_CO2 = [(a, b) for b in (0.0, 0.2, 0.4, 0.6, 0.8, 0.9) for a in (0.3, 0.5, 1.0, 1.5) if a > 1 - b]
_SLOWMO = [(a, b) for b in (0.0, 0.3, 0.6, 0.9) for a in (1.1 * (1 + b), 2.0 * (1 + b))]
"""Outer steps and momenta; a smaller alpha never gets to the edge, because q < 1 or q < 2."""
_SMALL_WORK = 16_000.0
"""Of tasks that take no time to speak of."""
_SIZES = ((2, 96), (5, 48), (12, 12), (3, 32))
"""G and T of the cells to simulate."""


@dataclass(frozen=True, slots=True)
class IdentityTask:
    """To check the identities of the derivation on all cases."""

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return _SMALL_WORK

    def measure(self) -> "IdentityCell":
        """Check them."""
        return IdentityCell(self, tuple(largest_error(*case) for case in CASES))


@dataclass(frozen=True, slots=True)
class EdgeTask:
    """To measure the edges of stability."""

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return _SMALL_WORK

    def measure(self) -> "EdgeCell":
        """Measure them."""
        return EdgeCell(self, (*_edges(_CO2, 1), *_edges(_SLOWMO, 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsTask:
    """To compare simulated means with exact moments, on a quadratic family."""

    family: str
    workers: int
    local_steps: int
    rounds: int
    delay: int
    seeds: int

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return self.rounds * self.local_steps

    def measure(self) -> "MomentsCell":
        """Compare them."""
        return MomentsCell(self, scores(self, self.delay))


@dataclass(frozen=True, slots=True)
class IdentityCell:
    """The largest relative error of the identities, by case."""

    task: IdentityTask
    errors: tuple[float, ...]
    kind: Literal["identities"] = "identities"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """An edge of stability in alpha q, measured and exact."""

    alpha: float
    beta: float
    delay: int
    measured: float
    exact: float


@dataclass(frozen=True, slots=True)
class EdgeCell:
    """All edges of stability."""

    task: EdgeTask
    edges: tuple[Edge, ...]
    kind: Literal["edges"] = "edges"


@dataclass(frozen=True, slots=True)
class MomentsCell:
    """The z of simulated means against exact moments, by variant."""

    task: MomentsTask
    scores: tuple[tuple[float, ...], ...]
    kind: Literal["moments"] = "moments"


OracleTask = IdentityTask | EdgeTask | MomentsTask
OracleCell = IdentityCell | EdgeCell | MomentsCell


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleFindings:
    """Everything that the report says about this layer. `identities` is the number of cases."""

    identities: int
    largest_identity_error: float
    configurations: int
    scores: tuple[float, ...]
    largest_score: float
    edges: tuple[Edge, ...]
    largest_edge_error: float


def plan(*, quick: bool) -> Iterator[OracleTask]:
    """Cells to simulate, the identities, and the edges."""
    yield IdentityTask()
    yield EdgeTask()
    sizes = {1: (_SIZES[0], _SIZES[1]), 3: (_SIZES[1], _SIZES[2])}
    sizes |= {8: (_SIZES[2], _SIZES[3]), 16: (_SIZES[3], _SIZES[0])}
    for family in ("isotropic", "spread", "quadratics apart"):
        for tau in (1, 8) if quick else (1, 3, 8, 16):
            for delay, (workers, rounds) in zip((1, 0), sizes[tau], strict=True):
                yield MomentsTask(
                    family=family,
                    workers=workers,
                    local_steps=tau,
                    rounds=rounds,
                    delay=delay,
                    seeds=500 if quick else 4000,
                )


def moments_variants() -> Variants:
    """Three settings that run side by side."""
    return variants(
        np.array([0.02, 0.08, 0.02]),
        outer_step=np.array([0.5, 0.7, 1.0]),
        momentum=np.array([0.5, 0.2, 0.0]),
        penalty=np.array([1.0, 2.0, 1.0]),
        noise=np.array([1.0, 0.5, 2.0]),
    )


def scores(task: MomentsTask, claimed: int) -> tuple[tuple[float, ...], ...]:
    """Those of `z_scores` against the oracle for the delay `claimed`.

    Drift is exactly 0 with one local step, and has no z there.
    """
    problem = FAMILIES[task.family](task.workers)
    assert isinstance(problem, Quadratic)
    which = moments_variants()
    size = RunSize(
        workers=task.workers,
        rounds=task.rounds,
        local_steps=task.local_steps,
        seeds=task.seeds,
        delay=task.delay,
    )
    exact = exact_moments.exact(problem, which, replace(size, delay=claimed))
    seed = (task.local_steps, task.delay, *task.family.encode())
    return z_scores(problem, which, size, exact, seed)


def z_scores(
    problem: Problem, which: Variants, size: RunSize, exact: Moments, seed: Sequence[int]
) -> tuple[tuple[float, ...], ...]:
    """The z of simulated A, drift and |x_T|^2 against exact moments: per variant.

    What does not vary has no z. Every variant has its own seed in front of `seed`.
    """
    rows = []
    for place in range(len(which)):
        alone = select(which, slice(place, place + 1))
        measured = run(problem, alone, size, seed=[place, *seed])
        pairs = (
            (measured.gradient, exact.gradient[place]),
            (measured.drift, exact.drift[place]),
            ((measured.final**2).sum(axis=-1), exact.final[1, place].sum()),
        )
        row = (_score(values[0], expected) for values, expected in pairs)
        rows.append(tuple(z for z in row if z is not None))
    return tuple(rows)


def _score(values: Array, expected: float) -> float | None:
    """How many standard errors the mean is from what is expected; None where nothing varies."""
    error = float(values.std(ddof=1)) / np.sqrt(len(values))
    return float((values.mean() - expected) / error) if error else None


def _edges(pairs: Sequence[tuple[float, float]], delay: int) -> Iterator[Edge]:
    """Where noiseless runs stop shrinking, by simulation, for every (alpha, beta)."""
    tau = 3
    progress = np.array([exact_moments.edge(beta, delay) + _OFFSETS for _, beta in pairs])
    alpha, beta = (np.array(part)[:, None] + 0 * _OFFSETS for part in zip(*pairs, strict=True))
    step = 1 - np.cbrt(1 - progress / alpha)
    which = variants(step.ravel(), outer_step=alpha.ravel(), momentum=beta.ravel())
    problem = same(1.0)
    size = RunSize(workers=1, rounds=_EDGE_ROUNDS, local_steps=tau, delay=delay)
    _, path = walk(problem, which, size)
    distance = np.log(
        np.abs(path.points[:-1]) + np.abs(path.momenta * which.inner_step[:, None, None])
    )[:, :, 0, 0].reshape(_EDGE_ROUNDS, *progress.shape)
    quarter = _EDGE_ROUNDS // 4
    growth = distance[-quarter:].mean(axis=0) - distance[quarter : 2 * quarter].mean(axis=0)
    for row, (a, b) in enumerate(pairs):
        measured = float(np.interp(0.0, growth[row], progress[row]))
        exact = exact_moments.edge(b, delay)
        yield Edge(alpha=a, beta=b, delay=delay, measured=measured, exact=exact)


def summary(cells: Sequence[OracleCell]) -> OracleFindings:
    """Everything that the report says about this layer."""
    variants_scores = [row for c in cells if isinstance(c, MomentsCell) for row in c.scores]
    scores_ = tuple(z for row in variants_scores for z in row)
    errors = [error for c in cells if isinstance(c, IdentityCell) for error in c.errors]
    edges = tuple(edge for c in cells if isinstance(c, EdgeCell) for edge in c.edges)
    return OracleFindings(
        identities=len(errors),
        largest_identity_error=max(errors),
        configurations=len(variants_scores),
        scores=scores_,
        largest_score=max(abs(z) for z in scores_),
        edges=edges,
        largest_edge_error=max(abs(edge.measured - edge.exact) for edge in edges),
    )
