"""One runner for studies of training: a grid of runs, a row for each, then a table and a figure.

A study says which runs it wants, as far as the finished rows tell. Each is trained by ranks on this
machine or in a lab, and becomes a row of a CSV file: what is there is not run again. Ranks are the
study's own script, started again by the launcher. A run that fails is a row, too, with its error,
and is not repeated; control-C ends a study, which continues with the same command.
"""

import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

import pandas as pd
import torch.distributed as dist
from reports import folder, parser

from co2sim.common.delayed_averaging import kept
from co2sim.common.units import Seconds
from co2sim.strategies import parse
from co2sim.strategies.co2 import CO2
from co2sim.strategies.local import LocalSteps
from realrun.execute.world import World, join
from realrun.lab.lab import Lab, run_lab
from realrun.launch.launcher import run_local
from realrun.train import TrainSettings
from realrun.train.algorithm_registry import pairs
from realrun.train.folder import ESTIMATE
from realrun.train.loop import train
from realrun.train.settings import TaskName

Rows = dict[tuple[str, ...], dict[str, Any]]
"""Finished runs by their keys."""

DEADLINE: Seconds = 3600.0
"""How long ranks wait for each other: the processes of a long study may be stopped for a while."""


class Run(Protocol):
    """One run of a study. `lab` is where; None: on this machine as it is."""

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from other runs: texts."""

    @property
    def steps(self) -> int:
        """Of its training."""

    @property
    def lab(self) -> Lab | None:
        """Where it runs."""


@dataclass(frozen=True)
class Study:
    """What is run, how, and where its rows are kept.

    `wanted` gives the runs in their order; those that depend on others come once these are rows.
    `train` is called by all ranks, and gives the numbers and texts of the row. Ranks that work
    `apart` train a run each.
    """

    path: Path
    keys: tuple[str, ...]
    numbers: tuple[str, ...]
    wanted: Callable[[Rows], Iterable[Any]]
    train: Callable[[Any, Rows, World], Mapping[str, Any]]
    workers: int
    texts: tuple[str, ...] = ()
    apart: bool = False

    def rows(self) -> Rows:
        """The finished runs; none where there is no file."""
        return read(self.path, self.keys, self.numbers)

    def missing(self, rows: Rows) -> list[Run]:
        """The runs that are wanted and not there; further ones may depend on them."""
        return [run for run in self.wanted(rows) if run.key not in rows]

    def complete(self) -> int:
        """Run what is missing; the exit code. Control-C, or a start without a new row, ends it."""
        while missing := self.missing(rows := self.rows()):
            words = [sys.executable, *sys.argv, "--out", str(self.path.parent)]
            lab = missing[0].lab
            code = run_lab(words, lab) if lab else run_local(words, self.workers)
            if code > 1 or (code and len(self.rows()) == len(rows)):
                return code
        return 0

    def run_rank(self) -> None:
        """Be one of the ranks: run what is missing at the place of the first such run."""
        world = join("gloo", DEADLINE)
        shared: list[Any] = [self.rows()]
        dist.broadcast_object_list(shared)
        rows: Rows = shared[0]
        missing = self.missing(rows)
        here, began, count = missing[0].lab, time.monotonic(), 0
        while missing and missing[0].lab == here:
            runs = missing[: world.layout.world_size if self.apart else 1]
            row = self._row(runs[world.rank % len(runs)], rows, world)
            every: list[Any] = [None] * world.layout.world_size
            dist.all_gather_object(every, row)
            for run, done in zip(runs, every, strict=False):
                rows[run.key] = done
                if world.rank == 0:
                    self._append(done)
            missing = self.missing(rows)
            count += sum(run.steps for run in runs)
            if world.rank == 0:
                left = sum(run.steps for run in missing)
                minutes = left * (time.monotonic() - began) / count / 60
                what = ", ".join(filter(None, runs[-1].key))
                print(f"{what}; about {left} steps left, {minutes:.0f} min", flush=True)
        world.leave()

    def _row(self, run: Run, rows: Rows, world: World) -> dict[str, Any]:
        """Train; a failure becomes a row, and ends the ranks, which may not agree where they are.

        They are started again, then.
        """
        try:
            return {**self._key(run), **self.train(run, rows, world), "error": ""}
        except Exception as error:  # noqa: BLE001 - whatever it is, the row says so
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
            if self.apart or world.rank == 0:
                self._append({**self._key(run), "error": words})
            print(f"rank {world.rank}: {words}", file=sys.stderr, flush=True)
            os._exit(1)

    def _key(self, run: Run) -> dict[str, str]:
        return dict(zip(self.keys, run.key, strict=True))

    def _append(self, row: Mapping[str, Any]) -> None:
        columns = [*self.keys, *self.numbers, *self.texts, "error"]
        if self.path.exists():
            columns = list(pd.read_csv(self.path, nrows=0))
        frame = pd.DataFrame([[row.get(name, "") for name in columns]], columns=columns)
        frame.to_csv(self.path, mode="a", header=not self.path.exists(), index=False)


def read(path: Path, keys: Sequence[str], numbers: Sequence[str]) -> Rows:
    """The rows of a file; none where there is no file."""
    if not path.exists():
        return {}
    frame = pd.read_csv(path, dtype=dict.fromkeys(keys, str), keep_default_na=False)
    for name in numbers:
        frame[name] = pd.to_numeric(frame[name], errors="coerce")
    return {tuple(row[name] for name in keys): dict(row) for row in frame.to_dict("records")}


def command(
    doc: str | None,
    quick: str,
    studies: Callable[[Namespace], Sequence[Study]],
    write: Callable[[Namespace], None],
    prepare: Callable[[Namespace], None] = lambda _: None,
) -> int:
    """The command line of a study: run what is missing, or be a rank of it, then write the results.

    All get the options: `quick`, and `out`, the folder. `prepare` comes first. Gives the exit code;
    a study that was interrupted writes what is complete.
    """
    line = parser(doc, quick)
    line.add_argument("--report", action="store_true", help="run nothing, only write the results")
    options = line.parse_args()
    with folder(options) as options.out:
        if "RANK" in os.environ:
            next(s for s in studies(options) if s.missing(s.rows())).run_rank()
            return 0
        code = 0
        if not options.report:
            prepare(options)
            for study in studies(options):
                code = code or study.complete()
        write(options)
    return code


def estimated(words: Sequence[str], workers: int) -> dict[str, Any]:
    """The constants of the bound that `realrun train --estimate` measures with these options."""
    with tempfile.TemporaryDirectory() as name:
        ranks = ["realrun", "train", *words, "--estimate", "--out", name]
        if code := run_local(ranks, workers):
            sys.exit(code)
        constants: dict[str, Any] = json.loads((Path(name) / ESTIMATE).read_text())
    return constants


# --- trainings with tuned options -----------------------------------------------------------------

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
    *(f"{share},momentum=0.2,lr=0.9" for share in ("keep=1", "keep=0.25,predict=1")),
)
"""What CO2 keeps and predicts, to choose from, and outer steps other than x <- mean.

