"""The communicators of one algorithm, and what travels over them besides averages."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from co2sim.common.validation import above
from realrun.algorithms.departures import DepartureLog, together
from realrun.errors import SITES, MismatchError, one_of, refuse_different, sites_of

PERIOD: Seconds = 0.5
"""How often one that waits looks for notes."""


@dataclass(frozen=True)
class Workers:
    """How ranks form workers. A worker's ranks hold the same parameters, or shards of them.

    `peers`: one rank of every worker, this one among them; those that hold the same part of the
    parameters. None if there is one worker. `inner`: the ranks of this worker; None if it is this
    rank alone. Only their members matter: averages have their own communicators.
    """

    peers: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        """Refuse groups that overlap in more than this rank."""
        shared = set(self.peer_ranks) & set(self.inner_ranks)
        if shared != {my_rank()}:
            raise OptionError(
                f"peers {self.peer_ranks} and inner {self.inner_ranks} share {sorted(shared)};"
                f" they must share this rank, {my_rank()}, and no other"
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
        if not dist.is_initialized():
            raise OptionError(
                "worker='node' needs torch.distributed initialized and LOCAL_WORLD_SIZE set, as"
                " torchrun does"
            )
        placed_here = os.environ.get("LOCAL_WORLD_SIZE", ""), os.environ.get("LOCAL_RANK")
        placed: list[tuple[str, str | None]] = [placed_here] * dist.get_world_size()
        dist.all_gather_object(placed, placed_here)  # so that all refuse what one of them cannot do
        return cls._blocks(_node_size(placed))

    @classmethod
    def per_site(cls) -> "Workers":
        """The ranks of a site are a worker: of REALRUN_SITES equal ones. All ranks call this.

        Ranks are numbered site by site. Give `inner` to DDP or FSDP2 as with `per_node`.
        """
        sites = sites_of(os.environ)
        size = dist.get_world_size() if dist.is_initialized() else 0
        if size > 1:
            every = [sites] * size
            dist.all_gather_object(every, sites)  # so that all refuse what differs
            if len(set(every)) > 1:
                raise OptionError(f"{SITES} differs between ranks: {sorted(set(every))}")
        if sites < 2 or not size or size % sites:  # noqa: PLR2004 - one averages with no other
            raise OptionError(
                f"worker='site' needs torch.distributed initialized, and {SITES} set to 2 sites or"
                f" more of as many ranks; there are {size} ranks, and {SITES} is {sites}"
            )
        return cls._blocks(size // sites)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, across: str | Sequence[str]) -> "Workers":
        """Workers along one or more dimensions of a mesh of all ranks. All ranks call this.

        `across` names the dimensions in which workers differ, such as "dp_replicate"; ranks that
        differ in the others are one worker. Give submeshes of the others to FSDP2 and to tensor
        parallelism. Ranks with the same place in the others are peers. Raises OptionError.
        """
        named = (across,) if isinstance(across, str) else tuple(across)
        names, ranks = tuple(mesh.mesh_dim_names or ()), mesh.mesh
        if not named or len(set(named)) < len(named) or set(named) - set(names):
            raise OptionError(
                f"across is {across!r}; it must name one or more dimensions of the mesh, each once:"
                f" {', '.join(names) or 'this one has no names (mesh_dim_names)'}"
            )
        if sorted(ranks.flatten().tolist()) != list(range(dist.get_world_size())):
            raise OptionError(
                f"the mesh holds ranks {sorted(ranks.flatten().tolist())} of"
                f" {dist.get_world_size()}; give the mesh of all ranks, not a part of it"
            )
        outer = [names.index(name) for name in named]
        inside = [dimension for dimension in range(ranks.ndim) if dimension not in outer]
        count = math.prod(ranks.size(dimension) for dimension in outer)
        return cls._rows(ranks.permute(*outer, *inside).reshape(count, -1).tolist())

    @classmethod
    def _blocks(cls, size: int) -> "Workers":
        """Every `size` consecutive ranks are a worker."""
        world = dist.get_world_size()
        return cls._rows([list(range(first, first + size)) for first in range(0, world, size)])

    @classmethod
    def _rows(cls, workers: Sequence[Sequence[int]]) -> "Workers":
        """Workers by their ranks; those at the same place are peers. All ranks call this."""
        own_groups = []
        for rows in (workers, list(zip(*workers, strict=True))):
            groups = [(row, dist.new_group(list(row))) for row in rows]
            own_groups.append(next(group for row, group in groups if my_rank() in row))
        return cls(peers=own_groups[1], inner=own_groups[0])

    @property
    def peer_ranks(self) -> list[int]:
        """Ranks with this rank's part, one of each worker."""
        return sorted(dist.get_process_group_ranks(self.peers)) if self.peers else [my_rank()]

    @property
    def inner_ranks(self) -> list[int]:
        """Ranks of this worker."""
        return sorted(dist.get_process_group_ranks(self.inner)) if self.inner else [my_rank()]


