"""What workers of the tests of torchft do."""

import hashlib
import json
import os
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from local_problem import network, optimizer, train
from torchft import Manager, ProcessGroupGloo

from realrun.adapters.torchft import fault_tolerant
from realrun.algorithms import CO2


def made_manager(
    number: int,
    lighthouse: str,
    port: int,
    least: int,
    *,
    limit: float = 20.0,
    quorum: float = 60.0,
) -> Manager:
    """The manager of a worker whose store is at a port of this host."""
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=limit)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=least,
        use_async_quorum=False,
        timeout=timedelta(seconds=limit),
        quorum_timeout=timedelta(seconds=quorum),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=port,
        lighthouse_addr=lighthouse,
        replica_id=f"worker{number}_",
        hostname="localhost",
    )


def until_killed(number: int, lighthouse: str, out: Path) -> None:
    """Train, and note after each round when it was, the workers in it, and a hash of the anchor."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = made_manager(number, lighthouse, store.port, 2)
    model = network(seed=number)
    optim = optimizer(model, "adamw")
    with (out / f"{number}.jsonl").open("a", buffering=1) as log:

        def note() -> None:
            anchor = hashlib.sha256(training.loop.state.anchor.numpy().tobytes()).hexdigest()
            line = time.time(), training.stats().rounds, manager.num_participants(), anchor
            log.write(f"{json.dumps(line)}\n")

        with fault_tolerant(
            manager,
            CO2.published,
            model,
            optim,
            tau=4,
            outer_momentum=0.5,
        ) as training:
            while training.stats().rounds < int((out / "until").read_text()):
                done = training.stats().steps
                train(model, optim, number, range(done, done + 4))
                time.sleep(0.05)
                note()
        note()
    os._exit(0)  # torchft takes seconds to end
