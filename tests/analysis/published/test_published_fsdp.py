"""LLM Foundry's rows: fast predictions, fits that share constants, and what is said of errors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from places import GOLDEN

from analysis.published import calibrate
from analysis.published.cells import Cell, changed, with_constants
from analysis.published.parameters import GROUPS, stated
from analysis.published.predict import (
    CellPrediction,
    predict,
    result_of,
    summaries_by_hardware,
)
from analysis.published.runs import PAPERS, TABLES_ELSEWHERE, tables_elsewhere
from analysis.published.tables import from_csv, known_cells, ratios

ROWS = GOLDEN / "fsdp-rows.csv"
GROUP = GROUPS["mpt-fsdp"]


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    """Made-up rows of all three GPUs, on one node and on several."""
    return from_csv(ROWS, "check")


# --- fast predictions ----------------------------------------------------------------------------


def test_fast_predictions_are_those_of_the_simulation(cells: list[Cell]) -> None:
    """With computation slowed by communication, many micro-steps, and constants that are moved."""
    moved = {"interference": 0.3, "node_spread": 0.03, "gemm_efficiency, H100": 0.5}
    for cell in (*cells, with_constants(cells[0], moved)):
        assert predict(cell, fast=True) == pytest.approx(predict(cell), rel=1e-6), cell.name


# --- fits ----------------------------------------------------------------------------------------


def test_an_outlier_hardly_moves_a_robust_fit(
    cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With residuals that are linear in the constants: the least squares of all but the outlier."""
    group = replace(GROUP, constants=GROUP.constants[:2], ratio_weight=1.0)
    chosen = [
        changed(
            replace(cells[0], name=str(n), use="fit", group=group.name),
            lambda run, n=n: run.changed(accumulation=n + 1),  # type: ignore[misc]
        )
        for n in range(40)
    ]
    x = np.linspace(0.0, 1.0, len(chosen))
    y = 0.4 + 0.2 * x + 0.01 * np.cos(9.0 * np.arange(len(chosen)))
    y[7] += 5.0
    first, second = (constant.name for constant in group.constants)
    places = {cell.name: place for place, cell in enumerate(chosen)}

    def residuals(some: Sequence[Cell], values: Mapping[str, float]) -> calibrate.Array:
        at = [places[cell.name] for cell in some]
        found: calibrate.Array = values[first] + (values[second] - 0.5) * x[at] - y[at]
        return found

    monkeypatch.setattr(calibrate, "residuals_of", residuals)
    found = calibrate.fit(group, chosen)
    assert np.abs(np.delete(found.left_out, 7)).max() < 0.03
    assert found.left_out[7] < -4
    assert found.coverage == pytest.approx(0.9, abs=0.1)
    rest = np.delete(np.arange(len(chosen)), 7)
    slope, start = np.polyfit(x[rest], y[rest], 1)
    assert found.values[first] == pytest.approx(start, abs=0.02)
    assert found.values[second] == pytest.approx(0.5 + slope, abs=0.02)
    assert found.scatter is not None
    assert found.scatter < 0.02  # nine tenths of the residuals; with the outlier it is 0.8


def test_a_refit_of_a_linearised_model_is_the_refit(
    cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where residuals are linear, a fit without some cells is that of the others."""
    group = replace(GROUP, constants=GROUP.constants[:2], ratio_weight=1.0)
    chosen = [replace(cells[0], name=str(n)) for n in range(12)]
    slopes = np.random.default_rng(0).normal(size=(12, 2))
    target = slopes @ [0.7, 0.4] + np.random.default_rng(1).normal(scale=0.005, size=12)
    names = [constant.name for constant in group.constants]
    places = {cell.name: place for place, cell in enumerate(chosen)}

    def residuals(some: Sequence[Cell], values: Mapping[str, float]) -> calibrate.Array:
        at = [places[cell.name] for cell in some]
        found: calibrate.Array = slopes[at] @ [values[name] for name in names] - target[at]
        return found

    monkeypatch.setattr(calibrate, "residuals_of", residuals)
    refit = calibrate.linearised(group, chosen, stated(group))
    linear = refit(chosen[3:], chosen[:3])
    assert linear == pytest.approx(calibrate._refitted(group, chosen[3:], chosen[:3]), abs=2e-4)


# --- what is printed -----------------------------------------------------------------------------


def test_errors_are_summed_up_by_gpu_and_by_nodes(cells: list[Cell]) -> None:
    """Every run counts for its GPU and for all, on its number of nodes and on any; ratios apart."""
    rows = [CellPrediction(cell, cell.published * 1.1) for cell in (*cells, *ratios(cells))]
    found = summaries_by_hardware(rows)
    counts = {key[2:]: one.cells for key, one in found.items()}
    assert counts == {
        ("all", "all"): 6,
        ("all", "one node"): 3,
        ("all", "several nodes"): 3,
        ("all", "ratios"): 1,
        ("h100_80gb", "all"): 3,
        ("h100_80gb", "one node"): 1,
        ("h100_80gb", "several nodes"): 2,
        ("h100_80gb", "ratios"): 1,
        ("a100_80gb", "all"): 1,
        ("a100_80gb", "one node"): 1,
        ("a100_40gb", "all"): 2,
        ("a100_40gb", "one node"): 1,
        ("a100_40gb", "several nodes"): 1,
    }
    assert all(one.bias == pytest.approx(0.1) for one in found.values())


@pytest.mark.nightly
@pytest.mark.skipif(
    TABLES_ELSEWHERE["llm_foundry"] not in {path.name for path in tables_elsewhere()},
    reason=f"{TABLES_ELSEWHERE['llm_foundry']} is not at hand",
)
def test_every_published_run_fits_in_memory() -> None:
    """They ran. The fullest of them leaves less than a tenth, so what fits is not overstated."""
    runs = [cell for cell in known_cells(PAPERS) if cell.source == "llm_foundry"]
    results = [result_of(cell.setup) for cell in runs]
    shares = [one.memory_bytes_per_gpu["total"] / one.gpu_memory_bytes for one in results]
    assert max(shares) <= 1
    assert max(shares) > 0.9
