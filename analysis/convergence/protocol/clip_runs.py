"""Clipped runs whose means are exact: noise has two points, and every path of it is run."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from analysis.convergence import bound
from analysis.convergence.objectives.pieces import Pieces
from analysis.convergence.objectives.problems import Array, Problem
from analysis.convergence.setting import Late, RunSize, Setting, variants
from analysis.convergence.simulate import run

_MOST_PATHS = 9
"""Draws of noise in a run: 2^9 paths."""
_TOGETHER = 64
"""Settings that are run side by side."""


@dataclass(frozen=True, slots=True)
class Form:
    """One problem, size and noise: `share` is how often the noise is up; 0 is no noise."""

    problem: Pieces
    size: RunSize
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Genes:
    """What differs between runs side by side, [C] each; `clip` and `step` are relative.

    `clip` is log phi over what an unclipped momentum would reach by the first gradient and one
    sigma, `step` a share of the largest feasible inner step, `noise` sigma.
    """

    outer: Array
    momentum: Array
    penalty: Array
    clip: Array
    step: Array
    noise: Array
    decay: Array
    aware: NDArray[np.bool_]


@dataclass
class Paths:
    """Two-point noise in one direction, all its paths; keeps the largest gradients of a run."""

    problem: Pieces
    bits: NDArray[np.bool_]
    share: float
    taken: int = 0
    each: Array | None = None
    mean: Array | None = None

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """The next steps: [steps, paths, G, d]."""
        del rng
        at = np.arange(self.taken, self.taken + shape[0]) % max(1, len(self.bits))
        self.taken += shape[0]
        direction = self.problem.turn[0] if len(self.problem.start) == 1 else np.array([0.6, 0.8])
        if not self.share:
            return np.zeros((*shape, len(direction)))
        up = np.sqrt((1 - self.share) / self.share)
        return np.asarray(np.where(self.bits[at], up, -1 / up)[..., None] * direction)

    def gradients(
        self, points: Array, drawn: NDArray[np.float64], deviation: Array
    ) -> tuple[Array, None]:
        """The exact gradients plus noise."""
        exact = self.problem.gradients(points)
        largest = np.abs(exact).max(axis=(1, 2, 3))
        means = np.abs(exact.mean(axis=2)).max(axis=(1, 2))
        self.each = largest if self.each is None else np.fmax(self.each, largest)
        self.mean = means if self.mean is None else np.fmax(self.mean, means)
        noisy: Array = exact + deviation * drawn
        return noisy, None


@dataclass
class Jumps:
    """Noise that is seldom up, by another jump for every variant; keeps the largest gradient.

    With sigma^2 = `noise` it is up by `jump`, else down by noise/jump.
    """

    problem: Problem
    noise: Array
    jump: Array
    largest: float = 0.0

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Uniform numbers."""
        return rng.random((*shape, 1))

    def gradients(
        self, points: Array, drawn: NDArray[np.float64], deviation: Array
    ) -> tuple[Array, None]:
        """The exact gradients plus noise; the deviation is in the jumps."""
        del deviation
        exact = self.problem.gradients(points)
        self.largest = max(self.largest, float(np.abs(exact).max()))
        down = (self.noise / self.jump)[:, None, None, None]
        jump = self.jump[:, None, None, None]
        noisy: Array = exact + np.where(drawn < down / (down + jump), jump, -down)
        return noisy, None


