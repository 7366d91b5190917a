"""From measured times to the numbers of a cluster: pure functions.

The links are fitted through `cost.footprint`, the formula that predictions are made with, so the
residuals say how far a prediction of these very collectives would be off.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from co2sim.cluster import GPU, Backend, Cluster, Link
from co2sim.cost import footprint
from co2sim.errors import OptionError
from co2sim.schedule import Collective, Compute, Group, Kind, Layout
from co2sim.units import Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds

_OUTLIER = 0.2
"""Errors of log time beyond this count linearly, not squared (Huber 1964)."""

_STEPS = 60
_LEAST_LATENCY: Seconds = 1e-9
_LEAST_SHARE = 0.1  # of a kernel's time is not launch overhead; if it seems so, that is noise

Vector: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """The time that a collective took: the median of its repetitions."""

    work: Collective
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class ComputeSample:
    """The time that a kernel took on the slowest rank: the median of its repetitions."""

    work: Compute
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long something takes beside the other as alone.

    `compute` is a kernel under all-reduces of its rank, `communication` one of these under kernels.
    """

    compute: float
    communication: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a probe saw.

    `compute` has samples by precision, `copies` those that only move memory; both are empty when
    no kernel was run. `launch` is the time of an empty op, `handover` what it takes in addition
    when it waits for another stream. `slowdown` is None if it was not measured.
    """

    layout: Layout
    backend: Backend
    machine: str
    memory: Bytes
    collectives: tuple[Sample, ...]
    compute: Mapping[str, tuple[ComputeSample, ...]]
    copies: tuple[ComputeSample, ...]
    launch: Seconds
    handover: Seconds
    slowdown: Slowdown | None


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


def by_kind(samples: Iterable[Sample]) -> dict[tuple[Group, Kind], list[Sample]]:
    """The samples of every kind and group, by rising size."""
    found: dict[tuple[Group, Kind], list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.work.bytes):
        found.setdefault((sample.work.group, sample.work.kind), []).append(sample)
    return found


def fit_line(samples: Sequence[Sample]) -> Line:
    """Weighted least squares of the relative error, over two numbers that are not negative.

    Raises OptionError for fewer than two sizes.
    """
    sizes = np.array([sample.work.bytes for sample in samples])
    times = np.array([sample.seconds for sample in samples])
    if len(set(sizes)) < 2:  # noqa: PLR2004 - a line has two parameters
        raise OptionError("a line needs collectives of at least two sizes")
    root = np.sqrt(_weights(samples))
    first, second = root / times, root * sizes / times
    latency, per_byte = np.linalg.lstsq(np.stack([first, second], axis=1), root)[0]
    if latency < 0:
        latency, per_byte = 0.0, root @ second / (second @ second)
    elif per_byte <= 0:  # no slope that can be told from noise: so fast that it does not matter
        latency, per_byte = root @ first / (first @ first), min(times) / max(sizes) / 1000
    found = Line(float(latency), float(1 / per_byte), Residuals(0.0, 0.0, 0.0))
    return replace(found, residuals=residuals([found.at(s) for s in sizes], times))


def _weights(samples: Iterable[Sample]) -> Vector:
    """A sample counts by the square root of its size.

    Time is spent in large collectives; and small ones still tell the latency, as nothing else does.
    """
    roots = np.sqrt([sample.work.bytes for sample in samples])
    weights: Vector = roots / roots.max()
    return weights


def bare(layout: Layout, backend: Backend, intra: Link, inter: Link) -> Cluster:
    """A cluster of which only the links matter."""
    gpu = GPU("any", 1.0, 1.0, {"fp32": 1.0}, ((1.0, 1.0),))
    size = (layout.nodes, layout.gpus_per_node)
    return Cluster("probed", gpu, *size, intra, inter, backend, "stream")


def predict(samples: Iterable[Sample], cluster: Cluster) -> list[Seconds]:
    """What the cost model says about every sample."""
    return [footprint(sample.work, cluster).alone(cluster) for sample in samples]


def fit_links(
    samples: Sequence[Sample], layout: Layout, backend: Backend
) -> tuple[Link | None, Link | None]:
    """The links inside a node and between nodes with which predictions come closest.

    Minimizes the errors of the log of the time, with little regard to outliers, over latency and
    payload bandwidth of both links at once. None for a link that the layout does not have.
    Raises OptionError when no collective used one that it has.
    """
    present = [layout.gpus_per_node > 1, layout.nodes > 1]
    if not any(present):
        return None, None
    times = np.log([sample.seconds for sample in samples])
    weights = _weights(samples)
    start = _bounds(samples, layout, backend)
    free = np.repeat(present, 2)

    def links(values: Vector) -> tuple[Link, Link]:
        every = start.copy()
        every[free] = values
        near_latency, near, far_latency, far = map(float, np.exp(every))
        return Link(near, near_latency), Link(far, far_latency)

    def errors(values: Vector) -> Vector:
        cluster = bare(layout, backend, *links(values))
        found: Vector = np.log(predict(samples, cluster)) - times
        return found

    found = links(_least_squares(errors, start[free], weights))
    intra, inter = (link if here else None for link, here in zip(found, present, strict=True))
    return intra, inter


def _bounds(samples: Sequence[Sample], layout: Layout, backend: Backend) -> Vector:
    """Log latency and log bandwidth of both links: the bounds that single samples give.

    No latency is above, and no bandwidth below; a good guess to start from.
    """
    found = []
    for place, count in enumerate((layout.gpus_per_node, layout.nodes)):
        links = [Link(1e18, float(place == 0)), Link(1e18, float(place == 1))]
        cluster = bare(layout, backend, *links)
        costs = [(footprint(sample.work, cluster), sample.seconds) for sample in samples]
        steps = [seconds / cost.latency for cost, seconds in costs if cost.latency]
        speed = max((cost.loads(cluster)[place] / s for cost, s in costs), default=0.0)
        if count > 1 and not (steps and speed):
            where = ("inside a node", "between nodes")[place]
            raise OptionError(f"the link {where} cannot be fitted: no collective used it")
        found += [max(_LEAST_LATENCY, min(steps, default=0.0)), max(1.0, speed)]
    bounds: Vector = np.log(found)
    return bounds


def _least_squares(errors: Callable[[Vector], Vector], start: Vector, weights: Vector) -> Vector:
    """Minimize the weighted Huber loss of `errors` (Levenberg 1944, Marquardt 1963)."""
    values, damping = start, 1e-2
    here = errors(values)
    for _ in range(_STEPS):
        slope = np.stack(
            [(errors(values + step) - here) / 1e-4 for step in 1e-4 * np.eye(len(values))], axis=1
        )
        weighted = slope.T * (weights * np.minimum(1, _OUTLIER / np.maximum(abs(here), 1e-12)))
        step = np.linalg.solve(weighted @ slope + damping * np.eye(len(values)), -weighted @ here)
        tried = np.maximum(values + np.clip(step, -1, 1), np.log(_LEAST_LATENCY))
        there = errors(tried)
        if _loss(there, weights) < _loss(here, weights):
            values, here, damping = tried, there, damping / 4
        else:
            damping *= 8
    return values


def _loss(errors: Vector, weights: Vector) -> float:
    size = abs(errors)
    huber = np.where(size < _OUTLIER, size**2 / 2, _OUTLIER * (size - _OUTLIER / 2))
    return float((weights * huber).sum())


def attained(samples: Iterable[ComputeSample], launch: Seconds) -> dict[Flops, FlopsPerSecond]:
    """Speed by size, launch overhead aside, as `cost.compute_time` adds it."""
    return {
        sample.work.flops: sample.work.flops / _net(sample, launch)
        for sample in sorted(samples, key=lambda sample: sample.work.flops)
    }


def fit_gpu(measured: Measured) -> GPU | None:
    """The processor of a rank; None if no kernel was run.

    Nothing is known of what it could attain at most, so its best speed is its peak. Efficiencies
    are those of the first precision. The memory's bandwidth is that of the largest copy, which no
    cache holds.
    """
    if not measured.compute:
        return None
    launch = measured.launch
    found = {name: attained(samples, launch) for name, samples in measured.compute.items()}
    peak = {name: max(speeds.values()) for name, speeds in found.items()}
    first = next(iter(found))
    copy = max(measured.copies, key=lambda sample: sample.work.memory_bytes)
    return GPU(
        measured.machine,
        measured.memory,
        copy.work.memory_bytes / _net(copy, launch),
        peak,
        tuple((flops, speed / peak[first]) for flops, speed in found[first].items()),
        launch_overhead=launch,
    )


def _net(sample: ComputeSample, launch: Seconds) -> Seconds:
    """The time without launch overhead."""
    return max(sample.seconds - launch, _LEAST_SHARE * sample.seconds)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What was made of it.

    `processor` is None if no kernel was run, a link if it joins no two ranks. `lines` fit every
    kind and group by itself; `misfit` is how far predictions from the links are off.
    """

    processor: GPU | None
    intra: Link | None
    inter: Link | None
    lines: Mapping[tuple[Group, Kind], Line]
    misfit: Mapping[tuple[Group, Kind], Residuals]
    overall: Residuals | None


def fit(measured: Measured) -> Fitted:
    """Fit everything that was measured."""
    layout, backend, samples = measured.layout, measured.backend, measured.collectives
    intra, inter = fit_links(samples, layout, backend)
    here = intra or inter
    if here is None:
        return Fitted(fit_gpu(measured), None, None, {}, {}, None)
    cluster = bare(layout, backend, intra or here, inter or here)

    def off(some: Sequence[Sample]) -> Residuals:
        return residuals(predict(some, cluster), [sample.seconds for sample in some])

    kinds = by_kind(samples)
    lines = {key: fit_line(some) for key, some in kinds.items()}
    misfit = {key: off(some) for key, some in kinds.items()}
    return Fitted(fit_gpu(measured), intra, inter, lines, misfit, off(samples))
