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
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from co2sim.common.errors import ScheduleError, nearest
from co2sim.common.html_card import SHOWN, card
from co2sim.common.units import Bytes, Flops, counted
from co2sim.common.validation import at_least, whole
from co2sim.schedule.token_routing import TokenRouting

# --- who meets ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks are placed: `nodes` nodes of `gpus_per_node` ranks, filled node by node.

    The nodes are those of all `sites` together, filled site by site, as many at each.
    """

    nodes: int
    gpus_per_node: int
    sites: int = 1

    def __post_init__(self) -> None:
        """Refuse an empty layout, and unequal sites."""
        whole("nodes", self.nodes, 1, error=ScheduleError)
        whole("gpus_per_node", self.gpus_per_node, 1, error=ScheduleError)
        whole("sites", self.sites, 1, error=ScheduleError)
        if self.nodes % self.sites:
            raise ScheduleError(f"{self.nodes} nodes do not divide into {self.sites} equal sites")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def ranks_per_site(self) -> int:
        """Number of ranks at one site."""
        return self.world_size // self.sites

    def strided(self, stride: int) -> "Layout":
        """The layout in which `stride` consecutive ranks of a node, or of some nodes, count as one.

        Raises ScheduleError where they do not divide the ranks of a node, nor the nodes of a site.
        """
        if stride == 1:
            return self
        whole("stride", stride, 1, error=ScheduleError)
        if stride % self.gpus_per_node == 0 and self.ranks_per_site % stride == 0:
            return Layout(self.world_size // stride, 1, self.sites)
        if self.gpus_per_node % stride:
            raise ScheduleError(
                f"groups of {stride} ranks do not divide the {self.gpus_per_node} GPUs of a node"
            )
        return Layout(self.nodes, self.gpus_per_node // stride, self.sites)


@dataclass(frozen=True, slots=True)
class Group:
    """Which ranks meet in a collective; `ranks` is the size of blocks, 0 where these are nodes.

    `stride` consecutive ranks count as one in it: as many groups of the kind lie side by side, each
    with the ranks of one place in their strides.
    """

    name: str
    ranks: int = 0
    stride: int = 1

    def __str__(self) -> str:
        """`world`, `node`, `site`, `peers`, `site_peers`, `leaders`, `block(4)` or `peers(4)`.

        With a stride of 8 `world/8`, `block(4)/8`.
        """
        name = f"{self.name}({self.ranks})" if self.ranks else self.name
        return f"{name}/{self.stride}" if self.stride > 1 else name

    @property
    def led(self) -> bool:
        """Whether the first ranks of all nodes meet, and all others are alone."""
        return self.name == "leaders"

    @property
    def by_site(self) -> bool:
        """Whether it depends on the sites who meets."""
        return self.name in {"site", "site_peers"}

    @property
    def is_node(self) -> bool:
        """Whether the ranks of one node meet."""
        return self.name == "node"

    @property
    def of_experts(self) -> bool:
        """Whether each tensor-parallel rank counts, as it does where experts are divided."""
        return self.name in {"experts", "replicas", "shards"}

    def leaves_node(self, layout: Layout) -> bool:
        """Whether ranks of several nodes meet."""
        return self.members(0, layout)[-1] >= layout.gpus_per_node

    def members(self, rank: int, layout: Layout) -> range:
        """Ranks of the group that `rank` belongs to, in ring order."""
        if self.stride > 1:
            offset, by = rank % self.stride, self.stride
            ranks = Group(self.name, self.ranks).members(rank // by, layout.strided(by))
            return range(ranks.start * by + offset, ranks.stop * by, ranks.step * by)
        g, n = layout.gpus_per_node, layout.world_size
        size = self.ranks or (layout.ranks_per_site if self.by_site else g)
        match self.name:
            case "world":
                return range(n)
            case "node" | "site":
                return range(rank // size * size, rank // size * size + size)
            case "peers" | "site_peers" | "replicas" if n % size == 0:
                return range(rank % size, n, size)
            case "leaders":
                return range(rank, rank + 1) if rank % g else range(0, n, g)
            case "block" | "tensor" | "experts" | "shards" | "context" if (
                self.ranks and n % size == 0
            ):
                return range(rank // size * size, rank // size * size + size)
        raise ScheduleError(f"group {self} does not divide {n} ranks")


WORLD = Group("world")
"""All ranks."""
NODE = Group("node")
"""The ranks of one node."""
PEERS = Group("peers")
"""The ranks with the same place in every node."""
LEADERS = Group("leaders")
"""The first rank of every node; all others are alone."""
SITE = Group("site")
"""The ranks of one site."""
SITE_PEERS = Group("site_peers")
"""The ranks with the same place at every site."""


def block(ranks: int) -> Group:
    """Blocks of `ranks` consecutive ranks."""
    return Group("block", ranks)


def peers_of_blocks(ranks: int) -> Group:
    """The ranks with the same place in every block of `ranks` consecutive ranks."""
    return Group("peers", ranks)


def tensor(ranks: int) -> Group:
    """Tensor-parallel groups: blocks of `ranks` consecutive ranks that hold a model together."""
    return Group("tensor", ranks)


def experts(ranks: int, stride: int = 1) -> Group:
    """Blocks of `ranks` ranks that divide the experts of a layer; `stride` in a row share each."""
    return Group("experts", ranks, stride)


def replicas_of_experts(ranks: int, among: int = 0) -> Group:
    """The ranks with the same experts, where every `ranks` divide them; of `among` ranks, or all.

    All ranks count in it, tensor-parallel ones too.
    """
    if among:
        return Group("shards", among // ranks, ranks)
    return Group("replicas", ranks)


# --- what an op does ------------------------------------------------------------------------------


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
class Gemm:
    """Matrix products of `rows` x `inner` times `inner` x `columns`, elements of `width` bytes.

    There are `count` calls, which may be a fraction, of `batch` products each. Those of a `narrow`
    type, fp8 or fp4, have results of `result` bytes an element (0: `width`); it may also be one of
    16 or 32 bits, other than that of most products. A `grouped` one is of experts, each with its
    own rows.
    """

    rows: int
    inner: int
    columns: int
    width: Bytes
    batch: int = 1
    count: float = 1.0
    narrow: str = ""
    result: Bytes = 0.0
    grouped: bool = False

    @property
    def flops(self) -> Flops:
        """Of all products; a multiply-add counts as two."""
        return 2.0 * self.count * self.batch * self.rows * self.inner * self.columns

    @property
    def bytes(self) -> Bytes:
        """Of the operands and the results, each once."""
        rows, inner, columns = self.rows, self.inner, self.columns
        operands = (rows + columns) * inner * self.width
        return self.count * self.batch * (operands + rows * columns * (self.result or self.width))

    def times(self, factor: float) -> "Gemm":
        """The products `factor` times, which may be a fraction."""
        return replace(self, count=self.count * factor)


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

    def then(self, other: "FusedAttention") -> "FusedAttention":
        """Two kernels as one, over sequences as long as those of the larger one on average."""
        mine, others = self.flops + self.backward, other.flops + other.backward
        length = (mine * self.length + others * other.length) / (mine + others or 1)
        return FusedAttention(
            self.flops + other.flops,
            self.bytes + other.bytes,
            round(length) or self.length,
            self.backward + other.backward,
        )


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a pass launches: matrix products, and the rest.

    `calls` are operations that the framework issues, `elementwise_bytes` the memory traffic of
    those that are no matrix products, and `vocabulary` says that the products' output has the
    width of a vocabulary. `attention` is that part of attention which is one kernel, `cast_bytes`
    the traffic of kernels that make operands of a narrow type, and `adapter_bytes` that of those
    that scale and add what adapters give.
    """

    products: tuple[Gemm, ...]
    calls: float
    elementwise_bytes: Bytes
    vocabulary: bool = False
    attention: FusedAttention | None = None
    cast_bytes: Bytes = 0.0
    adapter_bytes: Bytes = 0.0

    def times(self, factor: float) -> "Kernels":
        """The same work `factor` times, which may be a fraction."""
        return Kernels(
            tuple(product.times(factor) for product in self.products),
            self.calls * factor,
            self.elementwise_bytes * factor,
            self.vocabulary,
            self.attention and self.attention.times(factor),
            self.cast_bytes * factor,
            self.adapter_bytes * factor,
        )


