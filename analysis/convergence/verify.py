"""Simulated runs of a setting beside its bound: what `co2analysis verify` prints."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from rich.console import Console
from scipy.stats import norm, t

from analysis.convergence import bound, clipping
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.bound_report import why_infeasible
from analysis.convergence.setting import Array, Setting, size_of, variants_of
from analysis.convergence.simulate import Cosine, Problem, Quadratic, Simulation
from co2sim.common.progress import Done
from co2sim.common.tables import print_table
from co2sim.common.validation import whole

_MARGIN = 3.0
"""Standard errors that a mean may be beyond the bound, if they are well known."""
_ROUND_OFF = 1e-9
_MOST_RUNS, _MOST_STEPS, _MOST_GRADIENTS = 10**6, 10**7, 10**10
"""Workers times seeds; rounds times local steps; both: minutes on one core."""


@cache
def margin(seeds: int) -> float:
    """Standard errors beside a mean of `seeds` runs: 3 for many, 4.5 for 8, by Student's t.

    Chance then exceeds the margin as rarely as 3 standard errors of a normal mean.
    """
    return float(t.ppf(norm.cdf(_MARGIN), seeds - 1)) if seeds > 1 else _MARGIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs of one problem: A with its standard error, and the bound.

    `residual` is the error eps of the momentum that the runs' clip made; without a clip it is None.
    """

    problem: str
    measured: float
    error: float
    seeds: int
    bound: Bound | Infeasible
    residual: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over bound; None without a bound, or where both are 0."""
        if isinstance(self.bound, Infeasible) or self.measured == self.bound.total == 0:
            return None
        return self.measured / self.bound.total if self.bound.total else math.inf

    @property
    def violated(self) -> bool:
        """Whether the mean is above the bound by more than its margin, or is no number."""
        if isinstance(self.bound, Infeasible):
            return False
        least = self.measured - margin(self.seeds) * self.error
        return not least <= self.bound.total * (1 + _ROUND_OFF)


def check_size(setting: Setting, seeds: int) -> None:
    """Raise OptionError for what would take hours, or too much memory."""
    whole("--seeds", seeds, 2, _MOST_RUNS)
    runs, steps = setting.workers * seeds, setting.rounds * setting.local_steps
    if setting.late is not None:
        runs *= setting.late.fragments
    whole("--workers times --seeds (times fragments)", runs, 2, _MOST_RUNS)
    whole("--rounds times --local-steps", steps, 1, _MOST_STEPS)
    whole("the number of gradients of all runs", runs * steps, 1, _MOST_GRADIENTS)


def compare(
    setting: Setting, *, seeds: int, phi: float | None = None, progress: Done | None = None
) -> list[Comparison]:
    """Run the setting on problems that have its constants; `phi` clips the momentum.

    With a clip the bound is that of Theorem 1, with the residual of the runs. `progress` gets how
    many rounds are done, and how many there are. Raises OptionError for what the bound or the
    simulator does not cover.
    """
    tell = progress or (lambda *_: None)
    chosen, size = list(problems(setting)), size_of(setting, seeds)
    which = variants_of([setting], clip=math.inf if phi is None else phi)
    compared = []
    for turn, (name, problem) in enumerate(chosen):
        simulation = Simulation(problem, which, size)
        for rounds in range(size.rounds):
            simulation.next_round()
            tell(turn * size.rounds + rounds + 1, len(chosen) * size.rounds)
        outcome = simulation.outcome()
        unit = setting.penalty / setting.local_steps
        residual = None if phi is None else unit * math.sqrt(outcome.residual.mean())
        compared.append(
            Comparison(
                problem=name,
                measured=float(outcome.gradient.mean()),
                error=float(outcome.gradient.std(ddof=1) / math.sqrt(seeds)),
                seeds=seeds,
                bound=bound.evaluate(setting)
                if residual is None
                else clipping.with_residual(setting, residual),
                residual=residual,
            )
        )
    return compared


@dataclass(frozen=True, slots=True)
class Diagonal:
    """A function of one coordinate, along the diagonal of `dimension` ones: each feels all."""

    inner: Problem
    dimension: int

    @property
    def start(self) -> Array:
        """That of the function, on the diagonal."""
        return self._spread(self.inner.start)

    @property
    def heterogeneous(self) -> bool:
        """Whether the f_i differ."""
        return self.inner.heterogeneous

    def value(self, point: Array) -> Array:
        """That of the function."""
        return self.inner.value(self._along(point))

    def gradient(self, point: Array) -> Array:
        """The gradient of f."""
        return self._spread(self.inner.gradient(self._along(point)))

    def gradients(self, points: Array) -> Array:
        """The gradient of each worker's f_i at its own point."""
        return self._spread(self.inner.gradients(self._along(points)))

    def _along(self, point: Array) -> Array:
        return np.asarray(point.sum(axis=-1, keepdims=True) / math.sqrt(self.dimension))

    def _spread(self, value: Array) -> Array:
        return np.repeat(value / math.sqrt(self.dimension), self.dimension, axis=-1)


