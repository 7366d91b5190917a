"""Checkpoints of a training: a folder with a file of tensors for each rank, and state.json.

Workers of local updates differ, so every rank saves what it holds. Nothing that is read can run
code: tensors are safetensors, all else is JSON. A checkpoint is written beside its place and then
renamed: one that has its name is whole. All ranks must see the same folder, and fail together:
all raise one error.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from realrun.errors import CheckpointError, DamagedError
from realrun.execute.world import World
from realrun.train import folder as folders

_CAUSE = 200
"""Characters of an error, at most."""


def run_on_all_ranks(what: str, work: Callable[[], Any]) -> list[Any]:
    """Do `work` on all ranks; what it gave on each. All ranks call it.

    If it fails on any rank, all raise the same CheckpointError: `what`,
    the rank and its error.
    """
    result, cause, damaged = None, "", False
    try:
        result = work()
    except (OSError, MemoryError, CheckpointError) as error:
        cause, damaged = _cause(error), isinstance(error, DamagedError)
    answers = _gather((result, cause, damaged))
    causes = [answer[1] for answer in answers]
    if not any(causes):
        return [answer[0] for answer in answers]
    first = next(rank for rank, cause_of_rank in enumerate(causes) if cause_of_rank)
    which = "" if len(set(causes)) == 1 else f"rank {first}: "
    kind = DamagedError if answers[first][2] else CheckpointError
    raise kind(f"{what}: {which}{causes[first]}", everywhere=True)


def _cause(error: Exception) -> str:
    """Why, in one line: "rank0.safetensors: No space left on device"."""
    if isinstance(error, OSError) and error.strerror:
        name = f"{str(error.filename).rsplit('/', 1)[-1]}: " if error.filename else ""
        return folders.shown(f"{name}{error.strerror}", _CAUSE)
    return folders.shown(str(error) or "out of memory", _CAUSE)


def _gather(value: Any) -> list[Any]:
    """That of every rank."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


_KEPT = 2
"""Checkpoints that stay; older ones are removed."""

_DRAFT = re.compile(r"\..+\.[0-9a-f]{16}")
"""Names of folders that are being written or removed, see `_beside`."""

_DTYPES = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
}
"""What all versions of safetensors write and read."""

_MAX_HEADER = 16_000_000
"""Bytes, some 150 for each tensor; safetensors parses six times as many, which takes 2 GB."""


def save(
    folder: Path, step: int, state: Mapping[str, Any], identity: Mapping[str, Any], world: World
) -> Path:
    """Write this rank's `state` as a checkpoint of a training. All ranks call it.

    Raises CheckpointError like `write`.
    """
    path = folder / folders.CHECKPOINTS / folders.checkpoint_name(step)
    whole = {**identity, "ranks": world.layout.world_size}
    write(path, state, whole, world.rank)
    if world.rank == 0:
        for old in [path for path in folders.checkpoints(folder) if folders.step_of(path) <= step][
            :-_KEPT
        ]:
            with suppress(OSError):
                _remove(old.rename(_beside(old)))  # what has its name is whole
    return path


def load(checkpoint: Path, identity: Mapping[str, Any], world: World) -> dict[str, Any]:
    """This rank's state. All ranks call it.

    Raises CheckpointError, the same on all ranks, when a file is not as it was written (the error
    names it, and the last checkpoint that is whole), or when it is of another training.
    """
    states: list[Any] = []

    def work() -> None:
        saved = folders.Saved.of(checkpoint)
        folders.check_identity(saved.identity, identity, world.layout.world_size)
        states.append(read(checkpoint, saved, world.rank))

    reading(checkpoint, world, work)
    return states[0]  # type: ignore[no-any-return]


def reading(checkpoint: Path, world: World, work: Callable[[], None]) -> None:
    """Do `work` on all ranks, a part of taking over a checkpoint.

    Raises CheckpointError, the same on all ranks, that says which checkpoint is whole instead where
    a file is damaged.
    """
    try:
        run_on_all_ranks(folders.unread(checkpoint), work)
    except DamagedError as error:
        (instead, *_) = run_on_all_ranks(
            folders.unread(checkpoint), lambda: "" if world.rank else folders.offer(checkpoint)
        )
        raise DamagedError(f"{error}; {instead}", everywhere=True) from error