Place: TypeAlias = Literal["gpu", "link", "host"]
"""Where a work moves its bytes. link: between a GPU and its host. host: in the host's memory."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Local work: looked up by `kernel` when run, costed by FLOP and bytes of memory traffic."""

    kernel: str
    flops: Flops
    memory_bytes: Bytes = 0.0
    kernels: Kernels | None = None
    """What it consists of, for GPUs whose kernels are known."""

    parts: tuple["Compute", ...] = ()
    """Works that it does one after the other; the other fields then hold their sums."""

    exchanges: "TensorParallelCollectives | None" = None
    """With ranks that divide tensors, experts or sequences: `apply_tensor_parallelism` makes ops of
    them."""

    exchanged: tuple["Collective", ...] = ()
    """The same once they are ops, since a host issues them together with the work."""

    place: Place = "gpu"
    """One that is not on the GPU takes the time of its bytes there."""

    @property
    def label(self) -> str:
        """The kernel, whatever it works on."""
        return self.kernel

    def __post_init__(self) -> None:
        """Refuse negative or infinite work."""
        at_least(f"{self.kernel!r}: flops", self.flops, 0, error=ScheduleError)
        at_least(f"{self.kernel!r}: memory_bytes", self.memory_bytes, 0, error=ScheduleError)

    def __str__(self) -> str:
        """`forward: 1.2e+13 FLOP, 4e+08 B`; of others than the GPU with their place."""
        where = "" if self.place == "gpu" else f" ({self.place})"
        return f"{self.kernel}: {self.flops:.3g} FLOP, {self.memory_bytes:.3g} B{where}"


