"""Data parallelism: DDP, and the stages 1 to 3 of ZeRO."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from co2sim.common.errors import OptionError
from co2sim.common.validation import at_least
from co2sim.schedule.schedule import WORLD, Collective, Compute, Group, Kind, Layout, Schedule
from co2sim.strategies.chaining import chain
from co2sim.strategies.sharded import (
    GATHER,
    KEPT,
    REDUCE,
    Budget,
    Portion,
    Row,
    Sharers,
    check_budget,
    fetched,
    scattered,
    sharded_step,
    shared_among,
    transient,
)
from co2sim.strategies.step import Reduction, Step, bucketed_step, group_size, title, whole_options
from co2sim.strategies.whole_matrices import DIVIDED, Division, check_shapes
from co2sim.training.memory import Items, model_states
from co2sim.training.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero1:
    """Reduce-scatter gradients after the last micro-step, update a share, all-gather parameters.

    `bucket` is in elements. Source: Rajbhandari et al. 2020, arXiv 1910.02054; DeepSpeed's
    `reduce_bucket_size` and `allgather_bucket_size` are 5e8 by default.

    `shard`: 0, optimizer states are divided among all ranks; "node" or a number, in groups of that
    many consecutive ranks, and shares of gradients are all-reduced between the groups, each behind
    its reduce-scatter. Sources: Megatron-LM's `--num-distributed-optimizer-instances`, whose two
    collectives are on one stream (megatron/core/distributed/param_and_grad_buffer.py,
    `start_grad_sync`); InternEvo's `zero1=dict(size=8)`.
    """

    name: ClassVar[str] = "zero1"
    shares: ClassVar[str] = "states"
    divides_layers: ClassVar[bool] = True
    has_stages: ClassVar[bool] = True
    divides_experts: ClassVar[bool] = True
    offloads: ClassVar[tuple[str, ...]] = ("optimizer",)

    bucket: int = 500_000_000
    shard: int | Literal["node"] = 0

    def __post_init__(self) -> None:
        """Refuse buckets that hold nothing, and groups that share nothing."""
        _check_shares(self)

    def sharing(self, layout: Layout, group: Group) -> tuple[Group, Group | None]:
        """Who of `group` divides optimizer states, and who has the same share of them."""
        return shared_among(self.shard, layout, group, f"{self.name}: shard")

    def step(self, job: Workload, layout: Layout, group: Group) -> Step:
        """One optimizer step over `group`."""
        reduction = Reduction(kind=Kind.REDUCE_SCATTER, group=group, capacity=self.bucket)
        return _with_shares(job, layout, reduction, self.sharing(layout, group))

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """One optimizer step over all ranks."""
        return Schedule(title(self), chain(self.step(job, layout, WORLD)))

    def memory(self, job: Workload, layout: Layout) -> Items:
        """4 + K/n bytes per parameter.

        PyTorch's ZeroRedundancyOptimizer, which goes with autocast, gives ranks whole tensors.
        """
        among, _ = self.sharing(layout, WORLD)
        ranks = group_size(among, layout)
        states = model_states(job, optimizer_shards=ranks, copies=True)
        if job.autocast and ranks > 1 and isinstance(held := states.get("optimizer"), float):
            largest = max(size for block in job.model.blocks for size in block.trained_tensors)
            share = job.owned_trained(ranks)
            states["optimizer"] = held * max(1.0, largest / share)
        return states


def _check_shares(strategy: "Zero1 | Zero2") -> None:
    whole_options(strategy, "bucket")
    if strategy.shard != "node":
        whole_options(strategy, "shard", least=0)


def _with_shares(
    job: Workload, layout: Layout, reduction: Reduction, sharing: tuple[Group, Group | None]
) -> Step:
    """The step of ranks that divide optimizer states so; groups of one rank divide nothing."""
    among, peers = sharing
    if peers and group_size(among, layout) == 1:
        whole = replace(reduction, kind=Kind.ALL_REDUCE, every_micro_step=False)
        return bucketed_step(job, layout, whole)
    reduction = replace(reduction, group=among, peers=peers)
    return bucketed_step(job, layout, reduction, gather_capacity=int(reduction.capacity))


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP:
    """All-reduce gradient buckets of `bucket_mib` MiB behind the backward of the last micro-step.

    Source: Li et al. 2020, PyTorch Distributed, VLDB 13(12); torch's default bucket is 25 MiB.
    """

    name: ClassVar[str] = "ddp"
    shares: ClassVar[str] = "nothing"
    divides_layers: ClassVar[bool] = True
    has_stages: ClassVar[bool] = True
    divides_experts: ClassVar[bool] = True
    offloads: ClassVar[tuple[str, ...]] = ("optimizer",)

    bucket_mib: float = 25.0

    def __post_init__(self) -> None:
        """Refuse buckets of negative size; 0 gives every tensor its own bucket."""
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

    def memory(self, job: Workload, layout: Layout) -> Items:
        """Everything on every rank: 16 bytes per parameter with AdamW in half precision."""
        del layout
        return model_states(job, copies=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero3:
    """All-gather a block before its forward and its backward; reduce-scatter gradients.

    Gathers run ahead of the compute while the blocks ahead hold at most `prefetch` elements, and
    all blocks present at most `max_live`. A block larger than the budget is not prefetched, so its
    gather is exposed. DeepSpeed itself fetches module by module, and so hides part of a large
    layer: set `prefetch` to the size of a layer to see the other extreme. With full recomputation
    a block larger than half of `max_reuse` is fetched a third time, for the recomputation (1e9 is
    DeepSpeed's `stage3_max_reuse_distance`; here blocks are kept unless told otherwise). A block's
    gradient is reduced in parts of `reduce_bucket` elements, each as soon as it is there. A block
    is fetched in `gathers` equal parts, each with its own latency: in DeepSpeed a layer of
    GPT takes one for each of its 4 matrices. Defaults:
    DeepSpeed's `stage3_prefetch_bucket_size` and `stage3_max_live_parameters`. Parameters that are
    offloaded (`offload_param`) come over the link before each gather, in their own precision.
    Experts that ranks divide are shared among those with the same, and a rank that has its own
    keeps them whole; DeepSpeed itself has its experts in stages 1 and 2 only ("MoE not supported
    with Stage 3"). Source: Rajbhandari et al. 2020, arXiv 1910.02054.
    """

    name: ClassVar[str] = "zero3"
    shares: ClassVar[str] = "parameters"
    divides_layers: ClassVar[bool] = True
    divides_experts: ClassVar[bool] = True
    offloads: ClassVar[tuple[str, ...]] = ("optimizer", "parameters")

    prefetch: int = 50_000_000
    max_live: int = 1_000_000_000
    max_reuse: int = KEPT
    reduce_bucket: int = KEPT
    gathers: int = 1

    def __post_init__(self) -> None:
        """Refuse a budget that holds nothing."""
        check_budget(self)

    def step(self, job: Workload, layout: Layout, group: Group) -> Step:
        """One optimizer step over `group`."""
        check_shapes(job, "zero3")
        sharers = Sharers.of(job, layout, group)
        division = Division(DIVIDED, group, sharers.ranks, sharers.experts, REDUCE)

        def fetch(_direction: str, name: str, portion: Portion) -> list[Row]:
            rows: list[Row] = []
            for part, size in fetched(portion.elements, self.gathers):
                row: list[tuple[str, Compute | Collective, str]] = []
                if job.offload == "parameters":
                    share = size / portion.ranks * job.precision.bytes
                    row = [(f"load{part}", Compute("load", 0.0, share, place="link"), GATHER)]
                if portion.group:
                    work = Collective(Kind.ALL_GATHER, name, size, job.precision, portion.group)
                    row.append((f"gather{part}", work, GATHER))
                rows += [row] if row else []
            return rows

        budget = Budget(self.prefetch, self.max_live, self.max_reuse, self.reduce_bucket)
        reduce = scattered(job)
        return sharded_step(job, sharers, budget, fetch, reduce, division=division)

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """One optimizer step over all ranks."""
        return Schedule(title(self), chain(self.step(job, layout, WORLD)))

    def memory(self, job: Workload, layout: Layout) -> Items:
        """(4 + K)/n bytes per parameter, and the blocks that are present whole.

        With offloaded parameters their shares and gradients are on the host, too: DeepSpeed,
        deepspeed/runtime/zero/stage3.py, `grad_partitions_flat_buffer`.
        """
        n = layout.world_size
        states = model_states(job, parameter_shards=n, gradient_shards=n, optimizer_shards=n)
        sharers = Sharers.of(job, layout, WORLD)
        return states | transient(job, sharers, self.prefetch, self.max_live)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero2:
    """Reduce-scatter gradients in every micro-step, update a share, all-gather parameters.

    A rank keeps only its share of the gradients, so they cannot wait for the last micro-step.
    `bucket` is in elements, as in `zero1`. Source: Rajbhandari et al. 2020, arXiv 1910.02054.

    With `owners` every bucket belongs to one rank: gradients are reduced to it and parameters
    broadcast from it, as ShardedDataParallel and OSS of FairScale do (their bucket: 8388608).
    Owners are the ranks in turn, where OSS takes the rank with the least so far; they update as if
    their shares were equal. A backward pass comes to them in reverse, so that every reduction
    starts at the rank where the one before ended, and fills the chain again. Broadcasts come in
    order, each behind the one before, and are one here.

    `shard` as in `zero1`, of gradients, too: these are reduce-scattered in every micro-step, and
    their shares all-reduced between groups in the last one only, as in MiCS (Zhang et al. 2022,
    arXiv 2205.00119, 2-hop gradient synchronization), which shares parameters so, too.
    """

    name: ClassVar[str] = "zero2"
    shares: ClassVar[str] = "states"
    divides_layers: ClassVar[bool] = True
    divides_experts: ClassVar[bool] = True
    offloads: ClassVar[tuple[str, ...]] = ("optimizer",)

    bucket: int = 500_000_000
    owners: bool = False
    shard: int | Literal["node"] = 0

    def __post_init__(self) -> None:
        """Refuse buckets that hold nothing, groups that share nothing, and owners in groups."""
        _check_shares(self)
        if self.owners and self.shard:
            raise OptionError(f"zero2: shard={self.shard} does not combine with owners=true")

    def sharing(self, layout: Layout, group: Group) -> tuple[Group, Group | None]:
        """Who of `group` divides gradients and optimizer states, and who has the same share."""
        return shared_among(self.shard, layout, group, f"{self.name}: shard")

    def step(self, job: Workload, layout: Layout, group: Group) -> Step:
        """One optimizer step over `group`."""
        kind = Kind.REDUCE if self.owners else Kind.REDUCE_SCATTER
        reduction = Reduction(kind=kind, group=group, capacity=self.bucket, every_micro_step=True)
        return _with_shares(job, layout, reduction, self.sharing(layout, group))

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """One optimizer step over all ranks."""
        return Schedule(title(self), chain(self.step(job, layout, WORLD)))

    def memory(self, job: Workload, layout: Layout) -> Items:
        """2 + (2 + K)/n bytes per parameter, and the bucket being reduced."""
        among, _ = self.sharing(layout, WORLD)
        ranks = group_size(among, layout)
        states = model_states(job, gradient_shards=ranks, optimizer_shards=ranks)
        if ranks > 1:
            states["bucket"] = min(self.bucket, job.trained) * job.precision.bytes
        return states
