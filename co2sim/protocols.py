"""NCCL's protocols: how long a message needs for a hop, and what it leaves of a link's bandwidth.

Simple moves large pieces and waits for memory fences. LL (low latency) sends a flag with every
4 bytes of data, LL128 one with 120 bytes: they need no fence, but more bandwidth. A collective
takes what NCCL expects to be fastest.

Source: NCCL 2.28.3, src/graph/tuning.cc: baseLatencies, hwLatencies, llMaxBws, ncclTopoTuneModel.
Left out: its corrections of trees of medium size and of rings on a plateau, limits of a channel,
and algorithms that need other hardware (CollNet, NVLS) or one GPU a node (PAT).
"""

from dataclasses import dataclass
from typing import Literal

from co2sim.cluster import Cluster, Protocols
from co2sim.units import BytesPerSecond, Seconds

Algorithm = Literal["ring", "tree"]
Name = Literal["simple", "ll128", "ll"]

_NAMES: dict[Protocols, tuple[Name, ...]] = {
    "simple": ("simple",),
    "pci": ("simple", "ll"),
    "nvlink": ("simple", "ll128", "ll"),
}
"""LL128 needs stores of 128 bytes to arrive whole: NVLink only."""

_START: dict[Algorithm, dict[Name, Seconds]] = {
    "ring": {"simple": 8.4e-6, "ll128": 14.0e-6, "ll": 6.6e-6},
    "tree": {"simple": 8.4e-6, "ll128": 14.0e-6, "ll": 6.8e-6},
}
_HOP: dict[str, dict[Algorithm, dict[Name, Seconds]]] = {
    "nvlink": {
        "ring": {"simple": 3.4e-6, "ll128": 1.9e-6, "ll": 0.6e-6},
        "tree": {"simple": 4.0e-6, "ll128": 1.25e-6, "ll": 0.6e-6},
    },
    "pci": {
        "ring": {"simple": 5.7e-6, "ll128": 2.5e-6, "ll": 1.0e-6},
        "tree": {"simple": 4.0e-6, "ll128": 1.9e-6, "ll": 1.0e-6},
    },
    "network": {
        "ring": {"simple": 14.0e-6, "ll128": 4.0e-6, "ll": 2.7e-6},
        "tree": {"simple": 14.0e-6, "ll128": 8.5e-6, "ll": 5.0e-6},
    },
}
_SHARE: dict[Algorithm, dict[Name, float]] = {
    "ring": {"simple": 1.0, "ll128": 0.92, "ll": 0.5},
    "tree": {"simple": 1.0, "ll128": 120 / 128, "ll": 1 / 3.8},
}
_LL_MOST: dict[bool, BytesPerSecond] = {False: 39.0e9, True: 20.4e9}
"""What LL attains on up to two nodes, and on more: the smallest of the table's rows."""
_POSTS = 3
"""Posts to the network that a step of Simple takes; one in the other protocols."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """One of them on a cluster: `start` once, then the latency of each hop by the link it crosses.

    `share` is what payload attains of the payload bandwidth of a link, `most` of any.
    """

    start: Seconds
    intra: Seconds
    inter: Seconds
    wan: Seconds
    share: float
    most: BytesPerSecond | None = None


def choices(
    algorithm: Algorithm, cluster: Cluster, protocols: Protocols, *, nodes: int, members: int
) -> list[Protocol]:
    """The protocols that a collective over so many nodes and ranks may take, of `protocols`.

    Hops take as long as the links of the cluster say for a ring by Simple, others in proportion.
    In rings that leave the node every hop takes at least as long as the host posts a message; with
    one rank in each node all hops cross the network, and take as long as those of a tree.
    """
    wan = cluster.wan.latency if cluster.wan else cluster.inter.latency
    if cluster.backend != "nccl" or protocols == "simple":
        return [Protocol(0.0, cluster.intra.latency, cluster.inter.latency, wan, 1.0)]
    found = []
    for name in _NAMES[protocols]:
        outside: Algorithm = "tree" if nodes == members else algorithm
        far = _HOP["network"][outside][name] / _HOP["network"]["ring"]["simple"]
        near = _HOP[protocols][algorithm][name] / _HOP[protocols]["ring"]["simple"]
        intra = cluster.intra.latency * near
        if algorithm == "ring" and nodes > 1:
            posts = _POSTS if name == "simple" else 1
            intra = max(intra, posts * cluster.network_overhead)
        found.append(
            Protocol(
                _START[algorithm][name],
                intra,
                cluster.inter.latency * far,
                wan * far,
                _SHARE[algorithm][name],
                _LL_MOST[nodes > 2] if name == "ll" else None,  # noqa: PLR2004 - see there
            )
        )
    return found
