"""What a probe measures, and how far a fit is off: times of collectives and of kernels."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, BytesPerSecond, Seconds
from co2sim.hardware.cluster import Backend
from co2sim.schedule.schedule import Collective, Compute, Group, Kind, Layout

Before = Literal["meeting", "pause", "equal"]


@dataclass(frozen=True, slots=True)
class Sample:
    """The time that a collective took: the median of its repetitions.

    `drift` is the standard deviation of the logarithms of the medians of the passes. `after` says
    what came before: all ranks met, and then perhaps paused; or an equal collective.
    """

    work: Collective
    seconds: Seconds
    drift: float = 0.0
    after: Before = "meeting"


@dataclass(frozen=True, slots=True)
class ComputeSample:
    """The time that a kernel took on the slowest rank: the median of its repetitions.

    `drift` as in `Sample`.
    """

    work: Compute
    seconds: Seconds
    drift: float = 0.0


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long an op takes while the other kind runs as it takes alone.

    `compute`: a kernel during all-reduces of its rank. `communication`: an all-reduce during
    kernels, which takes `seconds` then.
    """

    compute: float
    communication: float
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that a probe measured.

    `machine` describes the hardware, `generation` is as of `GPU`, `memory` is that of one rank.
    `compute` has samples by precision, `copies` those that only move memory; both are empty when no
    kernel was run. `launch` is the time of an empty op, `handover` what it takes in addition when
    it waits for another stream. `slowdowns` are those of a short all-reduce and a long one, where
    they were measured, and `together` says how many times as long the kernels of two streams take
    as those of one.
    """

    layout: Layout
    backend: Backend
    machine: str
    generation: str | None = None
    memory: Bytes
    collectives: tuple[Sample, ...]
    compute: Mapping[str, tuple[ComputeSample, ...]]
    copies: tuple[ComputeSample, ...]
    launch: Seconds
    handover: Seconds
    slowdowns: tuple[Slowdown, ...]
    together: float | None = None


def by_kind(samples: Iterable[Sample]) -> dict[tuple[Group, Kind], list[Sample]]:
    """The samples by group and kind of collective, by rising size; not those after an equal one."""
    found: dict[tuple[Group, Kind], list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.work.bytes):
        if sample.after != "equal":
            found.setdefault((sample.work.group, sample.work.kind), []).append(sample)
    return found


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

    Where the time of a byte cannot be distinguished from 0, it is a thousandth of what the fastest
    and the largest sample would allow. Raises OptionError for fewer than two sizes.
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
