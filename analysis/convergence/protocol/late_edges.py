"""Where late averages stop converging: Jury's conditions against eigenvalues and runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.convergence import late_moments
from analysis.convergence.late_moments import LateSystem
from analysis.convergence.objectives.families import same
from analysis.convergence.objectives.problems import Array, Quadratic
from analysis.convergence.setting import RunSize, variants
from analysis.convergence.simulate import run

_SMALL_WORK = 16_000.0
_SIZES = ((1, 1), (4, 1), (4, 3), (12, 4), (12, 12), (7, 5))
"""Tau and d of the systems whose stability is asked for."""
_EDGES = ((1.0, 0.0), (1.0, 0.5), (0.5, 0.9), (2.0, 0.5), (3.0, 0.0))
"""Outer steps and momenta whose edges are measured."""
_MIXES = ((1.0, 0.0), (0.5, 0.0), (0.5, 0.5), (0.75, 0.25))
"""What is kept, and what is predicted."""
_ROUNDS = 500
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
        wrong = [_disagreements(tau, steps, self.systems // len(_SIZES)) for tau, steps in _SIZES]
        return LateStabilityCell(self, sum(wrong), tuple(_edges()))


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
    matrix = late_moments.transition(same(1.0), which, size)[:, 0, :-1, :-1]
    radius = np.abs(np.linalg.eigvals(matrix)).max(axis=-1)
    system = LateSystem(load, tau, steps, alpha, beta, keep, predict)
    own = np.abs(late_moments.disagreement(system))
    by_matrix = (radius < 1) & (own < 1)
    clear = np.abs(np.maximum(radius, own) - 1) > 1e-9  # noqa: PLR2004 - round-off decides there
    return int((clear & (by_matrix != late_moments.is_stable(system))).sum())


def _edges() -> Iterator[LateEdge]:
    """Edges by Jury's conditions, and runs beside them."""
    for tau, steps in ((3, 1), (3, 3)):
        cells = [(*pair, *mix) for pair in _EDGES for mix in _MIXES]
        alpha, beta, keep, predict = (np.array(part) for part in zip(*cells, strict=True))
        system = LateSystem(0.0, tau, steps, alpha, beta, keep, predict)
        exact = late_moments.edges(system)
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
    for rounds in (_ROUNDS, 2 * _ROUNDS):
        size = RunSize(
            workers=2, rounds=rounds, local_steps=int(system.tau), late_steps=int(system.steps)
        )
        found = run(problem, which, size)
        means.append(np.stack([found.gradient[:, 0], found.drift[:, 0]]))
    return np.asarray((means[1] / means[0]).max(axis=0))
