"""Steps of sharded parameters: fetch a block, use it, release it; reduce its gradient.

`lay_out` puts uses of blocks, with their fetches and reductions, in the order of issue: for
`zero3`, `zeropp` and `fsdp`. `sharded_step` is DeepSpeed's step, with budgets in elements; works
that fetch and reduce a block are those of `zero3` or `zeropp`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes
from co2sim.models.operators import Block
from co2sim.schedule.schedule import (
    NODE,
    PEERS,
    After,
    Collective,
    Compute,
    Group,
    Kind,
    Layout,
    Op,
    Turn,
    peers_of_blocks,
)
from co2sim.schedule.schedule import block as block_group
from co2sim.strategies.step import (
    COMPUTE,
    Step,
    buckets,
    check_micro_steps,
    cut,
    group_size,
    micro_prefix,
    update,
    whole_options,
    with_activations_on_host,
)
from co2sim.strategies.whole_matrices import Division
from co2sim.training.memory import Passing
from co2sim.training.workload import BlockWork, Workload

KEPT = 10**12
"""A `max_reuse` that no block exceeds: its parameters stay from recomputation to gradients."""

_MAX_GATHERS = 100
"""A schedule holds every one."""

GATHER = "gather"
REDUCE = "reduce"

Row: TypeAlias = Sequence[tuple[str, Compute | Collective, str]]
"""Named works with their streams, one after the other."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a rank computes with the parameters of a block: `passes`, one after the other.

    Rows of works `fetch` the parameters, once op `behind` has ended, and `reduce` the gradient,
    once the last pass has.
    """

    passes: Sequence[Op]
    fetch: Sequence[Row] = ()
    behind: str | None = None
    reduce: Sequence[Row] = ()

    @property
    def turn(self) -> Turn:
        """That of its passes."""
        return self.passes[0].turn if self.passes else Turn()


def lay_out(uses: Iterable[Use]) -> tuple[list[Op], tuple[After, ...]]:
    """The ops of uses in order of issue, and the waits for the last reductions.

    A reduction is issued behind the fetch that may start when it may, since compute waits for the
    fetch: so do FSDP's two versions, which prefetch before a backward pass and reduce behind it. A
    fetch that waits for the reduction itself comes second.
    """
    ops: list[Op] = []
    reduced: dict[str, str] = {}
    pending, runs = Use(()), ""
    for use in uses:
        if any(row[-1][0] == use.behind for row in pending.reduce):
            reduced |= _line_up(ops, pending.reduce, runs, pending.turn)
            pending = Use(())
        here = _line_up(ops, use.fetch, use.behind, use.turn)
        reduced |= _line_up(ops, pending.reduce, runs, pending.turn)
        first, *rest = use.passes
        waits = tuple(After(name) for name in here.values())
        ops += [replace(first, after=first.after + waits) if waits else first, *rest]
        pending, runs = use, ops[-1].name
    reduced |= _line_up(ops, pending.reduce, runs, pending.turn)
    return ops, tuple(After(name) for name in reduced.values())


def _line_up(ops: list[Op], rows: Sequence[Row], behind: str | None, turn: Turn) -> dict[str, str]:
    """Append rows of works behind an op; gives the last op of a row by the stream it is on."""
    ends: dict[str, str] = {}
    heads: set[str] = set()  # streams that wait for `behind` already
    for row in rows:
        before, on = behind, ""
        for name, work, stream in row:
            in_order = stream == on or (not on and stream in heads)
            waits = (After(before),) if before and not in_order else ()
            ops.append(Op(name, work, stream, waits, turn))
            before, on = name, stream
        heads.add(row[0][2])
        ends[on] = row[-1][0]
    return ends


@dataclass(frozen=True, slots=True)
class Budget:
    """How far fetches run ahead, how long a block stays, and how much is reduced at once.

    All in elements: DeepSpeed's `stage3_prefetch_bucket_size`, `stage3_max_live_parameters`,
    `stage3_max_reuse_distance` and `reduce_bucket_size`.
    """

    prefetch: int
    max_live: int
    max_reuse: int
    reduce_bucket: int


@dataclass(frozen=True, slots=True)
class Portion:
    """Elements of a block that ranks of a `group` share: of all of them, or of the experts.

    `group` is None where each of the ranks has its own experts, whole.
    """

    elements: int
    group: Group | None
    ranks: int
    of_experts: bool = False

    @property
    def end(self) -> str:
        """What tells its works apart."""
        return "_experts" if self.of_experts else ""


@dataclass(frozen=True, slots=True)
class Sharers:
    """Who shares blocks: the ranks of a group, and of experts those with the same."""

    group: Group
    ranks: int
    experts: Group | None
    same: int

    @classmethod
    def of(cls, job: Workload, layout: Layout, group: Group) -> "Sharers":
        """Those of a group. Raises OptionError where experts do not divide among it."""
        ranks = group_size(group, layout)
        experts = job.same_experts(group, layout)
        return cls(group, ranks, experts, job.expert_replicas(ranks) if experts else 1)

    def portions(self, block: Block, *, trained: bool = False) -> list[Portion]:
        """Those of a block, or of what is trained of it, that have elements."""
        tensors = block.trained_tensors if trained else block.tensors
        experts = block.trained_experts if trained else block.experts
        both = (
            Portion(sum(tensors), self.group, self.ranks),
            Portion(sum(experts), self.experts, self.same, of_experts=True),
        )
        return [portion for portion in both if portion.elements]

    def shared(self, block: Block) -> int:
        """Elements that no rank has whole."""
        return sum(portion.elements for portion in self.portions(block) if portion.group)


Fetch: TypeAlias = Callable[[str, str, Portion], Sequence[Row]]
"""Works that fetch a portion, by the direction of a pass and the name of a block."""


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Rows of works for a use of a block, and the elements that they bring."""

    rows: Sequence[Row]
    elements: int

    @classmethod
    def of(cls, fetch: Fetch, sharers: Sharers, direction: str, block: Block) -> "_Fetched":
        """Those of all portions that are fetched."""
        rows: list[Row] = []
        elements = 0
        for portion in sharers.portions(block):
            brought = fetch(direction, block.name, portion)
            rows += renamed(brought, "", portion.end)
            elements += portion.elements if brought else 0
        return cls(rows, elements)


