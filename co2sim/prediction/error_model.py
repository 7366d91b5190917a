"""How far predictions are off: one model of errors over all published training runs.

Log(published / predicted) of a further run has mean 0, and a variance that is a sum of parts: one
for any run, and one each for what grows with exposed communication, nodes, divided layers, and
what the host needs for what the GPU needs. They are smooth, and are estimated on errors of sources
that were left out of the fit (`co2analysis runs --fit`).

Where the stack was calibrated by its own runs, the variance is that of the errors of runs that
were predicted from one run of their series, which grow with the distance to it.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from co2sim.prediction.result import Result

ERRORS = "errors.toml"
"""The record of the catalog."""

_UNKNOWN_GPU = 0.25
"""Standard deviation for a GPU of whose kernels, or trainings, nothing is published. Assumed:
between the best and the worst of those that are, half of their efficiencies lie so near."""


_EXPERTS = 0.25
"""Standard deviation that mixtures of experts add: on the published runs of them the root of the
mean square is 0.28, a part of which any run has."""
EXPERT_RUNS, EXPERT_ERROR = 19, 0.27
"""Published runs of mixtures of experts, which entered no fit, and the mean of their errors
(docs/stacks.md). All of them divide the experts of a layer, and are of ZeRO-1."""
CONTEXT_RUNS, CONTEXT_ERROR, CONTEXT_TORCHTITAN = 51, 0.11, 0.57
"""The same with context parallelism, and the mean of the three runs of torchtitan among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What makes a prediction more or less sure.

    `exposed` is the share of the round that waits for the network, `divided` how many GPUs share
    the layers (tp x pp), `host` what the host needs to issue passes over what the GPU needs for
    them, and `known` says whether something is published of the GPU's kernels, and of trainings on
    its generation. `apart` is the
    distance to the nearest of the runs that the stack was calibrated by, inf without any, and
    `misfit` by how much the logarithm of that is still off. `experts` says whether the model is a
    mixture of them.
    """

    exposed: float
    nodes: int
    divided: int
    host: float
    known: bool = True
    apart: float = math.inf
    misfit: float = 0.0
    experts: bool = False

    @classmethod
    def of(
        cls,
        result: Result,
        *,
        known: bool = True,
        apart: float = math.inf,
        misfit: float = 0.0,
        experts: bool = False,
    ) -> "Situation":
        """That of a result."""
        return cls(
            exposed=result.exposed_share,
            nodes=result.nodes,
            divided=result.layer_gpus,
            host=result.host_load or 0.0,
            known=known,
            apart=apart,
            misfit=misfit,
            experts=experts,
        )

    @property
    def parts(self) -> dict[str, float]:
        """By how much each part of the standard deviation counts."""
        return {
            "any": 1.0,
            "exposed": self.exposed,
            "nodes": math.log2(self.nodes) / 10,
            "divided": math.log2(self.divided) / 5,
            "host": min(1.0, self.host),
        }


@dataclass(frozen=True, slots=True)
class SourceErrors:
    """Errors on the runs of one source, left out of the fit: predicted / published - 1.

    `mean` is that of their sizes, `bias` the median with its sign.
    """

    title: str
    runs: int
    mean: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceErrors:
    """Errors that grow with the distance from another run of the same stack.

    Standard deviations beside that run, and for a distance of 1 from it; how many of both a 90 %
    interval reaches; and how many runs, or pairs of runs, they are of.
    """

    any: float
    apart: float
    factor: float
    runs: int

    def reach(self, apart: float, misfit: float = 0.0) -> float:
        """How far a 90 % interval of log(measured / predicted) reaches to both sides.

        `misfit` is by how much the other run is off itself.
        """
        return self.factor * math.hypot(self.any, self.apart * apart, misfit)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryErrors:
    """Errors of the peak of memory on published runs, of which it is known.

    A 90 % interval of log(published / predicted) reaches `reach` to both sides. `mean` is that of
    absolute errors, `bias` the median of signed ones.
    """

    reach: float
    mean: float
    bias: float
    runs: int
    sources: int


@dataclass(frozen=True, slots=True)
class ErrorModel:
    """Standard deviations of the parts, and how many of all a 90 % interval reaches.

    `own` are errors of runs that were predicted by a stack which one run of their series
    calibrated, `pairs` those of ratios of two runs of a model on one cluster.
    """

    deviations: Mapping[str, float]
    factor: float
    sources: tuple[SourceErrors, ...]
    own: DistanceErrors | None = None
    pairs: DistanceErrors | None = None
    memory: MemoryErrors | None = None

    def deviation(self, situation: Situation) -> float:
        """Of log(published / predicted)."""
        found = [self.deviations[name] * size for name, size in situation.parts.items()]
        more = 0.0 if situation.known else _UNKNOWN_GPU, _EXPERTS if situation.experts else 0.0
        return math.hypot(*found, *more)

    def reach(self, situation: Situation) -> float:
        """How far a 90 % interval of log(published / predicted) reaches to both sides."""
        reach = self.factor * self.deviation(situation)
        return min(reach, self.own.reach(situation.apart, situation.misfit)) if self.own else reach

    def by_own(self, situation: Situation) -> bool:
        """Whether the runs that the stack was calibrated by make the interval narrower."""
        return self.reach(situation) < self.factor * self.deviation(situation)

    @property
    def runs(self) -> int:
        """In all sources."""
        return sum(source.runs for source in self.sources)


def read(entry: Mapping[str, Any]) -> ErrorModel:
    """From the record."""
    sources = tuple(SourceErrors(**source) for source in entry.get("source", ()))
    own, pairs = (
        DistanceErrors(**entry[name]) if name in entry else None for name in ("own", "pairs")
    )
    memory = MemoryErrors(**entry["memory"]) if "memory" in entry else None
    factor = float(entry["interval_factor"])
    return ErrorModel(entry["deviations"], factor, sources, own, pairs, memory)


@cache
def error_model() -> ErrorModel:
    """That of the catalog."""
    text = (resources.files("co2sim.catalog") / ERRORS).read_text("utf-8")
    return read(tomllib.loads(text))
