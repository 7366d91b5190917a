"""ZeRO stage 1: the optimizer is sharded; gradients and parameters are whole."""

from dataclasses import dataclass
from typing import ClassVar

from co2sim.common.units import Bytes
from co2sim.common.validation import at_least
from co2sim.models.memory import model_states
from co2sim.models.workload import Workload
from co2sim.schedule.schedule import WORLD, Group, Kind, Layout, Schedule
from co2sim.strategies.chaining import chain
from co2sim.strategies.step import Reduction, Step, bucketed_step, title, whole_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero1:
    """Reduce-scatter gradients after the last micro-step, update a share, all-gather parameters.

    `bucket` is in elements. Source: Rajbhandari et al. 2020, arXiv 1910.02054; DeepSpeed's
    `reduce_bucket_size` and `allgather_bucket_size` are 5e8 by default.
    """

    name: ClassVar[str] = "zero1"

    bucket: int = 500_000_000

    def __post_init__(self) -> None:
        """Refuse buckets that hold nothing."""
        whole_options(self, "bucket")

    def step(self, job: Workload, layout: Layout, group: Group) -> Step:
        """One optimizer step over `group`."""
        reduction = Reduction(kind=Kind.REDUCE_SCATTER, group=group, capacity=self.bucket)
        return bucketed_step(job, layout, reduction, gather_capacity=self.bucket)

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """One optimizer step over all ranks."""
        return Schedule(title(self), chain(self.step(job, layout, WORLD)))

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """4 + K/n bytes per parameter."""
        return model_states(job, optimizer_shards=layout.world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP:
    """All-reduce gradient buckets of `bucket_mib` MiB behind the backward of the last micro-step.

    Source: Li et al. 2020, PyTorch Distributed, VLDB 13(12); torch's default bucket is 25 MiB.
    """

    name: ClassVar[str] = "ddp"

    bucket_mib: float = 25.0

    def __post_init__(self) -> None:
        """Refuse buckets of negative size; 0 gives every tensor a bucket of its own."""
        at_least("ddp: bucket_mib", self.bucket_mib, 0)

    def step(self, job: Workload, layout: Layout, group: Group) -> Step:
        """One optimizer step over `group`."""
        capacity = self.bucket_mib * 2**20 / job.precision.bytes
        return bucketed_step(
            job, layout, Reduction(kind=Kind.ALL_REDUCE, group=group, capacity=capacity)
        )

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """One optimizer step over all ranks."""
        return Schedule(title(self), chain(self.step(job, layout, WORLD)))

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """Everything on every rank: 16 bytes per parameter with AdamW in half precision."""
        del layout
        return model_states(job)
