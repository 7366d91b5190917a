"""The ranks of a run: who and where we are, and a communicator for every stream and group.

Threads that communicate are scheduled by Linux otherwise than those that compute (`communicating`).
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from co2sim.hardware.cluster import Backend
from co2sim.schedule.schedule import Collective, Group, Layout, Schedule
from realrun.errors import REALTIME, RankFailure, refuse_different, sites_of
from realrun.lab.time_dilation import dilation, now
from realrun.launch.monitor import Place, Store, Watch

_FIRST = 1
"""Priority of all of them, of 1 to 99. It has to be one: some ask in a loop what others have done,
and give way to their equals only (torch 2.13: the end of a buffer that Gloo's loop still holds)."""


@contextlib.contextmanager
def communicating() -> Iterator[None]:
    """Threads that are started inside communicate: make process groups here.

    Where REALRUN_REALTIME is 1 they are SCHED_FIFO and take a core at once, as a network card does
    not wait for a kernel either. Beside matrix products a message waited for milliseconds
    otherwise: Linux leaves a busy core to its thread until a time slice ends (docs/real-runs.md).

    Elsewhere they are SCHED_BATCH and interrupt nothing when they wake up. A process group of Gloo
    has a thread that serves its sockets. While another thread holds the lock of a connection, that
    thread asks again and again without a pause (torch 2.13: epoll_wait and pthread_mutex_trylock).
    If it has just interrupted the thread with the lock, on the same core, both stand still until
    its time slice ends. Measured with three ranks on two cores: an all-reduce of 1 KiB took 3.9 ms,
    and takes 1.3 ms with SCHED_BATCH.
    """
    if not _ordinary():
        yield  # the user has chosen a policy
        return
    changed = first() or _become("SCHED_BATCH")
    try:
        yield
    finally:
        if changed:
            _become("SCHED_OTHER")


def first() -> bool:
    """This thread communicates from now on. Whether it comes first: if asked, and allowed."""
    return os.environ.get(REALTIME) == "1" and _ordinary() and _become("SCHED_FIFO", _FIRST)


def _ordinary() -> bool:
    """Whether this thread has the usual policy, and the system others."""
    with contextlib.suppress(AttributeError, OSError):
        return os.sched_getscheduler(0) == os.SCHED_OTHER
    return False


def _become(policy: str, priority: int = 0) -> bool:
    """Change the policy of this thread. Whether the system has it, and allows it."""
    try:
        os.sched_setscheduler(0, getattr(os, policy), os.sched_param(priority))
    except (AttributeError, OSError):  # no Linux, or a sandbox that refuses: only slower
        return False
    return True


_PINGS = 32


@dataclass(frozen=True, slots=True)
class Clock:
    """Gives rank 0's clock (`dilation.now`), wrong by at most `error` seconds."""

    offset: Seconds = 0.0
    error: Seconds = 0.0

    def now(self) -> Seconds:
        """Seconds since some moment that all ranks share."""
        return now() + self.offset


def synchronize(rank: int, world_size: int, machine: str) -> Clock:
    """Agree on rank 0's clock; ranks of one machine share it anyway. All ranks call this.

    Each rank asks rank 0 for its time; the answer of the fastest of several round trips is taken
    to be from its middle, which is wrong by at most half of that trip (Cristian 1989).
    """
    machines: list[str | None] = [None] * world_size
    dist.all_gather_object(machines, machine)
    if len(set(machines)) == 1:
        return Clock()
    clock = Clock()
    for other in range(1, world_size):
        if rank == 0:
            _answer(other)
        elif rank == other:
            clock = _ask()
    return clock


def _answer(other: int) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        dist.recv(message, other)
        message[0] = now()
        dist.send(message, other)


def _ask() -> Clock:
    message = torch.zeros(1, dtype=torch.float64)
    best = Clock(error=float("inf"))
    for _ in range(_PINGS):
        start = now()
        dist.send(message, 0)
        dist.recv(message, 0)
        end = now()
        if (end - start) / 2 < best.error:
            best = Clock(message.item() - (start + end) / 2, (end - start) / 2)
    return best


NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of a rank, as torchrun sets them."""


@dataclass(frozen=True, slots=True)
class RankCommunicator:
    """A process group for the collectives of one stream. `me` is this rank's place in `members`.

    They stand on `nodes` nodes, in order and as many on each.
    """

    group: dist.ProcessGroup
    members: tuple[int, ...]
    me: int
    nodes: int = 1
    _rooms: list[torch.Tensor] = field(default_factory=list, repr=False, compare=False)

    def room(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for what comes in, until the next call; collectives of a stream take turns.

        It is kept: new memory would be paged in while bytes arrive, which takes longer than they.
        """
        size = elements * dtype.itemsize
        if not self._rooms or len(self._rooms[0]) < size:
            self._rooms[:] = [torch.empty(size, dtype=torch.uint8)]
        return self._rooms[0][:size].view(dtype)

    @property
    def next(self) -> int:
        """Place of the next member around the ring."""
        return (self.me + 1) % len(self.members)

    @property
    def previous(self) -> int:
        """Place of the member before."""
        return (self.me - 1) % len(self.members)


@dataclass(eq=False)
class World:
    """This process among the others. `deadline` bounds every wait for others.

    Sites of `layout` are those that REALRUN_SITES says, or those of the cluster at hand (`place`).
    """

    rank: int
    layout: Layout
    backend: Backend
    device: torch.device
    deadline: Seconds
    store: Store
    watch: Watch
    clock: Clock = field(default_factory=Clock)
    _made: dict[tuple[str, Group], RankCommunicator | None] = field(default_factory=dict)
    _groups: dict[tuple[str, Group], dist.ProcessGroup] = field(default_factory=dict)

    def connect(self, schedule: Schedule) -> None:
        """Make the communicators of a schedule: one per stream and group. All ranks call this.

        Raises MismatchError when another rank has another schedule.
        """
        self.agree("schedule", str(schedule))
        with self.together("connection of communicators"):
            for op in schedule.body:
                if isinstance(op.work, Collective):
                    self._connect(op.stream, op.work.group)

    def place(self, layout: Layout) -> None:
        """Take over the sites of a cluster with as many ranks. All ranks call this."""
        if layout != self.layout:
            self.layout = layout
            self._made.clear()  # groups may have other members now
            self._groups.clear()

    def communicator(self, stream: str, group: Group) -> RankCommunicator | None:
        """The communicator of a connected schedule; None if this rank is alone in the group."""
        return self._made[stream, group]

    def _connect(self, stream: str, kind: Group) -> None:
        if (stream, kind) in self._made:
            return
        group, members = self._meeting(kind, self.backend)
        self._made[stream, kind] = None
        if len(members) > 1:
            nodes = len({rank // self.layout.gpus_per_node for rank in members})
            index = members.index(self.rank)
            self._made[stream, kind] = RankCommunicator(group, members, index, nodes)

    def _meeting(
        self, kind: Group, backend: str | None = None
    ) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
        """Make the process groups of a kind; that of this rank, and its members."""
        limit, ranks = timedelta(seconds=self.deadline), range(self.layout.world_size)
        for members in dict.fromkeys(kind.members(rank, self.layout) for rank in ranks):
            with communicating():
                made = dist.new_group(list(members), timeout=limit, backend=backend)
            if self.rank in members:
                joined = made, tuple(members)
        return joined

    def group(self, purpose: str, kind: Group) -> dist.ProcessGroup:
        """The process group of this kind for a purpose, made at the first call. All ranks call it.

        It is never destroyed: DTensor finds groups by their ranks, even those that are gone.
        """
        if (purpose, kind) not in self._groups:
            self._groups[purpose, kind], _ = self._meeting(kind)
        return self._groups[purpose, kind]

    def agree(self, what: str, text: str) -> None:
        """Compare a text among ranks. Raises MismatchError, which names the first difference."""
        texts = [""] * self.layout.world_size
        with self.together(f"agreement on the {what}"):
            dist.all_gather_object(texts, text)
        refuse_different(what, texts, range(len(texts)))

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """For what all ranks do outside of a schedule. Raises RankFailure if one of them fails."""
        try:
            yield
        except RuntimeError as error:
            everybody = range(self.layout.world_size)
            raise self.watch.lost(Place(-1, 0, what), everybody, error) from error

    def leave(self) -> None:
        """Leave the others: all have done their work."""
        self.watch.stop()
        self._made.clear()
        self._groups.clear()
        dist.destroy_process_group()


def join(
    backend: Backend, deadline: Seconds, environment: Mapping[str, str] | None = None
) -> World:
    """Join the ranks that torchrun, Slurm or our own launcher started.

    Raises OptionError when the environment does not say which rank this is, and RankFailure when
    not all ranks join within `deadline` seconds.
    """
    env = os.environ if environment is None else environment
    missing = [name for name in NEEDED if name not in env]
    if missing:
        raise OptionError(
            f"{missing[0]} is not set: start ranks with `realrun run --nproc N`, `realrun lab run`"
            " or torchrun"
        )
    rank, size, local, per_node, port = (
        int(env[name])
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    )
    if size % per_node:
        raise OptionError(
            f"WORLD_SIZE={size} is not a multiple of LOCAL_WORLD_SIZE={per_node}: all nodes must"
            " have the same number of ranks"
        )
    device = torch.device("cpu")
    if backend == "nccl":
        need_gpus(local + 1)
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
    limit = timedelta(seconds=deadline)
    hosted = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = env["MASTER_ADDR"]
    try:
        store = _connected(env, size, limit, hosts=not hosted and rank == 0)
        watch = Watch(_connected(env, size, limit, hosts=False), rank, size)
    except (RuntimeError, ValueError) as error:
        raise RankFailure(f"rank {rank} cannot reach {address}:{port}: {error}") from error
    _wait_for_all(store, watch, rank, size, deadline)
    try:
        with communicating():
            dist.init_process_group(
                "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl",
                store=PrefixStore("world", store),
                rank=rank,
                world_size=size,
                timeout=limit,
                device_id=None if backend == "gloo" else device,
            )
    except RuntimeError as error:
        raise watch.lost(Place(-1, 0, "start-up"), range(size), error) from error
    layout = Layout(size // per_node, per_node, sites_of(env))
    world = World(rank, layout, backend, device, deadline, store, watch)
    with world.together("comparison of clocks"):
        world.clock = synchronize(rank, size, _machine())
    return world


def end(code: int = 0) -> NoReturn:
    """End the process of a rank that has left, or cannot, without tearing the interpreter down.

    All output is written by then. A normal exit would wait for threads that wait for ranks that are
    gone. And a thread of Gloo that waits for Python's lock meanwhile, to give a tensor back, aborts
    the process ("terminate called without an active exception", Python before 3.14), which would
    look like a failed rank.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def need_gpus(count: int) -> None:
    """Raise OptionError unless this node has as many GPUs."""
    devices = torch.cuda.device_count()
    if not devices:
        raise OptionError("backend nccl needs CUDA devices, and there is none; use --backend gloo")
    if devices < count:
        raise OptionError(f"{count} ranks need a GPU each, and this node has {devices}")


def _connected(
    env: Mapping[str, str], size: int, limit: timedelta, *, hosts: bool
) -> TCPStore | PrefixStore:
    port = int(env["MASTER_PORT"])
    store = TCPStore(env["MASTER_ADDR"], port, size, hosts, limit, wait_for_workers=False)
    return _of_attempt(store, env)


def _of_attempt(store: TCPStore | PrefixStore, env: Mapping[str, str]) -> TCPStore | PrefixStore:
    """The store without what ranks wrote before torchrun restarted them: it keeps its store."""
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store if attempt == "0" else PrefixStore(f"attempt{attempt}", store)


def _wait_for_all(store: Store, watch: Watch, rank: int, size: int, deadline: Seconds) -> None:
    """Wait until every rank has come; a rank that has not within the deadline is missing."""
    store.set(f"realrun/joined/{rank}", "1")
    limit = time.monotonic() + deadline
    missing = list(range(size))
    while missing:
        missing = [other for other in missing if not store.check([f"realrun/joined/{other}"])]
        if watch.failure:
            raise watch.failure
        if missing and time.monotonic() > limit:
            raise watch.missing(missing, f"did not come within {deadline:g} s")
        if missing:
            time.sleep(0.05)


def _machine() -> str:
    """The name of the machine whose clock this process reads."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()


def gather_objects(world: World, value: object) -> list[object] | None:
    """The values of all ranks, on rank 0; None elsewhere."""
    answers: list[object] | None = [None] * world.layout.world_size if world.rank == 0 else None
    with world.together("collection of results"):
        dist.gather_object(value, answers)
    return answers


def describe(device: torch.device, backend: Backend) -> dict[str, str]:
    """Versions and hardware of this run, as a text."""
    hardware = "CPU"
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    cores = os.cpu_count()
    return {
        "dilation": str(dilation()),
        "torch": torch.__version__,
        "backend": backend,
        "hardware": hardware,
        "host": json.dumps({"cores": cores, "threads": torch.get_num_threads()}),
    }
