"""Errors of a rank's own work, and those of collectives, are told apart."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_watch import Memory, watches  # noqa: E402 - after torch

from realrun.errors import RankFailure  # noqa: E402 - needs torch
from realrun.launch.watch import Place  # noqa: E402
from realrun.train.guard import guarded  # noqa: E402 - needs torch

HERE, AHEAD = Place(39, 9, "local step 39"), Place(40, 10, "local step 40")


def failed(error: Exception) -> RankFailure:
    """What rank 0 raises for an error in a step, while rank 1 is in the next one."""
    with watches(Memory(), 2) as (mine, other):
        other.enter("training", AHEAD)
        world: Any = SimpleNamespace(watch=mine, layout=SimpleNamespace(world_size=2))
        with pytest.raises(RankFailure) as found, guarded(world, HERE):
            raise error
    return found.value


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrun.launch.watch._SILENT", 0.5)
    monkeypatch.setattr("realrun.launch.watch._PERIOD", 0.01)


def test_an_error_of_its_own_blames_no_other_rank() -> None:
    """Also where others are at another step: they were said not to be there."""
    for error in [
        RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        ValueError("bad sample"),
    ]:
        found = failed(error)
        assert found.ranks == (0,)
        assert f"rank 0 raised {type(error).__name__} in 'local step 39'" in str(found)


def test_a_collective_that_failed_blames_who_is_elsewhere() -> None:
    """Gloo raises plain RuntimeErrors; what they say tells them apart."""
    for error in [
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] closed"),
        RuntimeError("Connection closed by peer [127.0.0.1]:4711"),
        RuntimeError("NCCL communicator was aborted on rank 0"),
        torch.distributed.DistNetworkError("no answer"),
    ]:
        found = failed(error)
        assert found.ranks == (1,)
        assert "rank 1 is not there: it is in 'local step 40'" in str(found)
