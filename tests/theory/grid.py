"""The bound against measured gradients, over a grid: averages late by rounds, or by steps."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from analysis.convergence import bound, clipping
from analysis.convergence.bound import TERMS, Bound, Infeasible
from analysis.convergence.setting import (
    Array,
    Late,
    Setting,
    Variants,
    size_of,
    variants_of,
)
from analysis.convergence.simulate import Gaussian, Sampler
from analysis.convergence.verify import margin
from theory.cells import Cells, Check, table
from theory.exact_moments import exact
from theory.problems import AT_MINIMUM, FAMILIES, Known, Logistic, Minibatches, run, select

_LEAST, _LEAST_LATE, _LEAST_LATE_QUICK = 3_000, 20_000, 2_000
"""Distinct configurations that the bound has to hold on."""
_TIGHT = 0.7
"""A ratio of measured to bound that one family has to exceed."""
FACTORS = (0.0, 0.1, 0.5)
"""What a term of the bound is multiplied by, to see whether that is noticed."""
PART = 0.5
"""What is left of omega^2 in a condition that has to be noticed as wrong."""
_PAIRS = ((1.0, 0.0), (0.5, 0.5), (1.0, 0.5), (0.1, 0.9), (0.6, 0.8), (1.5, 0.0))
"""Outer steps and momenta."""
_SMALL_PAIRS = ((0.1, 0.0), (0.01, 0.0), (0.001, 0.0))
"""With these the staleness term is nearly all of the bound of one worker at a minimum."""
_PENALTIES: tuple[float | None, ...] = (1.0, 2.0, None)
"""Constants; None is the gap-aware rule."""
_FRACTIONS = (0.1, 0.5, 0.95)
"""Of the largest feasible inner step."""
_SMALL_FRACTIONS = (0.02, 0.1, 0.5)
"""At a minimum: where the constants of staleness and drift are nearly reached."""
_NOISES = (0.0, 0.3, 10.0)
_GENTLE = 0.6
"""Largest gamma L tau of late averages where workers differ, or bend away from each other: with
ln 2 or more drift may grow from round to round, which the condition of the bound allows."""
MORE, ATTEMPTS = 8, 3
"""Factor of the seeds of what exceeds the bound, and how often."""
_MOST_NUMBERS = 2**18
"""Numbers of an array that are simulated at once."""
_BATCH = 8
"""Rows of a minibatch."""
_EXACT = ", exact"
"""Behind the name of a family whose A comes from the oracle."""


class Task(NamedTuple):
    """Runs of one family and size, for all steps and penalties; by the oracle with 0 seeds.

    With an `inner_step` only that and `outer_step` are run, without momentum, penalty and noise.
    With `late` averages are used that many local steps late, by all `mixes` of what is kept and
    predicted.
    """

    family: str
    workers: int
    tau: int
    rounds: int
    seeds: int
    delay: int = 1
    late: int | None = None
    mixes: tuple[tuple[float, float], ...] = ()
    inner_step: float | None = None
    outer_step: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting with the noise and heterogeneity that were met, A with its error, the bound."""

    family: str
    setting: Setting
    measured: float
    error: float
    seeds: int
    bound: Bound | Infeasible

    @property
    def total(self) -> float:
        """The bound, or NaN."""
        return self.bound.total if isinstance(self.bound, Bound) else np.nan

    @property
    def ratio(self) -> float:
        """Measured over bound; NaN where there is none, infinite where it is 0 and A is not."""
        if self.total == 0:
            return np.inf if self.measured else 0.0
        return self.measured / self.total

    @property
    def violated(self) -> bool:
        """Whether the mean plus its margin exceeds the bound."""
        reached = self.measured + margin(self.seeds) * self.error
        return isinstance(self.bound, Bound) and not reached <= self.total


# --- what is run ----------------------------------------------------------------------------------

