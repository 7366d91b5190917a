"""The runs of the convergence study: ranks that train one configuration after the other."""

import json
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch.distributed as dist
from convergence_plan import Ask, Known, StudyBudget, append, next_run, read, remaining

from co2sim.errors import Co2simError
from realrun.execute.world import World, join
from realrun.train import TrainSettings, train
from realrun.train.outer import pairs


def run_ranks(budget: StudyBudget, out: Path) -> None:
    """Be one of the ranks: run what is missing, one after the other."""
    world = join("gloo", 120.0)
    shared: list[Any] = [read(out)]
    dist.broadcast_object_list(shared)
    known: Known = shared[0]
    began, count = time.monotonic(), 0
    while (ask := next_run(budget, known)) is not None:
        row = one_run(ask, budget, world, out)
        shared = [row]
        dist.broadcast_object_list(shared)
        known[ask.key(budget)] = shared[0]
        if world.rank == 0:
            count += 1
            append(out, shared[0])
            left = remaining(budget, known)
            minutes = left * (time.monotonic() - began) / count / 60
            print(
                f"{ask.configuration.name}, lr {ask.lr:g}, {row['outer'] or 'no outer step'},"
                f" seed {ask.seed}: {row['validation_loss']:.4f} in {row['wall']:.0f} s;"
                f" about {left} runs left, {minutes:.0f} min",
                flush=True,
            )
    world.leave()


def one_run(ask: Ask, budget: StudyBudget, world: World, out: Path) -> dict[str, Any]:
    """Train once; the row of the table of runs."""
    outer = ask.configuration.outer(ask.choice, ask.lr)
    settings = TrainSettings(
        strategy=ask.configuration.trained(ask.choice),
        size=budget.size,
        steps=budget.steps,
        batch=budget.batch,
        warmup=budget.warmup,
        lr=ask.lr,
        outer=pairs(outer),
        seed=ask.seed,
        log_every=max(ask.configuration.tau, 12),
        eval_every=budget.eval_every,
    )
    row: dict[str, Any] = {
        "budget": budget.label,
        "configuration": ask.configuration.name,
        "choice": ask.choice,
        "lr": f"{ask.lr:g}",
        "seed": str(ask.seed),
        "strategy": ask.configuration.trained(ask.choice),
        "outer": outer,
    }
    began = time.monotonic()
    try:
        history = train(settings, world)
    except Co2simError as error:
        if world.rank == 0:  # the ranks cannot go on after that; the launcher starts them again
            append(out, {**row, "validation_loss": float("inf"), "error": str(error)})
        raise
    seen = [r for r in history.rows if r.validation_loss is not None]
    penalties = [r.penalty for r in history.rows if r.penalty is not None]
    facts = history.facts
    return {
        **row,
        "validation_loss": seen[-1].validation_loss,
        "accuracy": seen[-1].accuracy,
        "penalty": mean(penalties) if penalties else float("nan"),
        "clipped": history.rows[-1].clipped if penalties else float("nan"),
        "bytes_sent": history.rows[-1].bytes_sent,
        "wall": time.monotonic() - began,
        "curve": json.dumps([[r.tokens, r.validation_loss] for r in seen]),
        "facts": json.dumps({name: facts[name] for name in ("parameters", "python", "sha256")}),
        "error": "",
    }
