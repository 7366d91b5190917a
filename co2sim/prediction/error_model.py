"""How far predictions are off: one model of errors over all published training runs.

Log(published / predicted) of a further run has mean 0, and a variance that is a sum of parts: one
for any run, and one each for what grows with exposed communication, nodes, divided layers, and
small passes. They are smooth, and are estimated on errors of sources that were left out of the fit
(`co2analysis runs --fit`).
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

_SMALL = 16_384
"""Tokens of a pass from which on the host and the start of kernels hardly matter."""

_UNKNOWN_GPU = 0.25
"""Standard deviation for a GPU of whose kernels nothing is published. Assumed: between the best
and the worst of those that are, half of their efficiencies lie so near each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What makes a prediction more or less sure.

    `exposed` is the share of the round that waits for the network, `divided` how many GPUs share
    the layers (tp x pp), `tokens` those of a pass on a GPU, and `known` says whether something is
    published of the GPU's kernels.
    """

    exposed: float
    nodes: int
    divided: int
    tokens: float
    known: bool = True

    @classmethod
    def of(cls, result: Result, *, known: bool = True) -> "Situation":
        """That of a result."""
        tokens = result.tokens_per_gpu_per_step * result.pp / result.accumulation
        return cls(
            exposed=result.exposed_share,
            nodes=result.nodes,
            divided=result.tp * result.pp,
            tokens=tokens,
            known=known,
        )

    @property
    def parts(self) -> dict[str, float]:
        """By how much each part of the standard deviation counts."""
        return {
            "any": 1.0,
            "exposed": self.exposed,
            "nodes": math.log2(self.nodes) / 10,
            "divided": math.log2(self.divided) / 5,
            "small": math.log2(1 + _SMALL / self.tokens),
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


@dataclass(frozen=True, slots=True)
class ErrorModel:
    """Standard deviations of the parts, and how many of all a 90 % interval reaches."""

    deviations: Mapping[str, float]
    factor: float
    sources: tuple[SourceErrors, ...]

    def deviation(self, situation: Situation) -> float:
        """Of log(published / predicted)."""
        found = [self.deviations[name] * size for name, size in situation.parts.items()]
        return math.hypot(*found, 0.0 if situation.known else _UNKNOWN_GPU)

    def reach(self, situation: Situation) -> float:
        """How far a 90 % interval of log(published / predicted) reaches to both sides."""
        return self.factor * self.deviation(situation)

    @property
    def runs(self) -> int:
        """In all sources."""
        return sum(source.runs for source in self.sources)


def read(entry: Mapping[str, Any]) -> ErrorModel:
    """From the record."""
    sources = tuple(SourceErrors(**source) for source in entry["source"])
    return ErrorModel(entry["deviations"], float(entry["interval_factor"]), sources)


@cache
def error_model() -> ErrorModel:
    """That of the catalog."""
    text = (resources.files("co2sim.catalog") / ERRORS).read_text("utf-8")
    return read(tomllib.loads(text))
