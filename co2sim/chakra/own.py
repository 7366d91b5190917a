"""Traces that co2sim wrote: what they say besides the standard, and whether all of it agrees."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

from co2sim.chakra import works
from co2sim.chakra.process_groups import FILE, Members
from co2sim.chakra.rank_files import FORMAT, RankFiles
from co2sim.chakra.schema import PREFIX, attributes, messages, parsed, schema
from co2sim.groups import Layout
from co2sim.schedule import After, Op, Schedule
from co2sim.visible import given, visible
from co2sim.work import Work

_SIZES = ("format", "steps", "rounds", "nodes", "gpus_per_node", "sites")


def is_own(head: Any) -> bool:
    """Whether co2sim wrote a file with such metadata."""
    return any(one.name.startswith(PREFIX) for one in head.attr)


@dataclass(frozen=True)
class OwnTrace:
    """A schedule on a layout, as its first rank says; `micros` are durations of its ops."""

    schedule: Schedule
    layout: Layout
    rounds: int
    micros: tuple[int, ...]

    @classmethod
    def of(cls, head: Any, nodes: Sequence[Any]) -> "OwnTrace":
        """From the metadata and nodes of a file. Raises ValueError and ScheduleError."""
        facts = attributes(head, "its metadata")
        sizes = [_size(facts, f"co2sim.{name}") for name in _SIZES]
        if sizes[0] != FORMAT:
            raise ValueError(f"its co2sim.format is {sizes[0]}; only {FORMAT} is read")
        _, steps, rounds, *layout = sizes
        texts = facts.get("co2sim.works")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("its metadata lacks co2sim.works, a list of texts")
        known = [works.work_of(text) for text in texts]
        if len(nodes) % rounds:
            raise ValueError(f"{len(nodes):,} nodes are not {rounds:,} rounds of equally many")
        size = len(nodes) // rounds
        body = _body(nodes, size, known)
        name = facts.get("co2sim.schedule")
        if not isinstance(name, str):
            raise ValueError(f"its co2sim.schedule is {given(name)}, no text")  # noqa: TRY004
        micros = tuple(node.duration_micros for node in nodes[:size])
        return cls(Schedule(visible(name), body, steps), Layout(*layout), rounds, micros)

    @cached_property
    def files(self) -> RankFiles:
        """What co2sim would write of it."""
        return RankFiles(self.schedule, self.layout, self.rounds, self.micros)

    def check_groups(self, groups: Members) -> None:
        """Raise ValueError unless the process groups are those of the schedule."""
        for members, number in self.files.numbers.items():
            if tuple(groups.get(str(number), ())) != tuple(members):
                raise ValueError(
                    f"in {FILE}, group {number} is not of ranks {members[0]}, {members[1]} and so"
                    " on, as the schedule has it"
                )

    def check(self, rank: int, found: Sequence[Any]) -> None:
        """Raise ValueError, with the first difference, unless a file is what the schedule says."""
        head, *nodes = messages(self.files.of_rank(rank), len(found) + 1)
        kinds = schema()
        if parsed(kinds.GlobalMetadata, head, "message 0") != found[0]:
            raise ValueError("its metadata is not that of rank 0")
        for number, (node, other) in enumerate(zip_longest(nodes, found[1:])):
            if node is None or other is None:
                raise ValueError(
                    f"it has {len(found) - 1:,} nodes; by its works it has {len(nodes):,}"
                )
            expected = parsed(kinds.Node, node, f"message {number + 1}")
            if expected != other:
                what = f"node {number} ({given(visible(other.name))})"
                raise ValueError(
                    f"{what} is not that of its schedule: {_difference(expected, other)}"
                )


def _difference(expected: Any, other: Any) -> str:
    """The first field, or attribute, in which two nodes differ."""
    for field in ("id", "name", "type", "duration_micros", "ctrl_deps", "data_deps"):
        a, b = getattr(expected, field), getattr(other, field)
        if a != b:
            return f"{field} is {given(_plain(b))}, and should be {given(_plain(a))}"
    theirs, ours = attributes(other, "it"), attributes(expected, "it")
    for name in [*ours, *theirs]:
        a, b = ours.get(name), theirs.get(name)
        if a != b:
            return f"{visible(name)} is {given(b)}, and should be {given(a)}"
    return "it has further fields"


def _plain(value: Any) -> Any:
    return (
        visible(value) if isinstance(value, str) else value if isinstance(value, int) else [*value]
    )


def _size(facts: dict[str, Any], name: str) -> int:
    size = facts.get(name)
    if type(size) is not int or not 1 <= size <= 10**9:
        raise ValueError(f"its {name} is {given(size)}; it must be a whole number of 1 or more")
    return size


def _body(nodes: Sequence[Any], size: int, known: Sequence[Work]) -> tuple[Op, ...]:
    """The ops of a round, from the last one, which has all waits."""
    first = len(nodes) - size
    names = [visible(node.name) for node in nodes[first:]]
    body = []
    for place, node in enumerate(nodes[first:]):
        what = f"node {first + place} ({given(names[place])})"
        if node.id != first + place:
            raise ValueError(f"{what} has the id {node.id}; ids count from 0")
        facts = attributes(node, what)
        work = facts.get("co2sim.work")
        if type(work) is not int or not 0 <= work < len(known):
            raise ValueError(
                f"{what}: co2sim.work is {given(work)}; works are 0 to {len(known) - 1}"
            )
        after = []
        for wait in node.data_deps:
            if wait >= len(nodes):
                raise ValueError(f"{what} waits for node {wait}, which is not there")
            after.append(After(names[wait % size], (first - wait // size * size) // size))
        stream = facts.get("co2sim.stream")
        if not isinstance(stream, str):
            raise ValueError(f"{what}: co2sim.stream is {given(stream)}, no text")  # noqa: TRY004
        body.append(Op(names[place], known[work], visible(stream), tuple(after)))
    return tuple(body)
