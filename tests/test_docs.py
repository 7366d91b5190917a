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
from pathlib import Path

import pytest
import typer
from pages import PAGES, ROOT, Block, anchors, applied, blocks, commands, links

from co2sim import study
from co2sim.cli.published import Cell, load_cells
from realrun.errors import LabError
from realrun.launch.lab import check_machine

TOY = ROOT / "docs" / "add-a-strategy.md"
"""The page that is executed as a whole, in a copy of the project."""
STUDY = ROOT / "docs" / "what-if-study.md"

COMMANDS = dict.fromkeys(
    line for page in PAGES if page != TOY for line in commands(page)
)  # in order, each once
QUICK = [line for line in COMMANDS if re.match(r"co2sim |co2analysis (bound|tau) ", line)]
IN_A_LAB = [line for line in COMMANDS if line.startswith("co2analysis lab ")]
TRAINING = [line for line in COMMANDS if line.startswith("realrun lab run ")]
ON_CORES = [
    line for line in COMMANDS if re.match(r"realrun (probe|run) |co2analysis compare ", line)
]
STUDIES = [line for line in COMMANDS if line.startswith("python ")]

EXAMPLES = [
    (page, number)
    for page in PAGES
    for number, block in enumerate(blocks(page))
    if block.kind == "python" and not block.title
]
SCRIPTS = [(page, block.text) for page in PAGES for block in blocks(page) if block.kind == "sh"]
WITH_TORCHRUN = next(text for _, text in SCRIPTS if "torchrun" in text)
NOT_YET = {"check", "mutants"}
"""Targets that the pages name and the Makefile of this branch does not have."""


def test_every_command_is_executed_by_one_of_the_tests() -> None:
    """No command of a page is of a kind that no test below runs."""
    assert QUICK
    run = [*QUICK, *IN_A_LAB, *TRAINING, *ON_CORES, *STUDIES]
    assert sorted(run) == sorted(COMMANDS)


