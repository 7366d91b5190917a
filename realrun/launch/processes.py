"""Processes of ranks: they never outlive the launcher, nor do processes that they start."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from realrun.errors import LaunchError

_MORTAL = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):  # the launcher died before that
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")
"""
"""A program that turns into the command, but dies with the process that started it."""

_GUARD = """
import os, signal, sys
groups = sys.stdin.read().split()
for group in groups:
    try:
        os.killpg(int(group), signal.SIGKILL)
    except OSError:
        pass
"""
"""A program that outlives a killed launcher, just to kill what the ranks had started."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank's process: it leads a process group of its own, its output goes into pipes."""

    rank: int
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill it with all processes of its group; stopped ones, too."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start(
    rank: int, command: Sequence[str], environment: Mapping[str, str], *, errors: bool = True
) -> RankProcess:
    """Start a rank that dies with this thread; `environment` is added to this process's own.

    Its output goes into pipes; its errors stay with this process's own unless `errors`.
    """
    pipe = subprocess.PIPE
    return RankProcess(
        rank, started(command, environment, output=pipe, errors=pipe if errors else None)
    )


def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: int | None = None,
    errors: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own that dies with this thread."""
    mortal = [sys.executable, "-I", "-S", "-c", _MORTAL, str(os.getpid())]
    try:
        return subprocess.Popen(  # noqa: S603 - the user's own command
            [*mortal, *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error


@contextmanager
def ranks_killed_at_end() -> Generator[list[RankProcess]]:
    """A list of ranks, to be filled; all of them are killed when the block is left."""
    ranks: list[RankProcess] = []
    try:
        yield ranks
    finally:
        for one in ranks:
            if one.process.poll() is None:
                one.kill()
        for one in ranks:
            one.process.wait()
            for pipe in filter(None, (one.process.stdout, one.process.stderr)):
                pipe.close()


@contextmanager
def guard_process() -> Generator[subprocess.Popen[bytes]]:
    """Run a process that kills the process groups put under it if this one dies."""
    guard = subprocess.Popen(  # noqa: S603 - our own text
        [sys.executable, "-I", "-S", "-c", _GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield guard
    finally:
        guard.kill()  # before its pipe ends: the numbers in it are nobody's, or another's, by now
        guard.wait()
        if guard.stdin:
            guard.stdin.close()


def put_under(guard: subprocess.Popen[bytes], group: int) -> None:
    """Let the guard kill this process group, should this process die."""
    assert guard.stdin is not None
    guard.stdin.write(b"%d\n" % group)
    guard.stdin.flush()
