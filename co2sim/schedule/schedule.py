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

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from co2sim.common.errors import ScheduleError, nearest
from co2sim.common.html_card import SHOWN, card
from co2sim.common.units import counted
from co2sim.common.validation import whole
from co2sim.schedule.groups import (
    LEADERS,
    NODE,
    PEERS,
    SITE,
    SITE_PEERS,
    WORLD,
    Group,
    Layout,
    block,
    peers_of_blocks,
    tensor,
)
from co2sim.schedule.ops import (
    SCALE_BYTES,
    Collective,
    Compute,
    DType,
    Exchanges,
    FusedAttention,
    Kernels,
    Kind,
    Product,
    Work,
)


def apart(streams: Sequence[str], offsets: Sequence[Sequence[int]]) -> bool:
    """Whether the last op of a round waits for all others of it, and all of the next for that op.

    They may do so through others. `streams` and `offsets` are those of the ops of a round: see
    `Schedule`. An op also waits for the one before it on its stream.
    """
    waits = _waits(streams, offsets)
    follows: list[bool] = []
    for found in waits:
        follows.append(any(n == -1 or (n >= 0 and follows[n]) for n in found))
    precedes = [False] * len(waits)
    precedes[-1] = True
    for place in range(len(waits) - 1, -1, -1):
        for n in waits[place] if precedes[place] else ():
            if n >= 0:
                precedes[n] = True
    return all(follows) and all(precedes)


def _waits(streams: Sequence[str], offsets: Sequence[Sequence[int]]) -> list[list[int]]:
    """The places in the round of what every op waits for; those of rounds before are below 0."""
    latest = {stream: place - len(streams) for place, stream in enumerate(streams)}
    found = []
    for place, (stream, back) in enumerate(zip(streams, offsets, strict=True)):
        found.append([latest[stream], *(place - offset for offset in back)])
        latest[stream] = place
    return found


__all__ = [
    "LEADERS",
    "NODE",
    "PEERS",
    "SCALE_BYTES",
    "SITE",
    "SITE_PEERS",
    "WORLD",
    "After",
    "Collective",
    "Compute",
    "DType",
    "Exchanges",
    "FusedAttention",
    "Group",
    "Instance",
    "Kernels",
    "Kind",
    "Layout",
    "Op",
    "Product",
    "Schedule",
    "Work",
    "block",
    "peers_of_blocks",
    "tensor",
]


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
    work: Work
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
        offsets = tuple(
            [
                self._lower(index, op, place) if op.after else ()
                for index, op in enumerate(self.body)
            ]
        )
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
        known: dict[tuple[int, str], int] = {}  # by identity: works are shared, and slow to hash
        for op in self.body:
            here = id(op.work), op.stream
            if here not in known:
                alike = op.stream, _without_name(op.work)
                first.setdefault(alike, op)
                known[here] = numbers.setdefault(alike, len(numbers))
        return (
            tuple(op.work for op in first.values()),
            tuple(op.stream for op in first.values()),
            tuple([known[id(op.work), op.stream] for op in self.body]),
        )

    @cached_property
    def groups(self) -> frozenset[Group]:
        """The groups that meet in a collective."""
        return frozenset(work.group for work in self.works if isinstance(work, Collective))

    @property
    def lag(self) -> int:
        """The farthest round, counted back, that a round waits for."""
        return max((wait.rounds_ago for op in self.body for wait in op.after), default=0)

    @cached_property
    def apart(self) -> bool:
        """Whether a round begins when the one before has ended, with a compute op."""
        ends = isinstance(self.body[-1].work, Compute)
        return ends and apart([op.stream for op in self.body], self.offsets)

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
        for number in range(0, rounds * size, size):
            for index, (op, offsets) in enumerate(indexed, start=number):
                waits = (
                    tuple([index - offset for offset in offsets if offset <= index])
                    if offsets
                    else ()
                )
                yield Instance(index, number // size, op, waits)

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
    return work.kind, work.elements, work.dtype, work.group, work.scale_block, work.root
