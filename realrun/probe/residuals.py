"""How far predicted times are off those that were measured, and a line through the latter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, BytesPerSecond, Seconds
from co2sim.schedule.schedule import Compute
from realrun.probe.samples import ComputeSample, Sample

Vector: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Residuals:
    """Relative errors |predicted / measured - 1|: the median, and the worst.

    `last` is that of the last one, of the largest size, with its sign: above 0 if the prediction
    is too long.
    """

    median: float
    worst: float
    last: float


@dataclass(frozen=True, slots=True)
class Line:
    """`latency` + bytes / `bandwidth`, fitted to the sizes of one kind of collective alone."""

    latency: Seconds
    bandwidth: BytesPerSecond
    residuals: Residuals

    def at(self, size: Bytes) -> Seconds:
        """The time that a buffer of this size takes."""
        return self.latency + size / self.bandwidth


def residuals(predicted: Iterable[Seconds], measured: Iterable[Seconds]) -> Residuals:
    """How far predictions are off."""
    errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    return Residuals(median(map(abs, errors)), max(map(abs, errors)), errors[-1])


def fit_line(samples: Sequence[Sample]) -> Line:
    """Least squares of the relative error over a latency and a time per byte, neither below 0.

    The time of a byte, where it cannot be told from 0, is a thousandth of what the fastest and the
    largest sample would allow. Raises OptionError for fewer than two sizes.
    """
    sizes = np.array([sample.work.bytes for sample in samples])
    times = np.array([sample.seconds for sample in samples])
    if len(set(sizes)) < 2:  # noqa: PLR2004 - a line has two parameters
        raise OptionError("a line needs collectives of at least two sizes")
    root = np.sqrt(weights(samples))
    terms = np.stack([root / times, root * sizes / times], axis=1)
    scale = np.linalg.norm(terms, axis=0)
    latency, per_byte = nnls(terms / scale, root)[0] / scale
    per_byte = per_byte or min(times) / max(sizes) / 1000
    line = Line(float(latency), float(1 / per_byte), Residuals(0.0, 0.0, 0.0))
    return replace(line, residuals=residuals([line.at(size) for size in sizes], times))


def scatter(
    samples: Sequence[Sample] | Sequence[ComputeSample], predicted: Sequence[Seconds]
) -> float:
    """The standard deviation of log(predicted / measured) of one time of a sample.

    It has two parts: how far the prediction is off, and how far the machine drifts between passes.
    A sample counts as in the fit.
    """
    off = np.log(predicted) - np.log([sample.seconds for sample in samples])
    drift = np.array([sample.drift for sample in samples])
    return float(np.sqrt(np.average(off**2 + drift**2, weights=weights(samples))))


def weights(samples: Iterable[Sample | ComputeSample]) -> Vector:
    """A sample counts by the square root of its size: bytes, or FLOP of a kernel.

    Time is spent in large collectives; and small ones still tell the latency, as nothing else does.
    """
    works = [sample.work for sample in samples]
    roots = np.sqrt([work.flops if isinstance(work, Compute) else work.bytes for work in works])
    weights: Vector = roots / roots.max()
    return weights