def _laid(
    job: Workload,
    sharers: Sharers,
    bucket: int,
    use: tuple[int, str, Block, Compute],
    fetched: Sequence[Row],
    after: str | None,
    reduce: Callable[[str, Portion], Sequence[Row]],
) -> Iterator[Use]:
    """The passes of a use of a block, behind what it fetches: one for each bucket of gradients."""
    micro, direction, block, compute = use
    prefix, turn = micro_prefix(micro, job), Turn(micro_step=micro)
    parts = _parts(sharers, block, bucket) if direction == "backward" else [[]]
    every = sum(portion.elements for part in parts for portion in part)
    for index, part in enumerate(parts, start=1):
        end = f".{index}" if len(parts) > 1 else ""
        elements = sum(portion.elements for portion in part)
        share = elements / every if len(parts) > 1 else 1.0
        work = _share(compute, share, last=index == len(parts))
        named = [
            row
            for portion in part
            for row in renamed(reduce(f"{block.name}.gradient", portion), "", portion.end)
        ]
        yield Use(
            (Op(f"{prefix}{direction}.{block.name}{end}", work, COMPUTE, turn=turn),),
            renamed(fetched if index == 1 else (), prefix, f".{direction}.{block.name}"),
            after,
            renamed(named, prefix, f".{block.name}{end}"),
        )