def _node_size(placed: Sequence[tuple[str, str | None]]) -> int:
    """The ranks of a node, from LOCAL_WORLD_SIZE and LOCAL_RANK of every rank."""
    texts = [size for size, _ in placed]
    if not all(text.isdigit() for text in texts):
        raise OptionError(
            f"LOCAL_WORLD_SIZE is {next(t for t in texts if not t.isdigit())!r} on a rank;"
            " worker='node' needs it set on all, as torchrun does"
        )
    sizes = [int(text) for text in texts]
    size, world = sizes[0], len(sizes)
    if len(set(sizes)) > 1 or size < 1 or world % size:
        raise OptionError(
            f"LOCAL_WORLD_SIZE is {', '.join(map(str, sorted(set(sizes))))} and there are {world}"
            " ranks: worker='node' needs the same number of ranks on all nodes"
        )
    for rank, (_, local) in enumerate(placed):
        if int(local or rank % size) != rank % size:
            raise OptionError(
                f"rank {rank} has LOCAL_RANK {local}; ranks must be numbered node by node, so that"
                f" it is {rank % size}"
            )
    return size


Worker: TypeAlias = Literal["gpu", "node", "site"] | Workers


def workers_of(worker: Worker) -> Workers:
    """What the option `worker` means. Raises OptionError."""
    makers = {"gpu": Workers.per_gpu, "node": Workers.per_node, "site": Workers.per_site}
    if isinstance(worker, str) and worker in makers:
        return makers[worker]()
    if isinstance(worker, Workers):
        return worker
    raise OptionError(f"worker is {worker!r}; it must be 'gpu', 'node', 'site' or a Workers")


def my_rank() -> int:
    """Of this process; 0 for one alone."""
    return dist.get_rank() if dist.is_initialized() else 0


Kind: TypeAlias = Literal["average", "gather", "beside", "counting"]
"""What a communicator is for; "beside": numbers and texts that are waited for at once."""


