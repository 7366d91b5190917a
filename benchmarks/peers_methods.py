"""The peers and our algorithms: each is attached to a model and an optimizer for a while."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from realrun.algorithms import CO2, DiLoCo, LocalSGD
from realrun.execute.world import World

NODES = 4
TAU = 12
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5
FRAGMENTS = 3


@dataclass(frozen=True, slots=True)
class Attached:
    """What a step calls: a model, and an optimizer."""

    model: nn.Module
    optimizer: Any


Attach = Callable[[nn.Module, Optimizer, World], contextlib.AbstractContextManager[Attached]]


@contextmanager
def torch_ddp(model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[Attached]:
    """DistributedDataParallel."""
    del world
    yield Attached(DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer)


@contextmanager
def torch_post_local(
    model: nn.Module, optimizer: Optimizer, world: World, *, tau: int = TAU
) -> Iterator[Attached]:
    """PostLocalSGDOptimizer: no gradient is reduced from the first step on, models are averaged."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    alone, _ = dist.new_subgroups(1)
    state = PostLocalSGDState(None, alone, 0, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=tau)
    averager.step = 1  # it would average after the first step, else after every tau steps
    del world
    yield Attached(wrapped, PostLocalSGDOptimizer(optim=optimizer, averager=averager))


@contextmanager
def our_local(model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[Attached]:
    """LocalSGD."""
    with LocalSGD(model, optimizer, tau=TAU, timeout=world.deadline):
        yield Attached(model, optimizer)


@contextmanager
def our_diloco(model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[Attached]:
    """DiLoCo."""
    with DiLoCo(
        model,
        optimizer,
        tau=TAU,
        outer_lr=OUTER_LR,
        outer_momentum=OUTER_MOMENTUM,
        timeout=world.deadline,
    ):
        yield Attached(model, optimizer)


@contextmanager
def our_co2(model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[Attached]:
    """CO2."""
    with CO2(
        model,
        optimizer,
        tau=TAU,
        outer_lr=0.5,
        outer_momentum=0.0,
        gap="gap_aware",
        timeout=world.deadline,
    ):
        yield Attached(model, optimizer)


@contextmanager
def our_co2_delayed(model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[Attached]:
    """CO2 whose averages are used as soon as they may be there."""
    with CO2(model, optimizer, tau=TAU, delay="auto", timeout=world.deadline):
        yield Attached(model, optimizer)


@contextmanager
def our_streaming_diloco(
    model: nn.Module, optimizer: Optimizer, world: World
) -> Iterator[Attached]:
    """DiLoCo in fragments, each of which is used late: as many steps as it takes."""
    with DiLoCo(
        model,
        optimizer,
        tau=TAU,
        outer_lr=OUTER_LR,
        outer_momentum=OUTER_MOMENTUM,
        fragments=FRAGMENTS,
        delay="auto",
        timeout=world.deadline,
    ):
        yield Attached(model, optimizer)


@contextmanager
def _manager(model: nn.Module, world: World) -> Iterator[Any]:
    """A Manager of torchft: every rank is a replica, rank 0 hosts the lighthouse.

    Replicas tell each other their host's name; nodes of the lab have only addresses.
    """
    host, size = _own_address(), world.layout.world_size
    socket.gethostname = lambda: host
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415
    from torchft._torchft import LighthouseServer  # noqa: PLC0415

    shared: list[Any] = [None]
    lighthouse = None
    if world.rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=size, join_timeout_ms=1000)
        port = lighthouse.address().rpartition(":")[2]
        shared = [f"http://{host}:{port}"]
    dist.broadcast_object_list(shared)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    limit = timedelta(seconds=world.deadline)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=size,
        init_sync=False,  # weights are equal; else the first round of all but one is lost
        use_async_quorum=False,
        timeout=limit,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=shared[0],
        replica_id=f"rank{world.rank}_",
        hostname=host,
    )
    try:
        yield manager
        dist.barrier()
    finally:
        manager.shutdown(wait=False)
        if lighthouse:
            lighthouse.shutdown()


@contextmanager
def _silent() -> Iterator[None]:
    """Without stderr: torchft tells every quorum there, and cannot be asked not to."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _own_address() -> str:
    """The address of this node, as the others see it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])


@contextmanager
def torchft_local(
    model: nn.Module, optimizer: Optimizer, world: World, *, tau: int = TAU
) -> Iterator[Attached]:
    """LocalSGD of torchft."""
    from torchft.local_sgd import LocalSGD as Theirs  # noqa: PLC0415

    with (
        _silent(),
        _manager(model, world) as manager,
        Theirs(manager, model, optimizer, sync_every=tau),
    ):
        yield Attached(model, optimizer)


@contextmanager
def torchft_diloco(
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    tau: int = TAU,
    outer_lr: float = OUTER_LR,
    outer_momentum: float = OUTER_MOMENTUM,
    bucketed: bool = False,
) -> Iterator[Attached]:
    """DiLoCo of torchft, the whole model as one fragment.

    It averages every tensor by itself unless it is `bucketed`.
    """
    from torchft.local_sgd import DiLoCo as Theirs  # noqa: PLC0415

    outer = torch.optim.SGD(
        model.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
    )
    with (
        _silent(),
        _manager(model, world) as manager,
        Theirs(
            manager,
            [model],
            optimizer,
            outer,
            sync_every=tau,
            pin_memory=False,
            use_bucketization=bucketed,
        ),
    ):
        yield Attached(model, optimizer)
