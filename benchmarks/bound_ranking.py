"""Where the bound ranks settings of CO2 rightly: what is measured beside what it says.

    python benchmarks/bound_ranking.py            # ten minutes on two cores; continue with the same
    python benchmarks/bound_ranking.py --quick    # two settings of one task, in seconds

Small models on two of the built-in tasks, SGD and AdamW inside, two learning rates, and CO2 with
other tau, delays, outer steps, clips and quantized averages. Measured is the mean of |grad f|^2 at
the mean of the workers, of all training images, or of fixed samples of text. The bound gets the
constants that `realrun train --estimate` finds, and the residuals that training records
(Theorem 1 of docs/theory.md). AdamW has no gamma: it gets how long its steps were per gradient.

Finished trainings are rows of bound_ranking-runs.csv, and are not made again. Writes
bound_ranking.md and bound_ranking.png.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reports import append, folder, machine, made_by, parser, read, table
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from analysis.convergence import bound, clipping
from analysis.convergence.setting import Late, Setting
from co2sim.common.plots import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from realrun.algorithms import CO2
from realrun.execute.world import World, join
from realrun.launch.launcher import run_local
from realrun.train.folder import ESTIMATE
from realrun.train.log import MARKERS
from realrun.train.settings import TaskName
from realrun.train.tasks.presets import GPTS, GPTShape
from realrun.train.tasks.registry import make_task
from realrun.train.tasks.task import Task, loss_of

TASKS: tuple[TaskName, ...] = ("digits", "text")
WORKERS, BATCH, SIZE, CONTEXT = 4, 8, "tiny", 32
"""Batch: samples of one worker."""
DEADLINE = 600.0
SAMPLES = 256
"""Of text, at which the gradient of f is measured; of images it is all."""
EVERY = 7
"""Steps between measurements of the gradient: not in step with rounds of 4 or 12."""
RUNS = "bound_ranking-runs.csv"
CONSTANTS = "bound_ranking-estimates.json"
KEYS = ("task", "inner", "lr", "method", "seed")
NUMBERS = (
    "steps",
    "rounds",
    "gradient",
    "loss",
    "gamma",
    "clipped",
    "clip_residual",
    "rounding_residual",
)


@dataclass(frozen=True, slots=True)
class Method:
    """CO2 in one setting. `clip` is one of CLIPS, in lengths of a round by element."""

    name: str
    family: str
    tau: int = 4
    clip: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, constants: Mapping[str, float], rounds: int, gamma: float) -> Setting:
        """What the bound is given."""
        late = self.options.get("delay")
        return Setting(
            **constants,
            workers=WORKERS,
            rounds=rounds,
            local_steps=self.tau,
            inner_step=gamma,
            outer_step=self.options.get("outer_lr", 1.0),
            momentum=self.options.get("outer_momentum", 0.0),
            delay=self.options.get("staleness", 1),
            late=Late(steps=late) if late else None,
        )


SAID = {"sgd": "SGD", "adamw": "AdamW"}
BASE = "tau 4, a round late"
METHODS = (
    Method(BASE, ""),
    Method("tau 1", "tau", 1),
    Method("tau 12", "tau", 12),
    Method("in time", "delay", options={"staleness": 0}),
    Method("2 steps late", "delay", options={"delay": 2, "keep": 1.0, "predict": 0.0}),
    Method("3 rounds late", "delay", options={"staleness": 3}),
    Method("alpha 1/2", "outer step", options={"outer_lr": 0.5}),
    Method("alpha 1/2, beta 1/2", "outer step", options={"outer_lr": 0.5, "outer_momentum": 0.5}),
    Method("loose clip", "clip", clip="loose"),
    Method("clip", "clip", clip="middle"),
    Method("tight clip", "clip", clip="tight"),
    Method("int8", "wire", options={"dtype": "int8"}),
    Method("int4", "wire", options={"dtype": "int4"}),
)
FAMILIES = tuple(dict.fromkeys(method.family for method in METHODS if method.family))

RATES: Mapping[tuple[str, str], tuple[float, float]] = {
    ("digits", "sgd"): (0.0025, 0.1),
    ("text", "sgd"): (0.001, 0.05),
    ("digits", "adamw"): (0.0001, 0.003),
    ("text", "adamw"): (0.00005, 0.003),
}
"""For each task and inner optimizer: one at which most settings have a bound, and a usual one."""
CLIPS: Mapping[str, Mapping[str, float]] = {
    "sgd": {"loose": 3.0, "middle": 1.0, "tight": 0.2},
    "adamw": {"loose": 0.6, "middle": 0.3, "tight": 0.1},
}
"""Shares of tau steps: of SGD's that are as long as the root mean square of an element of the first
gradient, of AdamW's that are as long as the learning rate."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One training."""

    task: TaskName
    inner: str
    lr: float
    method: Method
    seed: int
    steps: int

    @property
    def key(self) -> tuple[str, ...]:
        """In the table of runs."""
        return (self.task, self.inner, f"{self.lr:g}", self.method.name, str(self.seed))


