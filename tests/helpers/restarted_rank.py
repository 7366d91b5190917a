"""A rank of torchrun that raises in its first attempt."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from realrun.algorithms import LocalSGD


def resumed_in_the_second_attempt(folder: str) -> tuple[int, list[float]]:
    """In the first one rank 1 raises; gives the step at which the second begins, and its end."""
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
    # torchrun keeps its store, in which torch 2.13 would find the addresses of the attempt before
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"attempt{attempt}", dist.TCPStore(*address, is_master=False)),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = Path(folder) / f"state-{rank}"
    with LocalSGD(model, optimizer, tau=2) as local:
        first = 0
        if saved.exists():
            state = torch.load(saved)
            model.load_state_dict(state["model"])
            local.load_state_dict(state["local"])
            first = local.stats().steps
        for step in range(first, 6):
            if (attempt, rank, step) == ("0", 1, 3):
                raise ValueError("bad sample")
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            if step == 1:
                torch.save({"model": model.state_dict(), "local": local.state_dict()}, saved)
                dist.barrier()  # rank 0 is ended by torchrun once rank 1 has raised
    dist.destroy_process_group()
    return first, torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
