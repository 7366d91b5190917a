"""Whole published trainings beside an answer, and how many times as long a project takes.

An answer is a training in a steady state, with failures. What people published of theirs are all
the GPU-hours from the first token to the last, with restarts, evaluations, slow weeks, and with
their own software. `catalog/trainings.toml` has them with their sources. `co2analysis whole`
predicts those that can be predicted: the factors between both are in
`catalog/training_factors.toml`, and nothing is fitted to them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Any

from co2sim.catalog.facts import plain, read, read_table
from co2sim.common import convert
from co2sim.common.errors import OptionError
from co2sim.common.units import FlopsPerSecond
from co2sim.hardware.cluster import GPU
from co2sim.models.operators import Model
from co2sim.prediction.question import Question
from co2sim.prediction.step_factors import Project

if TYPE_CHECKING:
    from co2sim.prediction.totals import Totals

PUBLISHED = "published"
"""The project that takes as long as published trainings took beside their prediction."""
_FLOPS = 6.0
"""Of a training, for each parameter that a token passes: Kaplan et al. 2020, arXiv 2001.08361."""
_SAME = 0.02
"""Relative difference in size of what counts as one model, and in peak as one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A published training from its first token to its last.

    `active` are the parameters that a token passes, None: all. `gpu` is a key of the catalog.
    `gpus` is None where their number was not published. `counted` says what `gpu_hours` are.
    `setting` are fields of the question that predicts it; empty where none does. `factor` is how
    many times the predicted GPU-hours were published; None without a prediction.
    """

    name: str
    parameters: float
    tokens: float
    gpu: str
    gpu_hours: float
    source: str
    counted: str
    active: float | None = None
    gpus: int | None = None
    setting: Mapping[str, Any] = field(default_factory=dict)
    factor: float | None = None

    @property
    def passed(self) -> float:
        """The parameters that a token passes."""
        return self.active or self.parameters

    @property
    def peak(self) -> FlopsPerSecond:
        """Of one of its GPUs, dense, in 16 bits."""
        return _gpu(self.gpu)[1]

    @property
    def effective(self) -> FlopsPerSecond:
        """Of one of its GPUs, over all its hours."""
        return _FLOPS * self.passed * self.tokens / (self.gpu_hours * 3600)


@lru_cache
def _gpu(key: str) -> tuple[str, FlopsPerSecond]:
    """The generation of a GPU of the catalog, and its peak in 16 bits."""
    from co2sim.catalog.specs import GPUSpec  # noqa: PLC0415 - pydantic is slow

    gpu = GPUSpec.model_validate(plain(read("gpus", key))).build()
    return str(gpu.generation or gpu.name), _peak(gpu)


def _peak(gpu: GPU) -> FlopsPerSecond:
    return gpu.peak.get("bf16") or gpu.peak.get("fp16") or max(gpu.peak.values())


@lru_cache
def trainings() -> tuple[Training, ...]:
    """All published trainings of the catalog."""
    factors = read_table("training_factors")
    rows = read_table("trainings")["training"]
    return tuple(Training(**row, factor=factors.get(row["name"])) for row in rows)


@lru_cache
def published_factors() -> tuple[float, ...]:
    """How many times as long as predicted whole trainings took, the least first."""
    return tuple(sorted(each.factor for each in trainings() if each.factor is not None))


def published_project() -> Project:
    """The median and the most of `published_factors`; no project is shorter than its training."""
    factors = published_factors()
    return Project(max(1.0, median(factors)), 1.0, factors[-1])


def read_project(text: str) -> Project:
    """What --project says: a number, 1 or more, or "published". Raises OptionError for others."""
    if text.strip().lower() == PUBLISHED:
        return published_project()
    try:
        return Project(convert.number("--project", text))
    except OptionError as error:
        raise OptionError(f"{error}; or {PUBLISHED}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The whole training that is most like an answer.

    It took `factor` times the GPU-hours of the answer: for as many tokens, where the model is the
    same, else for as many tokens and parameters that a token passes; of another GPU (`same_gpu`),
    in proportion to the peak.
    """

    training: Training
    factor: float
    same_model: bool
    same_gpu: bool

    @property
    def words(self) -> str:
        """In a sentence, without its stop."""
        whole = self.training
        per = "token" if self.same_model else "token and parameter"
        peak = "" if self.same_gpu else ", at the peak of each GPU"
        return (
            f"{whole.name} took {_short(whole.gpu_hours)} {_title(whole.gpu)}-hours for"
            f" {_short(whole.tokens)} tokens ({whole.source.partition(',')[0]}):"
            f" {self.factor:.2g} times this answer per {per}{peak}"
        )


def _title(gpu: str) -> str:
    return gpu.upper().replace("-", " ")


def _short(amount: float) -> str:
    """A large amount: 1.46e6 -> "1.46M", 15e12 -> "15T"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if amount >= size:
            return f"{amount / size:.3g}{letter}"
    return f"{amount:.4g}"


def most_alike(gpu: GPU, model: Model) -> Training:
    """The training that is nearest: the generation of the GPU, the kind of model, and its size.

    Sizes are apart by the logarithm of their ratio, GPUs by that of their peaks. Another generation
    counts as much as a factor of e in size, as does one model of experts and one without.
    """
    experts = model.active_parameters < model.parameters
    mine = gpu.generation or gpu.name

    def distance(each: Training) -> float:
        generation, peak = _gpu(each.gpu)
        apart = abs(math.log(each.passed / model.active_parameters))
        apart += abs(math.log(peak / _peak(gpu))) + (generation != mine)
        return apart + (experts != (each.active is not None))

    return min(trainings(), key=distance)


def beside(case: Question, totals: "Totals") -> Beside | None:
    """The most alike whole training beside an answer; None where tokens or all parameters are not.

    `totals` are those of the case. A project's factor is left out of them.
    """
    cluster, entry = case.load()
    gpu, model = cluster.value.gpu, entry.value
    if model.unit != "token" or case.lora is not None:
        return None
    whole = most_alike(gpu, model)
    hours = totals.gpu_hours / totals.project
    mine = _FLOPS * model.active_parameters * totals.tokens / (hours * 3600)
    generation, peak = _gpu(whole.gpu)
    peaks = _peak(gpu) / peak
    same_gpu = generation == (gpu.generation or gpu.name) and abs(peaks - 1) < _SAME
    factor = mine / whole.effective / (1.0 if same_gpu else peaks)
    size = abs(whole.parameters / model.parameters - 1)
    return Beside(training=whole, factor=factor, same_model=size < _SAME, same_gpu=same_gpu)


def whole_words(case: Question, totals: "Totals | None", *, short: bool = False) -> str:
    """What stands in the row `whole` of a first screen; "" where there is nothing to say.

    `short`: without what others took.
    """
    found = None if totals is None else beside(case, totals)
    if found is None or totals is None:
        return ""
    if totals.project != 1:
        return f"{found.words}; days and cost are {totals.project:.3g} times one training's"
    if short:
        return found.words
    factors = published_factors()
    usual = f"of {len(factors)} the median took {median(factors):.1f} times its prediction"
    return f"{found.words}; {usual} (--project {PUBLISHED})"
