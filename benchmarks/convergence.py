"""How well every strategy learns from the same tokens: four workers, real text, tuned rates.

    python benchmarks/convergence.py            # about an hour on two cores; go on with the same
    python benchmarks/convergence.py --quick    # three configurations, too short to mean anything

Every configuration is tuned with a seed of its own on the final validation loss: the learning rate
on a grid of factors of 2, extended while the best is at its edge, then the outer step on a small
grid at that rate. The best is run with three other seeds. All runs share one launch of the ranks.

Each finished run is a row of convergence-runs.csv; what is there is not run again. Writes
convergence.csv, convergence.md and convergence.png.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl
import pandas as pd
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from reports import Known, append, folder, machine, made_by, parser, read, table

from co2sim.common.delayed_averaging import kept
from co2sim.common.errors import Co2simError
from co2sim.common.plots import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from co2sim.common.units import Seconds
from co2sim.strategies import parse
from co2sim.strategies.co2 import CO2
from co2sim.strategies.local import LocalSteps
from realrun.execute.world import World, join
from realrun.launch.launcher import run_local
from realrun.train import TrainSettings
from realrun.train.algorithm_registry import pairs
from realrun.train.log import MARKERS
from realrun.train.loop import train
from realrun.train.settings import TaskName

RUNS = "convergence-runs.csv"
"""The file of finished runs."""

TUNING_SEED = 100
SEEDS = (0, 1, 2)
RATES = (2.5e-3, 5e-3, 1e-2)
"""Where tuning begins."""

EXTENSIONS = 2
"""How many factors of 2 the grid may grow beyond either end."""

CLIP = 0.25
"""Momenta are clipped to this many lr x tau: what a worker moves an element at most is about 1."""

OUTER = {
    "co2.published": (
        *("momentum=0.5,lr=0.5", "momentum=0.2,lr=0.8", "momentum=0,lr=1"),
        *("momentum=0.5,lr=1", "momentum=0,lr=0.5"),
    ),
    "slowmo": (
        *("momentum=0.2,lr=0.9", "momentum=0.5,lr=1"),
        *("momentum=0.2,lr=1", "momentum=0.7,lr=1"),
    ),
    "diloco": ("momentum=0.9,lr=0.7", "momentum=0.5,lr=1", "momentum=0.9,lr=0.3"),
    "overlap_local_sgd": ("pull=0.6,momentum=0.7", "pull=0.6,momentum=0", "pull=0.3,momentum=0.7"),
}
"""Outer steps to choose from; the first while the learning rate is tuned.

The gain of the published CO2, lr / (1 - momentum), is 1, 2 or 1/2: a delayed step may need to be a
smaller one.
"""

KEPT = (
    *("keep=1", "keep=0.5,predict=0.5", "keep=0.75,predict=0.25", "keep=0.25,predict=0.75"),
    "keep=0.25,predict=1",
    *(f"{kept},momentum=0.2,lr=0.9" for kept in ("keep=1", "keep=0.25,predict=1")),
)
"""What CO2 keeps and predicts, to choose from, and outer steps other than x <- mean.

The rate is tuned with what CO2 takes by itself in rounds of that length.
"""

PREVIEWED = ("keep=1,momentum=0.9,lr=0.1", "keep=1,momentum=0.8,lr=0.2")
"""Outer steps of CO2 with a preview: they take the place of AdamW's momentum."""


def split(choice: str) -> tuple[str, str]:
    """The options of a choice that are part of a strategy, and those of the outer step."""
    options = [one for one in choice.split(",") if one]
    kept = [one for one in options if one.partition("=")[0] in {"keep", "predict"}]
    return ",".join(kept), ",".join(one for one in options if one not in kept)


@dataclass(frozen=True, slots=True)
class StudyBudget:
    """What all configurations have in common: the model, and how much it sees."""

    size: str = "mini"
    steps: int = 768
    batch: int = 32
    warmup: int = 48
    eval_every: int = 96
    workers: int = 4
    quick: bool = False
    task: TaskName = "text"
    choices: int = 100
    """Outer steps that are tried at most."""

    @classmethod
    def small(cls) -> "StudyBudget":
        """A trial of seconds, too short to mean anything."""
        return cls("tiny", 24, 32, 4, 12, workers=2, quick=True)

    @property
    def label(self) -> str:
        """Runs of other budgets do not count."""
        named = "" if self.task == "text" else f"{self.task}-"
        return f"{named}{self.size}-{self.steps}x{self.batch}"


