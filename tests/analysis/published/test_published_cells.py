"""Published results: what every cell of `papers/` must say."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from places import GOLDEN, ROOT

from analysis.published.cells import from_papers
from analysis.published.tables import known_cells
from co2sim.catalog import names
from co2sim.common.errors import CatalogError, Co2simError
from co2sim.prediction.published import read_cells, read_speeds

PAPERS = sorted(path.parent for path in (ROOT / "papers").glob("*/*.toml"))
FOLDERS = sorted(set(PAPERS))


def cells(folder: Path) -> list[dict[str, Any]]:
    """The published results of a paper."""
    path = folder / "results.toml"
    if not path.exists():  # a table that is only referred to
        paper = tomllib.loads((folder / "paper.toml").read_text())
        assert paper.get("data", paper.get("runs", {}))["file"]
        return []
    found: list[dict[str, Any]] = tomllib.loads(path.read_text())["cell"]
    return found


def test_a_paper_says_what_it_is() -> None:
    """Key, title, authors, year, where to find it, and the settings of its experiments."""
    for folder in FOLDERS:
        paper = tomllib.loads((folder / "paper.toml").read_text())
        assert paper["key"] == folder.name
        assert {"title", "authors", "year", "url", "settings"} <= paper.keys()
        assert paper["settings"]["source"]
        for cluster in paper["settings"].get("clusters", []):
            assert cluster in names("clusters")


def test_a_published_result_says_where_what_how_much_and_what_for() -> None:
    """Every cell has where, quantity, unit, value and use; errors are positive."""
    for folder in FOLDERS:
        for cell in cells(folder):
            assert {"where", "quantity", "unit", "value", "use"} <= cell.keys(), cell
            assert len(cell["where"]) > 10
            assert isinstance(cell["value"], int | float)
            assert not isinstance(cell["value"], bool)
            assert cell["use"] in {"fit", "check"}, cell
            assert all(cell.get(name, 1) > 0 for name in ("rounding", "spread", "gpus")), cell


# --- the reader ----------------------------------------------------------------------------------

CELL = """[[cell]]
where = "a table of the test"
quantity = "tokens_per_s"
value = 100
cluster = "a100-tcp80"
model = "transnormer-7b"
strategy = "zero2"
gpus = 8
use = "check"
"""


def test_speeds_of_strategies_that_are_not_ours_are_left_out(tmp_path: Path) -> None:
    """They have no prediction."""
    path = tmp_path / "results.toml"
    path.write_text(CELL + CELL.replace("zero2", "pipeline"))
    assert [cell.strategy for cell in read_speeds(path)] == ["zero2"]
    assert len(read_cells(path)) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cell = 3", "[[cell]]"),
        ("cell = [3]", "cell 1: 3"),
        ("[[cell", "no published cells"),
        (CELL.replace('"tokens_per_s"', '"speed"'), "quantity is 'speed'"),
        (CELL.replace("quantity", "quality"), "quantity is missing"),
        (CELL.replace("gpus", "gpu"), "gpus is missing"),
        (CELL + "over = { gpu = 8 }", "'gpu'"),
        (CELL + "gpu = 8", "'gpus'"),
        (CELL + CELL.replace("= 8", "= 0"), "cell 2: gpus is 0"),
        (CELL.replace("= 8", "= 8.5"), "gpus is 8.5"),
        (CELL.replace("= 8", '= "8"'), "gpus is '8'"),
        (CELL.replace("100", "0"), "value is 0"),
        (CELL.replace("100", "inf"), "value is inf"),
        (CELL.replace("check", "train"), "'fit' or 'check'"),
        (CELL + "rounding = -1", "rounding is -1"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """In one line: the file, the cell, the name, what is given and what is allowed."""
    path = tmp_path / "results.toml"
    path.write_text(text)
    with pytest.raises(CatalogError) as caught:
        read_cells(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(path))


# --- the papers ----------------------------------------------------------------------------------


def paper(tmp_path: Path, change: tuple[str, str]) -> Path:
    """A folder of papers with that of CO2 alone, and something changed in its `paper.toml`."""
    folder = next(folder for folder in FOLDERS if folder.name == "co2")
    (tmp_path / "co2").mkdir()
    for name in ("paper.toml", "results.toml"):
        (tmp_path / "co2" / name).write_text((folder / name).read_text().replace(*change))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[simulation]", "[simulation"), "co2/paper.toml"),
        (("tokens_per_gpu = 2048", ""), "'tokens_per_gpu'"),
        (("[simulation]", "[settings2]"), "--papers"),
    ],
)
def test_a_paper_that_cannot_be_simulated_is_refused(
    tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    """In one line, that names the file, or the option that names the folder."""
    with pytest.raises(Co2simError) as caught:
        from_papers(paper(tmp_path, change))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tables_of_papers_that_a_folder_does_not_hold_are_left_out(tmp_path: Path) -> None:
    """Found by themselves, they are not read; given with --data, they are refused."""
    folder = paper(tmp_path, ("", ""))
    assert {cell.source for cell in known_cells(folder)} == {"co2"}
    table = GOLDEN / "iteration-rows.csv"
    with pytest.raises(CatalogError, match="vtrain"):
        known_cells(folder, table)
