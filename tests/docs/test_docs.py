"""The README and the pages of docs/ tell the truth: what they show runs, what they link exists."""

import doctest
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import docs_numbers
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
    TOY,
    TRAINING,
    WITHOUT_OUTPUT,
    Block,
    anchors,
    applied,
    blocks,
    commands,
    links,
    shell,
    without_code,
)

from co2sim.prediction import driver
from co2sim.studies import sweep
from realrun.errors import LabError
from realrun.lab.lab import check_machine

EXAMPLES = [
    (page, number)
    for page in PAGES
    for number, block in enumerate(blocks(page))
    if block.kind == "python" and not block.title
]
SHORTEST = {" ".join(line.split()[:2]): line for line in sorted(QUICK, key=len, reverse=True)}
"""Of each command of which pages show one that only computes."""
LONG = {"co2sim plan", "co2sim explore", "co2analysis fabric"}
"""Their shortest take seconds; all commands run at night."""


def test_every_command_is_executed_by_one_of_the_tests() -> None:
    """No command of a page is of a kind that is run by none of them."""
    assert QUICK
    run = [*QUICK, *IN_A_LAB, *TRAINING, *ESTIMATES, *ON_CORES, *STUDIES]
    assert sorted(run) == sorted(COMMANDS)


@pytest.mark.slow
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
    for package in ("torch", "transformers"):
        if f"import {package}\n" in text or (package == "torch" and "realrun" in text):
            pytest.importorskip(package)
    if ".plot(" in text:
        pytest.importorskip("altair")
        monkeypatch.chdir(tmp_path)
    exec(text, {})  # noqa: S102 - our own pages
    assert capsys.readouterr().out