@dataclass(frozen=True, slots=True)
class Configuration:
    """A line of the table. `extra` are options of the outer step that are not tuned.

    `momentum` is AdamW's, its first beta.
    """

    name: str
    strategy: str
    extra: Mapping[str, str] = field(default_factory=dict)
    clips: bool = False
    momentum: float = 0.9

    @property
    def kind(self) -> str:
        """Name of the strategy."""
        return self.strategy.partition(":")[0]

    @property
    def tau(self) -> int:
        """Steps of a round."""
        strategy = parse(self.strategy)
        return int(strategy.tau) if isinstance(strategy, LocalSteps) else 1

    @property
    def choices(self) -> tuple[str, ...]:
        """Outer steps to choose from; where workers keep progress, how much, too.

        The usual is first.
        """
        if not self.keeps:
            return OUTER.get(self.kind, ("",))
        if "preview" in self.strategy:
            return PREVIEWED
        share, rest = kept(self.tau, None, None)
        usual = f"keep={share:g}" + (f",predict={rest:g}" if rest else "")
        return tuple(sorted(KEPT, key=lambda choice: choice != usual))

    @property
    def keeps(self) -> bool:
        """Whether a choice is part of the strategy: CO2, but for the published one."""
        return isinstance(parse(self.strategy), CO2)

    def trained(self, choice: str) -> str:
        """The strategy with what of a choice is part of it."""
        kept, _ = split(choice)
        return f"{self.strategy},{kept}" if kept else self.strategy

    def outer(self, choice: str, lr: float) -> str:
        """The options of the outer step in full."""
        _, chosen = split(choice)
        options = [chosen] if chosen else []
        options += [f"{name}={value}" for name, value in self.extra.items()]
        if self.clips:
            options.append(f"clip={CLIP * lr * self.tau:.4g}")
        return ",".join(options)


def configurations(budget: StudyBudget) -> list[Configuration]:
    """All lines of the table."""
    found = [Configuration("AdamW-DDP", "ddp")]
    for tau in (3, 12, 48):
        for words, gap, clips in (
            ("plain", "constant", False),
            ("gap", "gap_aware", False),
            ("clip", "constant", True),
            ("gap + clip", "gap_aware", True),
        ):
            name = f"CO2 {tau}, {words}"
            found.append(Configuration(name, f"co2.published:tau={tau}", {"gap": gap}, clips))
    alone = "co2:tau=1,delay=1,preview=true"
    found.append(Configuration("CO2 delay 1, tau 1, preview", alone, momentum=0.0))
    short = ((12, 1, 12), (3, 1, 3), (2, 1, 2), (1, 1, 1))
    for tau, delay, parts in (*short, (12, 4, 1), (12, 4, 3), (12, 4, 12)):
        name = f"CO2 delay {delay}, tau {tau}" + (f", {parts} fragments" if parts > 1 else "")
        strategy = f"co2:tau={tau},delay={delay},fragments={parts}"
        found.append(Configuration(name, strategy))
    streamed = "diloco:tau=12,fragments=3,delay=4"
    found.append(Configuration("Streaming DiLoCo delay 4, tau 12", streamed))
    for name, kind in (
        ("SlowMo 12", "slowmo"),
        ("DiLoCo 12", "diloco"),
        ("LocalSGD 12", "local_sgd"),
        ("OverlapLocalSGD 12", "overlap_local_sgd"),
    ):
        found.append(Configuration(name, f"{kind}:tau=12"))
    if budget.quick:
        names = {"CO2 12, gap + clip", "CO2 delay 4, tau 12", "DiLoCo 12"}
        return [one for one in found if one.name in names]
    return found


