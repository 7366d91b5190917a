"""How a trial starts commands: as users do, or forked from a process that has loaded torch.

Loading torch takes seconds of a core for the launcher and for each rank, far longer than what a
trial is about. So most trials fork all of them: what runs after the imports, and what the launcher
does with its processes, is the same; only the interpreter's own start is left out. Trials that are
`plain` start every process as users do.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from co2sim.units import parse
from realrun.launch import lab, processes

LIBC = ctypes.CDLL(None, use_errno=True)
_SET_DEATH_SIGNAL, _SET_NAME, _SET_SUBREAPER = 1, 15, 36
_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
        processes.started = lab.started = _forked  # type: ignore[attr-defined]
        shifted()
        _main(command)
    finally:
        os._exit(99)


_started = processes.started


def _forked(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: int | None = None,
    errors: int | None = None,
) -> "subprocess.Popen[bytes]":
    """`realrun.launch.processes.started`, but a rank of ours is forked instead of started anew."""
    words, node = list(command), None
    if words[0] == "unshare":  # the first process of a lab: it forks, too, once it has started
        words[-2] = f"import sys; sys.path[:] = {sys.path!r}; import chaos_start as c; c.in_lab()"
        return _started(words, environment, output=output, errors=errors)
    if words[0] == "nsenter":
        node, words = words[1].partition("=")[2], words[3:]
    if words[:3] != [sys.executable, "-m", "realrun"]:
        return _started(command, environment, output=output, errors=errors)
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # Python code runs around this fork, as it does not where a rank is executed, and an exception
    # of a signal's handler would be lost in it.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    try:
        return subprocess.Popen(
            ["-"],  # noqa: S607 - nothing is executed
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            # It never returns. The launcher's other thread, of torch's store, is none of Python's.
            preexec_fn=lambda: _rank(words[2:], environment, node, parent),  # noqa: PLW1509
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def in_lab() -> None:
    """Be the first process of a lab, whose ranks are forked."""
    load()
    lab.started = processes.started = _forked  # type: ignore[attr-defined]
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
        "realrun.cli.train_elastic",
        "realrun.execute.executor",
        "realrun.train.elastic_loop",
        "realrun.train.figure",
        "realrun.train.loop",
    ):
        import_module(name)
    parse("1 GB/s", "B/s")  # which makes its table of units


def _rank(
    words: Sequence[str], environment: Mapping[str, str], node: str | None, parent: int
) -> NoReturn:
    """Become a rank, as `realrun.launch.processes` starts one."""
    try:
        LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        if node:
            LIBC.setns(os.open(node, os.O_RDONLY), _NEW_NETWORK)
        os.closerange(3, 1 << 12)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does when it starts
        os.environ.update(environment)
        LIBC.prctl(_SET_NAME, f"rank{environment['RANK']}".encode())
        raising()
        _main(words)
    finally:
        os._exit(99)


def _main(words: Sequence[str]) -> NoReturn:
    """What `python -m realrun` does, without the imports."""
    from realrun.cli import main  # noqa: PLC0415 - of a process that is forked

    tempfile.tempdir = None
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = list(words)
    code: Any = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code or 0)


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
    """Let this rank raise an error in its work, if the environment says so."""
    asked = json.loads(os.environ.get(RAISES, "{}"))
    if not asked or os.environ["RANK"] != str(asked["rank"]):
        return
    error = {
        "RuntimeError": RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory"),
        "MemoryError": MemoryError("no more memory"),
        "ValueError": ValueError("a kernel went wrong"),
    }[asked["error"]]

    def wrapped(work: Callable[..., Any], place: Callable[..., int]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if place(*given) >= asked["at"]:
                raise error
            return work(*given, **named)

        return call

    from realrun.execute import kernels  # noqa: PLC0415 - only of this rank
    from realrun.train.local_step import LocalStep  # noqa: PLC0415

    LocalStep.take = wrapped(LocalStep.take, lambda _, step: step)  # type: ignore[method-assign]
    for kind in (kernels.Sleep, kernels.Burn):
        kind.compute = wrapped(kind.compute, lambda _, instance, *__: instance.round)
