"""Rates: exact and simulated A with the steps of the rate form, over sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.convergence import exact_moments
from analysis.convergence.objectives.families import FAMILIES
from analysis.convergence.objectives.problems import Quadratic
from analysis.convergence.setting import RunSize, Variants, variants
from analysis.convergence.simulate import run

PAIRS = ((1.0, 0.0), (0.5, 0.5))
"""Outer steps and momenta, alpha = 1 - beta."""
EQUAL, UNEQUAL = ("isotropic", "spread"), ("two kinds",)
_NOISE = 1.0
_SIZES = (1, 2, 4, 8, 16, 32, 64)
_SMALL_WORK = 16_000.0
"""Of tasks that take no time to speak of."""
Sizes = tuple[int, int, int]
"""G, tau and T."""


@dataclass(frozen=True, slots=True)
class ExactRateTask:
    """To compute the exact A of all sizes of a family."""

    family: str

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return _SMALL_WORK

    def measure(self) -> "ExactRateCell":
        """Compute it."""
        return ExactRateCell(self, tuple(_exact_points(self.family)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRateTask:
    """To simulate A for one G and tau and several T."""

    family: str
    workers: int
    local_steps: int
    rounds: tuple[int, ...]
    seeds: int

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return sum(self.rounds) * self.local_steps

    def measure(self) -> "SimulatedRateCell":
        """Simulate every T."""
        return SimulatedRateCell(self, tuple(map(self._simulated, self.rounds)))

    def _simulated(self, rounds: int) -> tuple[tuple[float, ...], ...]:
        size = RunSize(
            workers=self.workers, rounds=rounds, local_steps=self.local_steps, seeds=self.seeds
        )
        seed = [rounds, self.local_steps, self.workers, *self.family.encode()]
        problem = _quadratic(self.family, self.workers)
        outcome = run(problem, rate_variants(size), size, seed=seed)
        return tuple(tuple(row) for row in outcome.gradient.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """The exact A of one size, for every pair of an outer step and a momentum."""

    workers: int
    local_steps: int
    rounds: int
    load: float
    exact: tuple[float, ...]

    @property
    def sizes(self) -> Sizes:
        """G, tau and T."""
        return self.workers, self.local_steps, self.rounds


@dataclass(frozen=True, slots=True)
class ExactRateCell:
    """All exact points of a family."""

    task: ExactRateTask
    points: tuple[RatePoint, ...]
    kind: Literal["exact rates"] = "exact rates"


@dataclass(frozen=True, slots=True)
class SimulatedRateCell:
    """The simulated A by T, pair of an outer step and a momentum, and seed."""

    task: SimulatedRateTask
    measured: tuple[tuple[tuple[float, ...], ...], ...]
    kind: Literal["simulated rates"] = "simulated rates"


RateTask = ExactRateTask | SimulatedRateTask
RateCell = ExactRateCell | SimulatedRateCell


def plan(*, quick: bool) -> Iterator[RateTask]:
    """The exact factorial of every family, and the cells of it that are also simulated."""
    for family in (*EQUAL, *UNEQUAL):
        yield ExactRateTask(family)
        if quick and family == "spread":
            continue
        for workers in (2, 8) if quick else (2, 4, 8, 16, 32, 64):
            for tau in (1, 4) if quick else (1, 2, 4, 8, 16):
                exponents = (8, 10, 12) if quick else (8, 10, 12, 14)
                most = 4096 if quick else 16384
                yield SimulatedRateTask(
                    family=family,
                    workers=workers,
                    local_steps=tau,
                    rounds=tuple(2**e for e in exponents if 2**e * tau <= most),
                    seeds=16 if quick else 32,
                )


def rate_variants(size: RunSize) -> Variants:
    """The steps of the rate form with theta = 1: eta = sqrt(G/(T tau)).

    Source: docs/theory.md, derivation, rate form.
    """
    eta = np.sqrt(size.workers / (size.rounds * size.local_steps))
    alpha, beta = (np.array(part) for part in zip(*PAIRS, strict=True))
    return variants(eta * (1 - beta) / alpha, outer_step=alpha, momentum=beta, noise=_NOISE)


def _quadratic(family: str, workers: int) -> Quadratic:
    problem = FAMILIES[family](workers)
    assert isinstance(problem, Quadratic)
    return problem


def _exact_points(family: str) -> Iterator[RatePoint]:
    for workers in _SIZES[1:]:
        problem = _quadratic(family, workers)
        for tau in _SIZES:
            for rounds in (2**e for e in range(8, 17)):
                size = RunSize(workers=workers, rounds=rounds, local_steps=tau)
                which = rate_variants(size)
                yield RatePoint(
                    workers=workers,
                    local_steps=tau,
                    rounds=rounds,
                    load=float(which.inner_step[0]) * problem.smoothness * tau,
                    exact=tuple(exact_moments.exact(problem, which, size).gradient.tolist()),
                )