@pytest.mark.parametrize(("page", "number"), EXAMPLES, ids=[f"{p.stem}-{n}" for p, n in EXAMPLES])
def test_python_examples_run(page: Path, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every Python block of a page runs by itself, and prints something."""
    text = blocks(page)[number].text
    if "realrun" in text:
        pytest.importorskip("torch")
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


def shell(script: str, folder: Path, root: Path = ROOT) -> str:
    """What a script prints, with the commands of `root` on the path; it must succeed."""
    shims = folder / "bin"
    shims.mkdir(exist_ok=True)
    for name, module in (("co2sim", "co2sim"), ("co2analysis", "analysis"), ("realrun", "realrun")):
        shim = shims / name
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        shim.chmod(0o755)
    found = f"{shims}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/bash", "-euc", script],
        cwd=folder,
        env={**os.environ, "PATH": found, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def lab() -> None:
    """Skip where no lab can be built."""
    pytest.importorskip("torch")
    try:
        check_machine()
    except LabError as error:
        pytest.skip(str(error))


@pytest.mark.lab
@pytest.mark.dist
@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("command", IN_A_LAB)
def test_commands_of_the_lab_run(command: str, tmp_path: Path) -> None:
    """CO2 and DDP in a lab of four nodes, predicted beside measured, with figures; one round."""
    printed = shell(f"{command} --rounds 1", tmp_path)
    assert "error of round time, median" in printed
    for name in ("ddp-bucket_mib=2.0", "co2-tau=4"):
        assert (tmp_path / "out" / f"timelines-{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.lab
@pytest.mark.dist
@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("command", TRAINING)
def test_training_in_the_lab_runs(command: str, tmp_path: Path) -> None:
    """The GPT learns with CO2 on four slow nodes; only smaller, and for two rounds."""
    shell(f"{command} --size tiny --steps 24 --warmup 4", tmp_path)
    rows = (tmp_path / "out" / "train" / "log.csv").read_text().splitlines()
    assert rows[-1].startswith("24,")
    assert (tmp_path / "out" / "train" / "loss.png").read_bytes().startswith(b"\x89PNG")


def changed(script: str, *changes: tuple[str, str]) -> str:
    """The script as it can be run here; everything that is replaced must stand in it."""
    for written, here in changes:
        assert written in script
        script = script.replace(written, here)
    return script


@pytest.mark.dist
def test_commands_on_local_cores_run(tmp_path: Path) -> None:
    """Probe, run and compare, one after the other; only shorter."""
    pytest.importorskip("torch")
    script = changed(
        "\n".join(ON_CORES),
        ("probe ", "probe --quick "),
        ("model.seq_len=256", "model.seq_len=64"),
        ("-s ddp --out", "-s ddp --rounds 1 --out"),
    )
    assert "error of round time, median" in shell(script, tmp_path)


@pytest.mark.dist
def test_commands_of_torchrun_run(tmp_path: Path) -> None:
    """As written, but on two local ranks over Gloo, with a model and a probe of a few seconds."""
    pytest.importorskip("torch")
    script = changed(
        WITH_TORCHRUN,
        ("--nnodes 2 --nproc-per-node 8", "--nnodes 1 --nproc-per-node 2"),
        ("--rdzv-backend c10d --rdzv-endpoint first-node:29500", "--standalone"),
        ("nccl", "gloo"),
        ("gpt2-xl", "tiny-5m --set model.seq_len=64 --rounds 1"),
        ("probe ", "probe --quick "),
    )
    printed = shell(script, tmp_path)
    assert "error of round time, median" in printed
    assert (tmp_path / "out" / "timelines-ddp.png").exists()


# --- the toy strategy ---------------------------------------------------------------------------


def follow(block: Block, project: Path) -> None:
    """Do what one block of the page says."""
    if block.kind == "console":
        for line in block.commands:
            shell(line, project, project)
    elif block.title and block.kind == "python":
        (project / block.title).write_text(block.text)
        shell(f"ruff format --check {block.title}; ruff check {block.title}", project, project)
    elif block.title and block.kind == "diff":
        path = project / block.title
        path.write_text(applied(block.text, path.read_text()))
    elif block.title:
        assert (project / block.title).read_text() == block.text


@pytest.mark.slow
def test_the_strategy_of_the_guide_works(tmp_path: Path) -> None:
    """Who follows the page gets a strategy that runs, its golden file, and tests that pass."""
    tests = ("conftest.py", "tiny.py", "test_strategies.py")
    shutil.copytree(ROOT / "co2sim", tmp_path / "co2sim")
    (tmp_path / "tests" / "golden").mkdir(parents=True)
    for name in (*(f"tests/{name}" for name in tests), "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for block in blocks(TOY):
        follow(block, tmp_path)
    assert (tmp_path / "tests" / "golden" / "stale_ddp.txt").exists()
    assert (tmp_path / "out" / "scale.csv").exists()


# --- the first page -----------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    """Nobody reads more than 120 lines before trying."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.fixture(scope="module")
def cells() -> list[tuple[Cell, float]]:
    """The published cells of CO2, each as published and as simulated, with their prediction."""
    found = []
    for cell in load_cells(ROOT / "papers/co2/results.toml"):
        speeds = [
            study.simulate(cell.cluster, cell.model, cell.strategy, gpus=gpus).tokens_per_s_per_gpu
            for gpus in cell.sizes
        ]
        ratio = len(speeds) > 1
        found.append((cell, speeds[-1] / speeds[0] if ratio else speeds[0] * cell.sizes[0]))
    return found


@pytest.mark.slow
def test_the_first_prediction_is_a_calibrated_one(cells: list[tuple[Cell, float]]) -> None:
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
def test_the_uncalibrated_prediction_is_told(cells: list[tuple[Cell, float]]) -> None:
    """The page on validation shows both predictions of every cell, as they are today."""
    text = (ROOT / "docs" / "validation.md").read_text()
    table = text.partition("| cell | use | published | calibrated | uncalibrated |\n")[2]
    rows = table.partition("\n\n")[0].splitlines()[1:]

    def number(value: float) -> str:
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    expected = []
    for (raw, uncalibrated), (_, calibrated) in zip(cells[::2], cells[1::2], strict=True):
        both = [
            f"{number(value)} ({value / raw.value - 1:+.0%})".replace("%", " %")
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
    found = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {*found, *NOT_YET}


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
            for start in ours:
                given = {word for word in words[start:] if re.match(r"--?[a-z]", word)}
                assert given <= options_of(words[start:]), line


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
    found = doctest.testmod(study)
    assert found.attempted
    assert not found.failed
