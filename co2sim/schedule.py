"""The schedule: what one training round does on every rank, as data.

The simulator and the executor are two interpreters of the same `Schedule`:

1. Every rank runs the same body, round after round.
2. A stream runs its ops one at a time, in body order.
3. An op starts once its stream is free and every op in `after` has finished.
   `After(op, rounds_ago=k)` waits for that op as issued k rounds ago; a round before the first
   counts as finished.
4. A collective starts on a member when it is ready there and ends on all members together.
5. Body order is a legal serial execution, so no schedule can deadlock.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from co2sim.errors import ScheduleError, nearest
from co2sim.groups import LEADERS, NODE, PEERS, WORLD, Group, Layout, block
from co2sim.ranges import at_least, whole
from co2sim.units import Bytes, Flops

__all__ = [
    "LEADERS",
    "NODE",
    "PEERS",
    "SCALE_BYTES",
    "WORLD",
    "After",
    "Collective",
    "Compute",
    "DType",
    "Group",
    "Instance",
    "Kernels",
    "Kind",
    "Layout",
    "Op",
    "Product",
    "Schedule",
    "block",
]


class Kind(StrEnum):
    """What a collective does with its buffer."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"


class DType(StrEnum):
    """Type of the elements on the wire."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bytes(self) -> Bytes:
        """Bytes of one element; int4 counts half a byte."""
        return _BYTES[self]


_BYTES = {DType.FP32: 4.0, DType.FP16: 2.0, DType.BF16: 2.0, DType.INT8: 1.0, DType.INT4: 0.5}
SCALE_BYTES: Bytes = 4.0
"""Bytes of the fp32 scale that every block of a quantized buffer carries."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product: its FLOP, and the bytes of its operands and its result, each once."""

    flops: Flops
    bytes: Bytes

    def times(self, factor: float) -> "Product":
        """So many of it, or a part of it."""
        return Product(self.flops * factor, self.bytes * factor)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a pass launches: matrix products, and the rest.

    `calls` are operations that the framework issues, `elementwise_bytes` the memory traffic of
    those that are no matrix products, and `vocabulary` says that the products' output has the
    width of a vocabulary.
    """

    products: tuple[Product, ...]
    calls: float
    elementwise_bytes: Bytes
    vocabulary: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """Local work: looked up by `kernel` when run, costed by FLOP and bytes of memory traffic.

    `kernels` says what it consists of, for GPUs whose kernels are known (`co2sim.cost`).
    """

    kernel: str
    flops: Flops
    memory_bytes: Bytes = 0.0
    kernels: Kernels | None = None

    def __post_init__(self) -> None:
        """Refuse negative or infinite work."""
        at_least(f"{self.kernel!r}: flops", self.flops, 0, error=ScheduleError)
        at_least(f"{self.kernel!r}: memory_bytes", self.memory_bytes, 0, error=ScheduleError)

    def __str__(self) -> str:
        """`forward: 1.2e+13 FLOP, 4e+08 B`."""
        return f"{self.kernel}: {self.flops:.3g} FLOP, {self.memory_bytes:.3g} B"


@dataclass(frozen=True, slots=True)
class Collective:
    """Communication of `elements`: those of the whole, unsharded buffer.

    For all_to_all that is each rank's input.

    `scale_block` > 0 says that the buffer is block-quantized and carries one fp32 scale for every
    `scale_block` elements. A broadcast comes from the member at place `root`, and a reduction goes
    to it; places are counted around the group.
    """

    kind: Kind
    buffer: str
    elements: int
    dtype: DType
    group: Group
    scale_block: int = 0
    root: int = 0

    def __post_init__(self) -> None:
        """Refuse an empty or unnamed buffer, and a root that the kind does not have."""
        if not self.buffer:
            raise ScheduleError(f"{self.kind}: the buffer has no name")
        if self.elements < 1 or self.scale_block < 0:
            raise ScheduleError(
                f"{self.kind}({self.buffer}): elements={self.elements},"
                f" scale_block={self.scale_block}; elements must be at least 1,"
                " scale_block 0 (no scales) or more"
            )
        if self.root and (self.root < 0 or self.kind not in {Kind.BROADCAST, Kind.REDUCE}):
            raise ScheduleError(
                f"{self.kind}({self.buffer}): root={self.root}; only a broadcast or a reduction has"
                " one, 0 or more"
            )

    @property
    def bytes(self) -> Bytes:
        """Bytes of the whole buffer, scales of block quantization included."""
        scales = math.ceil(self.elements / self.scale_block) if self.scale_block else 0
        return self.elements * self.dtype.bytes + scales * SCALE_BYTES

    def __str__(self) -> str:
        """`all_gather(layer0: 1000 int8/256) over world`, `reduce(...) over world, root 3`."""
        scales = f"/{self.scale_block}" if self.scale_block else ""
        root = f", root {self.root}" if self.root else ""
        what = f"{self.buffer}: {self.elements} {self.dtype}{scales}"
        return f"{self.kind}({what}) over {self.group}{root}"


@dataclass(frozen=True, slots=True)
class After:
    """A wait for `op`, as issued `rounds_ago` rounds ago."""

    op: str
    rounds_ago: int = 0

    def __str__(self) -> str:
        """`average` or `average[-1]`."""
        return f"{self.op}[-{self.rounds_ago}]" if self.rounds_ago else self.op


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of work on one stream. The op is its own completion event."""

    name: str
    work: Compute | Collective
    stream: str
    after: tuple[After, ...] = ()


