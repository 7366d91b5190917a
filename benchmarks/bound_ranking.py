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
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reports import machine, made_by, needed, png, publish, table
from scipy.stats import spearmanr
from studies import Rows, Study, command, estimated
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from analysis.convergence import bound, clipping
from analysis.convergence.setting import Late, Setting
from co2sim.common.plots import COLOURS
from realrun.algorithms import CO2
from realrun.execute.world import World
from realrun.train.log import MARKERS
from realrun.train.settings import TaskName
from realrun.train.tasks.presets import GPTS
from realrun.train.tasks.registry import make_task
from realrun.train.tasks.task import Task, loss_of

TASKS: tuple[TaskName, ...] = ("digits", "text")
WORKERS, BATCH, SIZE, CONTEXT = 4, 8, "tiny", 32
"""Batch: samples of one worker."""
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
        """What the bound is options."""
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
class Training:
    """One run."""

    task: TaskName
    inner: str
    lr: float
    method: Method
    seed: int
    steps: int
    lab: None = None

    @property
    def key(self) -> tuple[str, ...]:
        """In the table of runs."""
        return (self.task, self.inner, f"{self.lr:g}", self.method.name, str(self.seed))


def trainings(*, quick: bool) -> list[Training]:
    """All that is trained: seed by seed, so that an interrupted study is complete but for seeds."""
    tasks = TASKS[:1] if quick else TASKS
    inners = ("sgd",) if quick else ("sgd", "adamw")
    methods = METHODS[:1] + METHODS[-2:-1] if quick else METHODS
    seeds, steps = (1, 12) if quick else (2, 96)
    return [
        Training(task, inner, lr, method, seed, steps)
        for seed, task, inner in product(range(seeds), tasks, inners)
        for lr in RATES[task, inner]
        for method in methods
    ]


@cache
def task_of(name: TaskName) -> Task:
    """A task; a transformer of text has short contexts."""
    shape = replace(GPTS[SIZE], context=CONTEXT) if name == "text" else GPTS[SIZE]
    return make_task(name, SIZE, shape, torch.device("cpu"))


