"""Five kinds of tasks by six methods: what they learn from the same samples, and in what time.

    sudo python benchmarks/tasks.py            # two hours on two cores; go on with the same
    sudo python benchmarks/tasks.py --quick    # two methods on one task, in seconds

Text, masked text, images, segmentation and point clouds, each by DDP, LocalSGD, SlowMo, DiLoCo and
CO2, as published and with the delay that it chooses in the lab. First some rounds of each are timed
in a lab of four nodes at 100 Mbit/s, with local steps of 100 ms. Then all train outside the lab:
learning rates and outer steps are chosen with a seed of their own, and the best of each trains with
three seeds. At last `realrun train` trains a model of each task for the figures.

What is timed stands in tasks-lab.csv, finished trainings are rows of tasks-runs.csv, and neither
is made again. Writes tasks.md, tasks.csv and a figure for each task.
"""

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from contenders import Pace, figures, paced
from matplotlib.figure import Figure, SubFigure
from reports import machine, made_by, needed, png, publish, table
from studies import (
    TUNING_SEED,
    Budget,
    Configuration,
    Rows,
    Study,
    Training,
    command,
    finished,
    trainings,
    tuned,
)
from torch import Tensor

from co2sim.common.plots import COLOURS, GRID, PLAIN_TEXT, STYLE
from co2sim.common.units import Seconds
from realrun.execute.world import World
from realrun.lab.lab import Lab
from realrun.launch.launcher import run_local
from realrun.train.log import MARKERS
from realrun.train.loop import train
from realrun.train.parallelize import build
from realrun.train.settings import TaskName, TrainSettings
from realrun.train.tasks.registry import make_task
from realrun.train.tasks.task import LEFT_OUT, Batch
from realrun.train.tasks.text import CHARACTERS

TASKS: tuple[TaskName, ...] = ("text", "masked_text", "digits", "segmentation", "points")
TAU = 12
LATE = "CO2, delay auto"
METHODS = {
    "DDP": "ddp",
    "LocalSGD": f"local_sgd:tau={TAU}",
    "SlowMo": f"slowmo:tau={TAU}",
    "DiLoCo": f"diloco:tau={TAU}",
    "CO2, as published": f"co2.published:tau={TAU}",
    LATE: f"co2:tau={TAU},delay=auto",
}
RUNS, TIMES = "tasks-runs.csv", "tasks-lab.csv"
RATE = "100 Mbit/s"
PACE: Seconds = 0.1
"""Of a local step, as in time_to_loss.py: the arithmetic is real, and the rest is waited for."""
ROUNDS, FEW = 8, 3
"""That are timed, and in a quick run."""


def budgets(options: Namespace) -> list[Budget]:
    """How much is seen of each task."""
    if options.quick:
        return [Budget.small(TASKS[2], batch=8)]
    usual = Budget(steps=384, warmup=24, eval_every=48, choices=3)
    return [replace(usual, task=task) for task in TASKS]


def methods(budget: Budget) -> tuple[str, ...]:
    """Those that are run."""
    return ("DDP", LATE) if budget.quick else tuple(METHODS)


@dataclass(frozen=True, slots=True)
class Timing:
    """A few rounds of a method in a lab."""

    budget: Budget
    method: str

    @property
    def key(self) -> tuple[str, ...]:
        """In the table of times."""
        return (self.budget.task, self.method)

    @property
    def steps(self) -> int:
        """Of all rounds."""
        return (FEW if self.budget.quick else ROUNDS) * TAU

    @property
    def lab(self) -> Lab:
        """Of a node for each worker."""
        return Lab(self.budget.workers, 1, RATE)


def timed(run: Timing, _: Rows, world: World) -> dict[str, Any]:
    """Seconds of a step without the first round, and the delay."""
    settings = TrainSettings(
        task=run.budget.task,
        strategy=METHODS[run.method],
        size=run.budget.size,
        steps=run.steps,
        batch=run.budget.batch,
        warmup=TAU,
        log_every=TAU,
        eval_every=0,
        evaluate="after",
    )
    pace = Pace(PACE)
    row = figures(train(settings, world, build=partial(paced, pace, build)))
    late = pace.late / max(1, pace.steps)
    return {"step_s": row["step_s"], "used_delay": row["used_delay"], "late_steps": late}


Cells = Mapping[tuple[TaskName, str], list[Training]]
"""The runs of each task and method."""