_BEYOND = (
    (2, 1, 1.0, 0.2612),
    (4, 1, 1.0, 0.1502),
    (16, 1, 1.0, 0.0423),
    (1, 4, 1000.0, 1.139e-4),
    (0, 16, 1000.0, 8.62e-5),
)
"""Delays, tau, outer and inner steps beyond the condition, where gradient descent on x^2/2 for 200
rounds exceeds the bound by 2 to 61 %: a condition with half of omega^2 would let them pass.
Source: docs/theory-proofs.md, the condition matters."""
_LATE_BEYOND = ((6, 5, 10.0, 0.0093), (6, 1, 5.0, 0.0378), (16, 16, 1000.0, 2.923e-5))
"""Tau, d, outer and inner steps of the same for late averages."""
_MIXES = ((1.0, 0.0), (0.5, 0.5), (0.75, 0.25), (0.5, 0.0), (0.2, 0.8), (1.0, 0.5))
"""What is kept, and what is predicted."""


def plan(*, quick: bool) -> Iterator[Task]:
    """All cells: those of averages that are late by rounds, then by steps."""
    for family in FAMILIES:
        if family not in AT_MINIMUM:
            yield from _simulated_plan(family, quick=quick)
    yield from _exact_plan(quick=quick)
    for delay, tau, outer_step, step in _BEYOND:
        yield Task("isotropic", 1, tau, 200, 2, delay, inner_step=step, outer_step=outer_step)
    mixes = _MIXES[:2] if quick else _MIXES
    delays = {1: (1,), 4: (2,), 16: (16,)} if quick else {1: (1,), 4: (1, 2, 4), 16: (1, 4, 16)}
    for tau, late in ((tau, late) for tau, lates in delays.items() for late in lates):
        for task in _late_plan(tau, late, quick=quick):
            yield task._replace(late=late, mixes=mixes)
    # so long and gentle that the drift is nearly all that its term allows
    rounds = 4096 if quick else 16384
    yield Task("opposed at its minimum", 2, 2, rounds, 0, late=2, mixes=_MIXES[:2])
    for tau, late, outer_step, step in _LATE_BEYOND:
        longer = Task("isotropic", 1, tau, 600, 2, late=late, mixes=_MIXES[:1])
        yield longer._replace(inner_step=step, outer_step=outer_step)


def _simulated_plan(family: str, *, quick: bool) -> Iterator[Task]:
    if family.startswith("logistic"):
        for tau, rounds in ((1, 8),) if quick else product((1, 8), (8, 64)):
            yield Task(family, 4, tau, rounds, 8)
        return
    fewest = 2 if FAMILIES[family](2).heterogeneous else 1
    sizes = product(
        (4,) if quick else (fewest, 4, 16), (1, 4, 16), (8, 64) if quick else (3, 8, 64, 256)
    )
    for workers, tau, rounds in sizes:
        if tau * rounds <= (256 if quick else 2048):
            for delay in (1,) if quick else (1, 0, 2):
                yield Task(family, workers, tau, rounds, 8 if quick else 12, delay)


def _exact_plan(*, quick: bool) -> Iterator[Task]:
    """By the oracle: long runs on quadratics, and longer ones without a gap.

    Staleness and drift are then all of A.
    """
    taus = (1, 16) if quick else (1, 4, 16, 64)
    sizes = ((16,), taus, (1024,)) if quick else ((2, 16), taus, (64, 1024, 16384))
    for family in ("isotropic", "spread", "quadratics apart", "two kinds"):
        for workers, tau, rounds in product(*sizes):
            for delay in (1,) if quick else (1, 0):
                yield Task(family, workers, tau, rounds, 0, delay)
    for family in AT_MINIMUM:
        unlike = FAMILIES[family](2).heterogeneous
        for tau, rounds in product(taus, (16384,) if quick else (256, 4096, 16384)):
            if not (unlike and tau == 1):  # no drift
                for delay in (1,) if unlike else (1, 0):  # local SGD would run away
                    yield Task(family, 2 if unlike else 1, tau, rounds, 0, delay)


