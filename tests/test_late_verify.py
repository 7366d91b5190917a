"""What `co2analysis verify` says of late averages: it holds, and it can fail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from analysis.convergence import bound, late_bound
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.lateness import Late
from analysis.convergence.objectives.problems import Problem
from analysis.convergence.protocol import (
    late_findings,
    late_identities,
    late_oracle,
    late_plan,
    oracle,
)
from analysis.convergence.protocol.grid import GridCell, GridTask
from analysis.convergence.protocol.late_findings import LateFindings
from analysis.convergence.protocol.late_oracle import LateOracleCell
from analysis.convergence.protocol.tightness import TightnessRow
from analysis.convergence.setting import Setting
from analysis.convergence.simulate import run
from analysis.convergence.variants import Outcome, RunSize, Variants

pytestmark = pytest.mark.slow  # the quick protocol of late averages takes 4 s


@pytest.fixture(scope="module")
def grid() -> list[GridCell]:
    """The cells of the quick grid."""
    return [task.measure() for task in late_plan.plan(quick=True)]


@pytest.fixture(scope="module")
def others() -> list[LateOracleCell]:
    """The other cells of the quick protocol."""
    return [task.measure() for task in late_oracle.plan(quick=True)]


@pytest.fixture(scope="module")
def findings(grid: list[GridCell], others: list[LateOracleCell]) -> LateFindings:
    """What these cells say."""
    return late_findings.summary(others, rows_of(grid))


def rows_of(
    cells: list[GridCell], evaluate: Callable[[Setting], Bound | Infeasible] | None = None
) -> list[TightnessRow]:
    """All rows, perhaps with another bound."""
    return [row for cell in cells for row in cell.rows(evaluate)]


def failed(findings: LateFindings, *, quick: bool = True) -> list[str]:
    """The claims that fail."""
    return [
        check.claim for check in late_findings.checks(findings, quick=quick) if not check.passed
    ]


def test_everything_holds(findings: LateFindings) -> None:
    """No violation, all terms noticed, the condition noticed, oracles and edges agree."""
    assert failed(findings) == []
    assert findings.violations == 0
    assert max(group.largest for group in findings.by_family.values()) > 0.9
    assert findings.by_mix.keys() == {"keep 1, predict 0", "keep 0.5, predict 0.5"}


def test_whole_plan_is_large_enough() -> None:
    """The whole protocol asks for more than 20,000 settings, with every mix and delay."""
    tasks = list(late_plan.plan(quick=False))
    assert all(isinstance(task, GridTask) for task in tasks)
    assert {mix for task in tasks for mix in task.mixes} >= {(1.0, 0.0), (0.5, 0.5), (0.2, 0.8)}
    pairs_and_steps = 6 * 2 * 3  # outer steps, constant penalties, fractions of the largest gamma
    least = sum(pairs_and_steps * len(t.mixes) for t in tasks if t.inner_step is None)
    assert least > late_findings.LEAST >= 20_000


@pytest.mark.parametrize("factor", [0.0, 0.5])
@pytest.mark.parametrize("name", bound.TERMS)
def test_wrong_terms_are_noticed(grid: list[GridCell], name: str, factor: float) -> None:
    """With any one term missing or halved there are violations."""

    def wrong(setting: Setting) -> Bound | Infeasible:
        terms = bound.evaluate(setting)
        if isinstance(terms, Infeasible):
            return terms
        return replace(terms, **{name: factor * getattr(terms, name)})

    assert any(row.violated for row in rows_of(grid, wrong))


def test_a_wrong_condition_is_noticed(
    grid: list[GridCell], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a quarter of C the bound would hold for runs that exceed it; with C none does."""
    right = late_bound.gap_constants
    beyond = [cell for cell in grid if cell.task.inner_step is not None]
    assert len(rows_of(beyond)) == 3
    assert all(isinstance(row.bound, Infeasible) for row in rows_of(beyond))

    def quartered(setting: Setting, late: Late) -> tuple[float, float]:
        by_gradients, by_noise = right(setting, late)
        return by_gradients / 4, by_noise

    monkeypatch.setattr(late_bound, "gap_constants", quartered)
    ratios = [row.ratio for row in rows_of(beyond)]
    assert ratios == pytest.approx([1.256, 1.216, 1.211], abs=2e-3)
    assert all(row.violated for row in rows_of(beyond))