def asks(*, quick: bool) -> list[Ask]:
    """All that is trained: seed by seed, so that an interrupted study is complete but for seeds."""
    tasks = TASKS[:1] if quick else TASKS
    inners = ("sgd",) if quick else ("sgd", "adamw")
    methods = METHODS[:1] + METHODS[-2:-1] if quick else METHODS
    seeds, steps = (1, 12) if quick else (2, 96)
    return [
        Ask(task, inner, lr, method, seed, steps)
        for seed, task, inner in product(range(seeds), tasks, inners)
        for lr in RATES[task, inner]
        for method in methods
    ]


def shape_of(task: str) -> GPTShape:
    """The transformer of a task, in short contexts."""
    return replace(GPTS[SIZE], context=CONTEXT) if task == "text" else GPTS[SIZE]


class Probe:
    """Measures |grad f|^2 at the mean of the workers, on a copy of the model."""

    def __init__(self, task: Task, world: World) -> None:
        """Each rank takes a share of the samples."""
        self._model, size = task.model(), world.layout.world_size
        count = min(task.choices, SAMPLES) if task.name.startswith("text") else task.choices
        numbers = np.random.default_rng(0).permutation(task.choices)[: count // size * size]
        self._batch, self._size = task.draw(numbers[world.rank :: size]), size

    def __call__(self, model: nn.Module) -> tuple[float, float]:
        """|grad f|^2, and f. All ranks call it."""
        mean = parameters_to_vector(model.parameters()).detach().clone()
        dist.all_reduce(mean)
        vector_to_parameters(mean.div_(self._size), self._model.parameters())
        loss = loss_of(self._model, self._batch)
        parts = torch.autograd.grad(loss, list(self._model.parameters()))
        found = torch.cat([loss.detach().reshape(1), *(part.reshape(-1) for part in parts)])
        dist.all_reduce(found)
        found /= self._size
        return float(found[1:].double().square().sum()), float(found[0])


class Lengths:
    """How long local steps are for their gradients, before CO2 does anything: rms over steps."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Made before CO2, whose hook then comes later."""
        self._model, self._before, self._sums = model, torch.empty(0), torch.zeros(2)
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._before = parameters_to_vector(self._model.parameters()).detach().clone()

    def _end(self, *_: object) -> None:
        moved = parameters_to_vector(self._model.parameters()).detach() - self._before
        self._sums += torch.stack((moved.square().sum(), gradient_of(self._model).square().sum()))

    def gamma(self) -> float:
        """Of all ranks, which all call it: the learning rate, with SGD."""
        sums = self._sums.clone()
        dist.all_reduce(sums)
        return math.sqrt(float(sums[0] / sums[1]))


def gradient_of(model: nn.Module) -> Tensor:
    """In one row."""
    return torch.cat([one.grad.reshape(-1) for one in model.parameters() if one.grad is not None])


def one_run(ask: Ask, task: Task, world: World) -> dict[str, Any]:
    """Train once; the row of the table of runs. All ranks call it."""
    torch.manual_seed(ask.seed)
    model, probe, method = task.model(), Probe(task, world), ask.method
    kind = torch.optim.SGD if ask.inner == "sgd" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=ask.lr, weight_decay=0.0)

    def slope(step: int) -> Tensor:
        optimizer.zero_grad()
        batch = task.batch(ask.seed, step, BATCH * WORKERS, world.rank, WORKERS)
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        return gradient_of(model)

    unit = torch.tensor(ask.lr)
    if ask.inner == "sgd":
        unit = ask.lr * slope(0).square().mean().sqrt() / WORKERS
        dist.all_reduce(unit)
    options = {"outer_lr": 1.0, "gap": "constant", "tau": method.tau, **method.options}
    if method.clip is not None:
        options["clip"] = CLIPS[ask.inner][method.clip] * method.tau * float(unit)
    lengths = Lengths(model, optimizer)
    co2, found = CO2.published(model, optimizer, **options), [probe(model)]
    for step in range(1, ask.steps + 1):
        slope(step)
        optimizer.step()
        if step % EVERY == 0 and step < ask.steps:
            found.append(probe(model))
    loss = probe(model)[1]
    stats = co2.stats()
    co2.close()
    return {
        **dict(zip(KEYS, ask.key, strict=True)),
        "steps": ask.steps,
        "rounds": stats.rounds,
        "gradient": float(np.mean([squared for squared, _ in found])),
        "loss": loss,
        "gamma": lengths.gamma(),
        "clipped": stats.clipped,
        "clip_residual": stats.clip_residual,
        "rounding_residual": stats.rounding_residual,
    }


