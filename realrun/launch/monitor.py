"""Watch ranks until all have ended; report the first failure to the others."""

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import IO, Self, TextIO

from co2sim.common.units import Seconds
from realrun.launch.heartbeat import Hearts, Store, gone, tell
from realrun.launch.processes import RankProcess

TICK: Seconds = 0.05
"""How long a launcher waits for output before it looks after its processes again."""

_LONGEST_LINE = 1 << 16
_ERROR = b"error: "


class RankOutput:
    """The pipes of all ranks.

    An error that one rank has told is not told again by others: what is wrong with a command is so
    on all of them. `errors` holds these lines.
    """

    def __init__(self, ranks: Iterable[RankProcess]) -> None:
        """The stdout of rank 0 is passed on as it is."""
        self._selector = selectors.DefaultSelector()
        self.errors: dict[bytes, int] = {}
        for one in ranks:
            prefix = f"[rank {one.rank}] ".encode()
            for pipe, sink in ((one.process.stdout, sys.stdout), (one.process.stderr, sys.stderr)):
                if pipe:
                    plain = sink is sys.stdout and one.rank == 0
                    errors = {} if sink is sys.stdout else self.errors
                    stream = _Stream(pipe, sink, b"" if plain else prefix, (one.rank, errors))
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
        """Pass on what is left; do not wait for a process outside the group that holds a pipe."""
        while kind is None and self._selector.get_map() and self.forward(TICK):
            pass
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()


class _Stream:
    """One pipe, passed on line by line."""

    def __init__(
        self, pipe: IO[bytes], sink: TextIO, prefix: bytes, told: tuple[int, dict[bytes, int]]
    ) -> None:
        self._pipe, self._sink, self._prefix = pipe, sink, prefix
        self._rank, self._errors = told
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
        """Pass on what has arrived, even if the line has no end yet."""
        if self._rest:
            self._write(self._rest + b"\n" if self._prefix else self._rest)
            self._rest = b""

    def _write(self, text: bytes) -> None:
        if self._prefix:
            lines = text.split(b"\n")[:-1]
            text = b"".join(self._prefix + line + b"\n" for line in lines if self._is_news(line))
        self._sink.flush()
        self._sink.buffer.write(text)
        self._sink.buffer.flush()

    def _is_news(self, line: bytes) -> bool:
        """Whether no other rank has told this error, if it is one; remembers it."""
        return not line.startswith(_ERROR) or (
            self._errors.setdefault(line, self._rank) == self._rank
        )


SILENT: Seconds = 30.0
"""A rank whose heart has stopped for so long is killed, once another one has ended."""

STOPPED = "stopped; what had finished is kept"

_WRONG_INPUT = 2
"""Exit code of every command of ours, and of most others, for input that it cannot use."""


def supervise(
    ranks: Sequence[RankProcess],
    store: Store,
    grace: Seconds,
    asked: Callable[[], object] = lambda: False,
    cut: Callable[[], bool] = lambda: False,
) -> int:
    """Pass on what the ranks print until all have ended: 0 if all did so with 0, else 1 or 2.

    It is 2, as of a command alone, where all that failed refused what they were given: then one of
    them has said why, and nothing is added.

    The first failure is reported to the others; ranks that still run `grace` later are killed. So
    is one without a heartbeat once others have ended, who would have waited for it.
    Rank 0's stdout is passed on as it is, every other line with its rank in front. Once the ranks
    were `asked` to end by SIGTERM, one that ends by it has not failed: it was not ready yet to do
    so in good order, and the others, which need it, end with it. Where `cut` says that a guard has
    killed the ranks, no rank is to blame, and the code is 1.
    """
    running = list(ranks)
    first: RankProcess | None = None
    late: list[RankProcess] = []
    frozen: list[RankProcess] = []
    codes: set[int] = set()
    deadline, hearts = float("inf"), Hearts(store)
    with RankOutput(ranks) as output:
        while running:
            output.forward(TICK)
            ended = _ended(running)
            if ended and cut():
                return 1
            if asked() and any(one.process.returncode == -signal.SIGTERM for one in ended):
                _kill(running)
                print(STOPPED, file=sys.stderr)  # noqa: T201 - as below
                return int(first is not None)
            failed = [one for one in ended if one.process.returncode]
            codes |= {one.process.returncode for one in failed}
            if failed and first is None:  # of those found at once, one that was killed came first
                first = min(failed, key=lambda one: (one.process.returncode > 0, one.rank))
                deadline = time.monotonic() + grace
                with suppress(RuntimeError):
                    tell(store, first.rank, ending(first))
                    late = _killed(running, gone(store))
            frozen = frozen or _frozen(running, ranks, hearts)
            if time.monotonic() >= deadline:
                late, deadline = [*late, *running], float("inf")
                _kill(running)
    if first is None:
        return 0
    told = output.errors or any(one.process.stderr is None for one in ranks)  # on the terminal
    if codes == {_WRONG_INPUT} and not late and told:
        return _WRONG_INPUT
    _say(first, frozen, late)
    return 1


def _say(first: RankProcess, frozen: Sequence[RankProcess], late: Sequence[RankProcess]) -> None:
    """How it ended: who failed first, and who had to be killed."""
    words = f"error: rank {first.rank} {ending(first)}"
    if first in frozen:
        silent = f"gave no sign of life for {SILENT:g} s and had to be killed"
        words = f"error: {_named(frozen)} {silent}"
    if late:
        words += f"; {_named(late)} did not stop and had to be killed"
    print(words, file=sys.stderr, flush=True)  # noqa: T201 - a launcher says how it ended


def _frozen(
    running: Sequence[RankProcess], ranks: Sequence[RankProcess], hearts: Hearts
) -> list[RankProcess]:
    """Kill the ranks without a heartbeat, if others have ended."""
    if len(running) == len(ranks):
        return []
    return _killed(running, [one.rank for one in running if hearts.silent(one.rank) > SILENT])


def _ended(running: list[RankProcess]) -> list[RankProcess]:
    """Take those that have ended out of the list, and kill what they started and left behind."""
    found = [one for one in running if one.process.poll() is not None]
    for one in found:
        one.kill()
        running.remove(one)
    return found


def _killed(running: Sequence[RankProcess], numbers: Sequence[int]) -> list[RankProcess]:
    """Kill the ranks of these numbers."""
    found = [one for one in running if one.rank in numbers]
    _kill(found)
    return found


def _kill(ranks: Sequence[RankProcess]) -> None:
    for one in ranks:
        one.kill()


def ending(one: RankProcess) -> str:
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
