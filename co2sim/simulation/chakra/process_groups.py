"""Process groups of a trace: numbers for ranks that meet, and the file that says which they are.

ASTRA-sim reads them from a JSON file of its own, `comm_group.json`: numbers from 1, as texts, to
lists of ranks. A collective without a number is of all ranks.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from co2sim.common import files
from co2sim.common.errors import given
from co2sim.common.files import is_regular, text_of
from co2sim.schedule.schedule import WORLD, Group, Layout, block, peers_of_blocks

FILE = "comm_group.json"
EVERYBODY = ("", "0")
"""Names of the group of all ranks, in ASTRA-sim."""

Members: TypeAlias = Mapping[str, Sequence[int]]
"""Ranks of process groups, ascending, by their names."""


def numbered(groups: Iterable[Group], layout: Layout) -> dict[range, int]:
    """A number from 1 for all ranks that meet, but not for all of a layout, nor for one alone."""
    found: dict[range, int] = {}
    for group in sorted(groups, key=str):
        for rank in range(layout.world_size):
            members = group.members(rank, layout)
            if 1 < len(members) < layout.world_size:
                found.setdefault(members, len(found) + 1)
    return found


def to_json(numbers: Mapping[range, int]) -> str:
    """The file of them."""
    lines = [f'"{number}": {json.dumps(list(ranks))}' for ranks, number in numbers.items()]
    return "{" + ",\n".join(lines) + "}\n"


def read_members(path: Any, ranks: int) -> Members:
    """The process groups in a file; none where there is no such file.

    Raises ValueError and OSError for what is no such file, or names ranks that are not there.
    """
    if not is_regular(path):
        return {}
    tree = files.json_tree(text_of(path))
    if not isinstance(tree, dict):
        raise ValueError(f"it is {given(tree)}; it must be an object")  # noqa: TRY004 - as below
    found = {}
    for name, members in tree.items():
        if not isinstance(members, list) or not all(
            type(rank) is int and 0 <= rank < ranks for rank in members
        ):
            raise ValueError(
                f"group {given(name)} is {given(members)}; it must be a list of ranks, 0 to"
                f" {ranks - 1}"
            )
        found[name] = sorted(set(members))
        if len(found[name]) != len(members) or not members:
            raise ValueError(f"group {given(name)} must have 1 rank or more, each once")
    return found


def group_of(members: Sequence[int], ranks: int) -> Group | None:
    """The group that has such members among so many ranks; None where we have none.

    All ranks, blocks of consecutive ranks, or those of one place in every block.
    """
    size = len(members)
    first, step = members[0], members[1] - members[0] if size > 1 else 1
    if tuple(members) != tuple(range(first, first + size * step, step)) or ranks % size:
        return None
    if size == ranks:
        return WORLD
    if step == 1 and first % size == 0:
        return block(size)
    return peers_of_blocks(step) if step * size == ranks and first < step else None
