"""The settings of a training, checked; what cannot be trained is refused. Needs no torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from typing import Annotated, Any, Literal, get_args

from co2sim.common.convert import Reader, option
from co2sim.common.errors import OptionError
from co2sim.common.validation import between, whole
from co2sim.schedule.schedule import WORLD, DType, Layout
from co2sim.strategies import Strategy, parse
from co2sim.strategies.co2 import CO2
from co2sim.strategies.fsdp import FSDP
from co2sim.strategies.local import LocalSteps, Replica, round_steps
from co2sim.strategies.step import title
from co2sim.strategies.zero import Zero1, Zero2
from co2sim.strategies.zeropp import ZeroPP
from realrun.errors import SITES, one_of
from realrun.train import algorithm_registry
from realrun.train.algorithm_registry import LOCAL_UPDATES
from realrun.train.tasks.presets import GPTS, GPTShape

TaskName = Literal["text", "masked_text", "digits", "segmentation", "points"]
OptimizerName = Literal["adamw", "sgd"]
Evaluate = Literal["during", "after"]

UNITS = {
    "text": "token",
    "masked_text": "token",
    "digits": "image",
    "segmentation": "image",
    "points": "cloud",
}
"""What is counted, by task."""

OF_TEXT = frozenset({"text", "masked_text"})
"""Tasks whose samples are `context` characters."""

IN_EVERY_STEP = frozenset({"ddp", "zero1", "zero2", "zero3", "zeropp", "fsdp"})
"""Strategies that are trained without an outer step; the others are those of `LOCAL_UPDATES`."""
TRAINABLE = sorted(IN_EVERY_STEP | LOCAL_UPDATES.keys())
"""The others only have a schedule, such as a user's own."""