def run(command: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Run a command in this process; it must succeed."""
    for name in ("examples", "papers"):
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
    words = shlex.split(command)
    if ".py:" in command:
        pytest.importorskip("torch")
    package = {"co2sim": "co2sim.cli", "co2analysis": "analysis.cli"}[words[0]]
    with patch.context() as inside:
        inside.chdir(folder)
        inside.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(package).main()
    assert not ended.value.code, command


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in SHORTEST if name.startswith("co2sim") and name not in LONG]
)
def test_a_command_of_each_kind_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest one that a page shows."""
    run(SHORTEST[name], tmp_path, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_all_commands_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that only compute."""
    for command in commands(page):
        if command in QUICK:
            run(command, tmp_path, monkeypatch)


@pytest.mark.nightly
def test_numbers_of_pages_are_those_of_today() -> None:
    """`make docs-numbers` changes nothing; it checks every block that is marked."""
    changed = {page.name: docs_numbers.generated(page) != page.read_text() for page in PAGES}
    assert not any(changed.values()), changed


# --- the first page -----------------------------------------------------------------------------


def test_the_first_page_is_short() -> None:
    """At most 600 words outside of code, and no line of prose above 120 characters."""
    prose = re.sub(r"\]\([^)]*\)", "]", without_code(ROOT / "README.md"))
    assert len(re.findall(r"\w[\w'.,-]*", prose)) <= 600
    lines = [line for line in prose.splitlines() if not line.startswith("|")]
    assert max(map(len, lines)) <= 120


def test_nobody_is_sent_to_the_package_index_for_this_project() -> None:
    """There, co2sim is another project's name: `pip install .` in a clone installs this one."""
    texts = {page.name: page.read_text() for page in PAGES}
    texts["pyproject.toml"] = project()["readme"]["text"]
    for name, text in texts.items():
        assert not re.findall(r"pip install [^`\n]*\bco2sim\b(?![/.]).*", text), name


# --- links, names, options ----------------------------------------------------------------------


def test_links_paths_and_targets_lead_to_what_is_there() -> None:
    """A relative link, with its heading; a path and a `make target` in backticks."""
    roots = "co2sim|realrun|analysis|papers|tests|benchmarks|examples|docs"
    for page in PAGES:
        for path in re.findall(rf"`((?:{roots})/[\w./-]*)`", page.read_text()):
            assert (ROOT / path).exists(), (page.name, path)
        assert set(re.findall(r"`make ([\w-]+)`", page.read_text())) <= targets(), page.name
        for target, anchor in links(page):
            assert target.exists(), (page.name, target)
            assert anchor is None or anchor in anchors(target), f"{target.name}#{anchor}"


def project() -> dict[str, Any]:
    """What pyproject.toml says of the project."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


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


def test_scripts_name_targets_extras_and_options_that_exist() -> None:
    """What is not executed (installing, hours, several machines) is at least spelled correctly."""
    extras = set(project()["optional-dependencies"])
    scripts = [block.text for page in PAGES for block in blocks(page) if block.kind == "sh"]
    for line in "".join(scripts).splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert set(words[1:]) <= targets(), line
        elif words[0] == "pip":
            assert set(re.findall(r"\[(\w+)\]", line)) <= extras, line
        else:
            ours = [n for n, w in enumerate(words) if w in {"co2sim", "realrun", "co2analysis"}]
            assert ours or words[0].startswith("NODES="), line
            for start, until in pairwise([*ours, len(words)]):
                own = words[start:until]  # `realrun lab run ... -- realrun train ...` are two
                given = {word for word in own if re.match(r"--?[a-z]", word)}
                assert given <= options_of(own), line


def test_every_command_has_an_example_on_its_page() -> None:
    """Pages of commands are made from the code; their examples stand in other pages."""
    module = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    reference = importlib.util.module_from_spec(module)
    module.loader.exec_module(reference)
    made = reference.pages([page.read_text() for page in PAGES])
    commands = [text for path, text in made.items() if path.startswith("commands/")]
    assert len(commands) > 30
    assert [text.splitlines()[0] for text in commands if "```sh" not in text] == []


@pytest.mark.nightly
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
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ROOT.glob("docs/*.md"):
        site = (tmp_path / f"{page.stem}.html").read_text()
        assert not re.findall(r'(?:<script[^>]*src|<link[^>]*stylesheet[^>]*href)="?http', site)
    assert "cost_of" in (tmp_path / "api.html").read_text()
    for page in ("theory.html", "theory-proofs.html"):
        assert "<em>" not in (tmp_path / page).read_text()  # no subscript read as emphasis


def test_examples_in_docstrings_run() -> None:
    """The examples in the docstrings of the public API give what they say."""
    for module in (driver, sweep):
        found = doctest.testmod(module)
        assert found.attempted
        assert not found.failed


# --- on real processes, and the strategy of the guide -----------------------------------------


WITH_TORCHRUN = next(
    block.text
    for page in PAGES
    for block in blocks(page)
    if block.kind == "sh" and "torchrun" in block.text
)

SHORT_PROBE = "probe --budget '1 s' --max-size '256 KiB' "


@pytest.fixture
def lab() -> None:
    """Skip where no lab can be built."""
    pytest.importorskip("torch")
    try:
        check_machine()
    except LabError as error:
        pytest.skip(str(error))


@pytest.mark.nightly
@pytest.mark.lab
@pytest.mark.dist
@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("command", IN_A_LAB)
def test_commands_of_the_lab_run(command: str, tmp_path: Path) -> None:
    """In a lab of four nodes, predicted beside measured, with the figures asked for; one round."""
    printed = shell(f"{command} --rounds 1", tmp_path)
    assert "error of round time" in printed
    if "--figure" in command:
        pictures = list((tmp_path / "out").glob("timelines-*.png"))
        assert len(pictures) == command.count(" -s ")
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    else:
        assert len(list(tmp_path.glob("out/*/run.json"))) == command.count(" -s ")


@pytest.mark.nightly
@pytest.mark.dist
def test_the_estimates_of_the_guide_are_those_of_its_bound(tmp_path: Path) -> None:
    """The short training finds about what the next command takes: sources of Python vary."""
    pytest.importorskip("torch")
    (command,) = ESTIMATES
    lines = commands(ROOT / "docs" / "training.md")
    following = shlex.split(lines[lines.index(command) + 1])
    printed = shell(command, tmp_path)
    assert "$ co2analysis bound --smoothness " in printed
    found = json.loads((tmp_path / "out" / "estimate" / "estimate.json").read_text())
    for flag, value in (
        ("--smoothness", found["smoothness"]),
        ("--noise", found["noise"]["value"]),
        ("--gap", found["gap"]["value"]),
    ):
        assert float(following[following.index(flag) + 1]) == pytest.approx(value, rel=0.3)


def changed(script: str, *changes: tuple[str, str]) -> str:
    """The script as it can be run here; everything that is replaced must stand in it."""
    for written, here in changes:
        assert written in script
        script = script.replace(written, here)
    return script


@pytest.mark.nightly
@pytest.mark.parametrize(
    "page", [page for page in PAGES if WITHOUT_OUTPUT[page]], ids=lambda page: page.stem
)
def test_commands_whose_output_is_not_shown_run(page: Path, tmp_path: Path) -> None:
    """One after the other, beside the table of runs that the page shows."""
    for block in blocks(page):
        if block.kind == "csv":
            (tmp_path / "runs.csv").write_text(block.text)
    assert shell("\n".join(WITHOUT_OUTPUT[page]), tmp_path)


@pytest.mark.nightly
@pytest.mark.dist
def test_commands_on_local_cores_run(tmp_path: Path) -> None:
    """Probe, run and compare, one after the other; only shorter."""
    pytest.importorskip("torch")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    script = changed(
        "\n".join(ON_CORES),
        ("probe ", SHORT_PROBE),
        ("model.seq_len=256", "model.seq_len=64"),
        ("-s ddp --out", "-s ddp --rounds 1 --out"),
    )
    assert "error of round time" in shell(script, tmp_path)


@pytest.mark.nightly
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
        ("probe ", SHORT_PROBE),
    )
    printed = shell(script, tmp_path)
    assert "error of round time" in printed
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


@pytest.mark.nightly
def test_the_strategy_of_the_guide_works(tmp_path: Path) -> None:
    """Who follows the page gets a strategy that runs, its golden file, and tests that pass."""
    tests = (
        "conftest.py",
        *(f"helpers/{name}.py" for name in ("commands", "one_sample", "places", "tiny")),
    )
    tests = (*tests, "co2sim/strategies/test_strategies.py")
    shutil.copytree(ROOT / "co2sim", tmp_path / "co2sim")
    (tmp_path / "tests" / "golden").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for name in ("helpers", "co2sim/strategies"):
        (tmp_path / "tests" / name).mkdir(parents=True)
    for name in (*(f"tests/{name}" for name in tests), "pyproject.toml", "docs/strategies.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    for block in blocks(TOY):
        follow(block, tmp_path)
    assert (tmp_path / "tests" / "golden" / "stale_ddp.txt").exists()
    assert (tmp_path / "out" / "scale.csv").exists()
