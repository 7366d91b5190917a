"""ZeRO stage 1: the optimizer is sharded; gradients and parameters are whole."""

from dataclasses import dataclass
from typing import ClassVar

from co2sim.common.units import Bytes
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
