"""Beside the peers, in one run of the lab: tokens per second and the last loss of each.

    sudo python benchmarks/peers.py            # some minutes; go on with the same
    sudo python benchmarks/peers.py --quick    # one of them, a few steps

torch DDP, torch's post-local SGD, LocalSGD and DiLoCo of torchft, and our LocalSGD, DiLoCo,
Streaming DiLoCo and CO2, as published and with a delay, train the same GPT from the same weights on
the same samples with the same AdamW: a local step is the same code for all. Settings are equal
where the algorithms are; none is tuned. torchft comes with pip install '.[peers]'; what is not
installed, or fails, is said in the table.

They take turns, since the speed of machines changes: tokens per second are the median of three
turns, each without its first two rounds. Seconds are rank 0's. The loss is the validation loss of
the mean of the workers. Each run is a row of peers-runs.csv. Writes peers.csv and peers.md.
"""

import sys
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import pandas as pd
from contenders import attach_of, build_with, curve, figures, installed
from reports import installed as version
from reports import machine, made_by, publish, table
from studies import Rows, Study, command

from realrun.execute.world import World
from realrun.lab.lab import Lab
from realrun.train import TrainSettings
from realrun.train.algorithm_registry import pairs
from realrun.train.loop import train
from realrun.train.parallelize import build
from realrun.train.tasks.presets import GPTS

TAU, SIZE, BATCH, LR, TURNS = 12, "mini", 32, 5e-3, 3
RATE, RUNS = "100 Mbit/s", "peers-runs.csv"
_DILOCO, _STEP = f"diloco:tau={TAU}", "lr=0.7,momentum=0.5"
LATE = "our CO2, delay auto"
PEERS = {
    "torch DDP": ("ddp", ""),
    "torch post-local SGD": (f"local_sgd:tau={TAU}", ""),
    "our LocalSGD": (f"local_sgd:tau={TAU}", ""),
    "our DiLoCo": (_DILOCO, _STEP),
    "our Streaming DiLoCo": (f"{_DILOCO},fragments=3,delay=4", _STEP),
    "our CO2": (f"co2.published:tau={TAU}", ""),
    LATE: (f"co2:tau={TAU},delay=auto", ""),
    "torchft LocalSGD": (f"local_sgd:tau={TAU}", ""),
    "torchft DiLoCo": (_DILOCO, _STEP),
}
"""Strategies, and options of their outer step; attached by name where they are not ours."""


@dataclass(frozen=True, slots=True)
class Run:
    """A turn of a peer."""

    peer: str
    turn: int
    steps: int
    lab: Lab

    @property
    def key(self) -> tuple[str, ...]:
        """In the table of runs."""
        return (self.peer, str(self.turn))


def trained(run: Run, _: Rows, world: World) -> dict[str, Any]:
    """Train once; tokens per second, and the last validation loss."""
    strategy, outer = PEERS[run.peer]
    settings = TrainSettings(
        strategy=strategy,
        size=SIZE,
        steps=run.steps,
        batch=BATCH,
        lr=LR,
        warmup=0,
        final_lr=1.0,
        clip_grad=0.0,
        outer=pairs(outer),
        log_every=2 * TAU,
        eval_every=0,
        evaluate="after",
    )
    attach = attach_of(run.peer, TAU, settings.outer)
    row = figures(train(settings, world, build=partial(build_with, attach) if attach else build))
    rate = BATCH * GPTS[SIZE].context / row["step_s"]
    return {"tokens_per_s": rate, "loss": curve(row)[-1][2]}


def grid(options: Namespace) -> list[Run]:
    """All runs, in turn."""
    steps, turns, nodes, names = 480, TURNS, 4, list(PEERS)
    if options.quick:
        steps, turns, nodes, names = 4 * TAU, 1, 2, [LATE]
    lab = Lab(nodes, 1, RATE)
    return [Run(name, turn, steps, lab) for turn in range(turns) for name in names]


def studies(options: Namespace) -> list[Study]:
    """The study."""
    runs = [run for run in grid(options) if installed(run.peer)]
    keys, numbers = ("peer", "turn"), ("tokens_per_s", "loss")
    return [Study(options.out / RUNS, keys, numbers, lambda _: runs, trained, runs[0].lab.nodes)]


def summary(names: list[str], rows: Rows) -> pd.DataFrame:
    """Medians, and the slowest and the fastest turn."""
    lines = []
    for name in names:
        turns = [row for (peer, _), row in rows.items() if peer == name]
        rates = [row["tokens_per_s"] for row in turns if not row["error"]]
        failed = [f"failed: {row['error']}" for row in turns if row["error"]]
        lines.append(
            {
                "name": name,
                "tokens_per_s": median(rates) if rates else None,
                "slowest": min(rates, default=None),
                "fastest": max(rates, default=None),
                "loss": turns[-1]["loss"] if rates else None,
                "note": next(iter(failed), "" if rates else "not installed"),
            }
        )
    return pd.DataFrame(lines)


def report(frame: pd.DataFrame, run: Run) -> str:
    """The table in Markdown."""
    rows = [
        {
            "algorithm": r["name"],
            "tokens/s": "-" if pd.isna(r["loss"]) else f"{r['tokens_per_s']:,.0f}",
            "turns": "-" if pd.isna(r["loss"]) else f"{r['slowest']:,.0f} to {r['fastest']:,.0f}",
            "validation loss": "-" if pd.isna(r["loss"]) else f"{r['loss']:.4f}",
            "note": r["note"],
        }
        for _, r in frame.iterrows()
    ]
    return f"""\
# Beside the peers

{run.lab.nodes} nodes at {RATE}, a GPT of {GPTS[SIZE].parameters:,} parameters, {run.steps}\
 steps of {BATCH} x {GPTS[SIZE].context} characters, AdamW at {LR:g}, tau {TAU};\
 outer lr 0.7 and momentum\
 0.5 (CO2: its defaults, 1 and 0, as published 0.5 and 0). torchft-nightly:\
 {version("torchft-nightly")}. {machine()}

{table(rows)}

{made_by()}
"""


def write(options: Namespace) -> None:
    """Write peers.csv and peers.md."""
    runs, rows = grid(options), studies(options)[0].rows()
    if rows:
        summary(list(dict.fromkeys(run.peer for run in runs)), rows).to_csv(
            options.out / "peers.csv", index=False
        )
    frame = pd.read_csv(options.out / "peers.csv", dtype={"note": str}).fillna({"note": ""})
    publish(options, "peers", report(frame, runs[0]))


def main() -> int:
    """Run, and write what is there."""
    return command(__doc__, "our CO2 only, on two nodes, 48 steps", studies, write)


if __name__ == "__main__":
    sys.exit(main())
