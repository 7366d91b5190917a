"""The step of fully sharded parameters: fetch a block, use it, release it; reduce its gradient.

`zero3` and `zeropp` differ only in the works that fetch and reduce a block.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from co2sim.schedule import After, Collective, Compute, Op
from co2sim.strategies.step import (
    COMPUTE,
    Step,
    buckets,
    check_micro_steps,
    cut,
    micro_prefix,
    whole_options,
)
from co2sim.units import Bytes
from co2sim.workload import Block, BlockWork, Workload

KEPT = 10**12
"""A `max_reuse` that no block exceeds: its parameters stay from recomputation to gradients."""

_MOST_GATHERS = 100
"""A schedule holds every one."""

GATHER = "gather"
REDUCE = "reduce"

Works: TypeAlias = Sequence[tuple[str, Compute | Collective]]


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


def sharded_step(
    job: Workload,
    shards: int,
    budget: Budget,
    fetch: Callable[[str, Block], Works],
    reduce: Callable[[str, int], Works],
    refresh: Compute | None = None,
) -> Step:
    """One optimizer step.

    With full recomputation a backward pass uses the parameters of a block twice. They are kept
    from the first use to the second if these lie at most `max_reuse` elements apart, which is twice
    the block; else they are fetched twice, and `direction` is "recompute" the first time.
    `fetch(direction, block)` and `reduce(name, elements)` give named works that run one after the
    other. A gradient is reduced as soon as `reduce_bucket` elements of the block are there, while
    the rest of its backward pass goes on.
    A reduction is issued behind the fetch that becomes possible with it, since compute waits for
    the fetch (FSDP's BACKWARD_PRE order). `refresh` runs once, behind the first fetches of all
    blocks: it renews a secondary shard.
    """
    one = job.model.blocks[0]
    fetches = [*fetch("forward", one), *fetch("backward", one)] if one.parameters else []
    check_micro_steps(job, 2 + len(fetches))
    works = job.works()
    uses = [
        (f"{micro_prefix(micro, job)}", direction, block, compute)
        for micro in range(job.accumulation)
        for direction, block, compute in _uses(job, works, budget.max_reuse)
    ]
    sizes = [block.parameters for _, _, block, _ in uses]
    waits = prefetch_waits(sizes, budget.prefetch, budget.max_live)
    body = _Body()
    runs: list[str] = []
    for (prefix, direction, block, compute), wait in zip(uses, waits, strict=True):
        fetched_here = body.line_up(
            GATHER,
            runs[wait] if wait >= 0 else None,
            fetch(direction, block) if block.parameters else (),
            f"{prefix}*.{direction}.{block.name}",
        )
        body.issue_pending()
        if direction == "backward":
            body.backward(prefix, block, compute, fetched_here, reduce, budget.reduce_bucket)
        else:
            name = f"{prefix}{direction}.{block.name}"
            body.ops.append(Op(name, compute, COMPUTE, fetched_here))
        runs.append(body.ops[-1].name)
        if refresh and len(runs) == len(works):
            body.ops.append(Op("refresh", refresh, GATHER))
    body.issue_pending()
    optimizer = job.optimizer_step(-(-job.parameters // shards))
    body.ops.append(Op("optimizer", optimizer, COMPUTE, body.reduced))
    first_fetch = next(op.name for op in body.ops if op.stream == GATHER)
    return Step(body.ops, (first_fetch, runs[0]), ("optimizer",))


@dataclass(slots=True)
class _Body:
    """Ops in the order of issue: `pending` is a reduction to come, `reduced` waits for the last."""

    ops: list[Op] = field(default_factory=list)
    reduced: tuple[After, ...] = ()
    pending: tuple[str, Works, str] | None = None

    def line_up(
        self, stream: str, after: str | None, named: Works, pattern: str
    ) -> tuple[After, ...]:
        """Append works in a row, the first after `after`; gives the wait for the last."""
        for number, (name, work) in enumerate(named):
            wait = (After(after),) if after and not number else ()
            self.ops.append(Op(pattern.replace("*", name), work, stream, wait))
        return (After(self.ops[-1].name),) if named else ()

    def issue_pending(self) -> None:
        """Append the reduction that is still to come, if there is one."""
        if self.pending:
            self.reduced = self.line_up(REDUCE, *self.pending)
            self.pending = None

    def backward(
        self,
        prefix: str,
        block: Block,
        compute: Compute,
        here: tuple[After, ...],
        reduce: Callable[[str, int], Works],
        bucket: int,
    ) -> None:
        """A backward pass in the parts whose gradients are reduced together; `here` to wait for."""
        parts = _parts(block, bucket)
        for number, elements in enumerate(parts, start=1):
            end = f".{number}" if len(parts) > 1 else ""
            self.issue_pending()
            share = elements / block.parameters if len(parts) > 1 else 1.0
            name = f"{prefix}backward.{block.name}{end}"
            self.ops.append(Op(name, _share(compute, share), COMPUTE, here))
            here = ()
            if elements:
                named = reduce(f"{block.name}.gradient", elements)
                self.pending = (name, named, f"{prefix}*.{block.name}{end}")


def check_budget(strategy: Any) -> None:
    """Refuse a budget that holds no element, and more gathers per block than are simulated."""
    whole_options(strategy, "max_live", "max_reuse", "reduce_bucket")
    whole_options(strategy, "prefetch", least=0)
    whole_options(strategy, "gathers", most=_MOST_GATHERS)


def fetched(block: Block, gathers: int) -> list[tuple[str, int]]:
    """The parts that a block is gathered in: a number for their names, unless it is one."""
    sizes = cut(block.parameters, min(gathers, block.parameters))
    return [(str(number) if len(sizes) > 1 else "", size) for number, size in enumerate(sizes, 1)]


def _parts(block: Block, bucket: int) -> list[int]:
    """Elements of a block's gradient that are reduced together, in backward order."""
    if block.parameters <= bucket:
        return [block.parameters]
    return [part.elements for part in buckets([block], bucket)]


def _share(work: Compute, share: float) -> Compute:
    """A part of a pass."""
    if share == 1:
        return work
    kernels = work.kernels and work.kernels.times(share)
    return replace(
        work, flops=work.flops * share, memory_bytes=work.memory_bytes * share, kernels=kernels
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


def transient(job: Workload, shards: int, prefetch: int, max_live: int) -> dict[str, Bytes]:
    """Bytes of the blocks that are present whole, and of the gradient that waits for reduction."""
    if shards == 1:
        return {}
    size = job.precision.bytes
    largest = max(block.parameters for block in job.model.blocks)
    gathered = live_elements(job, shards, prefetch, max_live)
    return {"gathered": gathered * size, "bucket": largest * size}


def live_elements(job: Workload, shards: int, prefetch: int, max_live: int) -> int:
    """The most elements of fetched blocks that are present at once, besides the shards.

    A tied embedding counts with its first block: it stays present between its uses, as under
    DeepSpeed's `stage3_max_reuse_distance`, so it is not fetched again for the head.
    """
    if shards == 1:
        return 0
    forward = [block.parameters for block in job.model.blocks]
    sizes = forward + forward[::-1]
    waits = prefetch_waits(sizes, prefetch, max_live)
    return max(sum(sizes[wait + 1 : i + 1]) for i, wait in enumerate(waits))
