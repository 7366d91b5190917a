"""Measured gradients and their bounds: rows, and what the report says about them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.stats import norm, t

from analysis.convergence import bound
from analysis.convergence.bound import TERMS, Bound, Infeasible
from analysis.convergence.objectives.families import AT_MINIMUM
from analysis.convergence.objectives.problems import Array
from analysis.convergence.setting import Setting

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
_SHOWN, _MAX_SHOWN = 5, 20
"""Tightest configurations, and violations, that the report lists."""


@cache
def margin(seeds: int) -> float:
    """Standard errors to add to a mean of `seeds` runs: 3 for many, 4.5 for 8, by Student's t.

    Chance then exceeds the margin as rarely as 3 standard errors of a normal mean.
    """
    return float(t.ppf(norm.cdf(_MARGIN), seeds - 1)) if seeds > 1 else _MARGIN


@dataclass(frozen=True, slots=True, kw_only=True)
class TightnessRow:
    """One configuration, its measured A with its standard error, and its bound.

    `delay` is in rounds, or, for late averages, a text.
    """

    family: str
    delay: int | str
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

    @property
    def dominant(self) -> str:
        """The largest term of the bound; empty where there is none."""
        return self.bound.dominant if isinstance(self.bound, Bound) else ""


def distinct(rows: Sequence[TightnessRow]) -> list[TightnessRow]:
    """Rows that are other runs or have other bounds, by nine digits.

    Settings may be the same run: without noise any G, with one local step any alpha and Lambda of
    the same virtual step.
    """
    unlike: dict[tuple[str, str, str], TightnessRow] = {}
    for row in rows:
        family = row.family.removesuffix(EXACT)
        unlike.setdefault((family, f"{row.measured:.8e}", f"{row.total:.8e}"), row)
    return list(unlike.values())


def terms(rows: Sequence[TightnessRow]) -> dict[str, Array]:
    """The four terms of every row."""
    return {name: np.array([getattr(row.bound, name) for row in rows]) for name in TERMS}


def parts(rows: Sequence[TightnessRow]) -> dict[str, Array]:
    """The terms of every row, and of the staleness term what delay and what K > 1 contribute.

    N = eta^2 tau (...) + d^2 (tau - 1)/2: the first part is that of delay and momentum. With K = 1
    the term would be 1 - load times itself.
    """
    late = np.array([bound.late_share(row.setting) for row in rows])
    loads = np.array([bound.load(row.setting) for row in rows])
    whole = terms(rows)
    return {**whole, LATE: whole["staleness"] * late, SPLIT: whole["staleness"] * loads}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """How wrong a part of the bound may be before the rows show a violation.

    `begins` is the factor of the part, alone, below which there are violations; at most 0 means
    that would not show if the part were missing. `violations` are by factor, as text.
    """

    begins: float
    violations: dict[str, int]


def sensitivity(
    rows: Sequence[TightnessRow], pieces: Mapping[str, Array] | None = None
) -> dict[str, Sensitivity]:
    """For every part of the bound, or those that are given: how wrong it may be.

    Only such violations count as exceed the bound by their margin, so that no number of seeds would
    undo them.
    """
    reached = np.array([row.measured - margin(row.seeds) * row.error for row in rows])
    totals = np.array([row.total for row in rows])
    answer = {}
    for name, part in (pieces or parts(rows)).items():
        there = part > 0
        factors = (reached - totals + part)[there] / part[there]
        answer[name] = Sensitivity(
            begins=float(factors.max()) if there.any() else -np.inf,
            violations={f"{f:g}": int((~(f >= factors)).sum()) for f in FACTORS},
        )
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationLine:
    """One row in the words of the report."""

    family: str
    delay: int | str
    penalty: str
    G: int
    tau: int
    T: int
    alpha: float
    beta: float
    gamma: float
    noise: float
    measured: float
    error: float
    bound: float | None
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioGroup:
    """Measured over bound of several rows."""

    configurations: int
    violations: int
    median: float
    largest: float
    least_seeds: int
    most_seeds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedBound:
    """On how many settings SlowMo's theorem was asked, and on how many it gives no bound."""

    asked: int
    unbounded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GridFindings:
    """Everything that the report says about the grid.

    `settings` counts all feasible rows, `configurations` the distinct ones. `beyond` are the rows
    outside the condition, with the bound that half of omega^2 in it would give them.
    """

    configurations: int
    settings: int
    infeasible: int
    resampled: int
    most_seeds: int
    violations: int
    worst: tuple[ConfigurationLine, ...]
    violating: tuple[ConfigurationLine, ...]
    by_family: dict[str, RatioGroup]
    by_term: dict[str, RatioGroup]
    by_penalty: dict[str, RatioGroup]
    by_delay: dict[str, RatioGroup]
    noticed: dict[str, Sensitivity]
    noticed_usually: dict[str, Sensitivity]
    published: PublishedBound
    beyond: tuple[ConfigurationLine, ...]


