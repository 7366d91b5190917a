"""How the threads that communicate are scheduled."""

import os
import threading
from collections.abc import Callable

import pytest

from realrun.errors import REALTIME
from realrun.execute.world import communicating, first

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH"), reason="Linux alone has SCHED_BATCH"
)


@pytest.fixture(autouse=True)
def outside_of_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests say themselves whether threads come first."""
    monkeypatch.delenv(REALTIME, raising=False)


def may_come_first() -> bool:
    """Whether this system lets a thread be SCHED_FIFO."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


def policy_of_a_new_thread(begin: Callable[[], object] = bool) -> int:
    """The scheduling policy that a thread has which starts now, after it has called `begin`."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append((begin(), os.sched_getscheduler(0))[1]))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(not may_come_first(), reason="threads may not be SCHED_FIFO here")
def test_where_they_come_first_only_who_communicates_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a lab: threads of process groups and of streams; not who makes them, nor others."""
    assert policy_of_a_new_thread(first) == os.SCHED_OTHER
    monkeypatch.setenv(REALTIME, "1")
    with communicating():
        assert policy_of_a_new_thread() == os.SCHED_FIFO
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert policy_of_a_new_thread() == os.SCHED_OTHER
    assert policy_of_a_new_thread(first) == os.SCHED_FIFO


def test_where_the_system_refuses_groups_are_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sandbox may forbid to change policies: then small collectives are slower, and no more."""
    for asked in ["0", "1"]:
        monkeypatch.setenv(REALTIME, asked)

        def refuse(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "sched_setscheduler", refuse)
        with communicating():
            assert policy_of_a_new_thread(first) == os.SCHED_OTHER
