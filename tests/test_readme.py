"""The README tells the truth: its examples run."""

import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from co2sim import study
from co2sim.cli import main
from realrun.errors import LabError
from realrun.launch.lab import check_machine

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]
SIMULATED = [command for command in COMMANDS if command.startswith("co2sim ")]
IN_A_LAB = [command for command in COMMANDS if command.startswith("co2analysis lab ")]
TRAINING = [command for command in COMMANDS if command.startswith("realrun lab run ")]
WITH_TORCHRUN = next(
    block for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) if "torchrun" in block
)


def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Every Python block of the README runs, and prints something."""
    pytest.importorskip("torch")
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})  # noqa: S102 - our own README
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", SIMULATED)
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `co2sim` command of the README ends with exit code 0."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def shell(script: str, folder: Path) -> str:
    """What a script prints, with our commands on the path; it must succeed."""
    commands = folder / "bin"
    commands.mkdir()
    for name, module in (("co2analysis", "analysis"), ("realrun", "realrun")):
        command = commands / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        command.chmod(0o755)
    found = f"{commands}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/bash", "-euc", script],
        cwd=folder,
        env={**os.environ, "PATH": found, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.lab
@pytest.mark.dist
@pytest.mark.parametrize("command", IN_A_LAB)
def test_commands_of_the_lab_run(command: str, tmp_path: Path) -> None:
    """CO2 and DDP in a lab of four nodes, predicted beside measured, with figures."""
    pytest.importorskip("torch")
    try:
        check_machine()
    except LabError as error:
        pytest.skip(str(error))
    printed = shell(command, tmp_path)
    assert "error of round time, median" in printed
    for name in ("ddp-bucket_mib=2.0", "co2-tau=4"):
        assert (tmp_path / "out" / f"timelines-{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.lab
@pytest.mark.dist
@pytest.mark.parametrize("command", TRAINING)
def test_training_in_the_lab_runs(command: str, tmp_path: Path) -> None:
    """The GPT learns with CO2 on four slow nodes; only smaller, and for two rounds."""
    pytest.importorskip("torch")
    try:
        check_machine()
    except LabError as error:
        pytest.skip(str(error))
    shell(f"{command} --size tiny --steps 24 --warmup 4", tmp_path)
    rows = (tmp_path / "out" / "train" / "log.csv").read_text().splitlines()
    assert rows[-1].startswith("24,")
    assert (tmp_path / "out" / "train" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.dist
def test_commands_on_local_cores_run(tmp_path: Path) -> None:
    """Probe, run and compare, one after the other; only fewer rounds than by default."""
    pytest.importorskip("torch")
    commands = [
        command
        for command in COMMANDS
        if not command.startswith(("co2sim ", "co2analysis lab ", "realrun lab "))
    ]
    assert len(commands) == 3
    script = "\n".join(commands).replace("-s ddp --out", "-s ddp --rounds 1 --out")
    assert "error of round time, median" in shell(script, tmp_path)


@pytest.mark.dist
def test_commands_of_torchrun_run(tmp_path: Path) -> None:
    """As written, but on two local ranks over Gloo, with a model and a probe of a few seconds."""
    pytest.importorskip("torch")
    script = WITH_TORCHRUN
    for written, here in (
        ("--nnodes 2 --nproc-per-node 8", "--nnodes 1 --nproc-per-node 2"),
        ("--rdzv-backend c10d --rdzv-endpoint first-node:29500", "--standalone"),
        ("nccl", "gloo"),
        ("gpt2-xl", "tiny-5m --set model.seq_len=64 --rounds 1"),
        ("probe ", "probe --quick "),
    ):
        assert written in script
        script = script.replace(written, here)
    printed = shell(script, tmp_path)
    assert "error of round time, median" in printed
    assert (tmp_path / "out" / "timelines-ddp.png").exists()


def test_links_and_pictures_exist() -> None:
    """Every relative link of README and CONTRIBUTING points to a file."""
    for name in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name}: {target}"


def test_examples_in_docstrings_run() -> None:
    """The examples in the docstrings of the public API give what they say."""
    found = doctest.testmod(study)
    assert found.attempted
    assert not found.failed
