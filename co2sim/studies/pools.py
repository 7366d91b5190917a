"""Workers of many cases: processes of this machine (loky) or of Dask, and what flows through them.

Memory does not grow with the number of cases: they are taken as workers are free, several under
way, even if workers die.
"""

import logging
import os
import pickle
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from co2sim.common.convert import Count, shown, whole
from co2sim.common.errors import Co2simError, EngineError, OptionError, ResourceError, nearest
from co2sim.common.resources import share_memory
from co2sim.common.units import Seconds
from co2sim.common.version import own_identity

_DONE, _OTHER, _UNREAD = "done", "other", "unread"


def pack(function: Callable[[Any], Any], cases: Sequence[Any]) -> bytes:
    """The content of a task; what a script or a notebook defines travels with it."""
    import cloudpickle  # noqa: PLC0415 - time that one process does not need

    packed: bytes = cloudpickle.dumps((function, cases))
    return packed


def expected() -> tuple[str, ...]:
    """What a worker has to be: plain texts."""
    return astuple(own_identity())


def work(expected: Sequence[str], share: int, content: bytes) -> tuple[str, Any]:
    """In a worker: the function of every case, with the seconds that it all took.

    Nothing is read before it is clear that the sender has the same co2sim.
    """
    here = own_identity()
    if tuple(expected) != astuple(here):
        return _OTHER, (platform.node(), str(here))
    share_memory(share)
    try:
        function, cases = pickle.loads(content)  # noqa: S301 - of who may run code here anyway
    except Exception as error:  # noqa: BLE001 - whatever a class of a user raises
        return _UNREAD, f"{type(error).__name__}: {error}"
    began = time.perf_counter()
    results = [function(case) for case in cases]
    return _DONE, (time.perf_counter() - began, results)


def answers(answer: tuple[str, Any]) -> tuple[float, list[Any]]:
    """Seconds and answers of a task. Raises EngineError for a worker that could not work."""
    kind, content = answer
    if kind == _OTHER:
        host, other = content
        raise EngineError(
            f"the worker on {host} has {other}; here it is {own_identity()}: install the same there"
        )
    if kind == _UNREAD:
        raise EngineError(
            f"a worker cannot read the cases: {content}; what they are made of has to be installed"
            " there, too"
        )
    seconds, results = content
    return seconds, results


Item: TypeAlias = tuple[int, Any]
"""A case with its place."""
Answer: TypeAlias = tuple[int, Any, Any]
"""A place, its case, and what the function gives of it; ResourceError if its worker was killed."""

_TASK: Seconds = 0.25
"""Of cases that make one task: far longer than it takes to send them."""
_MAX_OF_A_TASK = 64
_LOOK: Seconds = 5.0
"""Between two looks at whether anybody is left to work."""
_KILLED = "its process was killed, perhaps for want of memory"


def run_flow(
    pool: "Pool",
    items: Iterable[Item],
    function: Callable[[Any], Any],
    total: int,
    crowded: Callable[[Any], bool],
) -> Iterator[Answer]:
    """What the function gives of each case, as it comes; `total` is how many cases there are.

    A case whose worker dies runs again. If that happens twice it runs alone at the end, and so do
    those whose answer is `crowded`: they have no room beside others. Raises EngineError where
    workers have another co2sim, or where none is left.
    """
    flow = _CaseFlow(pool, function, total)
    alone: list[Item] = []
    try:
        for index, case, answer in flow.through(iter(items)):
            if isinstance(answer, ResourceError) or crowded(answer):
                alone.append((index, case))
            else:
                yield index, case, answer
        yield from flow.through(iter(alone), alone=True)
    finally:
        flow.cancel()


