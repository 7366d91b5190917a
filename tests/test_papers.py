"""Published results: what every cell of `papers/` must say."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from co2sim import strategies
from co2sim.catalog import load_cluster, load_model, names

PAPERS = sorted(path.parent for path in (Path(__file__).parent.parent / "papers").glob("*/*.toml"))
FOLDERS = sorted(set(PAPERS))


def cells(folder: Path) -> list[dict[str, Any]]:
    """The published results of a paper."""
    path = folder / "results.toml"
    if not path.exists():  # a table that is only referred to
        assert tomllib.loads((folder / "paper.toml").read_text())["data"]["file"]
        return []
    found: list[dict[str, Any]] = tomllib.loads(path.read_text())["cell"]
    return found


def test_there_are_papers() -> None:
    """CO2 and ZeRO++ are there."""
    assert {"co2", "zeropp"} <= {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_paper_says_what_it_is(folder: Path) -> None:
    """Key, title, authors, year, where to find it, and the settings of its experiments."""
    paper = tomllib.loads((folder / "paper.toml").read_text())
    assert paper["key"] == folder.name
    assert {"title", "authors", "year", "url", "settings"} <= paper.keys()
    assert paper["settings"]["source"]
    for cluster in paper["settings"].get("clusters", []):
        assert cluster in names("clusters")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_published_result_says_where_what_how_much_and_what_for(folder: Path) -> None:
    """Every cell has where, quantity, unit, value and use; errors are positive."""
    for cell in cells(folder):
        assert {"where", "quantity", "unit", "value", "use"} <= cell.keys(), cell
        assert len(cell["where"]) > 10
        assert isinstance(cell["value"], int | float)
        assert not isinstance(cell["value"], bool)
        assert cell["use"] in {"fit", "check"}, cell
        assert all(cell.get(name, 1) > 0 for name in ("rounding", "spread", "gpus")), cell


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_published_result_names_what_the_simulator_knows(folder: Path) -> None:
    """What was run on a cluster can be simulated: names load, and the GPUs fill full nodes."""
    for cell in (cell for cell in cells(folder) if "cluster" in cell):
        if "strategy" in cell:
            strategies.parse(cell["strategy"])
        if "model" in cell:
            load_model(cell["model"])
        cluster = load_cluster(cell["cluster"]).value
        for key in ("gpus", "from_gpus", "to_gpus"):
            if key in cell:
                assert cluster.resized(cell[key]).layout.world_size == cell[key]


def test_the_published_ratio_follows_from_the_published_throughputs() -> None:
    """CO2, table 3: zero2 from 16 to 128 GPUs keeps 0.82, by its own numbers."""
    folder = next(folder for folder in FOLDERS if folder.name == "co2")
    zero2 = [cell for cell in cells(folder) if cell.get("strategy") == "zero2"]
    speed = {
        (cell["cluster"], cell["gpus"]): cell["value"]
        for cell in zero2
        if cell["quantity"] == "tokens_per_s"
    }
    ratios = [
        cell
        for cell in zero2
        if cell["quantity"] == "scalability_ratio"
        and {(cell["cluster"], cell["from_gpus"]), (cell["cluster"], cell["to_gpus"])} <= set(speed)
    ]
    assert ratios
    for cell in ratios:
        a, b = cell["from_gpus"], cell["to_gpus"]
        found = (speed[cell["cluster"], b] / b) / (speed[cell["cluster"], a] / a)
        assert found == pytest.approx(cell["value"], abs=cell["rounding"])
