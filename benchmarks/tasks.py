"""Five kinds of tasks by six methods: what they learn from the same samples, and in what time.

    sudo python benchmarks/tasks.py            # two hours on two cores; go on with the same
    sudo python benchmarks/tasks.py --quick    # two methods on one task, in seconds

Text, masked text, images, segmentation and point clouds, each by DDP, LocalSGD, SlowMo, DiLoCo and
CO2, as published and with the delay that it chooses in the lab. First some rounds of each are timed
in a lab of four nodes at 100 Mbit/s, with local steps of 100 ms. Then all train outside the lab:
learning rates and outer steps are chosen with a seed of their own, and the best of each trains with
three seeds. At last `realrun train` trains a model of each task for the figures.

What is timed stands in tasks-lab.json, finished trainings are rows of tasks-runs.csv, and neither
is made again. Writes tasks.md, tasks.csv and a figure for each task.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from convergence import TUNING_SEED, Ask, Configuration, StudyBudget, complete, run_ranks, wanted
from matplotlib.figure import Figure, SubFigure
from reports import Known, folder, machine, made_by, parser, read, table
from time_to_loss_runs import Pace, figures, paced
from torch import Tensor, nn

from co2sim.common.plots import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from co2sim.common.units import Seconds
from realrun.execute.world import World, join
from realrun.lab.lab import Lab, run_lab
from realrun.train.log import MARKERS
from realrun.train.loop import train
from realrun.train.parallelize import build
from realrun.train.settings import TaskName, TrainSettings
from realrun.train.tasks.registry import make_task
from realrun.train.tasks.task import LEFT_OUT, Batch, Task
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

Delays = Mapping[TaskName, int]
"""The delay that CO2 has chosen in the lab."""


def budget(task: TaskName, *, quick: bool) -> StudyBudget:
    """How much a task sees."""
    if quick:
        return StudyBudget("tiny", 24, 8, 4, 12, workers=2, quick=True, task=task)
    return StudyBudget(steps=384, warmup=24, eval_every=48, task=task, choices=3)


def tasks(*, quick: bool) -> tuple[TaskName, ...]:
    """Those that are run."""
    return TASKS[2:3] if quick else TASKS


def methods(*, quick: bool) -> tuple[str, ...]:
    """Those that are run."""
    return ("DDP", LATE) if quick else tuple(METHODS)


def configuration(name: str, task: TaskName, delays: Delays) -> Configuration:
    """How a method trains outside the lab: with the delay that was chosen in it."""
    if name != LATE:
        return Configuration(name, METHODS[name])
    options = f"tau={TAU},delay={delays[task]},fragments={TAU}"
    return Configuration(f"{LATE} ({delays[task]})", f"co2:{options}")


def study(delays: Delays, quick: bool, known: Known) -> Iterator[Ask]:  # noqa: FBT001 - a plan
    """Rates and outer steps with a seed of their own, then the best with other seeds."""
    for task in tasks(quick=quick):
        for name in methods(quick=quick):
            yield from of_cell(name, task, delays, known, quick=quick)


def of_cell(
    name: str, task: TaskName, delays: Delays, known: Known, *, quick: bool
) -> Iterator[Ask]:
    """The runs of a method on a task."""
    yield from wanted(configuration(name, task, delays), budget(task, quick=quick), known)


def final(name: str, task: TaskName, delays: Delays, known: Known, *, quick: bool) -> list[Ask]:
    """Those of them that count, once the others are known."""
    asks = of_cell(name, task, delays, known, quick=quick)
    return [ask for ask in asks if ask.seed != TUNING_SEED]


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
    task = make_task(given.task, given.size, given.shape, torch.device("cpu"))
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
    """Each line, and below each character that was asked for what the model says is there."""
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
    "masked_text": ("below, what it puts for hidden ones, right (green) or wrong (orange)", _text),
    "digits": ("above each image what it takes it for", _digits),
    "segmentation": ("images, their classes, and those that it names", _segmentation),
    "points": ("points as it reads them, as they are, and as it reconstructs them", _points),
}
"""By task: the text that is shown, and how."""


def write(
    out: Path, known: Known, timed: dict[str, dict[str, Any]], delays: Delays, *, quick: bool
) -> None:
    """Write tasks.csv, tasks.md and the figures."""
    frame = summary(known, timed, delays, quick=quick)
    frame.to_csv(out / "tasks.csv", index=False)
    text = report(frame, quick=quick)
    (out / "tasks.md").write_text(text, "utf-8")
    for task in tasks(quick=quick):
        (out / f"tasks-{task}.png").write_bytes(draw(task, known, delays, quick=quick))
    print(text)


def summary(
    known: Known, timed: dict[str, dict[str, Any]], delays: Delays, *, quick: bool
) -> pd.DataFrame:
    """A line for each task and method."""
    lines = []
    for task in tasks(quick=quick):
        steps = budget(task, quick=quick).steps
        for name in methods(quick=quick):
            asks = final(name, task, delays, known, quick=quick)
            rows = [known[ask.key] for ask in asks]
            losses = [float(row["validation_loss"]) for row in rows]
            step_s = timed[task][name]["step_s"]
            lines.append(
                {
                    "task": task,
                    "method": name,
                    "delay": delays[task] if asks[0].configuration.name != name else None,
                    "lr": asks[0].lr,
                    "outer": asks[0].choice,
                    "loss": mean(losses),
                    "deviation": stdev(losses),
                    "accuracy": mean(float(row["accuracy"] or "nan") for row in rows),
                    "step_ms": 1e3 * step_s,
                    "seconds": steps * step_s,
                    "late_steps": timed[task][name]["late_steps"],
                }
            )
    return pd.DataFrame(lines)


def report(frame: pd.DataFrame, *, quick: bool) -> str:
    """The tables in Markdown."""
    parts = [
        f"## {task}\n\n{table([_line(row) for _, row in rows.iterrows()])}\n"
        for task, rows in frame.groupby("task", sort=False)
    ]
    given = budget(tasks(quick=quick)[0], quick=quick)
    return f"""\
