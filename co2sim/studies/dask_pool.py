"""The workers of a Dask scheduler, or of one on this machine."""

import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from co2sim.common.convert import shown
from co2sim.common.errors import EngineError, OptionError
from co2sim.common.units import Seconds
from co2sim.studies.pools import ABSENCE, PATIENCE, expected, work

_END: Seconds = 10.0
"""What it may take to end, before it is killed."""


class DaskCluster:
    """The other end of such a process; `address` is that of its scheduler."""

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


def _main() -> None:
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


if __name__ == "__main__":
    _main()


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
            self._client.wait_for_workers(1, timeout=PATIENCE)
            self._executor = self._client.get_executor(pure=False)
            self._there, self._hosts = 0, 0
            self._seen = time.monotonic()
            self._look()
        except TimeoutError:
            self.close()
            raise EngineError(
                f"the scheduler at {self._address} has no workers after {PATIENCE:g} s; start some"
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
        if time.monotonic() - self._seen > ABSENCE:
            raise EngineError(
                f"the scheduler at {self._address} has had no workers for {ABSENCE:g} s"
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
    common: dict[str, Any] = {"timeout": PATIENCE, "set_as_default": False}
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
    found = re.fullmatch(r"(?:(?:tcp|tls|ws|wss)://)?\[?([^\[\]/\s]+?)\]?:([0-9]{1,5})", address)
    if found is None:
        raise OptionError(
            f"scheduler is {shown(address)}; of Dask it is tcp://HOST:8786, or the .json file it"
            " wrote"
        )
    try:
        socket.create_connection((found[1], int(found[2])), timeout=_CONNECT_TIMEOUT).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = " ".join(str(error).split())
        raise EngineError(f"no Dask scheduler answers at {address}: {reason}") from None
