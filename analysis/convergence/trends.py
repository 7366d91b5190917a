"""A neural network under CO2, SlowMo and local SGD, compared with the bound: trends, not a check.

L of the network is the largest curvature that was met, and f_inf is taken as 0: its constants are
estimates, so the bound may be wrong for it either way. What can be compared is how things move with
tau and with the method, at the best inner step of each cell.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from analysis.convergence import bound
from analysis.convergence.bound import Bound
from analysis.convergence.setting import Array, RunSize, Setting, Variants, variants
from analysis.convergence.simulate import Simulation, disagreement
from co2sim.common.errors import OptionError
from co2sim.common.tables import print_table

_HIDDEN = 16
_CLASSES = 10
_ITERATIONS = 12
_SMALL = 1e-4
"""Length of the step of a finite difference."""


@dataclass(frozen=True, eq=False)
class MLP:
    """One hidden layer of tanh and a softmax, on images [G, n, 64] with labels [G, n].

    Workers that share all images have G = 1. Points are all parameters in a row, [..., d].
    """

    images: Array
    labels: NDArray[np.int64]
    start: Array

    @property
    def heterogeneous(self) -> bool:
        """Whether workers have different images."""
        return len(self.images) > 1

    def value(self, point: Array) -> Array:
        """The mean loss over all images: [...]."""
        images, labels = self._everything()
        _, likely = self._forward(point, images)
        picked = np.take_along_axis(
            likely, np.broadcast_to(labels[:, None], (*likely.shape[:-1], 1)), -1
        )
        return np.asarray(-np.log(np.maximum(picked[..., 0], 1e-300)).mean(axis=-1))

    def gradient(self, point: Array) -> Array:
        """The gradient of f."""
        images, labels = self._everything()
        return self.slope(point, images, labels)

    def gradients(self, points: Array) -> Array:
        """The gradients of the f_i at [..., G, d]."""
        images, labels = (self.images, self.labels) if self.heterogeneous else self._everything()
        return self.slope(points, images, labels)

    def slope(self, point: Array, images: Array, labels: NDArray[np.int64]) -> Array:
        """The gradient on given images [..., n, 64], for points [..., d]."""
        hidden, likely = self._forward(point, images)
        wanted = np.eye(_CLASSES)[labels]
        out = (likely - wanted) / images.shape[-2]
        _, _, second, _ = _unpacked(point, images.shape[-1])
        inner = out @ np.swapaxes(second, -1, -2) * (1 - hidden**2)
        turned = np.swapaxes(np.broadcast_to(images, (*inner.shape[:-1], images.shape[-1])), -1, -2)
        parts = (
            turned @ inner,
            inner.sum(axis=-2),
            np.swapaxes(hidden, -1, -2) @ out,
            out.sum(axis=-2),
        )
        return np.concatenate([part.reshape(*point.shape[:-1], -1) for part in parts], axis=-1)

    def curvature(self, point: Array, rng: np.random.Generator) -> float:
        """The largest eigenvalue of the Hessian of f in magnitude: an estimate by iteration."""
        direction = rng.standard_normal(point.shape)
        largest = 0.0
        for _ in range(_ITERATIONS):
            direction /= np.linalg.norm(direction)
            ahead, behind = point + _SMALL * direction, point - _SMALL * direction
            direction = (self.gradient(ahead) - self.gradient(behind)) / (2 * _SMALL)
            largest = float(np.linalg.norm(direction))
        return largest

    def _everything(self) -> tuple[Array, NDArray[np.int64]]:
        return self.images.reshape(-1, self.images.shape[-1]), self.labels.reshape(-1)

    @staticmethod
    def _forward(point: Array, images: Array) -> tuple[Array, Array]:
        first, bias, second, last = _unpacked(point, images.shape[-1])
        hidden = np.tanh(images @ first + bias[..., None, :])
        scores = hidden @ second + last[..., None, :]
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return hidden, scores / scores.sum(axis=-1, keepdims=True)


def _unpacked(point: Array, inputs: int) -> tuple[Array, Array, Array, Array]:
    ends = np.cumsum([inputs * _HIDDEN, _HIDDEN, _HIDDEN * _CLASSES])
    first, bias, second, last = np.split(point, ends, axis=-1)
    lead = point.shape[:-1]
    return (
        first.reshape(*lead, inputs, _HIDDEN),
        bias,
        second.reshape(*lead, _HIDDEN, _CLASSES),
        last,
    )


@dataclass(frozen=True, slots=True)
class Batches:
    """Gradients of images drawn with replacement from a worker's own."""

    problem: MLP
    size: int

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Indices of images: [*shape, size]."""
        return rng.integers(self.problem.images.shape[1], size=(*shape, self.size))

    def gradients(
        self, points: Array, drawn: NDArray[Any], deviation: Array
    ) -> tuple[Array, Array | None]:
        """The means over the drawn images. Their variances are estimated elsewhere."""
        del deviation
        workers = np.arange(points.shape[-2])[:, None] if self.problem.heterogeneous else 0
        images, labels = self.problem.images[workers, drawn], self.problem.labels[workers, drawn]
        return self.problem.slope(points, images, labels), None

    def variance(self, point: Array, rng: np.random.Generator, draws: int = 200) -> float:
        """Sigma squared at a point [d], estimated from minibatches of all workers."""
        workers = len(self.problem.images)
        drawn = self.draw(rng, (1, draws, workers))[0]
        points = np.broadcast_to(point, (draws, workers, len(point)))
        slopes, _ = self.gradients(points, drawn, np.zeros(1))
        return float(slopes.var(axis=0, ddof=1).sum(axis=-1).mean())


def _scikit_learn() -> Any:
    """The module `sklearn.datasets`. Raises OptionError where scikit-learn is not installed."""
    try:
        from sklearn import datasets  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise OptionError(
            "the data of `trends` come with scikit-learn, which is not installed:"
            " pip install '.[analysis]'"
        ) from error
    return datasets


@cache
def digits(workers: int = 1) -> MLP:
    """The 1,797 images, standardized; with several workers ordered by label and cut in parts."""
    raw, target = _scikit_learn().load_digits(return_X_y=True)
    images = (raw - raw.mean()) / raw.std()
    labels = target.astype(np.int64)
    if workers > 1:
        order = np.argsort(labels, kind="stable")[: len(labels) // workers * workers]
        images, labels = images[order], labels[order]
    inputs = images.shape[1]
    rng = np.random.default_rng(0)
    start = np.concatenate(
        [
            rng.standard_normal(inputs * _HIDDEN) / np.sqrt(inputs),
            np.zeros(_HIDDEN),
            rng.standard_normal(_HIDDEN * _CLASSES) / np.sqrt(_HIDDEN),
            np.zeros(_CLASSES),
        ]
    )
    return MLP(images.reshape(workers, -1, inputs), labels.reshape(workers, -1), start)


METHODS = (("local SGD", 0, 1.0, 0.0), ("SlowMo", 0, 1.0, 0.5), ("CO2", 1, 1.0, 0.5))
"""Name, delay, outer step, momentum."""
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Inner steps, of which every cell gets its best."""
_BATCH = 16
MAX_WORKERS = 256
MAX_KEPT = 10_000
"""Steps times seeds: every round of a run is kept, 180 kB of it for each."""
_VISITS = 6
"""Rounds of a run at which constants are estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One cell: a method and a tau, at its best inner step.

    `measured` is A, `error` its standard error over seeds, `loss` the training loss at the end,
    `to_target` the local steps until the loss was at most the target, on the seeds that got there
    (`reached` of them). `smoothness`, `noise`, `spread` are the largest estimates along the run;
    `bound` is what the theorem would give with them, None where no bound holds at this step.
    `largest_step` is the largest gamma it would allow.
    """

    method: str
    tau: int
    inner_step: float
    measured: float
    error: float
    loss: float
    to_target: float | None
    reached: int
    smoothness: float
    noise: float
    spread: float
    bound: float | None
    largest_step: float