def sharded_step(
    job: Workload,
    sharers: Sharers,
    budget: Budget,
    fetch: Fetch,
    reduce: Callable[[str, Portion], Sequence[Row]],
    refresh: Compute | None = None,
    division: Division | None = None,
) -> Step:
    """One optimizer step.

    With full recomputation a backward pass uses the parameters of a block twice. They are kept
    from the first use to the second if these lie at most `max_reuse` elements apart, which is twice
    the block; else they are fetched twice, and `direction` is "recompute" the first time.
    `fetch(direction, name, portion)` and `reduce(name, portion)` give rows of named works, for
    each of the portions that the `sharers` have of a block. A gradient is reduced as soon as
    `reduce_bucket` elements of the block are there, beside the rest of its backward pass. `refresh`
    runs once, behind the first fetches of all blocks. `division` says how matrices become whole for
    the optimizer.
    """
    fetched_by_use: dict[tuple[str, int], _Fetched] = {}

    def fetched_for(direction: str, block: Block) -> _Fetched:
        key = direction, id(block)
        if key not in fetched_by_use:
            fetched_by_use[key] = _Fetched.of(fetch, sharers, direction, block)
        return fetched_by_use[key]

    most = max(job.model.blocks, key=lambda block: len(sharers.portions(block)))
    rows = [*fetched_for("forward", most).rows, *fetched_for("backward", most).rows]
    rows += [row for portion in sharers.portions(most) for row in reduce("gradient", portion)]
    check_micro_steps(job, 2 + sum(map(len, rows)))
    works = job.works()
    uses = [
        (micro, direction, block, compute)
        for micro in range(job.accumulation)
        for direction, block, compute in _uses(job, works, budget.max_reuse)
    ]
    sizes = [fetched_for(direction, block).elements for _, direction, block, _ in uses]
    waits = prefetch_waits(sizes, budget.prefetch, budget.max_live)
    laid: list[Use] = []
    ends: list[str] = []
    for use, wait in zip(uses, waits, strict=True):
        needed = fetched_for(use[1], use[2]).rows
        after = ends[wait] if wait >= 0 else None
        laid += _laid(job, sharers, budget.reduce_bucket, use, needed, after, reduce)
        ends.append(laid[-1].passes[-1].name)
    ops, reduced = lay_out(laid)
    ops = with_activations_on_host(job, ops)
    if refresh:
        last = next(index for index, op in enumerate(ops) if op.name == ends[len(works) - 1])
        ops.insert(last + 1, Op("refresh", refresh, GATHER))
    ops += update(job, math.ceil(job.owned_trained(sharers.ranks)), reduced, division=division)
    needs = next(op.name for op in ops if op.stream != COMPUTE), ends[0]
    return Step(ops, needs, (ops[-1].name,))


def scattered(job: Workload) -> Callable[[str, Portion], list[Row]]:
    """Works that reduce a portion of a gradient to shares of it; none where a rank is alone."""

    def reduce(name: str, portion: Portion) -> list[Row]:
        if not portion.group:
            return []
        work = Collective(Kind.REDUCE_SCATTER, name, portion.elements, job.precision, portion.group)
        return [[("reduce", work, REDUCE)]]

    return reduce


def renamed(rows: Sequence[Row], before: str, behind: str) -> list[Row]:
    """The same rows, with texts before and behind their names."""
    return [[(f"{before}{name}{behind}", work, on) for name, work, on in row] for row in rows]


def consecutive(ranks: int, layout: Layout, option: str) -> Group:
    """Groups of a number of consecutive ranks: parts of nodes, or full nodes.

    Raises OptionError, which names the option, where they do not divide the ranks so.
    """
    g = layout.gpus_per_node
    if ranks == g:
        return NODE
    if (g % ranks and ranks % g) or layout.world_size % ranks:
        raise OptionError(
            f"{option}={ranks} must divide the {g} GPUs of a node, or be full nodes that divide"
            f" {layout.world_size} GPUs"
        )
    return block_group(ranks)


def shared_among(
    shard: int | Literal["node"], layout: Layout, group: Group, option: str
) -> tuple[Group, Group | None]:
    """Who of `group` shares something, and who has the same share; None where no other rank does.

    `shard` is a number of consecutive ranks, those of a "node", or 0 for all. Raises OptionError,
    which names the option, where they do not divide the ranks so.
    """
    ranks = layout.gpus_per_node if shard == "node" else shard
    if not ranks or ranks == group_size(group, layout):
        return group, None
    among = consecutive(ranks, layout, option)
    return among, PEERS if ranks == layout.gpus_per_node else peers_of_blocks(ranks)


def check_budget(strategy: Any) -> None:
    """Refuse a budget that holds no element, and more gathers per block than are simulated."""
    whole_options(strategy, "max_live", "max_reuse", "reduce_bucket")
    whole_options(strategy, "prefetch", least=0)
    whole_options(strategy, "gathers", most=_MAX_GATHERS)