The rate is tuned with what CO2 takes by itself in rounds of that length.
"""
PREVIEWED = ("keep=1,momentum=0.9,lr=0.1", "keep=1,momentum=0.8,lr=0.2")
"""Outer steps of CO2 with a preview: they take the place of AdamW's momentum."""


def split(choice: str) -> tuple[str, str]:
    """The options of a choice that are part of a strategy, and those of the outer step."""
    options = list(filter(None, choice.split(",")))
    inner = [option for option in options if option.partition("=")[0] in {"keep", "predict"}]
    return ",".join(inner), ",".join(option for option in options if option not in inner)


@dataclass(frozen=True, slots=True)
class Budget:
    """What all configurations have in common: the model, and how much it sees.

    `choices` is how many outer steps are tried at most.
    """

    size: str = "mini"
    steps: int = 768
    batch: int = 32
    warmup: int = 48
    eval_every: int = 96
    workers: int = 4
    quick: bool = False
    task: TaskName = "text"
    choices: int = 100

    @classmethod
    def small(cls, task: TaskName = "text", batch: int = 32) -> "Budget":
        """A trial of seconds, too short to mean anything."""
        return cls("tiny", 24, batch, 4, 12, workers=2, quick=True, task=task)

    @property
    def label(self) -> str:
        """Runs of other budgets do not count."""
        task = "" if self.task == "text" else f"{self.task}-"
        return f"{task}{self.size}-{self.steps}x{self.batch}"


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
            return OUTER.get(self.strategy.partition(":")[0], ("",))
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
        inner, _ = split(choice)
        return f"{self.strategy},{inner}" if inner else self.strategy

    def outer(self, choice: str, lr: float) -> str:
        """The options of the outer step in full."""
        _, chosen = split(choice)
        options = [chosen] if chosen else []
        options += [f"{name}={value}" for name, value in self.extra.items()]
        if self.clips:
            options.append(f"clip={CLIP * lr * self.tau:.4g}")
        return ",".join(options)


