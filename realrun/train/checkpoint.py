"""Checkpoints of a training: a folder for each, with the tensors and the numbers of every rank.

Workers of local updates differ, so every rank saves what it holds, under its own name. Nothing that
is read can run code: tensors are safetensors, all else is JSON. Every file is compared with the
manifest before it is used. A checkpoint is written beside its place and then renamed: one that has
its name is whole. All ranks must see the same folder.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import astuple
from pathlib import Path
from typing import Any

from realrun.errors import CheckpointError, DamagedError
from realrun.execute.world import World
from realrun.train import draft as drafts
from realrun.train.everywhere import everywhere
from realrun.train.folder import (
    CHECKPOINTS,
    IDENTITY,
    check_identity,
    checkpoint_name,
    identity_text,
    shown,
)
from realrun.train.manifest import (
    MOST_REST,
    FileSum,
    Manifest,
    identity_of,
    is_old,
    offer,
    rank_files,
    unread,
)
from realrun.train.tensor_file import join, read_tensors, split, tensor_parts


def save(
    folder: Path, step: int, state: Mapping[str, Any], identity: Mapping[str, Any], world: World
) -> Path:
    """Write this rank's `state`: mappings and lists of tensors and plain values.

    All ranks call it. Raises CheckpointError, the same on all ranks, when one cannot write; then
    nothing is left of it, and the checkpoints before are as they were.
    """
    place, ranks = folder / CHECKPOINTS / checkpoint_name(step), world.layout.world_size
    what = f"cannot write the checkpoint {shown(place)}"
    with ExitStack() as locks:

        def begin() -> str:
            if world.rank:
                return ""
            made = drafts.begin(place)
            locks.callback(drafts.remove, made)  # once it has been renamed, there is nothing
            locks.enter_context(drafts.held(made))
            return made.name

        def write() -> str:
            with drafts.held(draft):
                sums = _write(draft, world.rank, state)
                if world.rank == 0:
                    text = identity_text(identity, ranks).encode()
                    sums[IDENTITY] = drafts.write_file(draft / IDENTITY, [text])
            return json.dumps({name: astuple(one) for name, one in sums.items()})

        def finish() -> str:
            if world.rank == 0:
                told = [json.loads(text) for text in written]
                sums = {name: FileSum(*one) for files in told for name, one in files.items()}
                drafts.finish(draft, place, Manifest(step, ranks, sums))
            return ""

        draft = place.with_name(everywhere(world.device, what, begin)[0])
        written = everywhere(world.device, what, write)
        everywhere(world.device, what, finish)
    return place


def load(
    checkpoint: Path, identity: Mapping[str, Any], world: World, *, trust: bool = False
) -> dict[str, Any]:
    """This rank's state. All ranks call it.

    Raises CheckpointError, the same on all ranks, when a file is not as it was written (the error
    names it, and the last checkpoint that is whole), or when it is of another training. With
    `trust` a checkpoint of the old format is read, too, which can run code that is in it.
    """
    found: list[dict[str, Any]] = []

    def read() -> str:
        text = identity_of(checkpoint, trust=trust)
        check_identity(text, identity, world.layout.world_size)
        if trust and is_old(checkpoint):
            from realrun.train.pickled import read_pickled  # noqa: PLC0415 - only when asked for

            found.append(read_pickled(checkpoint, world.rank))
        else:
            found.append(_read(checkpoint, world.rank))
        return ""

    reading(checkpoint, world, read)
    return found[0]


def reading(checkpoint: Path, world: World, work: Callable[[], str]) -> None:
    """Do `work` on all ranks, a part of taking over a checkpoint.

    Raises CheckpointError, the same on all ranks, that says which checkpoint is whole instead where
    a file is damaged.
    """
    try:
        everywhere(world.device, unread(checkpoint), work)
    except DamagedError as error:
        (instead, *_) = everywhere(
            world.device, unread(checkpoint), lambda: "" if world.rank else offer(checkpoint)
        )
        raise DamagedError(f"{error}; {instead}", everywhere=True) from error


def _write(draft: Path, rank: int, state: Mapping[str, Any]) -> dict[str, FileSum]:
    """Write the files of a rank; their checksums."""
    named: dict[str, Any] = {}
    rest = json.dumps(split(state, "", named)).encode()
    tensors, other = rank_files(rank)
    if len(rest) > MOST_REST:
        raise CheckpointError(f"{other}: it would be larger than {MOST_REST // 10**6} MB")
    return {
        tensors: drafts.write_file(draft / tensors, tensor_parts(named)),
        other: drafts.write_file(draft / other, [rest]),
    }


def _read(checkpoint: Path, rank: int) -> dict[str, Any]:
    """The state of a rank, from files that are as they were written."""
    manifest = Manifest.of(checkpoint)
    tensors, other = rank_files(rank)
    try:
        with manifest.reading(checkpoint, tensors) as file:
            named = read_tensors(file)
    except ValueError as error:
        raise DamagedError(f"{tensors}: {shown(error)}") from error
    try:
        found: dict[str, Any] = join(json.loads(manifest.read(checkpoint, other)), named)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{other}: it holds no state") from error
    return found
