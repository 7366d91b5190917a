"""Folders of Chakra traces as schedules: those that co2sim wrote, and those of others."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from co2sim.chakra import foreign, own
from co2sim.chakra.export import MOST_NODES, MOST_RANKS
from co2sim.chakra.process_groups import FILE, Members, read_members
from co2sim.chakra.schema import messages, parsed, schema
from co2sim.errors import CatalogError, Co2simError
from co2sim.files import MOST_RECORD_BYTES, is_folder, read_bytes
from co2sim.groups import Layout
from co2sim.machine import require_memory
from co2sim.progress import Done
from co2sim.schedule import Schedule
from co2sim.units import Bytes
from co2sim.visible import given

_FILE = re.compile(r"(.+)\.(0|[1-9][0-9]{0,8})\.et", re.DOTALL)
"""ASTRA-sim's names of files."""
_MOST_WAITS = 10_000_000
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


def read(place: Path, done: Done | None = None) -> Imported:
    """The schedule of the traces in a folder; with several, `place` is FOLDER/NAME, without .0.et.

    Raises CatalogError, with the first file, node and reason, for what is no Chakra trace, has what
    no schedule of ours can say, or differs between ranks; OptionError without the package.
    """
    folder, name, ranks = _find(place)
    kinds = schema()
    with _at(folder / FILE):
        groups = read_members(folder / FILE, ranks)
    with _at(_path(folder, name, 0)):
        head, *nodes = _decoded(kinds, _content(_path(folder, name, 0)))
        found = _Found(folder, name, ranks, groups, done)
        if own.is_own(head):
            return _own(found, head, nodes)
        return _foreign(kinds, found, nodes)


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


def _own(found: _Found, head: Any, nodes: list[Any]) -> Imported:
    """What co2sim wrote: the schedule of the first rank; all files must be those of it."""
    trace = own.OwnTrace.of(head, nodes)
    if trace.layout.world_size != found.ranks:
        raise ValueError(
            f"its layout has {trace.layout.world_size:,} ranks, and there are {found.ranks:,} files"
        )
    trace.check_groups(found.groups)
    trace.check(0, [head, *nodes])
    for rank, path in found.others():
        with _at(path):
            content = _content(path)
            if content != trace.files.of_rank(rank):
                trace.check(rank, _decoded(schema(), content))
    return Imported(trace.schedule, found.ranks, trace.layout, trace.rounds)


def _foreign(kinds: Any, found: _Found, nodes: list[Any]) -> Imported:
    """What others wrote: the same body on every rank, of nodes that we know."""
    known = foreign.ForeignTraces(kinds, found.ranks, found.groups)
    first = known.body(0, nodes)
    for rank, path in found.others():
        with _at(path):
            _, *others = _decoded(kinds, _content(path))
            foreign.check_same(first, known.body(rank, others), rank)
    return Imported(foreign.schedule(found.name, first), found.ranks)


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


def _find(place: Path) -> tuple[Path, str, int]:
    """Folder, name and number of ranks of the trace at a place. Raises CatalogError."""
    folder, wanted = (place, None) if is_folder(place) else (place.parent, place.name)
    found: dict[str, set[int]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = _FILE.fullmatch(entry.name)
                if match and (wanted is None or match[1] == wanted):
                    found.setdefault(match[1], set()).add(int(match[2]))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CatalogError(f"{folder} cannot be read: {reason}") from error
    if not found:
        raise CatalogError(f"{place} has no Chakra traces: no file is called NAME.0.et")
    if len(found) > 1:
        names = ", ".join(given(name) for name in sorted(found)[:3])
        raise CatalogError(
            f"{place} holds {len(found)} traces, such as {names}; name one: {place}/{min(found)}"
        )
    ((name, ranks),) = found.items()
    if len(ranks) > MOST_RANKS:
        raise CatalogError(f"{place} holds {len(ranks):,} ranks; at most {MOST_RANKS:,} are read")
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
    return read_bytes(path, MOST_RECORD_BYTES)


def _decoded(kinds: Any, content: bytes) -> list[Any]:
    """The metadata and the nodes of a file. Raises ValueError."""
    first, *others = [*messages(content, MOST_NODES + 1)] or [b""]
    if not first:
        raise ValueError("it is empty; a Chakra trace begins with its metadata")
    if len(others) > _MANY:
        require_memory(_NODE_BYTES * len(others), f"{len(others):,} nodes in a file")
    head = parsed(kinds.GlobalMetadata, first, "message 0")
    nodes = [parsed(kinds.Node, part, f"message {n}") for n, part in enumerate(others, start=1)]
    if not nodes:
        raise ValueError("it has no nodes")
    if sum(len(node.ctrl_deps) + len(node.data_deps) for node in nodes) > _MOST_WAITS:
        raise ValueError(f"its nodes have more than {_MOST_WAITS:,} waits")
    return [head, *nodes]
