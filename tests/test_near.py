"""Which runs are near those whose errors are known, and what the limits rest on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.published import calibrate
from analysis.published.cells import Cell, run_figures
from analysis.published.csv_tables import known_cells
from analysis.published.papers import PAPERS, TABLES_ELSEWHERE, tables_elsewhere
from analysis.published.parameters import GROUPS, stated
from co2sim.catalog import load_cluster, load_model
from co2sim.cluster import Link, Tier
from co2sim.near import beyond, figures_of, ranges

KNOWN = {"gpus": (8.0, 512.0), "inter": (2e11, 4e11), "parameters": (1e9, 3e10)}


def test_figures_are_those_of_the_run() -> None:
    """8 cards of 400 Gbit/s for 8 GPUs: 400 Gbit/s a GPU; on one node there is no network."""
    cluster, model = load_cluster("h100-calibrated").value, load_model("mpt-7b").value
    found = figures_of(cluster.resized(64), model, "bf16")
    assert found == {
        "gpus": 64,
        "parameters": model.parameters,
        "sequence": 2048,
        "vocabulary": 50368,
        "bits": 16,
        "step_spread": 0,
        "intra": pytest.approx(3.6e12),
        "intra_latency": pytest.approx(3.4e-6),
        "inter": pytest.approx(4e11),
        "inter_latency": 14e-6,
    }
    assert "inter" not in figures_of(cluster.resized(8), model, "bf16")
    assert "intra" not in figures_of(cluster.resized(1), model, "bf16")


def test_the_narrowest_place_between_nodes_counts() -> None:
    """Switches that are crossed divide what a card has, and a site has one uplink."""
    cluster, model = load_cluster("h100-calibrated").value.resized(64), load_model("mpt-7b").value
    narrow = replace(cluster.inter, spine=Tier(4, oversubscription=4.0, congestion=1.5))
    tiered = replace(cluster, inter=narrow)
    assert figures_of(tiered, model, "bf16")["inter"] == pytest.approx(4e11 / 6)
    assert figures_of(tiered.resized(32), model, "bf16")["inter"] == pytest.approx(4e11)
    sites = replace(cluster, sites=2, wan=Link(1e9, 0.01))
    assert figures_of(sites, model, "bf16")["inter_latency"] == 0.01
    assert figures_of(sites, model, "bf16")["inter"] == pytest.approx(8e9 / 32)


@given(st.lists(st.dictionaries(st.sampled_from(list(KNOWN)), st.floats(1, 1e12)), min_size=1))
def test_no_known_run_is_far_from_known_runs(runs: list[dict[str, float]]) -> None:
    """Whatever they are; and what is not known of any is not compared."""
    known = ranges(runs)
    assert not any(beyond(run, known) for run in runs)
    assert not beyond({"sequence": 1e9}, known)


def test_what_is_far_is_said_in_words() -> None:
    """With what the known runs have. A kind tells of more GPUs than a fit, and fewer are near."""
    assert not beyond({"gpus": 1024, "inter": 1e11, "parameters": 5e8}, KNOWN)
    assert beyond({"gpus": 1025}, KNOWN) == "1,025 GPUs, there 8 to 512"
    assert not beyond({"gpus": 2048}, KNOWN, wide=True)
    assert beyond({"gpus": 2049}, KNOWN, wide=True)
    assert not beyond({"gpus": 1}, KNOWN)
    both = beyond({"inter": 1e9, "parameters": 4e8}, KNOWN)
    assert both == (
        "1 Gbit/s a GPU between nodes, there 200 Gbit/s to 400 Gbit/s;"
        " 400 million parameters, there 1 billion to 30 billion"
    )


def errors(cells: list[Cell], left: list[Cell]) -> tuple[float, float]:
    """Mean absolute errors of cells, fitted to, and left out of the fit, all together."""
    group = GROUPS["mpt-fsdp"]
    values = stated(group)
    fitted = calibrate.residuals_of(left, values)
    (out,) = calibrate.left_out_errors(calibrate.linearised(group, cells, values), cells, [left])
    return float(np.mean(np.abs(np.expm1(fitted)))), float(np.mean(np.abs(np.expm1(out))))


@pytest.mark.slow
@pytest.mark.skipif(
    len(tables_elsewhere()) < len(TABLES_ELSEWHERE), reason="the published tables are not here"
)
@pytest.mark.parametrize(
    ("figure", "above", "times", "more"),
    [
        ("gpus", 64, 8, 0.005),
        ("gpus", 16, 32, 0.005),
        ("sequence", 8192, 8, 0.005),
        ("parameters", 8e9, 4, 0.015),
    ],
)
def test_runs_as_far_as_the_limits_are_predicted_when_they_are_left_out(
    figure: str, above: float, times: float, more: float
) -> None:
    """So many times beyond all runs of several nodes, or all, that are fitted: little is lost."""
    cells = calibrate.fit_cells(known_cells(PAPERS), GROUPS["mpt-fsdp"])
    speeds = [cell for cell in cells if not cell.over]
    left = [cell for cell in speeds if run_figures(cell.setup)[figure] > above]
    kept = [run_figures(cell.setup)[figure] for cell in speeds if cell not in left]
    assert max(run_figures(cell.setup)[figure] for cell in left) >= 0.95 * times * max(kept)
    fitted, out = errors(cells, left)
    assert out <= fitted + more
