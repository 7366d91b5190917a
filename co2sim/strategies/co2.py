"""CO2: local updates whose average is hidden behind the next round's steps."""

from dataclasses import dataclass
from typing import ClassVar

from co2sim.errors import OptionError
from co2sim.schedule import After, DType, Layout, Op, Schedule
from co2sim.strategies.local import OUTER, Inner, Replica, Worker, check_tau, outer_work
from co2sim.strategies.step import COMPUTE, Step, chain, title
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
        check_tau(self.tau)
        Replica(self.worker, self.inner, self.dtype)
        if self.staleness < 1:
            raise OptionError(
                f"staleness is {self.staleness}; co2 needs 1 or more (slowmo is staleness 0)"
            )

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Wait for the old average, update momentum and anchor, launch the new average, go on."""
        replica = Replica(self.worker, self.inner)
        share = replica.share(job, layout)
        average = replica.all_reduce("displacement", share, self.dtype)
        # reads x, anchor, average and momentum; writes momentum, displacement, anchor and x
        outer = outer_work(job, share, tensors=8)
        publish = replica.publish(job, layout, "outer", job.parameters)
        ops = [
            Op("outer", outer, COMPUTE, (After("average", rounds_ago=self.staleness),)),
            Op("average", average, OUTER, (After("outer"),)),
            *publish,
        ]
        ends = (publish[-1].name,) if publish else ("outer",)
        body = chain(
            replica.step(job, layout),
            self.tau,
            {self.tau - 1: Step(ops, ("outer",), ends, regathers=bool(publish))},
        )
        return Schedule(title(self), body, steps=self.tau)

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """The inner strategy, and anchor, momentum and one buffer per average in flight."""
        copies = 2 + self.staleness * self.dtype.bytes / DType.FP32.bytes
        return Replica(self.worker, self.inner).memory(job, layout, copies)
