"""PyTorch FSDP: blocks are sharded units, gathered one ahead; the rest of the model is the root."""

import math
from collections.abc import Iterator, Sequence
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
    and stores reduced gradients there. Megatron-FSDP gathers `ahead` elements beside those in use.
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
    ahead: int = 0


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
    kind = _MegatronMicroStep if how.ahead else _MicroStep
    alone = replace(how, replicas=None, expert_replicas=None)
    for micro in range(job.accumulation):
        waits = how.ahead and micro < job.accumulation - 1
        uses = list(kind(job, alone if waits else how, shards, micro).uses(end))
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
        how = self.how
        kernels = self._kernels(elements)
        if not self._synced:
            return kernels, ()
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

    def _kernels(self, elements: int) -> list[Compute]:
        """What a gradient needs before it is reduced, or beside those of other micro-steps."""
        how, width, reduced = self.how, self.job.precision.bytes, self.how.reduce.bytes
        kernels = [] if how.copies else [_moved("join", elements, 2 * width)]
        if self.micro_step and not how.every:
            kernels.append(_moved("accumulate", elements, width + 2 * reduced))
            width = reduced
        elif not self._synced and width != reduced:
            kernels.append(_moved("accumulate", elements, width + reduced))
        if self._synced and (how.copies or width != reduced):
            kernels.append(_moved("pack", elements, width + reduced))
        if self._synced and not how.copies:
            kernels.append(_moved("divide", elements, 2 * reduced))
        return kernels

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


@dataclass(frozen=True, slots=True)
class _MegatronMicroStep(_MicroStep):
    """That of Megatron-FSDP: layers are units, whose gradients are made in the buffer.

    Embedding and head are gathered apart, once a step, and stay. The passes wait for reductions of
    more than two times `ahead` elements, and at the end for all.
    """

    def uses(self, before: str) -> Iterator[Use]:
        """The uses in turn, behind op `before`; a gather begins with a pass before its own."""
        works = self.job.works()
        prefix, turn = micro_prefix(self.micro_step, self.job), Turn(micro_step=self.micro_step)
        done: list[tuple[str, int]] = []
        under_way: list[tuple[str, int]] = []
        for direction, index in [
            *(("forward", index) for index in range(len(works))),
            *(("backward", index) for index in reversed(range(len(works)))),
        ]:
            if (direction, index) == ("backward", len(works) - 1):
                before, done = done[-1][0], []
            used = f"{direction}.{works[index].block.name}"
            work, waits = getattr(works[index], direction), _queued(under_way, 2 * self.how.ahead)
            if before and not done and direction == "forward":
                waits += (After(before),)
            passes = [Op(f"{prefix}{used}", work, COMPUTE, waits, turn)]
            gathered, fetch = self._gathered(direction, index), []
            if gathered:
                fetch = renamed([self._gather(index, self.how.among)], prefix, f".{used}")
            behind = _begins(done, self.how.ahead) or before
            done.append((passes[0].name, gathered))
            rows: list[Row] = []
            if direction == "backward" and (elements := self._reduced(index)):
                end = f".{works[index].block.name}"
                kernels, row = self._reduce(index, elements)
                passes += [Op(f"{prefix}{k.kernel}{end}", k, COMPUTE, (), turn) for k in kernels]
                rows = [row for row in renamed([row], prefix, end) if row]
                under_way += [(row[-1][0], elements) for row in rows]
            yield Use(passes, fetch, behind or None, rows)

    def _unit(self, index: int) -> str:
        return self.job.model.blocks[index].name

    def _gathered(self, direction: str, index: int) -> int:
        if index in {0, len(self.job.model.blocks) - 1} and (self.micro_step, direction) != (
            0,
            "forward",
        ):
            return 0
        return _whole_at_times(self.job, self.how.experts, index)

    def _kernels(self, elements: int) -> list[Compute]:
        """Gradients of 16 bits are scaled; others are as NCCL sums them up.

        Source: `gradient_reduce_preprocessing` of param_and_grad_buffer.py; products add to the
        buffer (gradient_accumulation_fusion).
        """
        reduced = self.how.reduce.bytes
        return [] if self.how.reduce is DType.FP32 else [_moved("divide", elements, 2 * reduced)]


def _whole_at_times(job: Workload, experts: Group | None, index: int) -> int:
    """Elements of a block that ranks share: not of experts that each rank has for itself."""
    block = job.model.blocks[index]
    return block.parameters - (0 if experts or not job.experts_apart else sum(block.experts))