class Probe:
    """Measures |grad f|^2 at the mean of the workers, on a copy of the model."""

    def __init__(self, task: Task, world: World) -> None:
        """Each rank takes a share of the samples."""
        self._model, size = task.model(), world.layout.world_size
        count = min(task.choices, SAMPLES) if task.name.startswith("text") else task.choices
        order = np.random.default_rng(0).permutation(task.choices)[: count // size * size]
        self._batch, self._size = task.draw(order[world.rank :: size]), size

    def __call__(self, model: nn.Module) -> tuple[float, float]:
        """|grad f|^2, and f. All ranks call it."""
        mean = parameters_to_vector(model.parameters()).detach().clone()
        dist.all_reduce(mean)
        vector_to_parameters(mean.div_(self._size), self._model.parameters())
        loss = loss_of(self._model, self._batch)
        parts = torch.autograd.grad(loss, list(self._model.parameters()))
        total = torch.cat([loss.detach().reshape(1), *(part.reshape(-1) for part in parts)])
        dist.all_reduce(total)
        total /= self._size
        return float(total[1:].double().square().sum()), float(total[0])


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
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def trained(run: Training, _: Rows, world: World) -> dict[str, Any]:
    """Train once; the numbers of the row. All ranks call it."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    task, method = task_of(run.task), run.method
    model, probe = task.model(), Probe(task, world)
    kind = torch.optim.SGD if run.inner == "sgd" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=run.lr, weight_decay=0.0)

    def slope(step: int) -> Tensor:
        optimizer.zero_grad()
        batch = task.batch(run.seed, step, BATCH * WORKERS, world.rank, WORKERS)
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        return gradient_of(model)

    unit = torch.tensor(run.lr)
    if run.inner == "sgd":
        unit = run.lr * slope(0).square().mean().sqrt() / WORKERS
        dist.all_reduce(unit)
    options = {"outer_lr": 1.0, "gap": "constant", "tau": method.tau, **method.options}
    if method.clip is not None:
        options["clip"] = CLIPS[run.inner][method.clip] * method.tau * float(unit)
    lengths = Lengths(model, optimizer)
    co2, seen = CO2.published(model, optimizer, **options), [probe(model)]
    for step in range(1, run.steps + 1):
        slope(step)
        optimizer.step()
        if step % EVERY == 0 and step < run.steps:
            seen.append(probe(model))
    loss = probe(model)[1]
    stats = co2.stats()
    co2.close()
    return {
        "steps": run.steps,
        "rounds": stats.rounds,
        "gradient": float(np.mean([squared for squared, _ in seen])),
        "loss": loss,
        "gamma": lengths.gamma(),
        "clipped": stats.clipped,
        "clip_residual": stats.clip_residual,
        "rounding_residual": stats.rounding_residual,
    }


def estimate(options: Namespace) -> None:
    """Measure the constants of the bound in a run of the base setting at each rate, once."""
    path = options.out / CONSTANTS
    constants = json.loads(path.read_text()) if path.exists() else {}
    for run in trainings(quick=options.quick):
        name = f"{run.task} {run.inner} {run.lr:g}"
        if name in constants:
            continue
        words = (
            *("--task", run.task, "--size", SIZE, "--optimizer", run.inner, "--lr", f"{run.lr:g}"),
            *("--strategy", "co2.published:tau=4", "--outer", "gap=constant,lr=1"),
            *("--steps", str(run.steps), "--batch", str(BATCH * WORKERS), "--eval-every", "0"),
            *("--warmup", "0", "--final-lr", "1", "--weight-decay", "0", "--clip-grad", "0"),
            *("--momentum", "0" if run.inner == "sgd" else "0.9"),
            *(("--context", str(CONTEXT)) if run.task == "text" else ()),
        )
        measured = estimated(words, WORKERS)
        constants[name] = {
            "smoothness": measured["smoothness"],
            "noise": measured["noise"]["value"],
            "gap": max(measured["gap"]["value"], 0.0),
        }
        path.write_text(json.dumps(constants, indent=2) + "\n")


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
    return max(each["gap"] for name, each in constants.items() if name.startswith(task))


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
        measured = constants[f"{task} {inner} {lr}"] | {"gap": gap_of(constants, task)}
        gamma = float(based[task, inner, lr])
        setting = method.setting(measured, rounds, gamma)
        lost = [residual(row, method.tau, gamma) ** 2 for row in records(runs)]
        eps = math.sqrt(float(np.mean(lost)))
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


def rank(first: pd.Series, second: pd.Series) -> str:
    """Spearman's correlation, and of how many settings; none of fewer than 4."""
    count = len(first)
    if count < 4:  # noqa: PLR2004
        return f"- ({count})"
    return f"{float(spearmanr(first, second).statistic):+.2f} ({count})"


def pairs(panel: pd.DataFrame, family: str) -> str:
    """Pairs of a family and the base that differ in every seed alike; how many are ranked rightly.

    At one learning rate, by the terms. Runs of one seed have the same first model and samples.
    """
    right = clear = 0
    for _, group in panel.groupby("rate", sort=False):
        chosen = records(group[(group["family"] == family) | (group["method"] == BASE)])
        for first, second in combinations(chosen, 2):
            ratios = np.log(first["seeds"] / second["seeds"])
            if abs(np.sign(ratios).sum()) == len(ratios) and abs(ratios.mean()) > CLEAR:
                clear += 1
                right += ratios[0] * (first["terms"] - second["terms"]) > 0
    return f"{right} of {clear}"


def correlations(frame: pd.DataFrame) -> str:
    """How rightly each panel is ranked, as a table in Markdown."""
    rows = []
    for panel, part in frame.groupby("panel", sort=False):
        holds = part[np.isfinite(part["bound"])]
        broken = int((holds["gradient"] > holds["bound"]).sum())
        by_rate = list(part.groupby("rate", sort=False))
        rows.append(
            {
                "task, inner": str(panel),
                "bound": rank(holds["bound"], holds["gradient"]),
                "broken": f"{broken} of {len(holds)}",
                "terms, all": rank(part["terms"], part["gradient"]),
                **{
                    f"{what}, {rate} rate": rank(some["terms"], some[column])
                    for what, column in (("terms", "gradient"), ("loss", "loss"))
                    for rate, some in by_rate
                },
                **{family: pairs(part, family) for family in FAMILIES},
            }
        )
    return table(rows)


def settings(frame: pd.DataFrame) -> str:
    """What was measured / what the bound says, or in brackets its terms where it has none."""
    rows = []
    for (rate, method), part in frame.groupby(["rate", "method"], sort=False):
        cells = {"rate": str(rate), "setting": str(method)}
        for row in records(part):
            says = f"{row['bound']:.3g}" if math.isfinite(row["bound"]) else f"({row['terms']:.3g})"
            cells[row["panel"]] = f"{row['gradient']:.3g} / {says}, eps {row['eps']:.2g}"
        rows.append(cells)
    return table(rows)


def draw(figure: Figure, frame: pd.DataFrame) -> None:
    """Ranks of what was measured above ranks by the terms; filled: a bound holds."""
    panels = dict(list(frame.groupby(["rate", "panel"], sort=False)))
    rates, names = frame["rate"].unique(), frame["panel"].unique()
    axes = figure.subplots(len(rates), len(names), squeeze=False, sharex=True, sharey=True)
    for axis, (rate, name) in zip(axes.flat, product(rates, names), strict=True):
        part = panels[rate, name]
        _ranks(axis, part)
        correlation = rank(part["terms"], part["gradient"])
        axis.set_title(f"{name}, {rate} rate:\n{correlation}", fontsize=9)
    figure.supxlabel("rank by the bound's terms (filled: its condition holds)")
    figure.supylabel("rank by the measured mean of |grad f|^2")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=6, frameon=False)


