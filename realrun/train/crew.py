"""A member of an elastic training among the others: it meets them anew whenever they change."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from co2sim.units import Seconds
from realrun.algorithms.links import Links
from realrun.algorithms.regroup import Regrouping
from realrun.algorithms.workers import Workers
from realrun.errors import MismatchError, RankFailure
from realrun.launch.membership import Change, ElasticMember, Generation, Membership


@dataclass(frozen=True, slots=True)
class Meeting:
    """What became of a generation: who is in it, and how their anchors compare.

    `noticed` is when this member knew that it was needed, in seconds since 1970. `same` members of
    `standing`, those whose anchor has used as many averages as this one's, hold it bit for bit;
    `anchor` is its hash.
    """

    generation: Generation
    before: tuple[ElasticMember, ...]
    noticed: float
    anchor: str
    same: int
    standing: int


class Crew:
    """The members that average with each other now.

    `give` is all that a member needs that joins, `take` what that member does with it. Every
    generation has a process group of its own: those of torch cannot shrink, or grow.
    """

    def __init__(
        self,
        membership: Membership,
        store: TCPStore,
        outer: Regrouping,
        described: str,
        give: Callable[[], dict[str, Any]],
        take: Callable[[dict[str, Any]], None],
    ) -> None:
        """Alone so far. `described`: what all members must have in common."""
        self.membership, self._store, self._outer = membership, store, outer
        self._described, self._give, self._take = described, give, take
        self.average = outer.make_elastic(self._recover)
        self._fresh = True
        self.meetings: list[Meeting] = []
        self.patience: Seconds = 0.0
        """A round of others, who only see at its end that somebody is lost."""

    def start(self, leave: Callable[[], bool]) -> bool:
        """Meet the others for the first time; whether there is something to train with them."""
        noticed = time.time()
        if self.membership.me.life:
            if self.membership.come_in(leave) is None:
                return False
        else:
            self.membership.next()
        if not self._met((), noticed):
            self.meet()
        return True

    def _recover(self, failure: str) -> None:
        """An average failed: go on with those who are left."""
        del failure  # who is lost, the launcher knows better
        self.meet()

    def meet(self, change: Change | None = None) -> None:
        """Agree on the members, and connect to them, until it works: after a loss, or a change."""
        noticed, before = time.time(), self.membership.generation.members
        while True:
            self._leave()
            generation = self.membership.next(change, self.patience)
            if generation.changed:
                change = None
            if self._met(before, noticed) and change is None:
                return

    def _leave(self) -> None:
        self._outer.disconnect()
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    def _met(self, before: tuple[ElasticMember, ...], noticed: float) -> bool:
        """Connect to the members of the generation; whether all of them were there."""
        generation = self.membership.generation
        try:
            self._connect(generation)
            meeting = self._share(generation, before, noticed)
        except (RankFailure, RuntimeError):
            return False
        self.meetings.append(meeting)
        return True

    def _connect(self, generation: Generation) -> None:
        deadline = self.membership.deadline
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"generation{generation.number}", self._store),
            rank=generation.members.index(self.membership.me),
            world_size=len(generation.members),
            timeout=timedelta(seconds=deadline),
        )
        links = Links(Workers.per_gpu(), deadline, owns=False)
        links.agree("training", self._described, across="")
        self._outer.connect(links)

    def _share(
        self, generation: Generation, before: tuple[ElasticMember, ...], noticed: float
    ) -> Meeting:
        """Give state to who has none, and averages to who has not got them; compare anchors."""
        fresh, waited = zip(*_all((self._fresh, self.average.waited)), strict=True)
        source = fresh.index(False) if False in fresh else 0
        for place, needs in enumerate(fresh):
            if needs and place != source:
                self._hand(source, place, self._give, self._take)
        most = max(waited)
        for place, count in enumerate(waited):
            if not fresh[place] and count < most:
                missing = _calling(self.average.missing, count)
                self._hand(waited.index(most), place, missing, self.average.take)
        if self._fresh:
            self._outer.begin()
            self._fresh = False
        self.average.launch_again()
        used, mark = self._outer.standing()
        marks = [other for count, other in _all((used, mark)) if count == used]
        if len(set(marks)) > 1:
            raise MismatchError(
                f"members {', '.join(map(str, generation.members))} hold different anchors after as"
                " many averages"
            )
        return Meeting(generation, before, noticed, mark[:16], marks.count(mark), len(marks))

    def _hand(
        self,
        source: int,
        place: int,
        give: Callable[[], Any],
        take: Callable[[Any], None],
    ) -> None:
        """From one member to another."""
        me = dist.get_rank()
        if me == source:
            dist.send_object_list([give()], dst=place)
        elif me == place:
            found: list[Any] = [None]
            dist.recv_object_list(found, src=source)
            take(found[0])


def _all(value: Any) -> list[Any]:
    """Everybody's value."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _calling(function: Callable[[int], Any], count: int) -> Callable[[], Any]:
    return lambda: function(count)
