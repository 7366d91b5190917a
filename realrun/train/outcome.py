"""What a training ends with: its history, and the files of its folder."""

import io
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from co2sim.common.delayed_averaging import bounded, kept
from co2sim.common.files import write_atomically
from co2sim.common.units import counted
from co2sim.common.version import own_version
from realrun.algorithms import LocalUpdate
from realrun.execute.world import World, describe
from realrun.train.folder import ESTIMATE, FIGURE, MODEL
from realrun.train.log import History, write_record
from realrun.train.parallelize import WrappedModel
from realrun.train.tasks.task import Task


def facts(task: Task, method: WrappedModel, world: World) -> Mapping[str, Any]:
    """Facts about the data, the model, the outer step with its defaults, and the machine."""
    layout, outer = world.layout, method.outer
    return {
        **task.facts,
        "workers": method.workers,
        **({"outer_step": _outer_step(outer)} if isinstance(outer, LocalUpdate) else {}),
        "parameters": sum(p.numel() for p in method.bare.parameters()),
        "nodes": layout.nodes,
        "ranks_per_node": layout.gpus_per_node,
        "co2sim": own_version(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **describe(world.device, world.backend),
    }


def _outer_step(outer: LocalUpdate) -> dict[str, Any]:
    """The options of the outer step; of late averages what was used where nothing was given."""
    rule, delay = outer.loop.rule, outer.stats().delay
    waits = rule.late is None
    found = asdict(rule) | {"tau": outer.loop.tau if waits else outer.stats().tau}
    late, tau = rule.late, outer.loop.tau
    if late is not None:
        keep, predict = kept(tau, late.keep, late.predict)
        used = predict if delay is None else bounded(tau, delay, keep, predict)
        found |= {"keep": keep, "predict": used, "fragments": late.parts(tau)}
    return found


def write(folder: Path, history: History, task: Task, method: WrappedModel, world: World) -> None:
    """Write parameters, figure and record. All ranks call this; rank 0 writes."""
    with method.mean():
        whole = method.whole()
    if world.rank:
        return
    from realrun.train.log import draw  # noqa: PLC0415 - matplotlib

    out = io.BytesIO()
    torch.save(whole, out)
    runs = {history.settings.name: history.rows}
    parameters = f"{history.facts['parameters']:,} parameters"
    title = f"{task.name}, {parameters}, {counted(world.layout.world_size, 'rank')}"
    files = {MODEL: out.getvalue(), FIGURE: draw(runs, title, task.unit, task.loss)}
    if history.estimates:
        found = history.estimates.to_dict(history.chosen, history.rows[-1].delay)
        files[ESTIMATE] = f"{json.dumps(found, indent=2)}\n".encode()
    write_atomically({folder / name: data for name, data in files.items()})
    write_record(folder, history)
