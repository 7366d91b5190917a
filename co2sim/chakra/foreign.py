"""Traces that others wrote, as a schedule: nodes that compute, and collectives.

A rank runs one compute and one collective at a time, in the order of ids where waits allow, which
is what ASTRA-sim does.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from co2sim.chakra import works
from co2sim.chakra.process_groups import EVERYBODY, Members, group_of
from co2sim.chakra.schema import PREFIX, attributes
from co2sim.groups import WORLD, Group, Layout
from co2sim.schedule import After, Op, Schedule
from co2sim.visible import given, visible
from co2sim.work import Collective, Compute, DType, Kind, Work

_COMPUTE, _COMMUNICATION = "compute", "communication"
"""The streams of such a schedule."""
_KINDS = {name: kind for kind, name in works.COLLECTIVES.items()}
_ALLOWED = (
    "allowed are COMP_NODE with num_ops, and COMM_COLL_NODE of"
    f" {', '.join(sorted(_KINDS))} with comm_size"
)


class ForeignStep(NamedTuple):
    """A node that is known: its place is in the order in which it may run, as are its waits."""

    name: str
    flops: float
    memory_bytes: float
    kind: Kind | None
    size: int
    group: Group | None
    waits: tuple[int, ...]


class ForeignTraces:
    """Traces of so many ranks, with the members of their process groups."""

    def __init__(self, kinds: Any, ranks: int, groups: Members) -> None:
        self._kinds, self._ranks, self._groups = kinds, ranks, groups
        self._known: dict[str, Group | None] = {}

    def body(self, rank: int, nodes: Sequence[Any]) -> list[ForeignStep]:
        """The nodes of a rank, in an order in which they may run. Raises ValueError."""
        order = _ordered(nodes)
        place = {nodes[number].id: at for at, number in enumerate(order)}
        found = []
        for number in order:
            node = nodes[number]
            waits = sorted({place[wait] for wait in (*node.ctrl_deps, *node.data_deps)})
            found.append(self._step(rank, node, tuple(waits)))
        return found

    def _step(self, rank: int, node: Any, waits: tuple[int, ...]) -> ForeignStep:
        what = _named(node)
        facts = attributes(node, what)
        kind = self._kinds.NodeType.Name(node.type) if node.type in self._types else node.type
        if any(fact.startswith(PREFIX) for fact in facts):
            raise ValueError(f"{what} is of co2sim, and the metadata of the file is not")
        if facts.get("is_cpu_op"):
            raise ValueError(f"{what} is an op of the CPU (is_cpu_op); only GPUs are known")
        name = visible(node.name)
        if kind == "COMP_NODE" and "num_ops" in facts:
            flops = _number(what, facts, "num_ops")
            memory = _number(what, facts, "tensor_size") if "tensor_size" in facts else 0.0
            return ForeignStep(name, flops, memory, None, 0, None, waits)
        names = self._kinds.CollectiveCommType
        type_ = facts.get("comm_type")
        if kind == "COMM_COLL_NODE" and type(type_) is int and type_ in names.values():
            kind = names.Name(type_)
            if kind in _KINDS and "comm_size" in facts:
                size = _number(what, facts, "comm_size", least=1)
                return self._collective(rank, node, facts, _KINDS[kind], int(size), waits)
        lacks = " without num_ops" if kind == "COMP_NODE" else ""
        raise ValueError(f"{what} is a {kind}{lacks}; {_ALLOWED}")

    @property
    def _types(self) -> Any:
        return self._kinds.NodeType.values()

    def _collective(
        self,
        rank: int,
        node: Any,
        facts: dict[str, Any],
        kind: Kind,
        size: int,
        waits: tuple[int, ...],
    ) -> ForeignStep:
        what = _named(node)
        dims = facts.get("involved_dim", [])
        if not isinstance(dims, list) or not all(dims):
            raise ValueError(
                f"{what}: involved_dim is {given(dims)}; only groups of ranks are known"
            )
        name = facts.get("pg_name", "")
        if not isinstance(name, str):
            raise ValueError(f"{what}: pg_name is {given(name)}, no text")  # noqa: TRY004 - as others
        group = self._group(what, rank, name)
        members = len(group.members(rank, _line(self._ranks)))
        if kind is Kind.ALL_GATHER:
            size *= members
        return ForeignStep(visible(node.name), 0.0, 0.0, kind, size, group, waits)

    def _group(self, what: str, rank: int, name: str) -> Group:
        """The group of a process group that a rank is in. Raises ValueError."""
        if name in EVERYBODY:
            return WORLD
        if name not in self._groups:
            raise ValueError(f"{what} is of the process group {given(name)}, which no file names")
        members = self._groups[name]
        if name not in self._known:
            self._known[name] = group_of(members, self._ranks)
        found = self._known[name]
        if found is None:
            raise ValueError(
                f"{what} is of ranks {given(list(members))}; of {self._ranks} ranks only all,"
                " blocks of consecutive ones, and those of one place in every block are known"
            )
        if rank not in found.members(members[0], _line(self._ranks)):
            raise ValueError(f"{what} is of the process group {given(name)}, without rank {rank}")
        return found


def _line(ranks: int) -> Layout:
    """The groups of such traces know no nodes."""
    return Layout(1, ranks)


def _ordered(nodes: Sequence[Any]) -> list[int]:
    """Places of nodes in an order in which they may run, the smallest id first. Raises ValueError.

    Kahn, "Topological sorting of large networks", 1962.
    """
    place = {node.id: number for number, node in enumerate(nodes)}
    if len(place) < len(nodes):
        twice = next(one for one, times in Counter(node.id for node in nodes).items() if times > 1)
        raise ValueError(f"two nodes have the id {twice}")
    left: list[int] = []
    behind: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        waits = {*node.ctrl_deps, *node.data_deps}
        left.append(len(waits))
        for wait in waits:
            if wait not in place:
                raise ValueError(f"{_named(node)} waits for node {wait}, which is not there")
            behind.setdefault(place[wait], []).append(number)
    free = [(nodes[number].id, number) for number, count in enumerate(left) if not count]
    heapq.heapify(free)
    found = []
    while free:
        _, number = heapq.heappop(free)
        found.append(number)
        for other in behind.get(number, ()):
            left[other] -= 1
            if not left[other]:
                heapq.heappush(free, (nodes[other].id, other))
    if len(found) < len(nodes):
        stuck = next(node for node, count in zip(nodes, left, strict=True) if count)
        raise ValueError(f"{_named(stuck)} waits for itself, by way of others")
    return found


def _named(node: Any) -> str:
    return f"node {node.id} ({given(visible(node.name))})"


def _number(what: str, facts: dict[str, Any], name: str, least: int = 0) -> float:
    value = facts[name]
    if type(value) not in {int, float} or not least <= value <= works.MOST:
        raise ValueError(
            f"{what}: {name} is {given(value)}; it must be a number of {least} to {works.MOST:.3g}"
        )
    return float(value)


def check_same(first: Sequence[ForeignStep], other: Sequence[ForeignStep], rank: int) -> None:
    """Raise ValueError, with the first difference, unless two ranks do the same."""
    if len(first) != len(other):
        raise ValueError(
            f"rank {rank} has {len(other):,} nodes, and rank 0 {len(first):,}; all ranks must do"
            " the same"
        )
    for place, (a, b) in enumerate(zip(first, other, strict=True)):
        if a != b:
            name = next(name for name in a._fields if getattr(a, name) != getattr(b, name))
            raise ValueError(
                f"node {place} in order ({given(b.name)}) has {name} {given(str(getattr(b, name)))}"
                f" on rank {rank}, and {given(str(getattr(a, name)))} on rank 0; all ranks must do"
                " the same"
            )


def schedule(name: str, steps: Sequence[ForeignStep]) -> Schedule:
    """One round of the nodes: elements of collectives are bytes, as the trace knows no type."""
    times = Counter(step.name for step in steps)
    names = [
        step.name if step.name and times[step.name] == 1 else f"{step.name or 'node'}#{place}"
        for place, step in enumerate(steps)
    ]
    body = [
        Op(
            names[place],
            _work(names[place], step),
            _COMPUTE if step.kind is None else _COMMUNICATION,
            tuple(After(names[wait]) for wait in step.waits),
        )
        for place, step in enumerate(steps)
    ]
    return Schedule(visible(name), tuple(body))


def _work(name: str, step: ForeignStep) -> Work:
    if step.kind is None or step.group is None:
        return Compute(name, step.flops, step.memory_bytes)
    return Collective(step.kind, name, step.size, DType.INT8, step.group)
