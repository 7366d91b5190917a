"""The bound against measured gradients, over a grid of configurations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from analysis.convergence import bound, exact_moments
from analysis.convergence.bound import Setting
from analysis.convergence.objectives.families import AT_MINIMUM, FAMILIES
from analysis.convergence.objectives.logistic import Logistic, Minibatches
from analysis.convergence.objectives.problems import Array, Gaussian, Problem, Quadratic
from analysis.convergence.protocol import tightness
from analysis.convergence.simulate import Variants, run, select, variants

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
_MORE = 8
"""Factor of the seeds of what exceeds the bound."""
_ATTEMPTS = 3
_MOST = 2**18
"""Numbers of an array that are simulated at once."""
_BATCH = 8
"""Rows of a minibatch."""


def plan(*, quick: bool) -> Iterator[dict[str, Any]]:
    """The cells of the grid: everything but what runs side by side."""
    for family in FAMILIES:
        if family in AT_MINIMUM:
            continue
        costly = family.startswith("logistic")
        unlike = FAMILIES[family](2).heterogeneous
        if costly:
            sizes = [(4, tau, rounds) for tau in (1, 8) for rounds in (8, 64)]
            sizes = sizes[1:2] if quick else sizes
        else:
            least = 2 if unlike else 1
            sizes = [
                (workers, tau, rounds)
                for workers in ((4,) if quick else (least, 4, 16))
                for tau in (1, 4, 16)
                for rounds in ((8, 64) if quick else (3, 8, 64, 256))
                if tau * rounds <= (256 if quick else 2048)
            ]
        for workers, tau, rounds in sizes:
            for delay in (1,) if quick or costly else (1, 0, 2):
                yield {
                    "family": family,
                    "workers": workers,
                    "local_steps": tau,
                    "rounds": rounds,
                    "delay": delay,
                    "seeds": 8 if costly or quick else 12,
                }
    yield from _exact_plan(quick=quick)
    yield from _minimum_plan(quick=quick)


def _exact_plan(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Long runs on quadratics, where the oracle gives A without simulation; seeds 0 says so."""
    for family in ("isotropic", "spread", "quadratics apart", "two kinds"):
        for workers in (16,) if quick else (2, 16):
            for tau in (1, 16) if quick else (1, 4, 16, 64):
                for rounds in (1024,) if quick else (64, 1024, 16384):
                    for delay in (1,) if quick else (1, 0):
                        yield {
                            "family": family,
                            "workers": workers,
                            "local_steps": tau,
                            "rounds": rounds,
                            "delay": delay,
                            "seeds": 0,
                        }


