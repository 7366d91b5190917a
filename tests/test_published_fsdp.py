"""LLM Foundry's rows: fast predictions, fits that share constants, and what is said of errors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.published import calibrate, errors
from analysis.published.cells import Cell, changed, with_constants
from analysis.published.csv_tables import from_csv, known_cells
from analysis.published.fsdp_rows import ratios
from analysis.published.papers import PAPERS, TABLES_ELSEWHERE, tables_elsewhere
from analysis.published.parameters import GROUPS, stated
from analysis.published.predict import memory_of, predict
from co2sim import study

ROWS = Path(__file__).parent / "golden" / "fsdp-rows.csv"
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


def test_a_constant_of_one_gpu_leaves_the_others_alone(cells: list[Cell]) -> None:
    """One of two GPUs moves both; the shared ones move all."""

    def moves(name: str, value: float) -> set[str]:
        return {
            cell.labels["gpu"]
            for cell in cells
            if abs(predict(cell, {name: value}, fast=True) / predict(cell, fast=True) - 1) > 1e-9
        }

    assert moves("gemm_efficiency, H100", 0.4) == {"h100_80gb"}
    assert moves("attention_efficiency, A100", 0.2) == {"a100_80gb", "a100_40gb"}
    assert moves("vocabulary_efficiency", 0.2) == {"h100_80gb", "a100_80gb", "a100_40gb"}
    assert moves("node_spread", 0.07) == {"h100_80gb", "a100_40gb"}  # the rows on several nodes


def test_an_outlier_hardly_moves_a_robust_fit(
    cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With residuals that are linear in the constants: the least squares of all but the outlier."""
    group = replace(GROUP, constants=GROUP.constants[:2], ratio_weight=1.0)
    chosen = [
        changed(
            replace(cells[0], name=str(n), use="fit", group=group.name),
            lambda setup, n=n: replace(setup, accumulation=n + 1),  # type: ignore[misc]
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


def test_left_out_runs_take_their_ratios_with_them(cells: list[Cell]) -> None:
    """A ratio would tell the fit of a run that it must not know."""
    everything = [*cells, *ratios(cells)]
    kept: list[Cell] = []

    def refit(rest: Sequence[Cell], left: Sequence[Cell]) -> calibrate.Array:
        kept[:] = rest
        return np.zeros(len(left))

    calibrate.left_out_errors(refit, everything, [cells[:1]])
    assert [cell.source for cell in kept] == ["llm_foundry"] * (len(cells) - 1)


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


def test_a_prediction_says_whether_the_run_fits(cells: list[Cell]) -> None:
    """In JSON; a ratio fits if both of its runs do."""
    row = errors.CellPrediction(cells[0], 1.0).to_dict()
    assert row["fits_in_memory"] is True
    assert row["labels"]["gpu"] == "h100_80gb"
    assert row["memory_bytes_per_gpu"] == cells[0].setup.case().prepare().memory()["total"]
    (ratio,) = ratios(cells)
    most = max(memory_of(setup).needed for setup in ratio.setups)
    assert errors.CellPrediction(ratio, 1.0).to_dict()["memory_bytes_per_gpu"] == most


@pytest.mark.parametrize("gpus", [1024, 2048, pytest.param(4096, marks=pytest.mark.nightly)])
def test_a_row_far_from_the_fitted_ones_has_the_interval_that_a_simulation_has(
    cells: list[Cell], gpus: int
) -> None:
    """1,024 GPUs are near 512; 2,048 have errors of the kind, and 4,096 those of all kinds."""
    cell = changed(cells[0], lambda setup: replace(setup, gpus=gpus))
    (row,) = errors.validate([cell])
    result = study.run(cell.setup.case())
    assert result.tokens_per_s_low is not None
    assert result.tokens_per_s_high is not None
    ends = (row.low / row.predicted, row.high / row.predicted)
    low, high = (
        end / result.tokens_per_s for end in (result.tokens_per_s_low, result.tokens_per_s_high)
    )
    assert ends == pytest.approx((low, high), rel=0.01 if gpus == 1024 else 1e-9)
    assert (high / low > 1.3) == (gpus > 1024)


def test_an_interval_does_not_depend_on_what_is_published(cells: list[Cell]) -> None:
    """It is that of the prediction: a published number that is wrong changes none of it."""
    wrong = replace(cells[0], published=1.0)
    one, other = errors.validate([cells[0], wrong])
    assert (one.low, one.high) == (other.low, other.high)


def test_errors_are_summed_up_by_gpu_and_by_nodes(cells: list[Cell]) -> None:
    """Every run counts for its GPU and for all, on its number of nodes and on any; ratios apart."""
    rows = [errors.CellPrediction(cell, cell.published * 1.1) for cell in (*cells, *ratios(cells))]
    found = errors.summaries_by_hardware(rows)
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
    shares = [memory_of(cell.setup).share for cell in runs]
    assert max(shares) <= 1
    assert max(shares) > 0.9
