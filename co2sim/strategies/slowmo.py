"""SlowMo: local SGD with an outer momentum."""

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
class SlowMo:
    """`tau` local steps, a blocking average, and a momentum step from the anchor.

    Source: Wang et al., SlowMo, ICLR 2020, arXiv 1910.00643.
    """

    name: ClassVar[str] = "slowmo"

    tau: int = 12
    worker: Worker = "gpu"
    inner: Inner | None = None
    dtype: Unquantized = DType.FP32

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        check(self)

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Local steps, average, momentum."""
        # reads average, anchor and momentum; writes momentum, anchor and x
        plan = Averages(buffer="parameters", outer=6)
        return averaged_rounds(self, job, layout, plan)

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """The inner strategy, and anchor, momentum and one buffer for the average."""
        copies = 2 + self.dtype.bytes / DType.FP32.bytes
        return Replica.of(self).memory(job, layout, copies)
