"""What ranks of the tests of sites do."""

import os
from dataclasses import asdict
from typing import Any

from local_problem import said

from co2sim.schedule.schedule import SITE, SITE_PEERS, Collective, DType, Kind, Layout, Op, Schedule
from realrun.algorithms import Workers
from realrun.algorithms.process_groups import workers_of
from realrun.errors import SITES
from realrun.execute.collectives import allocate, carry_out
from realrun.execute.world import World
from realrun.train import TrainSettings, train

SMALL: dict[str, Any] = {
    "size": "tiny",
    "context": 16,
    "batch": 8,
    "warmup": 4,
    "lr": 1e-2,
    "log_every": 4,
    "checkpoint_every": 0,
    "steps": 16,
    "eval_every": 8,
}


def met(world: World) -> list[list[float]]:
    """Members of this rank's groups at two sites, and the sum of (rank + 1) in each."""
    world.place(Layout(4, 1, 2))
    found = []
    for group in (SITE, SITE_PEERS):
        work = Collective(Kind.ALL_REDUCE, "x", 3, DType.FP32, group)
        world.connect(Schedule("s", (Op("c", work, "comm"),)))
        at = world.communicator("comm", group)
        assert at is not None
        buffers = allocate(work, len(at.members), world.device)
        buffers.given.fill_(world.rank + 1)
        carry_out(work, buffers, at, 30.0)
        found.append([*at.members, float(buffers.given[0])])
    return found


def learned(world: World, strategies: list[str]) -> dict[str, list[list[Any]]]:
    """What two nodes of two ranks learn as workers, and two sites of two nodes of one."""
    found: dict[str, list[list[Any]]] = {}
    for text in strategies:
        for worker, layout in (("node", Layout(2, 2)), ("site", Layout(4, 1, 2))):
            world.place(layout)
            history = train(TrainSettings(strategy=f"{text},worker={worker}", **SMALL), world)
            rows = [asdict(row) for row in history.rows]
            seen = [[row["train_loss"], row["validation_loss"], row["bytes_sent"]] for row in rows]
            found.setdefault(text, []).append(seen)
    return found


def workers(_: World) -> list[Any]:
    """Groups of `worker="site"`, and what is said where there is one site, or no equal ones."""
    found: list[Any] = []
    for sites in ("2", "4", "1", "3", "two"):
        os.environ[SITES] = sites
        if not (refusal := said(lambda: workers_of("site"))):
            made = workers_of("site")
            assert isinstance(made, Workers)
        found.append(refusal or [made.inner_ranks, made.peer_ranks])
    del os.environ[SITES]
    return found
