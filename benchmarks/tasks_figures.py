"""A figure for each task: the losses of all methods, and what a model has learned to do."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from convergence_plan import Ask
from finished_runs import Known
from matplotlib.figure import Figure, SubFigure
from tasks_plan import LATE, Delays, final, methods
from torch import Tensor, nn

from co2sim.console.figures import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from realrun.train.figure import MARKERS
from realrun.train.settings import TaskName, TrainSettings
from realrun.train.task import LEFT_OUT, Batch, Task
from realrun.train.tasks import make_task
from realrun.train.text import CHARACTERS

_SHOWN = 6
"""Samples of the validation that a figure shows."""
_LETTERS = 56
"""Characters of a line of text."""


def draw(task: TaskName, known: Known, delays: Delays, *, quick: bool) -> bytes:
    """A PNG: losses over samples on the left, on the right what a model does with samples."""
    ask = final(LATE, task, delays, known, quick=quick)[0]
    made, model = trained(ask)
    with mpl.rc_context(STYLE | PLAIN_TEXT), torch.no_grad():
        figure = Figure(figsize=(12.0, 4.6), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=(4, 7))
        with mpl.rc_context(GRID):
            _losses(left, made, task, known, delays, quick=quick)
        batch = Batch(*(part[:_SHOWN] for part in made.validation[0]))
        what, show = _SHOW[task]
        right.suptitle(f"{ask.configuration.name}, tau 12, in the validation: {what}", fontsize=9)
        show(right, batch, model(batch.inputs))
        return render(figure, "png")


def trained(ask: Ask) -> tuple[Task, nn.Module]:
    """The task, and the model that this run makes, by `realrun train`."""
    budget = ask.budget
    outer = ask.configuration.outer(ask.choice, ask.lr)
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "realrun", "train", "--nproc", str(budget.workers)]
        for option, value in {
            "task": budget.task,
            "strategy": ask.configuration.trained(ask.choice),
            "size": budget.size,
            "steps": budget.steps,
            "batch": budget.batch,
            "warmup": budget.warmup,
            "lr": ask.lr,
            "seed": ask.seed,
            "eval-every": budget.eval_every,
            "out": name,
        }.items():
            command += [f"--{option}", str(value)]
        done = subprocess.run(
            [*command, *(["--outer", outer] if outer else [])],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"the training for a figure failed: {done.stderr}")
        weights = torch.load(Path(name) / "model.pt")
    given = TrainSettings(task=budget.task, size=budget.size, steps=budget.steps, warmup=1)
    task = make_task(given, torch.device("cpu"))
    model = task.model()
    model.load_state_dict(weights)
    return task, model


def _losses(
    left: SubFigure, made: Task, task: TaskName, known: Known, delays: Delays, *, quick: bool
) -> None:
    axes = left.subplots()
    for place, name in enumerate(methods(quick=quick)):
        asks = final(name, task, delays, known, quick=quick)
        curves = [json.loads(known[ask.key]["curve"]) for ask in asks]
        units, losses = zip(*(zip(*curve, strict=True) for curve in curves), strict=True)
        axes.plot(
            np.array(units[0]) / made.units / asks[0].budget.batch,
            np.mean(losses, axis=0),
            color=COLOURS[place % len(COLOURS)],
            marker=MARKERS[place % len(MARKERS)],
            markersize=4,
            label=asks[0].configuration.name,
        )
    axes.set(xlabel="step", ylabel=f"validation: {made.loss}", title=task.replace("_", " "))
    axes.legend(frameon=False, fontsize=8)


def _text(part: SubFigure, batch: Batch, logits: Tensor) -> None:
    """Each line as it is, and below each character the most probable one there."""
    _lines(part, batch.targets, logits.argmax(2), torch.ones_like(batch.targets, dtype=torch.bool))


def _masked(part: SubFigure, batch: Batch, logits: Tensor) -> None:
    """Each line, and below characters that were hidden what the model says is there."""
    asked = batch.targets != LEFT_OUT
    truth = torch.where(asked, batch.targets, batch.inputs)
    _lines(part, truth, torch.where(asked, logits.argmax(2), batch.inputs), asked)


def _lines(part: SubFigure, truth: Tensor, named: Tensor, asked: Tensor) -> None:
    axes = part.subplots()
    axes.set_axis_off()
    axes.set(xlim=(-0.5, _LETTERS), ylim=(3 * _SHOWN, 0))
    font: dict[str, Any] = {"family": "monospace", "fontsize": 9, "ha": "center", "va": "center"}
    for row in range(len(truth)):
        for column in range(min(_LETTERS, truth.shape[1])):
            here, said = int(truth[row, column]), int(named[row, column])
            axes.text(column, 3 * row + 0.5, _letter(here), **font)
            if bool(asked[row, column]):
                colour = COLOURS[2] if here == said else COLOURS[1]
                axes.text(column, 3 * row + 1.5, _letter(said), color=colour, **font)


def _letter(number: int) -> str:
    text = CHARACTERS[number] if number < len(CHARACTERS) else "?"
    return {"\n": "↵", "\t": "→"}.get(text, text)


def _digits(part: SubFigure, batch: Batch, logits: Tensor) -> None:
    found = logits.argmax(-1).flatten()
    for axes, image, truth, said in zip(
        part.subplots(1, _SHOWN), batch.inputs, batch.targets.flatten(), found, strict=True
    ):
        axes.imshow(image.squeeze(), cmap="Greys")
        right = bool(truth == said)
        axes.set_title(f"{int(said)}", color=COLOURS[2] if right else COLOURS[1])
        axes.set_xlabel("" if right else f"is {int(truth)}")
        axes.set(xticks=[], yticks=[])


def _segmentation(part: SubFigure, batch: Batch, logits: Tensor) -> None:
    grid = part.subplots(3, _SHOWN)
    rows = {
        "canvas": (batch.inputs.squeeze(1), {"cmap": "Greys"}),
        "classes": (batch.targets, {"cmap": "tab20", "vmin": 0, "vmax": 19}),
        "named": (logits.argmax(-1), {"cmap": "tab20", "vmin": 0, "vmax": 19}),
    }
    for line, (name, (images, look)) in zip(grid, rows.items(), strict=True):
        line[0].set_ylabel(name)
        for axes, image in zip(line, images, strict=True):
            shown = image if name == "canvas" else np.ma.masked_equal(image, 0)
            axes.imshow(shown, **look)
            axes.set(xticks=[], yticks=[])


def _points(part: SubFigure, batch: Batch, clouds: Tensor) -> None:
    grid = part.subplots(3, _SHOWN, subplot_kw={"projection": "3d"})
    rows = {"read": batch.inputs, "exact": batch.targets, "reconstructed": clouds}
    for place, (line, (name, some)) in enumerate(zip(grid, rows.items(), strict=True)):
        line[0].text2D(-0.15, 0.5, name, transform=line[0].transAxes, rotation=90, va="center")
        for axes, cloud in zip(line, some, strict=True):
            axes.scatter(*cloud.T.numpy(), s=2, color=COLOURS[place])
            axes.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1))
            axes.set_box_aspect((1, 1, 1), zoom=1.6)
            axes.set_axis_off()


_SHOW: dict[TaskName, tuple[str, Callable[[SubFigure, Batch, Tensor], None]]] = {
    "text": ("below each character what it expects there, right (green) or wrong (orange)", _text),
    "masked_text": (
        "below, what it puts for hidden ones, right (green) or wrong (orange)",
        _masked,
    ),
    "digits": ("above each image what it takes it for", _digits),
    "segmentation": ("images, their classes, and those that it names", _segmentation),
    "points": ("points as it reads them, as they are, and as it reconstructs them", _points),
}
"""By task: what is shown, in words, and how."""
