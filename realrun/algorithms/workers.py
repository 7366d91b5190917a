"""Who is a worker: a rank, or all ranks of a node or a site."""

import os
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch.distributed as dist

from co2sim.common.errors import OptionError
from realrun.errors import SITES, sites_of


@dataclass(frozen=True)
class Workers:
    """How ranks form workers. A worker's ranks hold the same parameters, or shards of them.

    `peers`: one rank of every worker, this one among them; those that hold the same part of the
    parameters. None if there is one worker. `inner`: the ranks of this worker; None if it is this
    rank alone. Only their members matter: averages have communicators of their own.
    """

    peers: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        """Refuse groups that overlap in more than this rank."""
        shared = set(self.peer_ranks) & set(self.inner_ranks)
        if shared != {_me()}:
            raise OptionError(
                f"peers {self.peer_ranks} and inner {self.inner_ranks} share {sorted(shared)};"
                f" they must share this rank, {_me()}, and no other"
            )

    @classmethod
    def per_gpu(cls) -> "Workers":
        """Every rank is a worker; a process alone, if torch.distributed is not initialized."""
        if dist.is_initialized():
            return cls(dist.group.WORLD)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise OptionError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not"
                " initialized; call init_process_group first"
            )
        return cls(None)

    @classmethod
    def per_node(cls) -> "Workers":
        """The LOCAL_WORLD_SIZE ranks of a node are a worker. All ranks call this.

        Give `inner` to DDP (process_group=workers.inner) or FSDP2
        (mesh=DeviceMesh.from_group(workers.inner, device_type)).
        """
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not dist.is_initialized() or not text.isdigit():
            raise OptionError(
                "worker='node' needs torch.distributed initialized and LOCAL_WORLD_SIZE set, as"
                " torchrun does"
            )
        size, world, me = int(text), dist.get_world_size(), dist.get_rank()
        if size < 1 or world % size:
            raise OptionError(
                f"LOCAL_WORLD_SIZE is {size} and there are {world} ranks: all nodes must have the"
                " same number of ranks"
            )
        if int(os.environ.get("LOCAL_RANK", me % size)) != me % size:
            raise OptionError(
                f"rank {me} has LOCAL_RANK {os.environ['LOCAL_RANK']}; ranks must be numbered node"
                f" by node, so that it is {me % size}"
            )
        return cls._blocks(size)

    @classmethod
    def per_site(cls) -> "Workers":
        """The ranks of a site are a worker: of REALRUN_SITES equal ones. All ranks call this.

        Ranks are numbered site by site. Give `inner` to DDP or FSDP2 as with `per_node`.
        """
        sites = sites_of(os.environ)
        size = dist.get_world_size() if dist.is_initialized() else 0
        if sites < 2 or not size or size % sites:  # noqa: PLR2004 - one averages with nobody
            raise OptionError(
                f"worker='site' needs torch.distributed initialized, and {SITES} set to 2 sites or"
                f" more of as many ranks; there are {size} ranks, and {SITES} is {sites}"
            )
        return cls._blocks(size // sites)

    @classmethod
    def _blocks(cls, size: int) -> "Workers":
        """Every `size` consecutive ranks are a worker."""
        world, me = dist.get_world_size(), dist.get_rank()
        inner = peers = None
        for first in range(0, world, size):
            made = dist.new_group(list(range(first, first + size)))
            inner = made if me // size == first // size else inner
        for place in range(size):
            made = dist.new_group(list(range(place, world, size)))
            peers = made if me % size == place else peers
        return cls(peers, inner)

    @property
    def peer_ranks(self) -> list[int]:
        """Ranks with this rank's part, one of each worker."""
        return sorted(dist.get_process_group_ranks(self.peers)) if self.peers else [_me()]

    @property
    def inner_ranks(self) -> list[int]:
        """Ranks of this worker."""
        return sorted(dist.get_process_group_ranks(self.inner)) if self.inner else [_me()]


Worker: TypeAlias = Literal["gpu", "node", "site"] | Workers


def workers_of(worker: Worker) -> Workers:
    """What the option `worker` means. Raises OptionError."""
    match worker:
        case Workers():
            return worker
        case "gpu":
            return Workers.per_gpu()
        case "node":
            return Workers.per_node()
        case "site":
            return Workers.per_site()
    raise OptionError(f"worker is {worker!r}; it must be 'gpu', 'node', 'site' or a Workers")


def _me() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
