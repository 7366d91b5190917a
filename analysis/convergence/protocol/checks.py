"""What has to hold, judged by what was measured."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from analysis.convergence.bound import TERMS, Bound, Infeasible
from analysis.convergence.protocol import clip_checks, controls, oracle, rate_fits, tightness
from analysis.convergence.protocol.clip_checks import ClipCell, ClippingFindings, FloorCell
from analysis.convergence.protocol.controls import ControlCell, ControlFindings
from analysis.convergence.protocol.grid import GridCell
from analysis.convergence.protocol.oracle import (
    IDENTITY,
    SCORE,
    LateDrift,
    LateDriftCell,
    LateEdge,
    LateIdentityCell,
    LateMomentsCell,
    LateOracleCell,
    LateStabilityCell,
    OracleCell,
    OracleFindings,
)
from analysis.convergence.protocol.rate_fits import RateCell, RateFindings
from analysis.convergence.protocol.store import Cell
from analysis.convergence.protocol.tightness import (
    ConfigurationLine,
    GridFindings,
    RatioGroup,
    Sensitivity,
    TightnessRow,
)
from analysis.convergence.setting import Setting


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to hold, and what was measured."""

    claim: str
    passed: bool
    measured: str


LEAST, MIN_QUICK = 20_000, 2_000
"""Distinct configurations of late averages that the bound has to hold on."""
_MIN_LATE = 24
_MIN_LATE_EDGES, _MIN_SYSTEMS = 16, 18_000
_STABLE, _GROWING = 1.01, 1.1
"""A or drift of a run over that of half of it: at most, below an edge; at least, above it."""
_DRIFT = 0.04
"""How far measured drifts may be from those of small steps, relatively."""
_SHOWN, _MAX_SHOWN = 5, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LateFindings:
    """Everything that the report says about late averages.

    The names are those of the other layers. `mean_error` is the distance of the mean from that of
    local SGD, `wrong` on how many of `systems` Jury's conditions and eigenvalues disagree. The
    bound of the drift grows beyond all numbers on `endless` settings, which no other figure counts.
    """

    identities: int
    largest_identity_error: float
    mean_error: float
    simulated: int
    scores: tuple[float, ...]
    largest_score: float
    systems: int
    wrong: int
    edges: tuple[LateEdge, ...]
    drifts: tuple[LateDrift, ...]
    configurations: int
    settings: int
    endless: int
    violations: int
    worst: tuple[ConfigurationLine, ...]
    violating: tuple[ConfigurationLine, ...]
    by_family: dict[str, RatioGroup]
    by_term: dict[str, RatioGroup]
    by_mix: dict[str, RatioGroup]
    by_share: dict[str, RatioGroup]
    noticed: dict[str, Sensitivity]
    beyond: tuple[ConfigurationLine, ...]


def late_summary(cells: Sequence[LateOracleCell], rows: Sequence[TightnessRow]) -> LateFindings:
    """Everything that the report says about late averages."""
    inside = [row for row in rows if isinstance(row.bound, Bound)]
    every = [row for row in inside if math.isfinite(row.total)]
    feasible = tightness.distinct(every)
    identity = [cell for cell in cells if isinstance(cell, LateIdentityCell)]
    stability = [cell for cell in cells if isinstance(cell, LateStabilityCell)]
    scored = [row for c in cells if isinstance(c, LateMomentsCell) for row in c.scores]
    scores = tuple(z for row in scored for z in row)
    line = tightness.configuration_line
    return LateFindings(
        identities=sum(len(cell.errors) for cell in identity),
        largest_identity_error=max(max(cell.errors) for cell in identity),
        mean_error=max(cell.mean for cell in identity),
        simulated=len(scored),
        scores=scores,
        largest_score=max(abs(z) for z in scores),
        systems=sum(cell.task.systems for cell in stability),
        wrong=sum(cell.wrong for cell in stability),
        edges=tuple(edge for cell in stability for edge in cell.edges),
        drifts=tuple(d for c in cells if isinstance(c, LateDriftCell) for d in c.lines),
        configurations=len(feasible),
        settings=len(every),
        endless=len(inside) - len(every),
        violations=sum(row.violated for row in feasible),
        worst=tuple(map(line, sorted(feasible, key=lambda row: -row.ratio)[:_SHOWN])),
        violating=tuple(line(row) for row in feasible if row.violated)[:_MAX_SHOWN],
        by_family=tightness.grouped(feasible, lambda row: row.family),
        by_term=tightness.grouped(feasible, lambda row: row.dominant),
        by_mix=tightness.grouped(feasible, _mix),
        by_share=tightness.grouped(feasible, _share),
        noticed=tightness.sensitivity(feasible, tightness.terms(feasible)),
        beyond=tuple(map(line, tightness.beyond_condition(rows))),
    )


