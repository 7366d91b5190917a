"""The runs of a study of convergence: ranks that train one configuration after the other."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch.distributed as dist
from convergence_plan import Ask, Configuration, Plan, missing
from eager_diloco import EagerDiLoCo
from finished_runs import Known, append, read
from peers_methods import Attached
from time_to_loss_methods import build_with
from torch import nn
from torch.optim import Optimizer

from co2sim.errors import Co2simError
from co2sim.schedule import WORLD
from co2sim.units import Seconds
from realrun.execute.world import World, join
from realrun.train import TrainSettings
from realrun.train.loop import Build, train
from realrun.train.methods import build
from realrun.train.outer import arguments, pairs

DEADLINE: Seconds = 3600.0
"""How long ranks wait for each other: the processes of a long study may be stopped for a while."""


def run_ranks(plan: Plan, path: Path) -> None:
    """Be one of the ranks: run what is missing, one after the other, and add it to the file."""
    world = join("gloo", DEADLINE)
    shared: list[Any] = [read(path)]
    dist.broadcast_object_list(shared)
    known: Known = shared[0]
    began, count = time.monotonic(), 0
    while asks := missing(plan, known):
        ask, budget = asks[0], asks[0].budget
        row = one_run(ask, world, path)
        shared = [row]
        dist.broadcast_object_list(shared)
        known[ask.key] = shared[0]
        if world.rank == 0:
            append(path, shared[0])
            count += budget.steps
            left = sum(one.budget.steps for one in missing(plan, known))
            minutes = left * (time.monotonic() - began) / count / 60
            print(
                f"{budget.label}, {ask.configuration.name}, lr {ask.lr:g},"
                f" {ask.choice or 'no outer step'}, seed {ask.seed}:"
                f" {row['validation_loss']:.4f} in {row['wall']:.0f} s; about {left} steps left,"
                f" {minutes:.0f} min",
                flush=True,
            )
    world.leave()


def one_run(ask: Ask, world: World, path: Path) -> dict[str, Any]:
    """Train once; the row of the table of runs."""
    budget = ask.budget
    outer = ask.configuration.outer(ask.choice, ask.lr)
    settings = TrainSettings(
        task=budget.task,
        strategy=ask.configuration.trained(ask.choice),
        size=budget.size,
        steps=budget.steps,
        batch=budget.batch,
        warmup=budget.warmup,
        lr=ask.lr,
        momentum=ask.configuration.momentum,
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
        "strategy": "" if ask.configuration.peer else settings.strategy,
        "outer": outer,
    }
    began = time.monotonic()
    try:
        history = train(settings, world, build=builder(ask.configuration, settings))
    except Co2simError as error:
        if world.rank == 0:  # the ranks cannot go on after that; the launcher starts them again
            append(path, {**row, "validation_loss": float("inf"), "error": str(error)})
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


def builder(configuration: Configuration, settings: TrainSettings) -> Build:
    """What makes the method: ours, or the only peer there is, with DiLoCo's options."""
    if not configuration.peer:
        return build
    options = arguments(configuration.kind, settings.outer)
    return partial(build_with, partial(eager_diloco, tau=configuration.tau, **options))


@contextmanager
def eager_diloco(
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    tau: int,
    outer_lr: float,
    outer_momentum: float,
) -> Iterator[Attached]:
    """Attach Eager DiLoCo to a model that is equal on all workers."""
    eager = EagerDiLoCo(model, world.group("eager", WORLD), tau, outer_lr, outer_momentum)
    hook = optimizer.register_step_post_hook(eager.after_step)
    yield Attached(model, optimizer)
    hook.remove()
    eager.land()
