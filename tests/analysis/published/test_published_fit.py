"""Fitted constants: what they are fitted on, their uncertainty, and how the catalog states them."""

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from places import GOLDEN
from scipy.stats import linregress
from typer.testing import CliRunner

from analysis.cli.app import app
from analysis.published import calibrate, catalog_writer
from analysis.published.cells import Cell, from_papers
from analysis.published.parameters import GROUPS, cluster_of, stated
from analysis.published.predict import predict
from analysis.published.runs import PAPERS, TABLES_ELSEWHERE, tables_elsewhere
from analysis.published.tables import from_csv, known_cells
from co2sim.prediction.calibrations import CATALOG, RECORD, calibrations, record

DATA = {path.name for path in tables_elsewhere()}
MADE_UP = {"vtrain": "iteration-rows.csv", "llm_foundry": "fsdp-rows.csv"}


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    """The cells of `papers/`."""
    return from_papers()


@pytest.fixture(scope="module")
def all_cells() -> list[Cell]:
    """All cells, with made-up iteration times where the published ones are not at hand."""
    missing = [MADE_UP[key] for key, name in TABLES_ELSEWHERE.items() if name not in DATA]
    tables = [from_csv(GOLDEN / name, "check") for name in missing]
    return [*known_cells(PAPERS), *(cell for cells in tables for cell in cells)]


def test_only_the_cells_marked_fit_are_fitted_on(cells: list[Cell]) -> None:
    """CO2: AdamW at 8 and 16 GPUs; ZeRO++: the bars; nothing else."""
    co2 = calibrate.fit_cells(cells, GROUPS["a100-co2"])
    assert sorted(cell.setup.gpus for cell in co2) == [8, 16]
    assert all(cell.strategy == "zero2" for cell in co2)
    bars = calibrate.fit_cells(cells, GROUPS["v100-zeropp"])
    assert len(bars) == 20
    assert not any(cell.over for cell in bars)


def test_a_cluster_has_at_most_six_constants(all_cells: list[Cell]) -> None:
    """Each has a value inside its bounds, in the clusters that the cells of its group run on."""
    for group in GROUPS.values():
        assert max(len(group.on(cluster)) for cluster in group.clusters) <= 6
        clusters = {cell.setup.cluster for cell in all_cells if cell.group == group.name}
        assert clusters == set(group.clusters)
        values = stated(group)
        for constant in group.constants:
            assert constant.low <= values[constant.name] <= constant.high