@dataclass(frozen=True, slots=True)
class Collective:
    """Communication of `elements`: those of the whole, unsharded buffer.

    For all_to_all that is each rank's input.

    `scale_block` > 0 says that the buffer is block-quantized and carries one fp32 scale for every
    `scale_block` elements. A broadcast comes from the member at place `root`, and a reduction goes
    to it; places are counted around the group. An all-to-all of tokens may be `routed`: `elements`
    are then those that come to the busiest member, one for every expert of a token.
    """

    kind: Kind
    buffer: str
    elements: int
    dtype: DType
    group: Group
    scale_block: int = 0
    root: int = 0
    routed: TokenRouting | None = None

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
        if self.routed and self.kind is not Kind.ALL_TO_ALL:
            raise ScheduleError(f"{self.kind}({self.buffer}): only an all_to_all is routed")

    @property
    def bytes(self) -> Bytes:
        """Bytes of the whole buffer, scales of block quantization included."""
        scales = math.ceil(self.elements / self.scale_block) if self.scale_block else 0
        return self.elements * self.dtype.bytes + scales * SCALE_BYTES

    @property
    def label(self) -> str:
        """`all_gather world`: its kind and who takes part, whatever the buffer is."""
        return f"{self.kind} {self.group}"

    def __str__(self) -> str:
        """`all_gather(layer0: 1000 int8/256) over world`, `reduce(...) over world, root 3`."""
        scales = f"/{self.scale_block}" if self.scale_block else ""
        root = f", root {self.root}" if self.root else ""
        what = f"{self.buffer}: {self.elements} {self.dtype}{scales}"
        routed = f", {self.routed}" if self.routed else ""
        return f"{self.kind}({what}) over {self.group}{root}{routed}"


