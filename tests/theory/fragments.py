"""Averages in fragments against the bound, on random quadratics and on sums of waves.

Settings come in batches that share tau, the delay, fragments, workers, coordinates and rounds; all
else is random. Hessians couple all coordinates, and each coordinate belongs to a fragment. Nothing
here is shared with the simulator: an event is a matrix, or a line of numpy.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.convergence import bound, clipping, late_averages
from analysis.convergence.bound import TERMS, Bound
from analysis.convergence.setting import Array, Late, Setting, size_of, variants_of
from theory.cells import Cells, Check, table
from theory.problems import run

LEAST = 200_000
"""Random settings in fragments that the bound has to hold on."""
_QUICK_LEAST = 3_000
_TIGHT = 0.9
_ROUND_OFF = 1e-9
_MEASURABLE = 1e-5
"""What of second moments is above their round-off, of 1e-15 at each step."""
_SCORE = 4.0
_SIZES = {"moments": 64, "edge": 400, "clip": 400, "waves": 120, "opposed": 4, "apart": 40}
"""Settings of a batch by kind."""
_BATCHES = {"moments": 1500, "edge": 300, "clip": 300, "waves": 100, "opposed": 24, "apart": 150}
_QUICK = {"moments": 16, "edge": 4, "clip": 4, "waves": 2, "opposed": 0, "apart": 4}
_QUICK_NOTICED = 8


class Batch(NamedTuple):
    """Settings, and for each the problem: f_i = x H_i x/2 - b_i x, noise by coordinate, x_0."""

    settings: list[Setting]
    hessians: Array
    pulls: Array
    noise: Array
    starts: Array
    launches: NDArray[np.int64]
    """After how many steps of a round each coordinate launches."""


@dataclass(slots=True)
class Tally:
    """What was found: how many settings, how many above the bound, the tightest, by kind.

    `mutations` counts settings that exceed what a wrong constant would give; `shares` are the
    tightest measured over R^2, and over what the condition says.
    """

    settings: Counter[str] = field(default_factory=Counter)
    above: Counter[str] = field(default_factory=Counter)
    tightest: dict[str, float] = field(default_factory=dict)
    mutations: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, ratio: float) -> None:
        """A setting with its measured over its bound."""
        self.settings[kind] += 1
        self.above[kind] += not ratio <= 1 + _ROUND_OFF
        self.tightest[kind] = max(self.tightest.get(kind, 0.0), ratio)

    def mutate(self, name: str, *, exceeded: bool) -> None:
        """Whether a wrong constant was noticed."""
        self.mutations[name] += bool(exceeded)

    def add(self, other: "Tally") -> None:
        """Take in another."""
        for mine, others in zip(
            (self.settings, self.above, self.mutations),
            (other.settings, other.above, other.mutations),
            strict=True,
        ):
            mine.update(others)  # + would drop what is 0
        for kind, ratio in other.tightest.items():
            self.tightest[kind] = max(self.tightest.get(kind, 0.0), ratio)


# --- random settings ------------------------------------------------------------------------------


def _late(rng: np.random.Generator, tau: int, steps: int, fragments: int) -> Late:
    """What is kept and predicted: everything in two fifths of all."""
    if rng.random() < 0.4:
        return Late(steps=steps, fragments=fragments)
    keep = float(rng.choice([1.0, 0.75, 0.5, 0.25]))
    predict = float(rng.choice([1 - keep, 1.0, rng.uniform()]))
    if predict * steps >= tau:
        predict = min(predict, 1 - keep)
    return Late(steps=steps, fragments=fragments, keep=keep, predict=predict)


def _hessian(rng: np.random.Generator, size: int, low: float) -> Array:
    """A random one with largest eigenvalue 1, and others from `low` on."""
    basis, _ = np.linalg.qr(rng.standard_normal((size, size)))
    values = np.concatenate([[1.0], rng.uniform(low, 1.0, size - 1)])
    return np.asarray(basis * values @ basis.T)


def draw(kind: str, seed: int, count: int) -> Batch:
    """A batch of settings whose steps go up to 0.9999 of what the conditions allow."""
    rng = np.random.default_rng([seed, len(kind), ord(kind[0])])
    tau = int(rng.choice([2, 3, 4, 6, 8, 12], p=[0.2, 0.2, 0.2, 0.16, 0.12, 0.12]))
    steps = int(rng.choice([1, tau, int(rng.integers(1, tau + 1))]))
    fragments, size = int(rng.integers(2, tau + 1)), int(rng.integers(2, 5))
    rounds = int(rng.integers(2, 60 // max(1, tau // 2) + 4))
    if kind in {"edge", "clip"}:
        rounds = int(rng.choice([5, 20, 60, 100]))
    workers = int(rng.integers(1, 4)) if kind == "moments" else 1
    part = np.sort(rng.integers(0, fragments, size))
    launches = tau * (part + 1) // fragments
    parts = [
        _setting(kind, rng, (tau, steps, fragments, size, rounds, workers)) for _ in range(count)
    ]
    settings, *arrays = zip(*parts, strict=True)
    hessians, pulls, noise, starts = (np.array(each) for each in arrays)
    return Batch(list(settings), hessians, pulls, noise, starts, launches)


def _setting(
    kind: str, rng: np.random.Generator, shape: tuple[int, ...]
) -> tuple[Setting, Array, Array, Array, Array]:
    """A setting, Hessians, pulls, noise and x_0; heterogeneity is measured, and 0 here."""
    tau, steps, fragments, size, rounds, workers = shape
    low = float(rng.choice([0.0, 0.5, 0.95, 1.0]))
    hessians = np.repeat(_hessian(rng, size, low)[None], workers, axis=0)
    pulls, noise = np.zeros((workers, size)), np.zeros(size)
    unequal = workers > 1 and rng.random() < 0.5
    if unequal:
        apart = rng.standard_normal((workers, size, size)) * rng.uniform(0.1, 1)
        apart = apart + np.swapaxes(apart, 1, 2)
        bent = 0.3 * hessians + 0.3 * (apart - apart.mean(axis=0))
        if np.linalg.eigvalsh(bent.mean(axis=0))[0] >= 0:
            hessians = bent
        pulls = rng.standard_normal((workers, size)) * math.exp(rng.uniform(-3, 3))
        pulls -= pulls.mean(axis=0)
    if kind == "moments" and rng.random() < 0.7:
        noise = rng.uniform(0, 1, size) ** 2 * math.exp(rng.uniform(-6, 5))
    smooth = max(float(np.abs(np.linalg.eigvalsh(each)).max()) for each in hessians)
    mean = hessians.mean(axis=0)
    start = rng.standard_normal(size)
    if rng.random() < 0.5:
        start = np.linalg.eigh(mean)[1][:, -1]
    late = _late(rng, tau, steps, fragments)
    gains = [1.0, 1.0, 0.9, math.exp(rng.uniform(-2, 1.2)), 30.0]
    if kind == "edge":
        gains = [1.0, 10.0, 100.0, 1000.0, math.exp(rng.uniform(0, 4))]
    if kind == "clip":
        late = replace(late, keep=1.0, predict=0.0)
    setting = Setting(
        smoothness=smooth,
        noise=float(noise.sum()),
        heterogeneity=1.0 if unequal else 0.0,
        gap=float(start @ mean @ start) / 2,
        workers=workers,
        rounds=rounds,
        local_steps=tau,
        inner_step=1.0,
        outer_step=float(rng.choice(gains)),
        momentum=float(rng.choice([0.0, 0.0, 0.2, 0.5, 0.9])),
        penalty=float(rng.choice([1.0, 1.0, 2.0])),
        late=late,
    )
    share = 0.9999 if kind == "edge" else rng.choice([0.9999, 0.99, 0.9, 0.5, 0.2, 0.03])
    setting = replace(setting, inner_step=float(share) * bound.largest_inner_step(setting))
    return replace(setting, heterogeneity=0.0), hessians, pulls, noise, start


# --- exact second moments -------------------------------------------------------------------------


class Moments(NamedTuple):
    """By setting, step and coordinate: grad f and x^i - mean squared; the rest by setting.

    `spread` is the largest mean_i |grad f_i - grad f|^2 by coordinate, `last` E|mean|^2 at the end.
    """

    gradient: Array
    apart: Array
    spread: Array
    last: Array


def moments(batch: Batch) -> Moments:
    """Second moments of (x^i, l^i, anchor, momentum, U, 1) for any noise of this variance."""
    first, (many, workers, size, _) = batch.settings[0], batch.hessians.shape
    steps = first.rounds * first.local_steps
    base, width = 2 * workers * size, 2 * workers * size + 3 * size + 1
    state = np.ones((many, width))
    state[:, :base] = np.tile(batch.starts, 2 * workers)
    state[:, base : base + size] = batch.starts
    state[:, base + size : -1] = 0.0
    second = state[:, :, None] * state[:, None, :]
    gamma = np.array([each.inner_step for each in batch.settings])
    step, added = np.tile(np.eye(width), (many, 1, 1)), np.zeros((many, width))
    mean = np.zeros((size, width))
    for i in range(workers):
        at = slice(i * size, (i + 1) * size)
        step[:, at, at] -= gamma[:, None, None] * batch.hessians[:, i]
        step[:, at, -1] += gamma[:, None] * batch.pulls[:, i]
        added[:, at] = gamma[:, None] ** 2 * batch.noise
        mean[:, at] += np.eye(size) / workers
    slope, apart, spread = _seen(batch, mean)
    gradient, distance = np.zeros((2, many, steps, size))
    widest, diagonal, events = np.zeros((many, size)), np.arange(width), dict[bytes, Array]()
    with np.errstate(over="ignore", invalid="ignore"):
        for now in range(steps):
            gradient[:, now] = _expected(slope, second)
            for i in range(workers):
                distance[:, now] += _expected(apart[i], second) / workers
            seen = np.mean([_expected(spread[:, i], second) for i in range(workers)], axis=0)
            widest = np.fmax(widest, seen)
            second = step @ second @ np.swapaxes(step, 1, 2)
            second[:, diagonal, diagonal] += added
            event = _event(batch, now + 1, events)
            if event is not None:
                second = event @ second @ np.swapaxes(event, 1, 2)
        last = _expected(np.broadcast_to(mean, (many, *mean.shape)), second).sum(axis=1)
    return Moments(gradient, distance, widest, last)


def _seen(batch: Batch, mean: Array) -> tuple[Array, list[Array], Array]:
    """Rows of the state: grad f, x^i - mean by worker, grad f_i - grad f at the mean."""
    workers, size = batch.hessians.shape[1:3]
    average, pulled = batch.hessians.mean(axis=1), batch.pulls.mean(axis=1)
    slope = average @ mean
    slope[:, :, -1] -= pulled
    apart = [np.tile(-mean, (len(slope), 1, 1)) for _ in range(workers)]
    for i, each in enumerate(apart):
        each[:, :, i * size : (i + 1) * size] += np.eye(size)
    spread = (batch.hessians - average[:, None]) @ mean
    spread[..., -1] -= batch.pulls - pulled[:, None]
    return slope, apart, spread


def _expected(rows: Array, second: Array) -> Array:
    return np.asarray(np.einsum("nas,nas->na", rows @ second, rows))


def _event(batch: Batch, now: int, made: dict[bytes, Array]) -> Array | None:
    """The arrivals and launches at a step as a matrix, if there are any."""
    first = batch.settings[0]
    assert first.late
    tau, d, since = first.local_steps, first.late.steps, now - batch.launches
    arrive = (since >= d) & ((since - d) % tau == 0)
    launch = (since >= 0) & (since % tau == 0)
    if not arrive.any() and not launch.any():
        return None
    key = np.concatenate([arrive, launch]).tobytes()
    if key not in made:
        many, workers, size, _ = batch.hessians.shape
        made[key] = np.tile(np.eye(2 * workers * size + 3 * size + 1), (many, 1, 1))
        for coordinate in np.flatnonzero(arrive):
            made[key] = _arrival(batch, int(coordinate)) @ made[key]
        for coordinate in np.flatnonzero(launch):
            made[key] = _launch(batch, int(coordinate)) @ made[key]
    return made[key]


def _arrival(batch: Batch, c: int) -> Array:
    many, workers, size, _ = batch.hessians.shape
    anchor, momentum, moved = (2 * workers * size + part * size + c for part in range(3))
    matrix = np.tile(np.eye(2 * workers * size + 3 * size + 1), (many, 1, 1))
    for row, setting in zip(matrix, batch.settings, strict=True):
        late = setting.late
        assert late
        row[momentum] = 0.0
        row[momentum, [momentum, moved]] = setting.momentum, 1 / setting.penalty
        row[anchor] -= setting.outer_step * row[momentum]  # in units of x: U is gamma U
        for i in range(workers):
            here, left = i * size + c, (workers + i) * size + c
            row[here] = row[anchor]
            row[here, here] += late.keep
            row[here, left] -= late.keep
            row[here, moved] -= late.carried(setting.local_steps)
    return matrix


def _launch(batch: Batch, c: int) -> Array:
    many, workers, size, _ = batch.hessians.shape
    matrix = np.tile(np.eye(2 * workers * size + 3 * size + 1), (many, 1, 1))
    anchor, moved = 2 * workers * size + c, 2 * workers * size + 2 * size + c
    matrix[:, moved] = 0.0
    matrix[:, moved, anchor] = 1.0
    for i in range(workers):
        here, left = i * size + c, (workers + i) * size + c
        matrix[:, moved, here] -= 1 / workers
        matrix[:, left] = 0.0
        matrix[:, left, here] = 1.0
    return matrix


def counts(setting: Setting, launches: NDArray[np.int64]) -> Array:
    """What each step counts in A, by coordinate: [step, coordinate]."""
    late = setting.late
    assert late
    since = np.arange(setting.rounds * setting.local_steps)[:, None] - launches
    early = (since >= 0) & (since % setting.local_steps < late.steps)
    return np.where(early, late.keep, 1.0)


# --- what is measured -----------------------------------------------------------------------------


def measure(kind: str, seed: int, count: int) -> Tally:
    """A batch of one kind against its bounds."""
    tally = Tally()
    kinds = {
        "moments": _moments,
        "opposed": _opposed,
        "apart": _apart,
        "edge": _edge,
        "clip": _clip,
        "waves": _waves,
    }
    kinds[kind](seed, count, tally)
    return tally


def _moments(seed: int, count: int, tally: Tally) -> None:
    batch = draw("moments", seed, count)
    _judge_moments("moments", batch, moments(batch), tally)


def _opposed(seed: int, count: int, tally: Tally) -> None:
    """Two workers with opposite curvature on each coordinate, for thousands of rounds.

    The mean rests where disagreement puts it: drift is nearly all of the bound.
    """
    rng = np.random.default_rng([seed, 5])
    tau = int(rng.choice([2, 3]))
    launches, bend = np.arange(1, tau + 1), 0.06
    hessians = np.array([np.eye(tau), (2 * bend - 1) * np.eye(tau)])
    settings, pulls = [], []
    for _ in range(count):
        setting = Setting(
            smoothness=1.0,
            noise=0.0,
            heterogeneity=1.0,
            gap=0.0,
            workers=2,
            rounds=12_000 // tau,
            local_steps=tau,
            inner_step=1.0,
            late=Late(steps=tau, fragments=tau),
        )
        reach = late_averages.reach(setting)
        step = min(0.9 / bound.load(setting), float(rng.choice([0.05, 0.08])) / reach)
        settings.append(replace(setting, inner_step=step, heterogeneity=0.0))
        pull = rng.uniform(0, 1, tau)
        pulls.append([pull, -pull])
    nothing = np.zeros((count, tau))
    batch = Batch(
        settings, np.array([hessians] * count), np.array(pulls), nothing, nothing, launches
    )
    _judge_moments("opposed", batch, moments(batch), tally)


def _judge_moments(kind: str, batch: Batch, seen: Moments, tally: Tally) -> None:
    """A and the disagreement against the bound, its terms and R^2, and these with wrong parts."""
    for row, setting in enumerate(batch.settings):
        small = 1e-22 * (seen.gradient[row].max() + np.abs(batch.pulls[row]).max() ** 2)
        spread = seen.spread[row].sum() if seen.spread[row].max() > small else 0.0
        known = replace(setting, heterogeneity=float(spread))
        total = seen.gradient[row].sum()
        reached = bound.evaluate(known)
        if not isinstance(reached, Bound) or not np.isfinite(total):
            tally.settings["outside"] += 1
            continue
        late = known.late
        assert late
        length = known.rounds * late.counted(known.local_steps)
        weighted = float((counts(known, batch.launches) * seen.gradient[row]).sum()) / length
        tally.note(kind, weighted / reached.total)
        tally.note(f"{kind}, {reached.dominant}", weighted / reached.total)
        for name in TERMS:
            less = reached.total - getattr(reached, name) / 2
            tally.mutate(f"{name} halved", exceeded=weighted > less * (1 + _ROUND_OFF))
        apart = float(seen.apart[row].sum())
        if apart * known.smoothness**2 > _MEASURABLE * total:
            _judge_apart(known, apart, tally)


def _apart(seed: int, count: int, tally: Tally) -> None:
    """The disagreement alone, of functions that bend either way: noise, unequal workers, or both.

    With equal Hessians it does not depend on where the mean is.
    """
    rng = np.random.default_rng([seed, 17])
    tau = int(rng.choice([2, 3, 4, 6, 12]))
    d, size = int(rng.choice([1, tau, int(rng.integers(1, tau + 1))])), int(rng.integers(2, 6))
    fragments, rounds = int(rng.integers(2, tau + 1)), int(rng.choice([5, 20, 60]))
    launches = tau * (np.sort(rng.integers(0, fragments, size)) + 1) // fragments
    late = Late(steps=d, fragments=fragments, keep=float(rng.choice([1.0, 1.0, 0.5])))
    noisy, unequal = ((True, False), (False, True), (True, True))[seed % 3]
    for _ in range(count):
        direction = rng.standard_normal(size)
        hessian = -np.outer(direction, direction) / (direction @ direction)
        if rng.random() < 0.5:
            basis, _ = np.linalg.qr(rng.standard_normal((size, size)))
            hessian = basis * np.append(-1.0, rng.choice([-1, 1, -0.5, 0], size - 1)) @ basis.T
        noise = rng.uniform(0, 1, size) if noisy else np.zeros(size)
        bent = np.linalg.eigh(hessian)[1][:, 0] * math.exp(rng.uniform(-2, 2))
        pull = bent if unequal else np.zeros(size)
        setting = Setting(
            smoothness=1.0,
            noise=float(noise.sum()),
            heterogeneity=float(pull @ pull),
            gap=1.0,
            workers=4,
            rounds=rounds,
            local_steps=tau,
            inner_step=1.0,
            late=late,
        )
        reach = float(rng.choice([0.98, 0.9, 0.5, 0.2])) / late_averages.reach(setting)
        setting = replace(setting, inner_step=reach)
        _judge_apart(setting, _disagreement(setting, hessian, noise, pull, launches), tally)


def _disagreement(
    setting: Setting, hessian: Array, noise: Array, pull: Array, launches: NDArray[np.int64]
) -> float:
    """The sum over steps of E|e|^2, for e <- e - gamma (H e + pull + centred noise)."""
    late, size = setting.late, len(pull)
    assert late
    tau, gamma = setting.local_steps, setting.inner_step
    second, total = np.zeros((2 * size + 1, 2 * size + 1)), 0.0
    second[-1, -1] = 1.0
    step = np.eye(2 * size + 1)
    step[:size, :size] -= gamma * hessian
    step[:size, -1] = -gamma * pull
    added = np.concatenate([gamma**2 * noise * (1 - 1 / setting.workers), np.zeros(size + 1)])
    for now in range(setting.rounds * tau):
        total += float(np.trace(second[:size, :size]))
        second = step @ second @ step.T + np.diag(added)
        since, event = now + 1 - launches, np.eye(2 * size + 1)
        for c in np.flatnonzero((since >= late.steps) & ((since - late.steps) % tau == 0)):
            event[c, [c, size + c]] = late.keep, -late.keep
        for c in np.flatnonzero((since >= 0) & (since % tau == 0)):
            event[size + c] = event[c]
        second = event @ second @ event.T
    return total


def _judge_apart(setting: Setting, apart: float, tally: Tally) -> None:
    """A disagreement against R^2, and against what this is with a wrong part."""
    late = setting.late
    assert late
    far = bound.drift(setting) * setting.rounds * late.counted(setting.local_steps)
    tally.note("R^2", apart / far)
    for name, wrong in _wrong_drifts(setting).items():
        tally.mutate(name, exceeded=apart > wrong * (1 + 1e-7))


def _wrong_drifts(setting: Setting) -> dict[str, float]:
    """R^2 with a wrong part, by what is wrong. Source: docs/theory.md, fragments."""
    late, step = setting.late, setting.inner_step
    assert late
    lengths, squares, products = late_averages._windows(setting.local_steps, setting.rounds, late)
    spread = step**2 * setting.noise * (1 - 1 / setting.workers)
    pulled, zeta = step * math.sqrt(setting.heterogeneity * lengths), setting.heterogeneity
    steps = setting.rounds * setting.local_steps

    def squared(x: float, noise: float) -> float:
        linear = x * pulled + step * setting.smoothness * noise
        rest = pulled**2 + spread * squares + 2 * step * math.sqrt(zeta * steps) * noise
        return ((linear + math.sqrt(linear**2 + (1 - x * x) * rest)) / (1 - x * x)) ** 2

    x, noise = late_averages.reach(setting), math.sqrt(spread * products)
    right = squared(x, noise)
    length = setting.rounds * late.counted(setting.local_steps)
    assert math.isclose(right, bound.drift(setting) * length, rel_tol=1e-9)
    return {
        "R^2 halved": right / 2,
        "gamma L nu = 0 in R": squared(0.0, noise),
        "0.7 nu in R": squared(0.7 * x, noise),
        "Y dropped": squared(x, 0.0),
    }


class Path(NamedTuple):
    """Runs without noise, as `Moments`; `removed` is the sum of |s|^2 that a clip made, by run."""

    gradient: Array
    apart: Array
    spread: Array
    removed: Array


def follow(
    settings: Sequence[Setting],
    launches: NDArray[np.int64],
    starts: Array,
    slopes: Callable[[Array], Array],
    limits: Array | None = None,
    decays: Array | float = 0.0,
) -> Path:
    """Runs without noise; `slopes` are gradients of workers [run, worker, coordinate] at points.

    `limits` are clips in units of x, and `decays` those of the running mean of what they clip.
    """
    first = settings[0]
    assert first.late
    tau, d, steps = first.local_steps, first.late.steps, first.rounds * first.local_steps
    names = ("momentum", "outer_step", "penalty", "inner_step")
    beta, alpha, penalty, gamma = (
        np.array([getattr(each, name) for each in settings])[:, None] for name in names
    )
    lates = [each.late for each in settings if each.late]
    keep = np.array([late.keep for late in lates])[:, None, None]
    carried = np.array([late.carried(tau) for late in lates])[:, None]
    x = np.repeat(starts[:, None], first.workers, axis=1)
    left, anchor, momentum, moved = x.copy(), starts.copy(), 0 * starts, 0 * starts
    gradient, apart = np.zeros((2, len(x), steps, x.shape[2]))
    smooth, spread, removed = 0 * starts, np.zeros_like(starts), np.zeros(len(x))
    with np.errstate(over="ignore", invalid="ignore"):
        for now in range(steps):
            since = now - launches
            a, b = (since >= d) & ((since - d) % tau == 0), (since >= 0) & (since % tau == 0)
            if a.any():
                wanted = beta * momentum[:, a] + moved[:, a] / penalty
                used = wanted if limits is None else np.clip(wanted, -limits, limits)
                clipped = penalty * (wanted - used) / (gamma * tau)
                smooth[:, a] = decays * smooth[:, a] + (1 - decays) * clipped
                removed += tau * (smooth[:, a] ** 2).sum(axis=1)
                momentum[:, a] = used
                anchor[:, a] -= alpha * used
                ahead = anchor[:, a] - carried * moved[:, a]
                x[:, :, a] = ahead[:, None] + keep * (x[:, :, a] - left[:, :, a])
            moved[:, b], left[:, :, b] = anchor[:, b] - x[:, :, b].mean(axis=1), x[:, :, b]
            mean = x.mean(axis=1, keepdims=True)
            there = slopes(np.repeat(mean, first.workers, axis=1))
            gradient[:, now] = there.mean(axis=1) ** 2
            if first.workers > 1:
                apart[:, now] = ((x - mean) ** 2).mean(axis=1)
                spread = np.fmax(spread, there.var(axis=1))
                there = slopes(x)
            x = x - gamma[:, None] * there
    return Path(gradient, apart, spread, removed)


def _alone(batch: Batch, limits: Array | None = None, decays: Array | float = 0.0) -> Path:
    """One worker on the quadratics of a batch."""

    def slopes(points: Array) -> Array:
        return np.asarray(np.einsum("nab,ngb->nga", batch.hessians[:, 0], points))

    return follow(batch.settings, batch.launches, batch.starts, slopes, limits, decays)


def _edge(seed: int, count: int, tally: Tally) -> None:
    """Without noise, just within the condition; and just within one that is wrong."""
    batch = draw("edge", seed, count)
    for setting, seen in zip(batch.settings, _alone(batch).gradient, strict=True):
        tally.note("edge", _over(setting, seen, batch.launches))
    wider = [_beyond(setting) for setting in batch.settings]
    squares = _alone(batch._replace(settings=wider)).gradient
    for setting, seen in zip(wider, squares, strict=True):
        ratio = _over(setting, seen, batch.launches)
        late = setting.late
        assert late
        whole = late.keep == 1 and late.predict == 0
        name = "with everything kept" if whole else "otherwise"
        tally.mutate(f"Omega^2 halved in the condition, {name}", exceeded=not ratio <= 1)


def _beyond(setting: Setting) -> Setting:
    """With the largest step that half of Omega^2 would allow."""
    omega = (bound.load(setting) / setting.smoothness - setting.virtual_step) / 2
    taken = setting.smoothness * (setting.virtual_step + 2 * omega * math.sqrt(0.5))
    return replace(setting, inner_step=0.9999 * setting.inner_step / taken)


def _over(setting: Setting, squares: Array, launches: NDArray[np.int64]) -> float:
    """A over the optimization term, which is all of the bound without noise."""
    late = setting.late
    assert late
    length = setting.rounds * late.counted(setting.local_steps)
    reached = float((counts(setting, launches) * squares).sum()) / length
    return reached / (2 * setting.gap / (setting.virtual_step * length))


def _clip(seed: int, count: int, tally: Tally) -> None:
    """With a clip and without noise, against Theorem 1 and its eps, also that of a running mean."""
    batch = draw("clip", seed, count)
    rng = np.random.default_rng([seed, 7])
    tau = batch.settings[0].local_steps
    gamma = np.array([setting.inner_step for setting in batch.settings])
    limits = gamma * tau * np.exp(rng.uniform(-5, 1, count))
    decays = rng.choice([0.0, 0.0, 0.5, 0.9], count)
    path = _alone(batch, limits[:, None], decays[:, None])
    rows = zip(batch.settings, path.gradient, path.removed, decays, strict=True)
    for setting, seen, square, decay in rows:
        steps = setting.rounds * tau
        residual, reached = math.sqrt(square / steps), float(seen.sum()) / steps
        used, parts = clipping.constants(setting, float(decay)), clipping.alone(setting)
        terms = clipping.by_residual(setting, parts, used, residual)
        if not residual or not isinstance(terms, Bound):
            continue
        tally.note("clip", reached / terms.total)
        tally.note(f"clip, decay {decay:g}", reached / terms.total)
        wrong = {
            "eps^2 halved": replace(used, last=used.last * math.sqrt(0.5)),
            "part of eps in the gap dropped": replace(used, residual=0.0),
        }
        for name, constants in wrong.items():
            less = clipping.by_residual(setting, parts, constants, residual)
            assert isinstance(less, Bound)
            tally.mutate(name, exceeded=reached > less.total * (1 + _ROUND_OFF))


def _waves(seed: int, count: int, tally: Tally) -> None:
    """Workers that differ, on f_i = sum of a_j (1 - cos(w_j x - phase_ij)), without noise.

    No fragment has a wave for itself.
    """
    rng = np.random.default_rng([seed, 11])
    tau = int(rng.choice([2, 3, 4, 8]))
    d, size = int(rng.choice([1, tau, int(rng.integers(1, tau + 1))])), int(rng.integers(2, 5))
    fragments, workers, rounds = int(rng.integers(2, tau + 1)), 3, int(rng.choice([3, 20, 60]))
    launches = tau * (np.sort(rng.integers(0, fragments, size)) + 1) // fragments
    waves = rng.standard_normal((count, 5, size))
    waves /= np.linalg.norm(waves, axis=2)[..., None]
    height = rng.uniform(0, 1, (count, 1, 5))
    phases = rng.standard_normal((count, workers, 5)) * np.exp(rng.uniform(-5, 1, (count, 1, 1)))
    curved = np.einsum("nj,nja,njb->nab", height[:, 0], waves, waves)
    smooth = np.linalg.eigvalsh(curved)[:, -1]
    start = 3 * rng.standard_normal((count, size))
    far = np.einsum("njq,nq->nj", waves, start)[:, None] - phases
    gaps = (height * (1 - np.cos(far))).sum(axis=2).mean(axis=1)
    settings = []
    for each, gap in zip(smooth, gaps, strict=True):
        setting = Setting(
            smoothness=float(each),
            noise=0.0,
            heterogeneity=1.0,
            gap=float(gap),
            workers=workers,
            rounds=rounds,
            local_steps=tau,
            inner_step=1.0,
            outer_step=float(rng.choice([1.0, 0.5, 10.0])),
            momentum=float(rng.choice([0.0, 0.5])),
            late=_late(rng, tau, d, fragments),
        )
        step = float(rng.choice([0.99, 0.5, 0.1])) * bound.largest_inner_step(setting)
        settings.append(replace(setting, inner_step=step))

    def slopes(points: Array) -> Array:
        inside = np.einsum("njq,ngq->ngj", waves, points) - phases
        return np.asarray(np.einsum("ngj,njq->ngq", height * np.sin(inside), waves))

    seen = follow(settings, launches, start, slopes)
    for row, setting in enumerate(settings):
        known = replace(setting, heterogeneity=float(seen.spread[row].sum()))
        reached = bound.evaluate(known)
        assert isinstance(reached, Bound)
        late = known.late
        assert late
        length = known.rounds * late.counted(tau)
        weighted = float((counts(known, launches) * seen.gradient[row]).sum()) / length
        tally.note("waves", weighted / reached.total)
        tally.note("R^2", float(seen.apart[row].sum()) / (bound.drift(known) * length))


# --- the simulator, and the verdict ---------------------------------------------------------------


def scores(seed: int) -> list[float]:
    """The z of simulated A and |mean|^2 at the end against the exact ones, of a batch.

    The simulator cuts coordinates into equal parts, and has as much noise in each.
    """
    rng = np.random.default_rng([seed, 13])
    tau = int(rng.integers(2, 7))
    fragments = int(rng.integers(2, tau + 1))
    shape = (tau, int(rng.integers(1, tau + 1)), fragments, fragments, 6, 3)
    setting, hessians, pulls, _, start = _setting("moments", rng, shape)
    setting = replace(setting, noise=float(fragments))
    noise, launches = np.ones(fragments), tau * np.arange(1, fragments + 1) // fragments
    batch = Batch([setting], hessians[None], pulls[None], noise[None], start[None], launches)
    exact = moments(batch)
    size = size_of(setting, 400)
    outcome = run(_Coupled(hessians, pulls, start), variants_of([setting]), size, seed=seed)
    late = setting.late
    assert late
    length = setting.rounds * late.counted(tau)
    expected = float((counts(setting, launches) * exact.gradient[0]).sum()) / length
    pairs = ((outcome.gradient[0], expected), ((outcome.final[0] ** 2).sum(-1), exact.last[0]))
    return [
        float((seen.mean() - mean) * math.sqrt(size.seeds) / seen.std(ddof=1))
        for seen, mean in pairs
    ]


@dataclass(frozen=True)
class _Coupled:
    """The quadratics of a batch, as the simulator takes them."""

    hessians: Array
    pulls: Array
    start: Array

    @property
    def heterogeneous(self) -> bool:
        """Whether they differ: not asked here."""
        return False

    def value(self, point: Array) -> Array:
        """The f of a point; f_inf is not known."""
        mean = self.hessians.mean(axis=0)
        return np.asarray(np.einsum("...a,ab,...b->...", point, mean, point) / 2)

    def gradient(self, point: Array) -> Array:
        """The gradient of f."""
        return np.asarray(point @ self.hessians.mean(axis=0) - self.pulls.mean(axis=0))

    def gradients(self, points: Array) -> Array:
        """The gradients of the f_i."""
        return np.asarray(np.einsum("...ga,gab->...gb", points, self.hessians) - self.pulls)


UNNOTICED = {
    "staleness halved": "N is the exact sum of squared weights; 1/(1 - load) may be too large",
    "Omega^2 halved in the condition, otherwise": "the bound of Schur's test is not reached",
}
"""Wrong constants that no run is known to exceed, and why."""


def tallied(cells: Cells, *, quick: bool) -> Tally:
    """All batches together."""
    batches = _QUICK if quick else _BATCHES
    tasks = [(kind, seed, _SIZES[kind]) for kind, many in batches.items() for seed in range(many)]
    total = Tally()
    for tally in cells(measure, tasks):
        total.add(tally)
    return total


def judge(tally: Tally, *, quick: bool) -> Iterator[Check | str]:
    """Whether the bound of fragments holds, is tight, and would be refuted if it were wrong."""
    kinds = [kind for kind in _SIZES if tally.settings[kind]]
    many, above = (sum(found[kind] for kind in kinds) for found in (tally.settings, tally.above))
    least = _QUICK_LEAST if quick else LEAST
    yield Check(
        f"fragments: no violation of the bound, nor of R^2, on {least:,} random settings or more",
        above + tally.above["R^2"] == 0 and many >= least,
        f"{above} on {many:,}; R^2: {tally.above['R^2']} on {tally.settings['R^2']:,}",
    )
    tightest = max(kinds, key=lambda kind: tally.tightest[kind])
    yield Check(
        f"fragments: measured/bound exceeds {_TIGHT:g} on a kind of problems",
        tally.tightest[tightest] > _TIGHT,
        f"{tally.tightest[tightest]:.4f} on {tightest}",
    )
    missed = [name for name, count in tally.mutations.items() if not count]
    noticed = len(tally.mutations) - len(missed)
    yield Check(
        f"fragments: wrong constants are noticed, all but {len(UNNOTICED)}",
        noticed >= _QUICK_NOTICED if quick else set(missed) <= set(UNNOTICED),
        f"{noticed} of {len(tally.mutations)} are",
    )
    rows = [
        (kind, f"{tally.settings[kind]:,}", tally.above[kind], f"{ratio:.4f}")
        for kind, ratio in sorted(tally.tightest.items())
    ]
    columns = ("problem, largest term", "settings", "violations", "largest measured/bound")
    yield "fragments: measured/bound\n\n" + table(columns, rows)
    lines = [
        (name, f"{count:,}", "" if count else UNNOTICED.get(name, "too few runs"))
        for name, count in sorted(tally.mutations.items())
    ]
    yield "fragments: wrong constants\n\n" + table(("constant", "violations", "why none"), lines)


def checks(cells: Cells, *, quick: bool) -> Iterator[Check | str]:
    """The simulator, then the bound."""
    z = [
        abs(each)
        for row in cells(scores, [(seed,) for seed in range(4 if quick else 40)])
        for each in row
    ]
    yield Check(
        f"fragments: simulator against oracle: |z| < {_SCORE:g}",
        max(z) < _SCORE,
        f"largest {max(z):.2f} of {len(z)} z",
    )
    yield from judge(tallied(cells, quick=quick), quick=quick)
