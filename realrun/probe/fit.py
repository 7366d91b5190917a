"""What a probe measures, and from measured times to the numbers of a cluster: pure functions.

The links are fitted through `cost_of`, the formula that predictions are made with. So residuals
say how far a prediction of these very collectives would be off.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, Flops, FlopsPerSecond, Seconds
from co2sim.hardware.cluster import GPU, Backend, Calls, Cluster, HostEffects, Link, TokenBucket
from co2sim.schedule.schedule import Collective, Compute, Group, Kind, Layout
from co2sim.simulation import token_bucket
from co2sim.simulation.costs import compute_time, cost_of

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
    kernel was run. `launch` is the time of an empty op. `slowdowns` are those of a short all-reduce
    and a long one, where they were measured, and `together` says how many times as long the kernels
    of two streams take as those of one.
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
    slowdowns: tuple[Slowdown, ...]
    together: float | None = None


def by_kind(samples: Iterable[Sample]) -> dict[tuple[Group, Kind], list[Sample]]:
    """The samples by group and kind of collective, by rising size; not those after an equal one."""
    samples_of: dict[tuple[Group, Kind], list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.work.bytes):
        if sample.after != "equal":
            samples_of.setdefault((sample.work.group, sample.work.kind), []).append(sample)
    return samples_of


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


def residuals(predicted: Iterable[Seconds], measured: Iterable[Seconds]) -> Residuals:
    """How far predictions are off."""
    errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    return Residuals(median(map(abs, errors)), max(map(abs, errors)), errors[-1])


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


_CHAINS = {Kind.BROADCAST, Kind.REDUCE}
"""Their pieces take time on the way, however small they are."""

_MAX_TURNS, _UNCHANGED, _MIN_SUM = 100, 1e-9, 1e-3
"""Turns of the fit; when numbers stay the same; what a sum is at least, of its time."""

_MIN: Seconds = 1e-9
"""Less than this no kind takes longer than the others."""


def fit_hosts(samples: Sequence[Sample], stated: Cluster) -> Cluster:
    """The stated cluster with what was measured: what calls, steps, bytes and waking up take.

    A call of the quickest kind counts for all; what others take longer is theirs (`calls`). Times
    are at least 0, and go with the footprints that predictions are made with. A link that no sample
    used keeps its stated latency; hosts move the bytes of a burst equally fast on all links.
    Raises OptionError when no sample passes with the burst.
    """
    small = [sample for sample in samples if passes(sample, stated)]
    if not small:
        raise OptionError("no collective was small enough to pass with the burst of the lab")
    units = [_with(stated, *row) for row in np.eye(4).tolist()]
    terms = np.array(
        [
            [cost_of(sample.work, unit).duration_alone(unit) for unit in units]
            + [float(sample.after == "pause")]
            for sample in small
        ]
    )
    call, near, far, byte, wake = _as_sums(terms, np.array([sample.seconds for sample in small]))
    used = [bool(column.any()) for column in terms.T]
    hosts = _with(
        stated,
        call,
        near if used[1] else stated.intra.latency,
        far if used[2] else stated.inter.latency,
        byte,
    )
    host = effects(hosts)
    host = replace(host, one_machine=host.one_machine or wake > 0, wake_up=wake)
    return _by_kind(small, replace(hosts, host=host))


def _by_kind(small: Sequence[Sample], hosts: Cluster) -> Cluster:
    """The hosts with what kinds take longer than the quickest, by the means of what is left.

    One after the other: steps and calls by kind at once could not be distinguished, since each kind
    has its own number of steps.
    """
    left: dict[Kind, list[Seconds]] = {}
    for sample in small:
        left.setdefault(sample.work.kind, []).append(sample.seconds - expected(sample, hosts))
    means = {kind: fmean(seconds) for kind, seconds in left.items()}
    least = max(-hosts.call_overhead, min(means.values()))
    more = {str(kind): max(0.0, mean - least) for kind, mean in means.items()}
    call = hosts.call_overhead + least
    if max(more.values()) < _MIN:
        return hosts
    return replace(hosts, call_overhead=call, host=replace(effects(hosts), calls=Calls(**more)))


def expected(sample: Sample, hosts: Cluster) -> Seconds:
    """What the cost model says about a sample, with waking up after a pause."""
    wake = effects(hosts).wake_up if sample.after == "pause" else 0.0
    return cost_of(sample.work, hosts).duration_alone(hosts) + wake


def passes(sample: Sample, stated: Cluster) -> bool:
    """Whether all bytes of a sample pass with the burst, with those of an equal one before it."""
    free = _with(stated, 0.0, 0.0, 0.0, 0.0)
    times = 2 if sample.after == "equal" else 1
    work = replace(sample.work, elements=times * sample.work.elements)
    return work.kind not in _CHAINS and not cost_of(work, free).duration_alone(free)


def _as_sums(terms: Vector, times: Vector) -> list[float]:
    """Numbers of at least 0 whose sums, weighted by the rows of `terms`, are nearest to `times`.

    Errors count relative to the sum, not to the time. So short times do not count more than long
    ones, and sums are neither too long nor too short on average (iteratively reweighted least
    squares; a quasi-likelihood, Wedderburn 1974, of errors in proportion to the mean).
    """
    values, sums = np.zeros(terms.shape[1]), times
    for _ in range(_MAX_TURNS):
        weighted = terms / sums[:, None]
        scale = np.linalg.norm(weighted, axis=0)
        scale[scale == 0] = 1.0
        before, values = values, nnls(weighted / scale, times / sums)[0] / scale
        sums = np.maximum(terms @ values, _MIN_SUM * times)
        if np.allclose(values, before, rtol=_UNCHANGED, atol=0.0):
            break
    return [float(value) for value in values]


def fit_bursts(samples: Sequence[Sample], hosts: Cluster) -> Cluster:
    """The cluster with the lag of what is longer than a burst, on the link that it is bound to.

    It is what such collectives take longer than calls, steps and bytes, as a fraction of their time
    after the burst; 0 on a link that bound none.
    """
    near: list[tuple[Seconds, Seconds]] = []
    far: list[tuple[Seconds, Seconds]] = []
    for sample in samples:
        if sample.work.kind in _CHAINS or passes(sample, hosts):
            continue
        times = cost_of(sample.work, hosts).link_times(hosts)
        late = sample.seconds - expected(sample, hosts)
        after = (1 - token_bucket.passed(times, token_bucket.shapers(hosts))) * max(times)
        (far if times[1] > times[0] else near).append((late, after))
    host = effects(hosts)
    lagging = replace(host, intra=_lagging(host.intra, near), inter=_lagging(host.inter, far))
    return replace(hosts, host=lagging)


def _lagging(
    burst: TokenBucket | None, seen: Sequence[tuple[Seconds, Seconds]]
) -> TokenBucket | None:
    after = sum(time for _, time in seen)
    lag = sum(late for late, _ in seen) / after if after else 0.0
    return burst and replace(burst, lag=min(1.0, max(0.0, lag)))


def _with(stated: Cluster, call: float, near: float, far: float, byte: float) -> Cluster:
    """Latencies in seconds, and the seconds that a byte of a burst takes; 0: at once."""
    pace, host = 1 / byte if byte else None, effects(stated)
    return replace(
        stated,
        call_overhead=call,
        intra=replace(stated.intra, latency=near),
        inter=replace(stated.inter, latency=far),
        host=replace(
            host,
            calls=None,
            intra=host.intra and replace(host.intra, bandwidth=pace),
            inter=host.inter and replace(host.inter, bandwidth=pace),
        ),
    )


def effects(cluster: Cluster) -> HostEffects:
    """Those of a cluster; none where it says nothing about them."""
    return cluster.host or HostEffects()


def in_payload(cluster: Cluster) -> Cluster:
    """The same cluster by what payload gets of its links and bursts; without an uplink of sites."""
    host = effects(cluster)
    return replace(
        cluster,
        intra=Link(cluster.intra.payload_bandwidth, cluster.intra.latency),
        inter=Link(cluster.inter.payload_bandwidth, cluster.inter.latency),
        host=replace(
            host,
            intra=_payload(host.intra, cluster.intra),
            inter=_payload(host.inter, cluster.inter),
        ),
    )


def _payload(burst: TokenBucket | None, link: Link) -> TokenBucket | None:
    if burst is None:
        return None
    pace = burst.bandwidth and burst.bandwidth * link.efficiency
    return TokenBucket(burst.size * link.efficiency, pace, burst.lag)


_OUTLIER = 0.2
"""Errors of log time beyond this count linearly, not squared (Huber 1964)."""

_TOLERANCE = 1e-10
"""Relative change of the loss, of the numbers and of the slope at which a fit of links ends."""
_MIN_LATENCY: Seconds = 1e-9
_SLOWEST = 1e-3
"""A fitted bandwidth is at least this fraction of the one that the fastest sample needs."""


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
    cluster = Cluster("probed", gpu, *size, intra, inter, backend, "stream")
    if hosts is None:
        return cluster
    host = replace(effects(hosts), wan=None)
    return replace(cluster, call_overhead=hosts.call_overhead, host=host)


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
    of `hosts`, if given.
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
    for index in range(2):
        links = [Link(1e18, float(index == 0)), Link(1e18, float(index == 1))]
        cluster = bare(layout, backend, links[0], links[1])
        costs = [(cost_of(sample.work, cluster), sample.seconds) for sample in samples]
        steps = [seconds / cost.latency for cost, seconds in costs if cost.latency]
        speed = max((cost.bytes_per_link(cluster)[index] / s for cost, s in costs), default=0.0)
        numbers += [max(_MIN_LATENCY, min(steps, default=0.0)), max(1.0, speed)]
    bounds: Vector = np.log(numbers)
    return bounds


@dataclass(frozen=True, slots=True)
class Fitted:
    """The numbers of a cluster, and how well they fit.

    `processor` is None if no kernel was run, a link if it joins no two ranks. `misfit` says how far
    predictions from the links are off for every kind and group, and `overall` the same for all
    samples at once. `stated` says that bandwidths were not fitted,
    `hosts` what the hosts of a lab add, if all ranks are in one. The scatters are those of kernels
    and collectives, None where none was measured.
    """

    processor: GPU | None
    intra: Link | None
    inter: Link | None
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
        sample
        for sample in measured.collectives
        if sample.after != "equal" or (lab and passes(sample, lab))
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
        return Fitted(fit_gpu(measured), None, None, {}, None)
    cluster = bare(layout, backend, intra or here, inter or here, hosts)

    def off(some: Sequence[Sample]) -> Residuals:
        return residuals(predict(some, cluster), [sample.seconds for sample in some])

    kinds = by_kind(samples)
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
    by_name = {name: attained(samples, launch) for name, samples in measured.compute.items()}
    peak = {name: max(speeds.values()) for name, speeds in by_name.items()}
    first = next(iter(by_name))
    copy = max(measured.copies, key=lambda sample: sample.work.memory_bytes)
    return GPU(
        measured.machine,
        measured.memory,
        copy.work.memory_bytes / _net(copy, launch),
        peak,
        tuple((flops, speed / peak[first]) for flops, speed in by_name[first].items()),
        launch_overhead=launch,
        generation=measured.generation,
    )


def interference(slowdowns: Sequence[Slowdown]) -> tuple[float, Seconds]:
    """By which fraction compute slows down beside communication, and what each call takes besides.

    A collective of `seconds` takes call + share x seconds from the kernels beside it, so that they
    take 1 / (1 - share) times as long but for the call. Short and long collectives tell them apart.
    """
    lost = [
        (slowdown.seconds, slowdown.seconds * max(0.0, 1 - 1 / slowdown.compute))
        for slowdown in slowdowns
    ]
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
