"""Commands of ours: what they print and how they end, in this process; how far another has come."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import psutil
import pytest


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


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


def cpu_seconds(pid: int) -> float:
    """Of a process and all below it: how far it has come, on a busy machine, too."""
    whole = psutil.Process(pid)
    seconds = 0.0
    for process in (whole, *whole.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            seconds += process.cpu_times().user
    return seconds
