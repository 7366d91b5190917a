"""What hosts add to collectives in a lab, whose rates and bursts are stated.

Small collectives pass with the burst of the lab's shapers, so that all of their time is that of
hosts: a call, a step for every message on the way, the bytes, and waking up after a pause. Their
sum is linear in all four.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from co2sim.hardware.cluster import Calls, Cluster, HostEffects, Link, TokenBucket
from co2sim.schedule.schedule import Kind
from co2sim.simulation import token_bucket
from co2sim.simulation.collective_cost import cost_of
from realrun.probe.samples import Sample

_CHAINS = {Kind.BROADCAST, Kind.REDUCE}
"""Their pieces take time on the way, however small they are."""

_MAX_TURNS, _TOLERANCE, _MIN_SHARE = 100, 1e-9, 1e-3
"""Turns of the fit; when numbers stay the same; what a sum is at least, of its time."""

_MIN: Seconds = 1e-9
"""Less than this no kind takes longer than the others."""

Vector: TypeAlias = NDArray[np.float64]


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
    found, sums = np.zeros(terms.shape[1]), times
    for _ in range(_MAX_TURNS):
        weighted = terms / sums[:, None]
        scale = np.linalg.norm(weighted, axis=0)
        scale[scale == 0] = 1.0
        before, found = found, nnls(weighted / scale, times / sums)[0] / scale
        sums = np.maximum(terms @ found, _MIN_SHARE * times)
        if np.allclose(found, before, rtol=_TOLERANCE, atol=0.0):
            break
    return [float(number) for number in found]


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
