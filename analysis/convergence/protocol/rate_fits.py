"""What the cells about rates say: slopes by strata of gamma L tau, and the terms of the rate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import nnls

from analysis.convergence import exact_moments
from analysis.convergence.objectives.families import FAMILIES
from analysis.convergence.objectives.problems import Array, Quadratic
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
                    seeds=10 if quick else 32,
                )


def rate_variants(size: RunSize) -> Variants:
    """The steps of the rate form with theta = 1: eta = sqrt(G/(T tau)).

    Source: docs/theory.md, bound, rate form.
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


STRATA = (("small", 0.0, 0.1), ("middle", 0.1, 0.5), ("large", 0.5, 2.0))
"""Names and ranges of gamma L tau."""
FEATURES = ("1/sqrt(G T tau)", "1/T", "G/T", "G tau/T")
_RESAMPLES = 400
_TAIL = 0.025
_WIDTH = 3.0
"""Half the width of an interval, in standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StratumSlopes:
    """Exact exponents of G, tau and T in a stratum of gamma L tau."""

    family: str
    alpha: float
    beta: float
    stratum: str
    cells: int
    slopes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlopeAgreement:
    """Simulated exponents with their intervals, and the exact ones of the same cells."""

    family: str
    alpha: float
    beta: float
    stratum: str
    cells: int
    measured: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    exact: tuple[float, ...]
    agree: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RateFit:
    """Coefficients of the features with their intervals, and errors with and without G tau/T.

    `significant`: the interval of the coefficient of G tau/T is above 0.
    """

    family: str
    alpha: float
    beta: float
    cells: int
    coefficients: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    error: float
    error_without: float
    significant: bool
    heterogeneous: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RateFindings:
    """Everything that the report says about rates. `curves` are points of tau, T and A."""

    slopes: tuple[StratumSlopes, ...]
    agreement: tuple[SlopeAgreement, ...]
    fits: tuple[RateFit, ...]
    curves: dict[str, tuple[tuple[float, float, float], ...]]


def slopes(sizes: Array, values: Array) -> Array:
    """The exponents of G, tau and T in the best power law: [3] or [3, n] for values [cells, n].

    `sizes` is [cells, 3].
    """
    design = np.concatenate([np.ones((len(sizes), 1)), np.log(sizes)], axis=1)
    return np.asarray(np.linalg.lstsq(design, np.log(values), rcond=None)[0][1:])


def fit(sizes: Array, values: Array, *, last: bool = True) -> tuple[Array, float]:
    """Nonnegative coefficients of the features, and the root mean square of relative errors.

    `last` = False leaves G tau/T out.
    """
    workers, tau, rounds = sizes.T
    columns = [1 / np.sqrt(workers * tau * rounds), 1 / rounds, workers / rounds]
    columns += [workers * tau / rounds] if last else []
    design = np.stack(columns, axis=1) / values[:, None]
    coefficients, rest = nnls(design, np.ones(len(values)))
    return np.asarray(coefficients), float(rest) / np.sqrt(len(values))


def summary(cells: Sequence[RateCell]) -> RateFindings:
    """Everything that the report says about rates."""
    exact = {cell.task.family: cell.points for cell in cells if isinstance(cell, ExactRateCell)}
    simulated = [cell for cell in cells if isinstance(cell, SimulatedRateCell)]
    return RateFindings(
        slopes=tuple(line for family in exact for line in _exact_slopes(family, exact[family])),
        agreement=tuple(
            line
            for family in exact
            for line in _agreement(family, exact[family], _by_sizes(simulated, family))
        ),
        fits=tuple(
            _fit(family, exact[family], pair) for family in exact for pair in range(len(PAIRS))
        ),
        curves={family: tuple(_curve(points)) for family, points in exact.items()},
    )


def _sizes(points: Sequence[RatePoint]) -> Array:
    return np.array([point.sizes for point in points], dtype=float)


def _exact_slopes(family: str, points: Sequence[RatePoint]) -> Iterator[StratumSlopes]:
    for place, (alpha, beta) in enumerate(PAIRS):
        for name, low, high in STRATA:
            chosen = [p for p in points if low <= p.load < high and np.isfinite(p.exact[place])]
            exponents = slopes(_sizes(chosen), np.array([p.exact[place] for p in chosen]))
            yield StratumSlopes(
                family=family,
                alpha=alpha,
                beta=beta,
                stratum=name,
                cells=len(chosen),
                slopes=tuple(exponents.tolist()),
            )


def _by_sizes(cells: Sequence[SimulatedRateCell], family: str) -> dict[Sizes, Array]:
    """The simulated A of a family by G, tau and T: [pairs, seeds]."""
    return {
        (cell.task.workers, cell.task.local_steps, rounds): np.array(values)
        for cell in cells
        if cell.task.family == family
        for rounds, values in zip(cell.task.rounds, cell.measured, strict=True)
    }


def _agreement(
    family: str, points: Sequence[RatePoint], simulated: Mapping[Sizes, Array]
) -> Iterator[SlopeAgreement]:
    """Slopes of simulated and of exact values on the same cells of the small stratum.

    The interval follows from the spread over seeds, cell by cell. It is three standard errors wide
    on both sides: 95 % for all slopes of the report together.
    """
    name, low, high = STRATA[0]
    chosen = [point for point in points if low <= point.load < high and point.sizes in simulated]
    if not chosen:
        return
    for place, (alpha, beta) in enumerate(PAIRS):
        sizes = _sizes(chosen)
        expected = slopes(sizes, np.array([point.exact[place] for point in chosen]))
        each = [simulated[point.sizes][place] for point in chosen]
        measured = slopes(sizes, np.array([seeds.mean() for seeds in each]))
        spread = [seeds.std(ddof=1) / seeds.mean() / np.sqrt(len(seeds)) for seeds in each]
        design = np.concatenate([np.ones((len(sizes), 1)), np.log(sizes)], axis=1)
        error = np.sqrt((np.linalg.pinv(design)[1:] ** 2) @ np.array(spread) ** 2)
        low_end, high_end = measured - _WIDTH * error, measured + _WIDTH * error
        yield SlopeAgreement(
            family=family,
            alpha=alpha,
            beta=beta,
            stratum=name,
            cells=len(chosen),
            measured=tuple(measured.tolist()),
            low=tuple(low_end.tolist()),
            high=tuple(high_end.tolist()),
            exact=tuple(expected.tolist()),
            agree=bool(((low_end <= expected) & (expected <= high_end)).all()),
        )


def _fit(family: str, points: Sequence[RatePoint], place: int) -> RateFit:
    chosen = [point for point in points if point.load < STRATA[1][2]]
    sizes, values = _sizes(chosen), np.array([point.exact[place] for point in chosen])
    coefficients, error = fit(sizes, values)
    _, without = fit(sizes, values, last=False)
    rng = np.random.default_rng(2)
    draws = rng.integers(len(values), size=(_RESAMPLES, len(values)))
    boot = np.array([fit(sizes[draw], values[draw])[0] for draw in draws])
    low, high = np.quantile(boot, [_TAIL, 1 - _TAIL], axis=0)
    return RateFit(
        family=family,
        alpha=PAIRS[place][0],
        beta=PAIRS[place][1],
        cells=len(chosen),
        coefficients=tuple(coefficients.tolist()),
        low=tuple(low.tolist()),
        high=tuple(high.tolist()),
        error=error,
        error_without=without,
        significant=bool(low[-1] > 0),
        heterogeneous=family in UNEQUAL,
    )


def _curve(points: Sequence[RatePoint]) -> Iterator[tuple[float, float, float]]:
    """A against T at G = 8 for some tau, without momentum: tau, T, A."""
    for p in points:
        if p.workers == 8 and p.local_steps in {1, 4, 16, 64} and p.load < 1:  # noqa: PLR2004 - what is drawn
            yield p.local_steps, p.rounds, p.exact[0]
