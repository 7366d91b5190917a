"""The protocol: its claims hold, of a part of the cells here and of all at night, and can fail."""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.convergence import bound, late_averages
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.setting import Outcome, RunSize, Setting, Variants
from theory import __main__ as command
from theory import clipping, controls, fragments, grid, oracle
from theory.cells import Cells, Check
from theory.clipping import MUTATIONS, Floor, Form, Genes, Tally
from theory.exact_moments import by_hand
from theory.grid import Row
from theory.problems import Known, Pieces, run

slow = pytest.mark.slow


def failed(lines: Iterator[Check | str] | Iterator[Check]) -> list[str]:
    """The claims that fail, and what was measured."""
    checks = [line for line in lines if isinstance(line, Check)]
    assert checks
    return [f"{each.claim}: {each.measured}" for each in checks if not each.passed]


# --- it holds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quick", [pytest.param(True, marks=slow), pytest.param(False, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("layer", command.LAYERS)
def test_every_claim_holds(layer: str, quick: bool) -> None:  # noqa: FBT001 - pytest's
    """On a part of the cells; at night on all of them."""
    assert failed(command.LAYERS[layer](Cells(), quick=quick)) == []


# --- it can fail ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Those of the quick grid, without logistic regression."""
    tasks = [task for task in grid.plan(quick=True) if not task.family.startswith("logistic")]
    return [row for task in tasks for row in grid.measure(task)]


def half(rows: list[Row], *, late: bool) -> list[Row]:
    """One half of the grid."""
    return [row for row in rows if bool(row.setting.late) is late]


@slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", bound.TERMS)
def test_wrong_terms_are_noticed(rows: list[Row], name: str, *, late: bool) -> None:
    """With any one term halved there are violations, and the claim of the grid fails."""
    wrong = [
        replace(row, bound=replace(row.bound, **{name: 0.5 * getattr(row.bound, name)}))
        if isinstance(row.bound, Bound)
        else row
        for row in half(rows, late=late)
    ]
    assert "no violation" in failed(grid.judge(wrong, 2_000))[0]


@slow
@pytest.mark.parametrize(
    ("late", "ratios"),
    [(False, [1.023, 1.046, 1.073, 1.087, 1.608]), (True, [1.061, 1.081, 1.115])],
)
def test_a_wrong_condition_is_noticed(rows: list[Row], ratios: list[float], *, late: bool) -> None:
    """With half of omega^2 the theorem would speak of runs that exceed it.

    Source: docs/theory-proofs.md, the condition matters.
    """
    beyond = grid.beyond_condition(half(rows, late=late))
    assert [row.ratio for row in beyond] == pytest.approx(ratios, abs=2e-3)
    assert all(row.violated for row in beyond)


@slow
def test_too_little_evidence_is_none(rows: list[Row]) -> None:
    """Too few configurations, or none outside of the condition: these claims fail alone."""
    plain = half(rows, late=False)
    (few,) = failed(grid.judge(plain, 10**6))
    assert "no violation" in few
    inside = [row for row in plain if isinstance(row.bound, Bound)]
    (unseen,) = failed(grid.judge(inside, 2_000))
    assert "half of omega" in unseen


@slow
def test_a_wrong_oracle_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that keep less than the oracle thinks do not fit it."""

    def forgetful(problem: Known, which: Variants, size: RunSize, **options: Any) -> Outcome:
        return run(problem, replace(which, keep=0.1 * which.keep), size, **options)

    monkeypatch.setattr(oracle, "run", forgetful)
    scores = oracle.scores(oracle.MomentsTask("isotropic", 3, 6, 24, 1000, late=3))
    assert max(abs(z) for row in scores for z in row) > 10


def test_a_wrong_gap_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity of a run with other options than it is told fails by far."""

    def other(problem: Known, which: Variants, size: RunSize, **options: Any) -> Outcome:
        return run(problem, replace(which, predict=np.array([0.4])), size, **options)

    monkeypatch.setattr(oracle, "run", other)
    assert oracle.gap_error(oracle.LATE_CASES[3]) > 1e-3