def _late_plan(tau: int, late: int, *, quick: bool) -> Iterator[Task]:
    exactly = ("isotropic", "spread", "two kinds", "quadratics apart")
    for family in exactly[::3] if quick else exactly:
        unlike = FAMILIES[family](2).heterogeneous
        for rounds in (64,) if quick else (8, 64, 256):
            yield Task(family, 4 if unlike else 16, tau, rounds, 0)
    for family in AT_MINIMUM:
        unlike = FAMILIES[family](2).heterogeneous
        if not (unlike and tau == 1):  # no drift
            yield Task(family, 2 if unlike else 1, tau, 256 if quick and unlike else 1024, 0)
    if not quick or 1 < late < tau:
        for family in ("cosine", "hill", "cosines apart", "hills apart"):
            for rounds in (8,) if quick else (8, 64):
                yield Task(family, 4, tau, rounds, 8 if quick else 12)


def settings(problem: Known, task: Task) -> Iterator[Setting]:
    """The settings that run side by side; what is measured later is left out."""
    whole = Setting(
        smoothness=problem.smoothness,
        noise=0.0,
        gap=float(problem.value(problem.start)),
        workers=task.workers,
        rounds=task.rounds,
        local_steps=task.tau,
        inner_step=task.inner_step or 1.0,
        delay=task.delay,
        convex=problem.convex,
    )
    mixes = task.mixes or ((1.0, 0.0),)
    lates = [Late(steps=task.late, keep=k, predict=p) if task.late else None for k, p in mixes]
    if task.inner_step is not None:
        yield from (replace(whole, outer_step=task.outer_step, late=late) for late in lates)
        return
    resting, unlike = task.family in AT_MINIMUM, problem.heterogeneous
    fractions: tuple[float, ...] = _FRACTIONS
    if resting:  # workers that differ would drift apart without end at larger ones
        fractions = _SMALL_FRACTIONS[:2] if unlike else (*_SMALL_FRACTIONS, *_FRACTIONS[-1:])
    drawn = task.family.endswith("minibatches")
    noises = (0.0,) if drawn or (resting and unlike) else _NOISES[-1:] if resting else _NOISES
    pairs = _PAIRS + (_SMALL_PAIRS if resting else ())
    for late, (outer_step, momentum), penalty in product(lates, pairs, _PENALTIES):
        if penalty is None and (task.delay == 0 or not task.seeds or (late and late.predict)):
            continue
        ruled = replace(
            whole,
            late=late,
            outer_step=outer_step,
            momentum=momentum,
            penalty=penalty or 1.0,
            most_penalty=1 + 1 / (1 - momentum) if penalty is None else None,
        )
        largest = bound.largest_inner_step(ruled)
        if late and not (problem.convex and not unlike):
            largest = min(largest, _GENTLE / (ruled.smoothness * task.tau))
        for fraction, noise in product(fractions, noises):
            yield replace(ruled, inner_step=fraction * largest, noise=noise)


# --- how it is measured ---------------------------------------------------------------------------


def measure(task: Task) -> list[Row]:
    """Run everything.

    Where the mean and its margin exceed the bound, fresh runs with more seeds decide, whether the
    mean itself exceeds it or not: of 100,000 configurations chance lifts some. The largest sample
    alone is judged, and what exceeds the bound there is a violation.
    """
    problem = FAMILIES[task.family](task.workers)
    chosen = list(settings(problem, task))
    rows = _rows(problem, chosen, task)
    for attempt in range(1, ATTEMPTS + 1):
        high = [index for index, row in enumerate(rows) if row.violated and row.seeds]
        if not high:
            break
        more = task._replace(seeds=task.seeds * MORE**attempt)
        again = _rows(problem, [chosen[index] for index in high], more)
        for index, row in zip(high, again, strict=True):
            rows[index] = row
    return rows