def run_ranks(wanted: list[Ask], path: Path) -> None:
    """Be one of the ranks: run what is missing, one after the other, and add it to the file."""
    world = join("gloo", DEADLINE)
    torch.set_num_threads(1)
    shared: list[Any] = [read(path, KEYS, NUMBERS)]
    dist.broadcast_object_list(shared)
    missing = [ask for ask in wanted if ask.key not in shared[0]]
    tasks = {name: make_task(name, SIZE, shape_of(name), world.device) for name in TASKS}
    began = time.monotonic()
    for done, ask in enumerate(missing, 1):
        row = one_run(ask, tasks[ask.task], world)
        if world.rank == 0:
            append(path, row, (*KEYS, *NUMBERS))
            left = (len(missing) - done) * (time.monotonic() - began) / done / 60
            print(f"{', '.join(ask.key)}: {row['gradient']:.4g}; {left:.1f} min left", flush=True)
    world.leave()


def estimate(task: str, inner: str, lr: float, steps: int) -> dict[str, float]:
    """The constants that `realrun train --estimate` finds in a run of the base setting."""
    with tempfile.TemporaryDirectory() as name:
        command = (
            *("realrun", "train", "--task", task, "--size", SIZE, "--optimizer", inner),
            *("--strategy", "co2.published:tau=4", "--outer", "gap=constant,lr=1"),
            *("--lr", f"{lr:g}"),
            *("--steps", str(steps), "--batch", str(BATCH * WORKERS), "--eval-every", "0"),
            *("--warmup", "0", "--final-lr", "1", "--weight-decay", "0", "--clip-grad", "0"),
            *("--momentum", "0" if inner == "sgd" else "0.9", "--estimate", "--out", name),
            *(("--context", str(CONTEXT)) if task == "text" else ()),
        )
        if code := run_local(command, WORKERS):
            sys.exit(code)
        found = json.loads((Path(name) / ESTIMATE).read_text())
    return {
        "smoothness": found["smoothness"],
        "noise": found["noise"]["value"],
        "gap": max(found["gap"]["value"], 0.0),
    }


def residual(row: Mapping[str, Any], tau: int, gamma: float) -> float:
    """Eps in units of one gradient, as `co2analysis bound --run` takes it from a training."""
    lost = math.sqrt(row["clip_residual"]) + math.sqrt(row["rounding_residual"])
    return lost / (gamma * tau * math.sqrt(row["rounds"]))


def bounded(setting: Setting, eps: float) -> tuple[float, float]:
    """Theorem 1, infinite where its condition fails; and its terms without the factor K.

    The second is no bound. It is there for every setting, to be ranked by.
    """
    taken, parts = bound.load(setting), clipping.alone(setting)
    used = clipping.constants(setting)
    averaged = math.sqrt(setting.noise / setting.workers)
    apart = math.sqrt(used.by_noise) * averaged + used.residual * eps
    rest = parts.optimization + parts.noise + (math.sqrt(parts.drift) + eps) ** 2
    stale = (setting.smoothness * apart) ** 2
    return rest + stale / (1 - taken) if taken < 1 else math.inf, rest + stale


def gap_of(constants: Mapping[str, dict[str, float]], task: str) -> float:
    """Delta of a task: the largest fall of the loss that any run has seen."""
    return max(one["gap"] for name, one in constants.items() if name.startswith(task))