def cells(options: Namespace, rows: Rows, times: Rows) -> Cells:
    """The runs, as far as the finished ones tell: CO2 has the delay that it chose in the lab."""
    found = {}
    for budget in budgets(options):
        for method in methods(budget):
            line = Configuration(method, METHODS[method])
            if method == LATE:
                delay = int(times[budget.task, LATE]["used_delay"])
                strategy = f"co2:tau={TAU},delay={delay},fragments={TAU}"
                line = Configuration(f"{LATE} ({delay})", strategy)
            found[budget.task, method] = list(tuned(line, budget, rows))
    return found


def studies(options: Namespace) -> list[Study]:
    """Times in the lab, then trainings outside of it."""
    small = budgets(options)
    timings = [Timing(budget, method) for budget in small for method in methods(budget)]
    numbers = ("step_s", "used_delay", "late_steps")
    path, workers = options.out / TIMES, small[0].workers
    lab = Study(path, ("task", "method"), numbers, lambda _: timings, timed, workers)

    def wanted(rows: Rows) -> Iterator[Training]:
        for runs in cells(options, rows, lab.rows()).values():
            yield from runs

    return [lab, trainings(options.out / RUNS, wanted, workers)]


_SHOWN = 6
"""Samples of the validation that a figure shows."""
_LETTERS = 56
"""Characters of a line of text."""


def draw(figure: Figure, lines: Mapping[str, list[Training]], rows: Rows) -> None:
    """Losses of a task over steps, and on the right what a model does with samples."""
    run = lines[LATE][0]
    settings = TrainSettings(task=run.budget.task, size=run.budget.size, warmup=1)
    task = make_task(settings.task, settings.size, settings.shape, torch.device("cpu"))
    model = task.model()
    model.load_state_dict(weights(run))
    left, right = figure.subfigures(1, 2, width_ratios=(4, 7))
    with mpl.rc_context(GRID):
        axes = left.subplots()
    for index, runs in enumerate(lines.values()):
        curves = [json.loads(rows[each.key]["curve"]) for each in runs]
        units, losses = zip(*(zip(*curve, strict=True) for curve in curves), strict=True)
        axes.plot(
            np.array(units[0]) / task.units / run.budget.batch,
            np.mean(losses, axis=0),
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            label=runs[0].configuration.name,
        )
    title = settings.task.replace("_", " ")
    axes.set(xlabel="step", ylabel=f"validation: {task.loss}", title=title)
    axes.legend(frameon=False, fontsize=8)
    batch = Batch(*(part[:_SHOWN] for part in task.validation[0]))
    what, show = _SHOW[settings.task]
    right.suptitle(f"{run.configuration.name}, tau 12, in the validation: {what}", fontsize=9)
    with torch.no_grad():
        show(right, batch, model(batch.inputs))


def weights(run: Training) -> dict[str, Tensor]:
    """Those that this run makes, by `realrun train`."""
    budget = run.budget
    options = {
        "task": budget.task,
        "strategy": run.configuration.trained(run.choice),
        "size": budget.size,
        "steps": budget.steps,
        "batch": budget.batch,
        "warmup": budget.warmup,
        "lr": run.lr,
        "seed": run.seed,
        "eval-every": budget.eval_every,
        "outer": run.configuration.outer(run.choice, run.lr),
    }
    with tempfile.TemporaryDirectory() as name:
        words = ["realrun", "train", "--out", name]
        words += [x for key, value in options.items() if value for x in (f"--{key}", str(value))]
        if code := run_local(words, budget.workers):
            sys.exit(code)
        saved: dict[str, Tensor] = torch.load(Path(name) / "model.pt")
    return saved


def _text(part: SubFigure, batch: Batch, logits: Tensor) -> None:
    """Each line, and below each character that was asked for what the model says is there."""
    hidden = batch.targets != LEFT_OUT
    truth = torch.where(hidden, batch.targets, batch.inputs)
    _lines(part, truth, torch.where(hidden, logits.argmax(2), batch.inputs), hidden)


def _lines(part: SubFigure, truth: Tensor, named: Tensor, hidden: Tensor) -> None:
    axes = part.subplots()
    axes.set_axis_off()
    axes.set(xlim=(-0.5, _LETTERS), ylim=(3 * _SHOWN, 0))
    font: dict[str, Any] = {"family": "monospace", "fontsize": 9, "ha": "center", "va": "center"}
    for row in range(len(truth)):
        for column in range(min(_LETTERS, truth.shape[1])):
            here, said = int(truth[row, column]), int(named[row, column])
            axes.text(column, 3 * row + 0.5, _letter(here), **font)
            if bool(hidden[row, column]):
                colour = COLOURS[2] if here == said else COLOURS[1]
                axes.text(column, 3 * row + 1.5, _letter(said), color=colour, **font)


