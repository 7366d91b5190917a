"""From measured times to the numbers of a cluster: pure functions.

The links are fitted through `cost.footprint`, the formula that predictions are made with. So the
residuals say how far a prediction of these very collectives would be off.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from co2sim.cluster import GPU, Backend, Cluster, Link
from co2sim.cost import compute_time, footprint
from co2sim.errors import OptionError
from co2sim.schedule import Compute, Group, Kind, Layout
from co2sim.units import Bytes, BytesPerSecond, Seconds
from realrun.probe.hosts import fit_bursts, fit_hosts
from realrun.probe.processor import fit_gpu
from realrun.probe.samples import ComputeSample, Measured, Sample, by_kind

_OUTLIER = 0.2
"""Errors of log time beyond this count linearly, not squared (Huber 1964)."""

_TOLERANCE = 1e-10
"""Relative change of the loss, of the numbers and of the slope at which a fit of links ends."""
_LEAST_LATENCY: Seconds = 1e-9
_SLOWEST = 1e-3
"""A fitted bandwidth is at least this fraction of the one that the fastest sample needs."""

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
    root = np.sqrt(_weights(samples))
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
    return float(np.sqrt(np.average(off**2 + drift**2, weights=_weights(samples))))


def _weights(samples: Iterable[Sample | ComputeSample]) -> Vector:
    """A sample counts by the square root of its size: bytes, or FLOP of a kernel.

    Time is spent in large collectives; and small ones still tell the latency, as nothing else does.
    """
    works = [sample.work for sample in samples]
    roots = np.sqrt([work.flops if isinstance(work, Compute) else work.bytes for work in works])
    weights: Vector = roots / roots.max()
    return weights


def bare(
    layout: Layout, backend: Backend, intra: Link, inter: Link, call_overhead: Seconds = 0.0
) -> Cluster:
    """A cluster of which only communication matters."""
    gpu = GPU("any", 1.0, 1.0, {"fp32": 1.0}, ((1.0, 1.0),))
    size = (layout.nodes, layout.gpus_per_node)
    return Cluster(
        "probed", gpu, *size, intra, inter, backend, "stream", call_overhead=call_overhead
    )


def predict(samples: Iterable[Sample], cluster: Cluster) -> list[Seconds]:
    """What the cost model says about every sample."""
    return [footprint(sample.work, cluster).alone(cluster) for sample in samples]


def fit_links(
    samples: Sequence[Sample], layout: Layout, backend: Backend, hosts: Cluster | None = None
) -> tuple[Link | None, Link | None]:
    """The links inside a node and between nodes with which predictions come closest.

    Minimizes Huber's loss of the errors of log time over latency and payload bandwidth of both
    links at once. Errors up to 0.2, about 20 %, count squared, larger ones linearly: `f_scale`.
    None for a link that the layout does not have. Bursts, and what hosts add to a call, are those
    of `hosts`, if given. Raises OptionError when no collective used a link that is there.
    """
    present = [layout.gpus_per_node > 1, layout.nodes > 1]
    if not any(present):
        return None, None
    times = np.log([sample.seconds for sample in samples])
    start = _bounds(samples, layout, backend)
    free = np.repeat(present, 2)
    call = hosts.call_overhead if hosts else 0.0
    near_link, far_link = (
        (_payload(hosts.intra), _payload(hosts.inter)) if hosts else (Link(1.0), Link(1.0))
    )

    def links(values: Vector) -> tuple[Link, Link]:
        every = start.copy()
        every[free] = values
        near_latency, near, far_latency, far = map(float, np.exp(every))
        return (
            replace(near_link, bandwidth=near, latency=near_latency),
            replace(far_link, bandwidth=far, latency=far_latency),
        )

    def errors(values: Vector) -> Vector:
        cluster = bare(layout, backend, *links(values), call)
        off: Vector = np.log(predict(samples, cluster)) - times
        return off

    latency, slowest = np.log(_LEAST_LATENCY), np.maximum(0.0, start + np.log(_SLOWEST))
    least = np.array([latency, slowest[1], latency, slowest[3]])
    fitted = least_squares(
        errors,
        start[free],
        bounds=(least[free], np.inf),
        loss=_huber(_weights(samples)),  # type: ignore[arg-type] # the stubs add an argument
        f_scale=_OUTLIER,
        ftol=_TOLERANCE,
        xtol=_TOLERANCE,
        gtol=_TOLERANCE,
    )
    intra, inter = (
        link if here else None for link, here in zip(links(fitted.x), present, strict=True)
    )
    return intra, inter


def _huber(weights: Vector) -> Callable[[Vector], Vector]:
    """Huber's loss with a weight per sample, for `scipy.optimize.least_squares`.

    Its own loss "huber" has no weights. Roots of weights on the errors would not do: they would
    move the border between squared and linear as well. Given z, the squares of the errors over
    `f_scale`, this gives the loss of each, and its first and second derivative by z.
    """

    def loss(z: Vector) -> Vector:
        root, small = np.sqrt(np.maximum(z, 1.0)), z <= 1
        values: Vector = np.stack(
            [np.where(small, z, 2 * root - 1), 1 / root, np.where(small, 0.0, -0.5 / root**3)]
        )
        return weights * values

    return loss


def _bounds(samples: Sequence[Sample], layout: Layout, backend: Backend) -> Vector:
    """Log latency and log bandwidth of both links, as single samples bound them.

    The fit starts here. Without noise no latency is above these, and no bandwidth below.
    """
    numbers = []
    for place, count in enumerate((layout.gpus_per_node, layout.nodes)):
        links = [Link(1e18, float(place == 0)), Link(1e18, float(place == 1))]
        cluster = bare(layout, backend, links[0], links[1])
        costs = [(footprint(sample.work, cluster), sample.seconds) for sample in samples]
        steps = [seconds / cost.latency for cost, seconds in costs if cost.latency]
        speed = max((cost.loads(cluster)[place] / s for cost, s in costs), default=0.0)
        if count > 1 and not (steps and speed):
            where = ("inside a node", "between nodes")[place]
            raise OptionError(f"the link {where} cannot be fitted: no collective used it")
        numbers += [max(_LEAST_LATENCY, min(steps, default=0.0)), max(1.0, speed)]
    bounds: Vector = np.log(numbers)
    return bounds


@dataclass(frozen=True, slots=True)
class Fitted:
    """The numbers of a cluster, and how well they fit.

    `processor` is None if no kernel was run, a link if it joins no two ranks. `lines` fit every
    kind and group by itself; `misfit` says how far predictions from the links are off there, and
    `overall` the same for all samples at once. `stated` says that bandwidths were not fitted,
    `one_host` that all ranks are in a lab. The scatters are those of kernels and collectives, None
    where none was measured.
    """

    processor: GPU | None
    intra: Link | None
    inter: Link | None
    lines: Mapping[tuple[Group, Kind], Line]
    misfit: Mapping[tuple[Group, Kind], Residuals]
    overall: Residuals | None
    compute_scatter: float | None = None
    communication_scatter: float | None = None
    call_overhead: Seconds = 0.0
    stated: bool = False
    one_host: bool = False


def fit(measured: Measured, lab: Cluster | None = None, *, rates: bool = True) -> Fitted:
    """Fit everything that was measured.

    In a `lab` its bursts are taken as stated, and without `rates` its bandwidths, too.
    """
    layout, backend, samples = measured.layout, measured.backend, measured.collectives
    hosts = fit_hosts(samples, lab) if lab else None
    if hosts and not rates:
        hosts = fit_bursts(samples, hosts)
        intra: Link | None = _payload(hosts.intra) if layout.gpus_per_node > 1 else None
        inter: Link | None = _payload(hosts.inter) if layout.nodes > 1 else None
    else:
        intra, inter = fit_links(samples, layout, backend, hosts)
    here = intra or inter
    if here is None:
        return Fitted(fit_gpu(measured), None, None, {}, {}, None)
    call = hosts.call_overhead if hosts else 0.0
    cluster = bare(layout, backend, intra or here, inter or here, call)

    def off(some: Sequence[Sample]) -> Residuals:
        return residuals(predict(some, cluster), [sample.seconds for sample in some])

    kinds = by_kind(samples)
    lines = {key: fit_line(some) for key, some in kinds.items()}
    misfit = {key: off(some) for key, some in kinds.items()}
    gpu, kernel_scatter = fit_gpu(measured), None
    if gpu is not None:
        first, kernels = next(iter(measured.compute.items()))
        exact = [compute_time(sample.work, gpu, first) for sample in kernels]
        kernel_scatter = scatter(kernels, exact)
    spread = scatter(samples, predict(samples, cluster))
    return Fitted(
        gpu,
        intra,
        inter,
        lines,
        misfit,
        off(samples),
        kernel_scatter,
        spread,
        call,
        stated=not rates,
        one_host=hosts is not None,
    )


def _payload(link: Link) -> Link:
    """The same link by what payload gets of it."""
    pace = link.payload_burst_bandwidth if link.burst_bandwidth else None
    return Link(
        link.payload_bandwidth, link.latency, burst=link.payload_burst, burst_bandwidth=pace
    )