@slow
@pytest.mark.parametrize(("name", "kind"), [("_matrix_norm", "edge"), ("_windows", "apart")])
def test_a_wrong_constant_of_fragments_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """With half of omega^2, or of the sums of windows, runs exceed what is said; else none does."""
    batches = [(kind, seed, {"edge": 100, "apart": 20}[kind]) for seed in range(3)]
    right = getattr(late_averages, name)
    assert not sum(fragments.measure(*batch).above.total() for batch in batches)

    def wrong(*arguments: Any) -> Any:
        value = right(*arguments)
        return tuple(each / 2 for each in value) if kind == "apart" else value * math.sqrt(0.5)

    monkeypatch.setattr(late_averages, name, wrong)
    late_averages._nu.cache_clear()
    above = sum(fragments.measure(*batch).above.total() for batch in batches)
    late_averages._nu.cache_clear()
    assert above


def test_chance_is_decided_by_more_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What exceeds the bound is run again with eight times the seeds, three times at most."""
    right = bound.evaluate

    def strict(setting: Setting) -> Bound | Infeasible:
        terms = right(setting)
        if isinstance(terms, Infeasible) or setting.noise != 0.3:
            return terms
        return replace(terms, optimization=0.0, noise=0.0, staleness=0.0, drift=1e-12)

    monkeypatch.setattr(bound, "evaluate", strict)
    measured = grid.measure(grid.Task("isotropic", 2, 1, 8, 4))
    assert {row.seeds for row in measured if row.setting.noise == 0.3} == {4 * 8**3}
    assert 4 in {row.seeds for row in measured if row.setting.noise != 0.3} <= {4, 32}


ENOUGH = Counter({"clip": 1_000, "do not": 1_000})
FLOOR = Floor(root=1.0, floor=0.9, ratio=0.5, with_half=1.2)


@pytest.mark.parametrize(
    ("runs", "floor", "words"),
    [
        (ENOUGH - Counter({"clip": 1}), FLOOR, "no violation"),
        (ENOUGH - Counter({"do not": 1}), FLOOR, "no violation"),
        (ENOUGH, replace(FLOOR, ratio=1.1), "no violation"),
        (ENOUGH, replace(FLOOR, root=0.8), "floor"),
        (ENOUGH, replace(FLOOR, with_half=0.9), "not noticed: bias, half"),
    ],
)
def test_clipping_can_fail(runs: Counter[str], floor: Floor, words: str) -> None:
    """A violation, too few runs, a wrong constant that nothing noticed, a root below its floor."""
    tally = Tally(violations=Counter(set(MUTATIONS) - {"bias, half"}), runs=runs)
    (claim,) = failed(clipping.judge(tally, [floor], quick=True))
    assert words in claim


def test_fits_find_what_was_put_in() -> None:
    """The coefficients of a sum of features come back."""
    sizes = np.array([[g, t, r] for g in (1, 4, 16) for t in (1, 8, 64) for r in (256.0, 4096.0)])
    workers, steps, rounds = sizes.T
    whole = 1.5 / np.sqrt(workers * steps * rounds) + 2 / rounds + 0.1 * workers * steps / rounds
    np.testing.assert_allclose(controls.fit(sizes, whole), [1.5, 2, 0, 0.1], atol=1e-9)


# --- exact runs that clip ------------------------------------------------------------------------


def followed(form: Form, genes: Genes, setting: Setting, phi: float) -> tuple[float, float, float]:
    """A and both residuals on x^2/2, by every path of the noise, a number at a time."""
    size, tau = form.size, form.size.local_steps
    up = math.sqrt((1 - form.share) / form.share) * float(genes.noise[0])
    down = -math.sqrt(form.share / (1 - form.share)) * float(genes.noise[0])
    decay, start = float(genes.decay[0]), float(form.problem.start[0])
    total = square = running = 0.0
    for path in product((up, down), repeat=size.rounds * tau):
        weight = math.prod(form.share if noise == up else 1 - form.share for noise in path)
        lost: list[float] = []

        def clipped(_: int, wanted: float, lost: list[float] = lost) -> float:
            kept = min(max(wanted, -phi), phi)
            lost.append(setting.penalty * (wanted - kept) / tau)
            return kept

        def slope(step: int, x: float, path: tuple[float, ...] = path) -> float:
            return start + x + path[step]

        total += weight * sum((start + x) ** 2 for x in by_hand(setting, slope, clipped))
        if not (setting.late or size.delay):
            lost.pop()  # it moves no point that is visited
        r = 0.0
        for s in lost:
            r = decay * r + (1 - decay) * s
            square, running = square + weight * s * s, running + weight * r * r
    rounds = size.rounds
    return total / (rounds * tau), math.sqrt(square / rounds), math.sqrt(running / rounds)


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("late", [None, 1, 2])
def test_runs_are_those_of_every_path(delay: int, late: int | None) -> None:
    """A and both residuals of a clipped run are those of a loop over numbers and paths."""
    problem = Pieces(
        breaks=np.zeros((1, 1)),
        slopes=np.ones((1, 1, 2)),
        tilt=np.zeros((1, 1)),
        offset=np.zeros(1),
        turn=np.eye(1),
        start=np.array([1.5]),
    )
    size = RunSize(workers=1, rounds=4, local_steps=2, seeds=256, delay=delay, late_steps=late)
    form = Form(problem, size, 0.2)
    genes = Genes(
        outer=np.array([1.3]),
        momentum=np.array([0.5]),
        penalty=np.array([2.0]),
        clip=np.array([-1.5]),
        step=np.array([0.9]),
        noise=np.array([1.2]),
        decay=np.array([0.7]),
        aware=np.array([False]),
    )
    (done,) = clipping.measured(form, genes)
    expected = followed(form, genes, done.setting, done.phi)
    assert (done.gradient, done.residual, done.running) == pytest.approx(expected)
    assert expected[1] > expected[2] > 0


def test_pieces_are_the_integral_of_their_gradient() -> None:
    """The value is above 0 and its slope the gradient, which L bounds; workers have its mean."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        problem = clipping.random_form(rng, noisy=False).problem
        points = rng.normal(size=(50, len(problem.start))) * 3
        near = points + 1e-6 * rng.normal(size=points.shape)
        change = ((problem.gradient(points) + problem.gradient(near)) / 2 * (near - points)).sum(
            axis=-1
        )
        np.testing.assert_allclose(problem.value(near) - problem.value(points), change, atol=1e-9)
        steps = np.linalg.norm(problem.gradient(points[1:]) - problem.gradient(points[:-1]), axis=1)
        assert (
            steps <= problem.smoothness * np.linalg.norm(np.diff(points, axis=0), axis=1) + 1e-9
        ).all()
        assert problem.value(points).min() >= -1e-9
        each = problem.gradients(np.repeat(points[:, None], len(problem.slopes), axis=1))
        np.testing.assert_allclose(each.mean(axis=1), problem.gradient(points), atol=1e-9)
        x = problem.start[None]
        for _ in range(2000):
            x = x - 0.5 * problem.gradient(x)
        assert problem.value(x)[0] >= -1e-9


