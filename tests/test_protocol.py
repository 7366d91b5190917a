"""The pieces of the protocol of `verify`: what is kept, what counts, what is fitted."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.convergence import bound
from analysis.convergence.objectives.families import FAMILIES
from analysis.convergence.protocol import rate_fits, store, tightness
from analysis.convergence.protocol.grid import GridCell, GridRun, GridTask
from analysis.convergence.protocol.oracle import IdentityCell, IdentityTask
from analysis.convergence.protocol.tightness import TightnessRow
from analysis.convergence.setting import Setting
from analysis.convergence.simulate import run
from analysis.convergence.variants import RunSize, variants
from co2sim.errors import CatalogError

PROBLEM = Setting(
    smoothness=10.0,
    noise=1.0,
    gap=5.0,
    workers=1,
    rounds=1,
    local_steps=1,
    inner_step=1e-3,
)
FEASIBLE = TightnessRow(
    family="any",
    delay=1,
    rule="1",
    setting=PROBLEM,
    measured=0.5,
    error=0.0,
    bound=bound.evaluate(PROBLEM),
)


def test_changed_modules_make_cells_stale(tmp_path: Path) -> None:
    """The hash covers every module of the wing, however deep, and nothing else."""
    for name in ("bound.py", "simulate.py", "exact_moments.py", "objectives/problems.py"):
        assert (store.WING / name).is_file()
    (tmp_path / "deep").mkdir()
    module = tmp_path / "deep" / "module.py"
    module.write_text("x = 1\n")
    before = store.version(tmp_path)
    (tmp_path / "notes.txt").write_text("y")
    assert store.version(tmp_path) == before
    module.write_text("x = 2\n")
    assert store.version(tmp_path) != before


def test_broken_cells_are_measured_again(tmp_path: Path) -> None:
    """An empty file, a cut one, one of another kind or of another task are as good as none."""
    place = tmp_path / "cell.json"
    task = IdentityTask()
    whole = '{"task":{},"errors":[1e-16],"kind":"identities"}'
    other = '{"task":{},"lines":[],"kind":"terms"}'
    for text in ("", whole[:-9], "[]", "{}", other, whole.replace("[1e-16]", '"1"')):
        place.write_text(text)
        assert store.kept(place, task) is None
    place.write_text(whole)
    assert store.kept(place, task) == IdentityCell(task, (1e-16,))
    assert store.kept(tmp_path / "none.json", task) is None
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    for name, said in (("pipe", "it is not a regular file"), ("folder", "Is a directory")):
        with pytest.raises(CatalogError, match=f"cannot read .*/{name}.json: {said}"):
            store.kept(tmp_path / f"{name}.json", task)


def test_diverged_cells_come_back_as_they_were(tmp_path: Path) -> None:
    """Infinite and NaN measurements are kept: read again, they are still violations."""
    task = GridTask(family="hill", workers=2, local_steps=1, rounds=8, delay=1, seeds=3)
    runs = tuple(GridRun(PROBLEM, value, value, 3) for value in (math.inf, math.nan, 1 / 3))
    place = tmp_path / "cell.json"
    place.write_bytes(store.encoded(GridCell(task, runs)))
    again = store.kept(place, task)
    assert isinstance(again, GridCell)
    assert repr(again) == repr(GridCell(task, runs))
    assert [row.violated for row in again.rows()][:2] == [True, True]


def test_infeasible_is_never_a_violation() -> None:
    """Outside the condition a row has neither a ratio nor a verdict."""
    beyond = replace(PROBLEM, inner_step=1.0)
    row = replace(FEASIBLE, setting=beyond, measured=1e9, bound=bound.evaluate(beyond))
    assert not row.violated
    assert math.isnan(row.ratio)
    assert tightness.summary([row, row]).infeasible == 2


def test_the_same_run_counts_once() -> None:
    """Rows of equal family, measurement and bound are one configuration; others are not."""
    again = replace(FEASIBLE, setting=replace(PROBLEM, workers=7), family="any, exact")
    other = replace(FEASIBLE, measured=0.6)
    assert tightness.distinct([FEASIBLE, again, other]) == [FEASIBLE, other]


def test_few_seeds_widen_the_margin() -> None:
    """The margin has the coverage of 3 normal standard errors: Student's t, from tables."""
    assert tightness.margin(10_000) == pytest.approx(3, abs=2e-3)
    assert tightness.margin(4) == pytest.approx(9.22, abs=0.02)


def test_diverged_measurement_is_a_violation() -> None:
    """NaN never passes."""
    assert not FEASIBLE.violated
    assert replace(FEASIBLE, measured=math.nan, error=math.nan).violated


def test_variants_apart_do_not_share_noise() -> None:
    """Two equal variants see the same noise, or, apart, noise of their own."""
    which = variants(np.full(2, 0.1), noise=1.0)
    size = RunSize(workers=2, rounds=4, local_steps=3, seeds=5)
    problem = FAMILIES["isotropic"](2)
    one, two = run(problem, which, size).gradient
    np.testing.assert_array_equal(one, two)
    one, two = run(problem, which, size, apart=True).gradient
    assert (one != two).all()


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
