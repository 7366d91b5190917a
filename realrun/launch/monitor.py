"""Watch ranks until all have ended; report the first failure to the others."""

import json
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Protocol, Self, TextIO

from co2sim.common.units import Seconds
from realrun.errors import RankFailure, named_ranks
from realrun.launch.processes import RankProcess

FAILURES = "realrun/failures"
"""Counts the failures told so far; number i stands under `realrun/failure/i` as JSON."""

_PERIOD = 0.5
_SILENT = 3 * _PERIOD
"""A rank without a heartbeat for this long counts as stopped."""


class Store(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def add(self, key: str, value: int) -> int: ...  # noqa: D102
    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Place:
    """What a stream is doing: `number` counts issued ops from 0."""

    number: int
    round: int
    op: str

    def __str__(self) -> str:
        """`'average' of round 3`."""
        return f"{self.op!r} of round {self.round}"


def report_failure(
    store: Store, rank: int, reason: str, *, silent: bool = False, said: bool = False
) -> None:
    """Report to all that `rank` failed, and how: "was killed by SIGKILL".

    A silent rank cannot react any more: the launcher need not wait for it. One that has `said` what
    is wrong with its input needs no other to say so, too.
    """
    index = store.add(f"{FAILURES}/reserved", 1) - 1
    report = {"rank": rank, "reason": reason, "silent": silent, "said": said}
    store.set(f"realrun/failure/{index}", json.dumps(report))
    store.add(FAILURES, 1)


def failed_ranks(store: Store) -> list[int]:
    """The ranks that were reported to be silent."""
    reports = [
        json.loads(store.get(f"realrun/failure/{index}")) for index in range(store.add(FAILURES, 0))
    ]
    return [report["rank"] for report in reports if report["silent"]]


class Heartbeats:
    """The heartbeats of ranks, seen from the launcher."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[int, tuple[bytes, float]] = {}

    def silent(self, rank: int) -> float:
        """Seconds since the heart of a rank was first seen as it is; 0 if it has none."""
        key, now = _heart(rank), time.monotonic()
        try:
            beat = self._store.get(key) if self._store.check([key]) else b""
        except RuntimeError:
            return 0.0
        if not beat or self._seen.get(rank, (b"", now))[0] != beat:
            self._seen[rank] = beat, now
        return now - self._seen[rank][1]


def _heart(rank: int) -> str:
    return f"realrun/heart/{rank}"


class Watch:
    """The heartbeat of this rank, and what it knows of the others."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        """Start the heartbeat, on its own connection: a store serves one request at a time."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._places: dict[str, Place] = {}
        self._left: Place | None = None
        self._beats = 0
        self._stop = threading.Event()
        self._listener: Callable[[RankFailure], None] = lambda _: None
        self.failure: RankFailure | None = None
        self._beat()
        self._thread = threading.Thread(target=self._loop, name="watch", daemon=True)
        self._thread.start()

    def enter(self, stream: str, place: Place) -> None:
        """The stream starts this op."""
        self._places[stream] = place

    def exit(self, stream: str) -> None:
        """The stream's op has ended."""
        self._left = self._places.pop(stream, None)

    def listen(self, listener: Callable[[RankFailure], None]) -> None:
        """Call `listener` when a failure is reported, at once if there is one already."""
        self._listener = listener
        if self.failure:
            listener(self.failure)

    def stop(self) -> None:
        """Stop the heartbeat."""
        self._stop.set()
        self._thread.join()

    def raised(self, place: Place, error: BaseException, *, said: bool = False) -> RankFailure:
        """This rank's own work failed: report it. `said`: this rank itself tells the user."""
        reason = f"raised {type(error).__name__} in {place}: {_one_line(error)}"
        return self._fail([self._rank], reason, place, said=said)

    def reported(self) -> RankFailure | None:
        """The first failure that any rank has reported; it is kept."""
        if self.failure or not self._quietly(self._store.add, FAILURES, 0):
            return self.failure
        report = json.loads(self._quietly(self._store.get, "realrun/failure/0") or "{}")
        if report:
            here = next(iter(self._places.values()), None)
            self.failure = failure(
                [report["rank"]],
                report["reason"],
                here or self._left,
                between=here is None,
                said=report["said"],
            )
        return self.failure

    def lost(self, place: Place, members: Iterable[int], error: BaseException) -> RankFailure:
        """A collective did not end. Find out which rank is at fault, and report it.

        That is, in this order: a rank whose failure is already reported; members without a
        heartbeat; members that are behind; members that are at another op.
        """
        limit = time.monotonic() + _SILENT
        while time.monotonic() < limit:
            if reported := self.reported():
                return reported
            time.sleep(_PERIOD / 5)
        before = self._hearts()
        time.sleep(_SILENT)
        after = self._hearts()
        others = [rank for rank in members if rank != self._rank]
        silent = [
            r for r in others if before.get(r, {}).get("beat") == after.get(r, {}).get("beat")
        ]
        if silent:
            return self._fail(silent, "gives no sign of life", place, silent=True)
        ops = {rank: [Place(*p) for p in after[rank].get("at", {}).values()] for rank in others}
        away = [r for r, at_ in ops.items() if all(near.number != place.number for near in at_)]
        behind = [r for r in away if ops[r] and all(near.number < place.number for near in ops[r])]
        for absent in behind[:1] or away[:1]:
            where = (
                f"in {' and '.join(map(str, ops[absent]))}" if ops[absent] else "between two ops"
            )
            return self._fail(behind or away, f"is not there: it is {where}", place)
        return self._fail([], f"{place.op!r} failed: {_one_line(error)}", place)

    def missing(self, ranks: Sequence[int], reason: str) -> RankFailure:
        """These ranks are not there: report it."""
        return self._fail(ranks, reason, None, silent=True)

    def _fail(
        self,
        ranks: Sequence[int],
        reason: str,
        place: Place | None,
        *,
        silent: bool = False,
        said: bool = False,
    ) -> RankFailure:
        for rank in ranks or [self._rank]:
            report = partial(report_failure, self._store, rank, reason, silent=silent, said=said)
            self._quietly(report)
        self.failure = self.failure or failure(ranks, reason, place, said=said)
        return self.failure

    def _hearts(self) -> dict[int, Mapping[str, Any]]:
        hearts = {}
        for rank in range(self._world_size):
            if self._quietly(self._store.check, [_heart(rank)]):
                text = self._quietly(self._store.get, _heart(rank))
                hearts[rank] = json.loads(text) if text else {}
        return hearts

    def _loop(self) -> None:
        while not self._stop.wait(_PERIOD):
            self._beat()
            if not self.failure and (reported := self.reported()):
                self._listener(reported)

    def _beat(self) -> None:
        self._beats += 1
        places = {s: (p.number, p.round, p.op) for s, p in list(self._places.items())}
        heart = json.dumps({"beat": self._beats, "at": places})
        self._quietly(self._store.set, _heart(self._rank), heart)

    def _quietly(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """None if the store does not answer: its host has died, and nothing can be reported."""
        try:
            return ask(*arguments)
        except Exception:  # noqa: BLE001 - torch raises several kinds, all meaning the same here
            return None


def failure(
    ranks: Sequence[int],
    reason: str,
    place: Place | None,
    *,
    between: bool = False,
    said: bool = False,
) -> RankFailure:
    """The error to raise here: who failed and how, and where this rank was.

    `between`: it had left that place and was in no other yet.
    """
    who = named_ranks(ranks) if ranks else ""
    here = f"; stopped {'after' if between else 'in'} {place}" if place else ""
    return RankFailure(
        f"{who} {reason}{here}".strip(),
        ranks=tuple(ranks),
        op=place.op if place else None,
        round=place.round if place else None,
        said=said,
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


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
        for rank in ranks:
            prefix = f"[rank {rank.rank}] ".encode()
            for pipe, sink in (
                (rank.process.stdout, sys.stdout),
                (rank.process.stderr, sys.stderr),
            ):
                if pipe:
                    plain = sink is sys.stdout and rank.rank == 0
                    errors = {} if sink is sys.stdout else self.errors
                    stream = _Stream(pipe, sink, b"" if plain else prefix, (rank.rank, errors))
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
        self, pipe: IO[bytes], sink: TextIO, prefix: bytes, first: tuple[int, dict[bytes, int]]
    ) -> None:
        self._pipe, self._sink, self._prefix = pipe, sink, prefix
        self._rank, self._errors = first
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
"""Exit code of every command here, and of most others, for input that it cannot use."""


def supervise(
    ranks: Sequence[RankProcess],
    store: Store,
    grace: Seconds,
    stopping: Callable[[], object] = lambda: False,
    cut: Callable[[], bool] = lambda: False,
) -> int:
    """Pass on what the ranks print until all have ended: 0 if all did so with 0, else 1 or 2.

    It is 2, as of a command alone, where all that failed refused what they were given: then one of
    them has said why, and nothing is added.

    The first failure is reported to the others; ranks that still run `grace` later are killed. So
    is one without a heartbeat once others have ended, who would have waited for it.
    Rank 0's stdout is passed on as it is, every other line with its rank in front. Once the ranks
    are `stopping`, by SIGTERM, one that ends by it has not failed: it was not ready yet to do
    so in good order, and the others, which need it, end with it. Where `cut` says that a guard has
    killed the ranks, no rank is to blame, and the code is 1.
    """
    running = list(ranks)
    first: RankProcess | None = None
    late: list[RankProcess] = []
    frozen: list[RankProcess] = []
    codes: set[int] = set()
    deadline, hearts = float("inf"), Heartbeats(store)
    with RankOutput(ranks) as output:
        while running:
            output.forward(TICK)
            ended = _ended(running)
            if ended and cut():
                return 1
            if stopping() and any(rank.process.returncode == -signal.SIGTERM for rank in ended):
                _kill(running)
                print(STOPPED, file=sys.stderr)  # noqa: T201 - as below
                return int(first is not None)
            failed = [rank for rank in ended if rank.process.returncode]
            codes |= {rank.process.returncode for rank in failed}
            if failed and first is None:  # of those found at once, one that was killed came first
                first = min(failed, key=lambda rank: (rank.process.returncode > 0, rank.rank))
                deadline = time.monotonic() + grace
                with suppress(RuntimeError):
                    report_failure(store, first.rank, ending(first))
                    late = _killed(running, failed_ranks(store))
            frozen = frozen or _frozen(running, ranks, hearts)
            if time.monotonic() >= deadline:
                late, deadline = [*late, *running], float("inf")
                _kill(running)
    if first is None:
        return 0
    heard = output.errors or any(rank.process.stderr is None for rank in ranks)  # on the terminal
    if codes == {_WRONG_INPUT} and not late and heard:
        return _WRONG_INPUT
    _say(first, frozen, late)
    return 1


def _say(first: RankProcess, frozen: Sequence[RankProcess], late: Sequence[RankProcess]) -> None:
    """How it ended: who failed first, and who had to be killed."""
    words = f"error: rank {first.rank} {ending(first)}"
    if first in frozen:
        silent = f"gave no sign of life for {SILENT:g} s and had to be killed"
        words = f"error: {named_ranks([rank.rank for rank in frozen])} {silent}"
    if late:
        words += f"; {named_ranks([rank.rank for rank in late])} did not stop and had to be killed"
    print(words, file=sys.stderr, flush=True)  # noqa: T201 - a launcher says how it ended


def _frozen(
    running: Sequence[RankProcess], ranks: Sequence[RankProcess], hearts: Heartbeats
) -> list[RankProcess]:
    """Kill the ranks without a heartbeat, if others have ended."""
    if len(running) == len(ranks):
        return []
    return _killed(running, [rank.rank for rank in running if hearts.silent(rank.rank) > SILENT])


def _ended(running: list[RankProcess]) -> list[RankProcess]:
    """Take those that have ended out of the list, and kill what they started and left behind."""
    ended = [rank for rank in running if rank.process.poll() is not None]
    for rank in ended:
        rank.kill()
        running.remove(rank)
    return ended


def _killed(running: Sequence[RankProcess], numbers: Sequence[int]) -> list[RankProcess]:
    """Kill the ranks of these numbers."""
    killed = [rank for rank in running if rank.rank in numbers]
    _kill(killed)
    return killed


def _kill(ranks: Sequence[RankProcess]) -> None:
    for rank in ranks:
        rank.kill()


def ending(rank: RankProcess) -> str:
    """How a process ended: "was killed by SIGKILL"."""
    code = rank.process.returncode
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