def random_form(rng: np.random.Generator, *, noisy: bool) -> Form:
    """A problem and a size at random."""
    tau = int(rng.choice([1, 1, 2, 3, 4, 8] if not noisy else [1, 1, 2, 3, 4]))
    workers = int(rng.choice([1, 2])) if not noisy or tau < 3 else 1  # noqa: PLR2004 - paths
    most = _MOST_PATHS // (tau * workers)
    rounds = int(rng.integers(2, most + 1)) if noisy else int(rng.choice([2, 3, 6, 20, 60]))
    late = int(rng.integers(1, tau + 1)) if rng.random() < 0.3 else None  # noqa: PLR2004
    size = RunSize(
        workers=workers,
        rounds=rounds,
        local_steps=tau,
        seeds=2 ** (rounds * tau * workers) if noisy else 1,
        delay=int(rng.choice([0, 1, 1, 2, 3])),
        late_steps=late,
    )
    dimension, unlike = int(rng.choice([1, 1, 2])), workers > 1 and rng.random() < 0.5  # noqa: PLR2004
    pieces = int(rng.choice([1, 3, 5]))
    slopes = rng.uniform(-1, 1, (workers if unlike else 1, dimension, pieces + 1))
    slopes = np.repeat(slopes[:1], len(slopes), axis=0) if noisy else slopes
    tilt = rng.normal(size=slopes.shape[:2]) * (rng.choice([0.0, 0.3]) if unlike else 0.0)
    angle = rng.uniform(0, np.pi) if dimension > 1 else 0.0
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    problem = Pieces(
        breaks=np.sort(rng.normal(size=(dimension, pieces)), axis=1),
        slopes=slopes if rng.random() < 0.7 else np.ones_like(slopes),  # noqa: PLR2004
        tilt=tilt - tilt.mean(axis=0),
        offset=rng.normal(size=dimension),
        turn=turn[:dimension, :dimension],
        start=rng.normal(size=dimension) * float(np.exp(rng.uniform(-1, 3))),
    )
    share = float(rng.choice([0.5, 0.2, 0.05, 0.002])) if noisy else 0.0
    if noisy and rng.random() < 0.2:  # noqa: PLR2004 - at a minimum noise and the gap are all
        zero = np.zeros_like(problem.offset)
        problem = replace(problem, offset=zero, start=zero, breaks=0 * problem.breaks)
    return Form(_bounded(problem), size, share)


def _bounded(problem: Pieces) -> Pieces:
    """With the outer slopes above 0, so that there is a minimum."""
    slopes = np.clip(problem.slopes, -1, 1)
    slopes[:, :, [0, -1]] = np.maximum(np.abs(slopes[:, :, [0, -1]]), 1e-3)
    return replace(problem, slopes=slopes, breaks=np.sort(problem.breaks, axis=1))


def moved_form(form: Form, rng: np.random.Generator) -> Form:
    """The same with a problem nearby."""
    old, width = form.problem, float(np.exp(rng.uniform(-6, -1)))
    problem = replace(
        old,
        breaks=old.breaks + width * rng.normal(size=old.breaks.shape),
        slopes=old.slopes + width * rng.normal(size=(1, *old.slopes.shape[1:])),
        offset=old.offset + width * rng.normal(size=old.offset.shape),
        start=old.start * (1 + width * rng.normal(size=old.start.shape)),
    )
    if form.share:
        form = replace(form, share=float(np.clip(form.share * np.exp(width), 0.002, 0.5)))
    return replace(form, problem=_bounded(problem))


def random_genes(rng: np.random.Generator, form: Form) -> Genes:
    """Settings at random, of which some lie beyond the condition of the theorem."""
    count = _TOGETHER
    edges = rng.choice([0.02, 0.3, 0.9, 0.99, 0.99999, 1.2, 1.35], count)
    late = form.size.late_steps is not None or form.size.delay > 0  # the rule needs a delay
    return Genes(
        outer=np.exp(rng.uniform(-4, 1.2, count) + rng.choice([0, 0, 0, 5, -4], count)),
        momentum=rng.choice([0.0, 0.0, 0.5, 0.8, 0.95], count),
        penalty=rng.choice([1.0, 1.0, 2.0], count),
        clip=np.where(rng.random(count) < 0.65, rng.uniform(-6, 0.5, count), np.inf),  # noqa: PLR2004
        step=edges,
        noise=np.exp(rng.uniform(-4, 3, count)) * (form.share > 0),
        decay=rng.choice([0.3, 0.7, 0.95], count),
        aware=(rng.random(count) < 0.15) & late,  # noqa: PLR2004
    )


