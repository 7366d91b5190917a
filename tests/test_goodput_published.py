"""Published mean times to failure and shares of useful time, beside predictions."""

import json
import math
from pathlib import Path

import pytest
from commands import Command

from analysis.published.goodput import Compared, Learners, compared, read
from analysis.published.papers import PAPERS
from co2sim.errors import CatalogError

DOCS = Path(__file__).parent.parent / "docs" / "decisions.md"


@pytest.fixture(scope="module")
def rows() -> list[Compared]:
    """All cells with their predictions."""
    return compared(read())


def one(rows: list[Compared], source: str, part: str) -> Compared:
    """The only cell of a source whose place has this in it."""
    (found,) = (r for r in rows if source in r.cell.source and part in r.cell.where)
    return found


def test_every_cell_says_where_it_stands_and_what_it_assumes(rows: list[Compared]) -> None:
    """An address, a place, and for shares of time what is not published."""
    for row in rows:
        assert len(row.cell.where) > 20
        assert row.cell.assumed or row.cell.quantity == "mean_time_to_failure"


def test_inputs_come_back_and_are_no_checks(rows: list[Compared]) -> None:
    """A number that was taken from a cell reproduces that cell, and proves nothing."""
    inputs = [row for row in rows if row.cell.use == "input"]
    assert len(inputs) == 2
    for row in inputs:
        assert row.predicted == pytest.approx(row.published, rel=2e-3)


def test_llama_3_is_above_its_limit(rows: list[Compared]) -> None:
    """More than 90 %: predicted with restarts of 5 minutes, not with 20."""
    row = one(rows, "Llama 3", "effective training time")
    assert row.cell.at_least
    assert row.error == 0
    assert row.low < 0.9 < row.predicted < row.high


def test_byterobust_is_missed_by_less_than_3_points(rows: list[Compared]) -> None:
    """97 % published; what is published of its parts leaves more, and not even the range has it."""
    row = one(rows, "ByteRobust", "97 %")
    assert 0.02 < row.error < 0.03
    assert row.low > row.published


def test_the_authors_own_projections_are_reproduced(rows: list[Compared]) -> None:
    """1/N: 16,384 and 131,072 GPUs within 3 %; their ETTR at 5 minutes within a point."""
    for gpus in ("16,384", "131,072"):
        assert abs(one(rows, "Kokolis", gpus).error) < 0.03
    assert abs(one(rows, "Kokolis", "every 5 minutes").error) < 0.01
    assert one(rows, "Kokolis", "2,048 to 4,096").error == 0
    assert 0 < one(rows, "Kokolis", "100,000").error < 0.05


def test_what_was_measured_at_1024_gpus_is_missed_by_a_factor_of_4(rows: list[Compared]) -> None:
    """And at 8 GPUs by 3: a rate of the job whatever its size explains the one, not both.

    The rate that is missing at 1,024 GPUs would stop a job of 8 GPUs every 11 h; it ran 47.7 days.
    """
    large, small = one(rows, "Kokolis", "1,024"), one(rows, "Kokolis", "jobs of 8 GPUs")
    assert 2.5 < large.error < 2.8
    assert 2.0 < small.error < 2.4
    missing = 1 / (1 / large.published - 1 / large.predicted)
    assert missing == pytest.approx(10.9 * 3600, rel=0.01)
    assert missing < small.published / 100


def test_several_learners_are_predicted_from_one(rows: list[Compared]) -> None:
    """2 to 16 learners: within 3 points but for the hardest cells, within 7 in all."""
    cells = [r for r in rows if isinstance(r.cell, Learners) and r.cell.workers > 1]
    assert len(cells) == 20
    errors = {(r.cell.workers, r.cell.gpus): r.error for r in cells if isinstance(r.cell, Learners)}
    assert max(map(abs, errors.values())) < 0.07
    far = {place for place, error in errors.items() if abs(error) > 0.03}
    assert far == {(2, 1_200_000), (2, 2_400_000), (4, 2_400_000)}
    assert abs(errors[8, 1_200_000]) < 0.01
    assert abs(errors[16, 1_200_000]) < 0.015


def test_elastic_data_parallel_is_not_predicted(rows: list[Compared]) -> None:
    """With failures every few seconds it goes on with fewer chips; here all begin anew."""
    (row,) = (
        r
        for r in rows
        if isinstance(r.cell, Learners) and (r.cell.workers, r.cell.gpus) == (1, 1_200_000)
    )
    assert row.error == pytest.approx(-0.22, abs=0.01)


def test_the_pause_of_a_learner_is_worked_out_by_hand(rows: list[Compared]) -> None:
    """exp(-rate pause) = 0.88 at 150,000 chips that fail once a year: 27 s."""
    pause = -math.log(0.88) * 365.25 * 86400 / 150_000
    assert pause == pytest.approx(26.9, abs=0.05)
    row = one(rows, "Decoupled", "8 learners, 1,200,000")
    assert row.predicted == pytest.approx(1 / (1 - math.log(0.88)), rel=1e-4)


@pytest.mark.nightly
def test_the_page_has_these_figures(rows: list[Compared]) -> None:
    """Published, predicted and error of every check that is no learner, and of some that are."""
    page = DOCS.read_text()
    shown = [r for r in rows if r.cell.use == "check" and not isinstance(r.cell, Learners)]
    shown += [r for r in rows if isinstance(r.cell, Learners) and r.cell.gpus == 1_200_000]
    assert len(shown) == 14
    for row in shown:
        limit = "above " if row.cell.at_least else ""
        cells = (limit + row.shown(row.published), row.shown(row.predicted))
        error = f"{100 * row.error:+.1f}"
        assert f"| {cells[0]} | {cells[1]} | {error} |" in page, (cells, error)


def test_the_command_prints_all_cells(co2analysis: Command, rows: list[Compared]) -> None:
    """As a table, with what is assumed, and as JSON."""
    text = " ".join(co2analysis("goodput").out.split())
    assert "nothing is fitted" in text
    assert "input" in text
    assert "assumed of" in text
    found = json.loads(co2analysis("goodput", "--json").out)
    assert [cell["predicted"] for cell in found] == [row.predicted for row in rows]


@pytest.mark.parametrize(
    ("old", "new", "token"),
    [
        ('use = "check"', 'use = "maybe"', "use"),
        ("gpus = 1024\n", "gpus = 0\n", "gpus"),
        ('value = "7.9 h"', 'value = "7.9"', "unit"),
        ("[[cell]]", "[[cell", "goodput.toml"),
        ('use = "input"\ngpus', 'use = "check"\ngpus', "input"),
    ],
)
def test_a_bad_cell_is_one_line(tmp_path: Path, old: str, new: str, token: str) -> None:
    """With the name of the file."""
    text = (PAPERS / "goodput.toml").read_text()
    assert old in text
    (tmp_path / "goodput.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(CatalogError, match=r"goodput\.toml") as error:
        _ = compared(read(tmp_path))
    assert token in str(error.value)
    assert "\n" not in str(error.value)
