"""The bound against measured gradients, over a grid of configurations."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from analysis.convergence import bound, exact_moments
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.objectives.families import AT_MINIMUM, FAMILIES
from analysis.convergence.objectives.logistic import Logistic, Minibatches
from analysis.convergence.objectives.problems import Array, Gaussian, Problem, Quadratic
from analysis.convergence.protocol.tightness import EXACT, TightnessRow
from analysis.convergence.setting import Late, RunSize, Setting, Variants, select, variants
from analysis.convergence.simulate import run

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
_MORE = 8
"""Factor of the seeds of what exceeds the bound."""
_ATTEMPTS = 3
_MAX = 2**18
"""Numbers of an array that are simulated at once."""
_BATCH = 8
"""Rows of a minibatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridTask:
    """Runs of one family and size, for all steps and penalties; by the oracle with 0 seeds.

    With an `inner_step` only that and `outer_step` are run, without momentum, penalty and noise.
    With `late_steps` averages are used that many local steps late, by all `mixes` of what is
    kept and predicted.
    """

    family: str
    workers: int
    local_steps: int
    rounds: int
    delay: int
    seeds: int
    inner_step: float | None = None
    outer_step: float = 1.0
    late_steps: int | None = None
    mixes: tuple[tuple[float, float], ...] = ()

    @property
    def work(self) -> float:
        """About how many local steps it takes; those of logistic regression count fifty times."""
        return self.rounds * self.local_steps * (50 if self.family.startswith("logistic") else 1)

    @property
    def drawn(self) -> bool:
        """Whether noise comes from minibatches."""
        return self.family.endswith("minibatches")

    def size(self, seeds: int) -> RunSize:
        """What is run, with a number of seeds."""
        return RunSize(
            workers=self.workers,
            rounds=self.rounds,
            local_steps=self.local_steps,
            seeds=seeds,
            delay=self.delay,
            late_steps=self.late_steps,
        )

    def measure(self) -> "GridCell":
        """Run everything.

        Where the mean and its margin exceed the bound, fresh runs with more seeds decide, whether
        the mean itself exceeds it or not: of 100,000 configurations chance lifts some. The largest
        sample alone is judged, and what exceeds the bound there is a violation.
        """
        problem = FAMILIES[self.family](self.workers)
        settings = list(_settings(problem, self))
        runs = _measured(problem, settings, self, self.seeds)
        for attempt in range(1, _ATTEMPTS + 1):
            rows = GridCell(self, tuple(runs)).rows()
            places = [place for place, row in enumerate(rows) if row.violated and row.seeds]
            if not places:
                break
            chosen = [settings[place] for place in places]
            again = _measured(problem, chosen, self, self.seeds * _MORE**attempt)
            for place, run_again in zip(places, again, strict=True):
                runs[place] = run_again
        return GridCell(self, tuple(runs))


@dataclass(frozen=True, slots=True)
class GridRun:
    """One setting, with the noise and heterogeneity that were met, and A with its error."""

    setting: Setting
    measured: float
    error: float
    seeds: int


@dataclass(frozen=True, slots=True)
class GridCell:
    """All runs of a task."""

    task: GridTask
    runs: tuple[GridRun, ...]
    kind: Literal["grid"] = "grid"

    def rows(
        self, evaluate: Callable[[Setting], Bound | Infeasible] | None = None
    ) -> list[TightnessRow]:
        """Every run with its bound; another `evaluate` replaces our bound by another one."""
        evaluate = evaluate or bound.evaluate
        family = self.task.family if self.task.seeds else self.task.family + EXACT
        return [
            TightnessRow(
                family=family,
                delay=self.task.delay if r.setting.late is None else _named(r.setting.late),
                rule="gap-aware" if r.setting.most_penalty else f"{r.setting.penalty:g}",
                setting=r.setting,
                measured=r.measured,
                error=r.error,
                bound=evaluate(r.setting),
                seeds=r.seeds,
            )
            for r in self.runs
        ]


class _Averages(NamedTuple):
    """By variant: A, its error, and the zeta^2 and sigma^2 that were met."""

    gradient: Array
    error: Array
    spread: Array
    noise: Array


