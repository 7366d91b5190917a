"""Which ranks are alive, and where they are: heartbeats and failures in a store that all can read.

Every rank writes twice a second what its streams are doing. The first that fails writes so, and all
others stop. A launcher that sees a rank die reports it in the same way.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from realrun.errors import RankFailure

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


def tell(store: Store, rank: int, reason: str, *, silent: bool = False, said: bool = False) -> None:
    """Report to all that `rank` failed, and how: "was killed by SIGKILL".

    A silent rank cannot react any more: the launcher need not wait for it. One that has `said` what
    is wrong with its input needs no other to say so, too.
    """
    index = store.add(f"{FAILURES}/reserved", 1) - 1
    told = {"rank": rank, "reason": reason, "silent": silent, "said": said}
    store.set(f"realrun/failure/{index}", json.dumps(told))
    store.add(FAILURES, 1)


def gone(store: Store) -> list[int]:
    """The ranks that were reported to be silent."""
    told = [
        json.loads(store.get(f"realrun/failure/{index}")) for index in range(store.add(FAILURES, 0))
    ]
    return [one["rank"] for one in told if one["silent"]]


class Hearts:
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
        """Start the heartbeat, on a connection of its own: a store serves one request at a time."""
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

    def said(self) -> bool:
        """Whether the first failure that was reported is of a rank that tells it itself."""
        return bool((self.failure or self._told()) and self.failure and self.failure.said)

    def lost(self, place: Place, members: Iterable[int], error: BaseException) -> RankFailure:
        """A collective did not end. Find out which rank is at fault, and report it.

        That is, in this order: a rank whose failure is already reported; members without a
        heartbeat; members that are behind; members that are at another op.
        """
        limit = time.monotonic() + _SILENT
        while time.monotonic() < limit:
            if self.failure or self._told():
                break
            time.sleep(_PERIOD / 5)
        if self.failure:
            return self.failure
        before = self._hearts()
        time.sleep(_SILENT)
        after = self._hearts()
        others = [rank for rank in members if rank != self._rank]
        silent = [
            r for r in others if before.get(r, {}).get("beat") == after.get(r, {}).get("beat")
        ]
        if silent:
            return self._fail(silent, "gives no sign of life", place, silent=True)
        at = {rank: [Place(*p) for p in after[rank].get("at", {}).values()] for rank in others}
        away = [r for r, at_ in at.items() if all(one.number != place.number for one in at_)]
        behind = [r for r in away if at[r] and all(one.number < place.number for one in at[r])]
        for absent in behind[:1] or away[:1]:
            where = f"in {' and '.join(map(str, at[absent]))}" if at[absent] else "between two ops"
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
            self._quietly(
                lambda rank=rank: tell(self._store, rank, reason, silent=silent, said=said)  # type: ignore[misc]
            )
        self.failure = self.failure or failure(ranks, reason, place, said=said)
        return self.failure

    def _hearts(self) -> dict[int, Mapping[str, Any]]:
        found = {}
        for rank in range(self._world_size):
            key = _heart(rank)
            if self._quietly(lambda key=key: self._store.check([key])):  # type: ignore[misc]
                text = self._quietly(lambda key=key: self._store.get(key))  # type: ignore[misc]
                found[rank] = json.loads(text) if text else {}
        return found

    def _loop(self) -> None:
        while not self._stop.wait(_PERIOD):
            self._beat()
            if not self.failure and self._told():
                assert self.failure is not None
                self._listener(self.failure)

    def _beat(self) -> None:
        self._beats += 1
        places = {s: (p.number, p.round, p.op) for s, p in list(self._places.items())}
        heart = json.dumps({"beat": self._beats, "at": places})
        self._quietly(lambda: self._store.set(_heart(self._rank), heart))

    def _told(self) -> bool:
        """Whether a failure was reported; keeps the first."""
        if not self._quietly(lambda: self._store.add(FAILURES, 0)):
            return False
        told = json.loads(self._quietly(lambda: self._store.get("realrun/failure/0")) or "{}")
        if not told:
            return False
        here = next(iter(self._places.values()), None)
        place, between = here or self._left, here is None
        self.failure = self.failure or failure(
            [told["rank"]], told["reason"], place, between=between, said=told["said"]
        )
        return True

    def _quietly(self, ask: Callable[[], Any]) -> Any:
        """None if the store does not answer: its host has died, and nothing can be reported."""
        try:
            return ask()
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
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
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
