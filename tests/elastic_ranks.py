"""Ranks that train elastically, forked; some kill themselves, and are started anew."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import rank_main
from ranks import LOADED, Forked

from realrun.launch.elastic import supervise_elastic
from realrun.launch.local import host_store, rank_environment
from realrun.launch.membership import LIFE, ElasticMember, Membership, Roll
from realrun.launch.processes import RankProcess
from realrun.train.elastic_record import GenerationRow, read_generations

DEADLINE = 20.0
TAU, ROUNDS, RANKS = 2, 12, 3
LR, MOMENTUM = 0.7, 0.5
SETTINGS: dict[str, Any] = {
    "size": "tiny",
    "context": 16,
    "batch": 6,
    "optimizer": "sgd",
    "lr": 0.05,
    "warmup": 2,
    "clip_grad": 0.0,
    "steps": TAU * ROUNDS,
    "eval_every": TAU,
    "log_every": 1,
    "outer": {"momentum": str(MOMENTUM), "lr": str(LR)},
}


@dataclass(frozen=True)
class Faults:
    """Which member kills itself before which step, and the step that waits for one to come back.

    `frozen`: it stops (SIGSTOP) instead. `hangs`: which one stops when it writes the results, and
    which one once it has nothing left to do.
    """

    dies: Mapping[str, int]
    hangs: tuple[str, str] = ("", "")
    holds: int = 0
    frozen: bool = False
    deadline: float = DEADLINE


def member(
    environment: Mapping[str, str], folder: str, settings: Mapping[str, Any], faults: Faults
) -> None:
    """Be a member, as `realrun train --elastic` is one."""
    rank_main.be_rank(environment, folder)
    import torch  # noqa: PLC0415 - the process that ranks are forked from has loaded it
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: PLC0415

    from co2sim.schedule import Layout  # noqa: PLC0415
    from realrun.execute.world import end  # noqa: PLC0415
    from realrun.train import elastic_loop  # noqa: PLC0415
    from realrun.train.local_step import LocalStep  # noqa: PLC0415
    from realrun.train.settings import TrainSettings  # noqa: PLC0415

    torch.set_num_threads(1)
    me = ElasticMember(int(environment["RANK"]), int(environment[LIFE]))
    size, port = int(environment["WORLD_SIZE"]), int(environment["MASTER_PORT"])
    limit = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", port, size, False, limit, False)  # noqa: FBT003
    honest = LocalStep.take

    def take(self: Any, step: int) -> float:
        if step == faults.dies.get(str(me)):
            os.kill(os.getpid(), signal.SIGSTOP if faults.frozen else signal.SIGKILL)
        if step == faults.holds and not me.life:
            hold(Roll(store))
        return honest(self, step)

    LocalStep.take = take  # type: ignore[method-assign]
    if faults.hangs[0]:
        elastic_loop._WRITING = 6.0  # a busy machine takes some to write
    if faults.hangs[0] == str(me):
        elastic_loop._ElasticTraining._write = freeze  # type: ignore[method-assign]
    membership = Membership(store, me, size, faults.deadline)
    layout = Layout(1, size)
    history = elastic_loop.train_elastic(
        TrainSettings(**settings), membership, store, layout, Path(folder)
    )
    if history:
        (Path(folder) / "writer").write_text(str(me))
    if faults.hangs[1] == str(me):
        freeze()
    end()


def freeze(*_: object) -> Any:
    """Stop, as a process that hangs."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hold(roll: Roll) -> None:
    """Wait until a rank that was started anew waits to come in."""
    limit = time.monotonic() + 60
    while not roll.listed("waiting"):
        assert time.monotonic() < limit
        time.sleep(0.01)


@dataclass(frozen=True)
class Outcome:
    """How an elastic training went."""

    code: int
    rows: tuple[GenerationRow, ...]
    record: Mapping[str, Any]
    writer: str
    said: str

    @property
    def facts(self) -> Mapping[str, Any]:
        """What train.json says of the members."""
        found: Mapping[str, Any] = self.record["facts"]["elastic"]
        return found


def elastic(
    folder: Path, nproc: int, settings: Mapping[str, Any], faults: Faults, restarts: int
) -> Outcome:
    """Train with `nproc` ranks, which the launcher's own code watches and starts anew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*LOADED, "realrun.train.elastic_loop"])
    store = host_store("127.0.0.1")
    ranks: list[RankProcess] = []

    def start(rank: int, life: int = 0) -> RankProcess:
        place = rank_environment(
            rank, nproc, local_world_size=nproc, address="127.0.0.1", port=store.port
        )
        whole = {**os.environ, **place, LIFE: str(life), "OMP_NUM_THREADS": "1"}
        arguments = (whole, str(folder), settings, faults)
        process: ForkServerProcess = context.Process(target=member, args=arguments, daemon=True)
        process.start()
        ranks.append(RankProcess(rank, Forked(process)))  # type: ignore[arg-type]
        return ranks[-1]

    kill: Callable[[], Any] = lambda: [one.kill() for one in ranks]  # noqa: E731
    late = threading.Timer(180.0, kill)
    began = time.monotonic()
    try:
        late.start()
        first = [start(rank) for rank in range(nproc)]
        code = supervise_elastic(first, store, start, restarts)
    finally:
        late.cancel()
        kill()
    said = "".join(path.read_text() for path in sorted(folder.glob("err*")))
    assert time.monotonic() - began < 180, f"did not end by itself: {said}"
    record, writer = folder / "train.json", folder / "writer"
    return Outcome(
        code,
        read_generations(folder),
        json.loads(record.read_text()) if record.exists() else {},
        writer.read_text() if writer.exists() else "",
        said,
    )
