"""The study of tasks in the lab: the time of a step, and the delay that CO2 chooses."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from convergence_plan import StudyBudget
from tasks_plan import METHODS, TAU, budget, methods, tasks
from time_to_loss_methods import Pace, paced
from time_to_loss_runs import figures

from co2sim.units import Seconds
from realrun.execute.world import World, join
from realrun.train import TrainSettings
from realrun.train.loop import train
from realrun.train.methods import build
from realrun.train.settings import TaskName

PACE: Seconds = 0.1
"""Of a local step, as in time_to_loss.py: the arithmetic is real, and the rest is waited for."""

_ROUNDS, _FEW = 8, 3


def run_lab_ranks(path: Path, *, quick: bool) -> None:
    """Be one of the ranks: time all methods on the tasks that are not in the file, and write it."""
    world = join("gloo", 120.0)
    found: dict[str, dict[str, Any]] = {}
    if path.exists():
        found = json.loads(path.read_text("utf-8"))
    for task in tasks(quick=quick):
        if task in found:
            continue
        found[task] = {}
        for name in methods(quick=quick):
            found[task][name] = row = timed(task, METHODS[name], budget(task, quick=quick), world)
            if world.rank == 0:
                print(f"{task}, {name}: {1e3 * row['step_s']:.1f} ms a step", flush=True)
    dist.barrier()  # all have read the file
    if world.rank == 0:
        path.write_text(json.dumps(found, indent=1), "utf-8")
    dist.barrier()
    world.leave()


def timed(task: TaskName, strategy: str, given: StudyBudget, world: World) -> dict[str, Any]:
    """A few rounds of a training; seconds of a step without the first round, and the delay."""
    settings = TrainSettings(
        task=task,
        strategy=strategy,
        size=given.size,
        steps=(_FEW if given.quick else _ROUNDS) * TAU,
        batch=given.batch,
        warmup=TAU,
        log_every=TAU,
        eval_every=0,
        evaluate="after",
    )
    pace = Pace(PACE)
    history = train(settings, world, build=partial(paced, pace, build))
    row = figures(history)
    return {
        "step_s": row["step_s"],
        "delay": row["used_delay"],
        "late_steps": pace.late / max(1, pace.steps),
        "parameters": history.facts["parameters"],
    }
