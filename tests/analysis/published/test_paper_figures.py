"""Figures of the papers, and `co2analysis figures`: drawn is what was published and predicted."""

import json
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from places import GOLDEN

from analysis.published.cells import Unpredicted, from_papers, unpredicted
from analysis.published.paper_figures import PaperFigure, draw, paper_figures
from analysis.published.predict import CellPrediction
from analysis.published.report import signed
from analysis.published.runs import PAPERS
from analysis.published.tables import from_csv, ratios

KEYS = ("co2", "zeropp")
QUICK = "zeropp-announcement-table-of-communication-volume"
"""The figure that takes least to predict."""
slow = pytest.mark.slow
Drawn = tuple[list[PaperFigure], list[Unpredicted]]


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    """All figures, with predictions that are invented, and what is in none."""
    cells = [*from_papers(), *(one.cell for one in unpredicted() if one.cell)]
    known = {
        cell: CellPrediction(cell, cell.published * (1.1 + 0.01 * n))
        for n, cell in enumerate(cells)
    }
    known |= {
        cell: replace(row, low=0.9 * row.predicted, high=1.2 * row.predicted)
        for cell, row in known.items()
        if not cell.source.endswith("-volume")
    }
    return paper_figures(PAPERS, predicted=known)


# --- what is drawn -------------------------------------------------------------------------------


def test_every_published_cell_is_drawn_or_named_with_its_reason(drawn: Drawn) -> None:
    """By place and value none is lost and none is twice; only unstated conditions keep one out."""
    stated = Counter((cell["where"], cell["value"]) for cell in stated_cells())
    shown, left_out = drawn
    found = Counter((row.cell.where, row.cell.published) for one in shown for row in one.rows)
    found += Counter((row.where, row.value) for one in shown for row in one.alone)
    assert found + Counter((one.where, one.published) for one in left_out) == stated
    assert {one.reason for one in left_out} == {"network and micro-batch not stated"}
    assert all("abstract" in one.where for one in left_out)


def stated_cells() -> list[dict[str, Any]]:
    """All published cells of both papers."""
    texts = ((PAPERS / key / "results.toml").read_text() for key in KEYS)
    return [cell for text in texts for cell in tomllib.loads(text)["cell"]]


# --- files ---------------------------------------------------------------------------------------


@slow
def test_tables_that_mirror_no_figure_have_figures_of_their_own() -> None:
    """Of iteration times and of FSDP's runs, in the order of the sources."""
    golden = GOLDEN
    cells = [
        cell
        for name in ("iteration-rows.csv", "fsdp-rows.csv")
        for cell in from_csv(golden / name, "check")
    ]
    cells += ratios(cells)
    made = draw([CellPrediction(cell, 1.1 * cell.published) for cell in cells], PAPERS)
    assert list(made) == ["a100-iteration-errors.png", "fsdp-errors.png", "fsdp-scaling.png"]
    assert all(content.startswith(b"\x89PNG") for content in made.values())


# --- the command ---------------------------------------------------------------------------------


@slow
def test_json_and_text_list_files_and_values(co2analysis: Command, tmp_path: Path) -> None:
    """Of each value what was published, what is ours, and whether it is a prediction."""
    asked = ("figures", "--out", str(tmp_path), "--only", QUICK, "--format", "svg")
    found = co2analysis(*asked, "--json")
    assert found.code == 0
    report = json.loads(found.out)
    (figure,) = report["figures"]
    assert figure["files"] == [str(tmp_path / f"{QUICK}.svg")]
    assert "<text" not in (tmp_path / f"{QUICK}.svg").read_text()
    cells = figure["cells"]
    assert figure["published"] == len(cells) == figure["predicted"]
    errors = [cell["error"] for cell in cells if cell["published"]]
    for cell in cells:
        assert cell["is"] == "predicted"
        if cell["published"]:
            assert cell["error"] == pytest.approx(cell["ours"] / cell["published"] - 1)
        else:
            assert (cell["ours"], cell["error"]) == (0, None)
    largest = max(errors, key=abs)
    assert figure["predicted_error_largest"] == largest
    assert (figure["fitted"], figure["fitted_error_median"]) == (0, None)
    shown = co2analysis(*asked).out
    assert all(token in shown for token in (QUICK, signed(largest), f"{len(cells)} published"))
