"""A schedule as a folder of Chakra traces, one file for each rank."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from co2sim.common.errors import OptionError
from co2sim.common.files import MAX_RECORD_BYTES, new_folder
from co2sim.common.progress import Done
from co2sim.common.units import Bytes, counted, scaled
from co2sim.common.validation import whole
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import Collective, Compute, Group, Instance, Layout, Schedule
from co2sim.simulation.chakra import works
from co2sim.simulation.chakra.schema import FILE, VERSION, delimited, numbered, schema, to_json
from co2sim.simulation.costs import work_time

NAME = "trace"
"""Files are called trace.0.et, trace.1.et and so on: what ASTRA-sim puts behind its argument."""
MAX_RANKS = 65_536
"""Files of one folder."""
MAX_NODES = 1_000_000
"""Of one file: ops of a round times rounds."""
MAX_TRACE_BYTES: Bytes = 100e9
"""Of all files together."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: `ranks` files, `size` bytes in all, of `nodes` nodes each."""

    ranks: int
    size: int
    nodes: int
    rounds: int
    unsupported: tuple[str, ...]
    """Kinds of collectives in it that ASTRA-sim 2 does not simulate."""


def write(
    schedule: Schedule,
    cluster: Cluster,
    folder: Path,
    *,
    precision: str,
    rounds: int | None = None,
    done: Done | None = None,
) -> Written:
    """Write `rounds` rounds of a schedule as Chakra traces into a new folder: all files or none.

    Every rank has its file, whether or not a simulation would fold it. `precision` is that of
    computing, for the durations. By default there are as many rounds as show every wait: one more
    than the farthest goes back; fewer are refused. Raises OptionError for what cannot be written.
    """
    least = schedule.lag + 1
    rounds = whole("rounds", least if rounds is None else rounds, 1)
    if rounds < least:
        raise OptionError(
            f"rounds is {rounds}; {schedule.name} has ops that wait for"
            f" {counted(schedule.lag, 'round')} ago, which at least {least} rounds show"
        )
    ranks, nodes = cluster.layout.world_size, rounds * len(schedule.body)
    for what, count, most in (
        ("ranks", ranks, MAX_RANKS),
        ("nodes of a rank", nodes, MAX_NODES),
    ):
        if count > most:
            raise OptionError(f"{count:,} {what} are more than the {most:,} that are written")
    made = RankFiles(schedule, cluster.layout, rounds, durations(schedule, cluster, precision))
    size = 0
    with new_folder(folder) as put:
        _check_room(folder.resolve().parent, ranks, len(made.of_rank(0)))
        for rank in range(ranks):
            content = made.of_rank(rank)
            put(f"{NAME}.{rank}.et", content)
            size += len(content)
            if done:
                done(rank + 1, ranks)
        put(FILE, to_json(made.numbers).encode())
    kinds = {str(work.kind) for work in schedule.works if isinstance(work, Collective)}
    return Written(ranks, size, nodes, rounds, tuple(sorted(kinds & {"broadcast", "reduce"})))


def durations(schedule: Schedule, cluster: Cluster, precision: str) -> tuple[int, ...]:
    """Whole microseconds of every compute op, at least 1; of collectives 0."""
    micros = [
        max(1, round(1e6 * work_time(work, cluster, precision))) if isinstance(work, Compute) else 0
        for work in schedule.works
    ]
    return tuple(micros[index] for index in schedule.work_numbers)


def _check_room(parent: Path, ranks: int, size: int) -> None:
    """Refuse what is larger than files may be, or than the disk has room for."""
    if size > MAX_RECORD_BYTES:
        raise OptionError(
            f"a file would be {scaled(size, 'B')}; at most {scaled(MAX_RECORD_BYTES, 'B')}"
            " are written; take fewer rounds"
        )
    free = shutil.disk_usage(parent).free
    if ranks * size > min(MAX_TRACE_BYTES, free):
        raise OptionError(
            f"{ranks:,} files of {scaled(size, 'B')} are about {scaled(ranks * size, 'B')}; at most"
            f" {scaled(MAX_TRACE_BYTES, 'B')} are written, and {parent} has"
            f" {scaled(free, 'B')} free"
        )


FORMAT = 1
"""Of what co2sim adds to a trace; see docs/exchange.md."""