def evaluated(frame: pd.DataFrame, constants: Mapping[str, dict[str, float]]) -> pd.DataFrame:
    """A row for each setting: means over seeds, and what the bound says of them."""
    methods, rows = {method.name: method for method in METHODS}, []
    based = frame[frame["method"] == BASE].groupby(["task", "inner", "lr"])["gamma"].mean()
    for key, runs in frame.groupby(["task", "inner", "lr", "method"], sort=False):
        task, inner, lr, name = map(str, key)  # type: ignore[arg-type]
        method = methods[name]
        mean = runs[list(NUMBERS)].mean().to_dict()
        low = float(lr) == RATES[task, inner][0]
        rounds = int(mean["steps"]) // method.tau
        known = constants[f"{task} {inner} {lr}"] | {"gap": gap_of(constants, task)}
        gamma = float(based[task, inner, lr])
        setting = method.setting(known, rounds, gamma)
        found = [residual(row, method.tau, gamma) ** 2 for row in records(runs)]
        eps = math.sqrt(float(np.mean(found)))
        total, terms = bounded(setting, eps)
        rows.append(
            {
                "panel": f"{task}, {SAID[inner]}",
                "rate": "low" if low else "usual",
                "method": name,
                "family": method.family,
                "gradient": mean["gradient"],
                "loss": mean["loss"],
                "seeds": runs.sort_values("seed")["gradient"].to_numpy(),
                "eps": eps,
                "load": bound.load(setting),
                "bound": total,
                "terms": terms,
            }
        )
    return pd.DataFrame(rows)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


CLEAR = 0.01
"""The share by which settings have to differ on average for a pair to count."""


def rank(one: pd.Series, other: pd.Series) -> str:
    """Spearman's correlation, and of how many settings; none of fewer than 4."""
    count = len(one)
    if count < 4:  # noqa: PLR2004
        return f"- ({count})"
    return f"{float(spearmanr(one, other).statistic):+.2f} ({count})"


def pairs(found: pd.DataFrame, family: str) -> str:
    """Pairs of a family and the base that differ in every seed alike; how many are ranked rightly.

    At one learning rate, by the terms. Runs of one seed have the same first model and samples.
    """
    right = clear = 0
    for _, group in found.groupby("rate", sort=False):
        chosen = records(group[(group["family"] == family) | (group["method"] == BASE)])
        for one, other in combinations(chosen, 2):
            ratios = np.log(one["seeds"] / other["seeds"])
            if abs(np.sign(ratios).sum()) == len(ratios) and abs(ratios.mean()) > CLEAR:
                clear += 1
                right += ratios[0] * (one["terms"] - other["terms"]) > 0
    return f"{right} of {clear}"


def correlations(frame: pd.DataFrame) -> str:
    """How rightly each panel is ranked, as a table in Markdown."""
    rows = []
    for panel, found in frame.groupby("panel", sort=False):
        holds = found[np.isfinite(found["bound"])]
        broken = int((holds["gradient"] > holds["bound"]).sum())
        rows.append(
            {
                "task, inner": str(panel),
                "bound": rank(holds["bound"], holds["gradient"]),
                "broken": f"{broken} of {len(holds)}",
                "terms, all": rank(found["terms"], found["gradient"]),
                **{
                    f"terms, {rate} rate": rank(part["terms"], part["gradient"])
                    for rate, part in found.groupby("rate", sort=False)
                },
                **{
                    f"loss, {rate} rate": rank(part["terms"], part["loss"])
                    for rate, part in found.groupby("rate", sort=False)
                },
                **{family: pairs(found, family) for family in FAMILIES},
            }
        )
    return table(rows)


def settings(frame: pd.DataFrame) -> str:
    """What was measured / what the bound says, or in brackets its terms where it has none."""
    rows = []
    for (rate, method), found in frame.groupby(["rate", "method"], sort=False):
        cells = {"rate": str(rate), "setting": str(method)}
        for row in records(found):
            says = f"{row['bound']:.3g}" if math.isfinite(row["bound"]) else f"({row['terms']:.3g})"
            cells[row["panel"]] = f"{row['gradient']:.3g} / {says}, eps {row['eps']:.2g}"
        rows.append(cells)
    return table(rows)


def draw(frame: pd.DataFrame) -> bytes:
    """Ranks of what was measured above ranks by the terms; filled: a bound holds."""
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        panels = list(frame.groupby(["rate", "panel"], sort=False))
        rates = frame["rate"].nunique()
        columns = len(panels) // rates
        figure = Figure(figsize=(2.7 * columns + 0.5, 3.0 * rates + 0.6), layout="constrained")
        axes = figure.subplots(rates, columns, squeeze=False, sharex=True, sharey=True)
        order = [at for rate in range(rates) for at in range(rate, len(panels), rates)]
        for axis, place in zip(axes.flat, order, strict=True):
            (rate, panel), found = panels[place]
            _ranks(axis, found)
            axis.set_title(
                f"{panel}, {rate} rate:\n{rank(found['terms'], found['gradient'])}", fontsize=9
            )
        figure.supxlabel("rank by the bound's terms (filled: its condition holds)")
        figure.supylabel("rank by the measured mean of |grad f|^2")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=6, frameon=False)
        return render(figure, "png")