@dataclass(frozen=True, slots=True)
class TensorParallelCollectives:
    """What a pass exchanges with other ranks: `before` it, `beside` it, and `behind` it, in turn.

    What follows on the pass's stream waits for all of them.
    """

    before: tuple[Collective, ...] = ()
    beside: tuple[Collective, ...] = ()
    behind: tuple[Collective, ...] = ()

    def then(self, other: "TensorParallelCollectives") -> "TensorParallelCollectives":
        """Those of two passes that are one op: what lies between the two comes behind it."""
        return TensorParallelCollectives(
            self.before,
            (*self.beside, *other.beside),
            (*self.behind, *other.before, *other.behind),
        )


Work: TypeAlias = Compute | Collective


# --- the schedule ---------------------------------------------------------------------------------


def _waits(streams: Sequence[str], offsets: Sequence[Sequence[int]]) -> list[list[int]]:
    """The places in the round of what every op waits for; those of rounds before are below 0.

    An op also waits for the one before it on its stream.
    """
    latest = {stream: index - len(streams) for index, stream in enumerate(streams)}
    waits = []
    for index, (stream, back) in enumerate(zip(streams, offsets, strict=True)):
        waits.append([latest[stream], *(index - offset for offset in back)])
        latest[stream] = index
    return waits


@dataclass(frozen=True, slots=True)
class After:
    """A wait for `op`, as issued `rounds_ago` rounds ago."""

    op: str
    rounds_ago: int = 0

    def __str__(self) -> str:
        """`average` or `average[-1]`."""
        return f"{self.op}[-{self.rounds_ago}]" if self.rounds_ago else self.op


