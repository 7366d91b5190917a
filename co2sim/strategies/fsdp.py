"""PyTorch FSDP: blocks are sharded units, gathered one ahead; the rest of the model is the root."""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from co2sim.errors import OptionError
from co2sim.schedule import PEERS, WORLD, Group, Layout, Schedule, peers_of_blocks
from co2sim.schedule import DType as D
from co2sim.strategies.chaining import chain
from co2sim.strategies.fsdp_step import Sharding, fsdp_step, units
from co2sim.strategies.sharded import consecutive
from co2sim.strategies.step import Step, group_size, title, whole_options
from co2sim.units import Bytes
from co2sim.workload import MASTER_BYTES, OPTIMIZER_BYTES, Workload

Sync: TypeAlias = Literal["every", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP:
    """Gather a block ahead of its use, release it, reduce-scatter its gradient in `reduce`.

    `reshard_after_forward`: true, a block is released after its forward pass and gathered again
    before its backward pass; false, it stays; a number, a shard of it stays in every group of so
    many consecutive ranks, which gather it for the backward pass. `shard`: 0, over all ranks;
    "node" or a number, in groups of so many consecutive ranks, and shards of gradients are
    all-reduced between the groups (HSDP). `sync`: "every" micro-step reduces gradients; "last" only
    the last one does, and whole gradients stay until then (`set_requires_gradient_sync`; units that
    are not resharded stay too, as with `set_reshard_after_backward(False)`). `clip`: the norm of
    gradients is all-reduced, and waited for, before the optimizer. `version` 2 is `fully_shard`,
    which copies gathered blocks out of a buffer and gradients into one; 1 is
    FullyShardedDataParallel, which joins the gradients of a flat parameter, casts and divides them.

    The root unit holds the first and the last block, embedding and head, tied or not: it is
    gathered when a micro-step starts, stays, and is reduced behind the last backward pass. That is
    what `fully_shard(layer)` for every layer and then `fully_shard(model)` gives. Sources: torch
    2.13, torch/distributed/fsdp/_fully_shard; Zhao et al. 2023, PyTorch FSDP, VLDB 16(12).
    """

    name: ClassVar[str] = "fsdp"

    reshard_after_forward: bool | int = True
    shard: int | Literal["node"] = 0
    sync: Sync = "every"
    reduce: Literal[D.FP32, D.BF16, D.FP16] = D.FP32
    clip: bool = True
    version: int = 2

    def __post_init__(self) -> None:
        """Refuse groups that share nothing."""
        if not isinstance(self.reshard_after_forward, bool):
            whole_options(self, "reshard_after_forward", least=2)
        if self.shard != "node":
            whole_options(self, "shard", least=0)
        whole_options(self, "version", most=2)

    def step(self, job: Workload, layout: Layout, group: Group) -> Step:
        """One optimizer step over `group`."""
        return fsdp_step(job, layout, self.sharding(layout, group))

    def sharding(self, layout: Layout, group: Group) -> Sharding:
        """Who shares parameters, who gathers them again, and who replicates the shards."""
        among, replicas = group, None
        shards = layout.gpus_per_node if self.shard == "node" else self.shard
        if shards and shards != group_size(group, layout):
            among = consecutive(shards, layout, "fsdp: shard")
            replicas = PEERS if shards == layout.gpus_per_node else peers_of_blocks(shards)
        again, kept = among, self.reshard_after_forward
        if not isinstance(kept, bool) and kept != group_size(among, layout):
            again = consecutive(kept, layout, "fsdp: reshard_after_forward")
            if group_size(among, layout) % kept:
                raise OptionError(
                    f"fsdp: reshard_after_forward={kept} must divide the"
                    f" {group_size(among, layout)} ranks that share the parameters"
                )
        return Sharding(
            among=among,
            again=None if kept is False else again,
            replicas=replicas,
            every=self.sync == "every",
            reduce=self.reduce,
            clip=self.clip,
            copies=self.version > 1,
        )

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """One optimizer step over all ranks."""
        return Schedule(title(self), chain(self.step(job, layout, WORLD)))

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """16 bytes per parameter over the shards (AdamW), and what is whole at the peak.

        Parameters, gradients and moments are fp32: parameters are their own master copy. The peak
        is in the backward pass, where two units are gathered besides the root, the gradient of one
        is computed and that of another is reduced.
        """
        sharding = self.sharding(layout, WORLD)
        n, width = group_size(sharding.among, layout), job.precision.bytes
        share, reduced = job.parameters / n, self.reduce.bytes
        root, others = units(job)
        largest = max(others, default=root)
        whole = root + sum(sorted(others)[-2:]) if sharding.again else job.parameters
        found = {
            "parameters": share * MASTER_BYTES,
            "gradients": share * MASTER_BYTES,
            "optimizer": share * (OPTIMIZER_BYTES[job.optimizer] - MASTER_BYTES),
        }
        if n == 1:
            return found
        found["gathered"] = whole * width
        found["bucket"] = largest * (width + reduced)
        if sharding.again not in {None, sharding.among}:
            ranks = group_size(sharding.again, layout)
            found["resharded"] = (job.parameters - root) * width / ranks
        if not sharding.every and job.accumulation > 1:
            found["unreduced"] = job.parameters * max(width, reduced)
        return found
