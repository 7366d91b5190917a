"""How fast a GPU exchanges data with its host, and how fast the host runs an optimizer.

Files state what is documented: `host_link` of a GPU, `host_memory_bandwidth` of a cluster. What
they do not state is assumed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from co2sim.common.units import BytesPerSecond
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import Place


@dataclass(frozen=True, slots=True)
class Assumption:
    """A number that is taken where no file states it, as a text with its unit, and why."""

    value: float
    text: str
    why: str


ASSUMED: Mapping[str, Assumption] = {
    "gpu.host_link": Assumption(
        32e9, "32 GB/s", "default: PCI Express 4.0 x16, one direction, as of most GPUs since 2020"
    ),
    "host_link_efficiency": Assumption(
        0.75,
        "0.75",
        "default: NCCL src/graph/topo.h (commit 069a3d4, 2026), PCI_BW 12.0 GB/s for PCIe 3.0 x16"
        " (16 GB/s raw); the same fraction of other links",
    ),
    "host_memory_bandwidth": Assumption(
        51.2e9,
        "51.2 GB/s",
        "default: that of a DGX A100, 2 processors of 8 channels of DDR4-3200 for 8 GPUs",
    ),
    "host_optimizer_efficiency": Assumption(
        0.13,
        "0.13",
        "default: about 10 s for 72.7 billion parameters on 32 A100 by DeepSpeed's CPUAdam"
        " (deepspeedai/DeepSpeed issue 6834), less 0.4 s of transfers: 6.6 GB/s of 28 bytes a"
        " parameter, of 51.2. One process that has a host alone attains several times as much (Ren"
        " et al. 2021, arXiv 2101.06840)",
    ),
}
"""By the path of the number in a cluster."""

LINK = ("gpu.host_link", "host_link_efficiency")
"""Those of the link."""


def speed(cluster: Cluster, place: Place) -> BytesPerSecond:
    """Of the link of a GPU to its host, one direction, or of the optimizer on a GPU's part of it.

    That of the optimizer counts bytes that it reads and writes in the host's memory.
    """
    if place == "link":
        return _known(cluster, "gpu.host_link") * _known(cluster, "host_link_efficiency")
    memory = _known(cluster, "host_memory_bandwidth")
    return memory * _known(cluster, "host_optimizer_efficiency")


def unknown(cluster: Cluster) -> dict[str, Assumption]:
    """What is assumed of a cluster."""
    return {path: fact for path, fact in ASSUMED.items() if attrgetter(path)(cluster) is None}


def _known(cluster: Cluster, path: str) -> float:
    value: float | None = attrgetter(path)(cluster)
    return ASSUMED[path].value if value is None else value