class WorkerGroups:
    """The communicators of one algorithm, which nothing else uses.

    `average` is left to averages alone. Numbers and texts travel over Gloo, on GPUs too. A group
    of one rank is None. Every wait ends after `deadline` seconds, but the very first, for all
    ranks to come: that is bounded by the timeout of torch.distributed's own group.
    """

    def __init__(
        self,
        workers: Workers,
        deadline: float,
        notices: DepartureLog | None = None,
        pg_options: Any = None,
        *,
        average_over: str | None = None,
        owns: bool,
    ) -> None:
        """Connect. All ranks of torch.distributed call this, in the same order.

        `owns`: the groups of `workers` were made for this alone; `close` destroys them, too.
        Averages go `average_over` a backend, by default torch.distributed's, with `pg_options`.
        `notices` are those of all ranks, if they were made before. Raises OptionError for options
        of NCCL where averages go over another backend.
        """
        if pg_options is not None and dist.is_initialized():
            backend = average_over or str(dist.get_backend_config())
            if "nccl" not in backend:
                raise OptionError(f"pg_options are for averages over NCCL; these go over {backend}")
        self._average_over, self._options = average_over, pg_options
        self.workers, self.deadline, self.rank = workers, deadline, my_rank()
        self.steps = 0
        self.single = len(workers.inner_ranks) == 1
        """Whether every worker is one rank."""
        self.notices = notices or DepartureLog.of_all_ranks()
        self.notices.steps = lambda: self.steps
        self._own = (workers.inner, workers.peers) if owns else ()
        self._made: dict[tuple[tuple[int, ...], Kind], dist.ProcessGroup] = {}
        peers, inner = tuple(workers.peer_ranks), tuple(workers.inner_ranks)
        with self.together("connection of communicators"):
            if dist.is_initialized() and dist.get_world_size() > 1:
                self._connect(peers, inner)
        self.average, self.gather = self._of(peers, "average"), self._of(inner, "gather")
        self._peers, self._inner = self._of(peers, "beside"), self._of(inner, "beside")
        self.counting = self._of(peers, "counting")
        """Of the peers, for numbers that are sent while training continues."""

    def _of(self, ranks: tuple[int, ...], kind: "Kind") -> dist.ProcessGroup | None:
        return self._made.get((ranks, kind))

    def _connect(self, peers: tuple[int, ...], inner: tuple[int, ...]) -> None:
        """Make the groups of all ranks, also those that this rank is not in.

        Groups that only members make (`use_local_synchronization`) would get the names, and find
        the addresses in the store, of closed ones with the same members (torch 2.13).
        """
        everybody: list[Any] = [None] * dist.get_world_size()
        own_groups = (peers, inner, self._average_over)
        dist.all_gather_object(everybody, own_groups)
        if len({over for _, _, over in everybody}) > 1:
            raise MismatchError("offload is True on some ranks and False on others")
        limit = timedelta(seconds=self.deadline)
        # torch counts from a launch, a wait from its begin. So behind training torch's own limit
        # counts, unless ours is longer: it also bounds how long a process takes to end whose peer
        # hangs, and a long checkpoint of one rank ends no average for which no rank waits.
        behind = timedelta(seconds=max(self.deadline, DEADLINE))
        self.single = all(len(inner) == 1 for _, inner, _ in everybody)
        self.notices.narrow(
            _joined({self.rank}, [{*groups[0], *groups[1]} for groups in everybody])
        )
        averaging = {peers for peers, _, _ in everybody}
        every = {ranks for groups in everybody for ranks in groups[:2] if len(ranks) > 1}
        for ranks in sorted(every):
            kinds: list[tuple[Kind, str | None, timedelta]] = [("beside", "gloo", limit)]
            if ranks in {inner for _, inner, _ in everybody}:
                kinds.append(("gather", None, limit))
            if ranks in averaging:
                kinds += [("average", self._average_over, behind), ("counting", "gloo", behind)]
            for kind, backend, longest in kinds:
                options = self._options if kind == "average" else None
                made = dist.new_group(list(ranks), longest, backend, options)
                if isinstance(made, dist.ProcessGroup) and ranks in (peers, inner):
                    self._made[ranks, kind] = made

    def among(self, sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Communicators of some ranks of a worker, in which they gather. All ranks call this.

        `sets` of ranks are those of this worker, the same on all of its ranks; others tell theirs.
        """
        every_set = {ranks for rows in self.of_peers(sorted(sets)) for ranks in rows}
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        with self.together("connection of communicators"):
            for ranks in sorted(every_set):
                group = dist.new_group(list(ranks), timedelta(seconds=self.deadline))
                if isinstance(group, dist.ProcessGroup) and self.rank in ranks:
                    made[ranks] = self._made[ranks, "gather"] = group
        return made

    def close(self) -> None:
        """Destroy the communicators. Nothing may be under way."""
        if dist.is_initialized():
            groups = [group for group in self._own if group not in {None, dist.group.WORLD}]
            for made in (*self._made.values(), *groups):
                dist.destroy_process_group(made)
        self._made, self._own = {}, ()

    def meet(self, what: str, *, begun: bool = False, lap: Seconds = 0.0) -> None:
        """Wait until all ranks come here after the same steps; see DepartureLog.meet.

        They may be a `lap` behind, beside the deadline.
        """
        self.notices.meet(what, self.deadline + lap, begun=begun)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums of numbers over this worker's ranks."""
        if self._inner is None:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        with self.together("sum over the ranks of a worker"):
            dist.all_reduce(sums, group=self._inner)
        return [float(total) for total in sums]

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number on any rank. All ranks call this, and get the same.

        It is called within a step: one that waits looks for ranks that have left, on GPUs, too.
        """
        most = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        what = "comparison between ranks"
        for group in (self._peers, self._inner):
            if group is None:
                continue
            with self.together(what):
                work = dist.all_reduce(most, dist.ReduceOp.MAX, group, async_op=True)
                wait_until(
                    time.monotonic() + self.deadline,
                    lambda seconds, work=work: work.wait(timedelta(seconds=seconds)),  # type: ignore[misc]
                    work.is_completed,
                    partial(self.notices.check, what, self.steps),
                )
        return [float(value) for value in most]

    def agree(self, what: str, text: str, *, across: str) -> None:
        """Compare a text with the other ranks; `across` only with peers.

        Raises MismatchError, on all of them, that names the first line that differs.
        """
        for group, ranks, here in (
            (self._peers, self.workers.peer_ranks, f"{text}\n{across}"),
            (self._inner, self.workers.inner_ranks, text),
        ):
            if len(set(self.collect(hashlib.sha256(here.encode()).hexdigest(), group))) > 1:
                refuse_different(what, self.collect(here, group), ranks)

    def of_peers(self, value: Any) -> list[Any]:
        """The value of every peer, in the order of their ranks. All ranks call this."""
        return self.collect(value, self._peers)

    def of_worker(self, value: Any) -> list[Any]:
        """The value of every rank of this worker, in their order. All ranks call this."""
        return self.collect(value, self._inner)

    def which(self, *, here: bool) -> list[int]:
        """The ranks where something is `here`. All ranks call this."""
        rows = self.of_all((self.rank, here))
        return sorted(rank for worker in rows for rank, there in worker if there)

    def collect(self, value: Any, group: dist.ProcessGroup | None) -> list[Any]:
        """Everybody's value, by place in the group."""
        if group is None:
            return [value]
        values: list[Any] = [None] * group.size()
        with self.together("comparison between ranks"):
            dist.all_gather_object(values, value, group=group)
        return values

    def of_all(self, value: Any) -> list[list[Any]]:
        """The value of every rank, worker by worker. All ranks call this, and get the same."""
        return self.of_peers(self.of_worker(value))

    def mean(
        self,
        values: Tensor,
        *,
        sharded: bool,
        counting: Sequence[bool],
        whole: bool,
        finite: bool,
    ) -> Tensor:
        """The mean over the workers that count, and unless sharded over each one's ranks.

        `values` are on the CPU and contiguous. `whole`: those of the first one, as of numbers
        without a point. Unless all are `finite`, an element that is not is left out, see `_mean`.
        Complex numbers are averaged by their parts.
        """
        inside = [True] * len(self.workers.inner_ranks)
        with self.together("mean of what is not averaged in rounds"):
            for group, present in (
                (None if sharded else self._inner, inside),
                (self._peers, counting),
            ):
                if group is None:
                    continue
                if whole:
                    values = values.clone()
                    _broadcast(values, group, self.deadline, source=present.index(True))
                elif values.is_complex():
                    parts = _mean(
                        torch.view_as_real(values).double(), group, present, finite=finite
                    )
                    values = torch.view_as_complex(parts).to(values.dtype)
                else:
                    values = _mean(values.double(), group, present, finite=finite).to(values.dtype)
        return values

    def share(self, tensors: Iterable[tuple[Tensor, Sequence[int]]]) -> list[tuple[Tensor, Tensor]]:
        """Give the first worker's tensors to all; each first among the ranks that hold it inside.

        What is on a CPU travels over Gloo. Returns tensors that were others, with what they held.
        """
        replaced = []
        with self.together("broadcast of the first parameters"), torch.no_grad():
            for tensor, holders in tensors:
                before, inside = tensor.detach().clone(), self._of(tuple(holders), "gather")
                groups = (inside, self.average)
                if not tensor.is_cuda:
                    groups = (self._of(tuple(holders), "beside") or inside, self._peers)
                for group in groups:
                    if group is not None:
                        _broadcast(tensor, group, self.deadline)
                if not torch.equal(before, tensor):
                    replaced.append((tensor, before))
        return replaced

    def together(self, what: str, *, round_: int | None = None) -> AbstractContextManager[None]:
        """Something that needs other ranks. Raises RankFailure if they are lost."""
        return together(self.notices, what, self.deadline, round_=round_)


def _joined(ranks: set[int], sets: Sequence[set[int]]) -> set[int]:
    """Some ranks, and all that sets join to them."""
    more = ranks.union(*(members for members in sets if members & ranks))
    return ranks if more == ranks else _joined(more, sets)


Wait: TypeAlias = Callable[[Seconds], object]
"""Waits so long at most. Raises RuntimeError or TimeoutError after that, or for what failed."""
Ended: TypeAlias = Callable[[], bool]


def wait_until(
    limit: Seconds, wait: Wait, ended: Ended, look: Callable[[], object] | None = None
) -> None:
    """Wait for a collective until `limit` of the clock, and `look` now and then.

    Raises what `wait` and `look` do.
    """
    while True:
        left = max(0.001, limit - time.monotonic())
        try:
            wait(min(PERIOD, left) if look else left)
        except (RuntimeError, TimeoutError):
            if look is None or left <= PERIOD:
                raise
            if ended():  # it has failed, or ended just after the time was up
                wait(left)
                return
            look()
        else:
            return


def wait_for(work: dist.Work, seconds: Seconds) -> None:
    """Wait for a collective, `seconds` from now at most: torch counts from its launch.

    Raises TimeoutError, and what the collective has failed with.
    """
    limit, pause = time.monotonic() + seconds, 1e-5
    while not work.is_completed():
        if time.monotonic() > limit:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    work.wait()


def _mean(
    values: Tensor, group: dist.ProcessGroup, present: Sequence[bool], *, finite: bool
) -> Tensor:
    """The mean over the ranks of a group that are `present`, in fp64.

    An element that is not finite on some of them is the mean over the others; on all of them it is
    what all have, or NaN.
    """
    members, here = sum(present), present[group.rank()]
    share = values / members if here else torch.zeros_like(values)
    if finite:
        dist.all_reduce(share, group=group)
        return share
    kinds = [values.isfinite(), values == torch.inf, values == -torch.inf]
    sums = torch.stack([share.nan_to_num(0, 0, 0), *(kind.double() * here for kind in kinds)])
    dist.all_reduce(sums, group=group)
    mean, count, above, below = sums
    mean = torch.where(count > 0, mean * (members / count.clamp(min=1)), torch.nan)
    mean[above == members], mean[below == members] = torch.inf, -torch.inf
    return mean


def _broadcast(
    tensor: Tensor, group: dist.ProcessGroup | None, seconds: Seconds, *, source: int = 0
) -> None:
    """Send one member's plain tensor as bytes: not every type can be sent as it is."""
    if not tensor.numel():
        return
    sent = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = sent.view(-1).view(torch.uint8)
    work = dist.broadcast(data, group_src=source, group=group, async_op=True)
    assert work is not None
    wait_for(work, seconds)
    if sent.data_ptr() != tensor.data_ptr():
        with torch.inference_mode(tensor.is_inference()):
            tensor.copy_(sent)


Wire: TypeAlias = Literal["fp32", "bf16", "int8", "int4"]
"""What averages travel as."""

WIRES: dict[torch.dtype, Wire] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
}

