"""One cause at a time: what delay adds with the same noise, and what each term of the bound covers.

Common random numbers make small differences visible; quadratics have exact parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from analysis.convergence import bound, exact_moments
from analysis.convergence.bound import Bound
from analysis.convergence.objectives.families import FAMILIES
from analysis.convergence.objectives.problems import Quadratic
from analysis.convergence.setting import RunSize, Setting, Variants, variants
from analysis.convergence.simulate import run

_CLIPS = (8.0, 2.0, 0.5)
_PENALTIES = (1.0, 2.0, 4.0)
_LOADS = (0.2, 0.4, 0.8, 1.2, 1.6)
"""gamma L tau of the runs that penalty and clipping may rescue."""
_STEPS = 16
_CEILING = 1e300
"""Stands for every larger value, and for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescueTask:
    """To measure A with several penalties and clips."""

    family: str
    delay: int
    seeds: int
    rounds: int

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return self.rounds * _STEPS

    def measure(self) -> "RescueCell":
        """Measure it for every step and rule."""
        problem = FAMILIES[self.family](8)
        rules = _rules(self.delay)
        cases = [(load, *rule) for load in _LOADS for rule in rules]
        load, penalty, clip, aware = (np.array(part) for part in zip(*cases, strict=True))
        which = variants(
            load / _STEPS / problem.smoothness,
            outer_step=1.0,
            momentum=0.5,
            penalty=penalty,
            clip=clip,
            noise=_SIGMA2,
            gap_aware=aware,
        )
        size = RunSize(
            workers=8,
            rounds=self.rounds,
            local_steps=_STEPS,
            seeds=self.seeds,
            delay=self.delay,
        )
        outcome = run(problem, which, size, seed=9)
        first = float((problem.gradient(problem.start) ** 2).sum())
        with np.errstate(invalid="ignore"):
            measured = np.nan_to_num(outcome.gradient.mean(axis=1), nan=np.inf, posinf=np.inf)
        lines = [
            RescueLine(
                load=case[0],
                rule=_rule(which, place),
                measured=min(float(measured[place]), _CEILING),
                clipped=float(outcome.clipped[place]),
                lost=bool(measured[place] > first),
            )
            for place, case in enumerate(cases)
        ]
        return RescueCell(self, first, tuple(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class RescueLine:
    """A at one gamma L tau under a rule, the share of clipped elements, whether A grew."""

    load: float
    rule: str
    measured: float
    clipped: float
    lost: bool


@dataclass(frozen=True, slots=True)
class RescueCell:
    """All rules and steps; `first` is the squared gradient at the start."""

    task: RescueTask
    first: float
    lines: tuple[RescueLine, ...]
    kind: Literal["rescue"] = "rescue"


def _rules(delay: int) -> list[tuple[float, float, bool]]:
    """Penalty, clip, and whether the penalty is gap-aware."""
    rules = [(penalty, np.inf, False) for penalty in _PENALTIES]
    rules += [(1.0, clip, False) for clip in _CLIPS]
    return [*rules, (1.0, np.inf, True)] if delay else rules


def _rule(which: Variants, place: int) -> str:
    if which.gap_aware[place]:
        return "gap-aware penalty"
    if np.isfinite(which.clip[place]):
        return f"clip {which.clip[place]:g}"
    penalty = which.penalty[place]
    return "neither" if penalty == 1 else f"penalty {penalty:g}"


_SIGMA2 = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessTask:
    """To measure the excess of CO2 over SlowMo in A, with the same noise."""

    rounds: int
    seeds: int

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return self.rounds * 16

    def measure(self) -> "StalenessCell":
        """Measure it on four families."""
        families = ("isotropic", "spread", "cosine", "hill")
        return StalenessCell(self, tuple(x for family in families for x in _excess(self, family)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessExcess:
    """A of SlowMo, and how much more it is for CO2.

    `error` is the standard error of the excess, `alone` what it would be with independent noise.
    """

    family: str
    gamma: float
    beta: float
    synchronous: float
    excess: float
    error: float
    alone: float


@dataclass(frozen=True, slots=True)
class StalenessCell:
    """All excesses."""

    task: StalenessTask
    lines: tuple[StalenessExcess, ...]
    kind: Literal["staleness"] = "staleness"


def _excess(task: StalenessTask, family: str) -> Iterator[StalenessExcess]:
    problem = FAMILIES[family](4)
    which = variants(
        np.array([0.02, 0.05, 0.02]) / problem.smoothness,
        outer_step=np.array([1.0, 1.0, 0.5]),
        momentum=np.array([0.0, 0.0, 0.5]),
        noise=_SIGMA2,
    )
    size = RunSize(workers=4, local_steps=4, rounds=task.rounds, seeds=task.seeds)
    late = run(problem, which, size, seed=5).gradient
    now = run(problem, which, replace(size, delay=0), seed=5).gradient
    root = np.sqrt(task.seeds)
    for place in range(len(which)):
        both = np.hypot(late[place].std(ddof=1), now[place].std(ddof=1))
        yield StalenessExcess(
            family=family,
            gamma=float(which.inner_step[place]),
            beta=float(which.momentum[place]),
            synchronous=float(now[place].mean()),
            excess=float((late - now)[place].mean()),
            error=float((late - now)[place].std(ddof=1) / root),
            alone=float(both / root),
        )


@dataclass(frozen=True, slots=True)
class TermsTask:
    """To compute the parts of the exact A on quadratics and the term that covers each.

    A is linear in |x_0|^2 and sigma^2, so that runs without either give the other's part. Staleness
    is what delay adds to the part of the noise, drift what local steps add for workers that differ.
    """

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return 16_000.0

    def measure(self) -> "TermsCell":
        """Compute them for several steps, as shares of the largest feasible one, and tau."""
        return TermsCell(
            self,
            tuple(
                part
                for fraction in (0.1, 0.5, 0.95)
                for tau in (1, 4, 16)
                for part in _parts(fraction, tau)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TermPart:
    """A part of A, and the term that covers it; the ratio is None where the term is 0."""

    term: str
    fraction: float
    tau: int
    measured: float
    bound: float
    ratio: float | None


@dataclass(frozen=True, slots=True)
class TermsCell:
    """All parts."""

    task: TermsTask
    lines: tuple[TermPart, ...]
    kind: Literal["terms"] = "terms"


def _parts(fraction: float, tau: int) -> Iterator[TermPart]:
    problem = FAMILIES["isotropic"](4)
    two = FAMILIES["two kinds"](4)
    assert isinstance(problem, Quadratic)
    assert isinstance(two, Quadratic)
    whole = Setting(
        smoothness=1.0,
        noise=_SIGMA2,
        gap=float(problem.value(problem.start)),
        workers=4,
        rounds=4096,
        local_steps=tau,
        inner_step=1.0,
        convex=True,
    )
    whole = replace(whole, inner_step=fraction * bound.largest_inner_step(whole))
    covered = bound.evaluate(whole)
    assert isinstance(covered, Bound)
    size = RunSize(workers=4, rounds=whole.rounds, local_steps=tau)
    noisy = variants(whole.inner_step, noise=_SIGMA2)
    quiet = variants(whole.inner_step)
    resting = replace(problem, start=0 * problem.start)
    start = exact_moments.exact(problem, quiet, size)
    late = exact_moments.exact(resting, noisy, size)
    now = exact_moments.exact(resting, noisy, replace(size, delay=0))
    every_step = RunSize(workers=4, rounds=whole.rounds * tau, local_steps=1, delay=0)
    single = exact_moments.exact(resting, noisy, every_step)
    floor = exact_moments.exact(replace(two, start=two.optimum), quiet, size, spread=True)
    apart = bound.evaluate(replace(whole, noise=0.0, heterogeneity=float(floor.spread[0])))
    assert isinstance(apart, Bound)
    for name, part, term in (
        ("optimization", start.gradient[0], covered.optimization),
        ("noise", single.gradient[0], covered.noise),
        ("staleness", late.gradient[0] - now.gradient[0], covered.staleness),
        ("drift", floor.gradient[0], apart.drift),
    ):
        yield TermPart(
            term=name,
            fraction=fraction,
            tau=tau,
            measured=float(part),
            bound=term,
            ratio=float(part) / term if term else None,
        )