@dataclass(frozen=True, slots=True)
class Ask:
    """One run."""

    budget: StudyBudget
    configuration: Configuration
    choice: str
    lr: float
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from other runs."""
        name = self.configuration.name
        return (self.budget.label, name, self.choice, f"{self.lr:g}", str(self.seed))


Plan = Callable[[Known], Iterable[Ask]]
"""The runs that are wanted, in their order, as far as the finished ones tell."""


def study(budget: StudyBudget, known: Known) -> Iterator[Ask]:
    """The runs of all configurations."""
    for configuration in configurations(budget):
        yield from wanted(configuration, budget, known)


def missing(plan: Plan, known: Known) -> list[Ask]:
    """The runs that are wanted and not there; further ones may depend on them."""
    return [ask for ask in plan(known) if ask.key not in known]


def wanted(configuration: Configuration, budget: StudyBudget, known: Known) -> Iterator[Ask]:
    """The runs of a configuration; those that depend on others come when these are known."""
    choices = configuration.choices[: 2 if budget.quick else budget.choices]
    rates = list(RATES[1:2] if budget.quick else RATES)

    def tuned(choice: str, lr: float) -> Ask:
        return Ask(budget, configuration, choice, lr, TUNING_SEED)

    def loss(choice: str, lr: float) -> float:
        row = known.get(tuned(choice, lr).key)
        return row["validation_loss"] if row else float("inf")

    for lr in rates:
        yield tuned(choices[0], lr)
    for _ in range(0 if budget.quick else EXTENSIONS):
        best = min(rates, key=lambda lr: loss(choices[0], lr))
        lacking = any(tuned(choices[0], lr).key not in known for lr in rates)
        if lacking or best not in {rates[0], rates[-1]}:
            break
        further = 2 * best if best == rates[-1] else best / 2
        rates = sorted([*rates, further])
        yield tuned(choices[0], further)
    lr = min(rates, key=lambda rate: loss(choices[0], rate))
    for choice in choices[1:]:
        yield tuned(choice, lr)
    choice = min(choices, key=lambda one: loss(one, lr))
    for seed in SEEDS[:2] if budget.quick else SEEDS:
        yield Ask(budget, configuration, choice, lr, seed)


CURVES = ("AdamW-DDP", "LocalSGD 12", "SlowMo 12", "DiLoCo 12",
          "CO2 delay 1, tau 12, 12 fragments", "CO2 delay 4, tau 12")  # fmt: skip
"""Drawn over tokens, together with the best CO2 as published at tau 3 and at tau 12."""


def write(budget: StudyBudget, known: Known, out: Path) -> None:
    """Write convergence.csv, .md and .png of what is complete."""
    frame = summary(budget, known)
    if frame.empty:
        return
    frame.drop(columns="curve").to_csv(out / "convergence.csv", index=False)
    text = report(frame, budget, known)
    (out / "convergence.md").write_text(text)
    (out / "convergence.png").write_bytes(draw(frame))
    print(text)


def summary(budget: StudyBudget, known: Known) -> pd.DataFrame:
    """A line for each configuration whose runs are all there."""
    lines = []
    for configuration in configurations(budget):
        asks = list(wanted(configuration, budget, known))
        if any(ask.key not in known for ask in asks):
            continue
        rows = [known[ask.key] for ask in asks if ask.seed != TUNING_SEED]
        losses = [float(row["validation_loss"]) for row in rows]
        lines.append(
            {
                "configuration": configuration.name,
                "loss": mean(losses),
                "spread": stdev(losses),
                "lowest": min(losses),
                "highest": max(losses),
                "accuracy": mean(float(row["accuracy"]) for row in rows),
                "seeds": len(rows),
                "lr": float(rows[0]["lr"]),
                "outer": rows[0]["choice"] if configuration.keeps else rows[0]["outer"],
                "penalty": mean(float(row["penalty"]) for row in rows),
                "clipped": mean(float(row["clipped"]) for row in rows),
                "tuning_runs": len(asks) - len(rows),
                "curve": [json.loads(row["curve"]) for row in rows],
            }
        )
    return pd.DataFrame(lines)


def report(frame: pd.DataFrame, budget: StudyBudget, known: Known) -> str:
    """The table in Markdown."""
    facts = json.loads(next(row["facts"] for row in known.values() if row["facts"]))
    base = frame.set_index("configuration")["loss"].get("AdamW-DDP", float("nan"))
    tokens = budget.steps * budget.batch * 64
    rows = [
        {
            "configuration": line["configuration"],
            "loss": f"{line['loss']:.4f} ± {line['spread']:.4f}",
            "above DDP": f"{line['loss'] - base:+.4f}",
            "accuracy": f"{line['accuracy']:.1%}",
            "lr": f"{line['lr']:g}",
            "outer step": line["outer"] or "-",
            "Λ": "-" if line["configuration"] == "AdamW-DDP" else f"{line['penalty']:.2f}",
            "clipped": "-" if line["configuration"] == "AdamW-DDP" else f"{line['clipped']:.1%}",
        }
        for _, line in frame.iterrows()
    ]
    return f"""\
# Convergence on real text

