"""The constants of the bound, as a training shows them. Needs no torch.

L, sigma squared, zeta squared and the gap are those of `co2analysis bound` and `co2analysis tau`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from co2sim.strategies import LocalSteps
from co2sim.strategies.co2 import CO2, PublishedCO2
from realrun.train.settings import TrainSettings

BOUNDED = ("co2", "co2.published", "slowmo", "local_sgd")
"""The strategies with local steps that the bound is about."""

_WITH_OUTER_STEP = ("co2", "co2.published", "slowmo")
"""Those of them whose averages are not taken as they are."""

_SMALL, _LARGE = 1e-4, 1e4
"""Errors of numbers that are easier to read with decimals than with an exponent."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        """As many decimals as the error has in two significant figures: "0.812 ± 0.013"."""
        if not _SMALL <= self.error < _LARGE:
            return f"{self.value:.4g} ± {self.error:.2g}"
        decimals = max(0, 1 - math.floor(math.log10(self.error)))
        return f"{self.value:.{decimals}f} ± {self.error:.{decimals}f}"

    @property
    def floored(self) -> "Estimate":
        """For what cannot be below 0, as its unbiased estimate can."""
        return Estimate(max(0.0, self.value), self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was found at the mean of all workers after a step.

    `losses` are means over workers, one per batch. `gradient` is |grad f|^2, `noise` sigma squared,
    `heterogeneity` zeta squared: unbiased, so that all but `noise` may be below 0. `curvature` is
    the largest |eigenvalue| of the Hessian H of some samples: |H v| after some `iterations` for
    v, the last of which raised it by the share `change`. `elsewhere` is |H v| of other samples for
    the same v. `along_step` is |grad f(x + s) - grad f(x)| / |s| for the step s that follows; None
    where the mean did not move.
    """

    step: int
    losses: tuple[float, ...]
    gradient: Estimate
    noise: Estimate
    heterogeneity: Estimate
    curvature: float
    elsewhere: Estimate
    iterations: int
    change: float
    along_step: float | None = None

    @property
    def loss(self) -> Estimate:
        """Mean over batches."""
        return mean(self.losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What was found at points of a training; the first is its start.

    `samples` are those of a worker's batch, `micro_batch` those of a rank's share. The bound wants
    constants that hold at all points, so each of these is the largest that was seen.
    """

    workers: int
    samples: int
    micro_batch: int
    points: tuple[Point, ...]

    @property
    def smoothness(self) -> float:
        """L: the largest curvature, in any direction or along a step."""
        return max(max(point.curvature, point.along_step or 0.0) for point in self.points)

    @property
    def noise(self) -> Estimate:
        """Sigma squared."""
        return max((point.noise for point in self.points), key=_value)

    @property
    def heterogeneity(self) -> Estimate:
        """Zeta squared."""
        return max((point.heterogeneity for point in self.points), key=_value).floored

    @property
    def gap(self) -> Estimate:
        """Loss at the start minus the lowest, on the same samples: at most f(x_0) - inf f."""
        first = self.points[0].losses
        falls = (np.subtract(first, point.losses) for point in self.points)
        return max((mean(fall.tolist()) for fall in falls), key=_value)

    def to_dict(self, settings: TrainSettings, delay: int | None) -> dict[str, Any]:
        """For a record, with the commands that take the constants."""
        return {
            "smoothness": self.smoothness,
            **{name: asdict(getattr(self, name)) for name in ("noise", "heterogeneity", "gap")},
            "workers": self.workers,
            "samples": self.samples,
            "commands": commands(self, settings, delay),
            "points": [{**asdict(point), "loss": asdict(point.loss)} for point in self.points],
        }


def _value(estimate: Estimate) -> float:
    return estimate.value


def mean(values: Sequence[float]) -> Estimate:
    """Of independent values, at least two."""
    return Estimate(float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values)))


def moments(by_worker: np.ndarray, shared: np.ndarray) -> tuple[Estimate, Estimate, Estimate]:
    """Sigma squared, zeta squared and |grad f|^2 from inner products of k >= 3 gradients.

    `by_worker` [k, k]: <g_ia, g_ib> of worker i's gradients of batches a and b, averaged over
    workers. `shared` [k, k]: the same of their means over workers, <g_a, g_b>. Batches are
    independent, so that off the diagonal the noise drops out: the first has the expectation mean
    |grad f_i|^2 there, and shared |grad f|^2. So all three are unbiased. Errors are those of the
    jackknife over batches,
    which is never too small on average (Efron and Stein 1981). Where zeta squared is 0 its error is
    sqrt(2 (k - 1) / (k - 2)) times too large, 1.5 for k = 8: then nothing but products of noise of
    two batches enters.
    """
    count = len(by_worker)
    rest = [[b for b in range(count) if b != a] for a in range(count)]
    without = np.array([_moments(by_worker[np.ix_(r, r)], shared[np.ix_(r, r)]) for r in rest])
    errors = np.sqrt((count - 1) * without.var(axis=0))
    values = _moments(by_worker, shared)
    noise, spread, gradient = map(Estimate, values.tolist(), errors.tolist())
    return noise, spread, gradient


def length(products: np.ndarray) -> Estimate:
    """Length of the expectation of k >= 3 independent vectors, from their inner products [k, k].

    Its square is unbiased; 0 where that comes out below 0.
    """
    squared = moments(products, products)[2]
    value = math.sqrt(max(0.0, squared.value))
    return Estimate(value, squared.error / (2 * value) if value else math.sqrt(squared.error))


def _moments(by_worker: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Sigma squared, zeta squared, |grad f|^2."""
    mine, common = (
        (matrix.sum() - np.trace(matrix)) / (len(matrix) * (len(matrix) - 1))
        for matrix in (by_worker, shared)
    )
    return np.array([np.trace(by_worker) / len(by_worker) - mine, mine - common, common])


def commands(estimates: Estimates, settings: TrainSettings, delay: int | None) -> dict[str, str]:
    """The command lines that take the constants, by command.

    `delay` is the number of steps after which averages were used, where there is one. Zeta squared
    is left out: workers of a training here draw from the same data, so that it is 0.
    """
    constants = (
        f"--smoothness {estimates.smoothness:.4g} --noise {estimates.noise.value:.4g}"
        f" --gap {estimates.gap.value:.4g}"
    )
    strategy = settings.parsed
    late = " --delay 0"
    if isinstance(strategy, PublishedCO2):
        late = "" if strategy.staleness == 1 else f" --delay '{strategy.staleness} rounds'"
    if isinstance(strategy, CO2) and delay is not None:
        keep, predict = strategy.kept()
        late = f" --delay {delay} --keep {keep:g} --predict {predict:g}"
        late += f" --fragments {strategy.parts()}" if strategy.parts() > 1 else ""
    name = "co2"
    if isinstance(strategy, LocalSteps):
        name = _without_tau(strategy, delay) if strategy.name in BOUNDED else "local_sgd"
    return {
        "bound": f"co2analysis bound {constants} --workers {estimates.workers}"
        f" --rounds {max(1, settings.last // settings.round)} --local-steps {settings.round}{late}",
        "tau": f"co2analysis tau {constants} --strategy {name}"
        f" --micro-batch {estimates.micro_batch} --accumulation 1 --cluster CLUSTER --model MODEL",
    }


def _without_tau(strategy: LocalSteps, delay: int | None) -> str:
    """A strategy as `co2analysis tau` takes it: tau is what that chooses.

    `delay` stands for one that was measured.
    """
    measured = {}
    if isinstance(strategy, CO2) and delay:
        measured = {"delay": delay, "fragments": strategy.parts()}
    texts = [
        f"{option.name}={str(value).lower()}"
        for option in fields(strategy)  # type: ignore[arg-type]
        if option.name != "tau"
        and (value := measured.get(option.name, getattr(strategy, option.name))) != option.default
    ]
    return f"{strategy.name}:{','.join(texts)}" if texts else strategy.name


def unlike_sgd(settings: TrainSettings) -> list[str]:
    """What makes local steps others than those of plain SGD, as texts."""
    steps = ["AdamW"] if settings.optimizer == "adamw" else []
    if settings.optimizer == "sgd" and settings.momentum:
        steps.append(f"momentum {settings.momentum:g}")
    if settings.weight_decay:
        steps.append(f"weight decay {settings.weight_decay:g}")
    if settings.clip_grad:
        steps.append(f"gradients clipped at {settings.clip_grad:g}")
    return steps


def limits(settings: TrainSettings) -> list[str]:
    """What the numbers do not cover, a sentence or two each."""
    gap = "The gap is at most f(x_0) - inf f: a longer training would see a lower loss."
    spread = "All workers draw from the same data: zeta^2 is 0, and what is measured is chance."
    curvature = (
        "L of some samples is on average above that of all data; on other samples, with the"
        " direction that was found, it is on average below."
    )
    steps = unlike_sgd(settings)
    sentences = [gap, spread, curvature]
    if steps:
        sentences.append(
            f"The bound is about plain SGD: it does not cover {', '.join(steps)}. It ranks tau and"
            " delay; its gamma is not your lr."
        )
    strategy = settings.parsed
    if isinstance(strategy, CO2) and strategy.preview:
        sentences.append("The bound is not about a preview: the commands are those without.")
    if strategy.name in _WITH_OUTER_STEP:
        sentences.append(
            "The commands have an outer step of 1 without momentum or penalty: for others add"
            " --outer-step, --momentum, --most-penalty."
        )
    if isinstance(strategy, LocalSteps) and strategy.name not in BOUNDED:
        sentences.append(
            f"The bound is not about {strategy.name}: the commands are those of local_sgd."
        )
    return sentences
