"""Published training runs beside a prediction: which are nearest, and how far off they were.

Errors are those of predictions by what was fitted without the run's source (`co2analysis runs`).
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from co2sim.hardware.cluster import Cluster
from co2sim.models.stack import Setting, Shares
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
    shares: Shares
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
        names = "gpu", "gpus", "parameters", "shares", "divided", "tokens"
        return Setting(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True)
class Near:
    """A published run, and how far it is from a question: 1 is twice as many of something."""

    run: PublishedRun
    distance: float

    def __str__(self) -> str:
        """What ran, how far off its prediction was, and its source."""
        run = self.run
        return (
            f"{run.model} on {run.gpus:,} {run.gpu} with {run.strategy}, predicted"
            f" {abs(run.error):.0%} too {'fast' if run.error > 0 else 'slow'} ({run.source};"
            f" distance {self.distance:.1f}, 0 is the same run, 2 another stack or GPU)"
        )


def shares(strategy: str) -> Shares:
    """What the replicas of a strategy share, by its name: states, parameters, steps or nothing."""
    name = strategy.partition("(")[0].partition(":")[0]
    known: dict[str, Shares] = {"ddp": "nothing", "zero1": "states", "zero2": "states"}
    known |= {"zero3": "parameters", "zeropp": "parameters", "fsdp": "parameters"}
    return known.get(name, "steps")


_KINDS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("parameters", "gpus", "divided"), int),
    **dict.fromkeys(("tokens", "published", "predicted"), float),
}


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """All that the catalog knows."""
    text = (resources.files("co2sim.catalog") / EVIDENCE).read_text("utf-8")
    return tuple(
        PublishedRun(**{name: _KINDS.get(name, str)(value) for name, value in row.items()})
        for row in csv.DictReader(text.splitlines())
    )


@cache
def published_gpus() -> frozenset[str]:
    """The generations of GPUs that these are of."""
    return frozenset(run.gpu for run in published_runs())


def setting_of(cluster: Cluster, model: Model, result: Result, kernels: str = "") -> Setting:
    """What a result is like; `kernels` names precision, attention and recomputation."""
    several = result.nodes > 1
    network = 8 * cluster.inter.payload_bandwidth / cluster.gpus_per_node if several else 0.0
    return Setting(
        network=network,
        kernels=kernels,
        gpu=cluster.gpu.generation or cluster.gpu.name,
        gpus=result.gpus,
        parameters=model.parameters,
        shares=shares(result.strategy),
        divided=result.layer_gpus,
        tokens=result.tokens_per_gpu_per_step * result.pp / result.accumulation,
    )


def distance(one: Setting, other: Setting) -> float:
    """Of two runs of one stack: 1 for twice the parameters, or four times of something else.

    The network counts where both use one, and kernels where both state them.
    """
    sizes = (
        (one.gpus, other.gpus, 0.5),
        (one.parameters, other.parameters, 1.0),
        (one.tokens, other.tokens, 0.5),
        (one.divided, other.divided, 0.5),
        (one.network or 1.0, other.network or 1.0, 1.0 * bool(one.network and other.network)),
    )
    found = sum(weight * abs(math.log2(a / b)) for a, b, weight in sizes)
    found += _OTHER * bool(one.kernels and other.kernels and one.kernels != other.kernels)
    return found + _OTHER * (one.gpu != other.gpu) + _OTHER * (one.shares != other.shares)


def between(one: Result, other: Result) -> float:
    """The distance of two results of one model on one GPU."""
    here, there = (
        Setting(
            gpu="",
            gpus=result.gpus,
            parameters=1,
            shares=shares(result.strategy),
            divided=result.layer_gpus,
            tokens=result.tokens_per_gpu_per_step * result.pp / result.accumulation,
        )
        for result in (one, other)
    )
    return distance(here, there)


def from_measured(own: Setting, measured: Sequence[Setting]) -> tuple[float, float]:
    """The distance to the nearest of the runs that calibrated a stack, and the misfit of that one.

    inf where none is on this GPU, or where only one of the two trains local steps.
    """
    alike = [
        (distance(own, one), one.misfit)
        for one in measured
        if one.gpu == own.gpu and (one.shares == "steps") == (own.shares == "steps")
    ]
    return min(alike, default=(math.inf, 0.0))


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
