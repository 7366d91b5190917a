"""Start ranks on this machine with torchrun's environment, watch them, leave nothing behind.

The launcher hosts the store that ranks meet in, so that it outlives any of them. The first rank
that fails is told to the others through it (see `watch`); they get some time to stop by
themselves, then they are killed. No process is left, however the launcher itself ends.
"""

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, TYPE_CHECKING, Self, TextIO

from co2sim.units import Seconds
from realrun.errors import LaunchError
from realrun.launch.watch import Store, gone, tell

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

GRACE: Seconds = 5.0
"""How long other ranks may take to stop after one failed, unless said otherwise."""

MAX_RANKS = 256
"""Far more than one machine can usefully run."""

_TICK: Seconds = 0.05
_LONGEST_LINE = 1 << 16

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
"""Becomes the command, but dies with the process that started it."""

_GUARD = """
import os, signal, sys
groups = sys.stdin.read().split()
for group in groups:
    try:
        os.killpg(int(group), signal.SIGKILL)
    except OSError:
        pass
"""
"""Outlives a killed launcher just long enough to kill what the ranks had started."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank's process: it leads a process group of its own, its output goes into pipes."""

    rank: int
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill it with all processes of its group; stopped ones, too."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def run_local(
    command: Sequence[str],
    nproc: int,
    *,
    grace: Seconds = GRACE,
    environment: Mapping[str, str] | None = None,
    ask_first: bool = False,
    own_terminal: bool = False,
) -> int:
    """Run `command` as `nproc` ranks on this machine, and give the exit code of `supervise`.

    `environment` is added to this process's own. Killing this process kills all ranks, and what
    they started; control-C gives 130 and SIGTERM 143. With `ask_first` the first of them only tells
    the ranks, by SIGTERM, to come to an end, and the second kills. With `own_terminal` rank 0
    writes its errors to this process's terminal itself, if there is one: it may draw there. Call it
    from the main thread. Raises LaunchError when the ranks cannot be started.
    """
    if not 1 <= nproc <= MAX_RANKS:
        raise LaunchError(f"cannot start {nproc} ranks; it must be 1 to {MAX_RANKS}")
    program = resolved(command)
    asked: list[int] = []
    alive: list[RankProcess] = []

    def ask(number: int) -> None:
        asked.append(number)
        for one in alive:
            one.process.terminate()

    draws = own_terminal and sys.stderr.isatty()
    try:
        with (
            stoppable(ask if ask_first else None),
            _guard() as guard,
            ranks_killed_at_end() as ranks,
        ):
            store = host_store("127.0.0.1")
            for rank in range(nproc):
                variables = rank_environment(
                    rank, nproc, local_world_size=nproc, address="127.0.0.1", port=store.port
                )
                given = {**variables, **(environment or {})}
                ranks.append(start(rank, program, given, errors=rank > 0 or not draws))
                _put(guard, ranks[-1].process.pid)
                alive.append(ranks[-1])
            code = supervise(ranks, store, grace)
            return 128 + asked[0] if asked and not code else code
    except Stopped as stopped:
        return stopped.exit_code


def resolved(command: Sequence[str]) -> list[str]:
    """The command to run; `realrun` itself needs no PATH. Raises LaunchError if there is none."""
    if not command:
        raise LaunchError("no command is given; write it behind --, as in: -- python train.py")
    if command[0] == "realrun":
        return [sys.executable, "-m", "realrun", *command[1:]]
    if shutil.which(command[0]) is None:
        raise LaunchError(f"command not found: {command[0]}")
    return list(command)


def rank_environment(
    rank: int, world_size: int, *, local_world_size: int, address: str, port: int
) -> dict[str, str]:
    """What torchrun would set for this rank. The store at `address` is the launcher's."""
    threads = max(1, _cores() // world_size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local_world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "GROUP_WORLD_SIZE": str(world_size // local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # Else torch warns in every rank that it cannot find the name of a host.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        # The last words of a rank that is killed are worth having.
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
    }


