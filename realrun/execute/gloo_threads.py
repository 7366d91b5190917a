"""How Linux schedules Gloo's own threads."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Threads that are started inside do not interrupt others when they wake up (SCHED_BATCH).

    A process group of Gloo has a thread that serves its sockets. While another thread holds the
    lock of a connection, that thread asks again and again without a pause (torch 2.13: epoll_wait
    and pthread_mutex_trylock). If it has just interrupted the thread with the lock, on the same
    core, both stand still until its time slice ends. Where ranks share few cores, small collectives
    lost more than half of their time that way (`benchmarks/collectives.py`, docs/validation.md).
    """
    changed = _batch()
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _batch() -> bool:
    """Make this thread SCHED_BATCH, unless somebody has chosen a policy, or the system has none."""
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):  # no Linux, or a sandbox that refuses: only slower
        return False
    return True