def test_a_wrong_oracle_is_noticed(findings: LateFindings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that throw away what was done meanwhile do not fit the oracle of those that keep it."""
    task = late_oracle.LateMomentsTask(
        family="isotropic", workers=3, local_steps=6, late_steps=3, rounds=24, seeds=1000
    )

    def forgetful(problem: Problem, which: Variants, size: RunSize, **options: Any) -> Outcome:
        return run(problem, replace(which, keep=0.1 * which.keep), size, **options)

    monkeypatch.setattr(oracle, "run", forgetful)
    scores = [z for row in task.measure().scores for z in row]
    assert max(abs(z) for z in scores) > 10
    worse = replace(findings, largest_score=max(abs(z) for z in scores))
    assert len(failed(worse)) == 1


def test_a_wrong_gap_is_noticed() -> None:
    """The identity of a run with other options than its own fails by far."""
    family, alpha, beta, penalty, tau, late, keep, predict = late_identities.CASES[3]
    right = late_identities.gap_error(family, alpha, beta, penalty, tau, late, keep, predict)
    assert right < 1e-14

    def other(problem: Problem, which: Variants, size: RunSize, **options: Any) -> Outcome:
        return run(problem, replace(which, predict=np.array([0.4])), size, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(late_identities, "run", other)
        wrong = late_identities.gap_error(family, alpha, beta, penalty, tau, late, keep, predict)
    assert wrong > 1e-3


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"violations": 1}, "no violation"),
        ({"configurations": 1999}, "no violation"),
        ({"beyond": ()}, "quarter of C"),
        ({"largest_identity_error": 1e-9}, "the gap"),
        ({"mean_error": 1e-9}, "the gap"),
        ({"largest_score": 4.1}, "against oracle"),
        ({"simulated": 3}, "against oracle"),
        ({"wrong": 1}, "Jury"),
        ({"systems": 100}, "Jury"),
        ({"edges": ()}, "Jury"),
        ({"drifts": ()}, "cost drift"),
    ],
)
def test_too_little_evidence_is_none(
    findings: LateFindings, change: dict[str, object], part: str
) -> None:
    """A violation, too few of anything, or nothing at all: the claim fails, and no other."""
    claims = failed(replace(findings, **change))  # type: ignore[arg-type]
    assert len(claims) == 1
    assert part in claims[0]


def test_wrong_lines_are_noticed(findings: LateFindings) -> None:
    """An edge beside which runs do otherwise, a drift that costs more, a term that may be wrong."""
    edge = replace(findings.edges[0], below=1.5)
    assert len(failed(replace(findings, edges=(*findings.edges, edge)))) == 1
    edge = replace(findings.edges[0], above=1.0)
    assert len(failed(replace(findings, edges=(*findings.edges, edge)))) == 1
    line = replace(findings.drifts[0], unlike=2 * findings.drifts[0].unlike)
    assert len(failed(replace(findings, drifts=(line,)))) == 1
    part = findings.noticed["drift"]
    blind = replace(part, violations={**part.violations, "0.5": 0})
    assert len(failed(replace(findings, noticed={**findings.noticed, "drift": blind}))) == 1


def test_the_whole_protocol_asks_for_more(findings: LateFindings) -> None:
    """What is enough for --quick is not for the whole protocol."""
    assert [c for c in failed(findings, quick=False) if "20,000" in c] == failed(
        findings, quick=False
    )
    assert failed(findings, quick=False)