@pytest.mark.slow
def test_the_fast_prediction_is_that_of_the_whole_simulation(all_cells: list[Cell]) -> None:
    """Sums of serial schedules, and extrapolation by layers, are right to 0.1 %."""
    chosen = [cell for cell in all_cells if cell.source != "co2"]
    for cell in chosen[:: max(1, len(chosen) // 12)]:
        assert predict(cell, fast=True) == pytest.approx(predict(cell), rel=1e-3), cell.name


@pytest.mark.slow
def test_a_fit_finds_the_constants_behind_made_up_cells(cells: list[Cell]) -> None:
    """Cells predicted with known constants are fitted on: those constants come back."""
    group = GROUPS["a100-co2"]
    true = {"compute_efficiency": 0.41, "tcp_efficiency": 0.55}
    chosen = calibrate.fit_cells(cells, group)
    found = calibrate.fit(group, [replace(c, published=predict(c, true)) for c in chosen])
    assert found.values == pytest.approx(true, rel=1e-3)
    assert found.mape < 1e-4


def test_the_uncertainty_of_a_linear_fit_is_that_of_regression(
    cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With residuals that are linear in two constants: the fit and errors of `scipy.linregress`.

    So the scatter is divided by the degrees of freedom, cells less constants, and the covariance is
    in units of its square.
    """
    group = GROUPS["v100-zeropp"]
    chosen = calibrate.fit_cells(cells, group)
    x = np.linspace(0.0, 1.0, len(chosen))
    y = 0.3 + 0.4 * x + 0.05 * np.cos(7.0 * np.arange(len(chosen)))
    intercept, slope = (constant.name for constant in group.constants)

    def residuals(_cells: Sequence[Cell], values: Mapping[str, float]) -> calibrate.Array:
        found: calibrate.Array = values[intercept] + values[slope] * x - y
        return found

    monkeypatch.setattr(calibrate, "residuals_of", residuals)
    found = calibrate.fit(group, chosen, cross_validate=False)
    known = linregress(x, y)
    assert found.values[slope] == pytest.approx(known.slope, rel=1e-4)
    assert found.values[intercept] == pytest.approx(known.intercept, rel=1e-4)
    errors_of = np.sqrt(np.diag(found.covariance))
    assert errors_of == pytest.approx([known.intercept_stderr, known.stderr], rel=1e-3)
    left = y - known.intercept - known.slope * x
    assert found.freedom == len(chosen) - 2
    assert found.scatter == pytest.approx(np.std(left, ddof=2), rel=1e-4)


def test_every_label_parts_the_cells(cells: list[Cell]) -> None:
    """For each label, every cell is left out exactly once."""
    chosen = calibrate.fit_cells(cells, GROUPS["v100-zeropp"])
    found = calibrate.parts_by_label(chosen)
    assert {label: len(parts) for label, parts in found.items()} == {
        "model": 4,
        "tokens": 2,
        "cluster": 2,
    }
    for parts in found.values():
        names = sorted(cell.name for part in parts for cell in part)
        assert names == sorted(cell.name for cell in chosen)


# --- the catalog ---------------------------------------------------------------------------------


def recorded_fits() -> list[calibrate.Fit]:
    """The fits that the catalog's record and its files state."""
    found = []
    for name, entry in record().items():
        covariance, own = np.array(entry["covariance"]), "assumed" not in entry
        fit = calibrate.Fit(
            group=name,
            values=stated(GROUPS[name]),
            covariance=covariance if own else 0 * covariance,
            unscaled=covariance / calibrations()["v100-zeropp"].scatter ** 2,
            scatter=entry["scatter"] if own else None,
            freedom=entry["freedom"],
            cells=entry["cells"],
            mape=entry["mape"],
            cross_validated=entry.get("cross_validated"),
            by_label=entry.get("left_out", {}),
            factor=entry["interval_factor"],
            coverage=entry.get("coverage"),
            left_out=tuple(entry.get("left_out_errors", ())),
            kinds=tuple(entry["kinds"]),
            strategies=tuple(entry["strategies"]),
            ranges=calibrations()[name].ranges,
        )
        found.append(fit)
    return found


def test_writing_the_recorded_fits_gives_the_record() -> None:
    """Byte for byte, with its comments, paths, bounds and GPUs."""
    fits = recorded_fits()
    path, content = catalog_writer.record_file(fits)
    assert path.name == RECORD
    assert content == path.read_bytes()
    assert tomllib.loads(content.decode()) == record()
    for fit in fits:
        assert catalog_writer.record_file([fit])[1] == content, fit.group


def test_the_record_holds_every_group() -> None:
    """Constants by name, a square covariance with a positive diagonal or zero, a scatter."""
    entries = record()
    assert entries.keys() == GROUPS.keys()
    for name, entry in entries.items():
        assert entry["constants"] == [constant.name for constant in GROUPS[name].constants]
        size = len(entry["constants"])
        assert [len(row) for row in entry["covariance"]] == [size] * size
        assert all(entry["covariance"][i][i] >= 0 for i in range(size))
        assert entry["scatter"] > 0
        for cluster in GROUPS[name].clusters:
            assert calibrations()[name].holds_for(cluster_of(cluster, GROUPS[name].stack))


def test_recorded_intervals_hold_left_out_cells() -> None:
    """Of the cells, each left out of the fit, 85 to 95 % lie in intervals that others determine.

    Recomputed from the recorded errors, for leverages that are all alike.
    """
    for name, entry in record().items():
        if "left_out_errors" not in entry:
            continue
        known = calibrations()[name]
        scores = [error / known.quick_scatter for error in known.left_out_errors]
        assert entry["coverage"] == pytest.approx(0.9, abs=0.05)
        assert calibrate.covered(scores, calibrate.FOLDS) == pytest.approx(
            entry["coverage"], abs=0.05
        )
        assert calibrate.conformal_factor(scores) == pytest.approx(known.factor, rel=0.15)


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_calibrate_writes_the_catalog_and_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fits equal to the recorded ones leave every file as it is; another value changes one line."""
    for name in ("gpus", "clusters", "stacks"):
        shutil.copytree(str(CATALOG / name), tmp_path / name)
    shutil.copy(str(CATALOG / RECORD), tmp_path)
    before = {path: path.read_text() for path in tmp_path.glob("**/*.toml")}
    monkeypatch.setattr(catalog_writer, "CATALOG", tmp_path)
    fits = recorded_fits()
    monkeypatch.setattr(calibrate, "fit_all", lambda _cells, _names: fits)
    found = CliRunner().invoke(app, ["calibrate", "--write", "--papers", str(PAPERS)])
    assert found.exit_code == 0, found.output
    assert found.output.count("written ") == 6
    assert {path: path.read_text() for path in before} == before
    fits[0] = replace(fits[0], values={**fits[0].values, "exchange_efficiency": 0.25})
    CliRunner().invoke(app, ["calibrate", "--write", "--papers", str(PAPERS)])
    changed = [path for path in before if path.read_text() != before[path]]
    cluster = tmp_path / "clusters" / "dgx2-calibrated.toml"
    assert set(changed) == {cluster, tmp_path / RECORD}
    old, new = before[cluster].splitlines(), cluster.read_text().splitlines()
    (pair,) = (pair for pair in zip(old, new, strict=True) if pair[0] != pair[1])
    stands = f"{stated(GROUPS['v100-zeropp'])['exchange_efficiency']:.4g}"
    assert pair[1] == pair[0].replace(stands, "0.25")
