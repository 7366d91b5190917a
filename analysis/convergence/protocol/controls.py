"""What must fail, and what the layer about single causes says as a whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from analysis.convergence import exact_moments
from analysis.convergence.objectives.families import FAMILIES
from analysis.convergence.objectives.problems import Array, Quadratic
from analysis.convergence.protocol import oracle, rate_fits
from analysis.convergence.protocol.isolation import (
    RescueCell,
    RescueLine,
    RescueTask,
    StalenessCell,
    StalenessExcess,
    StalenessTask,
    TermPart,
    TermsCell,
    TermsTask,
)
from analysis.convergence.setting import RunSize, Variants, variants
from analysis.convergence.simulate import run

_SIGMA2 = 1.0
_GENTLE = 0.3
"""Largest slope in T, in magnitude, of a run whose fixed step leaves it at its noise floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NegativeTask:
    """To measure what must not work."""

    seeds: int

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return 16_000.0

    def measure(self) -> "NegativeCell":
        """Fixed steps, steps beyond the edge of stability, and the oracle of another delay."""
        rounds: Array = np.array([2.0**exponent for exponent in range(8, 17)])
        fixed = [variants(0.05, noise=_SIGMA2)] * len(rounds)
        scaled = [variants(float(np.sqrt(4 / (t * 4))), noise=_SIGMA2) for t in rounds]
        task = oracle.MomentsTask(
            family="isotropic", workers=4, local_steps=8, rounds=32, delay=0, seeds=self.seeds
        )
        right, wrong = (
            max(abs(z) for row in oracle.scores(task, claimed=delay) for z in row)
            for delay in (0, 1)
        )
        return NegativeCell(
            self,
            NegativeControls(
                fixed_slope=_slope(rounds, fixed),
                scaled_slope=_slope(rounds, scaled),
                beyond=tuple(_growths()),
                delay_0_against_delay_0=right,
                delay_0_against_delay_1=wrong,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeGrowth:
    """How f - f_inf grows over 500 rounds at a multiple of the edge of stability."""

    alpha: float
    beta: float
    factor: float
    growth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NegativeControls:
    """Slopes in T with a fixed step and with that of the rate, growth, and largest |z|."""

    fixed_slope: float
    scaled_slope: float
    beyond: tuple[EdgeGrowth, ...]
    delay_0_against_delay_0: float
    delay_0_against_delay_1: float


@dataclass(frozen=True, slots=True)
class NegativeCell:
    """The negative controls."""

    task: NegativeTask
    controls: NegativeControls
    kind: Literal["negative controls"] = "negative controls"


def _growths() -> Iterator[EdgeGrowth]:
    problem = FAMILIES["isotropic"](4)
    size = RunSize(workers=1, local_steps=4, rounds=500)
    for alpha, beta in ((1.0, 0.5), (0.5, 0.8), (1.5, 0.2)):
        for factor in (0.95, 1.05):
            progress = factor * exact_moments.edge(beta)
            step = 1 - (1 - progress / alpha) ** (1 / 4)
            which = variants(step, outer_step=alpha, momentum=beta)
            early, late = (
                float(run(problem, which, replace(size, rounds=rounds)).value[0, 0])
                for rounds in (500, 1000)
            )
            yield EdgeGrowth(alpha=alpha, beta=beta, factor=factor, growth=late / early)


def _slope(rounds: Array, which: Sequence[Variants]) -> float:
    """The exponent of T in A over the last three factors of 2, for variants by T."""
    problem = FAMILIES["isotropic"](4)
    assert isinstance(problem, Quadratic)
    values = [
        exact_moments.exact(
            problem, each, RunSize(workers=4, rounds=int(count), local_steps=4)
        ).gradient[0]
        for each, count in zip(which, rounds, strict=True)
    ]
    return float(np.polyfit(np.log(rounds[-4:]), np.log(np.array(values)[-4:]), 1)[0])


ControlTask = StalenessTask | TermsTask | RescueTask | NegativeTask
ControlCell = StalenessCell | TermsCell | RescueCell | NegativeCell


def plan(*, quick: bool) -> Iterator[ControlTask]:
    """All experiments of this layer."""
    yield StalenessTask(seeds=32 if quick else 256, rounds=256)
    yield TermsTask()
    for family in ("isotropic", "cosine") if quick else ("isotropic", "spread", "cosine", "hill"):
        for delay in (1, 0):
            yield RescueTask(family=family, delay=delay, seeds=6 if quick else 16, rounds=128)
    yield NegativeTask(seeds=150 if quick else 400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """The effect of penalty and clipping on a family, and the squared gradient at the start."""

    family: str
    delay: int
    first: float
    lines: tuple[RescueLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFindings:
    """Everything that the report says about single causes and negative controls."""

    staleness: tuple[StalenessExcess, ...]
    terms: tuple[TermPart, ...]
    rescue: tuple[Rescue, ...]
    controls: NegativeControls
    fixed_fails: bool
    edge_fails: bool
    delay_fails: bool
    staleness_significant: bool


def summary(cells: Sequence[ControlCell]) -> ControlFindings:
    """Everything that the report says about single causes and negative controls."""
    (controls,) = (cell.controls for cell in cells if isinstance(cell, NegativeCell))
    staleness = [line for cell in cells if isinstance(cell, StalenessCell) for line in cell.lines]
    terms = [line for cell in cells if isinstance(cell, TermsCell) for line in cell.lines]
    rescue = [
        Rescue(family=c.task.family, delay=c.task.delay, first=c.first, lines=c.lines)
        for c in cells
        if isinstance(c, RescueCell)
    ]
    return ControlFindings(
        staleness=tuple(staleness),
        terms=tuple(terms),
        rescue=tuple(rescue),
        controls=controls,
        fixed_fails=abs(controls.fixed_slope) < _GENTLE < abs(controls.scaled_slope),
        edge_fails=all(
            line.growth > 1 if line.factor > 1 else line.growth < 1 for line in controls.beyond
        ),
        delay_fails=controls.delay_0_against_delay_0
        < oracle.SCORE
        < controls.delay_0_against_delay_1,
        staleness_significant=all(
            line.excess > oracle.SCORE * line.error
            for line in staleness
            if line.family in rate_fits.EQUAL
        ),
    )
