"""A rank of torchrun: in the first attempt rank 1 raises; the second resumes from its checkpoint.

It leaves its last model in the folder, as final-RANK.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from realrun.algorithms import LocalSGD

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
# torchrun keeps its store, in which torch 2.13 would find the addresses of the attempt before
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
dist.init_process_group(
    "gloo",
    store=dist.PrefixStore(f"attempt{attempt}", store),
    rank=rank,
    world_size=int(os.environ["WORLD_SIZE"]),
    timeout=timedelta(seconds=60),
)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = Path(sys.argv[1]) / f"state-{rank}"
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
torch.save([first, model.state_dict()], saved.with_name(f"final-{rank}"))
dist.destroy_process_group()
