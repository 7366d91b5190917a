"""The workers of a Ray cluster, or of one on this machine."""

import logging
import os
import sys
from concurrent.futures import Future
from contextlib import ExitStack, redirect_stdout
from typing import Any

from co2sim.engines.pool import reach
from co2sim.engines.task import expected, work
from co2sim.errors import EngineError, OptionError
from co2sim.units import Bytes

_AHEAD = 2
"""Tasks for each core: one that runs, and one that waits."""
_STORE: Bytes = 100e6
"""Of Ray's store of objects on this machine, near the least that it takes: ours are small."""
_RETRIES = 3
"""As Dask tries a task whose worker dies."""


class RayPool:
    """Ray's workers. It runs a task elsewhere if its worker dies, up to three times.

    Ray prints what happens to its workers on the standard output, which is for results: until the
    pool is closed it is the standard error.
    """

    def __init__(self, scheduler: str | None, count: int) -> None:
        """Reach the cluster, or start one here with `count` workers; or take that of the caller."""
        self._ray = ray = _ray()
        self._address = scheduler
        self._own = not ray.is_initialized()
        self._streams = ExitStack()
        self._streams.enter_context(redirect_stdout(sys.stderr))
        try:
            if self._own:
                _start(ray, scheduler, count)
            self.check()
        except BaseException:
            self.close()
            raise
        errors = ray.exceptions
        self._deaths = (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        )
        self._work = ray.remote(work).options(num_cpus=1, max_retries=_RETRIES)

    @property
    def slots(self) -> int:
        """A task for each core, and one that waits."""
        return _AHEAD * max(self._cores, 1)

    @property
    def share(self) -> int:
        """The most cores that one node has."""
        return max(self._node, 1)

    def submit(self, share: int, content: bytes) -> Future[Any]:
        """Start a task."""
        future: Future[Any] = self._work.remote(expected(), share, content).future()
        return future

    def died(self, error: BaseException) -> bool:
        """Whether a task has killed all workers that tried it."""
        return isinstance(error, self._deaths)

    def check(self) -> None:
        """Raise EngineError where no node with a core is left."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        cores = [int(node["Resources"].get("CPU", 0)) for node in nodes]
        self._cores, self._node = sum(cores), max(cores, default=0)
        if not self._cores:
            raise EngineError(f"the Ray cluster at {self._address} has no cores")

    def close(self) -> None:
        """Leave the cluster, or end the one on this machine."""
        if self._own:
            self._ray.shutdown()
        self._streams.close()


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # and warns that it changes
    try:
        import ray  # noqa: PLC0415 - optional
    except ImportError:
        raise OptionError("the engine ray needs Ray: pip install 'co2sim[ray]'") from None
    return ray


def _start(ray: Any, scheduler: str | None, count: int) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if scheduler is None:
        try:
            ray.init(
                address="local",
                num_cpus=count,
                include_dashboard=False,
                object_store_memory=int(_STORE),
                **quiet,
            )
        except Exception as error:  # a plain one, where the machine is too busy to start in time
            reason = " ".join(str(error).split())
            raise EngineError(f"Ray could not be started on this machine: {reason}") from error
        return
    if scheduler != "auto":
        reach("Ray", scheduler, "ray", "HOST:6379, ray://HOST:10001 or auto")
    try:
        ray.init(address=scheduler, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise EngineError(f"no Ray scheduler answers at {scheduler}: {reason}") from None
