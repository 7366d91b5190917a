"""What ranks print, passed on line by line with the number of the rank in front."""

import os
import selectors
import sys
from collections.abc import Iterable
from typing import IO, Self, TextIO

from co2sim.units import Seconds
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