def trends(
    *,
    workers: int = 4,
    steps: int = 512,
    taus: Sequence[int] = (1, 4, 16),
    seeds: int = 3,
    target: float = 0.2,
    by_label: bool = False,
) -> Iterator[Trend]:
    """Train with every method and tau for the same number of local steps."""
    network = digits(workers if by_label else 1)
    for name, delay, outer_step, momentum in METHODS:
        for tau in taus:
            which = variants(np.array(_STEPS), outer_step=outer_step, momentum=momentum)
            size = RunSize(
                workers=workers,
                rounds=steps // tau,
                local_steps=tau,
                seeds=seeds,
                delay=delay,
            )
            simulation = Simulation(network, which, size, sampler=Batches(network, _BATCH))
            visited = [simulation.mean]
            for _ in range(size.rounds):
                simulation.next_round()
                visited.append(simulation.mean)
            outcome = simulation.outcome()
            loss = outcome.value.mean(axis=1)
            best = int(np.nanargmin(np.where(np.isfinite(loss), loss, np.inf)))
            path = np.array([points[best] for points in visited])
            setting = _estimated(network, which, best, path, size)
            yield _trend(name, setting, outcome.gradient[best], network.value(path), target)


def _estimated(network: MLP, which: Variants, best: int, path: Array, size: RunSize) -> Setting:
    """The setting of a variant, with the largest constants that its first seed met.

    `path` has the points of every round, [rounds + 1, seeds, d].
    """
    rng = np.random.default_rng(4)
    visited = [path[turn, 0] for turn in np.linspace(0, size.rounds, _VISITS, dtype=int)]
    sampler = Batches(network, _BATCH)
    return Setting(
        smoothness=max(network.curvature(point, rng) for point in visited),
        noise=max(sampler.variance(point, rng) for point in visited),
        heterogeneity=max(float(disagreement(network, point, size.workers)) for point in visited),
        gap=float(network.value(network.start)),
        workers=size.workers,
        rounds=size.rounds,
        local_steps=size.local_steps,
        inner_step=float(which.inner_step[best]),
        outer_step=float(which.outer_step[best]),
        momentum=float(which.momentum[best]),
        delay=size.delay,
    )


