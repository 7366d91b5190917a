"""Measured gradients beside the bound: rows, and what the report says about them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from analysis import bound
from analysis.bound import TERMS, Bound, Infeasible, Setting
from analysis.problems import Array

_MARGIN = 3.0
"""Standard errors that are added to the measured mean."""


_USUAL = 12
"""Most seeds of a configuration that was decided at once."""


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
        """Measured over bound; NaN where there is none."""
        return self.measured / self.total

    @property
    def violated(self) -> bool:
        """Whether mean plus three standard errors exceeds the bound."""
        if isinstance(self.bound, Infeasible):
            return False
        return not self.measured + _MARGIN * self.error <= self.bound.total

    @property
    def undecided(self) -> bool:
        """Whether it is violated, but not by the mean alone: more seeds could tell."""
        return self.violated and self.measured <= self.total

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
            family = spec["family"] if spec["seeds"] else f"{spec['family']}, exact"
            delay = spec["delay"]
            seeds = cell["seeds"][place]
            given = evaluate(setting)
            found.append(Row(family, delay, rule, setting, measured, error, given, seeds))
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
        "resampled": sum(row.seeds > _USUAL for row in feasible),
        "most_seeds": max((row.seeds for row in feasible), default=0),
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