A GPT of {facts["parameters"]:,} parameters on the characters of Python {facts["python"]}'s\
 standard library (data {facts["sha256"][:12]}), {budget.workers} workers, {budget.steps} steps of\
 {budget.batch} x 64 characters ({tokens:,} in all), AdamW, {budget.warmup} steps of warm-up,\
 cosine to a tenth. {machine()}

*Loss* is the validation loss of the mean of the workers after the last step, in nats per\
 character: mean and standard deviation of {int(frame["seeds"].max())} seeds. Learning rate and\
 outer step were tuned for each line with another seed; with a delay what is kept was tuned, too.\
 For CO2 as published the mean of the workers is the anchor, which has not seen the last round: its\
 average is still under way. *Λ* is the mean penalty, *clipped* the share of elements of the\
 momentum that were clipped, at {CLIP} x lr x tau.

{table(rows)}

{made_by()} Every run is in convergence-runs.csv.
"""


def draw(frame: pd.DataFrame) -> bytes:
    """Losses over tokens of some, and the last loss of all."""
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        figure = Figure(figsize=(12.0, 5.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _curves(left, frame)
        _last(right, frame)
        return render(figure, "png")


def _curves(axis: Axes, frame: pd.DataFrame) -> None:
    lines = frame.set_index("configuration")
    shown = [name for name in CURVES if name in lines.index]
    for tau in (3, 12):  # eight lines in all, as many as there are colours
        of_tau = [name for name in lines.index if name.startswith(f"CO2 {tau},")]
        if of_tau:
            shown.append(min(of_tau, key=lambda name: float(lines.loc[name, "loss"])))
    for place, name in enumerate(shown):
        curves = lines.loc[name, "curve"]
        tokens = [at for at, _ in curves[0]]
        losses = [[loss for _, loss in at] for at in zip(*curves, strict=True)]
        colour = COLOURS[place % len(COLOURS)]
        axis.plot(
            tokens,
            [mean(at) for at in losses],
            color=colour,
            marker=MARKERS[place % len(MARKERS)],
            markersize=4,
            label=name,
        )
        axis.fill_between(
            tokens, [min(at) for at in losses], [max(at) for at in losses], color=colour, alpha=0.2
        )
    lowest, highest = frame["lowest"].min(), frame["highest"].max()
    axis.set_ylim(lowest - 0.05, highest + 0.6)
    axis.set_xlabel("tokens of all workers")
    axis.set_ylabel("validation loss, nats per character")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_title(
        "Best CO2 as published at tau 3 and 12, and others: mean and range of the seeds", fontsize=9
    )
    axis.legend(frameon=False, fontsize=8)


def _last(axis: Axes, frame: pd.DataFrame) -> None:
    places = range(len(frame))[::-1]
    axis.hlines(places, frame["lowest"], frame["highest"], color=COLOURS[0], linewidth=3, alpha=0.4)
    axis.plot(frame["loss"], places, "o", color=COLOURS[0], markersize=5)
    axis.set_yticks(places, frame["configuration"])
    base = frame.loc[frame["configuration"] == "AdamW-DDP", "loss"]
    if len(base):
        axis.axvline(float(base.iloc[0]), color="grey", linestyle=":", linewidth=1)
    axis.set_xlabel("validation loss after the last step: mean and range of the seeds")


def complete(plan: Plan, path: Path, workers: int) -> int:
    """Run what is missing in the file, by this very script as ranks; the exit code.

    A run that fails is noted by the ranks, and not repeated; control-C, or no run at all, ends it.
    """
    ranks = [sys.executable, *sys.argv, "--out", str(path.parent)]
    code = 0
    while missing(plan, known := read(path)):
        code = run_local(ranks, workers)
        if code > 1 or (code and len(read(path)) == len(known)):
            break
    return code


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
        "strategy": settings.strategy,
        "outer": outer,
    }
    began = time.monotonic()
    try:
        history = train(settings, world)
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


def main() -> None:
    """Start the ranks, or be one of them; then write what is complete."""
    command = parser(__doc__, "three configurations of a tiny model, in seconds")
    command.add_argument("--report", action="store_true", help="run nothing, only write the table")
    given = command.parse_args()
    budget = StudyBudget.small() if given.quick else StudyBudget()
    plan = partial(study, budget)
    with folder(given) as out:
        path = out / RUNS
        if "RANK" in os.environ:
            run_ranks(plan, path)
            return
        code = 0 if given.report else complete(plan, path, budget.workers)

        write(budget, read(path), out)
    sys.exit(code)


if __name__ == "__main__":
    main()