MOST = 10**9
"""Of steps, samples and seeds."""
_HOW = ("stop", "log_every", "eval_every", "checkpoint_every", "evaluate")
"""Fields that may differ between a run and its resumption: they do not change what is learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What to train, and how. Raises OptionError for values that are not allowed.

    The learning rate rises linearly for `warmup` steps to `lr` and falls along half a cosine to
    `final_lr` x `lr` at the last of `steps`. With `evaluate` "after" the validation loss is that of
    copies of the parameters.
    """

    task: TaskName = option(
        "text",
        "text: a GPT on the characters of Python's standard library. masked_text: what is hidden in"
        " them, with a transformer that looks both ways. digits: a convolutional network on"
        " scikit-learn's digits. segmentation: the class of every pixel where some of them are."
        " points: clouds of points on surfaces, reconstructed.",
        "train",
        "--task",
        "-t",
    )
    strategy: str = option(
        "ddp", "As in `co2sim run`: ddp, co2:tau=12, zeropp ...", "train", "--strategy", "-s"
    )
    size: str = option("small", "tiny, mini, small, medium or large.", "train")
    context: int = option(
        0, "Characters in a sample of text; default: 64 to 256, by size.", "train"
    )
    steps: int = option(600, "Optimizer steps.", "train")
    stop: int = option(
        0, "End after this step with a checkpoint, to continue with --resume.", "train"
    )
    batch: int = option(32, "Samples per step over all ranks, which share them equally.", "train")
    optimizer: OptimizerName = option("adamw", "adamw or sgd.", "train")
    lr: float = option(3e-3, "Highest learning rate.", "train")
    final_lr: float = option(
        0.1, "Fraction of the highest learning rate at the last step, after half a cosine.", "train"
    )
    warmup: int = option(
        20, "Steps until lr is reached; default: 20, or half of all where those are fewer.", "train"
    )
    momentum: float = option(0.9, "Of sgd; adamw's beta1.", "train")
    weight_decay: float = option(0.01, "Weight decay of matrices.", "train")
    clip_grad: float = option(
        1.0, "Clip the norm of a worker's gradient to this; 0: no clipping.", "train"
    )
    outer: Annotated[Mapping[str, str], Reader(algorithm_registry.pairs, "OPTIONS")] = option(
        {},
        "Options of the outer step, which do not affect the schedule. co2: momentum, lr, clip,"
        " residual_decay; co2.published: momentum, lr, gap (constant or gap_aware), penalty, clip;"
        " slowmo: momentum, lr; diloco: these and keep; overlap_local_sgd: pull, momentum.",
        "train",
    )
    seed: int = option(0, "Seed of weights and of samples.", "train")
    log_every: int = option(10, "Steps between rows of the log.", "train")
    eval_every: int = option(
        100,
        "Steps between validations, of the mean of all workers; local updates wait for the end of a"
        " round. 0: only at the end.",
        "train",
    )
    evaluate: Evaluate = option(
        "during",
        "during: at once, off the clock. after: once training is over, so that no average that is"
        " under way gets free time.",
        "train",
    )
    checkpoint_every: int = option(
        0, "Steps between checkpoints, of which two are kept; 0: only at the end.", "train"
    )

    def __post_init__(self) -> None:
        one_of("task", self.task, get_args(TaskName))
        one_of("optimizer", self.optimizer, get_args(OptimizerName))
        one_of("evaluate", self.evaluate, get_args(Evaluate))
        one_of("size", self.size, tuple(GPTS))
        if self.parsed.name not in TRAINABLE:
            raise OptionError(
                f"{self.parsed.name} has no training algorithm; those that have:"
                f" {', '.join(TRAINABLE)} (`realrun run` executes the schedule of any)"
            )
        algorithm_registry.arguments(self.parsed.name, self.outer)
        for field in fields(self):
            if field.type is int:
                least = int(field.name in {"steps", "batch", "log_every"})
                count = whole(field.name, getattr(self, field.name), least, MOST)
                object.__setattr__(self, field.name, count)
        for name, low, most in (
            ("lr", 1e-12, 1e3),
            ("final_lr", 0.0, 1.0),
            ("momentum", 0.0, 0.9999),
            ("weight_decay", 0.0, 1e3),
            ("clip_grad", 0.0, 1e9),
        ):
            between(name, getattr(self, name), low, most)
        for name in ("stop", "warmup"):
            if getattr(self, name) > self.steps:
                raise OptionError(f"{name} is {getattr(self, name)}; there are {self.steps} steps")
        if self.task not in OF_TEXT and self.context:
            raise OptionError(f"context does not apply to task {self.task}")

    @property
    def parsed(self) -> Strategy:
        """The strategy of co2sim. Raises OptionError when there is no such."""
        return parse(self.strategy)

    @property
    def name(self) -> str:
        """The strategy as co2sim writes it, with the options of its outer step behind it."""
        options = ", ".join(f"{name}={value}" for name, value in self.outer.items())
        return title(self.parsed) + (f" with {options}" if options else "")

    @property
    def local(self) -> bool:
        """Whether workers step by themselves between averages."""
        return isinstance(self.parsed, LocalSteps)

    @property
    def round(self) -> int:
        """Steps between averages: tau, or 1. Raises OptionError where tau is to be chosen."""
        strategy = self.parsed
        return round_steps(strategy) if isinstance(strategy, LocalSteps) else 1

    def chosen(self, tau: int | None) -> "TrainSettings":
        """The same with `tau` in place of "auto"; None: it ended before one was chosen."""
        strategy = self.parsed
        if not isinstance(strategy, CO2) or strategy.tau != "auto":
            return self
        steps = tau or strategy.late.shortest_round
        return replace(self, strategy=title(replace(strategy, tau=steps)))

    @property
    def last(self) -> int:
        """The step that this run ends with."""
        return self.stop or self.steps

    @property
    def shape(self) -> GPTShape:
        """The transformer of the tasks of text."""
        preset = GPTS[self.size]
        return replace(preset, context=self.context or preset.context)

    def learning_rate(self, step: int) -> float:
        """Of a step, counted from 1."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.final_lr + (1 - self.final_lr) * cosine)

    def evaluates(self, step: int, began: int | None) -> bool:
        """Whether the validation loss is taken after this step.

        It ends the round of the steps after `began`; None: it ends no round.
        """
        if step == self.steps:
            return True
        if not self.eval_every or began is None:
            return False
        return step // self.eval_every > began // self.eval_every

    def to_dict(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint and the run that resumes it must have in common.

        The number of steps only where the learning rate of a step depends on it.
        """
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _HOW}
        if self.final_lr == 1:
            del kept["steps"]
        return kept | {
            "strategy": title(self.parsed),
            "context": self.shape.context if self.task in OF_TEXT else 0,
            "outer": dict(sorted(self.outer.items())),
        }


