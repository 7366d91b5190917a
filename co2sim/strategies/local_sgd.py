"""Averages of parameters every few steps: local SGD, SlowMo and Overlap local SGD."""

from dataclasses import dataclass
from typing import ClassVar

from co2sim.schedule.schedule import DType, Layout, Schedule
from co2sim.strategies.local import (
    Averages,
    Inner,
    Replica,
    Unquantized,
    Worker,
    averaged_rounds,
    check,
)
from co2sim.training.memory import Items
from co2sim.training.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class _Averaging:
    """`tau` local steps, then an average of the parameters, which the round waits for.

    The outer step reads and writes `outer` numbers a parameter, and `kept` of them beside the
    buffer of the average stay in memory.
    """

    name: ClassVar[str]
    shares: ClassVar[str] = "steps"
    divides_experts: ClassVar[bool] = True
    outer: ClassVar[int]
    kept: ClassVar[int] = 0

    tau: int = 12
    worker: Worker = "gpu"
    inner: Inner | None = None
    dtype: Unquantized = DType.FP32

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        check(self)

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Local steps, average, outer step."""
        plan = Averages(buffer="parameters", outer=self.outer)
        return averaged_rounds(self, job, layout, plan)

    def memory(self, job: Workload, layout: Layout) -> Items:
        """The inner strategy, what the outer step keeps, and one buffer for the average."""
        copies = self.kept + self.dtype.bytes / DType.FP32.bytes
        return Replica.of(self).memory(job, layout, copies)


class LocalSGD(_Averaging):
    """`tau` local steps, then a blocking average of the parameters.

    Source: Stich 2019, Local SGD converges fast and communicates little, arXiv 1805.09767.
    """

    __slots__ = ()
    name: ClassVar[str] = "local_sgd"
    outer = 2  # reads the average; writes x


class SlowMo(_Averaging):
    """`tau` local steps, a blocking average, and a momentum step from the anchor.

    Source: Wang et al., SlowMo, ICLR 2020, arXiv 1910.00643.
    """

    __slots__ = ()
    name: ClassVar[str] = "slowmo"
    outer = 6  # reads average, anchor and momentum; writes momentum, anchor and x
    kept = 2  # anchor, momentum


class OverlapLocalSGD(_Averaging):
    """`tau` local steps, then a pull towards the average launched one round before.

    Source: Wang, Liang and Joshi 2020, Overlap local-SGD, arXiv 2002.09539.
    """

    __slots__ = ()
    name: ClassVar[str] = "overlap_local_sgd"
    outer = 8  # reads x, average, anchor and momentum; writes momentum, anchor, x and the buffer
    kept = 2  # anchor, its momentum

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Wait for the old average, update the anchor, pull, launch the next average."""
        plan = Averages(buffer="parameters", outer=self.outer, delay=self.tau)
        return averaged_rounds(self, job, layout, plan)
