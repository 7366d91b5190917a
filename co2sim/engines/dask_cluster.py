"""A Dask scheduler with workers on this machine, in a process of its own, until its input ends.

It is apart from the terminal, so that control-C reaches only who started it; if that one dies, the
input ends, too. No script needs `if __name__ == "__main__":` for it.
"""

import logging
import os
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from co2sim.errors import EngineError
from co2sim.units import Seconds

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
