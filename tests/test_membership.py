"""Who is a member: agreed on by threads over a store in this process, without any training."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from realrun.errors import RankFailure
from realrun.launch.membership import Change, ElasticMember, Generation, Membership, Roll


class MemoryStore:
    """What is used of torch's TCPStore."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def add(self, key: str, value: int) -> int:
        """Count."""
        with self.lock:
            total = int(self.values.get(key, b"0")) + value
            self.values[key] = str(total).encode()
            return total

    def set(self, key: str, value: str) -> None:
        """Write."""
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Read."""
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write if nothing else is there."""
        with self.lock:
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = desired.encode()
            return self.values[key]


def membership(
    store: MemoryStore, member: ElasticMember, ranks: int, deadline: float = 5
) -> Membership:
    """One that looks often."""
    return Membership(store, member, ranks, deadline, pause=0.001)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What they give, called at once; an error is given, too."""

    def guarded(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RankFailure as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(guarded, calls))


def crew(ranks: int, deadline: float = 5) -> tuple[MemoryStore, list[Membership]]:
    """Members of the first generation."""
    store = MemoryStore()
    made = [membership(store, ElasticMember(rank), ranks, deadline) for rank in range(ranks)]
    together(*(one.next for one in made))
    return store, made


def test_the_first_generation_is_all_who_were_started() -> None:
    """None of them holds a state."""
    _, made = crew(3)
    everybody = tuple(map(ElasticMember, range(3)))
    assert [one.generation for one in made] == 3 * [Generation(0, everybody, everybody)]
    assert [one.leads for one in made] == [True, False, False]


@pytest.mark.parametrize("seed", range(20))
def test_those_who_are_left_agree_whoever_dies_when(seed: int) -> None:
    """In all schedules all see one list of members; it holds who lives, and keeps their order."""
    rng = np.random.default_rng(seed)
    store, made = crew(5)
    dead = rng.permutation(5)[: rng.integers(1, 5)].tolist()
    alive = [one for one in made if one.me.rank not in dead]

    def end(rank: int) -> Callable[[], Any]:
        return lambda: (time.sleep(rng.random() / 50), Roll(store).end(ElasticMember(rank)))

    def arrive(one: Membership) -> Callable[[], Any]:
        return lambda: (time.sleep(rng.random() / 50), one.next())[1]

    found = together(*map(end, dead), *map(arrive, alive))[len(dead) :]
    assert all(one == found[0] for one in found)
    assert found[0].members == tuple(one.me for one in alive)
    assert (found[0].joined, found[0].changed) == ((), False)


def test_who_does_not_come_is_left_out_and_reported() -> None:
    """After the deadline; when it comes, it is told, and the launcher knows whom to kill."""
    store, (first, second, third) = crew(3, deadline=0.5)
    began = time.monotonic()
    found = together(first.next, third.next)
    assert time.monotonic() - began >= 0.5
    assert found[0].members == found[1].members == (ElasticMember(0), ElasticMember(2))
    assert Roll(store).listed("late") == [ElasticMember(1)]
    with pytest.raises(RankFailure, match=r"rank 1 came more than 0\.5 s after the others"):
        second.next()


def test_others_may_need_a_round_to_see_that_somebody_is_lost() -> None:
    """`patience` is added to the deadline."""
    _, (first, second) = crew(2, deadline=0.5)
    late = threading.Timer(0.7, second.next)
    late.start()
    assert first.next(patience=30.0).members == (ElasticMember(0), ElasticMember(1))
    late.join()


def test_who_waits_comes_in_where_it_was_announced() -> None:
    """At the end of that round, for all; behind the others, and without a state."""
    store, (first, second) = crew(2)
    again = ElasticMember(1, 1)
    Roll(store).end(ElasticMember(1))
    del second
    assert first.next().members == (ElasticMember(0),)
    waiting = membership(store, again, 2)
    Roll(store).write("waiting", again)
    first.announce(7)
    first.announce(9)  # the first announcement counts
    assert first.due(6) is None
    change = first.due(7)
    assert change == Change(7, (again,), stop=False)
    assert first.due(8) is None  # it is seen once
    one, other = together(lambda: first.next(change), waiting.come_in)
    assert one == other == Generation(2, (ElasticMember(0), again), (again,), changed=True)


def test_nobody_comes_in_while_one_is_here_for_a_loss() -> None:
    """The state is then not the same on all."""
    store, made = crew(2)
    joining = ElasticMember(5, 1)
    change = Change(3, (joining,), stop=False)
    found = together(lambda: made[0].next(change), made[1].next)
    assert found[0] == found[1] == Generation(1, (ElasticMember(0), ElasticMember(1)))
    assert membership(store, joining, 2).roll.decided(2) is None


def test_all_stop_where_it_was_announced() -> None:
    """Whoever was asked, the lead says when; who still waits to come in leaves."""
    store, (first, second) = crew(2)
    second.roll.raise_flag("stop")
    second.announce(1)
    assert second.due(1) == Change(1, (), stop=True)
    assert membership(store, ElasticMember(0, 1), 2).come_in(lambda: True) is None
    first.roll.raise_flag("finished")
    assert membership(store, ElasticMember(0, 2), 2).come_in() is None


def test_who_left_a_note_or_died_is_not_waited_for() -> None:
    """At the end of a training."""
    store, (first, second, third) = crew(3)
    first.roll.note("done", first.me, "hash")
    Roll(store).end(third.me)
    assert second.others_left("done") == [second.me]
    assert second.roll.noted("done", first.me) == "hash"
    assert not first.wanted()
    together(first.next, second.next)
    assert third.wanted()
