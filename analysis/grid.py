"""The bound against measured gradients, over a grid of configurations."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from analysis import bound, oracle
from analysis.bound import TERMS, Bound, Infeasible, Setting
from analysis.experiment import Variants, run, variants
from analysis.families import FAMILIES
from analysis.logistic import Logistic, Minibatches
from analysis.problems import Array, Gaussian, Problem, Quadratic

_PAIRS = ((1.0, 0.0), (0.5, 0.5), (1.0, 0.5), (0.1, 0.9), (0.6, 0.8), (1.5, 0.0))
"""Outer steps and momenta."""
_PENALTIES: tuple[float | None, ...] = (1.0, 2.0, None)
"""Constants; None is the gap-aware rule."""
_FRACTIONS = (0.1, 0.5, 0.95)
"""Of the largest feasible inner step."""
_NOISES = (0.0, 0.3, 10.0)
_MARGIN = 3.0
"""Standard errors that are added to the measured mean."""
_BATCH = 8
"""Rows of a minibatch."""


class Row(NamedTuple):
    """One configuration, its measured A with its standard error, and its bound."""

    family: str
    delay: int
    rule: str
    setting: Setting
    measured: float
    error: float
    bound: Bound | Infeasible

    @property
    def ratio(self) -> float:
        """Measured over bound; NaN where there is none."""
        return self.measured / self.bound.total if isinstance(self.bound, Bound) else np.nan

    @property
    def violated(self) -> bool:
        """Whether mean plus three standard errors exceeds the bound."""
        if isinstance(self.bound, Infeasible):
            return False
        return not self.measured + _MARGIN * self.error <= self.bound.total


def plan(*, quick: bool) -> Iterator[dict[str, Any]]:
    """The cells of the grid: everything but what runs side by side."""
    for family in FAMILIES:
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
                    "seeds": 4 if costly else 8 if quick else 12,
                }
    yield from _exact_plan(quick=quick)


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


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run all variants of a cell: [{what differs, A, its standard error, zeta^2, sigma^2}]."""
    problem = FAMILIES[spec["family"]](spec["workers"])
    chosen = list(_variants(problem, spec))
    columns = {
        name: np.array([float(getattr(setting, name)) for setting in chosen])
        for name in ("inner_step", "outer_step", "momentum", "penalty", "noise")
    }
    aware = np.array([setting.most_penalty is not None for setting in chosen])
    which = variants(columns.pop("inner_step"), **columns, gap_aware=aware)
    if spec["seeds"]:
        measured, error, spread, noise = _simulated(problem, which, spec)
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
    }


def _exact(problem: Problem, which: Variants, spec: Mapping[str, Any]) -> tuple[Array, ...]:
    """A, no error, zeta^2 and sigma^2 by the oracle."""
    assert isinstance(problem, Quadratic)
    found = oracle.exact(
        problem,
        which,
        workers=spec["workers"],
        rounds=spec["rounds"],
        local_steps=spec["local_steps"],
        delay=spec["delay"],
        spread=problem.heterogeneous,
    )
    return found.gradient, np.zeros(len(which)), found.spread, which.noise


def _simulated(problem: Problem, which: Variants, spec: Mapping[str, Any]) -> tuple[Array, ...]:
    """A with its standard error, zeta^2 and sigma^2 where the runs came by."""
    drawn = str(spec["family"]).endswith("minibatches") and isinstance(problem, Logistic)
    found = run(
        problem,
        which,
        workers=spec["workers"],
        rounds=spec["rounds"],
        local_steps=spec["local_steps"],
        seeds=spec["seeds"],
        delay=spec["delay"],
        seed=spec["workers"] + 100 * spec["local_steps"] + 10_000 * spec["rounds"],
        sampler=Minibatches(problem, _BATCH)
        if drawn and isinstance(problem, Logistic)
        else Gaussian(problem),
    )
    error = found.gradient.std(axis=1, ddof=1) / np.sqrt(spec["seeds"])
    return found.gradient.mean(axis=1), error, found.spread, found.variance


def _variants(problem: Problem, spec: Mapping[str, Any]) -> Iterator[Setting]:
    """The settings that run side by side; what is measured later is left out."""
    drawn = str(spec["family"]).endswith("minibatches")
    for outer_step, momentum in _PAIRS:
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
            for fraction in _FRACTIONS:
                for noise in (0.0,) if drawn else _NOISES:
                    yield replace(whole, inner_step=fraction * largest, noise=noise)


