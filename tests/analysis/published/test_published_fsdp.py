"""LLM Foundry's rows: what is said of errors, and their memory."""

import pytest
from places import GOLDEN

from analysis.published.cells import Cell
from analysis.published.predict import CellPrediction, result_of, summaries_by_hardware
from analysis.published.runs import PAPERS, TABLES_ELSEWHERE, tables_elsewhere
from analysis.published.tables import from_csv, known_cells, ratios

ROWS = GOLDEN / "fsdp-rows.csv"


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    """Made-up rows of all three GPUs, on one node and on several."""
    return from_csv(ROWS, "check")


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
