"""Many cases, in order, on one process or several: what fails is named, and the others go on."""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeAlias

from co2sim.case import Case
from co2sim.convert import Count, whole
from co2sim.errors import Co2simError, NoRoomError, OptionError, ResourceError
from co2sim.machine import share_memory
from co2sim.progress import progress_bar
from co2sim.result import Result
from co2sim.study import run
from co2sim.units import Seconds, counted

_PER_CORE = 2
"""Processes: more than that would only wait for each other."""

_LOOK: Seconds = 0.5
"""Between two looks of a worker at whether its parent lives: loky's live on for minutes."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A case without a result, and why."""

    case: str
    error: Exception

    @property
    def reason(self) -> str:
        """One line."""
        kind = "" if isinstance(self.error, Co2simError) else f"{type(self.error).__name__}: "
        return " ".join(f"{kind}{self.error}".split())


Outcome: TypeAlias = Result | Failure


class Interrupted(KeyboardInterrupt):
    """Control-C before all cases were done: what those that were gave, by their places."""

    def __init__(self, outcomes: Mapping[int, Outcome], cases: int) -> None:
        super().__init__(f"{len(outcomes)} of {counted(cases, 'case')} were done")
        self.outcomes = dict(sorted(outcomes.items()))


def run_all(
    cases: Sequence[Case],
    jobs: Count = 1,
    *,
    progress: bool | None = None,
    what: str = "simulating cases",
) -> list[Outcome]:
    """A result, or a failure, for every case, in order; `progress` as in `simulate`, with `what`.

    `jobs` is how many processes run them, -1 for one per core; never more than there are cases, or
    two per core. A process that is killed costs its case and no other; a case without room beside
    others runs alone. Raises the error of the first case when none gave a result, and `Interrupted`
    at control-C.
    """
    found: dict[int, Outcome] = {}
    try:
        with progress_bar(what, shown=progress) as done:
            for place, outcome in _outcomes(cases, processes(jobs, len(cases))):
                found[place] = outcome
                if done:
                    done(len(found), len(cases))
    except KeyboardInterrupt:
        raise Interrupted(found, len(cases)) from None
    ordered = [found[place] for place in range(len(cases))]
    failures = [outcome for outcome in ordered if isinstance(outcome, Failure)]
    if failures and len(failures) == len(ordered):
        first = failures[0]
        if isinstance(first.error, Co2simError):
            raise type(first.error)(f"{first.case}: {first.reason}") from first.error
        raise first.error
    return ordered


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


def _outcomes(cases: Sequence[Case], jobs: int) -> Iterator[tuple[int, Outcome]]:
    """Outcomes with the places of their cases, as they come.

    Cases that have no room beside others run again at the end, one at a time.
    """
    if jobs == 1:
        yield from ((place, _outcome(case)) for place, case in enumerate(cases))
        return
    crowded = []
    for place, outcome in _in_processes(cases, range(len(cases)), jobs):
        if isinstance(outcome, Failure) and isinstance(outcome.error, NoRoomError):
            crowded.append(place)
        else:
            yield place, outcome
    if crowded:
        yield from _in_processes(cases, sorted(crowded), 1)


def _in_processes(
    cases: Sequence[Case], places: Sequence[int], jobs: int
) -> Iterator[tuple[int, Outcome]]:
    """Outcomes of the cases at these places, from so many processes."""
    waiting = deque((place, cases[place]) for place in places)
    workers: dict[Future[Any], tuple[Any, int]] = {}  # one process each: who dies names its case
    try:
        for _ in range(jobs):
            _start(_worker(jobs), waiting, workers)
        while workers:
            for future in wait(workers, return_when=FIRST_COMPLETED).done:
                worker, place = workers.pop(future)
                outcome, worker = _finished(future, worker, cases[place], jobs)
                yield place, outcome
                _start(worker, waiting, workers)
    finally:
        for worker, _ in workers.values():
            worker.shutdown(kill_workers=True)


def _start(
    worker: Any, waiting: deque[tuple[int, Case]], workers: dict[Future[Any], tuple[Any, int]]
) -> None:
    """Give a worker the next case, or send it home."""
    if not waiting:
        worker.shutdown()
        return
    place, case = waiting.popleft()
    workers[worker.submit(_outcome, case)] = worker, place


def _finished(future: Future[Any], worker: Any, case: Case, jobs: int) -> tuple[Outcome, Any]:
    """What a worker found, and the worker that takes its place."""
    try:
        return future.result(), worker
    except BrokenProcessPool:
        worker.shutdown(kill_workers=True)
        error = ResourceError("its process was killed, perhaps for want of memory")
        return Failure(case.title, error), _worker(jobs)


def _worker(jobs: int) -> Any:
    from joblib.externals.loky import ProcessPoolExecutor  # noqa: PLC0415 - see `processes`

    return ProcessPoolExecutor(max_workers=1, initializer=_begin, initargs=(jobs, os.getpid()))


def _begin(jobs: int, parent: int) -> None:
    """In a worker: take its part of the memory, and end with the process that started it."""
    share_memory(jobs)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _outcome(case: Case) -> Outcome:
    try:
        return run(case)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other cases have a right to go on
        return Failure(case.title, error)