def moved_genes(one: Genes, rng: np.random.Generator) -> Genes:
    """Settings near the first of `one`, which is among them."""
    parts = {f.name: np.repeat(getattr(one, f.name)[:1], _TOGETHER) for f in fields(Genes)}
    width = np.exp(rng.uniform(-6, 0, _TOGETHER)) * (np.arange(_TOGETHER) > 0)

    def kick() -> Array:
        return np.asarray(width * rng.normal(size=_TOGETHER))

    parts["outer"] = parts["outer"] * np.exp(kick())
    parts["momentum"] = np.clip(parts["momentum"] + kick(), 0, 0.95)
    parts["clip"] = parts["clip"] + kick()
    parts["step"] = np.clip(parts["step"] * np.exp(kick()), 1e-3, 3)
    parts["noise"] = parts["noise"] * np.exp(kick())
    return Genes(**parts)


@dataclass(frozen=True, slots=True)
class Measured:
    """Runs, [C]: their settings, A, both residuals, and the largest gradients."""

    settings: list[Setting]
    clip: Array
    gradient: Array
    residual: Array
    running: Array
    decay: Array
    each: Array
    mean: Array


def measured(form: Form, genes: Genes) -> Measured:
    """Run all settings of a form, exactly."""
    settings = list(_settings(form, genes))
    size, problem = form.size, form.problem
    step = np.array([setting.inner_step for setting in settings])
    first = np.abs(problem.gradient(problem.start)).max() + genes.noise
    unit = np.fmax(first, 1e-9) * size.local_steps / (1 - genes.momentum)
    which = variants(
        step,
        outer_step=genes.outer,
        momentum=genes.momentum,
        penalty=np.where(genes.aware, 1.0, genes.penalty),
        clip=unit / genes.penalty * np.exp(genes.clip),
        noise=genes.noise**2,
        decay=genes.decay,
        gap_aware=genes.aware,
    )
    draws = size.rounds * size.local_steps * size.workers
    bits = (np.arange(size.seeds)[:, None] >> np.arange(draws)) & 1
    weight = np.where(bits, form.share, 1 - form.share).prod(axis=1) if form.share else np.ones(1)
    shape = (size.seeds, size.rounds * size.local_steps, size.workers)
    paths = Paths(problem, bits.reshape(shape).swapaxes(0, 1) == 1, form.share)
    found = run(problem, which, size, sampler=paths)
    spread = found.spread if problem.most_spread is None else problem.most_spread + 0 * step
    assert paths.each is not None
    assert paths.mean is not None
    scale = np.where(genes.aware, 1.0, genes.penalty) / size.local_steps
    return Measured(
        [replace(s, heterogeneity=float(z)) for s, z in zip(settings, spread, strict=True)],
        which.clip,
        found.gradient @ weight,
        scale * np.sqrt(found.residual @ weight),
        scale * np.sqrt(found.running @ weight),
        genes.decay,
        paths.each,
        paths.mean,
    )


def _settings(form: Form, genes: Genes) -> Iterator[Setting]:
    problem, size = form.problem, form.size
    late = None if size.late_steps is None else Late(steps=size.late_steps)
    gap = max(0.0, float(problem.value(problem.start)))
    for at in range(len(genes.outer)):
        aware, beta = bool(genes.aware[at]), float(genes.momentum[at])
        setting = Setting(
            smoothness=problem.smoothness,
            noise=float(genes.noise[at] ** 2),
            gap=gap if gap > 1e-12 else 0.0,  # noqa: PLR2004 - round-off
            workers=size.workers,
            rounds=size.rounds,
            local_steps=size.local_steps,
            inner_step=1.0,
            outer_step=float(genes.outer[at]),
            momentum=beta,
            penalty=1.0 if aware else float(genes.penalty[at]),
            most_penalty=1 + 1 / (1 - beta) if aware else None,
            delay=size.delay,
            late=late,
            convex=problem.convex,
        )
        edge = float(genes.step[at]) * bound.largest_inner_step(setting)
        yield replace(setting, inner_step=edge)


def chosen(genes: Genes, at: int) -> Genes:
    """The settings of one run, alone."""
    return Genes(**{f.name: getattr(genes, f.name)[at : at + 1] for f in fields(Genes)})