def _ahead(job: Workload) -> int:
    """Elements that Megatron-FSDP gathers ahead: a layer of mean size, and 500 million at least.

    Source: `suggested_AG_prefetch_size`, half of `suggested_communication_unit_size`, in
    megatron_fsdp.py.
    """
    layers = job.model.blocks[1:-1]
    return max(500_000_000, sum(block.parameters for block in layers) // max(1, len(layers)))


def _with_next(sizes: Sequence[int], ahead: int) -> list[int]:
    """Each of the sizes with the next ones, until these are `ahead`."""
    sums: list[int] = []
    for turn, size in enumerate(sizes):
        come = 0
        for following in sizes[turn + 1 :]:
            if come >= ahead:
                break
            come += following
        sums.append(size + come)
    return sums


def _last(sizes: Sequence[int], most: int) -> int:
    """The last of the sizes, and of those before it as many as are `most` together."""
    total = 0
    for size in reversed(sizes[:-1]):
        if total + size > most:
            break
        total += size
    return total + sum(sizes[-1:])


def _begins(done: Sequence[tuple[str, int]], ahead: int) -> str:
    """The pass behind which the next gather begins; empty where it is the first of all.

    With a pass come the gathers behind it, until these are of `ahead` elements.
    """
    turn, between = len(done) - 1, 0
    while turn > 0 and between + done[turn][1] < ahead:
        between += done[turn][1]
        turn -= 1
    return done[turn - 1][0] if turn > 0 else ""


def _queued(under_way: list[tuple[str, int]], most: int) -> tuple[After, ...]:
    """The waits for the oldest reductions, so that no more than `most` elements are under way."""
    waits: tuple[After, ...] = ()
    while sum(elements for _, elements in under_way) > most:
        waits = (After(under_way.pop(0)[0]),)
    return waits


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
    "megatron" is Megatron-FSDP that shards parameters (optim_grads_params): these in the precision,
    and in fp32 for the optimizer; gradients kept in `reduce` (its default, auto, is the precision);
    several layers gathered ahead; embedding and head whole from the first micro-step on; shards of
    gradients all-reduced between groups in the last one only. Source: NVIDIA/Megatron-LM d98e8a64,
    megatron/core/distributed/fsdp/src/megatron_fsdp, megatron_fsdp.py, param_and_grad_buffer.py.

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
    version: int | Literal["megatron"] = 2

    def __post_init__(self) -> None:
        """Refuse groups that share nothing."""
        if not isinstance(self.reshard_after_forward, bool):
            whole_options(self, "reshard_after_forward", least=2)
        if self.shard != "node":
            whole_options(self, "shard", least=0)
        if self.version != "megatron":
            whole_options(self, "version", most=2)
        elif self.reshard_after_forward is not True or self.sync != "every":
            raise OptionError(
                "fsdp: version=megatron needs reshard_after_forward=true and sync=every"
            )

    @property
    def _is_torch_2(self) -> bool:
        return self.version not in {1, "megatron"}

    def step(self, job: Workload, layout: Layout, group: Group) -> Step:
        """One optimizer step over `group`."""
        how = replace(self.sharding(layout, group), loads=job.offload == "parameters")
        if not self._is_torch_2:
            refuse_whole(job, f"version {self.version} of fsdp")
        check_shapes(job, "fsdp", flat=False)
        if how.loads and not self._is_torch_2:
            raise OptionError(
                f"fsdp: version={self.version} does not combine with offload=parameters"
            )
        if job.experts_apart and how.again not in {None, how.among}:
            raise OptionError(
                f"fsdp: reshard_after_forward={self.reshard_after_forward} does not combine with"
                f" {job.expert_words}; it must be true or false"
            )
        experts = job.same_experts(how.among, layout)
        replicas = job.expert_peers(how.among, how.replicas, layout)
        how = replace(how, experts=experts, expert_replicas=replicas)
        if self.version == "megatron":
            how = replace(how, ahead=_ahead(job))
        return fsdp_step(job, layout, how)

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
            copies=self._is_torch_2,
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
        if self.version == "megatron":
            return self._megatron_memory(job, layout)
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

    def _megatron_memory(self, job: Workload, layout: Layout) -> Items:
        """Parameters in the precision and in fp32, gradients as reduced, and what is whole.

        Embedding and head are whole throughout; so are a block at work, those that are gathered
        ahead, and gradients that are under way: up to two times as many elements, and the last.
        """
        among, width, reduced = (
            self.sharding(layout, WORLD).among,
            job.precision.bytes,
            self.reduce.bytes,
        )
        n = group_size(among, layout)
        trained = job.owned_trained(n)
        items: dict[str, Bytes | Passing] = {
            "whole_gradients": reduced,
            "parameters": job.owned(n) * width,
            "gradients": trained * reduced,
        }
        if not job.states_on_host:
            items["optimizer"] = job.optimizer_states(n)
            cast = 0.0 if self.reduce is DType.FP32 else DType.FP32.bytes
            items["update"] = Passing(step=trained * (cast + job.update_bytes))
        if n == 1:
            return items
        blocks, experts, ahead = job.model.blocks, job.same_experts(among, layout), _ahead(job)
        sizes = [_whole_at_times(job, experts, index) for index in range(len(blocks))]
        ends = sizes[0] + (sizes[-1] if len(sizes) > 1 else 0)
        layers = [0, *sizes[1:-1], 0][: len(sizes)]
        there, back = (
            [(ends + size) * width for size in _with_next(row, ahead)]
            for row in (layers, layers[::-1])
        )
        items["gathered"] = Passing(there, ends * width, back[::-1])
        behind = [block.trained for block in blocks[::-1]]
        queued = [_last(behind[:turn], 2 * ahead) * reduced for turn in range(len(behind))]
        items["bucket"] = Passing(backward=queued[::-1], end=_last(behind, 2 * ahead) * reduced)
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