DEADLINE: Seconds = default_pg_timeout.total_seconds()
"""How long collectives of torch.distributed may take, unless `init_process_group` says it."""


def wire_of(dtype: Wire | torch.dtype) -> Wire:
    """The option `dtype`, by its name or as torch's: torch.bfloat16 is "bf16"."""
    if isinstance(dtype, torch.dtype):
        if dtype not in WIRES:
            names = ", ".join(map(str, WIRES))
            raise OptionError(f"dtype is {dtype}; averages travel as one of {names}")
        return WIRES[dtype]
    one_of("dtype", dtype, get_args(Wire))
    return dtype


def wait_of(timeout: Seconds | timedelta | None) -> Seconds:
    """Seconds that a worker waits for another; None: as long as torch.distributed's own group."""
    if timeout is not None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        return above("timeout", seconds, 0)
    # What `init_process_group(timeout=...)` was given: torch has no public way to ask.
    world, timeouts = dist.group.WORLD, [0.0]
    for device in world._device_types if world else ():  # noqa: SLF001
        with suppress(RuntimeError, AttributeError):  # of a backend without options
            options = world._get_backend(device).options  # type: ignore[union-attr] # noqa: SLF001
            timeouts.append(options._timeout.total_seconds())  # noqa: SLF001
    return max(timeouts) or DEADLINE
