"""Beside the peers, in one run of the lab: tokens per second and the last loss of each.

    sudo python benchmarks/peers.py                        # some minutes
    sudo python benchmarks/peers.py --rate "1000 Mbit/s" --steps 480
    sudo python benchmarks/peers.py --quick                # one of them, a few steps

torch DDP, torch's post-local SGD, LocalSGD and DiLoCo of torchft, and our LocalSGD, DiLoCo,
Streaming DiLoCo and CO2, as published and with a delay, train the same GPT from the same weights on
the same samples with the same AdamW: a local step is the same code for all. Settings are equal
where the algorithms are; none is tuned. torchft comes with pip install '.[peers]'; what is not
installed, or fails, is said in the table.

Each runs twice: a short time first, so that nothing is measured that happens only once. Seconds
are rank 0's between two barriers. The loss is the validation loss of the mean of the workers.
Writes peers.csv and peers.md.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from peers_methods import (
    NODES,
    OUTER_LR,
    OUTER_MOMENTUM,
    TAU,
    Attach,
    our_co2,
    our_co2_delayed,
    our_diloco,
    our_local,
    our_streaming_diloco,
    torch_ddp,
    torch_post_local,
    torchft_diloco,
    torchft_local,
)
from reports import folder, installed, machine, made_by, parser, table
from torch.optim import AdamW

from realrun.errors import TrainingError
from realrun.execute.world import World, join
from realrun.train.shapes import GPTS
from realrun.train.task import Task, loss_of, scores
from realrun.train.text import text

SIZE = "mini"
BATCH = 32
LR = 5e-3
WARM_UP = 2 * TAU

PEERS: dict[str, Attach] = {
    "torch DDP": torch_ddp,
    "torch post-local SGD": torch_post_local,
    "our LocalSGD": our_local,
    "our DiLoCo": our_diloco,
    "our Streaming DiLoCo": our_streaming_diloco,
    "our CO2": our_co2,
    "our CO2, delay auto": our_co2_delayed,
    "torchft LocalSGD": torchft_local,
    "torchft DiLoCo": torchft_diloco,
}


def measured(attach: Attach, task: Task, world: World, steps: int) -> tuple[float, float]:
    """Seconds for `steps` steps, and the last validation loss. All ranks call this."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = AdamW(model.parameters(), lr=LR)
    with attach(model, optimizer, world) as setup:
        dist.barrier()
        began = time.monotonic()
        for step in range(1, steps + 1):
            batch = task.batch(0, step, BATCH, world.rank, world.layout.world_size)
            setup.optimizer.zero_grad()
            loss = loss_of(setup.model, batch)
            loss.backward()
            setup.optimizer.step()
        seconds = time.monotonic() - began
        if not torch.isfinite(loss):
            raise TrainingError(f"the last loss is {loss.item()}")
        dist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(world.layout.world_size)
        total, _, count = sum(scores(model, batch) for batch in task.validation)
    return seconds, float(total / count)


def run_rank(steps: int, names: Mapping[str, Attach], out: Path) -> None:
    """Be one of the ranks: measure all that are installed."""
    world = join("gloo", 60.0)
    task = text(GPTS[SIZE], world.device)
    lines = []
    for name, attach in names.items():
        line: dict[str, Any] = {"name": name, "tokens_per_s": None, "loss": None, "note": ""}
        if name.startswith("torchft") and find_spec("torchft") is None:
            line["note"] = "not installed"
        else:
            try:
                measured(attach, task, world, WARM_UP)
                seconds, loss = measured(attach, task, world, steps)
                line |= {"tokens_per_s": steps * BATCH * task.units / seconds, "loss": loss}
            except Exception as error:  # noqa: BLE001 - whatever it is, the table says so
                line["note"] = (
                    f"failed: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
                )
        lines.append(line)
        if world.rank == 0:
            print(line, file=sys.stderr, flush=True)
            pd.DataFrame(lines).to_csv(out / "peers.csv", index=False)
        if line["note"].startswith("failed"):
            os._exit(0)  # ranks may not agree on where they are: no more of them can be measured
    world.leave()


def report(frame: pd.DataFrame, rate: str, steps: int, nodes: int) -> str:
    """The table in Markdown."""
    rows = [
        {
            "algorithm": r["name"],
            "tokens/s": "-" if pd.isna(r["loss"]) else f"{r['tokens_per_s']:,.0f}",
            "validation loss": "-" if pd.isna(r["loss"]) else f"{r['loss']:.4f}",
            "note": r["note"],
        }
        for _, r in frame.iterrows()
    ]
    return f"""\
# Beside the peers

{nodes} nodes at {rate}, a GPT of {GPTS[SIZE].parameters:,} parameters, {steps} steps of {BATCH} x\
 {GPTS[SIZE].context} characters, AdamW at {LR:g}, tau {TAU}; outer lr {OUTER_LR:g} and momentum\
 {OUTER_MOMENTUM:g} (CO2: its defaults, 0.5 and 0, with a delay 1 and 0). torchft-nightly:\
 {installed("torchft-nightly")}. {machine()}

{table(rows)}

{made_by()}
"""


def main() -> None:
    """Start the lab, or be one of its ranks."""
    command = parser(__doc__, "our CO2 only, on two nodes, 24 steps")
    command.add_argument("--rate", default="100 Mbit/s")
    command.add_argument("--steps", type=int, default=480)
    command.add_argument("--only", default="", help="only names that contain this")
    given = command.parse_args()
    names = {name: attach for name, attach in PEERS.items() if given.only in name}
    steps, nodes = given.steps, NODES
    if given.quick:
        steps, nodes, names = 2 * TAU, 2, {"our CO2, delay auto": our_co2_delayed}
    with folder(given) as out:
        if "RANK" in os.environ:
            run_rank(steps, names, out)
            return
        inside = [sys.executable, __file__, *sys.argv[1:], "--out", str(out)]
        lab = ["lab", "run", "--nodes", str(nodes), "--rate", given.rate, "--", *inside]
        subprocess.run([sys.executable, "-m", "realrun", *lab], check=True)
        frame = pd.read_csv(out / "peers.csv", dtype={"note": str}).fillna({"note": ""})
        words = report(frame, given.rate, steps, nodes)
        (out / "peers.md").write_text(words)
    print(words)


if __name__ == "__main__":
    main()
