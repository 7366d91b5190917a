"""Who takes part in an elastic training: generations of members, agreed on in a store.

A generation is a list of members that average with each other. When one of them is lost, or others
have come, those who are left agree on the next generation. All of it stands in the store of the
launcher, which outlives all members:

    ended/M       the process of member M has ended (written by the launcher)
    waiting/I     the I-th member that wants to come in
    here/G/M      M, of generation G - 1, waits for generation G, and why
    decided/G     the members of generation G: the first proposal counts, for all
    announced/N   after which round the N-th change without a loss takes place
    late/I        a member that was left out, since it did not come in time

No torch is needed here; every wait ends after the deadline.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from co2sim.units import Seconds
from realrun.errors import RankFailure
from realrun.launch.watch import Store

LIFE = "REALRUN_LIFE"
"""Environment variable of a member: how often its rank was started before."""

FIRST_WAIT: Seconds = 60.0
"""At least so long all wait for each other at the start: loading torch takes some seconds."""

_PREFIX = "realrun/elastic"
_PAUSE: Seconds = 0.01


class MemberStore(Store, Protocol):
    """The part of torch.distributed.Store that is used here."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...  # noqa: D102


@dataclass(frozen=True, slots=True, order=True)
class ElasticMember:
    """A process: which rank it is, and how often that rank was started before. As in "2.1"."""

    rank: int
    life: int = 0

    def __str__(self) -> str:
        """`2.1`: rank 2, started for the second time."""
        return f"{self.rank}.{self.life}"

    @classmethod
    def of(cls, text: str) -> "ElasticMember":
        """The other way round."""
        rank, life = text.split(".")
        return cls(int(rank), int(life))


@dataclass(frozen=True, slots=True)
class Generation:
    """Members in the order in which they came; the last ones, `joined`, hold no state yet.

    The first member leads: it writes the log, and gives its state to those who joined. `changed`:
    it began with an announced change, not with a loss.
    """

    number: int
    members: tuple[ElasticMember, ...]
    joined: tuple[ElasticMember, ...] = ()
    changed: bool = False

    @property
    def lead(self) -> ElasticMember:
        """Who writes."""
        return self.members[0]

    def text(self) -> str:
        """For the store."""
        told = {"members": _texts(self.members), "joined": _texts(self.joined)}
        return json.dumps({**told, "changed": self.changed})

    @classmethod
    def of(cls, number: int, text: bytes) -> "Generation":
        """The other way round."""
        told = json.loads(text)
        members, joined = (
            tuple(map(ElasticMember.of, told[name])) for name in ("members", "joined")
        )
        return cls(number, members, joined, told["changed"])


@dataclass(frozen=True, slots=True)
class Change:
    """Announced for the end of a round: these come in, or all stop."""

    round: int
    joining: tuple[ElasticMember, ...]
    stop: bool


class Roll:
    """What all who can reach the store may ask and write: the launcher, too."""

    def __init__(self, store: MemberStore) -> None:
        self.store = store

    def end(self, member: ElasticMember) -> None:
        """The process of a member has ended."""
        self.store.set(_key("ended", member), "1")

    def ended(self, member: ElasticMember) -> bool:
        """Whether it has."""
        return self.store.check([_key("ended", member)])

    def decided(self, number: int) -> Generation | None:
        """A generation, if it was agreed on."""
        key = _key("decided", number)
        return Generation.of(number, self.store.get(key)) if self.store.check([key]) else None

    def listed(self, name: str, start: int = 0) -> list[ElasticMember]:
        """Members of a list, "waiting" or "late", in the order in which they were written."""
        keys = [_key(name, index) for index in range(start, self.store.add(_key(name, "count"), 0))]
        there = takewhile(lambda key: self.store.check([key]), keys)  # the last may be on its way
        return [ElasticMember.of(self.store.get(key).decode()) for key in there]

    def write(self, name: str, member: ElasticMember) -> None:
        """Add a member to a list."""
        index = self.store.add(_key(name, "count"), 1) - 1
        self.store.set(_key(name, index), str(member))

    def raise_flag(self, name: str) -> None:
        """Say to all that it is time to "stop", or that all is "finished"."""
        self.store.set(_key(name), "1")

    def flag(self, name: str) -> bool:
        """Whether somebody did."""
        return self.store.check([_key(name)])

    def note(self, name: str, member: ElasticMember, text: str) -> None:
        """Leave a text for the others."""
        self.store.set(_key(name, member), text)

    def noted(self, name: str, member: ElasticMember) -> str | None:
        """The text that a member left."""
        key = _key(name, member)
        return self.store.get(key).decode() if self.store.check([key]) else None


