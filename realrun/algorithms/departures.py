"""Notes of departure: who has left a training, after how many steps, and why.

They stand in the store of torch.distributed. A `TCPStore` waits for ever for a server that is
stopped, so that a thread asks it. Once a second the same thread writes a sign of life, and reads
notes. Nothing is concluded from signs while training continues: who is silent matters only where a
collective has failed or took too long.
"""

import atexit
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from realrun.errors import MismatchError, NonFiniteError, RankFailure, named_ranks

Answer = TypeVar("Answer")

SIGN_INTERVAL: Seconds = 1.0
"""Between two signs of life of a rank."""

_ANSWER_LIMIT: Seconds = 5.0
"""How long a store may take to answer; it does so in less than 1 ms mostly."""


class StoreError(RuntimeError):
    """The store is gone, or does not answer."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life: how many there were, local steps, and what this rank waits for, if so."""

    count: int
    steps: int
    waits_for: str


class RankStore:
    """A part of the store of torch.distributed, and the thread that asks it.

    `gone`: the store has ended. `signs` counts the signs of life that this rank has written.
    """

    def __init__(
        self,
        prefix: str,
        sign: Callable[[], tuple[int, str]],
        read: Callable[[PrefixStore], None],
    ) -> None:
        """Once a second the thread writes what `sign` gives (see Sign), and calls `read`."""
        default = _get_default_store()
        self._store = PrefixStore(prefix, default.clone())  # type: ignore[attr-defined] # of PrefixStore
        self.rank, self.gone, self.signs = dist.get_rank(), False, 0
        self._sign, self._read = sign, read
        while isinstance(default, PrefixStore):
            default = default.underlying_store
        self._over_network = isinstance(default, TCPStore)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.held_by_rank_0 = self._over_network and not agent
        self._calls: SimpleQueue[tuple[Callable[[PrefixStore], Any], Future[Any]] | None]
        self._calls, self._unanswered = SimpleQueue(), Future[Any]()
        self._unanswered.set_result(None)
        self._thread = threading.Thread(target=self._serve, name="rank store", daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[PrefixStore], Answer]) -> Answer:
        """What `call` gives. Raises StoreError."""
        if self.gone:
            raise StoreError("it is gone")
        if not self._unanswered.done():
            raise StoreError("it does not answer")
        answer: Future[Answer] = Future()
        self._calls.put((call, answer))
        try:
            return answer.result(_ANSWER_LIMIT)
        except TimeoutError as error:
            self._unanswered = answer
            raise StoreError("it does not answer") from error
        except RuntimeError as error:
            raise StoreError("it is gone") from error

    def stop(self) -> None:
        """No call comes any more."""
        self.gone = True
        self._calls.put(None)

    def close(self) -> None:
        """End the thread: none may be within a call of torch where the interpreter ends."""
        self.stop()
        self._thread.join(SIGN_INTERVAL)

    def signs_of(self, ranks: Iterable[int]) -> dict[int, Sign]:
        """The last sign of life of each rank that has given one. Raises StoreError."""

        def read(store: PrefixStore) -> dict[int, Sign]:
            there = [rank for rank in ranks if store.check([f"sign {rank}"])]
            return {rank: Sign(*json.loads(store.get(f"sign {rank}"))) for rank in there}

        return self.ask(read)

    def _serve(self) -> None:
        due = time.monotonic()
        while True:
            try:
                request = self._calls.get(timeout=max(0.0, due - time.monotonic()))
            except Empty:
                due = time.monotonic() + SIGN_INTERVAL
                try:
                    self._each_second()
                except RuntimeError:
                    self.gone = True
                continue
            if request is None:
                return
            call, answer = request
            try:
                answer.set_result(call(self._store))
            except Exception as error:  # noqa: BLE001 - it is raised where the question was asked
                self.gone |= isinstance(error, RuntimeError)
                answer.set_exception(error)

    def _each_second(self) -> None:
        if self.gone:
            return
        if self._over_network:  # a FileStore would grow with every sign
            text = json.dumps([self.signs + 1, *self._sign()])
            self._store.set(f"sign {self.rank}", text)
        self._read(self._store)
        self.signs += 1


