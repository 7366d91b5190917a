"""The protocol of `co2analysis verify`, in this process: it holds, it can fail, it is kept.

All cells of the quick protocol but the costly ones of logistic regression are measured once.
"""

import base64
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.cli import main
from analysis.convergence import bound
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.objectives.problems import Problem
from analysis.convergence.protocol import (
    checks,
    clip_checks,
    grid_plan,
    oracle,
    rate_fits,
    store,
    tightness,
)
from analysis.convergence.protocol.checks import Findings
from analysis.convergence.protocol.grid import GridCell, GridRun, GridTask
from analysis.convergence.protocol.oracle import IdentityTask, MomentsTask
from analysis.convergence.protocol.store import Cell
from analysis.convergence.protocol.tightness import TightnessRow
from analysis.convergence.setting import Outcome, RunSize, Setting, Variants
from analysis.convergence.simulate import run

slow = pytest.mark.slow
PROBLEM = Setting(
    smoothness=10.0, noise=1.0, gap=5.0, workers=1, rounds=1, local_steps=1, inner_step=1e-3
)
MINIBATCHES = GridTask(
    family="logistic, minibatches", workers=2, local_steps=2, rounds=8, delay=1, seeds=4
)


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    """Those of the quick protocol, but of logistic regression only a small one."""
    tasks = [
        task
        for task in store.plan(quick=True)
        if not (isinstance(task, GridTask) and task.family.startswith("logistic"))
    ]
    return [task.measure() for task in (*tasks, MINIBATCHES)]


@pytest.fixture(scope="module")
def findings(cells: list[Cell]) -> Findings:
    """What these cells say."""
    return checks.judge(cells, quick=True)


def failed(findings: Findings) -> list[str]:
    """The claims that fail."""
    return [check.claim for check in findings.checks if not check.passed]


def judged(findings: Findings, part: str, change: dict[str, Any]) -> list[str]:
    """The claims that fail if this part of the findings were another."""
    one = replace(getattr(findings, part), **change)
    judges: dict[str, Callable[[Any], Iterator[Any]]] = {
        "grid": checks.grid_checks,
        "oracle": checks.oracle_checks,
        "rates": checks.rate_checks,
        "isolation": checks.control_checks,
        "late": lambda found: checks.late_checks(found, quick=True),
        "clipping": lambda found: checks.clipping_checks(found, quick=True),
    }
    return [check.claim for check in judges[part](one) if not check.passed]


# --- it holds ------------------------------------------------------------------------------------


@slow
def test_everything_holds(findings: Findings) -> None:
    """No violation on thousands of settings, tight families, and every other check."""
    assert failed(findings) == []
    for found in (findings.grid, findings.late):
        assert found.violations == 0
        assert found.configurations < found.settings
        assert max(group.largest for group in found.by_family.values()) > 0.9
        assert all(found.noticed[name].begins > 0.5 for name in bound.TERMS)
        assert [line.ratio for line in found.worst] == sorted(
            (line.ratio for line in found.worst), reverse=True
        )
    assert [edge.delay for edge in findings.oracle.edges] == [1] * 16 + [0] * 8
    assert findings.late.by_mix.keys() == {"keep 1, predict 0", "keep 0.5, predict 0.5"}
    assert findings.grid.published.asked > findings.grid.published.unbounded
    significant = {line.family for line in findings.rates.fits if line.significant}
    assert significant == {"two kinds"}


@slow
def test_what_rescues_a_run_and_what_does_not(findings: Findings) -> None:
    """Beyond the edge CO2 is lost without a rule, and not with a penalty of 4, nor in SlowMo."""
    lost = {
        (part.delay, line.rule)
        for part in findings.isolation.rescue
        for line in part.lines
        if line.lost and line.load > 1
    }
    assert (1, "neither") in lost
    assert (1, "penalty 4") not in lost
    assert (0, "neither") not in lost
    for part in findings.isolation.rescue:
        first = [line for line in part.lines if line.load == part.lines[0].load]
        assert len(first) == (7 if part.delay else 6)
        assert {line.rule for line in first if line.clipped} <= {"clip 8", "clip 2", "clip 0.5"}


def test_identities_of_the_derivation_hold() -> None:
    """Z moves by -eta D_t, and the gap is what the page says; late or not, to 1e-12."""
    cell = IdentityTask().measure()
    late = oracle.LateIdentityTask().measure()
    assert max(cell.errors) <= oracle.IDENTITY
    assert max(late.errors) <= oracle.IDENTITY
    assert late.mean <= oracle.IDENTITY  # with all kept it is that of local SGD
    assert (len(cell.errors), len(late.errors)) == (8, 6)


