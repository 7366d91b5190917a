"""The bounds with clipping against exact runs, and wrong bounds that must be noticed.

Runs are exact: noise has two points, and every path of it is run. Functions, sizes and settings are
drawn at random, then moved from those that came closest to a bound, right or wrong (hill climbing).
Of the proposition about a fixed clip there are long runs.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from analysis.convergence import bound, clipping
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.setting import Array, Late, RunSize, Setting, size_of, variants_of
from theory.cells import Cells, Check, table
from theory.problems import Known, Pieces, run, same

C = TypeVar("C", clipping.Constants, clipping.NoiseConstants)

THEOREMS = ("residual", "running residual", "clipped noise", "clipped gradients")
"""The bounds that must hold: of any clip by its residual, or by its running mean, and a priori."""
_RESIDUAL: dict[str, dict[str, float]] = {
    "residual beside the drift, half": {"last": 0.5},
    "its square, half": {"last": math.sqrt(0.5)},
    "residual in the gap, half": {"residual": 0.5},
    "residual in the gap, none": {"residual": 0.0},
    "omega, half": {"by_gradients": 0.5},
    "omega^2, half": {"by_gradients": math.sqrt(0.5)},
    "N, half": {"by_noise": 0.5},
    "running residual beside the drift, half": {"last": 0.5},
    "running residual in the gap, half": {"residual": 0.5},
    "running residual in the gap, none": {"residual": 0.0},
}
_NOISE: dict[str, dict[str, float]] = {
    "bias, half": {"bias": 0.5},
    "kick of the noise, none": {"kick": 0.0},
    "ramp of the bias, none": {"ramp": 0.0},
    "square of the noise, 1": {"square": 0.25},
    "N', half": {"at_end": 0.5, "square": math.inf},
}
MUTATIONS = (*_RESIDUAL, *_NOISE, "kappa, half", "omega of clipped gradients, D half")
"""Constants that are wrong on purpose, and what they are multiplied by."""
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
_LEAST, _LEAST_QUICK = 100_000, 1_000
"""Runs that clip, and as many that do not, on which the bounds have to hold."""
_ROUND_OFF = 1e-9
_CLIMB = 4
"""Calls for one bound: the first is at random, the others are near the best so far."""


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
        steps = np.arange(self.taken, self.taken + shape[0]) % max(1, len(self.bits))
        self.taken += shape[0]
        direction = self.problem.turn[0] if len(self.problem.start) == 1 else np.array([0.6, 0.8])
        if not self.share:
            return np.zeros((*shape, len(direction)))
        up = np.sqrt((1 - self.share) / self.share)
        return np.asarray(np.where(self.bits[steps], up, -1 / up)[..., None] * direction)

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

    problem: Known
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
    workers = int(rng.choice([1, 2])) if not noisy or tau < 3 else 1
    most = _MOST_PATHS // (tau * workers)
    rounds = int(rng.integers(2, most + 1)) if noisy else int(rng.choice([2, 3, 6, 20, 60]))
    late = int(rng.integers(1, tau + 1)) if rng.random() < 0.3 else None
    size = RunSize(
        workers=workers,
        rounds=rounds,
        local_steps=tau,
        seeds=2 ** (rounds * tau * workers) if noisy else 1,
        delay=int(rng.choice([0, 1, 1, 2, 3])),
        late_steps=late,
    )
    dimension, unlike = int(rng.choice([1, 1, 2])), workers > 1 and rng.random() < 0.5
    pieces = int(rng.choice([1, 3, 5]))
    slopes = rng.uniform(-1, 1, (workers if unlike else 1, dimension, pieces + 1))
    slopes = np.repeat(slopes[:1], len(slopes), axis=0) if noisy else slopes
    tilt = rng.normal(size=slopes.shape[:2]) * (rng.choice([0.0, 0.3]) if unlike else 0.0)
    angle = rng.uniform(0, np.pi) if dimension > 1 else 0.0
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    problem = Pieces(
        breaks=np.sort(rng.normal(size=(dimension, pieces)), axis=1),
        slopes=slopes if rng.random() < 0.7 else np.ones_like(slopes),
        tilt=tilt - tilt.mean(axis=0),
        offset=rng.normal(size=dimension),
        turn=turn[:dimension, :dimension],
        start=rng.normal(size=dimension) * float(np.exp(rng.uniform(-1, 3))),
    )
    share = float(rng.choice([0.5, 0.2, 0.05, 0.002])) if noisy else 0.0
    if noisy and rng.random() < 0.2:
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
        clip=np.where(rng.random(count) < 0.65, rng.uniform(-6, 0.5, count), np.inf),
        step=edges,
        noise=np.exp(rng.uniform(-4, 3, count)) * (form.share > 0),
        decay=rng.choice([0.3, 0.7, 0.95], count),
        aware=(rng.random(count) < 0.15) & late,
    )


def moved_genes(genes: Genes, row: int, rng: np.random.Generator) -> Genes:
    """Settings near those of a row, which are among them."""
    parts = {f.name: np.repeat(getattr(genes, f.name)[row], _TOGETHER) for f in fields(Genes)}
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
class Run:
    """A run: its setting and clip, A, both residuals, and the largest gradients."""

    setting: Setting
    phi: float
    gradient: float
    residual: float
    running: float
    decay: float
    each: float
    mean: float


def measured(form: Form, genes: Genes) -> list[Run]:
    """Run all settings of a form, exactly."""
    settings = list(_settings(form, genes))
    size, problem = form.size, form.problem
    first = np.abs(problem.gradient(problem.start)).max() + genes.noise
    unit = np.fmax(first, 1e-9) * size.local_steps / (1 - genes.momentum)
    phi = unit / genes.penalty * np.exp(genes.clip)
    draws = size.rounds * size.local_steps * size.workers
    bits = (np.arange(size.seeds)[:, None] >> np.arange(draws)) & 1
    weight = np.where(bits, form.share, 1 - form.share).prod(axis=1) if form.share else np.ones(1)
    shape = (size.seeds, size.rounds * size.local_steps, size.workers)
    paths = Paths(problem, bits.reshape(shape).swapaxes(0, 1) == 1, form.share)
    which = replace(variants_of(settings, phi), decay=genes.decay)
    outcome = run(problem, which, size, sampler=paths)
    most = problem.most_spread
    assert paths.each is not None
    assert paths.mean is not None
    scale = np.array([setting.penalty for setting in settings]) / size.local_steps
    columns = (
        phi,
        outcome.gradient @ weight,
        scale * np.sqrt(outcome.residual @ weight),
        scale * np.sqrt(outcome.running @ weight),
        genes.decay,
        paths.each,
        paths.mean,
    )
    numbers = np.stack(np.broadcast_arrays(*columns), axis=1).tolist()
    spread = outcome.spread if most is None else np.full(len(settings), most)
    met = (replace(s, heterogeneity=float(z)) for s, z in zip(settings, spread, strict=True))
    return [Run(setting, *line) for setting, line in zip(met, numbers, strict=True)]


def _settings(form: Form, genes: Genes) -> Iterator[Setting]:
    problem, size = form.problem, form.size
    late = None if size.late_steps is None else Late(steps=size.late_steps)
    gap = max(0.0, float(problem.value(problem.start)))
    for row in range(len(genes.outer)):
        aware, beta = bool(genes.aware[row]), float(genes.momentum[row])
        setting = Setting(
            smoothness=problem.smoothness,
            noise=float(genes.noise[row] ** 2),
            gap=gap if gap > 1e-12 else 0.0,  # round-off
            workers=size.workers,
            rounds=size.rounds,
            local_steps=size.local_steps,
            inner_step=1.0,
            outer_step=float(genes.outer[row]),
            momentum=beta,
            penalty=1.0 if aware else float(genes.penalty[row]),
            most_penalty=1 + 1 / (1 - beta) if aware else None,
            delay=size.delay,
            late=late,
            convex=problem.convex,
        )
        edge = float(genes.step[row]) * bound.largest_inner_step(setting)
        yield replace(setting, inner_step=edge)


# --- bounds, right and wrong ----------------------------------------------------------------------


def totals(done: Run) -> Iterator[tuple[str, float]]:
    """Every bound of a run, right or wrong, that there is; NaN where the condition fails."""
    setting, phi = done.setting, done.phi
    parts = clipping.alone(setting)
    used, averaged = clipping.constants(setting), clipping.constants(setting, done.decay)
    for name, factors in {"residual": {}, "running residual": {}, **_RESIDUAL}.items():
        running = name.startswith("running")
        size, right = (done.running, averaged) if running else (done.residual, used)
        terms = clipping.by_residual(setting, parts, _scaled(right, factors), size)
        yield name, _total(terms)
    if setting.late is None and setting.most_penalty is None and math.isfinite(phi):
        if not setting.noise:
            yield from _quiet(setting, parts, done.mean, phi)
        elif clipping.threshold(setting, phi) > done.each:
            yield from _noisy(setting, parts, done.each, phi)


def _scaled(right: C, factors: Mapping[str, float]) -> C:
    """Constants with some of them multiplied."""
    return replace(
        right, **{name: factor * getattr(right, name) for name, factor in factors.items()}
    )


def _total(terms: Bound | Infeasible) -> float:
    return terms.total if isinstance(terms, Bound) else math.nan


def _noisy(
    setting: Setting, parts: Bound, largest: float, phi: float
) -> Iterator[tuple[str, float]]:
    """Theorem 2."""
    used = clipping.noise_constants(setting, largest, phi)
    for name, factors in {"clipped noise": {}, **_NOISE}.items():
        yield name, _total(clipping.by_noise(setting, parts, _scaled(used, factors)))


def _quiet(
    setting: Setting, parts: Bound, largest: float, phi: float
) -> Iterator[tuple[str, float]]:
    """Theorem 3."""
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


@dataclass
class Tally:
    """By bound and by mutation: comparisons, violations, the largest ratio; and how many clip."""

    compared: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    largest: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)

    def add(self, runs: list[Run]) -> dict[str, tuple[float, int]]:
        """Count runs; the largest ratio of each bound, and whose it is."""
        closest: dict[str, tuple[float, int]] = {}
        for row, done in enumerate(runs):
            gradient = done.gradient if math.isfinite(done.gradient) else math.inf
            for name, total in totals(done):
                if math.isnan(total) or not total:
                    continue
                ratio = gradient / total
                if name == "residual":
                    self.runs["clip" if done.residual > 0 else "do not"] += 1
                self.compared[name] += 1
                self.violations[name] += ratio > 1 + _ROUND_OFF
                if ratio > closest.get(name, (0.0,))[0]:
                    closest[name] = (ratio, row)
        self.largest |= Counter({name: ratio for name, (ratio, _) in closest.items()})
        return closest

    def join(self, other: "Tally") -> None:
        """Add another one."""
        self.compared += other.compared
        self.violations += other.violations
        self.largest |= other.largest
        self.runs += other.runs


def climb(seed: int, calls: int, noisy: bool) -> Tally:  # noqa: FBT001 - of a tuple of arguments
    """Draw `calls` problems with 64 settings each, the later ones near the best of before."""
    rng = np.random.default_rng([seed, noisy])
    tally = Tally()
    best: dict[str, tuple[float, Form, Genes, int]] = {}
    names = (*THEOREMS, *MUTATIONS)
    for call in range(calls):
        target = names[call // _CLIMB % len(names)]
        if call % _CLIMB and target in best:
            _, form, genes, row = best[target]
            form, genes = moved_form(form, rng), moved_genes(genes, row, rng)
        else:
            form = random_form(rng, noisy=noisy)
            genes = random_genes(rng, form)
        for name, (ratio, row) in tally.add(measured(form, genes)).items():
            if ratio > best.get(name, (0.0,))[0]:
                best[name] = (ratio, form, genes, row)
    return tally


# --- what a fixed clip leaves ---------------------------------------------------------------------

_REACH = 12.0
"""Step size times rounds of the long runs: what is left of the start does not count."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The root of A over sigma^2/(4 G phi), what the proposition says of it, and A over the bound.

    `ratio` and `with_half`, of the bound with half of its bias, are less three standard errors, and
    0 where the bound does not hold.
    """

    root: float
    floor: float
    ratio: float
    with_half: float


def floors(
    workers: int, tau: int, beta: float, step: float, seeds: int, clips: tuple[float, ...]
) -> list[Floor]:
    """Long runs with a fixed clip, on x^2/2 with the noise of the proposition.

    They begin where it says that they stay, at a gradient of 1. `clips` are phi over sigma.
    """
    sigma = 4 * workers * np.array(clips)
    phi = np.array(clips) * sigma
    problem = same(1.0, start=1.0)
    sampler = Jumps(problem, sigma**2, 2 * workers * phi)
    settings = [
        Setting(
            smoothness=1.0,
            noise=float(each**2),
            gap=float(problem.value(problem.start)),
            workers=workers,
            rounds=math.ceil(_REACH / (step * tau)),
            local_steps=tau,
            inner_step=step,
            outer_step=1 - beta,
            momentum=beta,
            convex=True,
        )
        for each in sigma
    ]
    size = size_of(settings[0], seeds)
    outcome = run(problem, variants_of(settings, phi), size, sampler=sampler, seed=[workers, tau])
    lines = []
    for setting, clip, gradients in zip(settings, phi.tolist(), outcome.gradient, strict=True):
        gradient = float(gradients.mean())
        least = gradient - 3 * float(gradients.std(ddof=1)) / math.sqrt(seeds)
        ratios = (0.0, 0.0)
        if clipping.threshold(setting, clip) > sampler.largest:
            by_name = dict(_noisy(setting, clipping.alone(setting), sampler.largest, clip))
            ratios = least / by_name["clipped noise"], least / by_name["bias, half"]
        root, lowest = math.sqrt(gradient), math.sqrt(clipping.floor(setting, clip))
        lines.append(Floor(root, lowest, *ratios))
    return lines


# --- what has to hold -----------------------------------------------------------------------------


def plan(*, quick: bool) -> tuple[list[tuple[int, int, bool]], list[tuple[Any, ...]]]:
    """The arguments of `climb` and of `floors`."""
    seeds, calls = (1, 36) if quick else (10, 270)
    exactly = [(seed, calls, noisy) for noisy in (False, True) for seed in range(seeds)]
    kinds = ((1, 1, 0.0), (4, 1, 0.0), (1, 4, 0.0), (2, 4, 0.0), (1, 1, 0.5), (1, 1, 0.9))
    if quick:
        return exactly, [(*kinds[0], 4e-3, 16, (2.0,))]
    return exactly, [(*kind, 1e-3, 64, (1.0, 2.0, 4.0)) for kind in kinds]


def caught(tally: Tally, lines: list[Floor]) -> list[str]:
    """The wrong constants that were noticed, by the exact runs or by the long ones."""
    by_long = {"bias, half"} if any(line.with_half > 1 for line in lines) else set()
    return [name for name in MUTATIONS if tally.violations[name] or name in by_long]


def judge(tally: Tally, lines: list[Floor], *, quick: bool) -> Iterator[Check]:
    """Whether the bounds hold, wrong ones are noticed, and a fixed clip leaves its floor."""
    least = _LEAST_QUICK if quick else _LEAST
    wrong = sum(tally.violations[name] for name in THEOREMS)
    wrong += sum(line.ratio > 1 for line in lines)
    yield Check(
        f"clipping: no violation of its bounds on {least:,} exact runs that clip and as many that"
        " do not",
        wrong == 0 and min(tally.runs["clip"], tally.runs["do not"]) >= least,
        f"{wrong} violations; {tally.runs['clip']:,} clip, {tally.runs['do not']:,} do not;"
        f" measured/bound up to {max(tally.largest[name] for name in THEOREMS):.5f}",
    )
    noticed = caught(tally, lines)
    wanted = QUICK if quick else [name for name in MUTATIONS if name not in UNNOTICED]
    missed = [name for name in wanted if name not in noticed]
    yield Check(
        f"clipping: {len(wanted)} wrong constants or more are noticed",
        not missed,
        f"{len(noticed)} of {len(MUTATIONS)}"
        + (f"; not noticed: {', '.join(missed)}" if missed else ""),
    )
    roots = [line.root for line in lines]
    yield Check(
        "clipping: with a fixed clip and small steps gradients stay at the floor of the theory",
        bool(lines) and all(line.root >= line.floor for line in lines),
        f"root of A over sigma^2/(4 G phi): {min(roots, default=0):.3f} to"
        f" {max(roots, default=0):.3f}",
    )


def checks(cells: Cells, *, quick: bool) -> Iterator[Check | str]:
    """Exact runs and long ones, judged."""
    exactly, long = plan(quick=quick)
    tally = Tally()
    for each in cells(climb, exactly):
        tally.join(each)
    measured_floors = list(zip(long, cells(floors, long), strict=True))
    lines = [line for _, cell in measured_floors for line in cell]
    yield from judge(tally, lines, quick=quick)
    noticed = caught(tally, lines)
    yield "clipping: bounds, and wrong constants\n\n" + table(
        ("bound", "comparisons", "violations", "largest measured/bound", "noticed"),
        [
            (
                name,
                f"{tally.compared[name]:,}",
                f"{tally.violations[name]:,}",
                f"{tally.largest[name]:.5f}",
                "-" if name in THEOREMS else "yes" if name in noticed else "no",
            )
            for name in (*THEOREMS, *MUTATIONS)
        ],
    )
    yield "clipping: what a fixed clip leaves, over sigma^2/(4 G phi)\n\n" + table(
        ("G", "tau", "beta", "phi/sigma", "root", "at least", "measured/bound", "half of the bias"),
        [
            (
                *task[:3],
                clip,
                f"{line.root:.3f}",
                f"{line.floor:.3f}",
                *(f"{ratio:.3g}" if ratio else "-" for ratio in (line.ratio, line.with_half)),
            )
            for task, cell in measured_floors
            for clip, line in zip(task[-1], cell, strict=True)
        ],
    )