def fetched(elements: int, gathers: int) -> list[tuple[str, int]]:
    """The parts that elements are gathered in: a number for their names, unless it is one."""
    sizes = cut(elements, min(gathers, elements))
    return [(str(index) if len(sizes) > 1 else "", size) for index, size in enumerate(sizes, 1)]


def _parts(sharers: Sharers, block: Block, bucket: int) -> list[list[Portion]]:
    """What is reduced together of a block's gradient, in backward order; experts come last."""
    shared = [portion for portion in sharers.portions(block, trained=True) if portion.group]
    if sum(portion.elements for portion in shared) <= bucket:
        return [shared]
    return [
        [replace(portion, elements=part.elements)]
        for portion in shared
        for part in buckets([block], bucket, of_experts=portion.of_experts)
    ]


def _share(work: Compute, share: float, *, last: bool) -> Compute:
    """A part of a pass; the last one has the exchanges of tensor-parallel ranks."""
    if share == 1:
        return work
    return replace(
        work,
        flops=work.flops * share,
        memory_bytes=work.memory_bytes * share,
        kernels=work.kernels and work.kernels.times(share),
        exchanges=work.exchanges if last else None,
    )


def _uses(
    job: Workload, works: Sequence[BlockWork], max_reuse: int
) -> Iterator[tuple[str, Block, Compute]]:
    """Direction, block and work of every use of parameters in a micro-step."""
    for work in works:
        yield "forward", work.block, work.forward
    for work in works[::-1]:
        block = work.block
        if job.repeats(block) and block.flops and 2 * block.parameters > max_reuse:
            again, rest = job.recomputed(work)
            yield "recompute", block, again
            yield "backward", block, rest
        else:
            yield "backward", block, work.backward


def prefetch_waits(sizes: Sequence[int], prefetch: int, max_live: int) -> list[int]:
    """For every use of a block, the index of the use whose compute its fetch waits for (-1: none).

    While use k computes, the blocks of uses k+1 .. i may be present or under way if they hold at
    most `prefetch` elements, and at most `max_live` together with that of use k. A block larger
    than `prefetch` is therefore fetched only when the compute before it has ended.
    """
    waits = []
    for i in range(len(sizes)):
        k, ahead = i, 0
        while (
            k > 0 and ahead + sizes[k] <= prefetch and ahead + sizes[k] + sizes[k - 1] <= max_live
        ):
            ahead += sizes[k]
            k -= 1
        waits.append(k - 1)
    return waits


def transient(
    job: Workload,
    sharers: Sharers,
    prefetch: int,
    max_live: int,
    again: Sharers | None = None,
) -> dict[str, Bytes | Passing]:
    """Bytes of the blocks that are present whole, and of the gradient that waits for reduction.

    Those that fetch `again` for the backward pass may be others.
    """
    if sharers.ranks == 1:
        return {}
    size, blocks = job.precision.bytes, job.model.blocks
    alone = job.offload == "parameters"  # what is on the host comes, shared or not
    there, back_again = (
        [block.parameters if alone else who.shared(block) for block in blocks]
        for who in (sharers, again or sharers)
    )
    live = [count * size for count in live_elements(there, back_again, prefetch, max_live)]
    forward, back = live[: len(blocks)], live[len(blocks) :][::-1]
    waiting = [
        sum(portion.elements for portion in sharers.portions(block, trained=True) if portion.group)
        for block in blocks
    ]
    behind = [*(count * size for count in waiting[1:]), 0.0]
    return {
        "gathered": Passing(forward, max(forward[-1], back[-1]), back),
        "bucket": Passing(backward=behind, end=waiting[0] * size),
    }


def live_elements(
    forward: Sequence[int], backward: Sequence[int], prefetch: int, max_live: int
) -> list[int]:
    """Elements of fetched blocks that are present besides the shards at each use, in order.

    Both passes are by block. A tied embedding counts with its first block: it stays present between
    its uses, as under DeepSpeed's `stage3_max_reuse_distance`, so it is not fetched again for the
    head.
    """
    sizes = [*forward, *reversed(backward)]
    waits = prefetch_waits(sizes, prefetch, max_live)
    return [sum(sizes[wait + 1 : i + 1]) for i, wait in enumerate(waits)]
