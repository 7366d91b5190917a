"""Which part of a tensor a rank holds, and which ranks of its worker hold the same part.

A DTensor tells it by its mesh and placements. In a dimension of the mesh that shards the tensor the
place of the rank counts: so with FSDP2, with tensor parallelism, and with both (`_StridedShard`).
Ranks that differ only in other dimensions hold the same part: in those that replicate (HSDP), and
in those that the mesh of this tensor lacks. A plain tensor is whole on every rank of the worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from co2sim.common.errors import OptionError
from realrun.algorithms.process_groups import WorkerGroups


@dataclass(frozen=True, slots=True)
class Holders:
    """Who in a worker holds which part of a tensor.

    This rank holds `part`, which is empty for the whole tensor. `ranks`, this one among them, hold
    the same, and gather in `group`. `all_ranks` are the ranks of the worker, part by part.
    """

    part: str
    ranks: tuple[int, ...]
    all_ranks: tuple[tuple[int, ...], ...]
    group: dist.ProcessGroup | None = None


ALONE = Holders("", (0,), ((0,),))
"""A worker of one rank."""


def holders_of(tensors: Mapping[str, Tensor], links: WorkerGroups) -> dict[str, Holders]:
    """The holders of named tensors. All ranks call this. Raises OptionError; see `part_of`."""
    ranks = links.workers.inner_ranks
    own = {name: part_of(name, one, ranks) for name, one in tensors.items()}
    rows = links.of_worker(own)
    names = dict.fromkeys(name for row in rows for name in row)  # the same on all of them

    @cache
    def alike(parts: Sequence[str | None]) -> tuple[tuple[int, ...], ...]:
        pairs = list(zip(ranks, parts, strict=True))
        return tuple(
            tuple(rank for rank, other in pairs if other == part) for part in dict.fromkeys(parts)
        )

    found = {name: alike(tuple(row.get(name) for row in rows)) for name in names}
    fewer = {one for every in found.values() for one in every if 1 < len(one) < len(ranks)}
    groups = links.among(fewer)
    mine = {name: next(one for one in found[name] if links.rank in one) for name in own}
    return {
        name: Holders(part, mine[name], found[name], groups.get(mine[name], links.gather))
        for name, part in own.items()
    }


def part_of(name: str, tensor: Tensor, ranks: Sequence[int]) -> str:
    """What this rank holds of a tensor of its worker, `ranks`; nothing is said of a whole one.

    Raises OptionError for a DTensor with partial sums, and for one on ranks of other workers.
    """
    if not isinstance(tensor, DTensor):
        return ""
    mesh = tensor.device_mesh
    spread, here = sorted(mesh.mesh.flatten().tolist()), mesh.get_coordinate()
    if here is None or set(spread) - set(ranks):
        raise OptionError(
            f"{name!r} is spread over ranks {spread}, but this rank's worker is ranks"
            f" {list(ranks)}: the mesh must hold this rank, and no rank of another worker"
            " (worker='node', or Workers.of_mesh)"
        )
    placed = list(zip(tensor.placements, here, mesh.shape, strict=True))
    if any(placement.is_partial() for placement, _, _ in placed):
        raise OptionError(
            f"{name!r} is placed as {tensor.placements}; each placement must be a shard or"
            " Replicate()"
        )
    return ", ".join(
        f"{placement!r} {place} of {count}"
        for placement, place, count in placed
        if count > 1 and not placement.is_replicate()
    )
