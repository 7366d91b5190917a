"""How Gloo's own threads are scheduled."""

import os
import threading

import pytest

from realrun.execute.gloo_threads import patient

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH"), reason="Linux alone has SCHED_BATCH"
)


def policy_of_a_new_thread() -> int:
    """The scheduling policy that a thread has which starts now."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def test_threads_that_start_inside_do_not_interrupt_others() -> None:
    """They are SCHED_BATCH; who starts them is as before, also after an error."""
    assert policy_of_a_new_thread() == os.SCHED_OTHER
    with patient():
        assert policy_of_a_new_thread() == os.SCHED_BATCH
    with pytest.raises(ZeroDivisionError), patient():
        _ = 1 / 0
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert policy_of_a_new_thread() == os.SCHED_OTHER


def test_where_the_system_refuses_groups_are_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sandbox may forbid to change policies: then small collectives are slower, and no more."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with patient():
        assert policy_of_a_new_thread() == os.SCHED_OTHER


def test_a_policy_that_somebody_chose_stays() -> None:
    """A process that runs as a batch job goes on as one."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        with patient():
            pass
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
