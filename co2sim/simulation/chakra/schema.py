"""The schema of Chakra, and files of its messages: each has its length, as a varint, before it.

Source: et_def.proto and protolib.py of MLCommons' package mlc-chakra 1.0.
"""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import count
from typing import Any, TypeAlias

from co2sim.common import files
from co2sim.common.errors import OptionError, given, visible
from co2sim.common.files import MAX_BYTES, is_regular, text_of
from co2sim.schedule.schedule import WORLD, Group, Layout, block, peers_of_blocks

Message: TypeAlias = Any
"""A message of protobuf, whose classes are made when the schema is loaded."""

VERSION = "1.0.0"
"""Of the schema, as MLCommons' own generator writes it."""

PREFIX = "co2sim."
"""Of the names of attributes that only co2sim writes."""

_SHIFTS = range(0, 35, 7)
_MORE = 0x80
"""Of a byte of a varint: another follows."""


def schema() -> Any:
    """The module of MLCommons' package that holds the messages. Raises OptionError without it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a protobuf one version newer than the schema
            return import_module("chakra.schema.protobuf.et_def_pb2")
    except Exception as error:  # protobuf has errors of its own for versions that do not fit
        raise OptionError(
            "Chakra traces need the package mlc-chakra of MLCommons, and a protobuf that it takes:"
            f" pip install '.[chakra]' ({type(error).__name__}: {error})"
        ) from error


def delimited(message: bytes) -> bytes:
    """A message with its length before it."""
    rest, length = len(message), bytearray()
    while rest >= _MORE:
        length.append(rest % _MORE | _MORE)
        rest //= _MORE
    length.append(rest)
    return bytes(length) + message


def messages(content: bytes, most: int) -> Iterator[bytes]:
    """The messages of a file. Raises ValueError for what is none, or for more than `most`."""
    position = 0
    for index in count():
        if position == len(content):
            return
        if index >= most:
            raise ValueError(f"it holds more than {most:,} messages")
        size = 0
        for shift in _SHIFTS:
            if position == len(content):
                break
            byte = content[position]
            position += 1
            size |= byte % _MORE << shift
            if byte < _MORE:
                break
        else:
            raise ValueError(f"message {index} has no length; it is no file of Chakra messages")
        if not 0 < size <= min(MAX_BYTES, len(content) - position):
            raise ValueError(
                f"message {index} is {size:,} bytes long, and {len(content) - position:,} follow; a"
                f" message has 1 to {MAX_BYTES:,}"
            )
        yield content[position : position + size]
        position += size


def parsed(kind: type[Message], content: bytes, what: str) -> Message:
    """A message of a kind. Raises ValueError for what is none."""
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - of an extra

    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise ValueError(f"{what} is no {kind.DESCRIPTOR.name} of Chakra") from error


def attributes(message: Message, what: str) -> dict[str, Any]:
    """The attributes of a message by name; lists as lists. Raises ValueError for a name twice."""
    values: dict[str, Any] = {}
    for attribute in message.attr:
        kind = attribute.WhichOneof("value") or ""
        if attribute.name in values:
            raise ValueError(f"{what} has its attribute {visible(attribute.name)!r} twice")
        value: Any = getattr(attribute, kind) if kind else None
        values[attribute.name] = list(value.values) if kind.endswith("_list") else value
    return values


FILE = "comm_group.json"
EVERYBODY = ("", "0")
"""Names of the group of all ranks, in ASTRA-sim."""

Members: TypeAlias = Mapping[str, Sequence[int]]
"""Ranks of process groups, ascending, by their names."""


def numbered(groups: Iterable[Group], layout: Layout) -> dict[range, int]:
    """A number from 1 for all ranks that meet, but not for all of a layout, nor for one alone."""
    numbers: dict[range, int] = {}
    for group in sorted(groups, key=str):
        for rank in range(layout.world_size):
            members = group.members(rank, layout)
            if 1 < len(members) < layout.world_size:
                numbers.setdefault(members, len(numbers) + 1)
    return numbers


def to_json(numbers: Mapping[range, int]) -> str:
    """The file of them."""
    lines = [f'"{group}": {json.dumps(list(ranks))}' for ranks, group in numbers.items()]
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
    groups = {}
    for name, members in tree.items():
        if not isinstance(members, list) or not all(
            type(rank) is int and 0 <= rank < ranks for rank in members
        ):
            raise ValueError(
                f"group {given(name)} is {given(members)}; it must be a list of ranks, 0 to"
                f" {ranks - 1}"
            )
        groups[name] = sorted(set(members))
        if len(groups[name]) != len(members) or not members:
            raise ValueError(f"group {given(name)} must have 1 rank or more, each once")
    return groups


def group_of(members: Sequence[int], ranks: int) -> Group | None:
    """The group with these members, by the number of ranks; None if there is no such group.

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
