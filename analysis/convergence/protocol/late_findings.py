"""What the protocol found about late averages, and what has to hold of it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from analysis.convergence.bound import TERMS, Bound
from analysis.convergence.protocol import tightness
from analysis.convergence.protocol.check import Check
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
)
from analysis.convergence.protocol.tightness import (
    ConfigurationLine,
    RatioGroup,
    Sensitivity,
    TightnessRow,
)

LEAST, LEAST_QUICK = 20_000, 2_000
"""Distinct configurations of late averages that the bound has to hold on."""
PART_OF_C = 0.25
"""What is left of C in a condition that has to be noticed as wrong."""
_LEAST_LATE = 24
_LEAST_LATE_EDGES, _LEAST_SYSTEMS = 16, 18_000
_STABLE, _GROWING = 1.01, 1.1
"""A or drift of a run over that of half of it: at most, below an edge; at least, above it."""
_DRIFT = 0.04
"""How far measured drifts may be from those of small steps, relatively."""
_SHOWN, _MOST_SHOWN = 5, 20


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
        violating=tuple(line(row) for row in feasible if row.violated)[:_MOST_SHOWN],
        by_family=tightness.grouped(feasible, lambda row: row.family),
        by_term=tightness.grouped(feasible, lambda row: row.dominant),
        by_mix=tightness.grouped(feasible, _mix),
        by_share=tightness.grouped(feasible, _share),
        noticed=tightness.sensitivity(feasible, tightness.terms(feasible)),
        beyond=tuple(map(line, tightness.under_part_of_c(rows, PART_OF_C))),
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
    least = LEAST_QUICK if quick else LEAST
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
        "late averages: with a quarter of C the condition would admit runs that exceed the bound",
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
        f"late averages, simulator against oracle: |z| < {SCORE:g} on {_LEAST_LATE} settings"
        " or more",
        findings.largest_score < SCORE and findings.simulated >= _LEAST_LATE,
        f"largest {findings.largest_score:.2f} of {len(findings.scores)} z on {findings.simulated}",
    )
    below = max((edge.below for edge in findings.edges), default=0.0)
    above = min((edge.above for edge in findings.edges), default=0.0)
    yield Check(
        "late averages: Jury's conditions are those of the matrices, and runs 2 % beside their"
        f" edges do as they say, on {_LEAST_LATE_EDGES} edges or more",
        findings.wrong == 0
        and findings.systems >= _LEAST_SYSTEMS
        and len(findings.edges) >= _LEAST_LATE_EDGES
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