_WORLDS: WeakKeyDictionary[dist.ProcessGroup, list[int]] = WeakKeyDictionary()
"""Of each default group of this process: its number, and how often it was numbered."""


def common_prefix() -> str:
    """A new part of the store for all ranks of torch.distributed. All call this in the same order.

    Neither an attempt of torchrun before this one nor a default group that was destroyed has it.
    """
    world = dist.group.WORLD
    assert world is not None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if world not in _WORLDS:
        count = _get_default_store().add(f"realrun/{attempt}/worlds", 1)
        _WORLDS[world] = [(count - 1) // world.size(), 0]
    index, calls = _WORLDS[world]
    _WORLDS[world][1] += 1
    return f"realrun/{attempt}/{index}/{calls}"


_COUNT = "count"
_OURS = tuple(
    f"raised {kind.__name__}" for kind in (OptionError, MismatchError, NonFiniteError, RankFailure)
)
_SETTLE: Seconds = 0.4
"""How long after a failed collective a note may still come from the rank that caused it."""

_IS_AT = "is at "
"""Begins the reason of a rank that waits for others."""

_SILENT: Seconds = 3.0
_SILENT_SIGNS = 3
"""A rank is silent if it gives no sign of life for this time, and for this many of its signs."""

_READ_LIMIT: Seconds = 3 * SIGN_INTERVAL
"""How long a rank that holds the store stays after an error, so that others may read its note."""

_NETWORK = re.compile(r"gloo|nccl|process ?group|connection|peer|timed? ?out|socket", re.IGNORECASE)
"""What errors of collectives say: Gloo's are RuntimeErrors, as are those of a kernel."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A rank has left after `steps` local steps; `reason` is empty if it closed in good order.

    One that left because of others names them (`blamed`), and says what became of them (`cause`).
    One that `settles` is at its end, and takes part in what others still launch.
    """

    rank: int
    steps: int
    reason: str
    blamed: tuple[int, ...] = ()
    cause: str = ""
    settles: bool = False

    @property
    def is_told(self) -> bool:
        """Whether it left because of another one, which is the one to name."""
        return self.reason.startswith(f"raised {RankFailure.__name__}")

    def __str__(self) -> str:
        """As in "rank 1 closed after 36 steps"."""
        return f"rank {self.rank} {self.reason or 'closed'} after {self.steps} steps"


class DepartureLog:
    """The notes of some ranks. `steps` counts the local steps of this one."""

    def __init__(self, ranks: Iterable[int], steps: Callable[[], int] = lambda: 0) -> None:
        """All ranks of torch.distributed call this, in the same order."""
        self.ranks, self.steps = sorted(set(ranks)), steps
        self._me, self._left, self._met = 0, False, 0
        self._notes: dict[int, Departure] = {}
        self._waits_for = ""
        self._store: RankStore | None = None
        if len(self.ranks) > 1:
            self._me = dist.get_rank()
            reference = ref(self)
            self._store = RankStore(
                common_prefix(),
                lambda: (log.steps(), log._waits_for) if (log := reference()) else (0, ""),  # noqa: SLF001
                lambda store: log._read(store) if (log := reference()) else None,  # noqa: SLF001
            )
            finalize(self, self._store.stop).atexit = False
            _OPEN.add(self)

    @classmethod
    def of_all_ranks(cls) -> "DepartureLog":
        """Of the ranks of torch.distributed. All call this, in the same order."""
        return cls(range(dist.get_world_size() if dist.is_initialized() else 1))

    def narrow(self, ranks: Iterable[int]) -> None:
        """From now on, only these ranks meet. All of them call this."""
        self.ranks = sorted(set(ranks))

    def leave(self, error: BaseException | None = None) -> None:
        """Leave a note, once: of a store that is gone no rank is left to read it."""
        if self._store is None or self._left:
            return
        self._left = True
        _OPEN.discard(self)
        reason = raised(error) if error else ""
        blame = (error.ranks, error.cause or reason) if isinstance(error, RankFailure) else ((), "")
        note = Departure(self._me, self.steps(), reason, *blame)

        def write(store: PrefixStore) -> None:
            store.set(str(self._me), json.dumps(asdict(note)))
            store.add(_COUNT, 1)

        with suppress(StoreError):
            self._store.ask(write)
            limit = time.monotonic() + _READ_LIMIT
            while error and self._store.held_by_rank_0 and not self._me:
                if len(self.notes()) == len(self.ranks) - 1 or time.monotonic() > limit:
                    break
                time.sleep(0.05)

    def end(self) -> None:
        """Let go of the store, after `leave`."""
        if self._store:
            self._store.close()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Within, this rank waits for others, and says so with its signs of life."""
        before, self._waits_for = self._waits_for, what
        try:
            yield
        finally:
            self._waits_for = before

    def meet(self, what: str, patience: Seconds, *, begun: bool = False, needs: str = "") -> None:
        """Wait until all come to `what` after the same number of steps. All ranks call this.

        `begun`: a step that not all optimizers have taken is there besides. `needs` says what who
        has not come should have done. Raises RankFailure for one that left, comes to something
        else, took other steps, or has not come in time.
        """
        reason = f"{_IS_AT}{what}" + (" with a step begun" if begun else "")
        note = Departure(self._me, self.steps(), reason)
        if self._store is None:
            return
        with self._at(what):
            if not self._come(self._store, what, patience, note, needs=needs):
                here = (note.steps, reason)
                odd = [other for other in self._waiting() if (other.steps, other.reason) != here]
                if odd:
                    raise self._failure(what, odd, None)

    def settle(
        self, what: str, patience: Seconds, steps_here: int, advance: Callable[[int], None]
    ) -> list[int]:
        """Wait until all come to `what`; gives the steps of each. All ranks call this.

        This rank took `steps_here`. Where another one waits for an average that is launched after
        more steps, `advance` takes this rank there. Raises RankFailure as `meet` does.
        """
        if self._store is None:
            return [steps_here]
        note = Departure(self._me, steps_here, f"{_IS_AT}{what}", settles=True)
        steps = f"{self._arrived} steps of"
        with self._at(what):
            self._store.ask(lambda store: store.set(f"{steps} {self._me}", str(steps_here)))
            if self._come(self._store, what, patience, note, advance):
                return [steps_here] * len(self.ranks)
            keys = [f"{steps} {rank}" for rank in self.ranks]
            return [int(text) for text in self._store.ask(lambda store: store.multi_get(keys))]

    @contextmanager
    def _at(self, what: str) -> Iterator[None]:
        """Within, this rank is at a meeting, which it has passed then."""
        try:
            with self.waiting(what):
                yield
        except StoreError as error:
            raise self._store_failure(what, error) from error
        self._met += 1

    def _come(
        self,
        store: RankStore,
        what: str,
        patience: Seconds,
        note: Departure,
        advance: Callable[[int], None] | None = None,
        *,
        needs: str = "",
    ) -> bool:
        """Wait for all at a meeting, or at their end; whether all wrote the same note as this rank.

        See `meet` and `settle`.
        """
        everybody = f"{self._arrived} ended" if note.settles else self._arrived
        alike = f"{everybody} {note.reason} {note.steps}"

        def arrive(store: PrefixStore) -> None:
            store.set(f"at {self._me}", json.dumps([self._met, asdict(note)]))
            for key in dict.fromkeys((alike, self._arrived, everybody)):
                store.add(key, 1)

        store.ask(arrive)
        limit, pause, needed = time.monotonic() + patience, 0.001, 0
        while True:
            left = self.notes()  # before: who has passed this meeting may leave
            if self._count(store, everybody, limit) >= len(self.ranks):
                return store.ask(lambda prefixed: prefixed.add(alike, 0)) == len(self.ranks)
            if advance:
                with suppress(StoreError):
                    needed = store.ask(self._needed)
                    left = left or [other for other in self._waiting() if not other.settles]
            if left:
                raise self._failure(what, left, None)
            if time.monotonic() > limit:
                raise self._not_come(what, patience, needs)
            if advance and needed > max(note.steps, self.steps()):
                advance(needed)
                limit = time.monotonic() + patience
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _needed(self, store: PrefixStore) -> int:
        """After how many steps the average is launched that a rank waits for."""
        key = f"needed {self.ranks[0]}"
        return int(store.get(key)) if store.check([key]) else 0

    def need(self, steps: int) -> None:
        """Ask ranks that are at their end to take part in what is launched after these steps."""

        def write(store: PrefixStore) -> None:
            if self._needed(store) < steps:
                store.set(f"needed {self.ranks[0]}", str(steps))

        if self._store:
            with suppress(StoreError):
                self._store.ask(write)

    def _count(self, store: RankStore, key: str, limit: float) -> int:
        """A counter; 0 until `limit` where the store does not answer. Raises StoreError."""
        try:
            return store.ask(lambda prefixed: prefixed.add(key, 0))
        except StoreError:
            if store.gone or time.monotonic() > limit:
                raise
            return 0

    @property
    def _arrived(self) -> str:
        """What counts who has come to the next meeting."""
        return f"arrived {self.ranks[0]} {self._met}"

    def _not_come(self, what: str, patience: Seconds, needs: str) -> RankFailure:
        there = {note.rank for note in self._waiting()}
        missing = [rank for rank in self.ranks if rank not in there]
        silent, signs = self._watch(missing)
        have = "has" if len(missing) == 1 else "have"
        cause = f"{named_ranks(missing)} {have} not come to {what} within {patience:.3g} s"
        if silent and not needs:
            cause += f": {_said(silent, signs, silent=True)}"
        elif alive := [rank for rank in missing if rank in signs]:
            cause += f": {_said(alive, signs, silent=False)}"
        return self._blame(what, missing, cause + needs, None)

    def _waiting(self) -> list[Departure]:
        """Who is at a meeting that this rank has not passed."""
        assert self._store is not None

        def read(store: PrefixStore) -> list[Departure]:
            if not store.add(self._arrived, 0):
                return []
            departures = []
            for rank in self.ranks:
                if store.check([f"at {rank}"]):
                    meeting, note = json.loads(store.get(f"at {rank}"))
                    departures += [Departure(**note)] if meeting == self._met else []
            return departures

        return self._store.ask(read)

    def notes(self) -> list[Departure]:
        """Those that others have left so far."""
        with suppress(StoreError):
            if self._store:
                self._store.ask(self._read)
        return self._known()

    def _known(self) -> list[Departure]:
        return [self._notes[rank] for rank in self.ranks if rank in self._notes]

    def _read(self, store: PrefixStore) -> None:
        """Read new notes of others; on the thread of the store alone."""
        notes = self._notes
        if store.add(_COUNT, 0) <= len(notes) + self._left:
            return
        for rank in self.ranks:
            if rank != self._me and rank not in notes and store.check([str(rank)]):
                note = json.loads(store.get(str(rank)))
                notes[rank] = Departure(**note | {"blamed": tuple(note["blamed"])})

    def _absent(self, behind: Callable[[int], bool]) -> list[Departure]:
        """Who has left and raised, or has left or waits elsewhere after steps that are behind."""
        absent = [note for note in self.notes() if note.reason or behind(note.steps)]
        with suppress(StoreError):
            waiting = self._waiting() if self._store else []
            absent += [note for note in waiting if behind(note.steps) and not note.settles]
            if any(note.settles for note in waiting):
                self.need(self.steps())
        return absent

    def check(self, what: str, step: int, *, round_: int | None = None) -> None:
        """Raise RankFailure if someone left who will not come to what was launched after `step`."""
        if absent := self._absent(lambda steps: steps < step):
            raise self._failure(what, absent, round_)
        if self._store and self._store.gone and self._store.held_by_rank_0:
            raise self._store_failure(what, StoreError("it is gone"), round_)

    def poll(self) -> None:
        """Raise RankFailure if someone has raised, as between two averages, without a wait.

        Not for errors of this package, which others find themselves, or at the next average.
        """
        left = [note for note in self._known() if note.reason]
        if absent := [note for note in left if not note.reason.startswith(_OURS)]:
            raise self._failure("training", absent, None)

    def cause(
        self,
        what: str,
        *,
        round_: int | None = None,
        foreign: bool = False,
    ) -> RankFailure | None:
        """The error for a collective that failed, if a rank is to blame for it.

        That is one that left a note, gives no sign of life, or does not wait for others. One of
        others, `foreign`, needs ranks that are elsewhere after the same steps, too.
        """
        if self._store is None:
            return None
        limit, here = time.monotonic() + _SETTLE, self.steps()

        def absent() -> list[Departure]:
            return self._absent(lambda steps: foreign or steps != here)

        while not (left := absent()) and time.monotonic() < limit:
            time.sleep(_SETTLE / 10)
        if left:
            return self._failure(what, left, round_)
        try:
            return self._from_signs(what, round_, absent, foreign=foreign)
        except StoreError as error:
            return self._store_failure(what, error, round_)

    def _from_signs(
        self,
        what: str,
        round_: int | None,
        absent: Callable[[], list[Departure]],
        *,
        foreign: bool,
    ) -> RankFailure | None:
        """The error for ranks that give no sign of life, are late, or are at their end."""
        assert self._store is not None
        others = [rank for rank in self.ranks if rank != self._me]
        before = self._store.signs_of(others)
        silent, signs = self._watch(others)
        if left := absent():
            return self._failure(what, left, round_)
        late = [rank for rank in signs if not signs[rank].waits_for]
        late = late or [rank for rank in before if not before[rank].waits_for]
        if silent or (late and not foreign):
            ranks, seen = (silent, signs) if silent else (late, before)
            return self._blame(what, ranks, _said(ranks, seen, silent=bool(silent)), round_)
        ended = [note for note in self._waiting() if note.settles]
        return self._failure(what, ended, round_) if ended else None

    def _watch(self, ranks: list[int]) -> tuple[list[int], dict[int, Sign]]:
        """Which of some ranks give no sign of life, and the last signs. Raises StoreError.

        It ends early where all give signs, or a rank leaves a note. Who has never given a sign is
        not waited for.
        """
        assert self._store is not None
        begin, before, left = time.monotonic(), self._store.signs, len(self._notes)
        first = signs = self._store.signs_of(ranks)
        while True:
            silent = [rank for rank in ranks if rank in first and signs[rank] == first[rank]]
            never = [rank for rank in ranks if rank not in signs]
            long = time.monotonic() - begin > _SILENT
            if not silent or (long and self._store.signs >= before + _SILENT_SIGNS):
                return sorted(silent + never), signs
            if len(self.notes()) > left:
                return [], signs
            time.sleep(0.05)
            signs = self._store.signs_of(ranks)

    def compare(self, tau: int, patience: Seconds) -> list[int]:
        """Wait until all have left; raise RankFailure for one that raised or took other rounds.

        Gives who has not left in time. A store that is gone has been taken away by a process that
        ended: no rank is left.
        """
        limit = time.monotonic() + patience
        while self._store is not None:
            try:
                self._store.ask(self._read)
            except StoreError:
                break
            notes = self._known()
            rounds = self.steps() // tau
            other = [note for note in notes if note.reason or note.steps // tau != rounds]
            if other:
                raise self._failure("closing", other, rounds)
            missing = {*self.ranks} - {self._me} - {note.rank for note in notes}
            if not missing or time.monotonic() > limit:
                return sorted(missing)
            time.sleep(0.01)
        return []

    def _failure(self, what: str, absent: list[Departure], round_: int | None) -> RankFailure:
        """The error for ranks that left, or are elsewhere: the first cause, and who left for it."""
        first = min(absent, key=lambda note: (note.is_told, not note.reason, note.rank))
        if not first.is_told:
            cause = str(first)
            if first.reason.startswith(_IS_AT) and first.steps != self.steps():
                cause += " (for unequal numbers of steps train within join())"
            return self._blame(what, [first.rank], cause, round_)
        return self._blame(what, list(first.blamed), first.cause, round_)

    def _blame(self, what: str, ranks: list[int], cause: str, round_: int | None) -> RankFailure:
        left = [note.rank for note in self._notes.values() if note.is_told]
        because = "because of this rank" if self._me in ranks else "for the same reason"
        also = f"; {named_ranks(left)} left {because}" if left else ""
        text = f"{what} failed: {cause}; rank {self._me} has taken {self.steps()}{also}"
        return RankFailure(text, ranks=tuple(ranks), op=what, round=round_, cause=cause)

    def _store_failure(
        self,
        what: str,
        error: StoreError,
        round_: int | None = None,
    ) -> RankFailure:
        assert self._store is not None
        ranks = [0] if self._store.held_by_rank_0 else []
        where = "rank 0, which holds" if ranks else "the launcher, which holds"
        fate = "has ended" if self._store.gone else "is stopped or cut off"
        cause = f"{where} the store of torch.distributed, {fate} ({error})"
        return self._blame(what, ranks, cause, round_)


def _said(ranks: list[int], signs: dict[int, Sign], *, silent: bool) -> str:
    several = len(ranks) > 1
    words = f"{'are' if several else 'is'} alive, and late"
    if silent:
        words = f"{'give' if several else 'gives'} no sign of life (killed, stopped or cut off)"
    return f"{named_ranks(ranks)} {words}{_steps([rank for rank in ranks if rank in signs], signs)}"


def _steps(ranks: list[int], signs: dict[int, Sign]) -> str:
    """As in ", after 7 steps"."""
    counts = sorted({signs[rank].steps for rank in ranks})
    return f", last seen after {' or '.join(map(str, counts[:3]))} steps" if counts else ""


_OPEN: WeakSet[DepartureLog] = WeakSet()


@atexit.register
def _end() -> None:
    """The process ends, and algorithms were not closed."""
    error = getattr(sys, "last_value", None)
    for log in list(_OPEN):
        if error is None and log.steps():
            sys.stderr.write(
                "a training ended without finish(): its last steps are not averaged, and every rank"
                " holds another model; call finish(), or train within a `with` block\n"
            )
        log.leave(error)
        log.end()


def of_network(error: BaseException) -> bool:
    """Whether a collective has failed, for which another rank may be the cause."""
    if not isinstance(error, RuntimeError | TimeoutError):
        return False
    return isinstance(error, DistError) or bool(_NETWORK.search(str(error)))


def raised(error: BaseException) -> str:
    """As in "raised ValueError (bad sample)"."""
    words = " ".join(str(error).split())[:200]
    return f"raised {type(error).__name__}" + (f" ({words})" if words else "")


@contextmanager
def together(
    notices: DepartureLog | None,
    what: str,
    deadline: Seconds,
    *,
    round_: int | None = None,
) -> Iterator[None]:
    """Something that needs other ranks. Raises RankFailure if they are lost.

    It says which, if that is known; else a peer died, or did not come.
    """
    with notices.waiting(what) if notices else nullcontext():
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            if cause := notices and notices.cause(what, round_=round_):
                raise cause from error
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RankFailure(
                f"{what} failed: a rank died, took fewer steps, or came more than"
                f" deadline={deadline:g} s late ({reason})",
                op=what,
                round=round_,
            ) from error