class RankFiles:
    """The files of a schedule, `rounds` rounds of it one after the other.

    `micros` is what a compute op of the body takes in microseconds, for simulators that replay
    times; of collectives it is 0.
    """

    def __init__(
        self, schedule: Schedule, layout: Layout, rounds: int, micros: Sequence[int]
    ) -> None:
        self.schedule, self.layout, self.rounds, self.micros = schedule, layout, rounds, micros
        self.numbers = numbered(schedule.groups, layout)
        places = works.places(op.work for op in schedule.body)
        self._works = [works.typed(work) for work in places]
        self._numbers = [places[op.work] for op in schedule.body]
        self._schema: Any = schema()
        self._nodes: dict[tuple[int, int], bytes] = {}

    def of_rank(self, rank: int) -> bytes:
        """The file of a rank."""
        meets = {group: group.members(rank, self.layout) for group in self.schedule.groups}
        parts = [self._head]
        for part in self._parts:
            if isinstance(part, bytes):
                parts.append(part)
            else:
                instance, group = part
                members = meets[group]
                node = self._node(instance, len(members))
                parts.append(delimited(node + self._tails.get(members, b"")))
        return b"".join(parts)

    @cached_property
    def _head(self) -> bytes:
        """The metadata: what schedule, on which layout, and its works."""
        schedule, layout = self.schedule, self.layout
        sizes = {
            "co2sim.format": FORMAT,
            "co2sim.steps": schedule.steps,
            "co2sim.rounds": self.rounds,
            "co2sim.nodes": layout.nodes,
            "co2sim.gpus_per_node": layout.gpus_per_node,
            "co2sim.sites": layout.sites,
        }
        attribute = self._schema.AttributeProto
        texts = self._schema.StringList(values=[works.work_text(work) for work in self._works])
        metadata = self._schema.GlobalMetadata(version=VERSION)
        metadata.attr.append(attribute(name="co2sim.schedule", string_val=schedule.name))
        metadata.attr.extend(attribute(name=n, uint64_val=size) for n, size in sizes.items())
        metadata.attr.append(attribute(name="co2sim.works", string_list=texts))
        return delimited(metadata.SerializeToString(deterministic=True))

    @cached_property
    def _instances(self) -> tuple[Instance, ...]:
        return tuple(self.schedule.instances(self.rounds))

    @cached_property
    def _parts(self) -> tuple[bytes | tuple[int, Group], ...]:
        """Nodes of computes, neighbours in one piece; of collectives the number and the group."""
        parts: list[bytes | tuple[int, Group]] = []
        for instance, _, op, _ in self._instances:
            if isinstance(op.work, Collective):
                parts.append((instance, op.work.group))
                continue
            node = delimited(self._node(instance, 1))
            if parts and isinstance(parts[-1], bytes):
                parts[-1] += node
            else:
                parts.append(node)
        return tuple(parts)

    @cached_property
    def _tails(self) -> dict[range, bytes]:
        """What is put behind a node, for the members of every process group."""
        attribute, node = self._schema.AttributeProto, self._schema.Node
        return {
            members: node(
                attr=[attribute(name="pg_name", string_val=str(group))]
            ).SerializeToString()
            for members, group in self.numbers.items()
        }

    def _node(self, instance: int, members: int) -> bytes:
        """The node of an instance, where a number of ranks meet."""
        if (instance, members) not in self._nodes:
            made = self._made(instance, members)
            self._nodes[instance, members] = made.SerializeToString(deterministic=True)
        return self._nodes[instance, members]

    def _made(self, instance: int, members: int) -> Any:
        schedule = self.schedule
        position = instance % len(schedule.body)
        op, work_number = schedule.body[position], self._numbers[position]
        work = self._works[work_number]
        kind = works.node_type(work, members)
        attribute = self._schema.AttributeProto
        node = self._schema.Node(
            id=instance,
            name=op.name,
            type=self._schema.NodeType.Value(kind),
            ctrl_deps=self._before[instance],
            data_deps=self._waits(instance),
            duration_micros=self.micros[position],
        )
        node.attr.append(attribute(name="is_cpu_op", bool_val=False))
        if isinstance(work, Collective) and not works.is_alone(work, members):
            name = works.COLLECTIVES[work.kind]
            value = self._schema.CollectiveCommType.Value(name)
            node.attr.append(attribute(name="comm_type", int64_val=value))
        amounts = works.numbers(work, members).items()
        node.attr.extend(attribute(name=name, uint64_val=value) for name, value in amounts)
        node.attr.append(attribute(name="co2sim.stream", string_val=op.stream))
        node.attr.append(attribute(name="co2sim.work", uint64_val=work_number))
        return node

    @cached_property
    def _before(self) -> tuple[tuple[int, ...], ...]:
        """For every instance, the one before it on its stream."""
        last: dict[str, int] = {}
        before = []
        for instance, _, op, _ in self._instances:
            before.append((last[op.stream],) if op.stream in last else ())
            last[op.stream] = instance
        return tuple(before)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {op.name: position for position, op in enumerate(self.schedule.body)}

    def _waits(self, instance: int) -> Iterator[int]:
        """What an instance waits for, in the order of its op; rounds before the first are over."""
        size = len(self.schedule.body)
        first = instance - instance % size
        for wait in self.schedule.body[instance % size].after:
            earlier = first - wait.rounds_ago * size + self._places[wait.op]
            if earlier >= 0:
                yield earlier