@slow
def test_the_whole_plan_is_large_enough() -> None:
    """More than 20,000 late settings of every mix; every family; quick is a part of its kind."""
    tasks = list(grid_plan.late_grid_plan(quick=False))
    assert {mix for task in tasks for mix in task.mixes} >= {(1.0, 0.0), (0.5, 0.5), (0.2, 0.8)}
    pairs_and_steps = 6 * 2 * 3  # outer steps, constant penalties, fractions of the largest gamma
    least = sum(pairs_and_steps * len(t.mixes) for t in tasks if t.inner_step is None)
    assert least > checks.LEAST >= 20_000
    whole = list(grid_plan.plan(quick=False))
    assert {task.delay for task in whole} == {0, 1, 2, 4, 16}
    assert {task.workers for task in whole} >= {1, 2, 4, 16}
    for quick in (True, False):
        every = list(store.plan(quick=quick))
        assert len({repr(task) for task in every}) == len(every)
        assert all(task.work > 0 for task in every)
        most = 256 if quick else 2048
        drawn = [t for t in every if isinstance(t, GridTask) and t.seeds and t.inner_step is None]
        assert max(task.rounds * task.local_steps for task in drawn) <= most


# --- it can fail ---------------------------------------------------------------------------------


def rows_of(cells: list[Cell], *, late: bool, evaluate: Any = None) -> list[TightnessRow]:
    """All rows of one of the grids, perhaps with another bound."""
    grids = (cell for cell in cells if isinstance(cell, GridCell))
    chosen = (cell for cell in grids if bool(cell.task.late_steps) is late)
    return [row for cell in chosen for row in cell.rows(evaluate)]


@slow
@pytest.mark.parametrize("name", bound.TERMS)
def test_wrong_terms_are_noticed(cells: list[Cell], name: str) -> None:
    """With any one term halved there are violations, and the check of the grid fails."""

    def wrong(setting: Setting) -> Bound | Infeasible:
        terms = bound.evaluate(setting)
        if isinstance(terms, Infeasible):
            return terms
        return replace(terms, **{name: 0.5 * getattr(terms, name)})

    assert any(row.violated for row in rows_of(cells, late=True, evaluate=wrong))
    found = tightness.summary(rows_of(cells, late=False, evaluate=wrong))
    assert "no violation" in next(c.claim for c in checks.grid_checks(found) if not c.passed)


@slow
@pytest.mark.parametrize(
    ("late", "ratios"),
    [(False, [1.023, 1.046, 1.073, 1.087, 1.608]), (True, [1.061, 1.081, 1.115])],
)
def test_a_wrong_condition_is_noticed(
    cells: list[Cell],
    monkeypatch: pytest.MonkeyPatch,
    late: bool,  # noqa: FBT001 - pytest's
    ratios: list[float],
) -> None:
    """With half of omega^2 the theorem would speak of runs that exceed it: docs/theory.md."""
    grids = [cell for cell in cells if isinstance(cell, GridCell)]
    beyond: list[Cell] = [c for c in grids if c.task.inner_step is not None]
    assert all(isinstance(row.bound, Infeasible) for row in rows_of(beyond, late=late))
    name = "late_gap_constants" if late else "gap_constants"
    module = bound
    right = getattr(module, name)

    def less(*given: Any) -> tuple[float, float]:
        by_gradients, by_noise = right(*given)
        return by_gradients * math.sqrt(0.5), by_noise

    monkeypatch.setattr(module, name, less)
    rows = rows_of(beyond, late=late)
    assert [row.ratio for row in rows] == pytest.approx(ratios, abs=2e-3)
    assert all(row.violated for row in rows)


@slow
def test_a_wrong_oracle_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of another delay, or that keep less, do not fit the oracle."""
    plain = MomentsTask(family="isotropic", workers=4, local_steps=8, rounds=32, delay=0, seeds=400)
    for claimed, fits in ((0, True), (1, False)):
        largest = max(abs(z) for row in oracle.scores(plain, claimed) for z in row)
        assert largest < 4 if fits else largest > 10

    def forgetful(problem: Problem, which: Variants, size: RunSize, **options: Any) -> Outcome:
        return run(problem, replace(which, keep=0.1 * which.keep), size, **options)

    late = oracle.LateMomentsTask(
        family="isotropic", workers=3, local_steps=6, late_steps=3, rounds=24, seeds=1000
    )
    monkeypatch.setattr(oracle, "run", forgetful)
    assert max(abs(z) for row in late.measure().scores for z in row) > 10


def test_a_wrong_gap_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity of a run with other options than its own fails by far."""
    case = oracle.LATE_CASES[3]
    assert oracle.gap_error(*case) < 1e-14

    def other(problem: Problem, which: Variants, size: RunSize, **options: Any) -> Outcome:
        return run(problem, replace(which, predict=np.array([0.4])), size, **options)

    monkeypatch.setattr(oracle, "run", other)
    assert oracle.gap_error(*case) > 1e-3


