"""Overlap local SGD: pulled towards an anchor whose average arrives one round late."""

from dataclasses import dataclass
from typing import ClassVar

from co2sim.schedule import DType, Layout, Schedule
from co2sim.strategies.local import (
    Averages,
    Inner,
    Replica,
    Unquantized,
    Worker,
    averaged_rounds,
    check,
)
from co2sim.units import Bytes
from co2sim.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapLocalSGD:
    """`tau` local steps, then a pull towards the average launched one round before.

    Source: Wang, Liang and Joshi 2020, Overlap local-SGD, arXiv 2002.09539.
    """

    name: ClassVar[str] = "overlap_local_sgd"

    tau: int = 12
    worker: Worker = "gpu"
    inner: Inner | None = None
    dtype: Unquantized = DType.FP32

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        check(self)

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Wait for the old average, update the anchor, pull, launch the next average."""
        # reads x, average, anchor and momentum; writes momentum, anchor, x and the buffer
        plan = Averages(buffer="parameters", outer=8, delay=self.tau)
        return averaged_rounds(self, job, layout, plan)

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """The inner strategy, and anchor, anchor momentum and the buffer in flight."""
        copies = 2 + self.dtype.bytes / DType.FP32.bytes
        return Replica.of(self).memory(job, layout, copies)