class Membership:
    """What one member knows: its generation, and how many announced changes it has seen."""

    def __init__(
        self,
        store: MemberStore,
        me: ElasticMember,
        ranks: int,
        deadline: Seconds,
        pause: Seconds = _PAUSE,
    ) -> None:
        """Before the first generation, of which all ranks shall be that were started."""
        self.roll, self.me, self.deadline, self.pause = Roll(store), me, deadline, pause
        self.generation = Generation(-1, tuple(ElasticMember(rank) for rank in range(ranks)))
        self.changes = 0

    @property
    def leads(self) -> bool:
        """Whether this member writes."""
        return self.generation.lead == self.me

    def next(self, change: Change | None = None, patience: Seconds = 0.0) -> Generation:
        """Agree with those who are left on the next generation, and be in it.

        All members of this one call it: after a loss, or for an announced `change`. Who has not
        come `patience` and the deadline later is left out. Members that join come in only if all
        are here for the change. Raises RankFailure when this member was left out.
        """
        roll, number = self.roll, self.generation.number + 1
        roll.store.set(_key("here", number, self.me), "change" if change else "loss")
        roll.store.add(_key("arrivals", number), 1)
        wait = self.deadline + patience if number else max(self.deadline, FIRST_WAIT)
        limit = time.monotonic() + wait
        while (found := roll.decided(number)) is None:
            expected = [one for one in self.generation.members if not roll.ended(one)]
            here = [one for one in expected if roll.store.check([_key("here", number, one)])]
            if len(here) == len(expected) or time.monotonic() > limit:
                self._propose(number, here, change)
            else:
                time.sleep(self.pause)
        if self.me not in found.members:
            raise RankFailure(
                f"rank {self.me.rank} came more than {self.deadline:g} s after the others: they"
                " train on without it",
                ranks=(self.me.rank,),
            )
        self.generation = found
        return found

    def _propose(self, number: int, here: Sequence[ElasticMember], change: Change | None) -> None:
        """The first proposal counts; whoever is alive and not in it is reported as late."""
        store = self.roll.store
        for_change = all(store.get(_key("here", number, one)) == b"change" for one in here)
        joining = [one for one in change.joining if not self.roll.ended(one)] if change else []
        joined = tuple(here) if not number else tuple(joining) if for_change else ()
        members = tuple(here) if not number else (*here, *joined)
        text = Generation(number, members, joined, for_change).text()
        if store.compare_set(_key("decided", number), "", text) == text.encode():
            for one in self.generation.members:
                if one not in here and not self.roll.ended(one):
                    self.roll.write("late", one)

    def wanted(self) -> bool:
        """Whether others wait for the next generation."""
        return self.roll.store.add(_key("arrivals", self.generation.number + 1), 0) > 0

    def come_in(self, leave: Callable[[], bool] = lambda: False) -> Generation | None:
        """Wait, as a rank that was started anew, until the others let it in.

        None: they have finished, or it is to `leave`.
        """
        self.roll.write("waiting", self.me)
        number = 0
        while True:
            found = self.roll.decided(number)
            if found and self.me in found.members:
                self.generation = found
                return found
            number += found is not None
            if found is None:
                if leave() or self.roll.flag("finished"):
                    return None
                time.sleep(self.pause)

    def announce(self, last: int) -> None:
        """The lead calls it before it launches the averages that all have used after round `last`.

        Then all have seen the announcement by the end of that round.
        """
        taken = {*self.generation.members}
        waiting = [
            one
            for one in self.roll.listed("waiting")
            if one not in taken and not self.roll.ended(one)
        ]
        stop = self.roll.flag("stop")
        if waiting or stop:
            text = json.dumps({"round": last, "joining": _texts(waiting), "stop": stop})
            self.roll.store.compare_set(_key("announced", self.changes), "", text)

    def due(self, number: int) -> Change | None:
        """The change that was announced for the end of round `number`, if any."""
        key = _key("announced", self.changes)
        if not self.roll.store.check([key]):
            return None
        told = json.loads(self.roll.store.get(key))
        if told["round"] > number:
            return None
        self.changes += 1
        return Change(told["round"], tuple(map(ElasticMember.of, told["joining"])), told["stop"])

    def others_left(self, name: str) -> list[ElasticMember]:
        """Members that have not left a note of this name, and whose processes have not ended."""
        members = self.generation.members
        return [one for one in members if not (self.roll.noted(name, one) or self.roll.ended(one))]


def _key(*parts: object) -> str:
    return "/".join(map(str, (_PREFIX, *parts)))


def _texts(members: Iterable[ElasticMember]) -> list[str]:
    return [str(one) for one in members]
