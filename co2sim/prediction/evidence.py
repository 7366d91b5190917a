"""Published training runs that are like a prediction, and how far off they were predicted."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from co2sim.prediction.likeness import Difference, Traits, differences, traits_of, unlikeness
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result

EVIDENCE = "evidence.csv"
"""The record of the catalog, written by `co2analysis runs --fit`."""


@dataclass(frozen=True, kw_only=True)
class PublishedRun(Traits):
    """A published run and its prediction, in tokens/s of a GPU."""

    source: str
    model: str
    strategy: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.published - 1


@dataclass(frozen=True, slots=True)
class Near:
    """A published run, and how far it is from a case: 1 is twice as many parameters.

    `differences` are between the case and the run, the largest first, and `speed` is what is
    predicted for the case, in tokens/s of a GPU (None for what has no tokens).
    """

    run: PublishedRun
    distance: float
    differences: tuple[Difference, ...]
    speed: float | None

    def __str__(self) -> str:
        """What ran how fast, why the case is not as fast, and how far off the prediction was."""
        run = self.run
        return (
            f"{run.model} on {run.gpus:,} {run.gpu} with {run.strategy}: {self.compared}; it was"
            f" predicted {abs(run.error):.0%} too {'fast' if run.error > 0 else 'slow'}"
            f" ({run.source}; distance {self.distance:.1f})"
        )

    @property
    def compared(self) -> str:
        """The two speeds, and the largest differences."""
        yours = "" if self.speed is None else f", yours {self.speed:,.0f}"
        speeds = f"published {self.run.published:,.0f} tokens/s a GPU{yours}"
        if not self.differences:
            return f"{speeds}: the same run"
        more = ", ..." if len(self.differences) > _DIFFERENCES else ""
        return f"{speeds}, because: {', '.join(map(str, self.differences[:_DIFFERENCES]))}{more}"


_DIFFERENCES = 2
"""Differences that are named."""


_KINDS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("parameters", "gpus", "divided", "micro_batch"), int),
    **dict.fromkeys(("sequence", "batch", "watts", "memory_bandwidth"), float),
    **dict.fromkeys(("published", "predicted"), float),
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


def nearest(case: Question, result: Result, count: int = 5) -> list[Near]:
    """The published runs that are most like a case, the nearest first."""
    cluster, model = case.load()
    here = traits_of(cluster.value, model.value, result)
    speed = result.tokens_per_s_per_gpu if result.unit == "token" else None
    return [
        Near(run, distance, tuple(differences(here, run)), speed)
        for distance, run in by_distance(here)[:count]
    ]


def by_distance(here: Traits) -> list[tuple[float, PublishedRun]]:
    """All published runs with their distance, the nearest first."""
    runs = [(round(unlikeness(here, run), 6), run) for run in published_runs()]
    return sorted(runs, key=lambda pair: pair[0])


def evidence_rows(near: Sequence[Near]) -> list[tuple[str, ...]]:
    """For a table with the columns of `EVIDENCE_COLUMNS`."""
    return [
        (
            row.run.source,
            f"{row.run.model}, {row.run.gpus:,} {row.run.gpu}, {row.run.strategy}",
            "; ".join(map(str, row.differences[:_DIFFERENCES])) or "nothing",
            f"{row.run.published:,.0f}",
            f"{row.run.predicted:,.0f}",
            f"{row.run.error:+.0%}",
            f"{row.distance:.1f}",
        )
        for row in near
    ]


EVIDENCE_COLUMNS = ("source", "run", "here", "published", "predicted", "error", "distance")