class Instance(NamedTuple):
    """An op as issued in one round. `number` counts instances from 0 in issue order."""

    number: int
    round: int
    op: Op
    waits: tuple[int, ...]
    """Numbers of the instances to wait for; those on the own stream are implied, and left out."""


@dataclass(frozen=True)
class Schedule:
    """The body of a round. Raises ScheduleError, in words, when it could not run.

    `steps` is the number of optimizer (local) steps in a round. `offsets` says, for every op, how
    many instances back in the order of issue those are that it waits for on other streams.
    """

    name: str
    body: tuple[Op, ...]
    steps: int = 1
    offsets: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate, and lower every wait to its constant distance in issue order."""
        if not self.body:
            raise ScheduleError(f"{self.name}: the body is empty")
        whole(f"{self.name}: steps", self.steps, 1, error=ScheduleError)
        place: dict[str, int] = {}
        for index, op in enumerate(self.body):
            if not op.name or not op.stream:
                raise ScheduleError(f"{self.name}: op {index} needs a name and a stream")
            if op.name in place:
                raise ScheduleError(
                    f"{self.name}: two ops are called {op.name!r}; names must be unique"
                )
            place[op.name] = index
        offsets = tuple(self._lower(index, op, place) for index, op in enumerate(self.body))
        object.__setattr__(self, "offsets", offsets)

    def _lower(self, index: int, op: Op, place: dict[str, int]) -> tuple[int, ...]:
        found = []
        for wait in op.after:
            target = place.get(wait.op)
            if target is None:
                raise ScheduleError(
                    f"{op.name!r} waits for {wait.op!r}, which is not in the body;"
                    f" {nearest(wait.op, place)}"
                )
            if wait.rounds_ago < 0:
                raise ScheduleError(
                    f"{op.name!r} waits for {wait.op!r} {wait.rounds_ago} rounds ago;"
                    " it must be 0 or more"
                )
            if not wait.rounds_ago and target >= index:
                raise ScheduleError(
                    f"{op.name!r} waits for {wait.op!r}, which is not before it in the body;"
                    " move it up, or wait for an earlier round with rounds_ago=1"
                )
            if self.body[target].stream != op.stream:
                found.append(index - target + wait.rounds_ago * len(self.body))
        return tuple(found)

    @property
    def lag(self) -> int:
        """The farthest round, counted back, that a round waits for."""
        return max((wait.rounds_ago for op in self.body for wait in op.after), default=0)

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams in order of first use."""
        return tuple(dict.fromkeys(op.stream for op in self.body))

    def instances(self, rounds: int) -> Iterator[Instance]:
        """Every op of every round in issue order: a legal serial execution.

        The only place that knows what a round or a delay means.
        """
        size = len(self.body)
        indexed = tuple(zip(self.body, self.offsets, strict=True))
        for number in range(0, rounds * size, size):
            for index, (op, offsets) in enumerate(indexed, start=number):
                waits = (
                    tuple([index - offset for offset in offsets if offset <= index])
                    if offsets
                    else ()
                )
                yield Instance(index, number // size, op, waits)

    def __str__(self) -> str:
        """The table that is golden file, documentation and error context at once."""
        rows = [
            (op.stream, op.name, str(op.work), ", ".join(map(str, op.after))) for op in self.body
        ]
        stream, name, work = (max(len(row[column]) for row in rows) for column in range(3))
        lines = [
            f"{row[0]:{stream}}  {row[1]:{name}}  {row[2]:{work}}"
            + (f"  after {row[3]}" if row[3] else "")
            for row in rows
        ]
        return "\n".join([self.name, *(line.rstrip() for line in lines)])