def _ranks(axis: Axes, found: pd.DataFrame) -> None:
    """One panel; the diagonal is a right ranking."""
    says, measured = found["terms"].rank(), found["gradient"].rank()
    axis.plot([1, len(found)], [1, len(found)], color="#888888", linewidth=1)
    axis.set_xticks(range(1, len(found) + 1, 3))
    axis.set_yticks(range(1, len(found) + 1, 3))
    for place, family in enumerate(("", *FAMILIES)):
        chosen, colour = found["family"] == family, COLOURS[place]
        holds = np.isfinite(found.loc[chosen, "bound"])
        axis.scatter(
            says[chosen],
            measured[chosen],
            s=40,
            marker=MARKERS[place],
            facecolors=[colour if one else "none" for one in holds],
            edgecolors=colour,
            label=family or "base",
        )


def report(
    frame: pd.DataFrame, constants: Mapping[str, dict[str, float]], steps: int, seeds: int
) -> str:
    """The page."""
    known = table(
        [
            {"task, inner, lr": name, **{key: f"{value:.3g}" for key, value in one.items()}}
            for name, one in constants.items()
        ]
    )
    return f"""\
# Where the bound ranks settings rightly

{WORKERS} workers, {BATCH} samples each, {steps} steps, {seeds} seeds, a constant learning rate,\
 low or usual. Measured is the mean of |grad f|^2 at the mean of the workers, every {EVERY} steps.\
 The bound is that of Theorem 1 of docs/theory.md with the residual that training\
 records. Most usual rates are outside its condition; then its *terms* without the factor\
 1/(1 - load) are no bound, but can be ranked by.

**Rank correlation** (Spearman; in brackets, of how many settings). *bound*: where it holds;\
 *broken*: measured above it. *loss*: with f at the last step in the place of the gradient. By\
 family: of the pairs of settings, base included, that differ at one rate by {CLEAR:.0%} and in\
 every seed alike, how many the terms order rightly.

{correlations(frame)}

Measured / bound (in brackets: its terms, where no bound holds), and the residual eps in units of\
 one gradient. For AdamW gamma is how long its steps were per gradient, in the base setting.

{settings(frame)}

Constants, from `realrun train --estimate` with the base setting; the bound gets the largest gap\
 of the task, as a run with a low rate is far from the lowest loss:

{known}

{machine()}

{made_by()}
"""


def complete(wanted: list[Ask], out: Path) -> int:
    """Run what is missing in the folder, by this very script as ranks; the exit code."""
    path, code = out / CONSTANTS, 0
    constants = json.loads(path.read_text()) if path.exists() else {}
    for task, inner, lr in dict.fromkeys((ask.task, ask.inner, ask.lr) for ask in wanted):
        key = f"{task} {inner} {lr:g}"
        if key not in constants:
            constants[key] = estimate(task, inner, lr, wanted[0].steps)
            path.write_text(json.dumps(constants, indent=2) + "\n")
    if any(ask.key not in read(out / RUNS, KEYS, NUMBERS) for ask in wanted):
        code = run_local([sys.executable, *sys.argv, "--out", str(out)], WORKERS)
    return code


def main() -> None:
    """Start the ranks, or be one of them; then write what is complete."""
    command = parser(__doc__, "two settings of one task")
    given = command.parse_args()
    wanted = asks(quick=given.quick)
    with folder(given) as out:
        if "RANK" in os.environ:
            run_ranks(wanted, out / RUNS)
            return
        code = complete(wanted, out)
        known = read(out / RUNS, KEYS, NUMBERS)
        done = [known[ask.key] for ask in wanted if ask.key in known]
        if done:
            constants = json.loads((out / CONSTANTS).read_text())
            found = evaluated(pd.DataFrame(done), constants)
            seeds = len({ask.seed for ask in wanted})
            text = report(found, constants, wanted[0].steps, seeds)
            (out / "bound_ranking.md").write_text(text)
            (out / "bound_ranking.png").write_bytes(draw(found))
            print(text)
    sys.exit(code)


if __name__ == "__main__":
    main()