class _CaseFlow:
    """What is under way."""

    def __init__(self, pool: "Pool", function: Callable[[Any], Any], total: int) -> None:
        self._pool, self._function, self._left = pool, function, total
        self._flying: dict[Future[Any], Sequence[Item]] = {}
        self._again: deque[Item] = deque()
        self._size = 1
        self._looked = time.monotonic()

    def through(self, source: Iterator[Item], *, alone: bool = False) -> Iterator[Answer]:
        """As many at a time as there are workers, or each `alone`, until all cases are taken."""
        self._left = 0 if alone else self._left  # one case a task
        while True:
            slots, share = (1, 1) if alone else (self._pool.slots, self._pool.share)
            while len(self._flying) < slots and (chunk := self._next(source)):
                content = pack(self._function, [case for _, case in chunk])
                self._flying[self._pool.submit(share, content)] = chunk
            if not self._flying:
                return
            for future in self._done():
                chunk = self._flying.pop(future)
                answers = self._answers(future)
                if answers is not None:
                    for (index, case), answer in zip(chunk, answers, strict=True):
                        yield index, case, answer
                elif len(chunk) > 1:
                    self._again.extend(chunk)
                else:
                    yield *chunk[0], ResourceError(_KILLED)

    def cancel(self) -> None:
        """Want no answers any more."""
        for future in self._flying:
            future.cancel()

    def _next(self, source: Iterator[Item]) -> Sequence[Item]:
        """Cases of the next task: one of those whose worker died, or some new ones."""
        if self._again:
            return [self._again.popleft()]
        fair = self._left // (2 * self._pool.slots)  # so that all end at about the same time
        chunk = list(islice(source, max(1, min(self._size, fair))))
        self._left -= len(chunk)
        return chunk

    def _done(self) -> set[Future[Any]]:
        if time.monotonic() - self._looked >= _LOOK:
            self._pool.check()
            self._looked = time.monotonic()
        return wait(self._flying, timeout=_LOOK, return_when=FIRST_COMPLETED).done

    def _answers(self, future: Future[Any]) -> list[Any] | None:
        """What a task found; None where its worker died."""
        try:
            seconds, results = answers(future.result())
        except Co2simError:
            raise
        except (Exception, CancelledError) as error:
            if self._pool.died(error):
                return None
            self._pool.check()
            causes = (error.__cause__, error)
            reason = next(f"{type(e).__name__}: {e}" for e in causes if e is not None)
            raise EngineError(
                f"a worker cannot run {own_identity()}: {' '.join(reason.split())}"
            ) from error
        each = max(seconds / len(results), 1e-6)
        self._size = max(1, min(int(_TASK / each), 2 * self._size, _MAX_OF_A_TASK))
        return results


_PARENT_LOOK: Seconds = 0.5
"""Between two looks of a worker at whether its parent lives: loky's live on for minutes."""


class LokyPool:
    """A pool of processes; one that dies is replaced."""

    def __init__(self, count: int) -> None:
        """None is started before it has work."""
        self.slots = self.share = count
        self._crew: list[tuple[Any, Future[Any]]] = []

    def submit(self, share: int, content: bytes) -> Future[Any]:
        """Give a task to a process that has none; `share` of them share the memory meanwhile."""
        free = next((turn for turn, (_, last) in enumerate(self._crew) if last.done()), None)
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
    from joblib.externals.loky import ProcessPoolExecutor  # noqa: PLC0415 - see `processes`

    return ProcessPoolExecutor(max_workers=1, initializer=_begin, initargs=(os.getpid(),))


def _begin(parent: int) -> None:
    """In a worker: end with the process that started it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_LOOK)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


_PATIENCE: Seconds = 30.0
"""What a scheduler may take to answer as one, and to have a worker."""
_ABSENCE: Seconds = 120.0
"""For how long a scheduler may be without any worker: a lost one is started again by then."""
_END: Seconds = 10.0
"""What it may take to end, before it is killed."""


class DaskCluster:
    """A scheduler and its workers, in another process; `address` is that of the scheduler."""

    def __init__(self, workers: int) -> None:
        """Start it, and wait for its address."""
        path = os.pathsep.join([*filter(None, sys.path), os.getcwd()])  # noqa: PTH109 - a text
        self._process = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-m", __name__, str(workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            self.close()
            raise EngineError("Dask's scheduler and workers could not be started on this machine")

    def close(self) -> None:
        """End it."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert stream
                stream.close()
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _serve_dask() -> None:
    """In that process: a scheduler and its workers, until its input ends."""
    distributed: Any = import_module("distributed")  # optional, and not typed
    with distributed.LocalCluster(
        n_workers=int(sys.argv[1]),
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.CRITICAL,
    ) as cluster:
        sys.stdout.write(f"{cluster.scheduler_address}\n")
        sys.stdout.flush()
        sys.stdin.read()


_AHEAD = 2
"""Tasks for each thread of a worker: one that it runs, and one that waits there."""
_FEW_SECONDS: Seconds = 5.0
_CONNECT_TIMEOUT: Seconds = 10.0
"""What a machine may take to answer at all."""
_LOGGERS = ("distributed", "distributed.client", "tornado")
"""They would tell on stderr of workers that were lost, which is no trouble."""


