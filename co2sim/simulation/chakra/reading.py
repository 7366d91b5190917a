"""Folders of Chakra traces as schedules: those that co2sim wrote, and those of others."""

import heapq
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from co2sim.common.errors import CatalogError, Co2simError, OptionError, given, nearest, visible
from co2sim.common.files import MAX_RECORD_BYTES, is_folder, read_bytes
from co2sim.common.progress import Done
from co2sim.common.resources import require_memory
from co2sim.common.units import Bytes, Seconds, counted
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import (
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Group,
    Kind,
    Layout,
    Op,
    Schedule,
    Work,
)
from co2sim.simulation import metrics
from co2sim.simulation.chakra import works
from co2sim.simulation.chakra.export import FORMAT, MAX_NODES, MAX_RANKS, RankFiles
from co2sim.simulation.chakra.schema import (
    EVERYBODY,
    FILE,
    PREFIX,
    Members,
    attributes,
    group_of,
    messages,
    parsed,
    read_members,
    schema,
)
from co2sim.simulation.costs import traffic
from co2sim.simulation.metrics import Window
from co2sim.simulation.noise import RunOptions
from co2sim.simulation.run import Simulator
from co2sim.simulation.trace import Trace

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
    """Traces of several ranks, with the members of their process groups."""

    def __init__(self, kinds: Any, ranks: int, groups: Members) -> None:
        self._kinds, self._ranks, self._groups = kinds, ranks, groups
        self._known: dict[str, Group | None] = {}

    def body(self, rank: int, nodes: Sequence[Any]) -> list[ForeignStep]:
        """The nodes of a rank, in an order in which they may run. Raises ValueError."""
        order = _ordered(nodes)
        positions = {nodes[index].id: position for position, index in enumerate(order)}
        steps = []
        for index in order:
            node = nodes[index]
            waits = sorted({positions[wait] for wait in (*node.ctrl_deps, *node.data_deps)})
            steps.append(self._step(rank, node, tuple(waits)))
        return steps

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
        group = self._known[name]
        if group is None:
            raise ValueError(
                f"{what} is of ranks {given(list(members))}; of {self._ranks} ranks only all,"
                " blocks of consecutive ones, and those of one place in every block are known"
            )
        if rank not in group.members(members[0], _line(self._ranks)):
            raise ValueError(f"{what} is of the process group {given(name)}, without rank {rank}")
        return group


def _line(ranks: int) -> Layout:
    """The groups of such traces know no nodes."""
    return Layout(1, ranks)


def _ordered(nodes: Sequence[Any]) -> list[int]:
    """Places of nodes in an order in which they may run, the smallest id first. Raises ValueError.

    Kahn, "Topological sorting of large networks", 1962.
    """
    index_of = {node.id: index for index, node in enumerate(nodes)}
    if len(index_of) < len(nodes):
        twice = next(key for key, times in Counter(node.id for node in nodes).items() if times > 1)
        raise ValueError(f"two nodes have the id {twice}")
    left: list[int] = []
    behind: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        waits = {*node.ctrl_deps, *node.data_deps}
        left.append(len(waits))
        for wait in waits:
            if wait not in index_of:
                raise ValueError(f"{_named(node)} waits for node {wait}, which is not there")
            behind.setdefault(index_of[wait], []).append(index)
    free = [(nodes[index].id, index) for index, count in enumerate(left) if not count]
    heapq.heapify(free)
    order = []
    while free:
        _, index = heapq.heappop(free)
        order.append(index)
        for other in behind.get(index, ()):
            left[other] -= 1
            if not left[other]:
                heapq.heappush(free, (nodes[other].id, other))
    if len(order) < len(nodes):
        stuck = next(node for node, count in zip(nodes, left, strict=True) if count)
        raise ValueError(f"{_named(stuck)} waits for itself, by way of others")
    return order


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
    for index, (a, b) in enumerate(zip(first, other, strict=True)):
        if a != b:
            name = next(name for name in a._fields if getattr(a, name) != getattr(b, name))
            raise ValueError(
                f"node {index} in order ({given(b.name)}) has {name} {given(str(getattr(b, name)))}"
                f" on rank {rank}, and {given(str(getattr(a, name)))} on rank 0; all ranks must do"
                " the same"
            )