class Turn(NamedTuple):
    """Which turns of the loops of a round an op belongs to, from 0; None where to none of them."""

    local_step: int | None = None
    micro_step: int | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of work on one stream. The op is its own completion event."""

    name: str
    work: Work
    stream: str
    after: tuple[After, ...] = ()
    turn: Turn = field(default=Turn(), compare=False)


class Instance(NamedTuple):
    """An op as issued in one round. `number` counts instances from 0 in issue order."""

    number: int
    round: int
    op: Op
    waits: tuple[int, ...]
    """Numbers of the instances to wait for; those on the own stream are implied, and left out."""


@dataclass(frozen=True)
class Schedule:
    """The body of a round. Raises ScheduleError, with the reason, when it could not run.

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
        index_of: dict[str, int] = {}
        for index, op in enumerate(self.body):
            if not op.name or not op.stream:
                raise ScheduleError(f"{self.name}: op {index} needs a name and a stream")
            if op.name in index_of:
                raise ScheduleError(
                    f"{self.name}: two ops are called {op.name!r}; names must be unique"
                )
            index_of[op.name] = index
        offsets = tuple(
            [
                self._lower(index, op, index_of) if op.after else ()
                for index, op in enumerate(self.body)
            ]
        )
        object.__setattr__(self, "offsets", offsets)

    def _lower(self, index: int, op: Op, index_of: dict[str, int]) -> tuple[int, ...]:
        offsets = []
        for wait in op.after:
            target = index_of.get(wait.op)
            if target is None:
                raise ScheduleError(
                    f"{op.name!r} waits for {wait.op!r}, which is not in the body;"
                    f" {nearest(wait.op, index_of)}"
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
                offsets.append(index - target + wait.rounds_ago * len(self.body))
        return tuple(offsets)

    @property
    def works(self) -> tuple[Work, ...]:
        """The different works of the streams, in order of first use.

        Of collectives that differ only in the names of their buffers, the first stands for all.
        """
        return self._works[0]

    @property
    def work_streams(self) -> tuple[str, ...]:
        """The stream of each of `works`."""
        return self._works[1]

    @property
    def work_numbers(self) -> tuple[int, ...]:
        """For every op, the place of its work in `works`: there are few of them, and many ops."""
        return self._works[2]

    @cached_property
    def _works(self) -> tuple[tuple[Work, ...], tuple[str, ...], tuple[int, ...]]:
        first: dict[Hashable, Op] = {}
        numbers: dict[Hashable, int] = {}
        # by identity: works are shared, and slow to hash
        number_of: dict[tuple[int, str], int] = {}
        for op in self.body:
            here = id(op.work), op.stream
            if here not in number_of:
                alike = op.stream, _without_name(op.work)
                first.setdefault(alike, op)
                number_of[here] = numbers.setdefault(alike, len(numbers))
        return (
            tuple(op.work for op in first.values()),
            tuple(op.stream for op in first.values()),
            tuple([number_of[id(op.work), op.stream] for op in self.body]),
        )

    @cached_property
    def groups(self) -> frozenset[Group]:
        """The groups that meet in a collective."""
        return frozenset(work.group for work in self.works if isinstance(work, Collective))

    @cached_property
    def farthest(self) -> int:
        """The largest offset: how many instances back in the order of issue an op waits for."""
        return max((offset for offsets in self.offsets for offset in offsets), default=0)

    @cached_property
    def lag(self) -> int:
        """The farthest round, counted back, that a round waits for."""
        return max((wait.rounds_ago for op in self.body for wait in op.after), default=0)

    @cached_property
    def is_sequential(self) -> bool:
        """Whether a round begins when the one before has ended, with a compute op.

        Its last op waits for all others, and all of the next round for that op, if only through
        others.
        """
        waits = _waits([op.stream for op in self.body], self.offsets)
        follows: list[bool] = []
        for others in waits:
            follows.append(any(n == -1 or (n >= 0 and follows[n]) for n in others))
        precedes = [False] * len(waits)
        precedes[-1] = True
        for index in range(len(waits) - 1, -1, -1):
            for n in waits[index] if precedes[index] else ():
                if n >= 0:
                    precedes[n] = True
        return isinstance(self.body[-1].work, Compute) and all(follows) and all(precedes)

    @cached_property
    def places(self) -> tuple[tuple[str, str], ...]:
        """The name and the stream of every op."""
        return tuple([(op.name, op.stream) for op in self.body])

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Streams in order of first use."""
        return tuple(dict.fromkeys(stream for _, stream in self.places))

    def instances(self, rounds: int) -> Iterator[Instance]:
        """Every op of every round in issue order: a legal serial execution.

        The only place that knows what a round or a delay means.
        """
        size = len(self.body)
        indexed = tuple(zip(self.body, self.offsets, strict=True))
        for first in range(0, rounds * size, size):
            for index, (op, offsets) in enumerate(indexed, start=first):
                waits = (
                    tuple([index - offset for offset in offsets if offset <= index])
                    if offsets
                    else ()
                )
                yield Instance(index, first // size, op, waits)

    def _repr_html_(self) -> str:
        """For notebooks: how much there is of it, and its first ops."""
        streams = f"{counted(len(self.streams), 'stream')} ({', '.join(self.streams[:SHOWN])})"
        size = counted(len(self.body), "op")
        answer = f"{self.name}: a round of {counted(self.steps, 'step')} is {size} on {streams}."
        rows = [
            (op.name, op.stream, str(op.work), ", ".join(map(str, op.after[:SHOWN])))
            for op in self.body[:SHOWN]
        ]
        rest = len(self.body) - SHOWN
        remarks = [f"{counted(rest, 'further op')} not shown."] if rest > 0 else []
        return card(answer, rows, ("op", "stream", "work", "waits for"), remarks)

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


def _without_name(work: Work) -> Hashable:
    """What all that a collective costs follows from; of a compute, the whole."""
    if isinstance(work, Compute):
        return work
    how = work.scale_block, work.root, work.routed
    return work.kind, work.elements, work.dtype, work.group, *how
