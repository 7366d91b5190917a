"""Who is a worker: a rank, or all ranks of a node or a site; and the communicators between them."""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from co2sim.errors import OptionError
from realrun.checks import SITES, sites_of
from realrun.errors import MismatchError, RankFailure


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


class Links:
    """The communicators of one algorithm, which nothing else uses.

    `average` is left to averages alone. Numbers and texts travel over Gloo, on GPUs too. A group
    of one rank is None. Every wait ends after `deadline` seconds, but the very first, for all
    ranks to come: that is bounded by the timeout of torch.distributed's own group.
    """

    def __init__(self, workers: Workers, deadline: float, *, owns: bool) -> None:
        """Connect. All ranks of torch.distributed call this, in the same order.

        `owns`: the groups of `workers` were made for this alone; `close` destroys them, too.
        """
        self.workers, self.deadline = workers, deadline
        self._own = (workers.inner, workers.peers) if owns else ()
        self._made: dict[tuple[tuple[int, ...], str | None], dist.ProcessGroup] = {}
        peers, inner = tuple(workers.peer_ranks), tuple(workers.inner_ranks)
        with self.together("connection of communicators"):
            if dist.is_initialized() and dist.get_world_size() > 1:
                self._connect(peers, inner)
        self.average, self._peers = self._made.get((peers, None)), self._made.get((peers, "gloo"))
        self.gather, self._inner = self._made.get((inner, None)), self._made.get((inner, "gloo"))

    def _connect(self, peers: tuple[int, ...], inner: tuple[int, ...]) -> None:
        """Make the groups of all ranks, also those that this rank is not in.

        Groups that only members make (`use_local_synchronization`) would get the names, and find
        the addresses in the store, of closed ones with the same members (torch 2.13).
        """
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (peers, inner))
        limit = timedelta(seconds=self.deadline)
        for ranks in sorted({ranks for pair in everybody for ranks in pair if len(ranks) > 1}):
            for backend in (None, "gloo"):
                made = dist.new_group(list(ranks), limit, backend)
                if isinstance(made, dist.ProcessGroup) and ranks in (peers, inner):
                    self._made[ranks, backend] = made

    def close(self) -> None:
        """Destroy the communicators. Nothing may be under way."""
        if dist.is_initialized():
            own = [one for one in self._own if one not in {None, dist.group.WORLD}]
            for made in (*self._made.values(), *own):
                dist.destroy_process_group(made)
        self._made, self._own = {}, ()

    def let_go(self) -> None:
        """Forget the communicators: a rank of them is lost, and who made them destroys them."""
        self._made, self._own = {}, ()
        self.average = self._peers = self.gather = self._inner = None

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums of numbers over this worker's ranks."""
        if self._inner is None:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        with self.together("sum over the ranks of a worker"):
            dist.all_reduce(sums, group=self._inner)
        return [float(one) for one in sums]

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number on any rank. All ranks call this, and get the same."""
        for group in (self._peers, self._inner):
            numbers = [max(column) for column in zip(*self.collect(numbers, group), strict=True)]
        return list(numbers)

    def agree(self, what: str, text: str, *, across: str) -> None:
        """Compare a text with the other ranks; `across` only with peers.

        Raises MismatchError, on all of them, that names the first line that differs.
        """
        self._compare(self._peers, self.workers.peer_ranks, what, f"{text}\n{across}")
        self._compare(self._inner, self.workers.inner_ranks, what, text)

    def _compare(
        self, group: dist.ProcessGroup | None, ranks: list[int], what: str, text: str
    ) -> None:
        if len(set(self.collect(hashlib.sha256(text.encode()).hexdigest(), group))) == 1:
            return
        texts = self.collect(text, group)
        index = next(i for i, other in enumerate(texts) if other != texts[0])
        one, two = _first_difference(texts[0], texts[index])
        raise MismatchError(
            f"rank {ranks[index]} has another {what} than rank {ranks[0]}: {two!r} instead of"
            f" {one!r}"
        )

    def same_inside(self, mark: str) -> bool:
        """Whether all ranks of this worker have the same mark."""
        return len(set(self.collect(mark, self._inner))) == 1

    def drifted(self, mark: str) -> list[int]:
        """Peers whose mark is not that of the majority; all ranks of a worker raise together."""
        if self._peers is None:
            return []
        marks = self.collect(mark, self._peers)
        usual = max(marks, key=marks.count)
        return [
            rank for rank, one in zip(self.workers.peer_ranks, marks, strict=True) if one != usual
        ]

    def collect(self, value: Any, group: dist.ProcessGroup | None) -> list[Any]:
        """Everybody's value, by place in the group."""
        if group is None:
            return [value]
        found: list[Any] = [None] * group.size()
        with self.together("comparison between ranks"):
            dist.all_gather_object(found, value, group=group)
        return found

    def share(self, replicated: Sequence[Tensor], sharded: Sequence[Tensor]) -> None:
        """Give the first worker's tensors to all; within a worker, too, what is replicated."""
        with self.together("broadcast of the first parameters"), torch.no_grad():
            for group, tensors in (
                (self.gather, replicated),
                (self.average, [*replicated, *sharded]),
            ):
                for tensor in tensors if group is not None else ():
                    _broadcast(tensor, group)

    @contextlib.contextmanager
    def together(self, what: str, *, round: int | None = None) -> Iterator[None]:  # noqa: A002
        """Something that needs other ranks. Raises RankFailure if they are lost."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            raise lost(what, error, self.deadline, round=round) from error


def lost(
    what: str,
    error: BaseException,
    deadline: float,
    *,
    round: int | None = None,  # noqa: A002 - what it is called everywhere here
) -> RankFailure:
    """The error to raise when a collective failed: a peer died, or did not come in time."""
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return RankFailure(
        f"{what} failed: a rank died, took fewer steps, or came more than {deadline:g} s late"
        f" ({reason})",
        op=what,
        round=round,
    )


def _broadcast(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Send the first member's tensor as bytes: not every type can be sent as it is."""
    if not tensor.numel():
        return
    sent = tensor.detach().contiguous()
    dist.broadcast(sent.view(-1).view(torch.uint8), group_src=0, group=group)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


def _first_difference(one: str, two: str) -> tuple[str, str]:
    lines, others = one.splitlines(), two.splitlines()
    length = max(len(lines), len(others))
    lines += ["nothing"] * (length - len(lines))
    others += ["nothing"] * (length - len(others))
    return next(pair for pair in zip(lines, others, strict=True) if pair[0] != pair[1])


def _me() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
