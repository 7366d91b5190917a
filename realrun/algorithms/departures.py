"""Notes of departure: who has left a training, after how many steps, and why."""

import atexit
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from realrun.errors import MismatchError, NonFiniteError, RankFailure

_POLL_INTERVAL: Seconds = 1.0
"""How often one that does not wait looks for notes."""

_COUNT = "count"
_ARRIVED = "arrived"
_OURS = tuple(
    f"raised {one.__name__}" for one in (OptionError, MismatchError, NonFiniteError, RankFailure)
)
_SETTLE: Seconds = 0.4
"""How long after a failed collective a note may still come from the rank that caused it."""

_NETWORK = re.compile(r"gloo|nccl|process ?group|connection|peer|timed? ?out|socket", re.IGNORECASE)
"""What errors of collectives say: Gloo's are RuntimeErrors, as are those of a kernel."""

_NUMBERS = itertools.count()
"""Ranks make their algorithms in the same order, as making one is collective."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A rank has left after `steps` local steps; `reason` is empty if it closed in good order."""

    rank: int
    steps: int
    reason: str

    @property
    def is_told(self) -> bool:
        """Whether it left because of another one, which is the one to name."""
        return self.reason.startswith(f"raised {RankFailure.__name__}")

    @property
    def is_ours(self) -> bool:
        """Whether it raised an error of this package."""
        return self.is_told or self.reason.startswith(_OURS)

    def __str__(self) -> str:
        """As in "rank 1 closed after 36 steps"."""
        return f"rank {self.rank} {self.reason or 'closed'} after {self.steps} steps"


