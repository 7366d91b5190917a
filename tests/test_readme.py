"""The README tells the truth: its examples run."""

import doctest
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from co2sim import study
from co2sim.cli import main

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ co2sim")
]


def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Every Python block of the README runs, and prints something."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})  # noqa: S102 - our own README
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `co2sim` command of the README ends with exit code 0."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


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
