"""PyTorch FSDP: blocks are sharded units, gathered one ahead; the rest of the model is the root."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import numpy as np

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes
from co2sim.schedule.schedule import (
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Group,
    Kind,
    Layout,
    Op,
    Place,
    Schedule,
    Turn,
)
from co2sim.schedule.schedule import DType as D
from co2sim.strategies.chaining import chain
from co2sim.strategies.sharded import (
    GATHER,
    REDUCE,
    Row,
    Use,
    consecutive,
    lay_out,
    renamed,
    shared_among,
)
from co2sim.strategies.step import (
    COMPUTE,
    Step,
    check_micro_steps,
    group_size,
    micro_prefix,
    title,
    update,
    whole_options,
    with_activations_on_host,
)
from co2sim.strategies.whole_matrices import EXCHANGED, Division, check_shapes, refuse_whole
from co2sim.training.memory import Items, Passing, as_they_come, casts
from co2sim.training.workload import Workload

REPLICATE = "replicate"
"""The stream of all-reduces between groups of shards: their own communicator."""
LOAD = "load"
"""The stream of copies from the host: torch's for the inputs of all-gathers."""

_OPS_PER_BLOCK = 9
_LOADS_PER_BLOCK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Who meets, and when: `among` share units, `again` gather them for the backward pass.

    `again` is None where units stay whole. `replicas` hold the same shards. Gradients are reduced
    in `reduce`, in every micro-step or in the last. Experts that ranks divide are shared among
    `experts` (None: each rank has its own whole), and replicated on `expert_replicas`. With
    `copies` gathered units are copied out of a buffer, and gradients into one; without, autograd
    joins gradients of views to a flat one. A rank `loads` its shares from the host before a gather,
    and stores reduced gradients there.
    """

    among: Group
    again: Group | None
    replicas: Group | None
    every: bool
    reduce: DType
    clip: bool
    copies: bool
    experts: Group | None = None
    expert_replicas: Group | None = None
    loads: bool = False


def units(job: Workload) -> tuple[int, list[int]]:
    """Elements of the root unit, which is the first and the last block, and of the others."""
    sizes = [block.parameters for block in job.model.blocks]
    return sizes[0] + (sizes[-1] if len(sizes) > 1 else 0), sizes[1:-1]


def fsdp_step(job: Workload, layout: Layout, how: Sharding) -> Step:
    """One optimizer step."""
    check_micro_steps(job, _OPS_PER_BLOCK + _LOADS_PER_BLOCK * how.loads)
    shards = group_size(how.among, layout)
    ops, reduced = lay_out(_uses(job, how, shards))
    ops = with_activations_on_host(job, ops)
    share = math.ceil(job.owned_trained(shards))
    place: Place = "host" if how.loads else "gpu"
    if how.clip:
        norm = Collective(Kind.ALL_REDUCE, "norm", 1, DType.FP32, how.among)
        squares = Compute("norm", 2.0 * share, 4.0 * share, place=place)
        scale = Compute("scale", 1.0 * share, 8.0 * share, place=place)
        ops += [
            Op("norm", squares, COMPUTE, reduced),
            Op("clip", norm, REDUCE, (After("norm"),)),
            Op("scale", scale, COMPUTE, (After("clip"),)),
        ]
    waits = () if how.clip else reduced
    if how.loads:  # gradients are on the host, and parameters stay there
        work = replace(job.update.by_elements(share), kernel="host_optimizer", place=place)
        ops.append(Op("optimizer", work, COMPUTE, waits))
    else:
        division = Division(EXCHANGED, how.among, shards, how.experts, REDUCE)
        ops += update(job, share, waits, how.reduce.bytes, division)
    firsts = {op.stream: op.name for op in reversed(ops)}
    needs = [firsts[stream] for stream in (LOAD, GATHER, COMPUTE) if stream in firsts]
    return Step(ops, tuple(needs), (ops[-1].name,))


def _uses(job: Workload, how: Sharding, shards: int) -> Iterator[Use]:
    """The uses of blocks of all micro-steps, each of which waits for the end of the one before."""
    end = ""
    for micro in range(job.accumulation):
        uses = list(_MicroStep(job, how, shards, micro).uses(end))
        yield from uses
        last = uses[-1]
        end = last.reduce[-1][-1][0] if last.reduce else last.passes[-1].name


@dataclass(frozen=True, slots=True)
class _MicroStep:
    """A forward and a backward pass."""

    job: Workload
    how: Sharding
    shards: int
    micro_step: int

    def uses(self, before: str) -> Iterator[Use]:
        """The uses in turn, behind op `before`.

        A gather waits until a buffer is free: behind the last but one copy out of a buffer, in the
        backward pass behind the last one; without copies behind the last but one pass that used
        gathered parameters, and the reduction of its gradient, which was issued before: a
        communicator takes collectives in the order of issue. Gradients are copied into a buffer
        behind the reduction of the last.
        """
        works = self.job.works()
        places = range(len(works))
        prefix, turn = micro_prefix(self.micro_step, self.job), Turn(micro_step=self.micro_step)
        freed: list[str] = []
        reduction: tuple[After, ...] = ()
        for direction, index in [
            *(("forward", index) for index in places),
            *(("backward", index) for index in reversed(places)),
        ]:
            work = works[index]
            used = f"{direction}.{work.block.name}"
            passes = [Op(f"{prefix}{used}", getattr(work, direction), COMPUTE, turn=turn)]
            gathered, fetch, behind = self._gathered(direction, index), [], before
            if gathered:
                group = self.how.again if direction == "backward" else self.how.among
                fetch = renamed([self._gather(index, group or self.how.among)], prefix, f".{used}")
                ahead = 1 if self.how.copies and direction == "backward" else 2
                behind = freed[-ahead] if len(freed) >= ahead else "" if freed else before
                freed.append(passes[0].name)
                if self.how.copies:
                    copy = _moved("copy", gathered, 2 * self.job.precision.bytes)
                    passes.insert(0, Op(f"{prefix}copy.{used}", copy, COMPUTE, turn=turn))
                    freed[-1] = passes[0].name
            elif before and not freed:  # nothing is gathered: the first pass waits itself
                passes[0] = replace(passes[0], after=(After(before),))
            row: Row = ()
            if direction == "backward" and (elements := self._reduced(index)):
                end = f".{work.block.name}"
                kernels, row = self._reduce(index, elements)
                passes += [
                    Op(f"{prefix}{kernel.kernel}{end}", kernel, COMPUTE, reduction, turn)
                    for kernel in kernels
                ]
                (row,) = renamed([row], prefix, end)
                if self.how.copies:
                    reduction = tuple(
                        After(op)
                        for op, work, on in row
                        if on == REDUCE and isinstance(work, Collective)
                    )
                elif gathered and row:
                    freed[-1] = row[0][0]
            yield Use(passes, fetch, behind or None, [row] if row else [])

    @property
    def _synced(self) -> bool:
        return self.how.every or self.micro_step == self.job.accumulation - 1

    def _unit(self, index: int) -> str:
        blocks = self.job.model.blocks
        return "root" if index in {0, len(blocks) - 1} else blocks[index].name

    def _gathered(self, direction: str, index: int) -> int:
        """The elements that a use has gathered, if it does not find them."""
        stay = self.how.again is None
        if stay and (direction == "backward" or (self.micro_step and not self.how.every)):
            return 0
        if self._unit(index) == "root":
            return units(self.job)[0] if (direction, index) == ("forward", 0) else 0
        return self.job.model.blocks[index].parameters

    def _reduced(self, index: int) -> int:
        """The elements of the gradient that is complete behind a backward pass."""
        if self._unit(index) == "root" and index:
            return 0
        return sum(self._trained(index))

    def _gather(self, index: int, group: Group) -> Row:
        precision, unit = self.job.precision, self._unit(index)
        dense, experts = self._parts(index)
        whole = Collective(Kind.ALL_GATHER, unit, dense, precision, group)
        row: list[tuple[str, Compute | Collective, str]] = [("gather", whole, GATHER)]
        if experts and self.how.experts:
            work = Collective(
                Kind.ALL_GATHER, f"{unit}.experts", experts, precision, self.how.experts
            )
            row.append(("gather_experts", work, GATHER))
        if self.how.loads and group == self.how.among:
            size = self._owned(index, trained=False)
            row.insert(0, ("load", Compute("load", 0.0, size, place="link"), LOAD))
        return row

    def _owned(self, index: int, *, trained: bool) -> Bytes:
        """Bytes of a unit on the host of a rank: those that are trained, or all of them.

        Parameters cross the link as the optimizer has them, and are cast behind it: torch 2.13,
        `all_gather_inputs` of torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
        """
        parts = zip(self._trained(index), self._parts(index), strict=True)
        counts = self.shards, self.job.expert_replicas(self.shards)
        frozen = 0.0 if trained else self.job.precision.bytes
        return sum(
            (mine * self.job.update.master_bytes + (every - mine) * frozen) / ranks
            for (mine, every), ranks in zip(parts, counts, strict=True)
        )

    def _parts(self, index: int) -> tuple[int, int]:
        """Elements of a unit: those of all ranks, and of experts that ranks divide."""
        if self._unit(index) == "root":
            return units(self.job)[0], 0
        block = self.job.model.blocks[index]
        return sum(block.tensors), sum(block.experts)

    def _trained(self, index: int) -> tuple[int, int]:
        """Those of `_parts` that have gradients."""
        blocks = self.job.model.blocks
        if self._unit(index) == "root":
            return sum(block.trained for block in (blocks[0], *blocks[1:][-1:])), 0
        return sum(blocks[index].trained_tensors), sum(blocks[index].trained_experts)

    def _reduce(self, index: int, elements: int) -> tuple[list[Compute], Row]:
        """Kernels on the stream of the passes, and what follows on others.

        Without copies a gradient is cast, and divided before it is reduced (`_div_if_needed` of
        torch/distributed/fsdp/_runtime_utils.py). PyTorch does that on another stream; it is
        counted with the passes, since both move the same memory: runs of LLM Foundry cost all of it
        (docs/validation.md).
        """
        how, width, reduced = self.how, self.job.precision.bytes, self.how.reduce.bytes
        kernels = [] if how.copies else [_moved("join", elements, 2 * width)]
        if self.micro_step and not how.every:
            kernels.append(_moved("accumulate", elements, width + 2 * reduced))
            width = reduced
        elif not self._synced and width != reduced:
            kernels.append(_moved("accumulate", elements, width + reduced))
        if not self._synced:
            return kernels, ()
        if how.copies or width != reduced:
            kernels.append(_moved("pack", elements, width + reduced))
        if not how.copies:
            kernels.append(_moved("divide", elements, 2 * reduced))
        buffer = f"{self._unit(index)}.gradient"
        dense, experts = self._trained(index)
        row = self._shared(buffer, dense, how.among, "")
        if experts:
            row += self._shared(f"{buffer}.experts", experts, how.experts, "_experts")
        if how.loads:
            size, on = self._owned(index, trained=True), row[-1][2] if row else REDUCE
            row.append(("store", Compute("store", 0.0, size, place="link"), on))
            if self.micro_step and how.every:  # two are read, and their sum written
                row.append(("add", Compute("add", 0.0, 3 * size, place="host"), on))
        return kernels, row

    def _shared(
        self, buffer: str, elements: int, among: Group | None, name: str
    ) -> list[tuple[str, Compute | Collective, str]]:
        """A gradient is reduced among those that share it, and then among replicas of the share."""
        how, shards, replicas = self.how, self.shards, self.how.replicas
        if name:
            shards, replicas = self.job.expert_replicas(shards), how.expert_replicas
        row: list[tuple[str, Compute | Collective, str]] = []
        if among:
            scatter = Collective(Kind.REDUCE_SCATTER, buffer, elements, how.reduce, among)
            row.append((f"reduce{name}", scatter, REDUCE))
        if replicas:
            share = -(-elements // shards)
            again = Collective(Kind.ALL_REDUCE, buffer, share, how.reduce, replicas)
            row.append((f"replicate{name}", again, REPLICATE))
        return row


def _moved(kernel: str, elements: int, width: float) -> Compute:
    """A kernel that reads and writes `width` bytes for each element."""
    return Compute(kernel, 0.0, elements * width)


Sync: TypeAlias = Literal["every", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP:
    """Gather a block ahead of its use, release it, reduce-scatter its gradient in `reduce`.

    `reshard_after_forward`: true, a block is released after its forward pass and gathered again
    before its backward pass; false, it stays; a number, a shard of it stays in every group of so
    many consecutive ranks, which gather it for the backward pass. `shard`: 0, over all ranks;
    "node" or a number, in groups of that many consecutive ranks, and shards of gradients are
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
    shares: ClassVar[str] = "parameters"
    divides_layers: ClassVar[bool] = True
    divides_experts: ClassVar[bool] = True
    offloads: ClassVar[tuple[str, ...]] = ("optimizer", "parameters")

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
        how = replace(self.sharding(layout, group), loads=job.offload == "parameters")
        if self.version == 1:
            refuse_whole(job, "version 1 of fsdp")
        check_shapes(job, "fsdp", flat=False)
        if how.loads and self.version == 1:
            raise OptionError("fsdp: version=1 does not combine with offload=parameters")
        if job.experts_apart and how.again not in {None, how.among}:
            raise OptionError(
                f"fsdp: reshard_after_forward={self.reshard_after_forward} does not combine with"
                f" {job.expert_words}; it must be true or false"
            )
        experts = job.same_experts(how.among, layout)
        replicas = job.expert_peers(how.among, how.replicas, layout)
        return fsdp_step(job, layout, replace(how, experts=experts, expert_replicas=replicas))

    def sharding(self, layout: Layout, group: Group) -> Sharding:
        """Who shares parameters, who gathers them again, and who replicates the shards."""
        among, replicas = shared_among(self.shard, layout, group, "fsdp: shard")
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

    def memory(self, job: Workload, layout: Layout) -> Items:
        """16 bytes per parameter over the shards (AdamW), and what is whole at times.

        Parameters, gradients and moments are fp32: parameters are their own master copy; those that
        are frozen, and all of an optimizer without master copies, are of the precision. While a
        unit goes back it is gathered, and so are the root and the unit before; its gradient is
        made, and that of the unit behind is reduced. The root stays until the end, where its own
        gradient is reduced. With states on the host the master copy is there, and parameters are
        those of the passes. With parameters there nothing is left of them but what is gathered, and
        gradients are there, too: CPUOffloadPolicy of torch 2.13.

        Source: torch.distributed.fsdp, _fully_shard/_fsdp_param_group.py and _fsdp_collectives.py.
        """
        sharding = self.sharding(layout, WORLD)
        n, width = group_size(sharding.among, layout), job.precision.bytes
        if job.autocast:  # without a policy of its own it gathers what is sharded
            width = DType.FP32.bytes
        share, trained, reduced = job.owned(n), job.owned_trained(n), self.reduce.bytes
        items: dict[str, Bytes | Passing] = {"whole_gradients": width}
        if job.offload != "parameters":
            items["parameters"] = share * width
            items["gradients"] = as_they_come(job, job.update.master_bytes, n)
        if not job.states_on_host:
            items["parameters"] = share * width + trained * (job.update.master_bytes - width)
            items["optimizer"] = job.moments(n)
        if n == 1 and job.offload != "parameters":
            return items
        if job.update_bytes:
            items["update"] = Passing(step=trained * job.update_bytes)
        if job.autocast:
            items["casts"] = casts(job, cached=False)
        root, _ = units(job)
        items["gathered"] = self._gathered(job, root * width, again=sharding.again is not None)
        blocks = job.model.blocks
        largest = max(root, *(block.parameters for block in blocks))
        items["streams"] = trained * job.update.master_bytes + largest * width
        behind = [*(block.trained for block in blocks[1:-1]), 0, 0][1:]
        last = blocks[-1].trained + blocks[-1].trained_tied
        of_root = blocks[0].trained + (blocks[-1].trained if len(blocks) > 1 else 0)
        items["last_block"] = of_root * reduced
        items["bucket"] = Passing(
            backward=[0.0, *(size * reduced for size in behind)][: len(blocks)],
            end=of_root * (width + reduced),
        )
        if sharding.again not in {None, sharding.among}:
            ranks = group_size(sharding.again, layout)
            items["resharded"] = (job.parameters - root) * width / ranks
        of_head = np.array([*[last * width] * (len(blocks) - 1), 0.0])
        items["unreduced"] = Passing(backward=of_head)
        if not sharding.every and job.accumulation > 1:
            wide = max(width, reduced)
            sums = np.cumsum([block.trained for block in blocks]) * wide
            items["unreduced"] = Passing(sums[-1], sums[-1], sums + of_head, of_root * wide)
        return items

    @staticmethod
    def _gathered(job: Workload, root: Bytes, *, again: bool) -> Passing:
        """The root and, beside a unit at work, the one that comes; all where they stay."""
        width = DType.FP32.bytes if job.autocast else job.precision.bytes
        layers = (block.parameters * width for block in job.model.blocks[1:-1])
        sizes = [0.0, *layers, 0.0][: len(job.model.blocks)]
        if not again:
            there = root + np.cumsum(sizes)
            return Passing(there, there[-1], there)
        comes = [0.0, *sizes[:-1]]
        return Passing(
            [root + size for size in sizes],
            root,
            [root + size + next_ for size, next_ in zip(sizes, comes, strict=True)],
        )