BOUNDS = (*clip_checks.THEOREMS, *clip_checks.MUTATIONS)
BELOW = clip_checks.FloorLine(
    workers=1, tau=1, beta=0.0, clip=2.0, root=0.5, floor=0.6, ratio=0.5, with_half=2.0
)
LACKING: dict[str, list[tuple[str, Any, str]]] = {
    "grid": [
        ("configurations", 2999, "no violation"),
        ("violations", 1, "no violation"),
        ("beyond", (), "half of omega"),
    ],
    "oracle": [
        ("largest_identity_error", 2e-12, "identities"),
        ("largest_score", 4.0, "simulator"),
        ("configurations", 29, "simulator"),
        ("edges", (), "edge"),
        ("largest_edge_error", 0.0021, "edge"),
    ],
    "rates": [("agreement", (), "slopes"), ("fits", (), "G tau/T")],
    "isolation": [
        ("staleness_significant", False, "staleness"),
        ("fixed_fails", False, "fixed step"),
        ("edge_fails", False, "edge"),
        ("delay_fails", False, "delay"),
    ],
    "late": [
        ("violations", 1, "no violation"),
        ("configurations", 1999, "no violation"),
        ("beyond", (), "half of omega"),
        ("largest_identity_error", 1e-9, "the gap"),
        ("mean_error", 1e-9, "the gap"),
        ("largest_score", 4.1, "against oracle"),
        ("simulated", 23, "against oracle"),
        ("wrong", 1, "Jury"),
        ("systems", 100, "Jury"),
        ("edges", (), "Jury"),
        ("drifts", (), "cost drift"),
    ],
    "clipping": [
        ("clipped", 999, "no violation"),
        ("unclipped", 999, "no violation"),
        ("violations", dict.fromkeys(BOUNDS, 1), "no violation"),
        ("violations", dict.fromkeys(BOUNDS, 0), "wrong constants"),
        ("floors", (BELOW,), "floor"),
    ],
}


@slow
@pytest.mark.parametrize("part", LACKING)
def test_too_little_evidence_is_none(findings: Findings, part: str) -> None:
    """A violation, too few of anything, or nothing at all: the claim fails, and no other."""
    for name, value, token in LACKING[part]:
        (claim,) = judged(findings, part, {name: value})
        assert token in claim