# Five tasks by six methods

{given.workers} workers, size {given.size}, {given.steps} steps of {given.batch} samples; mean and
standard deviation of the last validation loss over the seeds, learning rate and outer step chosen
with another one. A step: in a lab of {given.workers} nodes at 100 Mbit/s, with 100 ms for a local
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


RUNS, TIMES = "tasks-runs.csv", "tasks-lab.json"
RATE = "100 Mbit/s"


def main() -> None:
    """Start the ranks, or be one of them; then write the tables and the figures."""
    command = parser(__doc__, "two methods on one task")
    command.add_argument("--in-lab", action="store_true", help=argparse.SUPPRESS)  # for the ranks
    given = command.parse_args()
    with folder(given) as out:
        if given.in_lab:
            run_lab_ranks(out / TIMES, quick=given.quick)
            return
        if "RANK" in os.environ:
            run_ranks(partial(study, delays(times(out)), given.quick), out / RUNS)
            return
        nodes = budget(tasks(quick=given.quick)[0], quick=given.quick).workers
        timed = times(out) if (out / TIMES).exists() else {}
        if any(task not in timed for task in tasks(quick=given.quick)):
            ranks = [sys.executable, __file__, *sys.argv[1:], "--out", str(out), "--in-lab"]
            if code := run_lab(ranks, Lab(nodes, 1, RATE)):
                sys.exit(code)
        chosen = delays(times(out))
        if code := complete(partial(study, chosen, given.quick), out / RUNS, nodes):
            sys.exit(code)

        write(out, read(out / RUNS), times(out), chosen, quick=given.quick)


def times(out: Path) -> dict[str, dict[str, Any]]:
    """What was timed in the lab, by task and method."""
    found: dict[str, dict[str, Any]] = json.loads((out / TIMES).read_text("utf-8"))
    return found


def delays(timed: dict[str, dict[str, Any]]) -> Delays:
    """What CO2 chose in the lab."""
    return {task: int(rows[LATE]["delay"]) for task, rows in timed.items()}  # type: ignore[misc]


if __name__ == "__main__":
    main()