@dataclass(frozen=True, slots=True)
class Training:
    """A run of a configuration."""

    budget: Budget
    configuration: Configuration
    choice: str
    lr: float
    seed: int
    lab: Lab | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from other runs."""
        name = self.configuration.name
        return (self.budget.label, name, self.choice, f"{self.lr:g}", str(self.seed))

    @property
    def steps(self) -> int:
        """Of the training."""
        return self.budget.steps

    def loss(self, rows: Rows) -> float:
        """The last validation loss; infinite where it is not there, or the run has failed."""
        row = rows.get(self.key, {"error": "missing"})
        return inf if row["error"] else float(row["validation_loss"])


def tuned(configuration: Configuration, budget: Budget, rows: Rows) -> Iterator[Training]:
    """The runs of a configuration; those that depend on others come when these are there.

    The learning rate is tuned with the usual outer step, on a grid of factors of 2 that is extended
    while the best is at its edge, then the outer step at that rate. The best is run with SEEDS.
    """
    choices = configuration.choices[: 2 if budget.quick else budget.choices]
    rates = list(RATES[1:2] if budget.quick else RATES)
    usual = Training(budget, configuration, choices[0], 0.0, TUNING_SEED)

    def loss(choice: str, lr: float) -> float:
        return replace(usual, choice=choice, lr=lr).loss(rows)

    for lr in rates:
        yield replace(usual, lr=lr)
    for _ in range(0 if budget.quick else EXTENSIONS):
        best = min(rates, key=lambda lr: loss(choices[0], lr))
        lacking = any(replace(usual, lr=lr).key not in rows for lr in rates)
        if lacking or best not in {rates[0], rates[-1]}:
            break
        further = 2 * best if best == rates[-1] else best / 2
        rates = sorted([*rates, further])
        yield replace(usual, lr=further)
    lr = min(rates, key=lambda rate: loss(choices[0], rate))
    for choice in choices[1:]:
        yield replace(usual, choice=choice, lr=lr)
    choice = min(choices, key=lambda each: loss(each, lr))
    for seed in SEEDS[:2] if budget.quick else SEEDS:
        yield replace(usual, choice=choice, lr=lr, seed=seed)


KEYS = ("budget", "configuration", "choice", "lr", "seed")
NUMBERS = ("validation_loss", "accuracy", "penalty", "clipped", "bytes_sent", "wall")


def trainings(path: Path, wanted: Callable[[Rows], Iterable[Training]], workers: int = 4) -> Study:
    """A study of `Training`s."""
    texts = ("strategy", "outer", "curve", "facts")
    return Study(path, KEYS, NUMBERS, wanted, trained, workers, texts)


def finished(path: Path) -> Rows:
    """The rows of `Training`s in a file."""
    return read(path, KEYS, NUMBERS)


def trained(run: Training, _: Rows, world: World) -> dict[str, Any]:
    """Train once; what the row says."""
    budget, configuration = run.budget, run.configuration
    outer = configuration.outer(run.choice, run.lr)
    settings = TrainSettings(
        task=budget.task,
        strategy=configuration.trained(run.choice),
        size=budget.size,
        steps=budget.steps,
        batch=budget.batch,
        warmup=budget.warmup,
        lr=run.lr,
        momentum=configuration.momentum,
        outer=pairs("outer", outer),
        seed=run.seed,
        log_every=max(configuration.tau, 12),
        eval_every=budget.eval_every,
    )
    began = time.monotonic()
    history = train(settings, world)
    seen = [row for row in history.rows if row.validation_loss is not None]
    penalties = [row.penalty for row in history.rows if row.penalty is not None]
    facts = {name: history.facts[name] for name in ("parameters", "python", "sha256")}
    return {
        "strategy": settings.strategy,
        "outer": outer,
        "validation_loss": seen[-1].validation_loss,
        "accuracy": seen[-1].accuracy,
        "penalty": mean(penalties) if penalties else nan,
        "clipped": history.rows[-1].clipped if penalties else nan,
        "bytes_sent": history.rows[-1].bytes_sent,
        "wall": time.monotonic() - began,
        "curve": json.dumps([[row.tokens, row.validation_loss] for row in seen]),
        "facts": json.dumps(facts),
    }
