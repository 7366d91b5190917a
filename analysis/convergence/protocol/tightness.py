"""Measured gradients beside the bound: rows, and what the report says about them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm, t

from analysis.convergence import bound
from analysis.convergence.bound import TERMS, Bound, Infeasible, Setting
from analysis.convergence.objectives.families import AT_MINIMUM
from analysis.convergence.objectives.problems import Array

_MARGIN = 3.0
"""Standard errors that are added to the measured mean, if they are well known."""
LATE, SPLIT = "staleness: delay and momentum", "staleness: K - 1"
"""Parts of the staleness term."""
FACTORS = (0.0, 0.1, 0.5)
"""What a part of the bound is multiplied by, to see whether that is noticed."""
EXACT = ", exact"
"""Behind the name of a family whose A comes from the oracle."""

_USUAL = 12
"""Most seeds of a configuration that was decided at once."""


@cache
def margin(seeds: int) -> float:
    """Standard errors to add to a mean of `seeds` runs: 3 for many, 4.5 for 8, by Student's t.

    Chance then exceeds the margin as rarely as 3 standard errors of a normal mean.
    """
    return float(t.ppf(norm.cdf(_MARGIN), seeds - 1)) if seeds > 1 else _MARGIN


class Row(NamedTuple):
    """One configuration, its measured A with its standard error, and its bound."""

    family: str
    delay: int
    rule: str
    setting: Setting
    measured: float
    error: float
    bound: Bound | Infeasible
    seeds: int = 0

    @property
    def ratio(self) -> float:
        """Measured over bound; NaN where there is none, infinite where it is 0 and A is not."""
        if self.total == 0:
            return np.inf if self.measured else 0.0
        return self.measured / self.total

    @property
    def violated(self) -> bool:
        """Whether the mean plus its margin exceeds the bound."""
        if isinstance(self.bound, Infeasible):
            return False
        return not self.reached <= self.bound.total

    @property
    def reached(self) -> float:
        """What the bound has to exceed: the mean plus its margin."""
        return self.measured + margin(self.seeds) * self.error

    @property
    def total(self) -> float:
        """The bound, or NaN."""
        return self.bound.total if isinstance(self.bound, Bound) else np.nan


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
            family = spec["family"] if spec["seeds"] else spec["family"] + EXACT
            delay = spec["delay"]
            seeds = cell["seeds"][place]
            given = evaluate(setting)
            found.append(Row(family, delay, rule, setting, measured, error, given, seeds))
    return found


def distinct(found: Sequence[Row]) -> list[Row]:
    """Rows that are other runs or have other bounds, by nine digits.

    Settings may be the same run: without noise any G, with one local step any alpha and Lambda of
    the same virtual step.
    """
    unlike: dict[tuple[str, str, str], Row] = {}
    for row in found:
        family = row.family.removesuffix(EXACT)
        unlike.setdefault((family, f"{row.measured:.8e}", f"{row.total:.8e}"), row)
    return list(unlike.values())


def parts(found: Sequence[Row]) -> dict[str, Array]:
    """The terms of every row, and of the staleness term what delay and what K > 1 contribute.

    N = eta^2 tau (...) + d^2 (tau - 1)/2: the first part is that of delay and momentum. With K = 1
    the term would be 1 - load times itself.
    """
    whole: dict[str, Array] = {
        name: np.array([getattr(row.bound, name) for row in found]) for name in TERMS
    }
    late = np.array([bound.late_share(row.setting) for row in found])
    loads = np.array([bound.load(row.setting) for row in found])
    return {**whole, LATE: whole["staleness"] * late, SPLIT: whole["staleness"] * loads}


def noticed(found: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """For every part of the bound: how wrong it may be before the rows show a violation.

    `begins` is the factor of the part, alone, below which there are violations; at most 0 means
    that nobody would notice if the part were missing. `violations` are by factor. Only such count
    as exceed the bound by their margin, so that no number of seeds would undo them.
    """
    reached = np.array([row.measured - margin(row.seeds) * row.error for row in found])
    totals = np.array([row.total for row in found])
    answer = {}
    for name, part in parts(found).items():
        there = part > 0
        factors = (reached - totals + part)[there] / part[there]
        answer[name] = {
            "begins": float(factors.max()) if there.any() else -np.inf,
            "violations": {f"{f:g}": int((~(f >= factors)).sum()) for f in FACTORS},
        }
    return answer


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """Everything that the report says about the grid, as plain values."""
    every = [row for row in found if isinstance(row.bound, Bound)]
    feasible = distinct(every)
    usual = [row for row in feasible if row.family.removesuffix(EXACT) not in AT_MINIMUM]
    return {
        "configurations": len(feasible),
        "settings": len(every),
        "infeasible": len(found) - len(every),
        "resampled": sum(row.seeds > _USUAL for row in feasible),
        "most_seeds": max((row.seeds for row in feasible), default=0),
        "violations": sum(row.violated for row in feasible),
        "worst": [_words(row) for row in sorted(feasible, key=lambda r: -r.ratio)[:5]],
        "violating": [_words(row) for row in feasible if row.violated][:20],
        "by_family": _grouped(feasible, lambda row: row.family),
        "by_term": _grouped(feasible, lambda row: row.bound.dominant),  # type: ignore[union-attr]
        "by_penalty": _grouped(feasible, lambda row: f"penalty {row.rule}"),
        "by_delay": _grouped(feasible, lambda row: f"delay {row.delay}"),
        "noticed": noticed(feasible),
        "noticed_usually": noticed(usual),
        "published": _published(every),
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
    groups: dict[str, list[Row]] = {}
    for row in found:
        groups.setdefault(key(row), []).append(row)
    return {
        name: {
            "configurations": len(mine),
            "violations": sum(row.violated for row in mine),
            "median": float(np.median([row.ratio for row in mine])),
            "largest": float(np.max([row.ratio for row in mine])),
            "least_seeds": min(row.seeds for row in mine),
            "most_seeds": max(row.seeds for row in mine),
        }
        for name, mine in groups.items()
    }