def summary(rows: Sequence[TightnessRow]) -> GridFindings:
    """Everything that the report says about the grid."""
    every = [row for row in rows if isinstance(row.bound, Bound)]
    feasible = distinct(every)
    usual = [row for row in feasible if row.family.removesuffix(EXACT) not in AT_MINIMUM]
    worst = sorted(feasible, key=lambda row: -row.ratio)[:_SHOWN]
    return GridFindings(
        configurations=len(feasible),
        settings=len(every),
        infeasible=len(rows) - len(every),
        resampled=sum(row.seeds > _USUAL for row in feasible),
        most_seeds=max((row.seeds for row in feasible), default=0),
        violations=sum(row.violated for row in feasible),
        worst=tuple(map(configuration_line, worst)),
        violating=tuple(configuration_line(row) for row in feasible if row.violated)[:_MAX_SHOWN],
        by_family=grouped(feasible, lambda row: row.family),
        by_term=grouped(feasible, lambda row: row.dominant),
        by_penalty=grouped(feasible, lambda row: f"penalty {row.rule}"),
        by_delay=grouped(feasible, lambda row: f"delay {row.delay}"),
        noticed=sensitivity(feasible),
        noticed_usually=sensitivity(usual),
        published=_published(every),
        beyond=tuple(map(configuration_line, beyond_condition(rows))),
    )


PART = 0.5
"""What is left of omega^2 in a condition that has to be noticed as wrong."""


def beyond_condition(rows: Sequence[TightnessRow]) -> list[TightnessRow]:
    """Rows outside the condition, with the bound that a part of omega^2 would let it give."""
    return [
        replace(row, bound=bound.evaluate(row.setting, condition=PART))
        for row in rows
        if isinstance(row.bound, Infeasible)
    ]


def _published(rows: Sequence[TightnessRow]) -> PublishedBound:
    """How often SlowMo's theorem gives a bound at these sizes, for delay 0 and no penalty."""
    asked = [row.setting for row in rows if row.delay == 0 and row.rule == "1"]
    unique = {replace(setting, inner_step=1.0) for setting in asked}  # its step size is its own
    unbounded = sum(isinstance(bound.published(setting), Infeasible) for setting in unique)
    return PublishedBound(asked=len(unique), unbounded=unbounded)


def configuration_line(row: TightnessRow) -> ConfigurationLine:
    """A row in the words of the report."""
    setting = row.setting
    return ConfigurationLine(
        family=row.family,
        delay=row.delay,
        penalty=row.rule,
        G=setting.workers,
        tau=setting.local_steps,
        T=setting.rounds,
        alpha=setting.outer_step,
        beta=setting.momentum,
        gamma=setting.inner_step,
        noise=setting.noise,
        measured=row.measured,
        error=row.error,
        bound=row.bound.total if isinstance(row.bound, Bound) else None,
        ratio=row.ratio,
    )


def grouped(
    rows: Sequence[TightnessRow], key: Callable[[TightnessRow], str]
) -> dict[str, RatioGroup]:
    """Measured over bound, by what `key` says of a row."""
    groups: dict[str, list[TightnessRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return {
        name: RatioGroup(
            configurations=len(mine),
            violations=sum(row.violated for row in mine),
            median=float(np.median([row.ratio for row in mine])),
            largest=float(np.max([row.ratio for row in mine])),
            least_seeds=min(row.seeds for row in mine),
            most_seeds=max(row.seeds for row in mine),
        )
        for name, mine in groups.items()
    }
