"""What hosts add to collectives in a lab, whose rates and bursts are stated.

Small collectives pass with the burst of the lab's shapers, so that all of their time is that of
hosts: a call, a step for every message on the way, and the bytes. Their sum is linear in all three.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from co2sim.cluster import Cluster, Link
from co2sim.cost import footprint
from co2sim.errors import OptionError
from co2sim.schedule import Kind
from co2sim.units import Seconds
from realrun.probe.samples import Sample

_CHAINS = {Kind.BROADCAST, Kind.REDUCE}
"""Their pieces take time on the way, however small they are."""

_MOST_TURNS, _TOLERANCE, _LEAST_SHARE = 100, 1e-9, 1e-3
"""Turns of the fit; when numbers stay the same; what a sum is at least, of its time."""

Vector: TypeAlias = NDArray[np.float64]


def fit_hosts(samples: Sequence[Sample], stated: Cluster) -> Cluster:
    """The stated cluster with what was measured: latencies of a call and of steps, and of bytes.

    Times are at least 0, and go with the footprints that predictions are made with. A link that no
    sample used keeps its stated latency; hosts move the bytes of a burst equally fast on all links.
    Raises OptionError when no sample passes with the burst.
    """
    free = _with(stated, 0.0, 0.0, 0.0)
    small = [
        sample
        for sample in samples
        if sample.work.kind not in _CHAINS and not footprint(sample.work, free).alone(free)
    ]
    if not small:
        raise OptionError("no collective was small enough to pass with the burst of the lab")
    units = [_with(stated, *row) for row in np.eye(4).tolist()]
    terms = np.array(
        [[footprint(sample.work, unit).alone(unit) for unit in units] for sample in small]
    )
    call, near, far, byte = _as_sums(terms, np.array([sample.seconds for sample in small]))
    used = [bool(column.any()) for column in terms.T]
    return _with(
        stated,
        call,
        near if used[1] else stated.intra.latency,
        far if used[2] else stated.inter.latency,
        byte,
    )


def _as_sums(terms: Vector, times: Vector) -> list[float]:
    """Numbers of at least 0 whose sums, weighted by the rows of `terms`, are nearest to `times`.

    Errors count relative to the sum, not to the time. So short times do not count more than long
    ones, and sums are neither too long nor too short on average (iteratively reweighted least
    squares; a quasi-likelihood, Wedderburn 1974, of errors in proportion to the mean).
    """
    found, sums = np.zeros(terms.shape[1]), times
    for _ in range(_MOST_TURNS):
        weighted = terms / sums[:, None]
        scale = np.linalg.norm(weighted, axis=0)
        scale[scale == 0] = 1.0
        before, found = found, nnls(weighted / scale, times / sums)[0] / scale
        sums = np.maximum(terms @ found, _LEAST_SHARE * times)
        if np.allclose(found, before, rtol=_TOLERANCE, atol=0.0):
            break
    return [float(number) for number in found]


def fit_bursts(samples: Sequence[Sample], hosts: Cluster) -> Cluster:
    """The cluster with bursts that hosts make use of: less than is stated, if they are late.

    What does not pass with the burst alone waits for the timers of the shaper, and these for a
    core. What that adds on average to a collective shortens the burst of the link it is bound to.
    """
    near_late: list[Seconds] = []
    far_late: list[Seconds] = []
    free = _with(hosts, 0.0, 0.0, 0.0)
    for sample in samples:
        if sample.work.kind in _CHAINS or not footprint(sample.work, free).alone(free):
            continue
        found = footprint(sample.work, hosts)
        near, far, *_ = found.link_times(hosts)
        (far_late if far > near else near_late).append(sample.seconds - found.alone(hosts))
    intra, inter = _shorter(hosts.intra, near_late), _shorter(hosts.inter, far_late)
    return replace(hosts, intra=intra, inter=inter)


def _shorter(link: Link, late: Sequence[Seconds]) -> Link:
    missed = fmean(late) * link.bandwidth if late else 0.0
    return replace(link, burst=min(link.burst, max(0.0, link.burst - missed)))


def _with(stated: Cluster, call: float, near: float, far: float, byte: float = 0.0) -> Cluster:
    """Latencies in seconds, and the seconds that a byte of a burst takes; 0: at once."""
    pace = 1 / byte if byte else None
    return replace(
        stated,
        call_overhead=call,
        intra=replace(stated.intra, latency=near, burst_bandwidth=pace),
        inter=replace(stated.inter, latency=far, burst_bandwidth=pace),
    )