def _letter(code: int) -> str:
    text = CHARACTERS[code] if code < len(CHARACTERS) else "?"
    return {"\n": "↵", "\t": "→"}.get(text, text)


def _digits(part: SubFigure, batch: Batch, logits: Tensor) -> None:
    classes = logits.argmax(-1).flatten()
    for axes, image, truth, said in zip(
        part.subplots(1, _SHOWN), batch.inputs, batch.targets.flatten(), classes, strict=True
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
    for index, (line, (name, some)) in enumerate(zip(grid, rows.items(), strict=True)):
        line[0].text2D(-0.15, 0.5, name, transform=line[0].transAxes, rotation=90, va="center")
        for axes, cloud in zip(line, some, strict=True):
            axes.scatter(*cloud.T.numpy(), s=2, color=COLOURS[index])
            axes.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1))
            axes.set_box_aspect((1, 1, 1), zoom=1.6)
            axes.set_axis_off()


_SHOW: dict[TaskName, tuple[str, Callable[[SubFigure, Batch, Tensor], None]]] = {
    "text": ("below each character what it expects there, right (green) or wrong (orange)", _text),
    "masked_text": ("below, what it puts for hidden ones, right (green) or wrong (orange)", _text),
    "digits": ("above each image what it takes it for", _digits),
    "segmentation": ("images, their classes, and those that it names", _segmentation),
    "points": ("points as it reads them, as they are, and as it reconstructs them", _points),
}
"""By task: the text that is shown, and how."""


def write(options: Namespace) -> None:
    """Write tasks.csv, tasks.md and a figure for each task."""
    needed(options.out / RUNS)
    rows, times = finished(options.out / RUNS), studies(options)[0].rows()
    last = {
        key: [run for run in runs if run.seed != TUNING_SEED]
        for key, runs in cells(options, rows, times).items()
    }
    frame = pd.DataFrame([_summary(key, last[key], rows, times) for key in last])
    frame.to_csv(options.out / "tasks.csv", index=False)
    publish(options, "tasks", report(frame, budgets(options)[0]))
    for budget in budgets(options):
        lines = {method: last[budget.task, method] for method in methods(budget)}
        size, style = (12.0, 4.6), STYLE | PLAIN_TEXT
        picture = png(size, lambda figure, lines=lines: draw(figure, lines, rows), style)
        (options.out / f"tasks-{budget.task}.png").write_bytes(picture)


def _summary(
    key: tuple[TaskName, str], runs: list[Training], rows: Rows, times: Rows
) -> dict[str, Any]:
    """A task and a method."""
    losses, time = [run.loss(rows) for run in runs], times[key]
    return {
        "task": key[0],
        "method": key[1],
        "delay": int(time["used_delay"]) if key[1] == LATE else None,
        "lr": runs[0].lr,
        "outer": runs[0].choice,
        "loss": mean(losses),
        "deviation": stdev(losses),
        "accuracy": mean(float(rows[run.key]["accuracy"]) for run in runs),
        "step_ms": 1e3 * time["step_s"],
        "seconds": runs[0].steps * time["step_s"],
        "late_steps": time["late_steps"],
    }


def report(frame: pd.DataFrame, budget: Budget) -> str:
    """The tables in Markdown."""
    parts = [
        f"## {task}\n\n{table([_line(row) for _, row in rows.iterrows()])}\n"
        for task, rows in frame.groupby("task", sort=False)
    ]
    return f"""\
# Five tasks by six methods

{budget.workers} workers, size {budget.size}, {budget.steps} steps of {budget.batch} samples;\
 mean and
standard deviation of the last validation loss over the seeds, learning rate and outer step chosen
with another one. A step: in a lab of {budget.workers} nodes at 100 Mbit/s, with 100 ms for a local
one; the time is that of all steps. At most {frame["late_steps"].max():.1%} of the local steps took
longer than 100 ms.

{chr(10).join(parts)}
{machine()}

{made_by()}
"""


def _line(row: pd.Series) -> dict[str, str]:
    name = row["method"] + (f" ({row['delay']:.0f})" if pd.notna(row["delay"]) else "")
    right = "" if pd.isna(row["accuracy"]) else f"{row['accuracy']:.1%}"
    return {
        "method": name,
        "lr": f"{row['lr']:g}",
        "outer step": row["outer"],
        "loss": f"{row['loss']:.4f} ± {row['deviation']:.4f}",
        "right": right,
        "a step": f"{row['step_ms']:.0f} ms",
        "time": f"{row['seconds']:.1f} s",
    }


def main() -> int:
    """Run, and write the tables and the figures."""
    return command(__doc__, "two methods on one task", studies, write)


if __name__ == "__main__":
    sys.exit(main())