def schedule(name: str, steps: Sequence[ForeignStep]) -> Schedule:
    """One round of the nodes: elements of collectives are bytes, as the trace knows no type."""
    times = Counter(step.name for step in steps)
    names = [
        step.name if step.name and times[step.name] == 1 else f"{step.name or 'node'}#{index}"
        for index, step in enumerate(steps)
    ]
    body = [
        Op(
            names[index],
            _work(names[index], step),
            _COMPUTE if step.kind is None else _COMMUNICATION,
            tuple(After(names[wait]) for wait in step.waits),
        )
        for index, step in enumerate(steps)
    ]
    return Schedule(visible(name), tuple(body))


def _work(name: str, step: ForeignStep) -> Work:
    if step.kind is None or step.group is None:
        return Compute(name, step.flops, step.memory_bytes)
    return Collective(step.kind, name, step.size, DType.INT8, step.group)


_FILE = re.compile(r"(.+)\.(0|[1-9][0-9]{0,8})\.et", re.DOTALL)
"""ASTRA-sim's names of files."""
_MAX_WAITS = 10_000_000
"""Of all nodes of a file together."""
_MANY = 10_000
"""Nodes whose memory is asked for before they are read."""
_NODE_BYTES: Bytes = 4000.0
"""Of a node while it is read and simulated."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The schedule of a trace of `ranks` ranks.

    `layout` and `rounds` are those that co2sim exported; a trace of others has no layout, and is a
    single round.
    """

    schedule: Schedule
    ranks: int
    layout: Layout | None = None
    rounds: int = 1


def read(path: Path, done: Done | None = None) -> Imported:
    """The schedule of the traces in a folder; with several, `path` is FOLDER/NAME, without .0.et.

    Raises CatalogError, with the first file, node and reason, for what is no Chakra trace, has what
    no schedule can say, or differs between ranks; OptionError without the package.
    """
    folder, name, ranks = _find(path)
    kinds = schema()
    with _at(folder / FILE):
        groups = read_members(folder / FILE, ranks)
    with _at(_path(folder, name, 0)):
        head, *nodes = _decoded(kinds, _content(_path(folder, name, 0)))
        files = _Found(folder, name, ranks, groups, done)
        if is_own(head):
            return _own(files, head, nodes)
        return _foreign(kinds, files, nodes)


@dataclass(frozen=True, slots=True)
class _Found:
    folder: Path
    name: str
    ranks: int
    groups: Members
    done: Done | None

    def others(self) -> Iterator[tuple[int, Path]]:
        """Every rank but the first, with its file."""
        for rank in range(1, self.ranks):
            yield rank, _path(self.folder, self.name, rank)
            if self.done:
                self.done(rank + 1, self.ranks)


def _own(files: _Found, head: Any, nodes: list[Any]) -> Imported:
    """What co2sim wrote: the schedule of the first rank; all files must be those of it."""
    trace = OwnTrace.of(head, nodes)
    if trace.layout.world_size != files.ranks:
        raise ValueError(
            f"its layout has {trace.layout.world_size:,} ranks, and there are {files.ranks:,} files"
        )
    trace.check_groups(files.groups)
    trace.check(0, [head, *nodes])
    for rank, path in files.others():
        with _at(path):
            content = _content(path)
            if content != trace.files.of_rank(rank):
                trace.check(rank, _decoded(schema(), content))
    return Imported(trace.schedule, files.ranks, trace.layout, trace.rounds)


def _foreign(kinds: Any, files: _Found, nodes: list[Any]) -> Imported:
    """What others wrote: the same body on every rank, of nodes that we know."""
    foreign = ForeignTraces(kinds, files.ranks, files.groups)
    first = foreign.body(0, nodes)
    for rank, path in files.others():
        with _at(path):
            _, *others = _decoded(kinds, _content(path))
            check_same(first, foreign.body(rank, others), rank)
    return Imported(schedule(files.name, first), files.ranks)


@contextmanager
def _at(path: Path) -> Iterator[None]:
    """Within, what is wrong is a CatalogError that names the file."""
    try:
        yield
    except CatalogError:
        raise
    except OSError as error:
        raise CatalogError(f"{path}: {error.strerror or error}") from error
    except (ValueError, Co2simError) as error:
        raise CatalogError(f"{path}: {error}") from error