def rows(
    results: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    evaluate: Callable[[Setting], Bound | Infeasible] | None = None,
) -> list[Row]:
    """Every configuration of the measured cells, with its bound."""
    evaluate = evaluate or bound.evaluate
    found = []
    for spec, cell in results:
        for place, measured in enumerate(cell["measured"]):
            numbers = ("inner_step", "outer_step", "momentum", "penalty", "most_penalty")
            setting = Setting(
                smoothness=cell["smoothness"],
                noise=cell["noise"][place],
                heterogeneity=cell["heterogeneity"][place],
                gap=cell["gap"],
                workers=spec["workers"],
                rounds=spec["rounds"],
                local_steps=spec["local_steps"],
                delay=spec["delay"],
                convex=cell["convex"],
                **{name: cell[name][place] for name in numbers},
            )
            rule = "gap-aware" if setting.most_penalty else f"{setting.penalty:g}"
            error = cell["error"][place]
            family = spec["family"] if spec["seeds"] else f"{spec['family']}, exact"
            delay = spec["delay"]
            found.append(Row(family, delay, rule, setting, measured, error, evaluate(setting)))
    return found


def needed(found: Sequence[Row]) -> dict[str, float]:
    """The factor by which a term, alone, may shrink before the first violation.

    At most 0: the grid would not notice if the term were missing.
    """
    factors = dict.fromkeys(TERMS, -np.inf)
    for row in found:
        if isinstance(row.bound, Infeasible):
            continue
        reached = row.measured + _MARGIN * row.error
        for name in TERMS:
            term = float(getattr(row.bound, name))
            if term > 0:
                factors[name] = max(factors[name], (reached - row.bound.total + term) / term)
    return factors


def wrong(found: Sequence[Row], name: str, factor: float) -> int:
    """How many violations there would be if a term were multiplied by `factor`."""
    count = 0
    for row in found:
        if isinstance(row.bound, Bound):
            changed = replace(row.bound, **{name: factor * float(getattr(row.bound, name))})
            count += row._replace(bound=changed).violated
    return count


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """Everything that the report says about the grid, as plain values."""
    feasible = [row for row in found if isinstance(row.bound, Bound)]
    return {
        "configurations": len(feasible),
        "infeasible": len(found) - len(feasible),
        "violations": sum(row.violated for row in feasible),
        "worst": [_words(row) for row in sorted(feasible, key=lambda r: -r.ratio)[:5]],
        "violating": [_words(row) for row in feasible if row.violated][:20],
        "by_family": _grouped(feasible, lambda row: row.family),
        "by_term": _grouped(feasible, lambda row: row.bound.dominant),  # type: ignore[union-attr]
        "by_penalty": _grouped(feasible, lambda row: f"penalty {row.rule}"),
        "by_delay": _grouped(feasible, lambda row: f"delay {row.delay}"),
        "needed": needed(feasible),
        "wrong": {name: wrong(feasible, name, 0.1) for name in TERMS},
        "published": _published(feasible),
    }


def _published(found: Sequence[Row]) -> dict[str, Any]:
    """How often SlowMo's theorem speaks at all at these sizes, for delay 0 and no penalty."""
    asked = [row for row in found if row.delay == 0 and row.rule == "1"]
    unique = {
        replace(row.setting, inner_step=1.0): row.family for row in asked
    }  # its step size is its own
    values = [bound.published(setting) for setting in unique]
    return {"asked": len(values), "silent": sum(isinstance(v, Infeasible) for v in values)}


def _words(row: Row) -> dict[str, Any]:
    setting = row.setting
    return {
        "family": row.family,
        "delay": row.delay,
        "penalty": row.rule,
        "G": setting.workers,
        "tau": setting.local_steps,
        "T": setting.rounds,
        "alpha": setting.outer_step,
        "beta": setting.momentum,
        "gamma": setting.inner_step,
        "noise": setting.noise,
        "measured": row.measured,
        "error": row.error,
        "bound": row.bound.total if isinstance(row.bound, Bound) else None,
        "ratio": row.ratio,
    }


def _grouped(found: Sequence[Row], key: Callable[[Row], str]) -> dict[str, dict[str, float]]:
    counts = Counter(key(row) for row in found)
    whole: dict[str, dict[str, float]] = {}
    for name in counts:
        ratios: Array = np.array([row.ratio for row in found if key(row) == name])
        whole[name] = {
            "configurations": counts[name],
            "violations": sum(row.violated for row in found if key(row) == name),
            "median": float(np.median(ratios)),
            "largest": float(ratios.max()),
        }
    return whole