def _trend(name: str, setting: Setting, gradient: Array, losses: Array, target: float) -> Trend:
    """`gradient` is A by seed, `losses` [rounds + 1, seeds]."""
    below = losses <= target
    first = np.where(below.any(axis=0), below.argmax(axis=0), -1)
    got = first[first >= 0]
    covered = bound.evaluate(setting)
    return Trend(
        method=name,
        tau=setting.local_steps,
        inner_step=setting.inner_step,
        measured=float(gradient.mean()),
        error=float(gradient.std(ddof=1) / np.sqrt(len(gradient))) if len(gradient) > 1 else 0.0,
        loss=float(losses[-1].mean()),
        to_target=float(got.mean()) * setting.local_steps if len(got) else None,
        reached=len(got),
        smoothness=setting.smoothness,
        noise=setting.noise,
        spread=setting.heterogeneity,
        bound=covered.total if isinstance(covered, Bound) else None,
        largest_step=bound.largest_inner_step(setting),
    )


LABEL = (
    "A trend, not a check: L, sigma^2 and zeta^2 are the largest estimates at a few points of each"
    " run, f_inf is taken as 0, and the inner step is the best of a few."
)


def to_dict(lines: Sequence[Trend]) -> dict[str, Any]:
    """Plain values for JSON."""
    return {"label": LABEL, "trends": [asdict(trend) for trend in lines]}


def print_all(out: Console, lines: Sequence[Trend], target: float) -> None:
    """The table, under its label."""
    rows = [
        (
            trend.method,
            f"{trend.tau}",
            f"{trend.inner_step:g}",
            f"{trend.largest_step:.2g}",
            f"{trend.loss:.3f}",
            "-" if trend.to_target is None else f"{trend.to_target:.0f} ({trend.reached} seeds)",
            f"{trend.measured:.3g} ± {trend.error:.1g}",
            "no bound" if trend.bound is None else f"{trend.bound:.3g}",
            f"{trend.smoothness:.2f}",
            f"{trend.noise:.2f}",
            f"{trend.spread:.2f}",
        )
        for trend in lines
    ]
    columns = (
        *("method", "tau", "best gamma", "feasible", "last loss", f"steps to {target:g}"),
        *("mean |grad f|^2", "bound", "L", "sigma^2", "zeta^2"),
    )
    print_table(out, "a small network on digits", columns, rows)
    out.print(LABEL, highlight=False, markup=False)
