"""The bounds with clipping against exact runs, and wrong bounds that must be noticed.

Functions, sizes and settings are drawn at random, then moved from those that came closest to a
bound, right or wrong (hill climbing). Of the proposition about a fixed clip there are long runs.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from analysis.convergence import bound, clipping
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.objectives.families import same
from analysis.convergence.protocol import clip_runs
from analysis.convergence.protocol.clip_runs import Form, Genes, Jumps, Measured
from analysis.convergence.setting import RunSize, Setting, variants
from analysis.convergence.simulate import run

THEOREMS = ("residual", "running residual", "clipped noise", "clipped gradients")
"""The bounds that must hold: of any clip by its residual, or by its running mean, and a priori."""
MUTATIONS = (
    "residual beside the drift, half",
    "its square, half",
    "residual in the gap, half",
    "residual in the gap, none",
    "omega, half",
    "omega^2, half",
    "N, half",
    "running residual beside the drift, half",
    "running residual in the gap, half",
    "running residual in the gap, none",
    "bias, half",
    "kick of the noise, none",
    "ramp of the bias, none",
    "square of the noise, 1",
    "N', half",
    "kappa, half",
    "omega of clipped gradients, D half",
)
"""Constants that are wrong on purpose."""
UNNOTICED = (
    "kick of the noise, none",
    "ramp of the bias, none",
    "square of the noise, 1",
)
"""Constants of second order that may not be needed: no run is known that they would miss."""
QUICK = (
    "residual beside the drift, half",
    "its square, half",
    "running residual beside the drift, half",
    "running residual in the gap, none",
    "bias, half",
)
"""Wrong constants that even the quick protocol has to notice."""
_ROUND_OFF = 1e-9
_CLIMB = 4
"""Calls for one bound: the first is at random, the others are near the best so far."""


def totals(setting: Setting, found: Measured, at: int) -> Iterator[tuple[str, float]]:
    """Every bound of a run, right or wrong, that there is."""
    eps, running = float(found.residual[at]), float(found.running[at])
    parts = clipping.alone(setting)
    one = clipping.constants(setting)
    other = clipping.constants(setting, float(found.decay[at]))

    def total(used: clipping.Constants, residual: float) -> float:
        return _total(clipping.by_residual(setting, parts, used, residual))

    yield "residual", total(one, eps)
    yield "running residual", total(other, running)
    for name, factor in (("half", 0.5), ("none", 0.0)):
        yield f"residual in the gap, {name}", total(_part(one, residual=factor), eps)
        yield f"running residual in the gap, {name}", total(_part(other, residual=factor), running)
    yield "residual beside the drift, half", total(_part(one, last=0.5), eps)
    yield "its square, half", total(_part(one, last=math.sqrt(0.5)), eps)
    yield "running residual beside the drift, half", total(_part(other, last=0.5), running)
    yield "omega, half", total(_part(one, by_gradients=0.5), eps)
    yield "omega^2, half", total(_part(one, by_gradients=math.sqrt(0.5)), eps)
    yield "N, half", total(_part(one, by_noise=0.5), eps)
    if setting.late is None and setting.most_penalty is None:
        phi = float(found.clip[at])
        if setting.noise:
            yield from _noisy(setting, parts, float(found.each[at]), phi)
        else:
            yield from _quiet(setting, parts, float(found.mean[at]), phi)


def _part(used: clipping.Constants, **factors: float) -> clipping.Constants:
    return replace(used, **{name: f * getattr(used, name) for name, f in factors.items()})


def _total(found: Bound | Infeasible) -> float:
    return found.total if isinstance(found, Bound) else math.nan


def _noisy(
    setting: Setting, parts: Bound, largest: float, phi: float
) -> Iterator[tuple[str, float]]:
    """Theorem 2 where it holds."""
    if not math.isfinite(phi) or clipping.threshold(setting, phi) <= largest:
        return
    used = clipping.noise_constants(setting, largest, phi)
    for name, wrong in (
        ("clipped noise", used),
        ("bias, half", replace(used, bias=used.bias / 2)),
        ("kick of the noise, none", replace(used, kick=0.0)),
        ("ramp of the bias, none", replace(used, ramp=0.0)),
        ("square of the noise, 1", replace(used, square=1.0)),
        ("N', half", replace(used, at_end=used.at_end / 2, square=math.inf)),
    ):
        yield name, _total(clipping.by_noise(setting, parts, wrong))


def _quiet(
    setting: Setting, parts: Bound, largest: float, phi: float
) -> Iterator[tuple[str, float]]:
    """Theorem 3."""
    if not math.isfinite(phi):
        return
    kappa = clipping.slowdown(setting, largest, phi)
    radius = clipping.scaled_radius(setting, kappa)
    yield "clipped gradients", _total(clipping.by_slowdown(setting, parts, kappa, radius))
    half = max(1.0, kappa / 2)
    yield "kappa, half", _total(clipping.by_slowdown(setting, parts, half, radius))
    weights = bound.gap_constants(replace(setting, local_steps=1))[0] * setting.local_steps
    radius = weights + (radius - weights) / 2
    yield (
        "omega of clipped gradients, D half",
        _total(clipping.by_slowdown(setting, parts, kappa, radius)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTask:
    """To draw `calls` problems with 64 settings each, the later ones near the best of before."""

    seed: int
    calls: int
    noisy: bool

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return 400.0 * self.calls

    def measure(self) -> "ClipCell":
        """Compare every bound with every run."""
        rng = np.random.default_rng([self.seed, self.noisy])
        tally = _Tally()
        best: dict[str, tuple[float, Form, Genes]] = {}
        names = (*THEOREMS, *MUTATIONS)
        for call in range(self.calls):
            target = names[call // _CLIMB % len(names)]
            if call % _CLIMB and target in best:
                form = clip_runs.moved_form(best[target][1], rng)
                genes = clip_runs.moved_genes(best[target][2], rng)
            else:
                form = clip_runs.random_form(rng, noisy=self.noisy)
                genes = clip_runs.random_genes(rng, form)
            for name, (ratio, at) in tally.add(clip_runs.measured(form, genes)).items():
                if ratio > best.get(name, (0.0,))[0]:
                    best[name] = (ratio, form, clip_runs.chosen(genes, at))
        return ClipCell(
            self,
            clipped=tally.clipped,
            unclipped=tally.unclipped,
            compared=dict(tally.compared),
            violations=dict(tally.violations),
            largest=tally.largest,
        )


@dataclass(frozen=True, slots=True)
class ClipCell:
    """What was found, by theorem and by mutation: comparisons, violations, largest ratio.

    `clipped` and `unclipped` are feasible configurations; measured means are exact.
    """

    task: ClipTask
    clipped: int
    unclipped: int
    compared: dict[str, int]
    violations: dict[str, int]
    largest: dict[str, float]
    kind: Literal["clip"] = "clip"


class _Tally:
    """Counts of comparisons and violations."""

    def __init__(self) -> None:
        self.clipped = self.unclipped = 0
        self.compared: Counter[str] = Counter()
        self.violations: Counter[str] = Counter()
        self.largest: dict[str, float] = {}

    def add(self, found: Measured) -> dict[str, tuple[float, int]]:
        """Count runs; the largest ratio of each bound, and whose it is."""
        closest: dict[str, tuple[float, int]] = {}
        for at, setting in enumerate(found.settings):
            gradient = float(found.gradient[at])
            if not math.isfinite(gradient):
                gradient = math.inf
            for name, total in totals(setting, found, at):
                if math.isnan(total) or not total:
                    continue
                ratio = gradient / total
                if name == "residual":
                    self.clipped += bool(found.residual[at] > 0)
                    self.unclipped += bool(found.residual[at] == 0)
                self.compared[name] += 1
                self.violations[name] += ratio > 1 + _ROUND_OFF
                self.largest[name] = max(self.largest.get(name, 0.0), ratio)
                if ratio > closest.get(name, (0.0,))[0]:
                    closest[name] = (ratio, at)
        return closest


_REACH = 12.0
"""Step size times rounds of the long runs: what is left of the start does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorTask:
    """Long runs with a fixed clip, on x^2/2 with the noise of the proposition.

    They begin where it says that they stay, at a gradient of 1. `clips` are phi over sigma.
    """

    workers: int
    local_steps: int
    momentum: float
    clips: tuple[float, ...]
    step: float
    seeds: int

    @property
    def work(self) -> float:
        """About how many local steps it takes; each counts for a simulated one."""
        return _REACH / self.step

    def measure(self) -> "FloorCell":
        """Run them."""
        clips, tau, workers = np.array(self.clips), self.local_steps, self.workers
        sigma = 4 * workers * clips
        phi = clips * sigma
        problem = same(1.0, start=1.0)
        sampler = Jumps(problem, sigma**2, 2 * workers * phi)
        rounds = math.ceil(_REACH / (self.step * tau))
        which = variants(
            self.step * np.ones_like(phi),
            outer_step=1 - self.momentum,
            momentum=self.momentum,
            clip=phi,
            noise=sigma**2,
        )
        size = RunSize(workers=workers, rounds=rounds, local_steps=tau, seeds=self.seeds)
        found = run(problem, which, size, sampler=sampler, seed=[workers, tau])
        lines = []
        for at, clip in enumerate(self.clips):
            setting = Setting(
                smoothness=1.0,
                noise=float(sigma[at] ** 2),
                gap=float(problem.value(problem.start)),
                workers=workers,
                rounds=rounds,
                local_steps=tau,
                inner_step=self.step,
                outer_step=1 - self.momentum,
                momentum=self.momentum,
                convex=True,
            )
            gradient = float(found.gradient[at].mean())
            error = float(found.gradient[at].std(ddof=1)) / math.sqrt(self.seeds)
            lines.append(
                _floor_line(setting, clip, float(phi[at]), sampler.largest, gradient, error)
            )
        return FloorCell(self, tuple(lines))


