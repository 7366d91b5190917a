"""The command `co2analysis figures`: what it writes, says and refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command

from analysis.published.papers import PAPERS

QUICK = "zeropp-announcement-table-of-communication-volume"
"""The figure that takes least to predict."""

EVERY_CELL = re.compile(r'where = "(.+)"')


@pytest.mark.slow
def test_it_writes_every_figure_in_every_format_and_says_what_it_mirrors(
    co2analysis: Command, tmp_path: Path
) -> None:
    """A line for what each mirrors, one with counts and errors, one per file; then what is left."""
    found = co2analysis("figures", "--out", str(tmp_path / "f"))
    assert found.code == 0
    blocks = re.split(r"^(?=\S+: mirrors )", found.out, flags=re.MULTILINE)[1:]
    written = re.findall(r"written (.+)", found.out)
    assert sorted(written) == sorted(str(path) for path in (tmp_path / "f").iterdir())
    assert len(written) == 3 * len(blocks)
    counts = [int(number) for number in re.findall(r"^  (\d+) published", found.out, re.MULTILINE)]
    assert len(counts) == len(blocks)
    for block in blocks:
        place = block.partition("mirrors ")[2].partition("\n")[0]
        assert f'where = "{place}' in results()
        assert "not predicted" in block or re.search(r"median [+-]?\d+\.\d%, largest", block)
    stated = len(EVERY_CELL.findall(results()))
    assert f"{sum(counts)} of {stated} published numbers are drawn" in found.out
    assert found.out.count("not drawn: ") == stated - sum(counts) > 0


def results() -> str:
    """All published cells of the two papers, as text."""
    return "".join((PAPERS / key / "results.toml").read_text() for key in ("co2", "zeropp"))


@pytest.mark.slow
def test_json_lists_files_and_values(co2analysis: Command, tmp_path: Path) -> None:
    """Of each value what was published, what is ours, and whether it is a prediction."""
    asked = ("figures", "--out", str(tmp_path), "--only", QUICK, "--format", "svg", "--json")
    found = co2analysis(*asked)
    assert found.code == 0
    report = json.loads(found.out)
    (figure,) = report["figures"]
    assert [Path(name).name for name in figure["files"]] == [f"{QUICK}.svg"]
    assert all(Path(name).is_file() for name in figure["files"])
    cells = figure["cells"]
    assert figure["published"] == len(cells) == figure["predicted"]
    errors = [cell["error"] for cell in cells if cell["published"]]
    for cell in cells:
        assert cell["is"] == "predicted"
        if cell["published"]:
            assert cell["error"] == pytest.approx(cell["ours"] / cell["published"] - 1)
        else:
            assert (cell["ours"], cell["error"]) == (0, None)
    assert figure["predicted_error_largest"] == max(errors, key=abs)
    assert figure["fitted"] == 0
    assert figure["fitted_error_median"] is None


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    """No date, no random name: whatever the seed of hashes, the clock and the user's settings."""
    style = tmp_path / "matplotlibrc"
    style.write_text("font.size: 30\npdf.fonttype: 3\nsvg.fonttype: none\n")
    settings = (
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "2", "MATPLOTLIBRC": str(style), "TZ": "Asia/Tokyo"},
    )
    runs = []
    for number, setting in enumerate(settings):
        out = tmp_path / str(number)
        asked = [sys.executable, "-m", "analysis", "figures", "--out", str(out), "--only", QUICK]
        environment = os.environ | setting
        subprocess.run(asked, check=True, capture_output=True, env=environment)
        runs.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert runs[0] == runs[1]
    assert {name.rpartition(".")[2] for name in runs[0]} == {"pdf", "svg", "png"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--format", "tiff"], "--format: 'tiff' is no kind of file; known: pdf, png, svg"),
        (["--format", "pdf,pgn"], "--format: 'pgn' is no kind of file; did you mean 'png'?"),
        (["--format", ""], "--format: '' is no kind of file"),
        (["--only", "co2-table-4"], "there is no such figure; did you mean 'co2-table-3'?"),
        (["--only", "x"], "--only x: there is no such figure; known: co2-ablation"),
        (["--papers", "nowhere"], "nowhere holds no papers"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(
    options: list[str], words: str, co2analysis: Command, tmp_path: Path
) -> None:
    """Before anything is simulated."""
    found = co2analysis("figures", "--out", str(tmp_path / "f"), *options)
    assert found.code == 2
    assert words in found.err
    assert found.err.count("\n") == 1
    assert not found.out
    assert not (tmp_path / "f").exists()


def test_a_folder_is_needed_that_can_be_written(co2analysis: Command, tmp_path: Path) -> None:
    """It is asked for, and a file in its place is refused before the work begins."""
    assert "--out" in co2analysis("figures").err
    place = tmp_path / "f"
    place.write_text("mine")
    found = co2analysis("figures", "--out", str(place), "--only", QUICK)
    assert found.code == 2
    assert found.err.count("\n") == 1
    assert place.read_text() == "mine"


def test_a_folder_without_their_cells_is_refused(co2analysis: Command, tmp_path: Path) -> None:
    """A source of other places has no figure of these."""
    for name in ("paper.toml", "results.toml"):
        text = (PAPERS / "co2" / name).read_text().replace("CO2, ICLR 2024", "Another paper")
        (tmp_path / "p" / "co2").mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / "co2" / name).write_text(text)
    out = tmp_path / "f"
    found = co2analysis("figures", "--out", str(out), "--papers", str(tmp_path / "p"))
    assert found.code == 2
    assert "holds no published cell of a figure that is drawn" in found.err
    assert not out.exists()
