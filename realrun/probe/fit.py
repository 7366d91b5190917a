"""From measured times to the numbers of a cluster: pure functions.

The links are fitted through `cost_of`, the formula that predictions are made with. So residuals
say how far a prediction of these very collectives would be off.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from co2sim.common.errors import OptionError
from co2sim.common.units import Flops, FlopsPerSecond, Seconds
from co2sim.hardware.cluster import GPU, Backend, Cluster, Link
from co2sim.schedule.schedule import Group, Kind, Layout
from co2sim.simulation.collective_cost import cost_of
from co2sim.simulation.compute_cost import compute_time
from realrun.probe.hosts import effects, expected, fit_bursts, fit_hosts, in_payload, passes
from realrun.probe.samples import (
    ComputeSample,
    Line,
    Measured,
    Residuals,
    Sample,
    Slowdown,
    by_kind,
    fit_line,
    residuals,
    scatter,
    weights,
)

_OUTLIER = 0.2
"""Errors of log time beyond this count linearly, not squared (Huber 1964)."""

_TOLERANCE = 1e-10
"""Relative change of the loss, of the numbers and of the slope at which a fit of links ends."""
_MIN_LATENCY: Seconds = 1e-9
_SLOWEST = 1e-3
"""A fitted bandwidth is at least this fraction of the one that the fastest sample needs."""

Vector: TypeAlias = NDArray[np.float64]


def bare(
    layout: Layout,
    backend: Backend,
    intra: Link,
    inter: Link,
    hosts: Cluster | None = None,
) -> Cluster:
    """A cluster of which only communication matters; what hosts add is that of `hosts`."""
    gpu = GPU("any", 1.0, 1.0, {"fp32": 1.0}, ((1.0, 1.0),))
    size = (layout.nodes, layout.gpus_per_node)
    found = Cluster("probed", gpu, *size, intra, inter, backend, "stream")
    if hosts is None:
        return found
    host = replace(effects(hosts), wan=None)
    return replace(found, call_overhead=hosts.call_overhead, host=host)


def predict(samples: Iterable[Sample], cluster: Cluster) -> list[Seconds]:
    """What the cost model says about every sample."""
    return [expected(sample, cluster) for sample in samples]


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

    def links(values: Vector) -> tuple[Link, Link]:
        every = start.copy()
        every[free] = values
        near_latency, near, far_latency, far = map(float, np.exp(every))
        return Link(near, near_latency), Link(far, far_latency)

    def errors(values: Vector) -> Vector:
        cluster = bare(layout, backend, *links(values), hosts)
        off: Vector = np.log(predict(samples, cluster)) - times
        return off

    latency, slowest = np.log(_MIN_LATENCY), np.maximum(0.0, start + np.log(_SLOWEST))
    least = np.array([latency, slowest[1], latency, slowest[3]])
    fitted = least_squares(
        errors,
        start[free],
        bounds=(least[free], np.inf),
        loss=_huber(weights(samples)),  # type: ignore[arg-type] # the stubs add an argument
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
        costs = [(cost_of(sample.work, cluster), sample.seconds) for sample in samples]
        steps = [seconds / cost.latency for cost, seconds in costs if cost.latency]
        speed = max((cost.bytes_per_link(cluster)[place] / s for cost, s in costs), default=0.0)
        if count > 1 and not (steps and speed):
            where = ("inside a node", "between nodes")[place]
            raise OptionError(f"the link {where} cannot be fitted: no collective used it")
        numbers += [max(_MIN_LATENCY, min(steps, default=0.0)), max(1.0, speed)]
    bounds: Vector = np.log(numbers)
    return bounds


@dataclass(frozen=True, slots=True)
class Fitted:
    """The numbers of a cluster, and how well they fit.

    `processor` is None if no kernel was run, a link if it joins no two ranks. `lines` fit every
    kind and group by itself; `misfit` says how far predictions from the links are off there, and
    `overall` the same for all samples at once. `stated` says that bandwidths were not fitted,
    `hosts` what the hosts of a lab add, if all ranks are in one. The scatters are those of kernels
    and collectives, None where none was measured.
    """

    processor: GPU | None
    intra: Link | None
    inter: Link | None
    lines: Mapping[tuple[Group, Kind], Line]
    misfit: Mapping[tuple[Group, Kind], Residuals]
    overall: Residuals | None
    compute_scatter: float | None = None
    communication_scatter: float | None = None
    stated: bool = False
    hosts: Cluster | None = None


def fit(measured: Measured, lab: Cluster | None = None, *, rates: bool = True) -> Fitted:
    """Fit everything that was measured.

    In a `lab` its bursts are taken as stated, and without `rates` its bandwidths, too.
    """
    layout, backend, lab = measured.layout, measured.backend, lab and in_payload(lab)
    samples = [
        one for one in measured.collectives if one.after != "equal" or (lab and passes(one, lab))
    ]
    hosts = fit_hosts(samples, lab) if lab else None
    if hosts and not rates:
        hosts = fit_bursts(samples, hosts)
        intra: Link | None = hosts.intra if layout.gpus_per_node > 1 else None
        inter: Link | None = hosts.inter if layout.nodes > 1 else None
    else:
        intra, inter = fit_links(samples, layout, backend, hosts)
    here = intra or inter
    if here is None:
        return Fitted(fit_gpu(measured), None, None, {}, {}, None)
    cluster = bare(layout, backend, intra or here, inter or here, hosts)

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
        stated=not rates,
        hosts=hosts,
    )


_MAX_SHARE = 10 / 11  # a cluster's interference is 10 at most; short collectives leave kernels less
_MIN_SHARE = 0.1  # of a kernel's time is not launch overhead; if it seems so, that is noise


def attained(samples: Iterable[ComputeSample], launch: Seconds) -> dict[Flops, FlopsPerSecond]:
    """Speed by size of a kernel, without the launch overhead that `cost.compute_time` adds."""
    return {
        sample.work.flops: sample.work.flops / _net(sample, launch)
        for sample in sorted(samples, key=lambda sample: sample.work.flops)
    }


def fit_gpu(measured: Measured) -> GPU | None:
    """The processor of a rank; None if no kernel was run.

    Its peak is the best speed that was measured: nothing is known of what it could attain.
    Efficiencies are those of the first precision. The bandwidth of its memory is that of the
    largest copy, which no cache holds.
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
        generation=measured.generation,
    )


def interference(slowdowns: Sequence[Slowdown]) -> tuple[float, Seconds]:
    """By which fraction compute slows down beside communication, and what each call takes besides.

    A collective of `seconds` takes call + share x seconds from the kernels beside it, so that they
    take 1 / (1 - share) times as long but for the call. Short and long collectives tell them apart.
    """
    lost = [(one.seconds, one.seconds * max(0.0, 1 - 1 / one.compute)) for one in slowdowns]
    (short, few), (long, many) = min(lost), max(lost)
    share, call = many / long, 0.0
    if long > short and few / short > share:
        share = max(0.0, (many - few) / (long - short))
        call = few - share * short
    share = min(share, _MAX_SHARE)
    return share / (1 - share), call


def _net(sample: ComputeSample, launch: Seconds) -> Seconds:
    """The time without launch overhead."""
    return max(sample.seconds - launch, _MIN_SHARE * sample.seconds)
