"""What hosts add to collectives in a lab, whose rates and bursts are stated.

Small collectives pass with the burst of the lab's shapers, so that all of their time is that of
hosts: a call, a step for every message on the way, and the bytes. Their sum is linear in all three.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from co2sim.cluster import Cluster
from co2sim.cost import footprint
from co2sim.errors import OptionError
from co2sim.schedule import Kind
from realrun.probe.samples import Sample

_CHAINS = {Kind.BROADCAST, Kind.REDUCE}
"""Their pieces take time on the way, however small they are."""


def fit_hosts(samples: Sequence[Sample], stated: Cluster) -> Cluster:
    """The stated cluster with what was measured: latencies of a call and of steps, and of bytes.

    Least squares of relative errors over times of at least 0, by the footprints that predictions
    are made with. A link that no sample used keeps its stated latency; hosts move the bytes of a
    burst equally fast on all links. Raises OptionError when no sample passes with the burst.
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
        [
            [footprint(sample.work, unit).alone(unit) / sample.seconds for unit in units]
            for sample in small
        ]
    )
    scale = np.linalg.norm(terms, axis=0)
    scale[scale == 0] = 1.0
    call, near, far, byte = map(float, nnls(terms / scale, np.ones(len(small)))[0] / scale)
    used = [bool(column.any()) for column in terms.T]
    return _with(
        stated,
        call,
        near if used[1] else stated.intra.latency,
        far if used[2] else stated.inter.latency,
        byte,
    )


def _with(stated: Cluster, call: float, near: float, far: float, byte: float = 0.0) -> Cluster:
    """Latencies in seconds, and the seconds that a byte of a burst takes; 0: at once."""
    pace = 1 / byte if byte else None
    return replace(
        stated,
        call_overhead=call,
        intra=replace(stated.intra, latency=near, burst_bandwidth=pace),
        inter=replace(stated.inter, latency=far, burst_bandwidth=pace),
    )