def _rows(problem: Known, chosen: Sequence[Setting], task: Task) -> list[Row]:
    """Run settings side by side; what they met takes the place of what they were made with."""
    which = variants_of(chosen)
    if task.seeds:
        gradient, error, spread, noise = _simulated(problem, which, chosen[0], task)
    else:
        moments = exact(problem, which, size_of(chosen[0], 1), spread=problem.heterogeneous)
        gradient, spread = moments.gradient, moments.spread
        error, noise = np.zeros(len(which)), which.noise
    if problem.most_spread is not None:
        spread = np.full(len(which), problem.most_spread)
    family = task.family + ("" if task.seeds else _EXACT)
    rows = []
    for index, setting in enumerate(chosen):
        met = replace(setting, noise=float(noise[index]), heterogeneity=float(spread[index]))
        rows.append(
            Row(
                family=family,
                setting=met,
                measured=float(gradient[index]),
                error=float(error[index]),
                seeds=task.seeds,
                bound=bound.evaluate(met),
            )
        )
    return rows


def _simulated(problem: Known, which: Variants, setting: Setting, task: Task) -> tuple[Array, ...]:
    """A, its error, zeta^2 and sigma^2 by variant; every one of every cell has its own noise."""
    seeds = task.seeds
    sampler: Sampler = Gaussian(problem)
    if isinstance(problem, Logistic) and task.family.endswith("minibatches"):
        sampler = Minibatches(problem, _BATCH)
    seed = [task.workers, task.rounds, task.tau, task.delay, seeds, *task.family.encode()]
    seed += [task.late] if task.late else []
    together = max(1, _MOST_NUMBERS // (seeds * task.workers * len(problem.start)))
    parts = []
    for first in range(0, len(which), together):
        part = run(
            problem,
            select(which, slice(first, first + together)),
            size_of(setting, seeds),
            seed=[first, *seed],
            apart=True,
            sampler=sampler,
        )
        error = part.gradient.std(axis=1, ddof=1) / np.sqrt(seeds)
        parts.append((part.gradient.mean(axis=1), error, part.spread, part.variance))
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


# --- what has to hold -----------------------------------------------------------------------------


def distinct(rows: Sequence[Row]) -> list[Row]:
    """Rows that are other runs or have other bounds, by nine digits.

    Settings may be the same run: without noise any G, with one local step any alpha and Lambda of
    the same virtual step. Rows without a bound, or with none that is finite, are left out.
    """
    unlike: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        if np.isfinite(row.total):
            family = row.family.removesuffix(_EXACT)
            unlike.setdefault((family, f"{row.measured:.8e}", f"{row.total:.8e}"), row)
    return list(unlike.values())


def noticed(rows: Sequence[Row], part: Array) -> list[int]:
    """Violations if a part of the bound, by row, were FACTORS of itself; and the least safe factor.

    Only such violations count as exceed the bound by their margin, so that no number of seeds would
    undo them. Below the last number, in percent, there are violations; at most 0 if the part could
    be missing.
    """
    reached = np.array([row.measured - margin(row.seeds) * row.error for row in rows])
    totals = np.array([row.total for row in rows])
    there = part > 0
    least = (reached - totals + part)[there] / part[there]
    percent = int(100 * max(0.0, least.max(initial=0.0)))
    return [*(int((~(factor >= least)).sum()) for factor in FACTORS), percent]


def parts(rows: Sequence[Row]) -> dict[str, Array]:
    """The terms of every row, and two parts of staleness: of delay and momentum, and of K - 1.

    N = eta^2 tau (...) + d^2 (tau - 1)/2: the first part is that of delay and momentum. With K = 1
    the term would be 1 - load times itself.
    """
    terms = {name: np.array([getattr(row.bound, name) for row in rows]) for name in TERMS}
    if any(row.setting.late for row in rows):
        return terms
    shares = []
    for row in rows:
        single = bound.gap_constants(replace(row.setting, local_steps=1))[1]
        whole = bound.gap_constants(row.setting)[1]
        shares.append(single * row.setting.local_steps / whole if whole else 0.0)
    loads = np.array([bound.load(row.setting) for row in rows])
    staleness = terms["staleness"]
    of_delay = {"staleness: delay and momentum": staleness * np.array(shares)}
    return terms | of_delay | {"staleness: K - 1": staleness * loads}


def beyond_condition(rows: Sequence[Row]) -> list[Row]:
    """Rows outside the condition, with the bound that a part of omega^2 would let it give.

    They have no noise, so that the staleness term is 0 and the others need no condition.
    """
    beyond = [row for row in rows if isinstance(row.bound, Infeasible)]
    for row in beyond:
        smooth, eta = row.setting.smoothness, row.setting.virtual_step
        omega = math.sqrt(PART) * bound.gap_constants(row.setting)[0]
        assert smooth * (eta + 2 * omega) < 1
        assert row.setting.noise == 0
    return [replace(row, bound=clipping.alone(row.setting)) for row in beyond]


def judge(rows: Sequence[Row], least: int, words: str = "") -> Iterator[Check | str]:
    """Whether the bound holds, is tight somewhere, and would be refuted if it were wrong."""
    feasible = distinct(rows)
    wrong = sum(row.violated for row in feasible)
    there = sum(bool(np.isfinite(row.total)) for row in rows)
    yield Check(
        f"{words}no violation of the bound at mean + 3 standard errors, on {least:,} distinct"
        " configurations or more",
        wrong == 0 and len(feasible) >= least,
        f"{wrong} violations on {len(feasible):,} distinct ones of {there:,} settings",
    )
    tightest = max(feasible, key=lambda row: row.ratio)
    yield Check(
        f"{words}measured/bound exceeds {_TIGHT:g} on a family: the bound is not vacuous",
        tightest.ratio > _TIGHT,
        f"{tightest.ratio:.3f} on {tightest.family}",
    )
    counts = {name: noticed(feasible, part) for name, part in parts(feasible).items()}
    yield Check(
        f"{words}the grid fails when any one term is missing, a tenth or half of itself",
        all(min(counts[name][:-1]) > 0 for name in TERMS),
        "violations with half of it: " + ", ".join(f"{name} {counts[name][2]:,}" for name in TERMS),
    )
    beyond = beyond_condition(rows)
    yield Check(
        f"{words}with half of omega^2 the condition would admit runs that exceed the bound",
        bool(beyond) and all(row.ratio > 1 for row in beyond),
        "measured/bound beyond the condition: " + ", ".join(f"{row.ratio:.3f}" for row in beyond),
    )
    columns = ("part", *(f"violations with {factor:g} of it" for factor in FACTORS), "begin at %")
    yield f"{words}wrong terms\n\n" + table(columns, [(name, *c) for name, c in counts.items()])
    for title, key in (("problem", _family), ("largest term of the bound", dominant)):
        yield f"{words}measured/bound by {title}\n\n" + _grouped(feasible, title, key)


def _family(row: Row) -> str:
    return row.family


def dominant(row: Row) -> str:
    """The largest term of the bound; empty where there is none."""
    return row.bound.dominant if isinstance(row.bound, Bound) else ""


def _grouped(rows: Sequence[Row], title: str, key: Callable[[Row], str]) -> str:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    lines = [
        (
            name,
            f"{len(group):,}",
            sum(row.violated for row in group),
            f"{np.median([row.ratio for row in group]):.3f}",
            f"{max(row.ratio for row in group):.3f}",
        )
        for name, group in groups.items()
    ]
    return table((title, "configurations", "violations", "median", "largest"), lines)


def measured(cells: Cells, *, quick: bool) -> list[Row]:
    """All rows; cells that take long are measured first."""
    tasks = sorted(plan(quick=quick), key=lambda task: -task.rounds * task.tau)
    return [row for cell in cells(measure, [(task,) for task in tasks]) for row in cell]


def checks(cells: Cells, *, quick: bool) -> Iterator[Check | str]:
    """Judge both halves of the grid."""
    rows = measured(cells, quick=quick)
    yield from judge([row for row in rows if not row.setting.late], _LEAST)
    least = _LEAST_LATE_QUICK if quick else _LEAST_LATE
    yield from judge([row for row in rows if row.setting.late], least, "late averages: ")
