"""Checkpoints of a training: a folder for each, written by torch.distributed.checkpoint.

Workers of local updates differ, so every rank saves what it holds, under its own name. A checkpoint
is written beside its place and then renamed: one that has its name is whole. All ranks must see
the same folder.
"""

import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from realrun.errors import CheckpointError
from realrun.execute.world import World
from realrun.train.folder import (
    CHECKPOINTS,
    IDENTITY,
    checkpoint_name,
    checkpoints,
    identity_text,
)

_KEPT = 2
"""Checkpoints that stay; older ones are removed."""

_REST = "rest"
"""Name of what is no tensor: torch.save of it as bytes, with names in the places of tensors."""

_MARK = "tensor:"


def save(
    folder: Path, step: int, state: Mapping[str, Any], identity: Mapping[str, Any], world: World
) -> Path:
    """Write this rank's `state`: mappings and lists of tensors and plain values.

    All ranks call it. Raises CheckpointError when it cannot be written.
    """
    place = folder / CHECKPOINTS / checkpoint_name(step)
    draft = place.with_name(f".{place.name}")
    named: dict[str, Tensor] = {}
    rest = _split(state, "", named)
    out = io.BytesIO()
    torch.save(rest, out)
    named[_REST] = torch.frombuffer(bytearray(out.getvalue()), dtype=torch.uint8)
    try:
        if world.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            text = identity_text(identity, world.layout.world_size)
            (draft / IDENTITY).write_text(text)
        dist.barrier()
        mine = {f"rank{world.rank}.{name}": tensor for name, tensor in named.items()}
        write_tensors(mine, checkpoint_id=draft)  # ends on all ranks once all of it is written
        if world.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
            draft.rename(place)
            for old in checkpoints(folder)[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        dist.barrier()
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"cannot write the checkpoint {place}: {_one_line(error)}") from error
    return place


def load(checkpoint: Path, world: World) -> dict[str, Any]:
    """This rank's state. All ranks call it. Raises CheckpointError when it is not whole."""
    prefix = f"rank{world.rank}."
    try:
        metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        named = {
            name: torch.empty(one.size, dtype=one.properties.dtype)
            for name, one in metadata.items()
            if name.startswith(prefix) and isinstance(one, TensorStorageMetadata)
        }
        read_tensors(named, checkpoint_id=checkpoint)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
        rest = io.BytesIO(tensors.pop(_REST).numpy().tobytes())
        found: dict[str, Any] = _join(torch.load(rest, weights_only=True), tensors)
    except (OSError, KeyError, ValueError, EOFError, CheckpointException) as error:
        raise CheckpointError(
            f"cannot read the checkpoint {checkpoint}: {_one_line(error)}"
        ) from error
    return found


def _split(value: Any, name: str, named: dict[str, Tensor]) -> Any:
    """The same value with names in place of its tensors, which go into `named`."""
    if isinstance(value, Tensor):
        named[name] = value.detach()
        return _MARK + name
    if isinstance(value, Mapping):
        return {key: _split(one, f"{name}/{key}", named) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_split(one, f"{name}/{at}", named) for at, one in enumerate(value))
    return value


def _join(value: Any, named: Mapping[str, Tensor]) -> Any:
    """The other way round."""
    if isinstance(value, str) and value.startswith(_MARK):
        return named[value.removeprefix(_MARK)]
    if isinstance(value, dict):
        return {key: _join(one, named) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_join(one, named) for one in value)
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