class DepartureLog:
    """The notes of some ranks. `steps` counts the local steps of this one."""

    def __init__(self, ranks: Iterable[int], steps: Callable[[], int]) -> None:
        """All ranks of torch.distributed call this, in the same order."""
        number = next(_NUMBERS)
        self.ranks, self._steps = sorted(set(ranks)), steps
        self._me, self._left, self._met = 0, False, 0
        self._polled: Seconds = time.monotonic()
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
        """Leave a note, once: of a store that is gone no rank is left to read it."""
        if self._store is None or self._left:
            return
        self._left = True
        _OPEN.discard(self)
        with suppress(Exception):
            note = Departure(self._me, self._steps(), reason)
            self._store.set(str(self._me), json.dumps(asdict(note)))
            self._store.add(_COUNT, 1)

    def meet(self, what: str, patience: Seconds, *, begun: bool = False) -> None:
        """Wait until all come to `what` after the same number of steps. All ranks call this.

        `begun`: a step that not all optimizers have taken is there besides. Raises RankFailure for
        one that left, comes to something else, took other steps, or has not come in time.
        """
        if self._store is None:
            return
        try:
            odd = self._arrive(what, patience, begun=begun)
        except RuntimeError as error:
            raise lost(what, error, patience) from error
        if odd:
            raise self._failure(what, odd, None)
        self._met += 1

    def _arrive(self, what: str, patience: Seconds, *, begun: bool) -> list[Departure]:
        """Wait for all at a meeting; gives those that are elsewhere."""
        assert self._store is not None
        reason = f"is at {what}" + (" with a step begun" if begun else "")
        note = Departure(self._me, self._steps(), reason)
        alike, everybody = f"{self._met} {reason} {note.steps}", len(self.ranks)
        self._store.set(f"at {self._me}", json.dumps([self._met, asdict(note)]))
        self._store.add(alike, 1)
        self._store.add(_ARRIVED, 1)
        limit, pause = time.monotonic() + patience, 0.001
        while True:
            left = self.notes()  # before: who has passed this meeting may leave
            if self._store.add(_ARRIVED, 0) >= everybody * (self._met + 1):
                break
            if left:
                return left
            if time.monotonic() > limit:
                raise self._not_come(what, patience)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        if self._store.add(alike, 0) == everybody:
            return []
        here = (note.steps, reason)
        return [one for one in self._waiting() if (one.steps, one.reason) != here]

    def _not_come(self, what: str, patience: Seconds) -> RankFailure:
        there = {one.rank for one in self._waiting()}
        missing = tuple(rank for rank in self.ranks if rank not in there)
        return RankFailure(
            f"{what} failed: rank {', '.join(map(str, missing[:8]))} has not come within"
            f" {patience:g} s; rank {self._me} has taken {self._steps()} steps",
            ranks=missing,
            op=what,
        )

    def _waiting(self) -> list[Departure]:
        """Who is at a meeting that this rank has not passed."""
        assert self._store is not None
        if self._store.add(_ARRIVED, 0) <= len(self.ranks) * self._met:
            return []
        found = []
        for rank in self.ranks:
            if self._store.check([f"at {rank}"]):
                number, note = json.loads(self._store.get(f"at {rank}"))
                found += [Departure(**note)] if number == self._met else []
        return found

    def steps_of_all(self) -> list[int]:
        """The steps of all ranks, if all are at a meeting that this one has not passed."""
        found = self._waiting()
        return [note.steps for note in found] if len(found) == len(self.ranks) else []

    def notes(self) -> list[Departure]:
        """Those that others have left so far."""
        return self._read() or []

    def _read(self) -> list[Departure] | None:
        """Those that others have left; None if the store is gone, or is another one by now."""
        if self._store is None:
            return []
        with suppress(Exception):
            if not self._store.add(_COUNT, 0):
                return None if self._left else []
            others = [rank for rank in self.ranks if rank != self._me]
            left = [rank for rank in others if self._store.check([str(rank)])]
            return [Departure(**json.loads(self._store.get(str(rank)))) for rank in left]
        return None

    def _absent(self, behind: Callable[[int], bool]) -> list[Departure]:
        """Who has left and raised, or has left or waits elsewhere after steps that are behind."""
        notes = [note for note in self.notes() if not note.is_told]
        absent = [note for note in notes if note.reason or behind(note.steps)]
        with suppress(Exception):
            absent += (
                [note for note in self._waiting() if behind(note.steps)] if self._store else []
            )
        return absent

    def check(self, what: str, step: int, *, round: int | None = None) -> None:  # noqa: A002
        """Raise RankFailure if someone left who will not come to what was launched after `step`."""
        if absent := self._absent(lambda steps: steps < step):
            raise self._failure(what, absent, round)

    def poll(self) -> None:
        """Raise RankFailure if someone has raised; once a second, as between two averages.

        Not for errors of this package, which others find themselves, or at the next average.
        """
        now = time.monotonic()
        if self._store is None or now < self._polled + _POLL_INTERVAL:
            return
        self._polled = now
        if absent := [one for one in self.notes() if one.reason and not one.is_ours]:
            raise self._failure("training", absent, None)

    def cause(
        self,
        what: str,
        *,
        round: int | None = None,  # noqa: A002 - what it is called everywhere here
        foreign: bool = False,
    ) -> RankFailure | None:
        """The error for a collective that failed, if the note of another rank explains it.

        One of others, `foreign`, needs ranks that are elsewhere after the same steps, too.
        """
        limit = time.monotonic() + _SETTLE
        while self._store is not None:
            here = self._steps()
            if absent := self._absent(lambda steps: foreign or steps != here):  # noqa: B023 - used at once
                return self._failure(what, absent, round)
            if time.monotonic() > limit:
                break
            time.sleep(_SETTLE / 10)
        return None

    def compare(self, tau: int, patience: Seconds) -> None:
        """Wait until all have left; raise RankFailure for one that raised or took other rounds.

        A store that is gone has been taken away by a process that ended: no rank is left.
        """
        limit = time.monotonic() + patience
        while self._store is not None:
            notes = self._read()
            if notes is None:
                break
            rounds = self._steps() // tau
            other = [note for note in notes if note.reason or note.steps // tau != rounds]
            if other:
                raise self._failure("closing", other, rounds)
            if len(notes) == len(self.ranks) - 1 or time.monotonic() > limit:
                break
            time.sleep(0.01)

    def _failure(self, what: str, absent: list[Departure], round: int | None) -> RankFailure:  # noqa: A002
        first = min(absent, key=lambda note: (note.is_told, not note.reason, note.rank))
        return RankFailure(
            f"{what} failed: {first}; rank {self._me} has taken {self._steps()}",
            ranks=(first.rank,),
            op=what,
            round=round,
        )


_OPEN: WeakSet[DepartureLog] = WeakSet()


@atexit.register
def _end() -> None:
    """The process ends, and algorithms were not closed."""
    error = getattr(sys, "last_value", None)
    reason = raised(error) if error is not None else ""
    for one in list(_OPEN):
        if not reason and one.now():
            sys.stderr.write(
                "a training ended without finish(): its last steps are not averaged, and every rank"
                " holds another model; call finish(), or train within a `with` block\n"
            )
        one.leave(reason)


def of_network(error: BaseException) -> bool:
    """Whether a collective has failed, for which another rank may be the cause."""
    if not isinstance(error, RuntimeError | TimeoutError):
        return False
    return isinstance(error, DistError) or bool(_NETWORK.search(str(error)))


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
        f"{what} failed: a rank died, took fewer steps, or came more than deadline={deadline:g} s"
        f" late ({reason})",
        op=what,
        round=round,
    )