def _ranks(axis: Axes, panel: pd.DataFrame) -> None:
    """One panel; the diagonal is a right ranking."""
    says, measured = panel["terms"].rank(), panel["gradient"].rank()
    axis.plot([1, len(panel)], [1, len(panel)], color="#888888", linewidth=1)
    axis.set_xticks(range(1, len(panel) + 1, 3))
    axis.set_yticks(range(1, len(panel) + 1, 3))
    for index, family in enumerate(("", *FAMILIES)):
        chosen, colour = panel["family"] == family, COLOURS[index]
        holds = np.isfinite(panel.loc[chosen, "bound"])
        axis.scatter(
            says[chosen],
            measured[chosen],
            s=40,
            marker=MARKERS[index],
            facecolors=[colour if inside else "none" for inside in holds],
            edgecolors=colour,
            label=family or "base",
        )


def report(
    frame: pd.DataFrame, constants: Mapping[str, dict[str, float]], steps: int, seeds: int
) -> str:
    """The page."""
    measured = table(
        [
            {"task, inner, lr": name, **{key: f"{value:.3g}" for key, value in each.items()}}
            for name, each in constants.items()
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

{measured}

{machine()}

{made_by()}
"""


def studies(options: Namespace) -> list[Study]:
    """The study."""
    runs = trainings(quick=options.quick)
    return [Study(options.out / RUNS, KEYS, NUMBERS, lambda _: runs, trained, WORKERS)]


def write(options: Namespace) -> None:
    """Write bound_ranking.md and .png of what is there."""
    runs, rows = trainings(quick=options.quick), studies(options)[0].rows()
    done = [row for run in runs if (row := rows.get(run.key)) and not row.get("error")]
    if done:
        constants = json.loads(needed(options.out / CONSTANTS))
        frame = evaluated(pd.DataFrame(done), constants)
        size = (2.7 * frame["panel"].nunique() + 0.5, 3.0 * frame["rate"].nunique() + 0.6)
        text = report(frame, constants, runs[0].steps, len({run.seed for run in runs}))
        publish(options, "bound_ranking", text, png(size, lambda figure: draw(figure, frame)))


def main() -> int:
    """Run, and write what is complete."""
    return command(__doc__, "two settings of one task", studies, write, estimate)


if __name__ == "__main__":
    sys.exit(main())
