"""Every script of benchmarks/ runs and leaves results alone; none of them imports in a cycle."""

import argparse
import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from realrun.errors import LabError
from realrun.launch.lab import check_machine

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
SCRIPTS = {
    "convergence.py": [pytest.mark.dist],
    "failures.py": [pytest.mark.dist],
    "fidelity.py": [pytest.mark.lab],
    "overhead.py": [],
    "peers.py": [pytest.mark.lab],
    "speed.py": [],
    "step_factors.py": [],
    "time_to_loss.py": [pytest.mark.lab],
}
ARGUMENTS = {"fidelity.py": ["sleep"]}

pytestmark = pytest.mark.slow  # every script runs for seconds


def results() -> dict[str, tuple[int, int]]:
    """The files of results, with their sizes and times."""
    files = (FOLDER / "results").iterdir()
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


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
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("|:--") for line in lines), done.stdout
    assert any(line.startswith(f"Made by `python benchmarks/{script} ") for line in lines)
    assert results() == before
    assert not list(tmp_path.iterdir())


def test_no_script_is_forgotten() -> None:
    """Whatever can be started is in the table above, and make knows it."""
    started = {path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    assert started == SCRIPTS.keys()
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in started if f"benchmarks/{name}" not in makefile] == []


def imports(path: Path) -> set[str]:
    """Other modules of its folder that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name for name in names if (path.parent / f"{name}.py").exists()}


def test_benchmarks_import_no_cycle(tmp_path: Path) -> None:
    """Also inside of functions; a cycle of two files would be seen."""
    graph = {path.stem: imports(path) for path in FOLDER.glob("*.py")}
    assert "reports" in list(TopologicalSorter(graph).static_order())
    (tmp_path / "a.py").write_text("def f():\n    from b import g\n")
    (tmp_path / "b.py").write_text("import a\n")
    cyclic = {path.stem: imports(path) for path in tmp_path.glob("*.py")}
    with pytest.raises(ValueError, match="cycle"):
        list(TopologicalSorter(cyclic).static_order())


def test_tables_say_what_made_them() -> None:
    """Every result in Markdown ends with its command and a commit."""
    for path in (FOLDER / "results").glob("*.md"):
        last = path.read_text().rstrip().splitlines()[-1]
        assert last.startswith("Made by `"), path
        assert " commit " in last, path


def test_the_speed_table_says_which_targets_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median decides, and of several targets each; a target is written as it is checked."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import speed  # type: ignore[import-not-found]  # noqa: PLC0415 - a folder of scripts

    times = [0.009, 0.010, 5.0]
    assert speed.limited("x", times, 10, "ms").cells == {
        "what": "x",
        "median": "10.0 ms",
        "range": "9.0 - 5000.0",
        "target": "<= 10 ms",
        "met": "yes",
    }
    assert speed.limited("x", times, 9.9, "ms").cells["met"] == "no"
    ratios = {ratio: speed.Target(ratio, 1.2, "x", least=0.8) for ratio in (0.79, 0.8, 1.2, 1.21)}
    assert [target.met for target in ratios.values()] == [False, True, True, False]
    two = [speed.within(times, 10, "s"), speed.Target(2.5, 2, "GiB")]
    cells = speed.SpeedLine("x", times, "s", two).cells
    assert (cells["target"], cells["met"]) == ("<= 10 s, <= 2 GiB", "no")


def test_without_out_a_long_run_goes_to_the_results_and_a_quick_one_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And --out goes where it says, in both cases."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import reports  # type: ignore[import-not-found]  # noqa: PLC0415 - a folder of scripts

    monkeypatch.setattr(reports, "RESULTS", tmp_path / "results")
    command: argparse.ArgumentParser = reports.parser("A benchmark.\n\nMore.", "short")

    def place(*arguments: str) -> Path:
        with reports.folder(command.parse_args(arguments)) as out:
            assert out.is_dir()
            found: Path = out
        return found

    assert place() == tmp_path / "results"
    assert place("--out", str(tmp_path / "a")) == tmp_path / "a"
    assert place("--quick", "--out", str(tmp_path / "b")) == tmp_path / "b"
    quick = place("--quick")
    assert quick.parent != tmp_path
    assert not quick.exists()
