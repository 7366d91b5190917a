"""Processes of this machine, by loky: each an executor of its own, so that a dead one is known."""

import os
import threading
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from co2sim.common.units import Seconds
from co2sim.studies.workers.flow import expected, work

_LOOK: Seconds = 0.5
"""Between two looks of a worker at whether its parent lives: loky's live on for minutes."""


class LokyPool:
    """A pool of processes; one that dies is replaced."""

    def __init__(self, count: int) -> None:
        """None is started before it has work."""
        self.slots = self.share = count
        self._crew: list[tuple[Any, Future[Any]]] = []

    def submit(self, share: int, content: bytes) -> Future[Any]:
        """Give a task to a process that has none."""
        free = next((place for place, (_, last) in enumerate(self._crew) if last.done()), None)
        worker = None
        if free is not None:
            worker, last = self._crew.pop(free)
            if last.exception() is not None:
                worker.shutdown(kill_workers=True)
                worker = None
        worker = worker or _worker()
        future: Future[Any] = worker.submit(work, expected(), share, content)
        self._crew.append((worker, future))
        return future

    def died(self, error: BaseException) -> bool:
        """Whether it is that of a process that has ended."""
        return isinstance(error, BrokenProcessPool)

    def check(self) -> None:
        """There is always one: it is started when it is needed."""

    def close(self) -> None:
        """End them all, those at work at once."""
        for worker, last in self._crew:
            worker.shutdown(kill_workers=not last.done() or last.exception() is not None)


def _worker() -> Any:
    from joblib.externals.loky import ProcessPoolExecutor  # noqa: PLC0415 - see `engine.processes`

    return ProcessPoolExecutor(max_workers=1, initializer=_begin, initargs=(os.getpid(),))


def _begin(parent: int) -> None:
    """In a worker: end with the process that started it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