_FETCHED = {
    "prefetch": "FSDP2 fetches one layer ahead",
    "max_live": "FSDP2 fetches one layer ahead",
    "gathers": "FSDP2 fetches a layer at once",
    "reduce_bucket": "FSDP2 reduces a layer at once",
    "max_reuse": "nothing is recomputed",
}
_REFUSED: dict[str, Mapping[str, str]] = {
    "zero1": {"bucket": "torch's ZeroRedundancyOptimizer has no buckets"},
    "zero2": {
        "bucket": "FSDP2 reduces a layer at a time",
        "owners": "FSDP2 scatters gradients and gathers parameters",
    },
    "zero3": _FETCHED,
    "zeropp": _FETCHED | {"chunks": "a gradient is exchanged at once"},
    "fsdp": {
        "sync": "a step has one micro-step",
        "clip": "--clip-grad bounds the norm, or does not",
        "version": "torch trains with fully_shard",
    },
    **{name: update.refused for name, update in LOCAL_UPDATES.items()},
}
"""Options that torch's own form of a strategy, or ours, does not have, with the reason."""

_SHARDED = ("zero2", "zero3", "zeropp", "fsdp")
"""What leaves a rank with a part of the parameters."""

MIN_STEPS = 3
"""Of a training with three points to estimate at."""


def check(settings: TrainSettings, layout: Layout) -> None:
    """Raise OptionError for what cannot be trained on these ranks."""
    strategy = settings.parsed
    _check_options(strategy)
    if settings.task in {"digits", "segmentation"} and find_spec("sklearn") is None:
        raise OptionError(
            f"task {settings.task} needs scikit-learn, which is not installed: pip install"
            " '.[train]'"
        )
    if isinstance(strategy, ZeroPP) and strategy.hpz_group not in {0, layout.gpus_per_node}:
        raise OptionError(
            f"zeropp: hpz_group={strategy.hpz_group} cannot be trained with: the groups are the"
            f" nodes, of {layout.gpus_per_node} ranks here"
        )
    if isinstance(strategy, FSDP):
        strategy.sharding(layout, WORLD)
    if isinstance(strategy, Zero1 | Zero2):
        strategy.sharing(layout, WORLD)
    if isinstance(strategy, LocalSteps) and strategy.worker == "site" and layout.sites == 1:
        raise OptionError(
            f"{strategy.name}: worker=site needs 2 sites or more, and there is 1: set {SITES} to"
            " their number for every rank, or train in a lab with --sites"
        )
    ranks = layout.world_size
    if settings.batch % ranks:
        raise OptionError(
            f"batch is {settings.batch}; it must be a multiple of the {ranks} ranks, which share it"
        )


def check_estimate(settings: TrainSettings, layout: Layout, *, resume: bool) -> None:
    """Raise OptionError where the constants of the bound cannot be estimated."""
    strategy = settings.parsed
    sharded = strategy.name
    if isinstance(strategy, LocalSteps):
        inside = Replica.of(strategy).ranks(layout) > 1
        sharded = (strategy.inner or "zero2") if inside else ""
    if sharded in _SHARDED:
        raise OptionError(
            f"--estimate needs whole models on every rank, and {sharded} shards them; use ddp"
        )
    if resume:
        raise OptionError("--estimate begins at the start of a training: not with --resume")
    if settings.last < MIN_STEPS:
        raise OptionError(
            f"--estimate needs {MIN_STEPS} steps at least, and there are {settings.last}"
        )


def _check_options(strategy: Strategy) -> None:
    default = type(strategy)()
    for field in fields(default):  # type: ignore[arg-type]
        name, why = field.name, _REFUSED.get(strategy.name, {}).get(field.name)
        if why and getattr(strategy, name) != getattr(default, name):
            raise OptionError(f"{strategy.name}: {name} cannot be trained with: {why}")
    if not isinstance(strategy, LocalSteps):
        return
    if strategy.dtype is DType.FP16:
        raise OptionError("dtype=fp16 cannot be trained with; use fp32, bf16, int8 or int4")
    if strategy.inner == "zero1":
        raise OptionError(
            "inner=zero1 cannot be trained with; use ddp, zero2, zero3, zeropp or fsdp"
        )
