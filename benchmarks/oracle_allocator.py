"""PyTorch's caching allocator on recorded allocations: what it reserves, with its own rules.

Small blocks come from segments of 2 MiB, those above 1 MiB from segments of 20 MiB, and those from
10 MiB on have a segment of their own, rounded up to 2 MiB. A request takes the smallest free block
of its stream that holds it; what is left over is split off, of large blocks if it is more than 1
MiB. Free neighbours are joined. Nothing goes back to the GPU. A stream has a pool of its own.

Source: pytorch v2.6, c10/cuda/CUDACachingAllocator.cpp: kSmallSize, kSmallBuffer, kLargeBuffer,
kMinLargeAlloc, kRoundLarge; get_free_block, should_split, alloc_block.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

MIB = 1 << 20
LEAST = 512
SMALL = MIB
SEGMENTS = 2 * MIB, 20 * MIB
OWN = 10 * MIB
"""A block of at least these bytes has a segment of its own."""

Event = tuple[Literal["take", "give", "kind"], int, int | str]
"""A storage that takes bytes, or gives them back, or is found to be of a kind."""

STREAMS = {"All Gather": "gather", "Sharded Grad": "reduce"}
"""Kinds of FSDP2's tensors that are made on a stream of their own.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: foreach_all_gather makes its own
on all_gather_copy_in_stream, foreach_reduce its own on reduce_scatter_stream.
"""


@dataclass(eq=False)
class _Block:
    """Bytes of a segment, between two neighbours."""

    size: int
    pool: tuple[str, bool]
    before: "_Block | None" = None
    behind: "_Block | None" = None
    free: bool = False


@dataclass
class Allocator:
    """Blocks of all streams; `reserved` bytes are in segments."""

    reserved: int = 0
    _free: dict[tuple[str, bool], list[tuple[int, int, _Block]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def take(self, size: int, stream: str) -> _Block:
        """A block of at least these bytes."""
        size = -(-size // LEAST) * LEAST
        small = size <= SMALL
        pool = stream, small
        free = self._free[pool]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = free.pop(place)[2]
        else:
            block = _Block(_segment(size), pool)
            self.reserved += block.size
        block.free = False
        left = block.size - size
        if left >= (LEAST if small else SMALL + 1):
            rest = _Block(left, pool, block, block.behind)
            if block.behind:
                block.behind.before = rest
            block.behind, block.size = rest, size
            self._put(rest)
        return block

    def give(self, block: _Block) -> None:
        """Free a block, and join it with free neighbours."""
        for other, first in ((block.before, True), (block.behind, False)):
            if other is not None and other.free:
                self._free[other.pool].remove((other.size, id(other), other))
                block.size += other.size
                if first:
                    block.before = other.before
                    if other.before:
                        other.before.behind = block
                else:
                    block.behind = other.behind
                    if other.behind:
                        other.behind.before = block
        self._put(block)

    def _put(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.pool], (block.size, id(block), block), key=lambda row: row[:2])


def _segment(size: int) -> int:
    """Bytes of a new segment for a request."""
    if size < OWN:
        return SEGMENTS[size > SMALL]
    return -(-size // SEGMENTS[0]) * SEGMENTS[0]


def reserved(events: Iterable[Event]) -> int:
    """Bytes in segments at the end of the events."""
    every = list(events)
    streams: dict[int, str] = {}
    for what, storage, kind in every:
        if what == "kind" and kind in STREAMS:
            streams.setdefault(storage, STREAMS[str(kind)])
    allocator, blocks = Allocator(), {}
    for what, storage, size in every:
        if what == "take":
            blocks[storage] = allocator.take(int(size), streams.get(storage, ""))
        elif what == "give" and storage in blocks:
            allocator.give(blocks.pop(storage))
    return allocator.reserved
