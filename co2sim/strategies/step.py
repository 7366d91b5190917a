"""Building blocks of an optimizer step: passes over blocks, and gradient buckets."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from co2sim.common.errors import OptionError
from co2sim.common.resources import require_memory
from co2sim.common.units import Bytes
from co2sim.common.validation import whole
from co2sim.models.operators import Block
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
    Turn,
)
from co2sim.strategies.whole_matrices import (
    GATHERED,
    OWNED,
    Division,
    check_shapes,
    whole_matrices,
)
from co2sim.training.memory import ON_GPU, sent_to_host
from co2sim.training.workload import Workload

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
        value = whole(f"{strategy.name}: {option}", getattr(strategy, option), least, most)
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
    """Gradients that are communicated together, once the backward pass of block `ready` is done.

    Those `of_experts` are reduced among the ranks with the same experts only.
    """

    elements: int
    ready: int
    of_experts: bool = False


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


def buckets(
    blocks: Sequence[Block],
    capacity: float,
    of_experts: bool = False,  # noqa: FBT001, FBT002
) -> list[Bucket]:
    """Trained tensors in backward order; a bucket closes once it holds `capacity` elements or more.

    Those of experts that ranks divide have their own buckets. Source: torch.distributed
    `_compute_bucket_assignment_by_size`.
    """
    closed, held, ready = [], 0, 0
    for index in range(len(blocks) - 1, -1, -1):
        block = blocks[index]
        tensors = block.trained_experts if of_experts else block.trained_tensors
        for elements in reversed(tensors):
            held, ready = held + elements, index
            if held >= capacity:
                closed.append(Bucket(held, ready, of_experts))
                held = 0
    return [*closed, Bucket(held, ready, of_experts)] if held else closed


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
    """How gradients are combined: `kind` in buckets of `capacity` elements over `group`.

    Those of experts are over `replicas`, the ranks with the same ones; None: a rank is alone. Where
    `peers` of other groups have the same shares, and `expert_peers` those of experts, these are
    then all-reduced among them, behind the last micro-step.
    """

    kind: Kind
    group: Group
    capacity: float
    every_micro_step: bool = False
    replicas: Group | None = None
    peers: Group | None = None
    expert_peers: Group | None = None

    def collectives(
        self,
        job: Workload,
        bucket: Bucket,
        buffer: str,
        root: int,
        ranks: int,
        last: bool,  # noqa: FBT001
    ) -> dict[str, Collective]:
        """What a bucket takes, by name: of the `ranks` of the group, in the `last` micro-step."""
        collectives: dict[str, Collective] = {}
        group, peers = self.group if ranks > 1 else None, self.peers
        if bucket.of_experts:
            group, peers = self.replicas, self.expert_peers
        if group:
            collectives["reduce"] = Collective(
                self.kind, buffer, bucket.elements, job.precision, group, root=root
            )
        if peers and last:
            shards = job.expert_replicas(ranks) if bucket.of_experts else ranks
            share = -(-bucket.elements // shards)
            again = Collective(Kind.ALL_REDUCE, buffer, share, job.precision, peers)
            collectives["replicate"] = again
        return collectives

    def buckets(self, blocks: Sequence[Block]) -> list[Bucket]:
        """All that are reduced."""
        reduced = buckets(blocks, self.capacity)
        if self.replicas or self.expert_peers:
            reduced += buckets(blocks, self.capacity, of_experts=True)
        return reduced


def passes(job: Workload, reduction: Reduction | None, ranks: int = 1) -> list[Op]:
    """Forward and backward of every micro-step, with the gradient buckets behind the backward.

    A framework that does not overlap reduces them once the whole backward pass is done. Where they
    are reduced to owners, these are the `ranks` of the group in turn, from the first block on.
    """
    works = job.works()
    ready: dict[int, list[tuple[int, Bucket]]] = {}
    if reduction:
        for bucket_index, bucket in enumerate(reduction.buckets(job.model.blocks)):
            after = bucket.ready if job.overlap else 0
            ready.setdefault(after, []).append((bucket_index, bucket))
    owned = reduction is not None and reduction.kind is Kind.REDUCE
    count = sum(map(len, ready.values()))
    check_micro_steps(job, 2)
    ops: list[Op] = []
    for micro in range(job.accumulation):
        prefix, turn = micro_prefix(micro, job), Turn(micro_step=micro)
        ops += [
            Op(f"{prefix}forward.{work.block.name}", work.forward, COMPUTE, turn=turn)
            for work in works
        ]
        last = micro == job.accumulation - 1
        reduces = reduction and (reduction.every_micro_step or last)
        for index in range(len(works) - 1, -1, -1):
            work, name = works[index].backward, f"{prefix}backward.{works[index].block.name}"
            ops.append(Op(name, work, COMPUTE, turn=turn))
            if reduction and reduces:
                for bucket_index, bucket in ready.get(index, ()):
                    root = (count - 1 - bucket_index) % ranks if owned else 0
                    buffer, behind = f"gradients{bucket_index}", (After(name),)
                    collectives = reduction.collectives(job, bucket, buffer, root, ranks, last)
                    ops += [
                        Op(f"{prefix}{kind}{bucket_index}", collective, COMM, behind, turn)
                        for kind, collective in collectives.items()
                    ]
    return with_activations_on_host(job, ops)


def with_activations_on_host(job: Workload, ops: Sequence[Op]) -> list[Op]:
    """The passes, with what layers keep on its way to the host and back, if that is offloaded.

    Copies have a stream for each direction. A forward pass waits until what the layer before the
    last one kept has left. That of a layer comes back behind the backward pass of the layer but
    one, while the next one goes back. So there is room for two layers, and the last two stay.
    """
    if job.offload != "activations":
        return [*ops]
    sizes = sent_to_host(job)
    layers = [block.name for block in job.model.blocks if block.is_layer]
    places = {name: place for place, name in enumerate(layers)}
    uses = [_use(op, places) for op in ops]
    ends = {use[1:]: op.name for op, use in zip(ops, uses, strict=True) if use and use[0]}
    made: list[Op] = []
    fetched: set[str] = set()
    for op, use in zip(ops, uses, strict=True):
        made.append(op)
        if use is None:
            continue
        back, prefix, place = use
        name, before = layers[place], layers[place - ON_GPU] if place >= ON_GPU else ""
        awaited = f"{prefix}fetch.{name}" if back else f"{prefix}offload.{before}"
        if (name if back else before) in sizes and awaited not in fetched:
            made[-1] = replace(op, after=(*op.after, After(awaited)))
        fetched.add(awaited)
        moved, kernel = (before, "fetch") if back else (name, "offload")
        if moved in sizes and (not back or ends[prefix, place] == op.name):
            copy = Compute(kernel, 0.0, sizes[moved], place="link")
            made.append(Op(f"{prefix}{kernel}.{moved}", copy, kernel, (After(op.name),), op.turn))
    return made


_PASS = re.compile(r"(m\d+\.)?(forward|recompute|backward)\.(.+?)", re.DOTALL)


def _use(op: Op, layers: Mapping[str, int]) -> tuple[bool, str, int] | None:
    """Whether a pass goes back, its micro-step, and the place of its layer; None for other ops."""
    found = _PASS.fullmatch(op.name) if op.stream == COMPUTE else None
    if found is None:
        return None
    name = found[3] if found[3] in layers else re.sub(r"\.\d+$", "", found[3])  # a part of it
    if name not in layers:
        return None
    return found[2] != "forward", found[1] or "", layers[name]


def update(
    job: Workload,
    elements: int,
    waits: tuple[After, ...] = (),
    gradient: Bytes | None = None,
    division: Division | None = None,
) -> list[Op]:
    """The optimizer over a share, behind `waits`; parameters are whole without a `division`.

    One that is offloaded gets gradients of `gradient` bytes over the link to the host, and sends
    parameters back: one after the other, as ZeRO-Offload does without its delayed update.
    Parameters that are offloaded stay there.
    """
    work = job.update.by_elements(elements)
    if not job.states_on_host:
        return [Op("optimizer", work, COMPUTE, waits), *whole_matrices(job, division, COMPUTE)]
    size = elements * (gradient or job.gradient_bytes)
    there = Compute("to_host", 0.0, size, place="link")
    back = Compute("from_host", 0.0, elements * job.precision.bytes, place="link")
    work = replace(work, kernel="host_optimizer", place="host")
    ops = [Op("to_host", there, COMPUTE, waits), Op("optimizer", work, COMPUTE)]
    return ops if job.offload == "parameters" else [*ops, Op("from_host", back, COMPUTE)]


def bucketed_step(
    job: Workload, layout: Layout, reduction: Reduction, gather_capacity: int = 0
) -> Step:
    """A step with replicated parameters; with `gather_capacity` the optimizer is sharded.

    A sharded optimizer updates its share, then what is trained is all-gathered in pieces of at
    most `gather_capacity` elements, or broadcast where gradients are reduced to owners. Experts
    that ranks divide are reduced and gathered among those with the same ones.
    """
    ranks = group_size(reduction.group, layout)
    if job.experts_apart and reduction.kind is Kind.REDUCE:
        raise OptionError(f"owners=true does not combine with {job.expert_words}")
    reduction = replace(
        reduction,
        replicas=job.same_experts(reduction.group, layout),
        expert_peers=job.expert_peers(reduction.group, reduction.peers, layout),
    )
    first = f"{micro_prefix(0, job)}forward.{job.model.blocks[0].name}"
    if ranks == 1 and reduction.replicas:  # tensor-parallel ranks with the same experts
        reduction, gather_capacity = replace(reduction, kind=Kind.ALL_REDUCE), 0
    ops = passes(job, reduction if ranks > 1 or reduction.replicas else None, ranks)
    last = [After(op.name) for op in reversed(ops) if op.stream == COMM][:1]
    share, division = job.trained, None
    if gather_capacity and last:
        share = math.ceil(job.owned_trained(ranks))
        way = OWNED if job.optimizer.owned_whole or reduction.kind is Kind.REDUCE else GATHERED
        division = Division(way, reduction.group, ranks, reduction.replicas, COMM)
        check_shapes(job, "zero1 and zero2", owned=way is OWNED)
    ops += update(job, share, tuple(last), division=division)
    updated = ops[-1].name
    if not (gather_capacity and last):
        return Step(ops, (first,), (updated,))
    dense = job.trained - job.trained_experts
    kind, sizes = Kind.ALL_GATHER, pieces(dense, gather_capacity)
    if reduction.kind is Kind.REDUCE:
        kind, sizes = Kind.BROADCAST, [dense]
    gathered = [(elements, reduction.group) for elements in sizes]
    if reduction.replicas:
        experts = pieces(job.trained_experts, gather_capacity)
        gathered += [(elements, reduction.replicas) for elements in experts]
    gathers = [
        Op(
            f"gather{index}",
            Collective(kind, f"parameters{index}", elements, job.precision, group),
            COMM,
            (After(updated),),
        )
        for index, (elements, group) in enumerate(gathered)
    ]
    names = tuple(op.name for op in gathers)
    return Step([*ops, *gathers], (first,), names[-1:], names)


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