def _mix(row: TightnessRow) -> str:
    late = row.setting.late
    assert late is not None
    return f"keep {late.keep:g}, predict {late.predict:g}"


def _share(row: TightnessRow) -> str:
    late = row.setting.late
    assert late is not None
    return f"{late.steps} of {row.setting.local_steps} steps"


def late_checks(findings: LateFindings, *, quick: bool) -> Iterator[Check]:
    """What has to hold of late averages."""
    yield from _late_oracle_checks(findings)
    least = MIN_QUICK if quick else LEAST
    yield Check(
        f"late averages: no violation of the bound on {least:,} distinct configurations or more",
        findings.violations == 0 and findings.configurations >= least,
        f"{findings.violations} violations on {findings.configurations:,} distinct ones of"
        f" {findings.settings:,} settings",
    )
    wrong = {name: findings.noticed[name].violations for name in TERMS}
    yield Check(
        "late averages: the grid fails when any one term is missing, a tenth or half of itself",
        all(count > 0 for counts in wrong.values() for count in counts.values()),
        "violations with half of it: "
        + ", ".join(f"{name} {counts['0.5']:,}" for name, counts in wrong.items()),
    )
    ratios = [line.ratio for line in findings.beyond]
    yield Check(
        "late averages: with half of omega^2 the condition would admit runs that exceed the bound",
        bool(ratios) and all(ratio > 1 for ratio in ratios),
        "measured/bound beyond the condition: "
        + ", ".join(f"{line.ratio:.3f} with {line.delay}" for line in findings.beyond),
    )


def _late_oracle_checks(findings: LateFindings) -> Iterator[Check]:
    error = max(findings.largest_identity_error, findings.mean_error)
    yield Check(
        f"late averages: the gap, and with all kept the mean of local SGD, hold to {IDENTITY:g}",
        error <= IDENTITY,
        f"largest relative error {error:.1e} on {findings.identities} settings",
    )
    yield Check(
        f"late averages, simulator against oracle: |z| < {SCORE:g} on {_MIN_LATE} settings or more",
        findings.largest_score < SCORE and findings.simulated >= _MIN_LATE,
        f"largest {findings.largest_score:.2f} of {len(findings.scores)} z on {findings.simulated}",
    )
    below = max((edge.below for edge in findings.edges), default=0.0)
    above = min((edge.above for edge in findings.edges), default=0.0)
    yield Check(
        "late averages: Jury's conditions are those of the matrices, and runs 2 % beside their"
        f" edges do as they say, on {_MIN_LATE_EDGES} edges or more",
        findings.wrong == 0
        and findings.systems >= _MIN_SYSTEMS
        and len(findings.edges) >= _MIN_LATE_EDGES
        and below <= _STABLE
        and above >= _GROWING,
        f"{findings.wrong} of {findings.systems:,} systems differ; of {len(findings.edges)} edges"
        f" runs grow at most x {below:.4f} below, at least x {above:.2f} above",
    )
    apart = max(
        (
            abs(measured / expected - 1)
            for line in findings.drifts
            for measured, expected in zip((line.alike, line.unlike), line.expected, strict=True)
        ),
        default=1.0,
    )
    yield Check(
        "late averages cost drift: 1 + 2 keep^2 p times that of waiting for equal data,"
        " 1 + 3 keep p + 3 keep^2 p^2 for unequal data",
        apart <= _DRIFT,
        f"within {apart:.1%} on {len(findings.drifts)} (p, keep)",
    )