def _measured(
    problem: Problem, settings: Sequence[Setting], task: GridTask, seeds: int
) -> list[GridRun]:
    """Run settings side by side; what they met takes the place of what they were made with."""
    which = variants(
        np.array([setting.inner_step for setting in settings]),
        outer_step=np.array([setting.outer_step for setting in settings]),
        momentum=np.array([setting.momentum for setting in settings]),
        penalty=np.array([setting.penalty for setting in settings]),
        noise=np.array([setting.noise for setting in settings]),
        keep=np.array([setting.late.keep if setting.late else 1.0 for setting in settings]),
        predict=np.array([setting.late.predict if setting.late else 0.0 for setting in settings]),
        gap_aware=np.array([setting.most_penalty is not None for setting in settings]),
    )
    met = _simulated(problem, which, task, seeds) if seeds else _exact(problem, which, task)
    known = problem.most_spread
    return [
        GridRun(
            replace(
                setting,
                noise=float(met.noise[place]),
                heterogeneity=float(met.spread[place]) if known is None else known,
            ),
            measured=float(met.gradient[place]),
            error=float(met.error[place]),
            seeds=seeds,
        )
        for place, setting in enumerate(settings)
    ]


def _exact(problem: Problem, which: Variants, task: GridTask) -> _Averages:
    """By the oracle, without error."""
    assert isinstance(problem, Quadratic)
    exact = exact_moments.late_exact if task.late_steps else exact_moments.exact
    moments = exact(problem, which, task.size(1), spread=problem.heterogeneous)
    return _Averages(moments.gradient, np.zeros(len(which)), moments.spread, which.noise)


def _simulated(problem: Problem, which: Variants, task: GridTask, seeds: int) -> _Averages:
    """By simulation; every variant of every cell has its own noise."""
    size = task.size(seeds)
    sampler = (
        Minibatches(problem, _BATCH)
        if task.drawn and isinstance(problem, Logistic)
        else Gaussian(problem)
    )
    seed = [task.workers, task.rounds, task.local_steps, task.delay, seeds, *task.family.encode()]
    seed += [task.late_steps] if task.late_steps else []
    step = max(1, _MAX // (seeds * task.workers * len(problem.start)))
    parts = []
    for first in range(0, len(which), step):
        part = run(
            problem,
            select(which, slice(first, first + step)),
            size,
            seed=[first, *seed],
            apart=True,
            sampler=sampler,
        )
        error = part.gradient.std(axis=1, ddof=1) / np.sqrt(seeds)
        parts.append((part.gradient.mean(axis=1), error, part.spread, part.variance))
    return _Averages(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _settings(problem: Problem, task: GridTask) -> Iterator[Setting]:
    """The settings that run side by side; what is measured later is left out."""
    whole = Setting(
        smoothness=problem.smoothness,
        noise=0.0,
        gap=float(problem.value(problem.start)),
        workers=task.workers,
        rounds=task.rounds,
        local_steps=task.local_steps,
        inner_step=task.inner_step or 1.0,
        delay=task.delay,
        convex=problem.convex,
    )
    if task.inner_step is not None:
        for late in _lates(task):
            yield replace(whole, outer_step=task.outer_step, late=late)
        return
    resting = task.family in AT_MINIMUM
    fractions: tuple[float, ...] = _FRACTIONS
    if resting:  # workers that differ would drift apart without end at larger ones
        fractions = (
            _SMALL_FRACTIONS[:2] if problem.heterogeneous else _SMALL_FRACTIONS + _FRACTIONS[-1:]
        )
    noises = (0.0,) if task.drawn or (resting and problem.heterogeneous) else _NOISES
    pairs = _PAIRS + (_SMALL_PAIRS if resting else ())
    for late, (outer_step, momentum) in product(_lates(task), pairs):
        for penalty in _PENALTIES:
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
            largest = _largest(ruled, problem)
            for fraction in fractions:
                for noise in noises[-1:] if resting else noises:
                    yield replace(ruled, inner_step=fraction * largest, noise=noise)


def _largest(setting: Setting, problem: Problem) -> float:
    """The largest feasible step; with late averages none with which workers drift away."""
    largest = bound.largest_inner_step(setting)
    if setting.late is None or (problem.convex and not problem.heterogeneous):
        return largest
    return min(largest, _GENTLE / (setting.smoothness * setting.local_steps))


def _lates(task: GridTask) -> list[Late | None]:
    """How averages are late, if they are by steps."""
    if task.late_steps is None:
        return [None]
    return [Late(steps=task.late_steps, keep=keep, predict=p) for keep, p in task.mixes]


def _named(late: Late) -> str:
    mix = f", keep {late.keep:g}" if late.keep < 1 else ""
    mix += f", predict {late.predict:g}" if late.predict else ""
    return f"{late.steps} step{'' if late.steps == 1 else 's'}{mix}"
