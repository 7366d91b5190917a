"""Local SGD: average the parameters every few steps, and wait for it."""

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
class LocalSGD:
    """`tau` local steps, then a blocking average of the parameters.

    Source: Stich 2019, Local SGD converges fast and communicates little, arXiv 1805.09767.
    """

    name: ClassVar[str] = "local_sgd"

    tau: int = 12
    worker: Worker = "gpu"
    inner: Inner | None = None
    dtype: Unquantized = DType.FP32

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        check(self)

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Local steps, average, assign."""
        # reads the average; writes x
        plan = Averages(buffer="parameters", outer=2)
        return averaged_rounds(self, job, layout, plan)

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """The inner strategy, and one buffer for the average."""
        copies = self.dtype.bytes / DType.FP32.bytes
        return Replica.of(self).memory(job, layout, copies)