def _minimum_plan(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Runs without a gap, by the oracle: long enough for staleness and drift to be all of A."""
    for family in AT_MINIMUM:
        unlike = FAMILIES[family](2).heterogeneous
        for tau in (1, 16) if quick else (1, 4, 16, 64):
            if unlike and tau == 1:
                continue  # no drift
            for rounds in (16384,) if quick else (256, 4096, 16384):
                for delay in (1,) if unlike else (1, 0):  # local SGD would run away
                    yield {
                        "family": family,
                        "workers": 2 if unlike else 1,
                        "local_steps": tau,
                        "rounds": rounds,
                        "delay": delay,
                        "seeds": 0,
                    }


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run all variants of a cell: columns of what differs, A, its error, zeta^2 and sigma^2.

    Where the mean and its margin exceed the bound, fresh runs with more seeds decide, whether the
    mean itself exceeds it or not: of 100,000 configurations chance lifts some. The largest sample
    alone is judged, and what exceeds the bound there is a violation.
    """
    problem = FAMILIES[spec["family"]](spec["workers"])
    chosen = list(_variants(problem, spec))
    columns = {
        name: np.array([float(getattr(setting, name)) for setting in chosen])
        for name in ("inner_step", "outer_step", "momentum", "penalty", "noise")
    }
    aware = np.array([setting.most_penalty is not None for setting in chosen])
    which = variants(columns.pop("inner_step"), **columns, gap_aware=aware)
    cell = _cell(problem, chosen, which, spec, spec["seeds"])
    for attempt in range(1, _ATTEMPTS + 1):
        found = tightness.rows([(spec, cell)])
        places = [place for place, row in enumerate(found) if row.violated and row.seeds]
        if not places:
            break
        again = _cell(
            problem,
            [chosen[place] for place in places],
            select(which, np.array(places)),
            spec,
            spec["seeds"] * _MORE**attempt,
        )
        for name in ("noise", "heterogeneity", "measured", "error", "seeds"):
            for place, value in zip(places, again[name], strict=True):
                cell[name][place] = value
    return cell


def _cell(
    problem: Problem,
    chosen: Sequence[Setting],
    which: Variants,
    spec: Mapping[str, Any],
    seeds: int,
) -> dict[str, Any]:
    if seeds:
        measured, error, spread, noise = _simulated(problem, which, spec, seeds)
    else:
        measured, error, spread, noise = _exact(problem, which, spec)
    known = problem.most_spread
    return {
        "smoothness": problem.smoothness,
        "convex": problem.convex,
        "gap": float(problem.value(problem.start)),
        "inner_step": which.inner_step.tolist(),
        "outer_step": which.outer_step.tolist(),
        "momentum": which.momentum.tolist(),
        "penalty": which.penalty.tolist(),
        "most_penalty": [setting.most_penalty for setting in chosen],
        "noise": noise.tolist(),
        "heterogeneity": (spread if known is None else np.full(len(chosen), known)).tolist(),
        "measured": measured.tolist(),
        "error": error.tolist(),
        "seeds": [seeds] * len(chosen),
    }


def _exact(problem: Problem, which: Variants, spec: Mapping[str, Any]) -> tuple[Array, ...]:
    """A, no error, zeta^2 and sigma^2 by the oracle."""
    assert isinstance(problem, Quadratic)
    found = exact_moments.exact(
        problem,
        which,
        workers=spec["workers"],
        rounds=spec["rounds"],
        local_steps=spec["local_steps"],
        delay=spec["delay"],
        spread=problem.heterogeneous,
    )
    return found.gradient, np.zeros(len(which)), found.spread, which.noise


def _simulated(
    problem: Problem, which: Variants, spec: Mapping[str, Any], seeds: int
) -> tuple[Array, ...]:
    """A with its standard error, zeta^2 and sigma^2 where the runs came by.

    Every variant of every cell has noise of its own.
    """
    drawn = str(spec["family"]).endswith("minibatches") and isinstance(problem, Logistic)
    sizes = {name: spec[name] for name in ("workers", "rounds", "local_steps", "delay")}
    seed = [*sizes.values(), seeds, *spec["family"].encode()]
    step = max(1, _MOST // (seeds * spec["workers"] * len(problem.start)))
    parts = []
    for first in range(0, len(which), step):
        found = run(
            problem,
            select(which, slice(first, first + step)),
            **sizes,
            seeds=seeds,
            seed=[first, *seed],
            apart=True,
            sampler=Minibatches(problem, _BATCH)
            if drawn and isinstance(problem, Logistic)
            else Gaussian(problem),
        )
        error = found.gradient.std(axis=1, ddof=1) / np.sqrt(seeds)
        parts.append((found.gradient.mean(axis=1), error, found.spread, found.variance))
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


def _variants(problem: Problem, spec: Mapping[str, Any]) -> Iterator[Setting]:
    """The settings that run side by side; what is measured later is left out."""
    resting = spec["family"] in AT_MINIMUM
    drawn = str(spec["family"]).endswith("minibatches")
    fractions: tuple[float, ...] = _FRACTIONS
    if resting:  # workers that differ would drift apart without end at larger ones
        fractions = (
            _SMALL_FRACTIONS[:2] if problem.heterogeneous else _SMALL_FRACTIONS + _FRACTIONS[-1:]
        )
    noises = (0.0,) if drawn or (resting and problem.heterogeneous) else _NOISES
    for outer_step, momentum in _PAIRS + (_SMALL_PAIRS if resting else ()):
        for penalty in _PENALTIES:
            if penalty is None and (spec["delay"] == 0 or not spec["seeds"]):
                continue
            whole = Setting(
                smoothness=problem.smoothness,
                noise=0.0,
                gap=1.0,
                workers=spec["workers"],
                rounds=spec["rounds"],
                local_steps=spec["local_steps"],
                inner_step=1.0,
                outer_step=outer_step,
                momentum=momentum,
                penalty=penalty or 1.0,
                most_penalty=1 + 1 / (1 - momentum) if penalty is None else None,
                delay=spec["delay"],
                convex=problem.convex,
            )
            largest = bound.largest_inner_step(whole)
            for fraction in fractions:
                for noise in noises[-1:] if resting else noises:
                    yield replace(whole, inner_step=fraction * largest, noise=noise)
