"""What fails on a cluster, how often, and what follows: plain numbers, in SI units."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from co2sim.common.errors import OptionError
from co2sim.common.units import BytesPerSecond, Seconds
from co2sim.common.validation import (
    Bandwidth,
    Between,
    Count,
    Fraction,
    Multiple,
    Natural,
    Time,
    at_least,
    check,
    in_order,
)

Writing = Literal["background", "blocking"]
"""background: work stops until the state is in host memory. blocking: until all is written."""

DETECTION: Seconds = 600.0
"""Source: torch.distributed, the timeout of NCCL: 10 minutes. A monitor of nodes is faster."""

RESTART: Seconds = 750.0
"""Source: Kokolis et al. 2025, arXiv 2410.21680: 5 to 20 minutes; the middle."""

HOST_BANDWIDTH: BytesPerSecond = 32e9
"""Source: NVIDIA A100 datasheet, 2021: PCIe Gen4 64 GB/s in both directions together."""

PAUSE: Seconds = 6.3
"""Source: pytorch.org/blog/reducing-checkpointing-times, 2024: a model of 7B, saved in the
background by torch.distributed.checkpoint; 148.8 s where all is written before work continues.
"""

WRITE_PER_NODE: BytesPerSecond = 20e9 / 32
READ_PER_NODE: BytesPerSecond = 40e9 / 32
"""Source: NVIDIA DGX SuperPOD H100 reference architecture, RA-11333-001, guidelines for storage
performance, "better": 40 GB/s read and 20 GB/s written by a scalable unit of 32 nodes.
"""

ORIGINS = {
    "detection": (f"{DETECTION:g} s", "default, assumed: the timeout of NCCL in torch.distributed"),
    "restart": (
        f"{RESTART:g} s",
        "default, assumed: the middle of 5 to 20 minutes in Kokolis et al., arXiv 2410.21680",
    ),
    "checkpoint_bandwidth": (
        f"{WRITE_PER_NODE / 1e9:g} GB/s a node",
        "default, assumed: 20 GB/s for 32 nodes, 'better' storage of NVIDIA's DGX SuperPOD H100",
    ),
    "reload_bandwidth": (
        f"{READ_PER_NODE / 1e9:g} GB/s a node",
        "default, assumed: 40 GB/s for 32 nodes, 'better' storage of NVIDIA's DGX SuperPOD H100",
    ),
    "pause": (
        f"{PAUSE:g} s",
        "default, assumed: 7B in the background, pytorch.org/blog/reducing-checkpointing-times",
    ),
    "host_bandwidth": (
        f"{HOST_BANDWIDTH / 1e9:g} GB/s",
        "default, assumed: PCIe Gen4 x16, NVIDIA A100 datasheet, 2021",
    ),
}
"""Of the numbers that are taken where none is given: the value, and why."""


PARTS = ("node", "gpu", "job", "switch", "preemption")
"""Names of the mean times between failures."""


@dataclass(frozen=True, slots=True)
class SizedFailures:
    """The mean time `between` failures of a job of `gpus` GPUs, whatever stops it.

    The true one is `shortest` to `longest`; None: `between`. `projected` was computed from other
    sizes, and not counted.
    """

    gpus: Count
    between: Between
    shortest: Between | None = None
    longest: Between | None = None
    projected: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        check(self, "failures.by_size")
        in_order(self, "failures.by_size", "shortest", "between", "longest")

    def __str__(self) -> str:
        """The size, and whether it was counted."""
        return f"the {'projected' if self.projected else 'measured'} {self.gpus:,}"


@dataclass(frozen=True, slots=True)
class Failures:
    """Mean times between failures of one part, and what happens after a failure.

    `gpu`, `node` and `switch` are those of one such part while it works, `job` that of a job of any
    size: bugs, file systems, operators. None: it does not fail. Rates add up. `gpus_per_switch` is
    how many GPUs stop with a switch. True rates are `rate_low` to `rate_high` times these.
    `by_size`, with sizes that rise, has counts by the size of the job: see `of_job`.

    `preemption` is the mean time until a provider takes a spot node away, `notice` how long before
    it says so, and `replacement` how long it takes until another is there. A spot node costs
    `spot_price` times the price of one that stays; None: not known.

    After a failure there pass `detection`, `restart` (between `restart_low` and `restart_high`;
    None: exactly `restart`) until processes run again, and the time to reload. `regroup` is how
    long the workers of a local-update method stand still until they have a group without one that
    failed. `spares` nodes wait to replace others, and a broken node is back after `repair`; 0:
    there is always another one.

    The whole cluster writes checkpoints at `checkpoint_bandwidth` and reads them at
    `reload_bandwidth`; None: `WRITE_PER_NODE` and `READ_PER_NODE` for every node. `checkpoint` says
    whether work continues meanwhile. If so it stops for `pause`, and at least for the copy to host
    memory, of every GPU at `host_bandwidth`.
    """

    name: str = ""
    gpu: Between | None = None
    node: Between | None = None
    switch: Between | None = None
    job: Between | None = None
    gpus_per_switch: Count | None = None
    by_size: tuple[SizedFailures, ...] = ()
    preemption: Between | None = None
    notice: Time = 0.0
    replacement: Time = 0.0
    spot_price: Fraction | None = None
    rate_low: Fraction = 1.0
    rate_high: Multiple = 1.0
    detection: Time = DETECTION
    restart: Time = RESTART
    restart_low: Time | None = None
    restart_high: Time | None = None
    regroup: Time = 0.0
    spares: Natural = 0
    repair: Time = 0.0
    checkpoint: Writing = "background"
    pause: Time = PAUSE
    checkpoint_bandwidth: Bandwidth | None = None
    reload_bandwidth: Bandwidth | None = None
    host_bandwidth: Bandwidth = HOST_BANDWIDTH

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        check(self, "failures")
        if any(smaller.gpus >= other.gpus for smaller, other in pairwise(self.by_size)):
            sizes = ", ".join(str(size.gpus) for size in self.by_size)
            raise OptionError(f"failures: by_size has {sizes} GPUs; each must be above the last")
        if not any((self.by_size, *(getattr(self, part) for part in PARTS))):
            raise OptionError(
                "failures: nothing fails; give the mean time between failures of a gpu, node,"
                " switch or job, such as node = '150 days', or between preemptions of a node,"
                " preemption = '12 h'"
            )
        if (self.switch is None) != (self.gpus_per_switch is None):
            raise OptionError(
                "failures: switch and gpus_per_switch go together: one is given without the other"
            )
        if self.restart_low is not None and self.restart_low > self.restart:
            raise OptionError(
                f"failures: restart_low is {self.restart_low:g} s; it must be at most restart,"
                f" {self.restart:g} s"
            )
        if self.restart_high is not None:
            at_least("failures: restart_high in s", self.restart_high, self.restart)

    def of_job(self, gpus: int, nodes: int) -> "Failures":
        """Those of a job of this size: `node`, `rate_low` and `rate_high` by the counts by size.

        Between two sizes the logarithm of the time is linear in that of the size; beyond them a
        node fails as often as in the nearest. Itself without `by_size`. A `node` that is given
        stays; the range is that of the size.
        """
        if not self.by_size:
            return self
        times = [(size.gpus, size.between) for size in self.by_size]
        shortest = [(size.gpus, size.shortest or size.between) for size in self.by_size]
        longest = [(size.gpus, size.longest or size.between) for size in self.by_size]
        time = _interpolated(times, gpus)
        return replace(
            self,
            node=self.node or time * nodes,
            by_size=(),
            rate_low=self.rate_low * min(1.0, time / _interpolated(longest, gpus)),
            rate_high=self.rate_high * max(1.0, time / _interpolated(shortest, gpus)),
        )

    def basis_of(self, gpus: int) -> str:
        """Where the rate of a job of this size stands among the counts; "" without them."""
        if not self.by_size or self.node:
            return ""
        first, last = self.by_size[0], self.by_size[-1]
        for size in self.by_size:
            if size.gpus == gpus:
                return f"{'projected' if size.projected else 'measured'} at this size"
        if not first.gpus < gpus < last.gpus:
            return f"extrapolated from {first if gpus < first.gpus else last} GPUs"
        near, far = next(two for two in pairwise(self.by_size) if two[0].gpus < gpus < two[1].gpus)
        return f"interpolated between {near} and {far} GPUs"


def _interpolated(points: Sequence[tuple[int, Seconds]], gpus: int) -> Seconds:
    """The time at a size, on a line of logarithms; beyond the points in inverse proportion."""
    if not points[0][0] < gpus < points[-1][0]:
        size, time = points[0] if gpus <= points[0][0] else points[-1]
        return time * size / gpus
    near, far = next(two for two in pairwise(points) if two[0][0] <= gpus <= two[1][0])
    share = math.log(gpus / near[0]) / math.log(far[0] / near[0])
    return near[1] * math.pow(far[1] / near[1], share)