# --- cells and the command -----------------------------------------------------------------------


def test_an_interrupted_protocol_goes_on(tmp_path: Path) -> None:
    """Only missing cells are measured, and all come back as they were, in order."""
    log = tmp_path / "log"
    tasks = [(log, 3.0), (log, math.inf), (log, 1.0)]
    cells = Cells(tmp_path / "cells")
    assert cells(_logged, tasks[1:]) == [math.inf, 1.0]
    assert cells(_logged, tasks) == [3.0, math.inf, 1.0]
    assert log.read_text().split() == ["inf", "1.0", "3.0"]


def _logged(log: Path, value: float) -> float:
    with log.open("a") as file:
        file.write(f"{value}\n")
    return value


@pytest.mark.parametrize("holds", [True, False])
def test_the_command_writes_what_it_found(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    holds: bool,  # noqa: FBT001 - pytest's
) -> None:
    """A report of claims and tables, and a picture; exit code 1 if a claim fails."""

    def layer(cells: Cells, *, quick: bool) -> Iterator[Check | str]:
        assert quick
        (value,) = cells(abs, [(-7,)])
        yield Check("|z| is small", holds, f"{value} of them")
        yield "numbers\n\nnone"

    monkeypatch.setattr(command, "LAYERS", {"one": layer})
    task = grid.Task("two kinds", 4, 1, 64, 0)
    monkeypatch.setattr(grid, "plan", lambda **_: [task, task._replace(tau=64)])
    monkeypatch.setattr(sys, "argv", ["theory", "--quick", "--jobs", "1", "--out", str(tmp_path)])
    assert command.main() == (0 if holds else 1)
    text = (tmp_path / "report.md").read_text()
    assert f"| \\|z\\| is small | {'holds' if holds else 'FAILS'} | 7 of them |" in text
    assert "## Numbers\n\nnone" in text
    assert (tmp_path / "bound.png").read_bytes().startswith(b"\x89PNG")
