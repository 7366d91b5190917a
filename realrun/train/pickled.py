"""Checkpoints of the old format, which torch.distributed.checkpoint wrote.

Reading one runs code that is in it, if there is any: its `.metadata` is a pickle. So they are read
only with --trust. Nothing writes them any more.
"""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from realrun.errors import CheckpointError

_REST = "rest"
"""Name of what is no tensor: torch.save of it as bytes, with names in the places of tensors."""

_MARK = "tensor:"


def read_pickled(checkpoint: Path, rank: int) -> dict[str, Any]:
    """A rank's state. Runs what is in the checkpoint! Raises CheckpointError."""
    prefix = f"rank{rank}."
    try:
        metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        named = {
            name: torch.empty(one.size, dtype=one.properties.dtype)
            for name, one in metadata.items()
            if name.startswith(prefix) and isinstance(one, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that each rank reads by itself
            load(named, checkpoint_id=checkpoint, no_dist=True)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
        rest = io.BytesIO(tensors.pop(_REST).numpy().tobytes())
        found: dict[str, Any] = _join(torch.load(rest, weights_only=True), tensors)
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error
    return found


def _join(value: Any, named: Mapping[str, Tensor]) -> Any:
    """The value with its tensors in place of their names."""
    if isinstance(value, str) and value.startswith(_MARK):
        return named[value.removeprefix(_MARK)]
    if isinstance(value, dict):
        return {key: _join(one, named) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_join(one, named) for one in value)
    return value
