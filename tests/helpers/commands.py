"""Commands run in this process: what they print and how they end; how far another has come."""

import os
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import pytest
from places import DATA, ROOT


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]

OFFER = """\
name = "{name}"
source = "an offer"
nodes = {nodes}
gpus_per_node = 8
gpu = "h100"
price_per_gpu = "{price} USD/h"
intra = {{ bandwidth = "450 GB/s", efficiency = 0.8, latency = "3 us" }}
inter = {{ bandwidth = "{rate} Gbit/s", efficiency = 0.9, latency = "20 us" }}
"""
"""The file of a cluster, for `format`."""


def in_process(
    name: str,
    main: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """The command of this name, whose `main` ends by SystemExit."""

    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return call


def python(folder: Path, *words: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """How `python WORDS` ends in a folder, with what this process can import; in five minutes."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def row(line: str) -> list[Any]:
    """The words of a line, and last what its options NAME=VALUE say."""
    words = line.split()
    pairs = (word.split("=", 1) for word in words if "=" in word)
    options = {name: _value(text) for name, text in pairs}
    return [*(word for word in words if "=" not in word), options]


def rows(name: str) -> list[list[Any]]:
    """Those of a file of `tests/data`."""
    lines = (DATA / name).read_text().splitlines()
    return [row(line) for line in lines if not line.startswith("#")]


def _value(text: str) -> Any:
    try:
        return literal_eval(text)
    except ValueError:
        return text


def refused(name: str, **words: str) -> list[tuple[str, str]]:
    """Command lines of a file of `tests/data`, and what is said; $WORDS stand for more."""
    lines = (DATA / name).read_text().splitlines()
    pairs = (line.partition(" => ") for line in lines if not line.startswith("#"))
    return [(Template(line).substitute(words), said) for line, _, said in pairs]


class Written(NamedTuple):
    """What a command printed, and the page that it wrote."""

    out: str
    path: Path

    @property
    def text(self) -> str:
        """The page."""
        return self.path.read_text("utf-8")


_WRITTEN: dict[tuple[str, ...], Written] = {}


def written(factory: pytest.TempPathFactory, *arguments: str) -> Written:
    """The page of a `co2sim` command, written once for all tests of a session."""
    from co2sim.cli import main  # noqa: PLC0415 - tests of other commands need none of it

    if arguments not in _WRITTEN:
        path = factory.mktemp("page") / "page.html"
        option = "--out" if arguments[0] == "report" else "--report"
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
            patch.setattr(sys, "argv", ["co2sim", *arguments, option, str(path)])
            with pytest.raises(SystemExit) as ended:
                main()
        assert not ended.value.code
        _WRITTEN[arguments] = Written(out.getvalue(), path)
    return _WRITTEN[arguments]
