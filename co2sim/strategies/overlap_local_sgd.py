"""Overlap local SGD: pulled towards an anchor whose average arrives one round late."""

from dataclasses import dataclass
from typing import ClassVar

from co2sim.schedule import After, DType, Layout, Op, Schedule
from co2sim.strategies.local import OUTER, Inner, Replica, Worker, check_tau, outer_work
from co2sim.strategies.step import COMPUTE, Step, chain, title
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
    dtype: DType = DType.FP32

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        check_tau(self.tau)
        Replica(self.worker, self.inner, self.dtype)

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Wait for the old average, update the anchor, pull, launch the next average."""
        replica = Replica(self.worker, self.inner)
        share = replica.share(job, layout)
        # reads x, average, anchor and momentum; writes momentum, anchor, x and the buffer
        outer = outer_work(job, share, tensors=8)
        publish = replica.publish(job, layout, "outer", job.parameters)
        ops = [
            Op("outer", outer, COMPUTE, (After("average", rounds_ago=1),)),
            Op(
                "average",
                replica.all_reduce("parameters", share, self.dtype),
                OUTER,
                (After("outer"),),
            ),
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
        """The inner strategy, and anchor, anchor momentum and the buffer in flight."""
        copies = 2 + self.dtype.bytes / DType.FP32.bytes
        return Replica(self.worker, self.inner).memory(job, layout, copies)