def _floor_line(
    setting: Setting, clip: float, phi: float, largest: float, gradient: float, error: float
) -> "FloorLine":
    parts, lowest = clipping.alone(setting), clipping.floor(setting, phi)
    whole = half = None
    if clipping.threshold(setting, phi) > largest:
        used = clipping.noise_constants(setting, largest, phi)
        whole = (gradient - 3 * error) / _total(clipping.by_noise(setting, parts, used))
        wrong = replace(used, bias=used.bias / 2)
        half = (gradient - 3 * error) / _total(clipping.by_noise(setting, parts, wrong))
    return FloorLine(
        workers=setting.workers,
        tau=setting.local_steps,
        beta=setting.momentum,
        clip=clip,
        root=math.sqrt(gradient),
        floor=math.sqrt(lowest),
        ratio=whole,
        with_half=half,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorLine:
    """The root of A over sigma^2/(4 G phi), what the proposition says of it, and A over the bound.

    `clip` is phi/sigma; `ratio` and `with_half`, of the bound with half of its bias, are less three
    standard errors, and None where the bound does not hold.
    """

    workers: int
    tau: int
    beta: float
    clip: float
    root: float
    floor: float
    ratio: float | None
    with_half: float | None


@dataclass(frozen=True, slots=True)
class FloorCell:
    """What a fixed clip leaves, by clip."""

    task: FloorTask
    lines: tuple[FloorLine, ...]
    kind: Literal["floor"] = "floor"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippingFindings:
    """Everything that the report says about clipping; names are those of `ClipCell`."""

    clipped: int
    unclipped: int
    compared: dict[str, int]
    violations: dict[str, int]
    largest: dict[str, float]
    floors: tuple[FloorLine, ...]

    @property
    def caught(self) -> tuple[str, ...]:
        """The wrong constants that were noticed, by the exact runs or by the long ones."""
        long = any((line.with_half or 0) > 1 for line in self.floors)
        return tuple(
            name
            for name in MUTATIONS
            if self.violations.get(name, 0) or (long and name == "bias, half")
        )


def summary(cells: Sequence["ClippingCell"]) -> ClippingFindings:
    """Everything that the report says about clipping."""
    exact = [cell for cell in cells if isinstance(cell, ClipCell)]
    names = (*THEOREMS, *MUTATIONS)
    return ClippingFindings(
        clipped=sum(cell.clipped for cell in exact),
        unclipped=sum(cell.unclipped for cell in exact),
        compared={n: sum(c.compared.get(n, 0) for c in exact) for n in names},
        violations={n: sum(c.violations.get(n, 0) for c in exact) for n in names},
        largest={n: max((c.largest.get(n, 0.0) for c in exact), default=0.0) for n in names},
        floors=tuple(line for c in cells if isinstance(c, FloorCell) for line in c.lines),
    )


ClippingTask = ClipTask | FloorTask
ClippingCell = ClipCell | FloorCell


def plan(*, quick: bool) -> Iterator[ClippingTask]:
    """Exact runs, and the long ones."""
    for noisy in (False, True):
        for seed in range(1 if quick else 10):
            yield ClipTask(seed=seed, calls=36 if quick else 270, noisy=noisy)
    kinds = ((1, 1, 0.0), (4, 1, 0.0), (1, 4, 0.0), (2, 4, 0.0), (1, 1, 0.5), (1, 1, 0.9))
    for workers, tau, beta in kinds[:1] if quick else kinds:
        yield FloorTask(
            workers=workers,
            local_steps=tau,
            momentum=beta,
            clips=(2.0,) if quick else (1.0, 2.0, 4.0),
            step=4e-3 if quick else 1e-3,
            seeds=16 if quick else 64,
        )
