"""The settings of a training, checked. Needs no torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from co2sim.common.errors import OptionError
from co2sim.common.validation import between, whole
from co2sim.strategies import Strategy, parse
from co2sim.strategies.co2 import CO2
from co2sim.strategies.local import LocalSteps, round_steps
from co2sim.strategies.step import title
from realrun.errors import one_of
from realrun.train import algorithm_registry
from realrun.train.tasks.presets import GPTS, GPTShape, known_size

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
"""Strategies that are trained without an outer step; the others are those of `outer.OPTIONS`."""

MOST = 10**9
"""Of steps, samples and seeds."""
_HOW = ("stop", "log_every", "eval_every", "checkpoint_every", "evaluate")
"""Fields that may differ between a run and its resumption: they do not change what is learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What to train, and how. Raises OptionError for values that are not allowed.

    `batch` is samples of an optimizer step over all ranks; a sample of text is `context`
    characters (0: the preset's own). The learning rate rises linearly for `warmup` steps to `lr`
    and falls along half a cosine to `final_lr` x `lr` at the last of `steps`. `clip_grad` bounds
    the norm of each worker's gradient (0: not). `momentum` is that of sgd, and beta1 of adamw.
    `stop` ends the run after this step, with a checkpoint (0: at `steps`).

    Every `eval_every` steps the validation loss is taken (0: only at the end); local updates wait
    for the end of the round. `evaluate` "during": at once, off the clock. "after": once training is
    over, from copies of the parameters, so that an average that is in flight gets no free time.
    """

    task: TaskName = "text"
    strategy: str = "ddp"
    size: str = "small"
    context: int = 0
    steps: int = 600
    stop: int = 0
    batch: int = 32
    optimizer: OptimizerName = "adamw"
    lr: float = 3e-3
    final_lr: float = 0.1
    warmup: int = 20
    momentum: float = 0.9
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    outer: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    evaluate: Evaluate = "during"
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("task", get_args(TaskName)),
            ("optimizer", get_args(OptimizerName)),
            ("evaluate", get_args(Evaluate)),
        ):
            one_of(name, getattr(self, name), allowed)
        known_size(self.size)
        _check_trained(self.parsed.name)
        algorithm_registry.arguments(self.parsed.name, self.outer)
        for name, least in (
            *(("steps", 1), ("batch", 1), ("log_every", 1)),
            *((n, 0) for n in ("context", "stop", "warmup", "seed", "eval_every")),
            ("checkpoint_every", 0),
        ):
            object.__setattr__(self, name, whole(name, getattr(self, name), least, MOST))
        for name, low, most in (
            ("lr", 1e-12, 1e3),
            ("final_lr", 0.0, 1.0),
            ("momentum", 0.0, 0.9999),
            ("weight_decay", 0.0, 1e3),
            ("clip_grad", 0.0, 1e9),
        ):
            between(name, getattr(self, name), low, most)
        if self.stop > self.steps:
            raise OptionError(f"stop is {self.stop}; there are {self.steps} steps")
        if self.warmup > self.steps:
            raise OptionError(f"warmup is {self.warmup}; there are {self.steps} steps")
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


def _check_trained(name: str) -> None:
    """Raise OptionError for a strategy that only has a schedule, such as a user's own."""
    known = sorted(IN_EVERY_STEP | algorithm_registry.LOCAL_UPDATES.keys())
    if name not in known:
        raise OptionError(
            f"{name} has no training algorithm; those that have: {', '.join(known)} (`realrun run`"
            " executes the schedule of any)"
        )
