"""The README and the pages of docs/ tell the truth: what they show runs, what they link exists."""

import doctest
import importlib
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from pages import (
    COMMANDS,
    ESTIMATES,
    IN_A_LAB,
    ON_CORES,
    PAGES,
    QUICK,
    ROOT,
    STUDIES,
    STUDY,
    TRAINING,
    anchors,
    blocks,
    links,
)

from co2sim import experiments, study, units
from co2sim.published_cells import SpeedCell
from co2sim.published_speeds import read_speeds

EXAMPLES = [
    (page, number)
    for page in PAGES
    for number, block in enumerate(blocks(page))
    if block.kind == "python" and not block.title
]
SCRIPTS = [(page, block.text) for page in PAGES for block in blocks(page) if block.kind == "sh"]


def test_every_command_is_executed_by_one_of_the_tests() -> None:
    """No command of a page is of a kind that is run neither here nor in test_docs_real."""
    assert QUICK
    run = [*QUICK, *IN_A_LAB, *TRAINING, *ESTIMATES, *ON_CORES, *STUDIES]
    assert sorted(run) == sorted(COMMANDS)


@pytest.mark.parametrize(("page", "number"), EXAMPLES, ids=[f"{p.stem}-{n}" for p, n in EXAMPLES])
def test_python_examples_run(
    page: Path,
    number: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Every Python block of a page runs by itself, and prints something."""
    text = blocks(page)[number].text
    if "realrun" in text:
        pytest.importorskip("torch")
    if ".plot(" in text:
        pytest.importorskip("altair")
        monkeypatch.chdir(tmp_path)
    exec(text, {})  # noqa: S102 - our own pages
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", QUICK)
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that only computes ends with exit code 0."""
    for folder in ("examples", "papers"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    package = {"co2sim": "co2sim.cli", "co2analysis": "analysis.cli"}[shlex.split(command)[0]]
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(package).main()
    assert not ended.value.code


@pytest.mark.slow
def test_the_study_prints_what_its_page_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notebook runs, and its output is the one on the page, to the last digit."""
    (command,) = STUDIES
    monkeypatch.chdir(ROOT)
    runpy.run_path(command.split()[1])
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    (shown,) = (block.text for block in blocks(STUDY) if block.title)
    assert printed == shown.splitlines()


# --- the first page -----------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    """Nobody reads more than 120 lines before trying."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.fixture(scope="module")
def cells() -> list[tuple[SpeedCell, float]]:
    """The published cells of CO2, each as published and as simulated, with their prediction."""
    found = []
    for cell in read_speeds(ROOT / "papers/co2/results.toml"):
        speeds = [
            study.simulate(cell.cluster, cell.model, cell.strategy, gpus=gpus).tokens_per_s_per_gpu
            for gpus in cell.sizes
        ]
        ratio = len(speeds) > 1
        found.append((cell, speeds[-1] / speeds[0] if ratio else speeds[0] * cell.sizes[0]))
    return found


@pytest.mark.slow
def test_the_first_prediction_is_a_calibrated_one(cells: list[tuple[SpeedCell, float]]) -> None:
    """`make run` shows published cells of 80 Gbit/s beside a prediction that is within 6.5 %."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    recipe = re.search(r"^run:.*\n\t(.*)$", makefile, re.MULTILINE)
    assert recipe
    words = shlex.split(recipe[1])
    chosen = [words[n + 1] for n, word in enumerate(words) if word == "--cluster"]
    assert chosen[0] == "a100-tcp80-calibrated"
    shown = [(cell, predicted) for cell, predicted in cells if cell.cluster in chosen]
    assert len(shown) == 7
    for cell, predicted in shown:
        assert predicted == pytest.approx(cell.value, rel=0.065)


@pytest.mark.slow
def test_the_uncalibrated_prediction_is_told(cells: list[tuple[SpeedCell, float]]) -> None:
    """The page on validation shows both predictions of every cell, as they are today."""
    text = (ROOT / "docs" / "validation.md").read_text()
    table = text.partition("| cell | use | published | calibrated | uncalibrated |\n")[2]
    rows = table.partition("\n\n")[0].splitlines()[1:]

    def number(value: float) -> str:
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    expected = []
    for (raw, uncalibrated), (_, calibrated) in zip(cells[::2], cells[1::2], strict=True):
        both = [
            f"{number(value)} ({units.percent(value / raw.value - 1)})".replace("%", " %")
            for value in (calibrated, uncalibrated)
        ]
        expected.append([raw.use, number(raw.value), *both])
    assert [row.strip("| ").split(" | ")[1:] for row in rows] == expected


# --- links, names, options ----------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_point_to_files_and_headings(page: Path) -> None:
    """Every relative link of a page leads to a file, and to a heading if it names one."""
    for target, anchor in links(page):
        assert target.exists(), target
        assert anchor is None or anchor in anchors(target), f"{target.name}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_that_are_named_exist(page: Path) -> None:
    """A path in backticks, such as `co2sim/cost.py`, is there."""
    roots = "co2sim|realrun|analysis|papers|tests|benchmarks|examples|docs"
    for path in re.findall(rf"`((?:{roots})/[\w./-]*)`", page.read_text()):
        assert (ROOT / path).exists(), path


def targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def options_of(words: list[str]) -> set[str]:
    """The options of a command of ours, named as in a shell."""
    package = {"co2analysis": "analysis"}.get(words[0], words[0])
    command = typer.main.get_command(importlib.import_module(f"{package}.cli.app").app)
    for word in words[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize(("page", "script"), SCRIPTS, ids=[p.stem for p, _ in SCRIPTS])
def test_scripts_name_targets_extras_and_options_that_exist(page: Path, script: str) -> None:
    """What is not executed (installing, hours, several machines) is at least spelled correctly."""
    del page
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for line in script.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert set(words[1:]) <= targets(), line
        elif words[0] == "pip":
            assert set(re.findall(r"\[(\w+)\]", line)) <= set(extras), line
        else:
            ours = [n for n, w in enumerate(words) if w in {"co2sim", "realrun", "co2analysis"}]
            assert ours or words[0].startswith("NODES="), line
            for start, until in pairwise([*ours, len(words)]):
                own = words[start:until]  # `realrun lab run ... -- realrun train ...` are two
                given = {word for word in own if re.match(r"--?[a-z]", word)}
                assert given <= options_of(own), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_targets_of_make_exist(page: Path) -> None:
    """Every `make target` in the text is one of the Makefile."""
    assert set(re.findall(r"`make ([\w-]+)`", page.read_text())) <= targets()


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    """The strict build finds no broken link and no page outside the navigation; nothing is remote.

    Scripts and style sheets come from the site itself.
    """
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"{module} is not installed: pip install '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "-d", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ROOT.glob("docs/*.md"):
        site = (tmp_path / f"{page.stem}.html").read_text()
        assert not re.findall(r'(?:<script[^>]*src|<link[^>]*stylesheet[^>]*href)="?http', site)
    assert "footprint" in (tmp_path / "api.html").read_text()
    assert "<em>" not in (tmp_path / "theory.html").read_text()  # no subscript read as emphasis


def test_examples_in_docstrings_run() -> None:
    """The examples in the docstrings of the public API give what they say."""
    for module in (study, experiments):
        found = doctest.testmod(module)
        assert found.attempted
        assert not found.failed
