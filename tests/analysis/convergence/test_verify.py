"""`co2analysis verify --quick` as a process: it holds, and is the same elsewhere."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from places import ROOT
from same_bytes import Place

from analysis.convergence.protocol import checks, store

pytestmark = pytest.mark.nightly  # every cell is measured

_ARGUMENTS = "--out v --quick --jobs {jobs} --report elsewhere/v.html --json"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the command prints and writes, as JSON and with a report besides."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "work").mkdir()
    place = Place(folder, {"PYTHONPATH": str(ROOT)}, {"jobs": "1"}, str(folder / "cache"))
    return place.run("co2analysis verify", _ARGUMENTS)


@pytest.fixture(scope="module")
def folder(here: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that protocol."""
    place = tmp_path_factory.mktemp("verify")
    fill(place, here)
    return place / "v"


def fill(place: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder."""
    for name, content in files.items():
        if name != "stdout":
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)


def test_kept_cells_are_judged_as_when_they_were_measured(folder: Path) -> None:
    """Everything holds; all cells are found again, and say the same to the last bit."""
    seen: list[tuple[int, int]] = []
    kept = store.measure(
        folder / "cells",
        quick=True,
        jobs=1,
        progress=lambda done, whole: seen.append((done, whole)),
    )
    assert seen == [(len(kept), len(kept))]
    found = checks.judge(kept, quick=True)
    assert found.passed
    assert found.grid.by_family.keys() >= {"logistic", "logistic by label"}
    written = json.loads((folder / "results.json").read_bytes(), parse_constant=pytest.fail)
    assert json.loads(json.dumps(found.to_dict())) == written


def test_cells_and_report_are_the_same_elsewhere(here: dict[str, bytes], tmp_path: Path) -> None:
    """With another hash seed, time zone, engine, home and folder, and with more processes.

    One cell in eight is measured there; the others are already there.
    """
    around = os.pathsep.join([str(ROOT / "tests" / "helpers" / "elsewhere"), str(ROOT)])
    away = {"PYTHONHASHSEED": "2", "TZ": "Etc/GMT-14", "LC_ALL": "C.UTF-8", "PYTHONPATH": around}
    there = Place(tmp_path / "far", away, {"jobs": "2"}, str(tmp_path / "cache"), columns="61")
    cells = [name for name in here if name.startswith("v/cells/")]
    fill(there.work, {name: here[name] for at, name in enumerate(cells) if at % 8})
    other = there.run("co2analysis verify", _ARGUMENTS)
    assert list(here) == list(other)
    assert [name for name in here if here[name] != other[name]] == []
