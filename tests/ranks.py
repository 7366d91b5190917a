"""Ranks for tests, forked from one process that has loaded PyTorch.

A rank that is started as a program needs two seconds of a core to load it, a forked one none.
"""

import json
import multiprocessing
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import rank_main

from realrun.launch.local import GRACE, host_store, rank_environment
from realrun.launch.processes import RankProcess
from realrun.launch.supervise import supervise

LOADED = ("pytest", "torch.distributed.fsdp", "realrun.execute.executor", "realrun.algorithms")


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


def forked(
    nproc: int,
    target: Callable[..., None],
    folder: Path,
    *arguments: Any,
    gpus_per_node: int = 0,
    limit: float = 120.0,
    **environment: str,
) -> int:
    """The exit code of ranks that call `target(environment, folder, *arguments)`.

    They are watched as by the launcher, which passes on what fails, and have `limit` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    store = host_store("127.0.0.1")
    ranks: list[RankProcess] = []
    late = threading.Timer(limit, lambda: [one.kill() for one in ranks])
    try:
        late.start()
        for rank in range(nproc):
            place = rank_environment(
                rank,
                nproc,
                local_world_size=gpus_per_node or nproc,
                address="127.0.0.1",
                port=store.port,
            )
            whole = {**os.environ, **place, **environment}
            process = context.Process(
                target=target, args=(whole, str(folder), *arguments), daemon=True
            )
            process.start()
            ranks.append(RankProcess(rank, Forked(process)))  # type: ignore[arg-type]
        return supervise(ranks, store, GRACE)
    finally:
        late.cancel()
        for one in ranks:
            one.kill()


def said(folder: Path) -> str:
    """What the ranks printed, rank by rank."""
    return "".join(path.read_text() for path in sorted(folder.glob("*[tr][0-9]*")))


def on_ranks(
    function: str,
    nproc: int,
    *,
    gpus_per_node: int = 0,
    backend: str = "gloo",
    module: str = "workers",
    dies: int | None = None,
    limit: float = 120.0,
    **arguments: Any,
) -> list[Any]:
    """What `MODULE.FUNCTION(world, **arguments)` gives on every rank; it must be JSON.

    The rank that `dies` gives None. All have `limit` seconds.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = forked(
            nproc,
            rank_main.call,
            folder,
            *(backend, module, function, arguments),
            gpus_per_node=gpus_per_node,
            limit=limit,
        )
        assert dies is not None or code == 0, said(folder)
        paths = [folder / str(rank) for rank in range(nproc) if rank != dies]
        assert all(path.exists() for path in paths), said(folder)
        answers = [json.loads(path.read_text()) for path in paths]
        return answers if dies is None else [*answers[:dies], None, *answers[dies:]]


def realrun(
    folder: Path, nproc: int, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`realrun ARGUMENTS` as so many ranks, in a folder; what rank 0 printed."""
    code = forked(nproc, rank_main.command, folder, arguments, **environment)
    out, errors = (folder / "out0").read_text(), (folder / "err0").read_text()
    return subprocess.CompletedProcess(arguments, code, out, errors)
