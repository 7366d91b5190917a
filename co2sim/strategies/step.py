"""Building blocks of an optimizer step: passes over blocks, and gradient buckets."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from co2sim.common.errors import OptionError
from co2sim.common.resources import require_memory
from co2sim.common.units import Bytes
from co2sim.common.validation import whole
from co2sim.models.workload import Block, Workload
from co2sim.schedule.schedule import (
    SCALE_BYTES,
    After,
    Collective,
    Compute,
    DType,
    Group,
    Kind,
    Layout,
    Op,
)

_MAX_PIECES = 10_000
_MAX_OPS = 1_000_000
"""Of a round."""
_OP_BYTES: Bytes = 500.0
"""Of memory while an op is made: 90 to 480 were seen."""

COMPUTE = "compute"
COMM = "comm"


def title(strategy: Any) -> str:
    """The strategy as a user writes it, but for defaults other than tau: `co2(tau=12)`."""
    chosen = [
        f"{option.name}={str(getattr(strategy, option.name)).lower()}"
        for option in fields(strategy)
        if option.name == "tau" or getattr(strategy, option.name) != option.default
    ]
    return f"{strategy.name}({', '.join(chosen)})" if chosen else strategy.name


def whole_options(strategy: Any, *options: str, least: int = 1, most: int | None = None) -> None:
    """Refuse options that are no whole numbers from `least` to `most`; 48.0 becomes 48."""
    for option in options:
        given = getattr(strategy, option)
        value = whole(f"{strategy.name}: {option}", given, least, most)
        object.__setattr__(strategy, option, value)


@dataclass(frozen=True, slots=True)
class Step:
    """Ops that read the parameters and leave them changed.

    The ops named in `needs` must wait for the ops that change the parameters before this step;
    those named in `ends` are the ones to wait for after it. `gathers` are the last ops, which only
    bring updated shares to the other ranks; `regathers` says that this step, which follows another,
    brings them all again.
    """

    ops: Sequence[Op]
    needs: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    gathers: tuple[str, ...] = ()
    regathers: bool = False

    def without_gathers(self) -> "Step":
        """The step up to its optimizer, for one that regathers."""
        if not self.gathers:
            return self
        kept = [op for op in self.ops if op.name not in self.gathers]
        return Step(kept, self.needs, (kept[-1].name,))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are communicated together, once the backward pass of block `ready` is done."""

    elements: int
    ready: int


def group_size(group: Group, layout: Layout) -> int:
    """Ranks in a group."""
    return len(group.members(0, layout))


def check_ops(ops: int, what: str) -> None:
    """Refuse a schedule that memory does not hold, before it is built."""
    if ops > _MAX_OPS:
        raise OptionError(
            f"a round would have {ops} ops ({what}); at most {_MAX_OPS} are simulated"
        )
    require_memory(_OP_BYTES * ops, f"a round of {ops:,} ops ({what})")


def micro_prefix(index: int, job: Workload) -> str:
    """Name prefix of a micro-step; none if there is only one."""
    return f"m{index}." if job.accumulation > 1 else ""


def check_micro_steps(job: Workload, ops_per_block: int) -> None:
    """Refuse more passes over blocks than a schedule of that many ops each can hold."""
    blocks, micro = len(job.model.blocks), job.accumulation
    check_ops(ops_per_block * blocks * micro, f"{blocks} blocks in each of {micro} micro-steps")


def buckets(blocks: Sequence[Block], capacity: float) -> list[Bucket]:
    """Tensors in backward order; a bucket closes once it holds `capacity` elements or more.

    Source: torch.distributed `_compute_bucket_assignment_by_size`.
    """
    found, held, ready = [], 0, 0
    for index in range(len(blocks) - 1, -1, -1):
        for elements in reversed(blocks[index].tensors):
            held, ready = held + elements, index
            if held >= capacity:
                found.append(Bucket(held, ready))
                held = 0
    return [*found, Bucket(held, ready)] if held else found


