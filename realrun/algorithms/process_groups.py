"""The communicators of one algorithm, and what travels over them besides averages."""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from co2sim.common.validation import above
from realrun.algorithms.departures import PERIOD, Notices, lost
from realrun.errors import SITES, MismatchError, one_of, sites_of


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
        self.steps = 0
        self.notices = Notices((*workers.peer_ranks, *workers.inner_ranks), lambda: self.steps)
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

    def meet(self, what: str, *, begun: bool = False) -> None:
        """Wait until all ranks come here after the same steps; see Notices.meet."""
        self.notices.meet(what, self.deadline, begun=begun)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums of numbers over this worker's ranks."""
        if self._inner is None:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        with self.together("sum over the ranks of a worker"):
            dist.all_reduce(sums, group=self._inner)
        return [float(one) for one in sums]

    @property
    def counting(self) -> dist.ProcessGroup | None:
        """The communicator of the peers for numbers."""
        return self._peers

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number on any rank. All ranks call this, and get the same.

        It is called within a step: one that waits looks for ranks that have left, on GPUs, too.
        """
        most, what = torch.tensor(numbers, dtype=torch.float64), "comparison between ranks"
        for group in (self._peers, self._inner):
            if group is None:
                continue
            with self.together(what):
                work = dist.all_reduce(most, dist.ReduceOp.MAX, group, async_op=True)
                limit = time.monotonic() + self.deadline
                while not self._ended(work, min(PERIOD, max(0.001, limit - time.monotonic()))):
                    if time.monotonic() > limit:
                        work.wait(timedelta(milliseconds=1))  # which says so
                    self.notices.look(what, self.steps)
        return [float(one) for one in most]

    def _ended(self, work: dist.Work, seconds: float) -> bool:
        """Whether a collective ended within so many seconds. Raises what it has failed with."""
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if work.is_completed():
                work.wait()
            else:
                return False
        return True

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

    def of_peers(self, value: Any) -> list[Any]:
        """The value of every peer, in the order of their ranks. All ranks call this."""
        return self.collect(value, self._peers)

    def which(self, *, here: bool) -> list[int]:
        """The ranks where something is `here`. All ranks call this."""
        found = [dist.get_rank()] if here and dist.is_initialized() else []
        for group in (self._peers, self._inner):
            found = sorted({rank for one in self.collect(found, group) for rank in one})
        return found

    def collect(self, value: Any, group: dist.ProcessGroup | None) -> list[Any]:
        """Everybody's value, by place in the group."""
        if group is None:
            return [value]
        found: list[Any] = [None] * group.size()
        with self.together("comparison between ranks"):
            dist.all_gather_object(found, value, group=group)
        return found

    def mean(self, tensor: Tensor, *, sharded: bool, weight: float = 1.0) -> None:
        """Replace it by its mean over workers, and unless sharded over each one's ranks.

        This rank counts `weight` times, 1 on average. What is not floating point becomes the first
        one's.
        """
        with self.together("mean of what is not averaged in rounds"):
            for group in (None if sharded else self._inner, self._peers):
                if group is None:
                    continue
                sent = tensor.detach().cpu().contiguous()
                if sent.is_floating_point():
                    sent = sent.double() * weight
                    dist.all_reduce(sent, group=group)
                    sent /= group.size()
                else:
                    _broadcast(sent, group)
                tensor.copy_(sent)

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
            found = self.notices.cause(what, round=round)
            raise found or lost(what, error, self.deadline, round=round) from error


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


Wire: TypeAlias = Literal["fp32", "bf16", "int8", "int4"]
"""What averages travel as."""

WIRES: dict[torch.dtype, Wire] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
}

DEADLINE: Seconds = 60.0
"""How long a worker waits for another, unless it is said."""


def wire_of(dtype: Wire | torch.dtype) -> Wire:
    """The option `dtype`, by its name or as torch's: torch.bfloat16 is "bf16"."""
    if isinstance(dtype, torch.dtype):
        if dtype not in WIRES:
            known = ", ".join(map(str, WIRES))
            raise OptionError(f"dtype is {dtype}; averages travel as one of {known}")
        return WIRES[dtype]
    one_of("dtype", dtype, get_args(Wire))
    return dtype


def wait_of(deadline: Seconds | None, timeout: Seconds | timedelta | None) -> Seconds:
    """Seconds that a worker waits for another: one option under two names."""
    if deadline is not None and timeout is not None:
        raise OptionError(
            f"deadline={deadline} and timeout={timeout} are the same option; give one of them"
        )
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    name, given = ("deadline", deadline) if timeout is None else ("timeout", timeout)
    if given is None:
        return DEADLINE
    return above(name, given, 0)
