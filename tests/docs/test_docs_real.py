"""What the pages run on real processes, and the strategy that their guide builds."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from pages import (
    ESTIMATES,
    IN_A_LAB,
    ON_CORES,
    PAGES,
    ROOT,
    TOY,
    WITHOUT_OUTPUT,
    Block,
    applied,
    blocks,
    commands,
    shell,
)

from realrun.errors import LabError
from realrun.lab.lab import check_machine

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
