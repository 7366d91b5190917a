"""The step of fully sharded parameters: fetch a block, use it, release it; reduce its gradient.

`zero3` and `zeropp` differ only in the works that fetch and reduce a block.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from co2sim.schedule import After, Collective, Compute, Op
from co2sim.strategies.step import COMPUTE, Step, micro_prefix
from co2sim.units import Bytes
from co2sim.workload import Block, Workload

GATHER = "gather"
REDUCE = "reduce"

Works: TypeAlias = Sequence[tuple[str, Compute | Collective]]


def sharded_step(
    job: Workload,
    shards: int,
    budget: tuple[int, int],
    fetch: Callable[[str, Block], Works],
    reduce: Callable[[Block], Works],
    refresh: Compute | None = None,
) -> Step:
    """One optimizer step; `budget` is (prefetch, max_live) in elements.

    `fetch(direction, block)` and `reduce(block)` give named works that run one after the other.
    A reduction is issued behind the fetch that becomes possible with it, since compute waits for
    the fetch (FSDP's BACKWARD_PRE order). `refresh` runs once, behind the first fetches of all
    blocks: it renews a secondary shard.
    """
    works = job.works()
    uses = [
        (f"{micro_prefix(micro, job)}", direction, work.block, getattr(work, direction))
        for micro in range(job.accumulation)
        for direction, turn in (("forward", works), ("backward", works[::-1]))
        for work in turn
    ]
    waits = prefetch_waits([block.parameters for _, _, block, _ in uses], *budget)
    ops: list[Op] = []
    runs: list[str] = []
    reduced: tuple[After, ...] = ()
    pending: tuple[str, Works, str] | None = None

    def line_up(stream: str, after: str | None, named: Works, pattern: str) -> tuple[After, ...]:
        """Append works in a row, the first after `after`; gives the wait for the last."""
        for number, (name, work) in enumerate(named):
            wait = (After(after),) if after and not number else ()
            ops.append(Op(pattern.replace("*", name), work, stream, wait))
        return (After(ops[-1].name),) if named else ()

    for (prefix, direction, block, compute), wait in zip(uses, waits, strict=True):
        fetches = fetch(direction, block) if block.parameters else ()
        here = line_up(
            GATHER,
            runs[wait] if wait >= 0 else None,
            fetches,
            f"{prefix}*.{direction}.{block.name}",
        )
        if pending:
            reduced = line_up(REDUCE, *pending)
            pending = None
        runs.append(f"{prefix}{direction}.{block.name}")
        ops.append(Op(runs[-1], compute, COMPUTE, here))
        if refresh and len(runs) == len(works):
            ops.append(Op("refresh", refresh, GATHER))
        if direction == "backward" and block.parameters:
            pending = (runs[-1], reduce(block), f"{prefix}*.{block.name}")
    if pending:
        reduced = line_up(REDUCE, *pending)
    share = -(-job.parameters // shards)
    ops.append(Op("optimizer", job.optimizer_step(share), COMPUTE, reduced))
    first_fetch = next(op.name for op in ops if op.stream == GATHER)
    return Step(ops, (first_fetch, runs[0]), ("optimizer",))


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