def _find(path: Path) -> tuple[Path, str, int]:
    """Folder, name and number of ranks of the trace at a place. Raises CatalogError."""
    folder, wanted = (path, None) if is_folder(path) else (path.parent, path.name)
    ranks_of: dict[str, set[int]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = _FILE.fullmatch(entry.name)
                if match and (wanted is None or match[1] == wanted):
                    ranks_of.setdefault(match[1], set()).add(int(match[2]))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CatalogError(f"{folder} cannot be read: {reason}") from error
    if not ranks_of:
        raise CatalogError(f"{path} has no Chakra traces: no file is called NAME.0.et")
    if len(ranks_of) > 1:
        names = ", ".join(given(name) for name in sorted(ranks_of)[:3])
        raise CatalogError(
            f"{path} holds {len(ranks_of)} traces, such as {names}; name one:"
            f" {path}/{min(ranks_of)}"
        )
    ((name, ranks),) = ranks_of.items()
    if len(ranks) > MAX_RANKS:
        raise CatalogError(f"{path} holds {len(ranks):,} ranks; at most {MAX_RANKS:,} are read")
    missing = set(range(len(ranks))) - ranks
    if missing:
        raise CatalogError(
            f"{_path(folder, name, min(missing))} is missing: there are {len(ranks):,} files, up to"
            f" rank {max(ranks)}"
        )
    return folder, name, len(ranks)


def _path(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.{rank}.et"


def _content(path: Path) -> bytes:
    return read_bytes(path, MAX_RECORD_BYTES)


def _decoded(kinds: Any, content: bytes) -> list[Any]:
    """The metadata and the nodes of a file. Raises ValueError."""
    first, *others = [*messages(content, MAX_NODES + 1)] or [b""]
    if not first:
        raise ValueError("it is empty; a Chakra trace begins with its metadata")
    if len(others) > _MANY:
        require_memory(_NODE_BYTES * len(others), f"{len(others):,} nodes in a file")
    head = parsed(kinds.GlobalMetadata, first, "message 0")
    nodes = [parsed(kinds.Node, part, f"message {n}") for n, part in enumerate(others, start=1)]
    if not nodes:
        raise ValueError("it has no nodes")
    if sum(len(node.ctrl_deps) + len(node.data_deps) for node in nodes) > _MAX_WAITS:
        raise ValueError(f"its nodes have more than {_MAX_WAITS:,} waits")
    return [head, *nodes]


_SIZES = ("format", "steps", "rounds", "nodes", "gpus_per_node", "sites")


def is_own(head: Any) -> bool:
    """Whether co2sim wrote a file with such metadata."""
    return any(attribute.name.startswith(PREFIX) for attribute in head.attr)


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
        all_works = [works.work_of(text) for text in texts]
        if len(nodes) % rounds:
            raise ValueError(f"{len(nodes):,} nodes are not {rounds:,} rounds of equally many")
        size = len(nodes) // rounds
        body = _body(nodes, size, all_works)
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
        for members, group in self.files.numbers.items():
            if tuple(groups.get(str(group), ())) != tuple(members):
                raise ValueError(
                    f"in {FILE}, group {group} is not of ranks {members[0]}, {members[1]} and so"
                    " on, as the schedule has it"
                )

    def check(self, rank: int, actual: Sequence[Any]) -> None:
        """Raise ValueError, with the first difference, unless a file is what the schedule says."""
        head, *nodes = messages(self.files.of_rank(rank), len(actual) + 1)
        kinds = schema()
        if parsed(kinds.GlobalMetadata, head, "message 0") != actual[0]:
            raise ValueError("its metadata is not that of rank 0")
        for index, (node, other) in enumerate(zip_longest(nodes, actual[1:])):
            if node is None or other is None:
                raise ValueError(
                    f"it has {len(actual) - 1:,} nodes; by its works it has {len(nodes):,}"
                )
            expected = parsed(kinds.Node, node, f"message {index + 1}")
            if expected != other:
                what = f"node {index} ({given(visible(other.name))})"
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


def _body(nodes: Sequence[Any], size: int, all_works: Sequence[Work]) -> tuple[Op, ...]:
    """The ops of a round, from the last one, which has all waits."""
    first = len(nodes) - size
    names = [visible(node.name) for node in nodes[first:]]
    body = []
    for index, node in enumerate(nodes[first:]):
        what = f"node {first + index} ({given(names[index])})"
        if node.id != first + index:
            raise ValueError(f"{what} has the id {node.id}; ids count from 0")
        facts = attributes(node, what)
        work = facts.get("co2sim.work")
        if type(work) is not int or not 0 <= work < len(all_works):
            raise ValueError(
                f"{what}: co2sim.work is {given(work)}; works are 0 to {len(all_works) - 1}"
            )
        after = []
        for wait in node.data_deps:
            if wait >= len(nodes):
                raise ValueError(f"{what} waits for node {wait}, which is not there")
            after.append(After(names[wait % size], (first - wait // size * size) // size))
        stream = facts.get("co2sim.stream")
        if not isinstance(stream, str):
            raise ValueError(f"{what}: co2sim.stream is {given(stream)}, no text")  # noqa: TRY004
        body.append(Op(names[index], all_works[work], visible(stream), tuple(after)))
    return tuple(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Figures of a trace on a cluster; times in seconds, those of communication per round."""

    schedule: str
    cluster: str
    gpus: int
    nodes: int
    precision: str
    steps_per_round: int
    round_time_s: Seconds
    step_time_s: Seconds
    comm_busy_s: Seconds
    exposed_comm_s: Seconds
    wire_bytes_per_gpu_per_step: Bytes
    nic_bytes_per_node_per_step: Bytes
    breakdown_s: dict[str, Seconds]
    steady: bool
    rounds_simulated: int

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Replayed:
    """What is simulated."""

    schedule: Schedule
    cluster: Cluster
    precision: str


def replay(
    trace: Imported, cluster: Cluster, precision: str | None = None, done: Done | None = None
) -> Replay:
    """Simulate the schedule of a trace on as many GPUs of a cluster as it has ranks.

    A trace that co2sim wrote is repeated until its rounds do, as `co2sim run` does; one of others
    runs once, from its start to the end of its last node. `precision` defaults to what the GPU
    trains in. Raises OptionError where the cluster does not fit: its nodes, if it is a trace of
    co2sim, must be as large as those of the trace.
    """
    cluster = cluster.resized(trace.ranks)
    if trace.layout and trace.layout != cluster.layout:
        raise OptionError(
            f"the trace is of {_words(trace.layout)}, and {trace.ranks} GPUs of {cluster.name} are"
            f" {_words(cluster.layout)}; they must be the same, as ranks meet by their nodes"
        )
    precision = precision or cluster.gpu.preferred_precision
    if precision not in cluster.gpu.precisions:
        suggestion = nearest(precision, cluster.gpu.precisions)
        raise OptionError(f"{cluster.gpu.name} has no {precision} for all of a trace; {suggestion}")
    schedule = trace.schedule
    simulator = Simulator(RunOptions(), _Replayed(schedule, cluster, precision), done)
    if trace.layout:
        traced, rounds, steady = simulator.until_steady()
    else:
        traced, rounds, steady = simulator.rounds(1), 1, True
    free = simulator.rounds(traced.rounds, free=True)
    during, without = (_window(trace, run, rounds) for run in (traced, free))
    busy = metrics.communication(traced, schedule, during).busy
    sent = traffic(schedule, cluster)
    return Replay(
        schedule=schedule.name,
        cluster=cluster.name,
        gpus=trace.ranks,
        nodes=cluster.nodes,
        precision=precision,
        steps_per_round=schedule.steps,
        round_time_s=during.round_time,
        step_time_s=during.round_time / schedule.steps,
        comm_busy_s=busy,
        exposed_comm_s=metrics.exposed_by_difference(busy, during.round_time, without.round_time),
        wire_bytes_per_gpu_per_step=sent.gpu / schedule.steps,
        nic_bytes_per_node_per_step=sent.nic / schedule.steps,
        breakdown_s=metrics.breakdown(traced, schedule),
        steady=steady,
        rounds_simulated=traced.rounds,
    )


def _window(trace: Imported, traced: Trace, rounds: int) -> Window:
    """The rounds that are measured; of a trace of others, all of it."""
    if trace.layout:
        return metrics.window(traced, trace.schedule, rounds)
    return Window(0.0, float(np.nanmax(traced.grid(trace.schedule).ends)), 1)


def _words(layout: Layout) -> str:
    sites = f" at {counted(layout.sites, 'site')}" if layout.sites > 1 else ""
    return f"{counted(layout.nodes, 'node')} of {counted(layout.gpus_per_node, 'GPU')}{sites}"
