"""The oracle layer of the protocol: identities, exact moments against simulation, stability."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from analysis.convergence import exact_moments
from analysis.convergence.exact_moments import Moments
from analysis.convergence.objectives.families import FAMILIES, same
from analysis.convergence.objectives.problems import Array, Problem, Quadratic
from analysis.convergence.protocol.identities import CASES, largest_error
from analysis.convergence.setting import RunSize, Variants, select, variants
from analysis.convergence.simulate import run, walk

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
                    seeds=4000,
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

    What does not vary has no z. Every variant has a seed of its own in front of `seed`.
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
