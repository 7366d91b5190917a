"""Who has left an algorithm, and after how many steps: told to the others through torch's store.

A collective that waits for a worker which has left learns so only at its deadline, and not why. So
every rank leaves a note when it closes, raises, or ends, and those who wait look for notes.
"""

import atexit
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from co2sim.units import Seconds
from realrun.errors import RankFailure

PERIOD: Seconds = 0.5
"""How often one that waits looks for notes."""

_COUNT = "count"
_SETTLE: Seconds = 0.4
"""How long after a failed collective a note may still come from the rank that caused it."""

_NUMBERS = itertools.count()
"""Ranks make their algorithms in the same order, as making one is collective."""


@dataclass(frozen=True, slots=True)
class Note:
    """A rank has left after `steps` local steps; `reason` is empty if it closed in good order."""

    rank: int
    steps: int
    reason: str

    @property
    def is_told(self) -> bool:
        """Whether it left because of another one, which is the one to name."""
        return self.reason.startswith(f"raised {RankFailure.__name__}")

    def __str__(self) -> str:
        """As in "rank 1 closed after 36 steps"."""
        return f"rank {self.rank} {self.reason or 'closed'} after {self.steps} steps"


class Notices:
    """The notes of some ranks. `steps` counts the local steps of this one."""

    def __init__(self, ranks: Iterable[int], steps: Callable[[], int]) -> None:
        """All ranks of torch.distributed call this, in the same order."""
        number = next(_NUMBERS)
        self.ranks, self._steps = sorted(set(ranks)), steps
        self._me, self._left = 0, False
        self._store: PrefixStore | None = None
        if len(self.ranks) > 1:
            self._me = dist.get_rank()
            own = _get_default_store().clone()  # type: ignore[attr-defined] # of PrefixStore
            self._store = PrefixStore(f"realrun/left/{number}", own)
            _OPEN.add(self)

    def now(self) -> int:
        """Local steps that this rank has taken."""
        return self._steps()

    def leave(self, reason: str = "") -> None:
        """Leave a note, once: a store that is gone has nobody left to tell."""
        if self._store is None or self._left:
            return
        self._left = True
        _OPEN.discard(self)
        with suppress(Exception):
            note = Note(self._me, self._steps(), reason)
            self._store.set(str(self._me), json.dumps(asdict(note)))
            self._store.add(_COUNT, 1)

    def notes(self) -> list[Note]:
        """Those that others have left so far."""
        if self._store is None:
            return []
        with suppress(Exception):
            if self._store.add(_COUNT, 0):
                others = [rank for rank in self.ranks if rank != self._me]
                left = [rank for rank in others if self._store.check([str(rank)])]
                return [Note(**json.loads(self._store.get(str(rank)))) for rank in left]
        return []

    def look(self, what: str, step: int, *, round: int | None = None) -> None:  # noqa: A002
        """Raise RankFailure if someone left who will not come to what was launched after `step`."""
        notes = [note for note in self.notes() if not note.is_told]
        absent = [note for note in notes if note.steps < step or note.reason]
        if absent:
            raise self._failure(what, absent, round)

    def cause(
        self,
        what: str,
        *,
        round: int | None = None,  # noqa: A002 - what it is called everywhere here
    ) -> RankFailure | None:
        """The error for a collective that failed, if somebody's note explains it."""
        limit = time.monotonic() + _SETTLE
        while self._store is not None:
            here = self._steps()
            notes = [note for note in self.notes() if not note.is_told]
            absent = [note for note in notes if note.steps != here or note.reason]
            if absent:
                return self._failure(what, absent, round)
            if time.monotonic() > limit:
                break
            time.sleep(_SETTLE / 10)
        return None

    def compare(self, tau: int, patience: Seconds) -> None:
        """Wait until all have left; raise RankFailure for one that raised or took other rounds."""
        limit = time.monotonic() + patience
        while self._store is not None:
            notes = self.notes()
            rounds = self._steps() // tau
            other = [note for note in notes if note.reason or note.steps // tau != rounds]
            if other:
                raise self._failure("closing", other, rounds)
            if len(notes) == len(self.ranks) - 1 or time.monotonic() > limit:
                break
            time.sleep(0.01)

    def _failure(self, what: str, absent: list[Note], round: int | None) -> RankFailure:  # noqa: A002
        first = min(absent, key=lambda note: (note.is_told, not note.reason, note.rank))
        return RankFailure(
            f"{what} failed: {first}; rank {self._me} has taken {self._steps()}",
            ranks=(first.rank,),
            op=what,
            round=round,
        )


_OPEN: WeakSet[Notices] = WeakSet()


@atexit.register
def _end() -> None:
    """The process ends, and algorithms were not closed."""
    error = getattr(sys, "last_value", None)
    reason = raised(error) if error is not None else ""
    for one in list(_OPEN):
        one.leave(reason)


def raised(error: BaseException) -> str:
    """As in "raised ValueError (bad sample)"."""
    words = " ".join(str(error).split())[:200]
    return f"raised {type(error).__name__}" + (f" ({words})" if words else "")


def lost(
    what: str,
    error: BaseException,
    deadline: float,
    *,
    round: int | None = None,  # noqa: A002 - what it is called everywhere here
) -> RankFailure:
    """The error for a collective that failed for no known reason: a peer died, or did not come."""
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return RankFailure(
        f"{what} failed: a rank died, took fewer steps, or came more than {deadline:g} s late"
        f" ({reason})",
        op=what,
        round=round,
    )