def problems(setting: Setting) -> Iterator[tuple[str, Problem]]:
    """Functions with the smoothness, gap and heterogeneity of a setting.

    A quadratic, and a function that is not convex unless the setting is, of one coordinate, or
    along the diagonal of one for each fragment. Workers differ by a tilt, which is the same
    everywhere.
    """
    fragments = setting.late.fragments if setting.late else 1
    for name, problem in _of_one_coordinate(setting):
        yield name, Diagonal(problem, fragments) if fragments > 1 else problem


def _of_one_coordinate(setting: Setting) -> Iterator[tuple[str, Problem]]:
    smoothness, gap = setting.smoothness, setting.gap
    tilt = _tilts(setting.workers, math.sqrt(setting.heterogeneity))
    start = np.array([math.sqrt(2 * gap / smoothness)])
    curvature = np.full_like(tilt, smoothness)
    yield "quadratic", Quadratic(curvature, -tilt / smoothness, start)
    if not setting.convex:
        # (1 - cos 2x)/2 + x^2/10 from x = 2 on, at its scale in f and in x
        height = gap / ((1 - math.cos(4)) / 2 + 0.4) if gap else 1.0
        width = math.sqrt(2.2 * height / smoothness)
        yield (
            "not convex",
            Cosine(
                amplitude=np.full_like(tilt, height / 2),
                tilt=tilt,
                start=np.array([2 * width if gap else 0.0]),
                frequency=2 / width,
                curvature=0.2 * height / width**2,
            ),
        )


def _tilts(workers: int, size: float) -> Array:
    """Slopes of workers with mean 0 and this root mean square, [G, 1]; [1, 1] if all are equal."""
    if workers == 1 or not size:
        return np.zeros((1, 1))
    pairs = workers // 2
    signs = [1.0, -1.0] * pairs + [0.0] * (workers % 2)
    return size * math.sqrt(workers / (2 * pairs)) * np.array(signs)[:, None]


def violation(compared: Sequence[Comparison]) -> str:
    """A sentence about the runs that violate the bound; empty if none do."""
    wrong = [each for each in compared if each.violated and isinstance(each.bound, Bound)]
    if not wrong:
        return ""
    parts = ", ".join(
        f"{each.problem}: {each.measured:.6g} ± {each.error:.2g} is above {each.bound.total:.6g}"
        for each in wrong
        if isinstance(each.bound, Bound)
    )
    return f"the bound is violated: {parts}"


def to_dict(setting: Setting, compared: Sequence[Comparison]) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "inner_step": setting.inner_step,
        "load": bound.load(setting),
        "seeds": compared[0].seeds,
        "violated": bool(violation(compared)),
        "why_infeasible": _why_infeasible(setting, compared),
        "problems": [
            {
                "problem": each.problem,
                "measured": each.measured,
                "error": each.error,
                "bound": bound.plain(each.bound),
                "ratio": each.ratio,
                "clip_residual": each.residual,
            }
            for each in compared
        ],
    }


def _why_infeasible(setting: Setting, compared: Sequence[Comparison]) -> str | None:
    without = any(isinstance(each.bound, Infeasible) for each in compared)
    return why_infeasible(setting) if without else None


def print_comparison(out: Console, setting: Setting, compared: Sequence[Comparison]) -> None:
    """Measured beside bound as a table."""
    clipped = compared[0].residual is not None
    rows = [
        (
            each.problem,
            f"{each.measured:.6g}" if math.isfinite(each.measured) else "diverged",
            f"{each.error:.2g}" if math.isfinite(each.measured) else "-",
            f"{each.bound.total:.6g}" if isinstance(each.bound, Bound) else "infeasible",
            "-" if each.ratio is None else f"{each.ratio:.4f}",
            *([f"{each.residual:.6g}"] if clipped else []),
        )
        for each in compared
    ]
    columns = ("problem", "mean |grad f|^2", "standard error", "bound", "measured/bound")
    title = f"{compared[0].seeds} runs with gamma = {setting.inner_step:.6g}"
    print_table(out, title, (*columns, *(["residual of the clip"] if clipped else [])), rows)
    if words := _why_infeasible(setting, compared):
        out.print(words, highlight=False, markup=False)
