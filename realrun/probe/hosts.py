"""What hosts add to collectives in a lab, whose rates and bursts are stated: latencies.

Small collectives pass at once with the burst of the lab's shapers, so that all of their time is
latency: a call, and a step for every message on the way. Their sum is linear in both.
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
    """The stated cluster with the latencies that were measured: of a call, and of steps.

    Least squares of relative errors over latencies of at least 0, by the footprints that
    predictions are made with. A link that no sample used keeps its stated latency. Raises
    OptionError when no sample passes at once.
    """
    free = _with(stated, 0.0, 0.0, 0.0)
    small = [
        sample
        for sample in samples
        if sample.work.kind not in _CHAINS and not footprint(sample.work, free).alone(free)
    ]
    if not small:
        raise OptionError("no collective was small enough to pass with the burst of the lab")
    terms = np.array(
        [
            [
                footprint(sample.work, unit).latency / sample.seconds
                for unit in (_with(stated, *row) for row in np.eye(3).tolist())
            ]
            for sample in small
        ]
    )
    call, near, far = map(float, nnls(terms, np.ones(len(small)))[0])
    used = [bool(column.any()) for column in terms.T]
    return _with(
        stated,
        call,
        near if used[1] else stated.intra.latency,
        far if used[2] else stated.inter.latency,
    )


def _with(stated: Cluster, call: float, near: float, far: float) -> Cluster:
    return replace(
        stated,
        call_overhead=call,
        intra=replace(stated.intra, latency=near),
        inter=replace(stated.inter, latency=far),
    )
