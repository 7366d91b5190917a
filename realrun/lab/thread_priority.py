"""How Linux schedules the threads that communicate, beside those that compute."""

import contextlib
import os
from collections.abc import Iterator

from realrun.errors import REALTIME

_FIRST = 1
"""Priority of all of them, of 1 to 99. It has to be one: some ask in a loop what others have done,
and give way to their equals only (torch 2.13: the end of a buffer that Gloo's loop still holds)."""


@contextlib.contextmanager
def communicating() -> Iterator[None]:
    """Threads that are started inside communicate: make process groups here.

    Where REALRUN_REALTIME is 1 they are SCHED_FIFO and take a core at once, as a network card does
    not wait for a kernel either. Beside matrix products a message waited for milliseconds
    otherwise: Linux leaves a busy core to its thread until a time slice ends (docs/real-runs.md).

    Elsewhere they are SCHED_BATCH and interrupt nothing when they wake up. A process group of Gloo
    has a thread that serves its sockets. While another thread holds the lock of a connection, that
    thread asks again and again without a pause (torch 2.13: epoll_wait and pthread_mutex_trylock).
    If it has just interrupted the thread with the lock, on the same core, both stand still until
    its time slice ends. Where ranks share few cores, small collectives lost more than half of their
    time that way (`benchmarks/collectives.py`).
    """
    if not _ordinary():
        yield  # the user has chosen a policy
        return
    changed = first() or _become("SCHED_BATCH")
    try:
        yield
    finally:
        if changed:
            _become("SCHED_OTHER")


def first() -> bool:
    """This thread communicates from now on. Whether it comes first: if asked, and allowed."""
    return os.environ.get(REALTIME) == "1" and _ordinary() and _become("SCHED_FIFO", _FIRST)


def _ordinary() -> bool:
    """Whether this thread has the usual policy, and the system others."""
    with contextlib.suppress(AttributeError, OSError):
        return os.sched_getscheduler(0) == os.SCHED_OTHER
    return False


def _become(policy: str, priority: int = 0) -> bool:
    """Change the policy of this thread. Whether the system has it, and allows it."""
    try:
        os.sched_setscheduler(0, getattr(os, policy), os.sched_param(priority))
    except (AttributeError, OSError):  # no Linux, or a sandbox that refuses: only slower
        return False
    return True
