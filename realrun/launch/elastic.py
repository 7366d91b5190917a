"""Watch ranks that may come and go: one that dies is started anew, and the others go on."""

import sys
import time
from collections.abc import Callable, Sequence

from realrun.launch.membership import ElasticMember, Generation, MemberStore, Roll
from realrun.launch.output import TICK, RankOutput
from realrun.launch.processes import RankProcess
from realrun.launch.supervise import SILENT, ending

_MISTAKE = 2
"""The exit code of a command with options that are not allowed: starting it anew is no help."""


def supervise_elastic(
    ranks: Sequence[RankProcess],
    store: MemberStore,
    start: Callable[[int, int], RankProcess],
    restarts: int,
    asked: Callable[[], object] = lambda: False,
    cut: Callable[[], bool] = lambda: False,
) -> int:
    """Pass on what the ranks print until all have ended: 0 if they finished the training, else 1.

    It is 2, and all end, where one refused what it was given: starting it anew would be no help.

    A rank that dies is started anew by `start`, with its number and how often it was started
    before, `restarts` times at most for all ranks together. A rank that the others left out is
    killed, and then treated so, too. When no rank is left that holds the model, all end,
    as they do where `cut` says that a guard has killed them. Who still runs half a minute after
    another has ended, though the results are written, is killed: it hangs.
    """
    watched = _Watched(ranks, Roll(store), start, restarts)
    with RankOutput(ranks, plain=True) as output:
        while watched.running:
            output.forward(TICK)
            watched.kill_late()
            watched.kill_hung()
            for member, one in watched.ended():
                if not one.process.returncode or watched.over:
                    continue
                if cut():
                    return 1
                if one.process.returncode == _MISTAKE:
                    watched.refused = True
                    watched.kill_all()
                elif not watched.trains():
                    watched.say(one, "no rank is left that holds the model: the training is lost")
                    watched.kill_all()
                elif asked():
                    continue
                elif begun := watched.start_anew(member, one):
                    output.add(begun)
    return watched.code


class _Watched:
    """The processes that run, as members."""

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        roll: Roll,
        start: Callable[[int, int], RankProcess],
        restarts: int,
    ) -> None:
        self._roll, self._start, self._restarts, self._used = roll, start, restarts, 0
        self.running = {ElasticMember(one.rank): one for one in ranks}
        self._late, self._limit = 0, float("inf")
        self.refused = False
        self._latest = Generation(-1, tuple(self.running))

    @property
    def over(self) -> bool:
        """Whether nobody is to be started anew."""
        return self.refused or self.finished

    @property
    def code(self) -> int:
        """The exit code, once all have ended."""
        if self.finished:
            return 0
        return _MISTAKE if self.refused else 1

    @property
    def finished(self) -> bool:
        """Whether the results are written."""
        return self._roll.flag("finished")

    def kill_late(self) -> None:
        """Kill those that the others left out: they may hang."""
        found = self._roll.listed("late", self._late)
        self._late += len(found)
        for member in found:
            if member in self.running:
                self.running[member].kill()

    def kill_hung(self) -> None:
        """Kill those that have nothing left to do, and do not end."""
        if time.monotonic() > self._limit:
            self.kill_all()

    def ended(self) -> list[tuple[ElasticMember, RankProcess]]:
        """Those that have ended since; all others are told."""
        found = [pair for pair in self.running.items() if pair[1].process.poll() is not None]
        for member, one in found:
            one.kill()  # what it started and left behind
            del self.running[member]
            self._roll.end(member)
        if found and self.finished:
            self._limit = min(self._limit, time.monotonic() + SILENT)
        return found

    def trains(self) -> bool:
        """Whether a member of the latest generation runs, or one of the first that is to come."""
        while next_ := self._roll.decided(self._latest.number + 1):
            self._latest = next_
        return any(member in self.running for member in self._latest.members)

    def start_anew(self, member: ElasticMember, one: RankProcess) -> RankProcess | None:
        """Start it once more, if it may be."""
        if self._used == self._restarts:
            self.say(one, f"the others go on without it: {self._restarts} restarts are used up")
            return None
        self._used += 1
        again = ElasticMember(member.rank, member.life + 1)
        self.say(one, f"the others go on, it starts anew ({self._used} of {self._restarts})")
        self.running[again] = begun = self._start(again.rank, again.life)
        return begun

    def kill_all(self) -> None:
        """Kill all that run."""
        for one in self.running.values():
            one.kill()

    def say(self, one: RankProcess, what: str) -> None:
        """A line on what became of a rank."""
        words = f"rank {one.rank} {ending(one)}; {what}"
        print(words, file=sys.stderr, flush=True)  # noqa: T201 - a launcher says how it goes
