"""What an op does: local compute, or a collective over a buffer."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from co2sim.common.errors import ScheduleError
from co2sim.common.units import Bytes, Flops
from co2sim.common.validation import at_least
from co2sim.schedule.groups import Group


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
        """The product `factor` times, which may be a fraction."""
        return Product(self.flops * factor, self.bytes * factor)


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Attention in one kernel, over sequences of `length`: its FLOP, and bytes read and written.

    `flops` are those of forward passes, `backward` those of backward passes. Both are what a kernel
    executes: half of the scores where the model is causal.
    """

    flops: Flops
    bytes: Bytes
    length: int
    backward: Flops = 0.0

    def times(self, factor: float) -> "FusedAttention":
        """The same work `factor` times, which may be a fraction."""
        return FusedAttention(
            self.flops * factor, self.bytes * factor, self.length, self.backward * factor
        )


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a pass launches: matrix products, and the rest.

    `calls` are operations that the framework issues, `elementwise_bytes` the memory traffic of
    those that are no matrix products, and `vocabulary` says that the products' output has the
    width of a vocabulary. `attention` is that part of attention which is one kernel.
    """

    products: tuple[Product, ...]
    calls: float
    elementwise_bytes: Bytes
    vocabulary: bool = False
    attention: FusedAttention | None = None

    def times(self, factor: float) -> "Kernels":
        """The same work `factor` times, which may be a fraction."""
        return Kernels(
            tuple(product.times(factor) for product in self.products),
            self.calls * factor,
            self.elementwise_bytes * factor,
            self.vocabulary,
            self.attention and self.attention.times(factor),
        )


@dataclass(frozen=True, slots=True)
class Compute:
    """Local work: looked up by `kernel` when run, costed by FLOP and bytes of memory traffic.

    `kernels` says what it consists of, for GPUs whose kernels are known (`compute_cost`). `parts`
    are works that it does one after the other; the other fields then hold their sums. `exchanges`
    are those of tensor-parallel ranks: `tensor_parallel` makes ops of them, and nothing else does.
    """

    kernel: str
    flops: Flops
    memory_bytes: Bytes = 0.0
    kernels: Kernels | None = None
    parts: tuple["Compute", ...] = ()
    exchanges: "Exchanges | None" = None

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
class Exchanges:
    """What a pass exchanges with other ranks: `before` it, `beside` it, and `behind` it, in turn.

    What follows on the pass's stream waits for all of them.
    """

    before: tuple[Collective, ...] = ()
    beside: tuple[Collective, ...] = ()
    behind: tuple[Collective, ...] = ()

    def then(self, other: "Exchanges") -> "Exchanges":
        """Those of two passes that are one op: what lies between the two comes behind it."""
        return Exchanges(
            self.before,
            (*self.beside, *other.beside),
            (*self.behind, *other.before, *other.behind),
        )


Work: TypeAlias = Compute | Collective