@slow
def test_chance_is_decided_by_more_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What exceeds the bound is run again with eight times the seeds, three times at most."""
    task = GridTask(family="isotropic", workers=2, local_steps=1, rounds=8, delay=1, seeds=4)
    right = bound.evaluate

    def strict(setting: Setting, condition: float = 1.0) -> Bound | Infeasible:
        found = right(setting, condition)
        if isinstance(found, Infeasible) or setting.noise != 0.3:
            return found
        return replace(found, optimization=0.0, noise=0.0, staleness=0.0, drift=1e-12)

    monkeypatch.setattr(bound, "evaluate", strict)
    runs = task.measure().runs
    assert {one.seeds for one in runs if one.setting.noise == 0.3} == {4 * 8**3}
    assert 4 in {one.seeds for one in runs if one.setting.noise != 0.3} <= {4, 32}


# --- rows, fits and cells ------------------------------------------------------------------------


def test_fits_find_what_was_put_in() -> None:
    """Slopes of a power law, and the coefficients of a sum of features, come back."""
    sizes = np.array([[g, t, r] for g in (1, 4, 16) for t in (1, 8, 64) for r in (256.0, 4096.0)])
    workers, steps, rounds = sizes.T
    power = 3 * workers**-0.4 * steps**-0.3 * rounds**-0.6
    np.testing.assert_allclose(rate_fits.slopes(sizes, power), [-0.4, -0.3, -0.6])
    whole = 1.5 / np.sqrt(workers * steps * rounds) + 2 / rounds + 0.1 * workers * steps / rounds
    coefficients, error = rate_fits.fit(sizes, whole)
    np.testing.assert_allclose(coefficients, [1.5, 2, 0, 0.1], atol=1e-9)
    assert error < 1e-9
    assert rate_fits.fit(sizes, whole, last=False)[1] > 0.1


def test_changed_modules_make_cells_stale(tmp_path: Path) -> None:
    """The hash covers every module of the wing, however deep, and nothing else."""
    for name in ("bound.py", "simulate.py", "exact_moments.py", "objectives/problems.py"):
        assert (store.WING / name).is_file()
    module = tmp_path / "deep" / "module.py"
    module.parent.mkdir()
    module.write_text("x = 1\n")
    before = store.version(tmp_path)
    (tmp_path / "notes.txt").write_text("y")
    assert store.version(tmp_path) == before
    module.write_text("x = 2\n")
    assert store.version(tmp_path) != before


def test_cells_come_back_as_they_were(tmp_path: Path) -> None:
    """Infinite and NaN measurements are kept: read again, they are still violations."""
    task = GridTask(family="hill", workers=2, local_steps=1, rounds=8, delay=1, seeds=3)
    runs = tuple(GridRun(PROBLEM, value, value, 3) for value in (math.inf, math.nan, 1 / 3))
    place = tmp_path / "cell.json"
    place.write_bytes(store.encoded(GridCell(task, runs)))
    again = store.kept(place, task)
    assert isinstance(again, GridCell)
    assert repr(again) == repr(GridCell(task, runs))
    assert [row.violated for row in again.rows()][:2] == [True, True]
    assert store.kept(place, replace(task, seeds=4)) is None


def test_an_interrupted_protocol_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only missing cells are measured, and come out the same; all are in the order of the plan."""
    tasks = [
        MomentsTask(family="spread", workers=2, local_steps=1, rounds=r, delay=1, seeds=5)
        for r in (4, 8, 6)
    ]
    monkeypatch.setattr(store, "plan", lambda *, quick: tasks[: 3 if quick else 0])
    seen: list[tuple[int, int]] = []

    def measured() -> list[Cell]:
        seen.clear()
        return store.measure(
            tmp_path, quick=True, jobs=1, progress=lambda done, whole: seen.append((done, whole))
        )

    first = measured()
    assert [cell.task for cell in first] == tasks
    assert seen == [(n, 3) for n in range(4)]
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 3
    lost = min(before)
    lost.unlink()
    assert measured() == first
    assert seen == [(2, 3), (3, 3)]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# --- the report and the command ------------------------------------------------------------------


def verify(cells: list[Cell], folder: Path, *options: str) -> int:
    """Run `co2analysis verify` on these cells; gives its exit code."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "measure", lambda *_, **__: cells)
        patched.setattr(sys, "argv", ["co2analysis", "verify", "--out", str(folder), *options])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def written(cells: list[Cell], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the report, by name; the command ends with exit code 0."""
    folder = tmp_path_factory.mktemp("verify")
    also = folder / "also.html"
    assert verify(cells, folder, "--quick", "--report", str(also)) == 0
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@slow
def test_the_page_leads_with_the_answer_and_holds_the_numbers(
    written: dict[str, bytes], findings: Findings
) -> None:
    """One heading, the findings in it; sections below; the file of numbers; no script at all."""
    whole = written["report.html"].decode()
    (heading,) = re.findall(r"<h1>(.*?)</h1>", whole)
    grid = findings.grid
    assert str(len(findings.checks)) in heading
    assert f"{grid.configurations:,}" in heading
    assert f"{grid.worst[0].ratio:.2f}" in heading
    levels = [int(level) for level in re.findall(r"<h([1-6])", whole)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert "<script" not in whole
    (numbers,) = re.findall(r'download="results.json" href="data:[^;]+;base64,([^"]+)"', whole)
    assert base64.b64decode(numbers) == written["results.json"]
    assert "co2analysis verify --out" in whole
    assert written["also.html"].decode() == whole


@slow
def test_a_wrong_bound_ends_with_exit_code_1(
    cells: list[Cell],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its violations are in the files and in the JSON."""
    right = bound.evaluate

    def wrong(setting: Setting, condition: float = 1.0) -> Bound | Infeasible:
        terms = right(setting, condition)
        return terms if isinstance(terms, Infeasible) else replace(terms, optimization=0.0)

    monkeypatch.setattr(bound, "evaluate", wrong)
    assert verify(cells, tmp_path, "--quick", "--json") == 1
    results = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert not results["passed"]
    assert results["grid"]["violations"] > 0
    assert results == json.loads((tmp_path / "results.json").read_text())
    whole = (tmp_path / "report.html").read_text()
    assert re.search(r"<h1>\d+ of the \d+ checks", whole)
    assert '<p class="doubt">FAILS: ' in whole
    assert "### Violations" in (tmp_path / "report.md").read_text()
