"""ZeRO stage 2: optimizer and gradients are sharded; parameters are whole."""

from dataclasses import dataclass
from typing import ClassVar

from co2sim.memory import model_states
from co2sim.schedule import WORLD, Group, Kind, Layout, Schedule
from co2sim.strategies.chaining import chain
from co2sim.strategies.step import Reduction, Step, bucketed_step, title, whole_options
from co2sim.units import Bytes
from co2sim.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero2:
    """Reduce-scatter gradients in every micro-step, update a share, all-gather parameters.

    A rank keeps only its share of the gradients, so they cannot wait for the last micro-step.
    `bucket` is in elements, as in `zero1`. Source: Rajbhandari et al. 2020, arXiv 1910.02054.

    With `owners` every bucket belongs to one rank: gradients are reduced to it and parameters
    broadcast from it, as ShardedDataParallel and OSS of FairScale do (their bucket: 8388608).
    Owners are the ranks in turn, where OSS takes the rank with the least so far; they update as if
    their shares were equal. A backward pass comes to them in reverse, so that every reduction
    starts at the rank where the one before ended, and fills the chain anew. Broadcasts come in
    order, each behind the one before, and are one here.
    """

    name: ClassVar[str] = "zero2"

    bucket: int = 500_000_000
    owners: bool = False

    def __post_init__(self) -> None:
        """Refuse buckets that hold nothing."""
        whole_options(self, "bucket")

    def step(self, job: Workload, layout: Layout, group: Group) -> Step:
        """One optimizer step over `group`."""
        kind = Kind.REDUCE if self.owners else Kind.REDUCE_SCATTER
        reduction = Reduction(kind=kind, group=group, capacity=self.bucket, every_micro_step=True)
        return bucketed_step(job, layout, reduction, gather_capacity=self.bucket)

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """One optimizer step over all ranks."""
        return Schedule(title(self), chain(self.step(job, layout, WORLD)))

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """2 + (2 + K)/n bytes per parameter, and the bucket being reduced."""
        ranks = layout.world_size
        states = model_states(job, gradient_shards=ranks, optimizer_shards=ranks)
        if ranks > 1:
            states["bucket"] = min(self.bucket, job.parameters) * job.precision.bytes
        return states