MIN_CONFIGURATIONS = 3000
TIGHT = 0.7
"""A ratio of measured to bound that one family has to exceed."""
_MIN_SIMULATED = 30
_MIN_EDGES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that was measured, judged."""

    quick: bool
    cells: int
    oracle: OracleFindings
    grid: GridFindings
    rates: RateFindings
    isolation: ControlFindings
    late: LateFindings
    clipping: ClippingFindings
    rows: Sequence[TightnessRow]
    checks: Sequence[Check]

    @property
    def passed(self) -> bool:
        """Whether everything holds."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """All but the rows, as plain values; None for what is no finite number."""
        parts = {
            "passed": self.passed,
            "quick": self.quick,
            "cells": self.cells,
            "checks": self.checks,
            "oracle": self.oracle,
            "grid": self.grid,
            "rates": self.rates,
            "isolation": self.isolation,
            "late": self.late,
            "clipping": self.clipping,
        }
        return {name: to_jsonable_python(part, inf_nan_mode="null") for name, part in parts.items()}


def judge(
    cells: Sequence[Cell],
    *,
    quick: bool,
    evaluate: Callable[[Setting], Bound | Infeasible] | None = None,
) -> Findings:
    """Judge the cells. Another `evaluate` replaces our bound by another one."""
    every = [row for c in cells if isinstance(c, GridCell) for row in c.rows(evaluate)]
    rows = [row for row in every if row.setting.late is None]
    exact = oracle.summary([cell for cell in cells if isinstance(cell, OracleCell)])
    grid = tightness.summary(rows)
    rates = rate_fits.summary([cell for cell in cells if isinstance(cell, RateCell)])
    isolation = controls.summary([cell for cell in cells if isinstance(cell, ControlCell)])
    late = late_summary(
        [cell for cell in cells if isinstance(cell, LateOracleCell)],
        [row for row in every if row.setting.late is not None],
    )
    clipping = clip_checks.summary(
        [cell for cell in cells if isinstance(cell, ClipCell | FloorCell)]
    )
    return Findings(
        quick=quick,
        cells=len(cells),
        oracle=exact,
        grid=grid,
        rates=rates,
        isolation=isolation,
        late=late,
        clipping=clipping,
        rows=rows,
        checks=(
            *oracle_checks(exact),
            *grid_checks(grid),
            *rate_checks(rates),
            *control_checks(isolation),
            *late_checks(late, quick=quick),
            *clipping_checks(clipping, quick=quick),
        ),
    )


def oracle_checks(findings: OracleFindings) -> Iterator[Check]:
    """Whether the simulator does what the derivation and the oracle say."""
    yield Check(
        f"identities of the derivation hold to {oracle.IDENTITY:g}",
        findings.largest_identity_error <= oracle.IDENTITY,
        f"largest relative error {findings.largest_identity_error:.1e} on"
        f" {findings.identities} settings",
    )
    yield Check(
        f"simulator against oracle: |z| < {oracle.SCORE:g} on {_MIN_SIMULATED} settings or more",
        findings.largest_score < oracle.SCORE and findings.configurations >= _MIN_SIMULATED,
        f"largest {findings.largest_score:.2f} of {len(findings.scores)} z on"
        f" {findings.configurations}",
    )
    yield Check(
        f"edge of stability within {oracle.EDGE:g} on {_MIN_EDGES} (alpha, beta) or more",
        findings.largest_edge_error <= oracle.EDGE and len(findings.edges) >= _MIN_EDGES,
        f"largest distance {findings.largest_edge_error:.1e} on {len(findings.edges)}",
    )


def grid_checks(findings: GridFindings) -> Iterator[Check]:
    """Whether the bound holds, is tight somewhere, and would be refuted if it were wrong."""
    yield Check(
        "no violation of the bound at mean + 3 standard errors, on"
        f" {MIN_CONFIGURATIONS:,} distinct configurations or more",
        findings.violations == 0 and findings.configurations >= MIN_CONFIGURATIONS,
        f"{findings.violations} violations on {findings.configurations:,} distinct ones of"
        f" {findings.settings:,} settings ({findings.infeasible} infeasible)",
    )
    name, best = max(findings.by_family.items(), key=lambda item: item[1].largest)
    yield Check(
        f"measured/bound exceeds {TIGHT:g} on a family: the bound is not vacuous",
        best.largest > TIGHT,
        f"{best.largest:.3f} on {name}",
    )
    wrong = {name: findings.noticed[name].violations for name in TERMS}
    yield Check(
        "the grid can fail: it does when any one term is missing, a tenth or half of itself",
        all(count > 0 for counts in wrong.values() for count in counts.values()),
        "violations with half of it: "
        + ", ".join(f"{name} {counts['0.5']:,}" for name, counts in wrong.items()),
    )
    ratios = [line.ratio for line in findings.beyond]
    yield Check(
        "the condition matters: with half of omega^2 it would admit runs that exceed the bound",
        bool(ratios) and all(ratio > 1 for ratio in ratios),
        "measured/bound beyond the condition: "
        + ", ".join(f"{line.ratio:.3f} with delay {line.delay}" for line in findings.beyond),
    )


MIN_CLIPPED, MIN_CLIPPED_QUICK = 100_000, 1_000
"""Configurations that clip, and as many that do not, on which the bounds have to hold."""


def clipping_checks(findings: ClippingFindings, *, quick: bool) -> Iterator[Check]:
    """What has to hold of runs that clip."""
    least = MIN_CLIPPED_QUICK if quick else MIN_CLIPPED
    wrong = sum(findings.violations[name] for name in clip_checks.THEOREMS)
    wrong += sum((line.ratio or 0) > 1 for line in findings.floors)
    yield Check(
        f"clipping: no violation of its bounds on {least:,} exact runs that clip and as many that"
        " do not",
        wrong == 0 and min(findings.clipped, findings.unclipped) >= least,
        f"{wrong} violations; {findings.clipped:,} clip, {findings.unclipped:,} do not; measured/"
        f"bound up to {max(findings.largest[name] for name in clip_checks.THEOREMS):.5f}",
    )
    known = set(clip_checks.MUTATIONS) - set(clip_checks.UNNOTICED)
    asked = clip_checks.QUICK if quick else sorted(known)
    missed = [name for name in asked if name not in findings.caught]
    yield Check(
        f"clipping: {len(asked)} wrong constants or more are noticed",
        not missed,
        f"{len(findings.caught)} of {len(clip_checks.MUTATIONS)}"
        + (f"; not noticed: {', '.join(missed)}" if missed else ""),
    )
    roots = [line.root for line in findings.floors]
    yield Check(
        "clipping: with a fixed clip and small steps gradients stay at the floor of the theory",
        bool(roots) and all(line.root >= line.floor for line in findings.floors),
        f"root of A over sigma^2/(4 G phi): {min(roots, default=0):.3f} to"
        f" {max(roots, default=0):.3f}",
    )


def rate_checks(findings: RateFindings) -> Iterator[Check]:
    """Whether slopes and terms are those of the rate."""
    agreed = [line.agree for line in findings.agreement]
    yield Check(
        "slopes in the small stratum: the oracle's are in the intervals of the simulated ones",
        all(agreed) and bool(agreed),
        f"{sum(agreed)} of {len(agreed)} fits of (G, tau, T)",
    )
    unlike = [line.significant for line in findings.fits if line.heterogeneous]
    alike = [line.significant for line in findings.fits if not line.heterogeneous]
    yield Check(
        "the term G tau/T is significant for heterogeneous problems, not for homogeneous ones",
        bool(unlike) and all(unlike) and not any(alike),
        f"heterogeneous {sum(unlike)} of {len(unlike)}, homogeneous {sum(alike)} of {len(alike)}",
    )


def control_checks(findings: ControlFindings) -> Iterator[Check]:
    """Whether staleness shows, and what must fail does."""
    negative = findings.controls
    yield Check(
        "staleness alone: CO2 over SlowMo with the same noise is above 4 standard errors",
        findings.staleness_significant,
        f"{len(findings.staleness)} settings",
    )
    yield Check(
        "negative control: with a fixed step there is no slope of -1/2 in T",
        findings.fixed_fails,
        f"{negative.fixed_slope:.3f}; with the step of the rate {negative.scaled_slope:.3f}",
    )
    growth = min(line.growth for line in negative.beyond if line.factor > 1)
    yield Check(
        "negative control: 5 % beyond the edge runs diverge, 5 % below they do not",
        findings.edge_fails,
        f"f - f_inf grows at least {growth:,.0f} fold in 500 rounds",
    )
    yield Check(
        "negative control: runs without the delay fit SlowMo's oracle and not CO2's",
        findings.delay_fails,
        f"|z| up to {negative.delay_0_against_delay_0:.1f} against SlowMo's,"
        f" {negative.delay_0_against_delay_1:.0f} against CO2's",
    )
