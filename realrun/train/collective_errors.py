"""What all ranks do together, and fail at together: one cause, told alike on all of them."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from realrun.errors import CheckpointError, DamagedError
from realrun.train.folder import shown

_CAUSE = 200
"""Characters of an error, at most."""


def run_on_all_ranks(device: torch.device, what: str, work: Callable[[], Any]) -> list[Any]:
    """Do `work` on all ranks; what it gave on each, as JSON. All ranks call it.

    They hear it over `device`. If it fails on any rank, all raise the same CheckpointError: `what`,
    the rank and its error.
    """
    given, cause, damaged = None, "", False
    try:
        given = work()
    except (OSError, MemoryError, CheckpointError) as error:
        cause, damaged = _cause(error), isinstance(error, DamagedError)
    told = [json.loads(one) for one in _gather(device, json.dumps([given, cause, damaged]))]
    causes = [one[1] for one in told]
    if not any(causes):
        return [one[0] for one in told]
    first = next(rank for rank, one in enumerate(causes) if one)
    which = "" if len(set(causes)) == 1 else f"rank {first}: "
    kind = DamagedError if told[first][2] else CheckpointError
    raise kind(f"{what}: {which}{causes[first]}", everywhere=True)


def _cause(error: Exception) -> str:
    """Why, in one line: "rank0.safetensors: No space left on device"."""
    if isinstance(error, OSError) and error.strerror:
        name = f"{str(error.filename).rsplit('/', 1)[-1]}: " if error.filename else ""
        return shown(f"{name}{error.strerror}", _CAUSE)
    return shown(str(error) or "out of memory", _CAUSE)


def _gather(device: torch.device, text: str) -> list[str]:
    """The texts of all ranks; tensors, since objects would travel as pickles."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return [text]
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    size = torch.tensor([len(own)], device=device)
    sizes = [torch.empty_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size)
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    padded[: len(own)] = own
    padded = padded.to(device)
    found = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(found, padded)
    pairs = zip(found, sizes, strict=True)
    return [bytes(one[: int(count)].cpu().numpy()).decode() for one, count in pairs]
