"""How a trial starts commands: as users do, or forked from a process that has loaded torch.

Loading torch takes seconds of a core, far longer than what a trial is about. So most trials fork
the launcher, as launchers fork their ranks: what runs after the imports is the same; only the
interpreter's own start is left out. Trials that are `plain` start the launcher as users do.
"""

import ctypes
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from co2sim.units import parse
from realrun.launch import lab

LIBC = ctypes.CDLL(None, use_errno=True)
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36
_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000
RAISES = "CHAOS_RAISES"
"""Environment variable of ranks: which of them raises what, and when, as JSON."""
CLOCK = "CHAOS_CLOCK"
"""Environment variable with a file: by so many seconds the wall clock of Python is wrong."""


def alone() -> None:
    """Give this process a network, /dev/shm and orphans of its own, so that what is left is seen.

    Whatever a process below it leaves, also what has been handed on, becomes a child of this one.
    """
    os.setsid()
    LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    LIBC.prctl(_SET_SUBREAPER, 1)
    if os.geteuid():
        return
    if LIBC.unshare(_NEW_MOUNTS | _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "unshare")
    for command in (
        "mount --make-rprivate /",
        "mount -t tmpfs chaos /dev/shm",
        "ip link set lo up",
    ):
        subprocess.run(command.split(), check=True)


@dataclass
class Command:
    """A command that runs, its output goes into files."""

    pid: int
    folder: Path
    code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, if it has ended; orphans that have ended are reaped."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self.code
            if not pid:
                return self.code
            if pid == self.pid:
                self.code = os.waitstatus_to_exitcode(status)

    @property
    def said(self) -> str:
        """What it has written to stderr."""
        return (self.folder / "stderr").read_text("utf-8", errors="replace")

    @property
    def printed(self) -> str:
        """What it has written to stdout."""
        return (self.folder / "stdout").read_text("utf-8", errors="replace")


def start(
    command: Sequence[str], folder: Path, *, plain: bool, environment: Mapping[str, str]
) -> Command:
    """Start `realrun` or `co2sim` in a folder; its files beside are "stdout" and "stderr"."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    place = {**environment, "TMPDIR": str(folder / "tmp")}
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Command(pid, folder)
    try:
        for number, name in ((0, "/dev/null"), (1, folder / "stdout"), (2, folder / "stderr")):
            flags = os.O_RDONLY if not number else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(name, flags, 0o600), number)
        os.closerange(3, 1 << 12)
        os.setsid()
        os.chdir(folder)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(place)
        if plain or command[0] != "realrun":
            os.execv(sys.executable, [sys.executable, "-m", *command])  # noqa: S606
        lab.started = _lab_started  # type: ignore[attr-defined]
        tempfile.tempdir = None
        shifted()
        raising()
        _run_module(command)
    finally:
        os._exit(99)


def _run_module(command: Sequence[str]) -> NoReturn:
    """Do what `python -m COMMAND` would do, and end this process."""
    sys.argv = [*command]
    sys.path.insert(0, str(Path.cwd()))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", write_through=True)
        for number in (1, 2)
    )
    code: object = 1
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    os._exit(code or 0)


_started = lab.started


def _lab_started(
    command: Sequence[str], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """`realrun.launch.lab.started`, but the first process of the lab knows what is to be raised."""
    program = f"import sys; sys.path[:] = {sys.path!r}; import chaos_start as c; c.in_lab()"
    return _started([*command[:-2], program, command[-1]], environment)


def in_lab() -> None:
    """Be the first process of a lab."""
    load()
    raising()
    lab._first()  # noqa: SLF001 - the program that a lab starts


def load() -> None:
    """Import what ranks and launchers need."""
    for name in (
        "matplotlib.backends.backend_agg",
        "numpy.random",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "co2sim.console.result_tables",
        "co2sim.power",
        "realrun.algorithms",
        "realrun.cli.ranks",
        "realrun.execute.executor",
        "realrun.train.figure",
        "realrun.train.loop",
    ):
        import_module(name)
    parse("1 GB/s", "B/s")  # which makes its table of units


def shifted() -> None:
    """Let the wall clock of this process be wrong, if the environment says so.

    That of Python, which is what our own code reads. libfaketime would move that of all libraries,
    but its version 0.9.10 breaks `time.sleep`, which waits for a time of the monotonic clock.
    """
    if CLOCK not in os.environ:
        return
    path, now, now_ns = Path(os.environ[CLOCK]), time.time, time.time_ns
    time.time = lambda: now() + int(path.read_text("ascii") or 0)
    time.time_ns = lambda: now_ns() + 10**9 * int(path.read_text("ascii") or 0)


def raising() -> None:
    """Let a rank that is forked from here raise an error, if the environment says so."""
    asked = json.loads(os.environ.get(RAISES, "{}"))
    if not asked:
        return
    error = {
        "RuntimeError": RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory"),
        "MemoryError": MemoryError("no more memory"),
        "ValueError": ValueError("a kernel went wrong"),
    }[asked["error"]]

    def wrapped(work: Callable[..., Any], place: Callable[..., int]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if os.environ.get("RANK") == str(asked["rank"]) and place(*given) >= asked["at"]:
                raise error
            return work(*given, **named)

        return call

    from realrun.execute import kernels  # noqa: PLC0415 - only where it is asked for
    from realrun.train.local_step import LocalStep  # noqa: PLC0415

    LocalStep.take = wrapped(LocalStep.take, lambda _, step: step)  # type: ignore[method-assign]
    for kind in (kernels.Sleep, kernels.Burn):
        kind.compute = wrapped(kind.compute, lambda _, instance, *__: instance.round)
