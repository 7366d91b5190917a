"""Published training runs beside a prediction: which are nearest, and how far off they were.

Errors are those of predictions by what was fitted without the run's source (`co2analysis runs`).
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

from co2sim.hardware.cluster import Cluster
from co2sim.models.stack import Setting
from co2sim.models.workload import Model
from co2sim.prediction.case import Case
from co2sim.prediction.result import Result

EVIDENCE = "evidence.csv"
"""The record of the catalog, written by `co2analysis runs --fit`."""

_OTHER = 2.0
"""What another stack, GPU or way of sharing counts: as much as four times the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A published run and its prediction, in tokens/s of a GPU.

    `gpu` is the generation, `divided` tp x pp, `tokens` those of a pass on a GPU, and `shares` what
    replicas share: nothing, optimizer states, or parameters.
    """

    source: str
    stack: str
    gpu: str
    model: str
    parameters: int
    gpus: int
    strategy: str
    shares: str
    divided: int
    tokens: float
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.published - 1

    @property
    def setting(self) -> Setting:
        """What it is like."""
        return Setting(**{one.name: getattr(self, one.name) for one in fields(Setting)})


@dataclass(frozen=True, slots=True)
class Near:
    """A published run, and how far it is from a question: 1 is twice as many of something."""

    run: PublishedRun
    distance: float


def shares(strategy: str) -> str:
    """What the replicas of a strategy share, by its name: states, parameters, steps or nothing."""
    name = strategy.partition("(")[0].partition(":")[0]
    known = {"ddp": "nothing", "zero1": "states", "zero2": "states"}
    known |= dict.fromkeys(("zero3", "zeropp", "fsdp"), "parameters")
    return known.get(name, "steps")


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """All that the catalog knows."""
    text = (resources.files("co2sim.catalog") / EVIDENCE).read_text("utf-8")
    kinds = {field.name: field.type for field in fields(PublishedRun)}
    return tuple(
        PublishedRun(**{name: kinds[name](value) for name, value in row.items()})  # type: ignore[operator]
        for row in csv.DictReader(text.splitlines())
    )


def setting_of(cluster: Cluster, model: Model, result: Result) -> Setting:
    """What a result is like."""
    return Setting(
        gpu=cluster.gpu.generation or cluster.gpu.name,
        gpus=result.gpus,
        parameters=model.parameters,
        shares=shares(result.strategy),
        divided=result.tp * result.pp,
        tokens=result.tokens_per_gpu_per_step * result.pp / result.accumulation,
    )


def distance(one: Setting, other: Setting) -> float:
    """Of two runs of one stack: 1 for twice the parameters, or four times of something else."""
    sizes = (
        (one.gpus, other.gpus, 0.5),
        (one.parameters, other.parameters, 1.0),
        (one.tokens, other.tokens, 0.5),
        (one.divided, other.divided, 0.5),
    )
    found = sum(weight * abs(math.log2(a / b)) for a, b, weight in sizes)
    return found + _OTHER * (one.gpu != other.gpu) + _OTHER * (one.shares != other.shares)


def between(one: Result, other: Result) -> float:
    """The distance of two results of one model on one GPU."""
    here, there = (
        Setting(
            gpu="",
            gpus=result.gpus,
            parameters=1,
            shares=shares(result.strategy),
            divided=result.tp * result.pp,
            tokens=result.tokens_per_gpu_per_step * result.pp / result.accumulation,
        )
        for result in (one, other)
    )
    return distance(here, there)


def nearest(case: Case, result: Result, count: int = 5) -> list[Near]:
    """The published runs that are most like a case, the nearest first."""
    cluster, model = case.load()
    return nearest_to(setting_of(cluster.value, model.value, result), result)[:count]


def nearest_to(own: Setting, result: Result) -> list[Near]:
    """All published runs, the nearest first."""
    found = [
        Near(run, distance(run.setting, own) + _OTHER * (run.stack != result.stack))
        for run in published_runs()
    ]
    return sorted(found, key=lambda one: one.distance)


def rows(near: Sequence[Near]) -> list[tuple[str, ...]]:
    """For a table with the columns of `COLUMNS`."""
    return [
        (
            one.run.source,
            f"{one.run.model}, {one.run.gpus:,} {one.run.gpu}, {one.run.strategy}",
            one.run.stack,
            f"{one.run.published:,.0f}",
            f"{one.run.predicted:,.0f}",
            f"{one.run.error:+.0%}",
            f"{one.distance:.1f}",
        )
        for one in near
    ]


COLUMNS = ("source", "run", "stack", "published", "predicted", "error", "distance")