def cut(elements: int, count: int) -> list[int]:
    """`elements` in `count` nearly equal pieces."""
    return [elements * (i + 1) // count - elements * i // count for i in range(count)]


def pieces(elements: int, capacity: int) -> list[int]:
    """`elements` cut into as few nearly equal pieces as hold at most `capacity` each."""
    count = -(-elements // capacity)
    if count > _MAX_PIECES:
        raise OptionError(
            f"buckets of {capacity} elements cut {elements} parameters into {count} pieces;"
            f" at most {_MAX_PIECES} are simulated"
        )
    return cut(elements, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How gradients are combined: `kind` in buckets of `capacity` elements over `group`."""

    kind: Kind
    group: Group
    capacity: float
    every_micro_step: bool = False


def passes(job: Workload, reduction: Reduction | None, ranks: int = 1) -> list[Op]:
    """Forward and backward of every micro-step, with the gradient buckets behind the backward.

    A framework that does not overlap reduces them once the whole backward pass is done. Where they
    are reduced to owners, these are the `ranks` of the group in turn, from the first block on.
    """
    works = job.works()
    ready: dict[int, list[tuple[int, Bucket]]] = {}
    if reduction:
        for number, bucket in enumerate(buckets(job.model.blocks, reduction.capacity)):
            place = bucket.ready if job.overlap else 0
            ready.setdefault(place, []).append((number, bucket))
    owned = reduction is not None and reduction.kind is Kind.REDUCE
    count = sum(map(len, ready.values()))
    check_micro_steps(job, 2)
    ops: list[Op] = []
    for micro in range(job.accumulation):
        prefix = micro_prefix(micro, job)
        ops += [Op(f"{prefix}forward.{work.block.name}", work.forward, COMPUTE) for work in works]
        reduces = reduction and (reduction.every_micro_step or micro == job.accumulation - 1)
        for index in range(len(works) - 1, -1, -1):
            backward = Op(
                f"{prefix}backward.{works[index].block.name}", works[index].backward, COMPUTE
            )
            ops.append(backward)
            if reduction and reduces:
                for number, bucket in ready.get(index, ()):
                    work = Collective(
                        reduction.kind,
                        f"gradients{number}",
                        bucket.elements,
                        job.precision,
                        reduction.group,
                        root=(count - 1 - number) % ranks if owned else 0,
                    )
                    ops.append(Op(f"{prefix}reduce{number}", work, COMM, (After(backward.name),)))
    return ops


def bucketed_step(
    job: Workload, layout: Layout, reduction: Reduction, gather_capacity: int = 0
) -> Step:
    """A step with replicated parameters; with `gather_capacity` the optimizer is sharded.

    A sharded optimizer updates its share, then the parameters are all-gathered in pieces of at
    most `gather_capacity` elements, or broadcast where gradients are reduced to owners.
    """
    ranks = group_size(reduction.group, layout)
    first = f"{micro_prefix(0, job)}forward.{job.model.blocks[0].name}"
    if ranks == 1:
        ops = passes(job, None)
        return Step(
            [*ops, Op("optimizer", job.optimizer_step(job.parameters), COMPUTE)],
            (first,),
            ("optimizer",),
        )
    ops = passes(job, reduction, ranks)
    last = next(op.name for op in reversed(ops) if op.stream == COMM)
    share = -(-job.parameters // ranks) if gather_capacity else job.parameters
    ops.append(Op("optimizer", job.optimizer_step(share), COMPUTE, (After(last),)))
    if not gather_capacity:
        return Step(ops, (first,), ("optimizer",))
    kind, sizes = Kind.ALL_GATHER, pieces(job.parameters, gather_capacity)
    if reduction.kind is Kind.REDUCE:
        kind, sizes = Kind.BROADCAST, [job.parameters]
    for number, elements in enumerate(sizes):
        work = Collective(kind, f"parameters{number}", elements, job.precision, reduction.group)
        ops.append(Op(f"gather{number}", work, COMM, (After("optimizer"),)))
    gathers = tuple(op.name for op in ops if op.name.startswith("gather"))
    return Step(ops, (first,), gathers[-1:], gathers)


QUANTIZED = frozenset({DType.INT8, DType.INT4})
"""Types that carry one fp32 scale per block."""
SCALE_BLOCK = 2048
"""Elements of a block, unless an option says otherwise."""


def stored_bytes(elements: float, dtype: DType, scale_block: int) -> Bytes:
    """Bytes of a buffer in memory, with its scales if it is quantized."""
    scales = elements / scale_block * SCALE_BYTES if dtype in QUANTIZED else 0.0
    return elements * dtype.bytes + scales


def recode(kernel: str, elements: int, source: DType, target: DType, scale_block: int) -> Compute:
    """Read a buffer in one type and write it in another."""
    read = stored_bytes(elements, source, scale_block)
    return Compute(kernel, 0.0, read + stored_bytes(elements, target, scale_block))


def sum_received(
    elements: int, ranks: int, received: DType, target: DType, scale_block: int
) -> Compute:
    """Sum the parts that an all-to-all brought from `ranks` ranks: one addition per element."""
    kernel = "dequantize_sum_quantize" if target in QUANTIZED else "dequantize_sum"
    written = stored_bytes(elements / ranks, target, scale_block)
    return Compute(kernel, float(elements), stored_bytes(elements, received, scale_block) + written)
