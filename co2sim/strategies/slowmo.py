"""SlowMo: local SGD with an outer momentum."""

from dataclasses import dataclass
from typing import ClassVar

from co2sim.schedule import After, DType, Layout, Op, Schedule
from co2sim.strategies.local import OUTER, Inner, Replica, Worker, check_tau, outer_work
from co2sim.strategies.step import COMPUTE, Step, chain, title
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
    dtype: DType = DType.FP32

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        check_tau(self.tau)
        Replica(self.worker, self.inner, self.dtype)

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Local steps, average, momentum."""
        replica = Replica(self.worker, self.inner)
        share = replica.share(job, layout)
        publish = replica.publish(job, layout, "outer", job.parameters)
        ops = [
            Op("average", replica.all_reduce("parameters", share, self.dtype), OUTER),
            # reads average, anchor and momentum; writes momentum, anchor and x
            Op("outer", outer_work(job, share, tensors=6), COMPUTE, (After("average"),)),
            *publish,
        ]
        extra = Step(ops, ("average",), (ops[-1].name,), regathers=bool(publish))
        return Schedule(
            title(self), chain(replica.step(job, layout), self.tau, {self.tau - 1: extra}), self.tau
        )

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """The inner strategy, and anchor, momentum and one buffer for the average."""
        copies = 2 + self.dtype.bytes / DType.FP32.bytes
        return Replica(self.worker, self.inner).memory(job, layout, copies)
