"""CO2: local updates whose average is hidden behind the next round's steps."""

from dataclasses import dataclass
from typing import ClassVar

from co2sim.errors import OptionError
from co2sim.schedule import DType, Layout, Schedule
from co2sim.strategies.local import Inner, Replica, Worker, averaged_rounds, check
from co2sim.units import Bytes
from co2sim.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CO2:
    """`tau` local steps; the average launched after them is used `staleness` rounds later.

    Source: Sun et al., CO2: Efficient Distributed Training with Full Communication-Computation
    Overlap, ICLR 2024, arXiv 2401.16265.
    """

    name: ClassVar[str] = "co2"

    tau: int = 12
    staleness: int = 1
    worker: Worker = "gpu"
    inner: Inner | None = None
    dtype: DType = DType.FP32

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        check(self)
        if self.staleness < 1:
            raise OptionError(
                f"staleness is {self.staleness}; co2 needs 1 or more (slowmo is staleness 0)"
            )

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Wait for the old average, update momentum and anchor, launch the new average, go on."""
        # reads x, average, anchor and momentum; writes momentum, anchor, x and the displacement
        return averaged_rounds(
            self, job, layout, buffer="displacement", tensors=8, staleness=self.staleness
        )

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """The inner strategy, and anchor, momentum and one buffer per average in flight."""
        copies = 2 + self.staleness * self.dtype.bytes / DType.FP32.bytes
        return Replica.of(self).memory(job, layout, copies)
