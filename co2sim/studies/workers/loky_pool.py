"""Processes of this machine, by loky: each its own executor, so that a dead one is known."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from co2sim.common.convert import Count, shown, whole
from co2sim.common.errors import OptionError, nearest
from co2sim.common.units import Seconds
from co2sim.studies.workers.flow import expected, work

if TYPE_CHECKING:
    from co2sim.studies.workers.flow import Pool


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


_PER_CORE = 2
"""Processes: more than that would only wait for each other."""

EngineName: TypeAlias = Literal["loky", "dask"]
ENGINES: tuple[str, ...] = get_args(EngineName)


def processes(jobs: Count, cases: int) -> int:
    """How many processes are worth starting. Raises OptionError for a number that says nothing."""
    jobs = whole("jobs", jobs)
    if jobs == 0 or jobs < -1:
        raise OptionError(f"jobs is {jobs}; it must be -1 (all cores), or 1 or more")
    if cases <= 1 or jobs == 1:
        return 1
    from joblib.externals import loky  # noqa: PLC0415 - 0.1 s that one process does not need

    cores: int = loky.cpu_count()
    return min(cases, cores if jobs == -1 else jobs, _PER_CORE * cores)


@dataclass(frozen=True, slots=True)
class Engine:
    """Processes of this machine (loky), or the workers of Dask.

    Without the address of a `scheduler`, `jobs` workers are started on this machine, -1: one per
    core. With one its workers do the work, however many there are. Raises OptionError for what does
    not go together.
    """

    name: str = "loky"
    scheduler: str | None = None
    jobs: Count = 1

    def __post_init__(self) -> None:
        """Check all of it."""
        if self.name not in ENGINES:
            known = nearest(self.name, ENGINES) if isinstance(self.name, str) else ""
            raise OptionError(
                f"engine is {shown(self.name)}; it is one of {', '.join(ENGINES)}"
                + (f"; {known}" if "mean" in known else "")
            )
        processes(self.jobs, 2)
        if self.scheduler is None:
            return
        if not isinstance(self.scheduler, str) or not self.scheduler.strip():
            raise OptionError(
                f"scheduler is {shown(self.scheduler)}; it must be an address, such as"
                " tcp://10.0.0.1:8786"
            )
        if self.name == "loky":
            raise OptionError(
                "a scheduler needs the engine dask: loky's processes are on this machine"
            )
        if processes(self.jobs, 2) != 1:
            raise OptionError(
                f"jobs is {self.jobs}, and a scheduler is given: jobs counts workers that are"
                " started on this machine; leave one of them out"
            )


LOKY = Engine()
"""One process: this one."""


@contextmanager
def opened(engine: Engine, cases: int) -> "Iterator[Pool | None]":
    """The workers of an engine for some cases, until the end of the block; None: this process.

    Raises OptionError without the package of the engine, EngineError without its workers.
    """
    made = _made(engine, cases)
    try:
        yield made
    finally:
        if made is not None:
            made.close()


def _made(engine: Engine, cases: int) -> "Pool | None":
    count = processes(engine.jobs, max(cases, 1))
    if engine.name == "dask":
        from co2sim.studies.workers.dask_pool import DaskPool  # noqa: PLC0415 - an optional package

        return DaskPool(engine.scheduler, count)
    if count == 1:
        return None
    from co2sim.studies.workers.loky_pool import LokyPool  # noqa: PLC0415 - which one process does not need

    return LokyPool(count)
