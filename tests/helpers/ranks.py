"""Ranks for tests, forked from one process that has loaded PyTorch.

A rank that is started as a program needs seconds of a core to load it, a forked one none. Tests and
functions are called on ranks that stay: they have joined once, and their process group stays up.
"""

import atexit
import inspect
import json
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import rank_main

from realrun.launch.launcher import GRACE, host_store, rank_environment
from realrun.launch.monitor import supervise
from realrun.launch.processes import RankProcess

TWO_RANKS = """
name = "this machine"
source = "for tests"
nodes = 1
gpus_per_node = 2
gpu = "virtual"
backend = "gloo"
intra = { bandwidth = "1 GB/s", latency = "50 us" }
inter = { bandwidth = "1 GB/s", latency = "50 us" }
"""
"""A cluster file of two virtual GPUs on this machine."""

LOADED = (
    "pytest",
    "torch._dynamo",  # which the first step of an optimizer loads: a second of every rank
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "realrun.algorithms",
    "realrun.execute.executor",
    "realrun.measure",
    "realrun.train.loop",
)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(list(LOADED))


class Forked:
    """A forked process with the part of `subprocess.Popen` that `supervise` uses.

    It leads a group of its own, as after `Popen(start_new_session=True)`, and so can be killed.
    """

    stdout = stderr = None

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self.process, self.pid = process, process.pid
        with suppress(ProcessLookupError):
            while os.getpgid(self.pid) != self.pid and process.exitcode is None:
                time.sleep(0.001)

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self.process.exitcode

    returncode = property(poll)


def _start(
    nproc: int,
    port: int,
    target: Callable[..., None],
    folder: Path,
    *arguments: Any,
    **environment: str,
) -> list[RankProcess]:
    """Fork ranks that call `target(environment, folder, *arguments)`."""
    ranks = []
    for rank in range(nproc):
        place = rank_environment(
            rank, nproc, local_world_size=nproc, address="127.0.0.1", port=port
        )
        whole = {**os.environ, **place, **environment}
        process = CONTEXT.Process(target=target, args=(whole, str(folder), *arguments), daemon=True)
        process.start()
        ranks.append(RankProcess(rank, Forked(process)))  # type: ignore[arg-type]
    return ranks


def forked(
    nproc: int, target: Callable[..., None], folder: Path, *arguments: Any, **environment: str
) -> int:
    """The exit code of ranks that call `target(environment, folder, *arguments)`.

    They are watched as by the launcher, which passes on what fails, and have two minutes.
    """
    store = host_store("127.0.0.1")
    ranks: list[RankProcess] = []
    late = threading.Timer(120.0, lambda: [one.kill() for one in ranks])
    try:
        late.start()
        ranks += _start(nproc, store.port, target, folder, *arguments, **environment)
        return supervise(ranks, store, GRACE)
    finally:
        late.cancel()
        for one in ranks:
            one.kill()


class _Pool:
    """Ranks that have joined, and answer calls of one module until one of them fails.

    Another module gets ranks of its own: what a refused call left behind, such as process groups
    that only some ranks made, ends with the module that knows of it.
    """

    def __init__(self, nproc: int, backend: str, module: str) -> None:
        self.module = module
        self._folder, self._store = Path(tempfile.mkdtemp()), host_store("127.0.0.1")
        pairs = [multiprocessing.Pipe() for _ in range(nproc)]
        self._calls: list[Connection] = [ours for ours, _ in pairs]
        theirs = [other for _, other in pairs]
        self._ranks = _start(
            nproc, self._store.port, rank_main.serve, self._folder, backend, theirs
        )
        for one in theirs:
            one.close()

    def call(self, given: tuple[Any, ...], dies: Sequence[int]) -> list[Any]:
        """What a function gives on every rank; None for those of `dies`."""
        for connection in self._calls:
            connection.send(given)
        answers: list[Any] = [None] * len(self._calls)
        ranks = {call: rank for rank, call in enumerate(self._calls) if rank not in dies}
        end = time.monotonic() + 300.0
        while ranks:
            ready = wait(list(ranks), max(0.0, end - time.monotonic()))
            assert ready, f"ranks {sorted(ranks.values())} hang"
            for connection in ready:
                rank = ranks.pop(connection)
                try:
                    well, answer = connection.recv()
                except EOFError:
                    raise AssertionError(f"rank {rank} is gone: {self._said(rank)}") from None
                assert well, f"rank {rank}: {answer}"
                answers[rank] = json.loads(answer)
        return answers

    def _said(self, rank: int) -> str:
        return (self._folder / f"err{rank}").read_text()

    def end(self) -> None:
        """Kill the ranks."""
        for one in self._ranks:
            one.kill()
        for connection in self._calls:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_POOLS: dict[tuple[int, str], _Pool] = {}


@atexit.register
def _end_all() -> None:
    while _POOLS:
        _POOLS.popitem()[1].end()


def on_ranks(
    function: str,
    nproc: int,
    *,
    gpus_per_node: int = 0,
    backend: str = "gloo",
    module: str = "workers",
    dies: Sequence[int] = (),
    last: bool = False,
    **arguments: Any,
) -> list[Any]:
    """What `MODULE.FUNCTION(world, **arguments)` gives on every rank; it must be JSON.

    A rank that `dies` gives None. Ranks stay for the next call, unless one fails or `last` says
    that they cannot go on. All have five minutes.
    """
    key = (nproc, backend)
    pool = _POOLS.pop(key, None)
    if pool and pool.module != module:
        pool.end()
        pool = None
    pool = pool or _Pool(nproc, backend, module)
    stays = False
    try:
        given = (module, function, gpus_per_node or nproc, arguments)
        answers = pool.call(given, dies)
        stays = not dies and not last
        return answers
    finally:
        if stays:
            _POOLS[key] = pool
        else:
            pool.end()


def ranked(nproc: int, **how: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that so many ranks make, each with its world, as `on_ranks` calls them.

    Its other arguments are fixtures, which are made once, here, and have to be picklable.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            on_ranks(test.__name__, nproc, module=test.__module__, **how, **fixtures)

        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return pytest.mark.dist(run)

    return decorate


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks, on a rank."""
    from torch import distributed as dist  # noqa: PLC0415 - only ranks need it

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def realrun_on_ranks(
    folder: Path, nproc: int, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`realrun ARGUMENTS` as so many ranks, in a folder; what rank 0 printed."""
    code = forked(nproc, rank_main.command, folder, arguments, **environment)
    out, errors = (folder / "out0").read_text(), (folder / "err0").read_text()
    return subprocess.CompletedProcess(arguments, code, out, errors)