class DaskPool:
    """Dask's workers. It runs a task elsewhere if its worker dies, up to three times."""

    def __init__(self, scheduler: str | None, count: int) -> None:
        """Reach the scheduler, or start one here with `count` workers."""
        distributed = _distributed()
        self._killed = distributed.KilledWorker
        self._cluster = DaskCluster(count) if scheduler is None else None
        self._address = self._cluster.address if self._cluster else str(scheduler)
        self._client: Any = None
        try:
            self._client = _client(distributed, self._address)
            self._client.wait_for_workers(1, timeout=_PATIENCE)
            self._executor = self._client.get_executor(pure=False)
            self._there, self._hosts = 0, 0
            self._seen = time.monotonic()
            self._look()
        except TimeoutError:
            self.close()
            raise EngineError(
                f"the scheduler at {self._address} has no workers after {_PATIENCE:g} s; start some"
                f" with `dask worker {self._address} --nthreads 1`"
            ) from None
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> int:
        """A task for each thread, and one that waits."""
        return _AHEAD * max(self._there, 1)

    @property
    def share(self) -> int:
        """The most threads that one host has."""
        return max(self._hosts, 1)

    def submit(self, share: int, content: bytes) -> Future[Any]:
        """Start a task."""
        future: Future[Any] = self._executor.submit(work, expected(), share, content)
        return future

    def died(self, error: BaseException) -> bool:
        """Whether a task has killed all workers that tried it."""
        return isinstance(error, self._killed)

    def check(self) -> None:
        """Raise EngineError where the scheduler is gone, or has had no worker for long."""
        if self._client.status != "running":
            raise EngineError(f"the connection to the scheduler at {self._address} was lost")
        self._look()
        if time.monotonic() - self._seen > _ABSENCE:
            raise EngineError(
                f"the scheduler at {self._address} has had no workers for {_ABSENCE:g} s"
            )

    def close(self) -> None:
        """Leave the scheduler; end the one on this machine."""
        if self._client is not None:
            with suppress(TimeoutError, OSError):
                self._client.close(timeout=_FEW_SECONDS)
        if self._cluster is not None:
            self._cluster.close()

    def _look(self) -> None:
        """Note which workers are there now: others may come at any time."""
        with suppress(OSError, TimeoutError):
            threads = self._client.nthreads()
            hosts: Counter[str] = Counter()
            for address, count in threads.items():
                hosts[address.rpartition("://")[2].rpartition(":")[0]] += count
            self._there, self._hosts = hosts.total(), max(hosts.values(), default=0)
        if self._there:
            self._seen = time.monotonic()


Pool: TypeAlias = LokyPool | DaskPool
"""Workers that are there: `slots` tasks should be under way, and `share` is the most workers that
one machine has. A future gives what `work` gives, or the engine's own error."""


def _distributed() -> Any:
    try:
        if "distributed" not in sys.modules:  # else its logs are the business of who imported it
            import dask  # noqa: PLC0415 - optional

            dask.config.set({"logging": dict.fromkeys(_LOGGERS, "critical")})
        import distributed  # noqa: PLC0415 - optional
    except ImportError:
        raise OptionError("the engine dask needs Dask: pip install '.[dask]'") from None
    return distributed


def _client(distributed: Any, scheduler: str) -> Any:
    """A client of the scheduler: at an address, or in the file that it wrote."""
    common: dict[str, Any] = {"timeout": _PATIENCE, "set_as_default": False}
    if scheduler.endswith(".json"):
        if not Path(scheduler).is_file():
            raise OptionError(f"scheduler is {scheduler!r}; there is no such file")
        common["scheduler_file"] = scheduler
    else:
        _reach(scheduler)
        common["address"] = scheduler
    try:
        return distributed.Client(**common)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EngineError(f"no Dask scheduler answers at {scheduler}: {reason}") from None


def _reach(address: str) -> None:
    """Check that something listens at HOST:PORT; the library would take longer."""
    match = re.fullmatch(r"(?:(?:tcp|tls|ws|wss)://)?\[?([^\[\]/\s]+?)\]?:([0-9]{1,5})", address)
    if match is None:
        raise OptionError(
            f"scheduler is {shown(address)}; of Dask it is tcp://HOST:8786, or the .json file it"
            " wrote"
        )
    try:
        socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_TIMEOUT).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = " ".join(str(error).split())
        raise EngineError(f"no Dask scheduler answers at {address}: {reason}") from None


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
            meant = nearest(self.name, ENGINES) if isinstance(self.name, str) else ""
            raise OptionError(
                f"engine is {shown(self.name)}; it is one of {', '.join(ENGINES)}"
                + (f"; {meant}" if "mean" in meant else "")
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
def opened(engine: Engine, cases: int) -> Iterator[Pool | None]:
    """The workers of an engine for some cases, until the end of the block; None: this process.

    Raises OptionError without the package of the engine, EngineError without its workers.
    """
    count = processes(engine.jobs, max(cases, 1))
    pool: Pool | None = None if count == 1 else LokyPool(count)
    if engine.name == "dask":
        pool = DaskPool(engine.scheduler, count)
    try:
        yield pool
    finally:
        if pool is not None:
            pool.close()


if __name__ == "__main__":
    _serve_dask()
