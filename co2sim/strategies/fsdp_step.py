"""The step of FSDP: when a unit is gathered, what is copied, and what waits for what."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from co2sim.schedule import After, Collective, Compute, DType, Group, Kind, Layout, Op
from co2sim.strategies.sharded import GATHER, REDUCE, Row, Use, lay_out, renamed
from co2sim.strategies.step import COMPUTE, Step, check_micro_steps, group_size, micro_prefix
from co2sim.workload import Workload

REPLICATE = "replicate"
"""The stream of all-reduces between groups of shards: their own communicator."""

_OPS_PER_BLOCK = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Who meets, and when: `among` share units, `again` gather them for the backward pass.

    `again` is None where units stay whole. `replicas` hold the same shards. Gradients are reduced
    in `reduce`, in every micro-step or in the last. With `copies` gathered units are copied out of
    a buffer, and gradients into one; without, autograd joins gradients of views to a flat one.
    """

    among: Group
    again: Group | None
    replicas: Group | None
    every: bool
    reduce: DType
    clip: bool
    copies: bool


def units(job: Workload) -> tuple[int, list[int]]:
    """Elements of the root unit, which is the first and the last block, and of the others."""
    sizes = [block.parameters for block in job.model.blocks]
    return sizes[0] + (sizes[-1] if len(sizes) > 1 else 0), sizes[1:-1]


def fsdp_step(job: Workload, layout: Layout, how: Sharding) -> Step:
    """One optimizer step."""
    check_micro_steps(job, _OPS_PER_BLOCK)
    shards = group_size(how.among, layout)
    ops, reduced = lay_out(_uses(job, how, shards))
    share = -(-job.parameters // shards)
    if how.clip:
        norm = Collective(Kind.ALL_REDUCE, "norm", 1, DType.FP32, how.among)
        ops += [
            Op("norm", Compute("norm", 2.0 * share, 4.0 * share), COMPUTE, reduced),
            Op("clip", norm, REDUCE, (After("norm"),)),
            Op("scale", Compute("scale", 1.0 * share, 8.0 * share), COMPUTE, (After("clip"),)),
        ]
    optimizer = job.optimizer_step(share)
    ops.append(Op("optimizer", optimizer, COMPUTE, () if how.clip else reduced))
    firsts = {op.stream: op.name for op in reversed(ops)}
    needs = [firsts[stream] for stream in (GATHER, COMPUTE) if stream in firsts]
    return Step(ops, tuple(needs), ("optimizer",))


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
    number: int

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
        freed: list[str] = []
        reduction: tuple[After, ...] = ()
        for direction, place in [
            *(("forward", place) for place in places),
            *(("backward", place) for place in reversed(places)),
        ]:
            work = works[place]
            name = f"{micro_prefix(self.number, self.job)}*.{direction}.{work.block.name}"
            passes = [Op(name.replace("*.", ""), getattr(work, direction), COMPUTE)]
            gathered, fetch, behind = self._gathered(direction, place), [], before
            if gathered:
                group = self.how.again if direction == "backward" else self.how.among
                fetch = renamed([self._gather(place, gathered, group or self.how.among)], name)
                ahead = 1 if self.how.copies and direction == "backward" else 2
                behind = freed[-ahead] if len(freed) >= ahead else "" if freed else before
                freed.append(passes[0].name)
                if self.how.copies:
                    copy = _moved("copy", gathered, 2 * self.job.precision.bytes)
                    passes.insert(0, Op(name.replace("*", "copy"), copy, COMPUTE))
                    freed[-1] = passes[0].name
            elif before and not freed:  # nothing is gathered: the first pass waits itself
                passes[0] = replace(passes[0], after=(After(before),))
            row: Row = ()
            if direction == "backward" and (elements := self._reduced(place)):
                name = name.replace("backward.", "")
                kernels, row = self._reduce(place, elements)
                passes += [
                    Op(name.replace("*", kernel.kernel), kernel, COMPUTE, reduction)
                    for kernel in kernels
                ]
                (row,) = renamed([row], name)
                if self.how.copies:
                    reduction = tuple(After(op) for op, _, on in row if on == REDUCE)
                elif gathered and row:
                    freed[-1] = row[0][0]
            yield Use(passes, fetch, behind or None, [row] if row else [])

    @property
    def _synced(self) -> bool:
        return self.how.every or self.number == self.job.accumulation - 1

    def _unit(self, place: int) -> str:
        blocks = self.job.model.blocks
        return "root" if place in {0, len(blocks) - 1} else blocks[place].name

    def _gathered(self, direction: str, place: int) -> int:
        """The elements that a use has gathered, if it does not find them."""
        stay = self.how.again is None
        if stay and (direction == "backward" or (self.number and not self.how.every)):
            return 0
        if self._unit(place) == "root":
            return units(self.job)[0] if (direction, place) == ("forward", 0) else 0
        return self.job.model.blocks[place].parameters

    def _reduced(self, place: int) -> int:
        """The elements of the gradient that is complete behind a backward pass."""
        if self._unit(place) == "root":
            return 0 if place else units(self.job)[0]
        return self.job.model.blocks[place].parameters

    def _gather(self, place: int, elements: int, group: Group) -> Row:
        precision = self.job.precision
        work = Collective(Kind.ALL_GATHER, self._unit(place), elements, precision, group)
        return [("gather", work, GATHER)]

    def _reduce(self, place: int, elements: int) -> tuple[list[Compute], Row]:
        """Kernels on the stream of the passes, and what follows on others.

        Without copies a gradient is cast, and divided before it is reduced (`_div_if_needed` of
        torch/distributed/fsdp/_runtime_utils.py). PyTorch does that on another stream; it is
        counted with the passes, since both move the same memory: runs of LLM Foundry cost all of it
        (docs/validation.md).
        """
        how, width, reduced = self.how, self.job.precision.bytes, self.how.reduce.bytes
        kernels = [] if how.copies else [_moved("join", elements, 2 * width)]
        if self.number and not how.every:
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
        row: list[tuple[str, Compute | Collective, str]] = []
        buffer = f"{self._unit(place)}.gradient"
        scatter = Collective(Kind.REDUCE_SCATTER, buffer, elements, how.reduce, how.among)
        row.append(("reduce", scatter, REDUCE))
        if how.replicas:
            share = -(-elements // self.shards)
            again = Collective(Kind.ALL_REDUCE, buffer, share, how.reduce, how.replicas)
            row.append(("replicate", again, REPLICATE))
        return kernels, row


def _moved(kernel: str, elements: int, width: float) -> Compute:
    """A kernel that reads and writes `width` bytes for each element."""
    return Compute(kernel, 0.0, elements * width)
