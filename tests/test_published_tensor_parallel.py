"""Published runs of tensor and pipeline parallelism, predicted with constants of runs without."""

import re
from pathlib import Path
from statistics import fmean, median

import pytest

from analysis.published.cells import Cell, run_kind
from analysis.published.paper_cells import from_papers
from analysis.published.predict import memory_of, predict

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    """The cells of both sources."""
    return [cell for cell in from_papers() if cell.source in {"vtrain_nodes", "megatron_sp"}]


def test_none_of_them_was_fitted_or_enters_an_interval(cells: list[Cell]) -> None:
    """They are checks: of no group of constants, and of no kind of runs."""
    assert len(cells) == 102
    assert {(cell.use, cell.group) for cell in cells} == {("check", "")}
    assert {run_kind(cell.setup) for cell in cells} == {None}
    assert min(cell.setup.tp * cell.setup.pp for cell in cells) == 2


def test_they_are_predicted_but_for_jumps_of_the_published_times(cells: list[Cell]) -> None:
    """Within 11 %, half of them within 3 %; three are slower than predicted, and are named."""
    shared = [cell for cell in cells if cell.setup.pp == 1]
    assert len(shared) == 21
    errors = {cell.name: predict(cell) / cell.published - 1 for cell in shared}
    beyond = {name: error for name, error in errors.items() if abs(error) > 0.11}
    assert beyond == {
        "3.6B, 64 GPUs, tp 4, micro-batch 2": pytest.approx(-0.180, abs=0.001),
        "3.6B, 64 GPUs, tp 8, micro-batch 2": pytest.approx(-0.211, abs=0.001),
        "3.6B, 64 GPUs, tp 8, micro-batch 64": pytest.approx(-0.453, abs=0.001),
    }
    assert median(map(abs, errors.values())) < 0.03


@pytest.mark.slow
def test_pipelines_are_predicted_within_a_tenth_on_average(cells: list[Cell]) -> None:
    """81 runs on 64 to 512 GPUs: signed errors, their mean, and how they grow with the stages."""
    errors: dict[int, list[float]] = {}
    for cell in cells:
        if cell.setup.pp > 1:
            errors.setdefault(cell.setup.pp, []).append(predict(cell) / cell.published - 1)
    every = [error for some in errors.values() for error in some]
    assert len(every) == 81
    assert fmean(map(abs, every)) < 0.1
    assert max(map(abs, every)) < 0.33
    biases = {stages: fmean(some) for stages, some in errors.items()}
    assert biases[2] < biases[32]  # the last stage, with the head, is predicted too slow


def test_all_of_them_fit_in_memory(cells: list[Cell]) -> None:
    """They ran. So they were recomputed: most would not fit without, as the paper's file says."""
    assert all(memory_of(cell.setup).share <= 1 for cell in cells[::5])


def test_the_pages_show_the_errors_of_today(cells: list[Cell]) -> None:
    """Every error of the table is that of a cell; its least and largest are shown."""
    text = (ROOT / "docs" / "validation.md").read_text().partition("### Tensor parallelism")[2]
    rows = [line for line in text.partition("\n###")[0].splitlines() if line.endswith(" % |")]
    shown = {float(number) for row in rows for number in re.findall(r"([+-][\d.]+)", row)}
    shared = [cell for cell in cells if cell.setup.pp == 1]
    found = {round(100 * (predict(cell) / cell.published - 1), 1) for cell in shared}
    assert shown <= found
    assert {min(found), max(found)} <= shown


@pytest.mark.slow
def test_the_table_of_pipelines_is_that_of_today(cells: list[Cell]) -> None:
    """By number of stages: runs, mean absolute error, bias, least and largest error."""
    text = (ROOT / "docs" / "validation.md").read_text().partition("### Pipelines")[2]
    rows = [line for line in text.partition("\n###")[0].splitlines() if line.endswith(" % |")]
    expected = []
    for stages in sorted({cell.setup.pp for cell in cells} - {1}):
        some = [cell for cell in cells if cell.setup.pp == stages]
        errors = [100 * (predict(cell) / cell.published - 1) for cell in some]
        figures = (f"{fmean(map(abs, errors)):.1f} %", f"{fmean(errors):+.1f} %")
        ends = f"{min(errors):+.1f} to {max(errors):+.1f} %"
        expected.append(" | ".join([str(stages), str(len(some)), *figures, ends]))
    assert [row.strip("| ") for row in rows] == expected
