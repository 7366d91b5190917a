"""What ranks of the tests of training do."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from local_problem import said

from realrun.algorithms.pacing import AutoTau
from realrun.execute.world import World
from realrun.train import History, TrainSettings, parallelize, train
from realrun.train.folder import MODEL
from realrun.train.tasks.task import Task

SMALL: dict[str, Any] = {
    "size": "tiny",
    "context": 16,
    "batch": 8,
    "warmup": 4,
    "lr": 1e-2,
    "log_every": 4,
    "checkpoint_every": 0,
}


def learn(world: World, strategies: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Train by every strategy, with an outer step; two validation losses, and what was sent."""
    found = {}
    for strategy, outer in strategies.items():
        given = {"strategy": strategy, "outer": outer, "steps": 32, "eval_every": 16, **SMALL}
        history = train(TrainSettings(seed=1, **given), world)
        seen = [row.validation_loss for row in history.rows if row.validation_loss]
        found[strategy] = [*seen, history.rows[-1].bytes_sent]
    return found


def resume(
    world: World, strategies: list[str], folder: str, *, longer: bool = False
) -> dict[str, list[str]]:
    """What differs between 24 steps at once, and 11 and the other 13 from a checkpoint.

    `longer`: the first training has 11 steps in all, at a constant learning rate.
    """
    found = {}
    first = {"steps": 11} if longer else {"stop": 11}
    for number, strategy in enumerate(strategies):
        given = {"strategy": strategy, "steps": 24, "eval_every": 12, **SMALL}
        given |= {"final_lr": 1.0} if longer else {}
        at_once, parted = Path(folder) / f"{number}a", Path(folder) / f"{number}b"
        whole = train(TrainSettings(**given), world, at_once)
        half = train(TrainSettings(**{**given, **first}), world, parted)
        rest = train(TrainSettings(**given), world, parted, resume=True)
        wrong = []
        if (len(half.rows), half.stopped, rest.stopped) != (3, not longer, False):
            wrong.append(f"{len(half.rows)} rows, stopped {half.stopped}, {rest.stopped}")
        if world.rank == 0:
            wrong += _differences(whole, rest)
            one, other = (torch.load(path / MODEL) for path in (at_once, parted))
            wrong += [name for name in one if not torch.equal(one[name], other[name])]
        found[strategy] = wrong
    return found


def measured_tau(world: World, folder: str) -> dict[str, Any]:
    """A training that finds tau to be 7, and its resumption, which would find 9."""
    kept, found = AutoTau.averaged, {}
    try:
        for tau, given in ((7, {"stop": 22}), (9, {})):
            AutoTau.averaged = lambda self, tau=tau: tau if self.steps else None  # type: ignore[method-assign, misc]
            settings = TrainSettings(strategy="co2", steps=40, eval_every=10, **SMALL, **given)
            history = train(settings, world, Path(folder), resume=True)
            found["tau"] = history.rows[-1].tau, history.facts["outer_step"]["tau"]
            found["seen"] = [row.step for row in history.rows if row.validation_loss]
    finally:
        AutoTau.averaged = kept  # type: ignore[method-assign]
    return found


def _differences(whole: History, rest: History) -> list[str]:
    """The rows of the stop are there, too: step 11."""
    parted = [row for row in rest.rows if row.step != 11]
    wrong = [] if len(parted) == len(whole.rows) else ["rows"]
    for one, other in zip(whole.rows, parted, strict=False):
        for name, value in asdict(one).items():
            same = value == asdict(other)[name]
            # The row after the stop averages fewer losses; times and waits are never equal.
            averaged = name == "train_loss" and one.step == 12
            if not same and not averaged and name not in {"seconds", "waited", "late"}:
                wrong.append(f"{name} of step {one.step}: {value} and {asdict(other)[name]}")
    return wrong


def stopped(world: World) -> list[int]:
    """Steps after which ranks stop, when only the last of them is asked to."""
    asked = []

    def stop() -> bool:
        asked.append(world.rank)
        return world.rank == world.layout.world_size - 1 and len(asked) > 1

    steps = []
    for strategy in ("ddp", "co2.published:tau=12"):
        asked.clear()
        settings = TrainSettings(**{**SMALL, "strategy": strategy, "steps": 600})
        history = train(settings, world, stop=stop)
        assert history.stopped
        steps.append(history.rows[-1].step)
    return steps


def refused(world: World) -> list[str]:
    """What ranks say that cannot train."""
    every: list[dict[str, Any]] = [
        {"batch": 7},
        {"strategy": "zero3:prefetch=3"},
        {"seed": world.rank},
    ]
    return [
        said(lambda: train(TrainSettings(**{**SMALL, "steps": 4, **given}), world))  # noqa: B023
        for given in every
    ]


def not_a_number(world: World) -> str:
    """Rank 1's loss becomes NaN in step 3; what every rank says."""
    batch = Task.batch

    def spoiled(self: Task, seed: int, step: int, *given: Any) -> Any:
        if step == 3 and world.rank == 1:
            with torch.no_grad():
                next(iter(models)).norm.weight.fill_(math.nan)
        return batch(self, seed, step, *given)

    models: list[Any] = []

    def noticed(settings: TrainSettings, model: Any, world: World) -> Any:
        models.append(model)
        return parallelize.build(settings, model, world)

    Task.batch = spoiled  # type: ignore[method-assign]
    settings = TrainSettings(strategy="co2.published:tau=2", steps=8, **SMALL)
    return said(lambda: train(settings, world, build=noticed))