def write(path: Path, state: Mapping[str, Any], identity: Mapping[str, Any], rank: int) -> None:
    """Write `state`: mappings, lists and tuples of tensors and plain values. All ranks call it.

    A checkpoint in its place is replaced. Raises CheckpointError, the same on all ranks, when one
    cannot write; then nothing is left of it, and what was there before is as it was.
    """
    what = f"cannot write the checkpoint {folders.shown(path)}"

    def begin() -> str:
        if rank:
            return ""
        path.parent.mkdir(parents=True, exist_ok=True)
        _clean(path.parent)
        made = _beside(path)
        made.mkdir()
        return made.name

    def own() -> list[Any]:
        named: dict[str, Tensor] = {}
        rest, name = split(state, "", named), folders.tensors_of(rank)
        return [rest, name, _write_file(draft / name, _packed(named))]

    def finish() -> None:
        if rank == 0:
            files = {name: file for _, name, file in written}
            states = [rest for rest, *_ in written]
            content = {"identity": identity, "files": files, "states": states}
            _write_file(draft / folders.STATE, folders.state_text(content))
            _put(draft, path)

    try:
        draft = path.with_name(run_on_all_ranks(what, begin)[0])
        written = run_on_all_ranks(what, own)
        run_on_all_ranks(what, finish)
    except BaseException:
        if rank == 0:
            _clean(path.parent)
        raise


def read(checkpoint: Path, saved: folders.Saved, rank: int) -> Any:
    """The state of a rank. Raises DamagedError if its file is not as it was written."""
    name, data = folders.tensors_of(rank), saved.tensors(checkpoint, rank)
    try:
        named = _unpacked(data)
    except (SafetensorError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        raise DamagedError(f"{name}: {folders.shown(error)}") from error
    try:
        return join(saved.states[rank], named)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"{folders.STATE}: it holds no state of rank {rank}") from error


def split(value: Any, name: str, named: dict[str, Tensor]) -> Any:
    """The value as JSON can hold it; its tensors go into `named`.

    Raises CheckpointError for what is no mapping, list, tuple, tensor, number, text or None.
    """
    if isinstance(value, Tensor):
        if value.dtype not in _DTYPES or value.layout != torch.strided:
            raise CheckpointError(f"{name[1:]} is of {value.dtype}, which cannot be saved")
        unique = f"{len(named)}{name}"
        named[unique] = value
        return {"tensor": unique}
    if isinstance(value, Mapping):
        pairs = [(split(key, f"{name}/", named), key, item) for key, item in value.items()]
        return {"map": [[key, split(item, f"{name}/{was}", named)] for key, was, item in pairs]}
    if isinstance(value, list | tuple):
        items = [split(item, f"{name}/{index}", named) for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{name[1:]} is a {type(value).__name__}: it cannot be saved")


def join(value: Any, named: Mapping[str, Tensor]) -> Any:
    """The other way round. Raises KeyError, TypeError or ValueError for what `split` never gave."""
    if isinstance(value, list):
        return [join(item, named) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "map":
        return {join(key, named): join(item, named) for key, item in content}
    if kind == "tuple":
        return tuple(join(item, named) for item in content)
    return {"tensor": named}[kind][content]


def _packed(named: Mapping[str, Tensor]) -> bytes:
    """A file with these tensors: copies, since safetensors takes none that share memory."""
    whole = torch.contiguous_format
    copies = {
        name: tensor.detach().cpu().clone(memory_format=whole) for name, tensor in named.items()
    }
    return safetensors.torch.save(copies)


def _unpacked(data: bytes) -> dict[str, Tensor]:
    length = int.from_bytes(data[:8], "little")
    if length > _MAX_HEADER:
        raise OverflowError(f"its header has {length} bytes")
    return safetensors.torch.load(data)


def _write_file(path: Path, data: bytes) -> dict[str, Any]:
    """Write a new file, to the disk; its size and checksum. Raises OSError that names it."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return {"bytes": len(data), "sha256": sha256(data).hexdigest()}


def _put(draft: Path, path: Path) -> None:
    """Give a draft its name; a checkpoint that has it goes. Raises OSError."""
    _sync(draft)
    before = _beside(path)
    with suppress(FileNotFoundError):
        path.rename(before)
    try:
        draft.rename(path)
    except OSError:
        with suppress(FileNotFoundError):
            before.rename(path)
        raise
    _sync(path.parent)
    _remove(before)


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clean(parent: Path) -> None:
    """Remove what interrupted writes left."""
    with suppress(OSError):
        for path in parent.iterdir():
            if _DRAFT.fullmatch(path.name):
                _remove(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)  # it follows no link


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")
