"""What every rank adds to the checkpoint of another library: workers hold different models.

A folder with two files for each rank: tensors as safetensors, and all else as JSON, which holds
the checksums of both. Nothing that is read can run code.
"""

import hashlib
import json
import secrets
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from co2sim.units import counted
from realrun.algorithms import LocalUpdate
from realrun.errors import CheckpointError, DamagedError
from realrun.train.draft import sync, write_file
from realrun.train.everywhere import everywhere
from realrun.train.folder import shown
from realrun.train.manifest import FileSum, Manifest, rank_files, read_file
from realrun.train.tensor_file import join, read_tensors, split, tensor_parts

FOLDER = "local_updates"
"""In a checkpoint that is a folder."""


def save(folder: Path, algorithm: LocalUpdate) -> None:
    """Write what this rank holds: model, optimizers and algorithm. All ranks call it.

    Raises CheckpointError, the same on all ranks, when one cannot write.
    """
    rank, ranks = _me()
    state = {
        "model": dict(algorithm.model.state_dict()),
        "optimizers": [one.state_dict() for one in algorithm.optimizers],
        "algorithm": next(iter(algorithm.state_dict().values())),
    }

    def write() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        tensors, other = rank_files(rank)
        named: dict[str, torch.Tensor] = {}
        rest = split(state, "", named)
        found = _write(folder / tensors, tensor_parts(named))
        body = json.dumps({"ranks": ranks, "tensors": asdict(found), "state": rest}).encode()
        _write(folder / other, [body, b"\n", hashlib.sha256(body).hexdigest().encode(), b"\n"])
        sync(folder)
        return ""

    everywhere(_device(algorithm), f"cannot write {shown(folder)}", write)


def load(folder: Path, algorithm: LocalUpdate) -> None:
    """Go on from what `save` wrote. All ranks call it.

    With another number of ranks they go on from the anchor, which a warning says. Raises
    CheckpointError, the same on all ranks, when a file is not as it was written or of another
    number of optimizers, and OptionError when it is of another run.
    """
    (rank, ranks), found = _me(), []

    def read() -> str:
        own = rank if _read_other(folder, 0)["ranks"] == ranks else 0
        other = _read_other(folder, own)
        state = join(other["state"], _read_tensors(folder, own, other))
        if len(state["optimizers"]) != len(algorithm.optimizers):
            raise CheckpointError(
                f"it is of {counted(len(state['optimizers']), 'optimizer')}, and here are"
                f" {len(algorithm.optimizers)}"
            )
        found.append((other["ranks"], state))
        return ""

    everywhere(_device(algorithm), f"cannot read {shown(folder)}", _in_a_line(read))
    ((before, state),) = found
    for optimizer, own in zip(algorithm.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(own)
    if before != ranks:
        algorithm.load_anchor({"rank0": state["algorithm"]})
        if rank == 0:
            warnings.warn(
                f"{shown(folder)} is of {before} ranks, and here are {ranks}: all begin at the"
                " anchor, with the optimizer of rank 0; what the others had learned since their"
                " last averages is lost",
                stacklevel=2,
            )
        return
    algorithm.model.load_state_dict(state["model"])
    algorithm.load_state_dict({f"rank{rank}": state["algorithm"]})


def _in_a_line(read: Callable[[], str]) -> Callable[[], str]:
    """What a file does not hold, though its checksum is right, is damage as well."""

    def careful() -> str:
        try:
            return read()
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DamagedError(f"a file has another form: {shown(repr(error))}") from error

    return careful


def _write(path: Path, parts: list[bytes | memoryview]) -> FileSum:
    """Write a file beside its place, then rename it: whatever was there is whole until then."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        found = write_file(draft, parts)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return found


def _read_other(folder: Path, rank: int) -> dict[str, Any]:
    name = rank_files(rank)[1]
    body, _, given = read_file(folder / name).rstrip(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != given:
        raise DamagedError(f"{name}: it is not what was written")
    found: dict[str, Any] = json.loads(body)
    return found


def _read_tensors(folder: Path, rank: int, other: dict[str, Any]) -> dict[str, torch.Tensor]:
    name = rank_files(rank)[0]
    sums = Manifest(0, other["ranks"], {name: FileSum(**other["tensors"])})
    try:
        with sums.reading(folder, name) as file:
            return read_tensors(file)
    except ValueError as error:
        raise DamagedError(f"{name}: {shown(error)}") from error


def _me() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _device(algorithm: LocalUpdate) -> torch.device:
    return next(algorithm.model.parameters()).device
