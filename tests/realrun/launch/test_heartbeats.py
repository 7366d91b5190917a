"""Who failed: heartbeats and failures in a store, without processes; the clock is the test's."""

from types import SimpleNamespace
from typing import Any

import pytest
from memory_store import Memory

from realrun.errors import RankFailure
from realrun.launch import monitor
from realrun.launch.monitor import Place, Watch, report_failure

HERE, STEP, AHEAD = Place(7, 1, "average"), Place(39, 9, "step 39"), Place(40, 10, "step 40")
BACKWARD = Place(5, 1, "backward.head")


class Turns:
    """The event that a heart waits for: it beats once each time that `left` becomes 1."""

    left = 0

    def wait(self, _: float) -> bool:
        """Whether the heart is to stop."""
        self.left -= 1
        return self.left < 0


@pytest.fixture(autouse=True)
def beating(monkeypatch: pytest.MonkeyPatch) -> list[Watch]:
    """The hearts that beat when the clock goes on, which it does where somebody waits."""
    hearts: list[Watch] = []
    clock = SimpleNamespace(now=0.0)

    def wait(seconds: float) -> None:
        clock.now += seconds
        for one in hearts:
            one._stop.left = 1  # type: ignore[attr-defined]
            one._loop()

    never = SimpleNamespace(start=lambda: None)
    fakes = {
        "time": SimpleNamespace(monotonic=lambda: clock.now, sleep=wait),
        "threading": SimpleNamespace(Event=Turns, Thread=lambda **_: never),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(monitor, name, fake)
    return hearts


@pytest.fixture
def store() -> Memory:
    """An empty one."""
    return Memory()


@pytest.fixture
def three(store: Memory, beating: list[Watch]) -> list[Watch]:
    """One watch for each of three ranks."""
    beating += [Watch(store, rank, 3) for rank in range(3)]
    return list(beating)


def test_the_first_rank_that_was_told_to_have_failed_is_named(
    store: Memory, three: list[Watch]
) -> None:
    """A launcher that saw it die has the first word; what fails because of that is not blamed."""
    report_failure(store, 2, "was killed by SIGKILL")
    report_failure(store, 1, "exited with code 1")
    found = three[0].lost(HERE, range(3), RuntimeError("connection closed"))
    assert str(found).startswith("rank 2 was killed by SIGKILL")
    assert found.ranks == (2,)


def test_a_silent_heart_is_named(store: Memory, three: list[Watch], beating: list[Watch]) -> None:
    """Without a launcher: the rank whose heart has stopped, and where this one was."""
    three[0].enter("comm", HERE)
    beating.remove(three[2])
    found = three[0].lost(HERE, range(3), RuntimeError("timed out"))
    assert str(found) == "rank 2 gives no sign of life; stopped in 'average' of round 1"
    assert (found.ranks, found.op, found.round) == ((2,), "average", 1)
    assert monitor.failed_ranks(store) == [2]  # which a launcher kills at once
    monitor.time.sleep(0.5)
    assert three[1].failure is not None
    assert three[1].failure.ranks == (2,)


@pytest.mark.parametrize(
    ("where", "blamed", "said"),
    [
        (BACKWARD, (1,), "rank 1 is not there: it is in 'backward.head' of round 1"),
        (HERE, (), "'average' failed: no route to host; stopped in 'average' of round 1"),
    ],
)
def test_who_lives_is_blamed_only_where_it_is_elsewhere(
    three: list[Watch], where: Place, blamed: tuple[int, ...], said: str
) -> None:
    """With where it is, as its kernel does not end; else the error is all that is known."""
    for one, place in zip(three, (HERE, where, HERE), strict=True):
        one.enter("any", place)
    found = three[0].lost(HERE, range(3), RuntimeError("no route\nto host"))
    assert str(found).startswith(said)
    assert found.ranks == blamed


def test_what_a_rank_raises_reaches_all_others(three: list[Watch]) -> None:
    """Type, place and message; where they are in no op, the one that they did last is known."""
    heard: list[RankFailure] = []
    three[1].listen(heard.append)
    three[1].enter("comm", HERE)
    three[1].exit("comm")
    own = three[0].raised(BACKWARD, ValueError("NaN in the loss"))
    monitor.time.sleep(0.5)
    told = "rank 0 raised ValueError in 'backward.head' of round 1: NaN in the loss"
    assert str(own) == f"{told}; stopped in 'backward.head' of round 1"
    (found,) = heard
    assert str(found) == f"{told}; stopped after 'average' of round 1"
    assert (found.op, found.round) == ("average", 1)


def test_a_dead_store_ends_nothing_by_itself(store: Memory, three: list[Watch]) -> None:
    """Its host is gone; the watch goes on, and what failed is still reported."""
    store.broken = True
    monitor.time.sleep(0.5)
    assert three[0].failure is None
    found = three[0].lost(HERE, range(3), RuntimeError("connection closed"))
    assert "stopped in 'average' of round 1" in str(found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of parts of its own
@pytest.mark.parametrize(
    ("error", "blamed"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory"), 0),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), 0),
        ("OutOfMemoryError", 0),
        (ValueError("bad sample"), 0),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] closed"), 1),
        (RuntimeError("Connection closed by peer [127.0.0.1]:4711"), 1),
        (RuntimeError("NCCL communicator was aborted on rank 0"), 1),
        ("distributed.DistNetworkError", 1),
    ],
)
def test_only_a_collective_that_failed_blames_who_is_elsewhere(
    three: list[Watch], error: Exception | str, blamed: int
) -> None:
    """Gloo raises plain RuntimeErrors; what they say tells them from errors of a rank's own."""
    torch = pytest.importorskip("torch")
    from realrun.train.loop import report_rank_errors  # noqa: PLC0415 - torch

    if isinstance(error, str):
        module = torch.distributed if "." in error else torch
        error = getattr(module, error.rpartition(".")[2])("CUDA out of memory, or no answer")
    three[1].enter("training", AHEAD)
    world: Any = SimpleNamespace(watch=three[0], layout=SimpleNamespace(world_size=2))
    with pytest.raises(RankFailure) as found, report_rank_errors(world, STEP):
        raise error
    assert found.value.ranks == (blamed,)
    if blamed:
        assert "rank 1 is not there: it is in 'step 40'" in str(found.value)
    else:
        assert f"rank 0 raised {type(error).__name__} in 'step 39'" in str(found.value)
