"""Published mean times to failure and shares of useful time, beside predictions."""

import json

import pytest
from commands import Command

from analysis.published.goodput import Compared, Learners, compared, read


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


@pytest.mark.parametrize(
    ("source", "part", "low", "high"),
    [
        ("Llama 3", "effective training time", -0.02, 0.0),  # restarts are not published
        ("ByteRobust", "97 %", 0.02, 0.03),  # not even its range has it
        ("Kokolis", "every 5 minutes", -0.01, 0.01),
        ("Kokolis", "2,048 to 4,096", -0.06, 0.0),  # 7.9 h for 1,024 GPUs is too often for these
        ("Kokolis", "100,000", 0.0, 0.05),
    ],
)
def test_published_cells_are_predicted_with_these_errors(
    rows: list[Compared], source: str, part: str, low: float, high: float
) -> None:
    """Shares in points, times relative; what is a limit has no error beyond it."""
    row = one(rows, source, part)
    assert low <= row.error <= high
    assert row.low <= row.predicted <= row.high
    assert row.cell.at_least is (high == 0)


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


def test_the_command_prints_all_cells(co2analysis: Command, rows: list[Compared]) -> None:
    """As a table, with what is assumed, and as JSON."""
    text = " ".join(co2analysis("goodput").out.split())
    assert "nothing is fitted" in text
    assert "input" in text
    assert "assumed of" in text
    found = json.loads(co2analysis("goodput", "--json").out)
    assert [cell["predicted"] for cell in found] == [row.predicted for row in rows]
