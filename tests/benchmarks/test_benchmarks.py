"""Scripts of benchmarks/: each answers --help and has a quick run that leaves results alone."""

import argparse
import importlib
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from commands import in_process
from places import ROOT

from realrun.errors import LabError
from realrun.lab.lab import check_machine

FOLDER = ROOT / "benchmarks"
DASK = bool(find_spec("distributed") and find_spec("pyarrow"))
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
TORCHFT = find_spec("torchft") is not None
BROWSER = CHROMIUM and find_spec("playwright")
SCRIPTS: dict[str, list[pytest.MarkDecorator]] = {
    "bound_ranking.py": [pytest.mark.dist],
    "buyer_questions.py": [],
    "chaos.py": [pytest.mark.dist],
    "checkpoints.py": [],
    "convergence.py": [pytest.mark.dist],
    "engines.py": [pytest.mark.skipif(not DASK, reason="the extra `dask` is not installed")],
    "explore.py": [pytest.mark.skipif(not BROWSER, reason="no Chromium, or no playwright")],
    "fidelity.py": [pytest.mark.lab],
    "formulas.py": [],
    "hpz_group.py": [],
    "leaves.py": [pytest.mark.lab],
    "long_study.py": [pytest.mark.dist],
    "memory_oracle.py": [],
    "memory_questions.py": [],
    "overhead.py": [],
    "own_module.py": [pytest.mark.dist],
    "plan_search.py": [],
    "products.py": [],
    "quantization.py": [],
    "required_bandwidth.py": [],
    "speed.py": [],
    "ssp.py": [pytest.mark.dist],
    "tasks.py": [pytest.mark.lab],
    "time_to_loss.py": [pytest.mark.lab],
    "torchft_kills.py": [
        pytest.mark.dist,
        pytest.mark.skipif(not TORCHFT, reason="the extra `torchft` is not installed"),
    ],
}
ARGUMENTS = {"fidelity.py": ["sleep"]}
CELLS = {"time_to_loss.py": {"torch post-local SGD", "CO2, delay auto"}}
"""In the table. A method that fails is not in it, or has more words behind its name."""


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of scripts can be imported from."""
    monkeypatch.syspath_prepend(str(FOLDER))


def results() -> dict[Path, int]:
    """The files of results, with their times."""
    return {path: path.stat().st_mtime_ns for path in (FOLDER / "results").iterdir()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch, importing
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_imports_and_answers_help(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the quick run."""
    if script == "explore.py":
        pytest.importorskip("playwright")
    main = importlib.import_module(script.removesuffix(".py")).main
    ended = in_process(script, main, monkeypatch, capsys)("--help")
    assert ended.code == 0
    assert "--quick" in ended.out


@pytest.mark.nightly
@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=marks, id=name) for name, marks in SCRIPTS.items()]
)
def test_every_script_has_a_quick_run(
    script: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It prints a table, and what made it; the results of long runs stay as they are."""
    if request.node.get_closest_marker("lab"):
        try:
            check_machine()
        except LabError as error:
            pytest.skip(str(error))
    before = results()
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *ARGUMENTS.get(script, []), "--quick"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("|:--") for line in lines), done.stdout
    assert any(line.startswith(f"Made by `python benchmarks/{script} ") for line in lines)
    assert CELLS.get(script, set()) <= {cell.strip() for line in lines for cell in line.split("|")}
    assert results() == before
    assert not list(tmp_path.iterdir())


def test_no_script_is_forgotten() -> None:
    """Whatever can be started is in the table above, and make knows it."""
    started = {path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    assert started == SCRIPTS.keys()
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in started if f"benchmarks/{name}" not in makefile] == []


def test_tables_say_what_made_them() -> None:
    """Every result in Markdown ends with its command and a commit."""
    for path in (FOLDER / "results").glob("*.md"):
        last = path.read_text().rstrip().splitlines()[-1]
        assert last.startswith("Made by `"), path
        assert " commit " in last, path


def test_without_out_a_long_run_goes_to_the_results_and_a_quick_one_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And --out goes where it says."""
    reports: Any = importlib.import_module("reports")
    monkeypatch.setattr(reports, "RESULTS", tmp_path / "results")
    command: argparse.ArgumentParser = reports.parser("A benchmark.\n\nMore.", "short")

    def place(*arguments: str) -> Path:
        with reports.folder(command.parse_args(arguments)) as out:
            return Path(out)

    assert place() == tmp_path / "results"
    assert place("--quick", "--out", str(tmp_path / "b")) == tmp_path / "b"
    assert not place("--quick").exists()


# --- how fast it is ---------------------------------------------------------------------------


SECONDS = {"ms": 1e-3, "s": 1.0}
SLOWER = 3.0
MACHINE = "sum of 10 million numbers, to compare machines"


def medians(markdown: str) -> dict[str, float]:
    """Seconds by what was measured, without what is in parentheses, of the first table."""
    markdown = re.sub(" +", " ", markdown)
    rows = re.findall(r"^\| (.+?)(?: \(.*?\))? \| ([\d.]+) (ms|s) \|", markdown, re.MULTILINE)
    return {what: float(value) * SECONDS[unit] for what, value, unit in rows}


@pytest.mark.nightly
def test_no_row_is_three_times_slower_than_the_page_says() -> None:
    """Each beside a loop of Python, which says how fast the machine is."""
    page = (ROOT / "docs" / "performance.md").read_text("utf-8").partition("\n## ")[0]
    script = [sys.executable, "benchmarks/speed.py"]
    printed = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    stated, measured = medians(page), medians(printed)
    assert stated.keys() == measured.keys()
    machine = max(1.0, measured[MACHINE] / stated[MACHINE])
    slow = {
        what: (seconds, stated[what])
        for what, seconds in measured.items()
        if seconds > SLOWER * machine * stated[what]
    }
    assert not slow
