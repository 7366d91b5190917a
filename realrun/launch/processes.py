"""Processes of ranks: they never outlive the launcher, nor do processes that they start."""

import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from co2sim.common.units import Seconds
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
import os, select, signal, sys
launcher, patience = int(sys.argv[1]), float(sys.argv[2])
groups, rest, stopped, tick = [], b"", 0, 0.25

def kill():
    for group in groups:
        try:
            os.killpg(int(group), signal.SIGKILL)
        except OSError:
            pass

def state():
    try:
        with open(f"/proc/{launcher}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""

while True:
    if select.select([0], [], [], tick)[0]:
        data = os.read(0, 65536)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\\n")
        groups += lines
        continue
    stopped = stopped + 1 if state() == "T" else 0  # ticks, as the whole machine may stand still
    if stopped * tick > patience:
        os.write(1, b"cut")
        text = f"error: the launcher was stopped for {patience:g} s: its ranks were killed"
        print(text, file=sys.stderr, flush=True)
        break
kill()
"""
"""A program that kills what the ranks started if the launcher is killed or stopped for long."""


def entering(holder: int) -> list[str]:
    """The command that runs another one in the network of a node, by the process that holds it."""
    return ["nsenter", f"--net=/proc/{holder}/ns/net", "--"]


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank's process: it leads its own process group, its output goes into pipes."""

    rank: int
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill it with all processes of its group; stopped ones, too."""
        _kill(self.process.pid)


def start(
    rank: int, command: Sequence[str], environment: Mapping[str, str], *, errors: bool = True
) -> RankProcess:
    """Start a rank that dies with this thread; `environment` is added to this process's own.

    Its output goes into pipes; its errors stay with this process's own unless `errors`.
    """
    pipe = subprocess.PIPE
    stderr = pipe if errors else None
    return RankProcess(rank, started(command, environment, output=pipe, errors=stderr))


def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: int | None = None,
    errors: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in its own session that dies with this thread."""
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
def ranks_killed_at_end(ranks: Sequence[RankProcess]) -> Generator[None]:
    """Within, a list of ranks is filled; all of them are killed when the block is left."""
    try:
        yield
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.kill()
        for rank in ranks:
            rank.process.wait()
            for pipe in filter(None, (rank.process.stdout, rank.process.stderr)):
                pipe.close()


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class LaunchGuard:
    """A process that outlives the launcher, to kill the process groups put under it."""

    process: subprocess.Popen[bytes]

    def put(self, group: int) -> None:
        """Let it kill this process group, should this process die or be stopped.

        If it has ended already, because of that, the group is killed here.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"%d\n" % group)
            self.process.stdin.flush()
        except BrokenPipeError:
            _kill(group)

    def cut(self) -> bool:
        """Whether it has killed the ranks, as this process was stopped; it has said so then."""
        said = self.process.stdout
        assert isinstance(said, io.BufferedReader)
        return bool(select.select([said], [], [], 0)[0] and said.peek(1))


@contextmanager
def guard_process(patience: Seconds) -> Generator[LaunchGuard]:
    """Run a guard of this process, which may be stopped (SIGSTOP, control-Z) for `patience`.

    Only Linux says which processes are stopped; elsewhere the guard waits for this one to die.
    """
    guard = subprocess.Popen(  # noqa: S603 - our own text
        [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), str(patience)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield LaunchGuard(guard)
    finally:
        guard.kill()  # before its pipe ends: its numbers may be of another process by now
        guard.wait()
        for pipe in filter(None, (guard.stdin, guard.stdout)):
            with suppress(BrokenPipeError):  # of what was put under a guard that had ended
                pipe.close()


class Stopped(BaseException):
    """A signal told this process to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum


@contextmanager
def stoppable(first: Callable[[int], None] | None = None) -> Generator[None]:
    """Raise Stopped at the first SIGINT, SIGTERM or SIGHUP; more of them change nothing.

    With `first` the first signal calls that instead, and the second raises.
    """
    signals = 0

    def stop(signum: int, _: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if first and signals == 1:
            first(signum)
        elif signals == 1 + (first is not None):
            raise Stopped(signum)

    before = {
        signum: signal.signal(signum, stop)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signum) not in {signal.SIG_IGN, None}
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
