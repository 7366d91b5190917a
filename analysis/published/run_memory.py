"""The peak of memory of published runs beside what is predicted.

It follows from formulas (`co2sim.models.memory`). No number is fitted to these runs, but a setting
of one stack was inferred from them (docs/stacks.md). Runs that need what is not modelled do not
count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from analysis.published.run_errors import quantile, weights
from analysis.published.runs import TrainingRun
from analysis.published.stack_fit import predictions
from co2sim.models.memory import GIB, reserved
from co2sim.prediction.error_model import MemoryErrors
from co2sim.prediction.result import Result

_HARMLESS = {"fp8", "torch.compile", "selective activation checkpointing", "async TP"}
"""What runs need that changes their speed, but hardly their memory."""


@dataclass(frozen=True, slots=True)
class RunMemory:
    """A run, and its peak of the published kind, in GiB."""

    run: TrainingRun
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.published - 1


def run_memories(runs: Sequence[TrainingRun], jobs: int) -> list[RunMemory]:
    """Those of which a peak is published, and that can be expressed but for `_HARMLESS`."""
    known = [
        run
        for run in runs
        if run.memory_gib is not None and run.cluster and _HARMLESS.issuperset(run.needs)
    ]
    plain = [
        run.model_copy(update={"precision": "bf16"}) if run.precision == "fp8" else run
        for run in known
    ]
    if not plain:
        return []
    results = predictions(plain, [None] * len(plain), jobs, "predicting memory")
    return [
        RunMemory(run, run.memory_gib or 0.0, _peak(result, run.memory_kind) / GIB)
        for run, result in zip(known, results, strict=True)
    ]


def _peak(result: Result, kind: str) -> float:
    memory = result.memory_bytes_per_gpu
    if kind == "allocated":
        return result.allocated_bytes_per_gpu
    return reserved(memory) if kind == "reserved" else memory["total"]


def memory_errors(some: Sequence[RunMemory]) -> MemoryErrors:
    """All runs of a source together weigh as the root of their number."""
    errors = np.abs([math.log(one.predicted / one.published) for one in some])
    absolute = [abs(one.error) for one in some]
    return MemoryErrors(
        reach=float(f"{quantile(errors, weights([one.run for one in some])):.4g}"),
        mean=round(sum(absolute) / len(absolute), 4),
        bias=round(median(one.error for one in some), 4),
        runs=len(some),
        sources=len({one.run.paper for one in some}),
    )