def host_store(address: str) -> "TCPStore":
    """Serve a store on a free port of this address only, as long as the object lives."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as for the ranks
    from torch.distributed import (  # type: ignore[attr-defined] # noqa: PLC0415 - takes a second
        TCPStore,
    )

    listener = socket.create_server((address, 0), backlog=2 * MAX_RANKS)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


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


def supervise(ranks: Sequence[RankProcess], store: Store, grace: Seconds) -> int:
    """Pass on what the ranks print until all have ended: 0 if all did so with 0, else 1.

    The first that fails is told to the others; those that still run `grace` later are killed.
    Rank 0's stdout is passed on as it is, every other line with its rank in front.
    """
    running = list(ranks)
    first: RankProcess | None = None
    late: list[RankProcess] = []
    deadline = float("inf")
    with _Output(ranks) as output:
        while running:
            output.forward(_TICK)
            ended = [one for one in running if one.process.poll() is not None]
            for one in ended:
                one.kill()  # what it started and left behind
                running.remove(one)
            failed = [one for one in ended if one.process.returncode]
            if failed and first is None:  # of those found at once, one that was killed came first
                first = min(failed, key=lambda one: (one.process.returncode > 0, one.rank))
                deadline = time.monotonic() + grace
                with suppress(RuntimeError):
                    tell(store, first.rank, _ending(first))
                    silent = set(gone(store))
                    late = [one for one in running if one.rank in silent]
                    for one in late:
                        one.kill()
            if time.monotonic() >= deadline:
                late, deadline = [*late, *running], float("inf")
                for one in running:
                    one.kill()
    if first is None:
        return 0
    words = f"error: rank {first.rank} {_ending(first)}"
    if late:
        words += f"; {_named(late)} did not stop and had to be killed"
    print(words, file=sys.stderr, flush=True)  # noqa: T201 - a launcher says how it ended
    return 1


class Stopped(BaseException):
    """A signal told this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


@contextmanager
def stoppable(first: Callable[[int], None] | None = None) -> Generator[None]:
    """Raise Stopped at the first SIGINT, SIGTERM or SIGHUP; more of them change nothing.

    With `first` the first signal calls that instead, and the second raises.
    """
    signals = 0

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if first and signals == 1:
            first(number)
        elif signals == 1 + (first is not None):
            raise Stopped(number)

    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) not in {signal.SIG_IGN, None}
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ranks_killed_at_end() -> Generator[list[RankProcess]]:
    """A list of ranks, to be filled; when the block is left, however, none of them is alive."""
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
def _guard() -> Generator[subprocess.Popen[bytes]]:
    """Run a process that kills the groups put into it if this one dies."""
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


def _put(guard: subprocess.Popen[bytes], group: int) -> None:
    assert guard.stdin is not None
    guard.stdin.write(b"%d\n" % group)
    guard.stdin.flush()


class _Output:
    """The pipes of all ranks."""

    def __init__(self, ranks: Iterable[RankProcess]) -> None:
        self._selector = selectors.DefaultSelector()
        for one in ranks:
            prefix = f"[rank {one.rank}] ".encode()
            for pipe, sink in ((one.process.stdout, sys.stdout), (one.process.stderr, sys.stderr)):
                if pipe:
                    plain = one.rank == 0 and sink is sys.stdout
                    stream = _Stream(pipe, sink, b"" if plain else prefix)
                    self._selector.register(pipe, selectors.EVENT_READ, stream)

    def forward(self, timeout: Seconds) -> bool:
        """Wait for output, and pass on what is there; whether there was any."""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            if not key.data.forward():
                self._selector.unregister(key.fileobj)
                key.data.close()
        return bool(ready)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Pass on what is left. A process that escaped may hold a pipe open: do not wait for it."""
        while kind is None and self._selector.get_map() and self.forward(_TICK):
            pass
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()


class _Stream:
    """One pipe, passed on line by line."""

    def __init__(self, pipe: IO[bytes], sink: TextIO, prefix: bytes) -> None:
        self._pipe, self._sink, self._prefix = pipe, sink, prefix
        self._rest = b""

    def forward(self) -> bool:
        """Pass on the lines that have arrived; False at the end of the pipe."""
        data = os.read(self._pipe.fileno(), _LONGEST_LINE)
        if not data:
            return False
        lines, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if newline:
            self._write(lines + newline)
        if len(self._rest) > _LONGEST_LINE:
            self._end()
        return True

    def close(self) -> None:
        """Pass on what is left, and close the pipe."""
        self._pipe.close()
        self._end()

    def _end(self) -> None:
        """Pass on what has arrived, though it is no whole line."""
        if self._rest:
            self._write(self._rest + b"\n" if self._prefix else self._rest)
            self._rest = b""

    def _write(self, text: bytes) -> None:
        if self._prefix:
            text = b"".join(self._prefix + line + b"\n" for line in text.split(b"\n")[:-1])
        self._sink.flush()
        self._sink.buffer.write(text)
        self._sink.buffer.flush()


def _ending(one: RankProcess) -> str:
    """How a process ended: "was killed by SIGKILL"."""
    code = one.process.returncode
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _named(ranks: Sequence[RankProcess]) -> str:
    """As in "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(one.rank) for one in ranks)}"


def _cores() -> int:
    """How many cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
