"""Who failed: heartbeats and failures in a store, without any processes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from realrun.errors import RankFailure
from realrun.launch import watch
from realrun.launch.watch import Place, Watch

HERE = Place(7, 1, "average")


class Memory:
    """A store in this process; `broken` answers nothing, like one whose host has died."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lock = threading.Lock()
        self.broken = False

    def _alive(self) -> None:
        if self.broken:
            raise RuntimeError("connection reset by peer")

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        self._alive()
        with self.lock:
            total = int(self.values.get(key, "0")) + value
            self.values[key] = str(total)
            return total

    def set(self, key: str, value: str) -> None:
        """Keep a value."""
        self._alive()
        self.values[key] = value

    def get(self, key: str) -> bytes:
        """Read a value."""
        self._alive()
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        self._alive()
        return all(key in self.values for key in keys)


@contextmanager
def watches(store: Memory, count: int) -> Iterator[list[Watch]]:
    """One watch per rank."""
    made = [Watch(store, rank, count) for rank in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.stop()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hearts beat fifty times a second."""
    monkeypatch.setattr(watch, "_PERIOD", 0.02)
    monkeypatch.setattr(watch, "_SILENT", 0.5)


def until(true: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    limit = time.monotonic() + 30
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def seen(store: Memory, rank: int, place: Place) -> bool:
    """Whether the heart of a rank has said that it is there."""
    return place.op in store.values[f"realrun/heart/{rank}"]


def test_a_silent_heart_is_named() -> None:
    """Without a launcher: the rank whose heart has stopped, and where this one was."""
    store = Memory()
    with watches(store, 3) as (first, second, third):
        for one in (first, second):
            one.enter("comm", HERE)
        third.stop()
        found = first.lost(HERE, range(3), RuntimeError("timed out"))
        assert str(found) == "rank 2 gives no sign of life; stopped in 'average' of round 1"
        assert (found.ranks, found.op, found.round) == ((2,), "average", 1)
        assert watch.gone(store) == [2]  # which a launcher kills at once
        until(lambda: second.failure)
        assert second.failure is not None
        assert second.failure.ranks == (2,)


def test_a_rank_that_lives_but_is_behind_is_named_with_where_it_is() -> None:
    """Its heart beats, but its kernel does not end."""
    store = Memory()
    with watches(store, 2) as (first, second):
        first.enter("comm", HERE)
        second.enter("compute", Place(5, 1, "backward.head"))
        until(lambda: seen(store, 1, Place(5, 1, "backward.head")))
        found = first.lost(HERE, range(2), RuntimeError("timed out"))
    assert "rank 1 is not there: it is in 'backward.head' of round 1" in str(found)


def test_what_a_rank_raises_reaches_all_others() -> None:
    """Type, place and message; listeners are called once."""
    store = Memory()
    heard: list[str] = []
    with watches(store, 2) as (first, second):
        second.listen(lambda failure: heard.append(str(failure)))
        own = first.raised(HERE, ValueError("NaN in the loss"))
        until(lambda: heard)
    told = "rank 0 raised ValueError in 'average' of round 1: NaN in the loss"
    assert str(own) == f"{told}; stopped in 'average' of round 1"
    assert heard == [told]


# --- errors of a rank's own work, and those of collectives ---

STEP, AHEAD = Place(39, 9, "local step 39"), Place(40, 10, "local step 40")


def failed(error: Exception) -> RankFailure:
    """What rank 0 raises for an error in a step, while rank 1 is in the next one."""
    from realrun.train.loop import guarded  # noqa: PLC0415 - torch

    with watches(Memory(), 2) as (mine, other):
        other.enter("training", AHEAD)
        world: Any = SimpleNamespace(watch=mine, layout=SimpleNamespace(world_size=2))
        with pytest.raises(RankFailure) as found, guarded(world, STEP):
            raise error
    return found.value


def test_an_error_of_its_own_blames_no_other_rank() -> None:
    """Also where others are at another step: they were said not to be there."""
    torch = pytest.importorskip("torch")
    for error in [
        RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        ValueError("bad sample"),
    ]:
        found = failed(error)
        assert found.ranks == (0,)
        assert f"rank 0 raised {type(error).__name__} in 'local step 39'" in str(found)
