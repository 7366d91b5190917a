"""Methods of torch and torchft in the place of ours in `realrun train`, and steps at a pace."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from co2sim.common.units import Seconds
from co2sim.schedule.schedule import WORLD
from realrun.algorithms import Stats
from realrun.execute.world import World
from realrun.train import History, TrainSettings
from realrun.train.loop import Build
from realrun.train.parallelize import WrappedModel, build


@dataclass(frozen=True, slots=True)
class Attached:
    """What a step calls: a model, and an optimizer."""

    model: nn.Module
    optimizer: Any


Attach = Callable[[nn.Module, Optimizer, World], contextlib.AbstractContextManager[Attached]]


def installed(method: str) -> bool:
    """Whether a method can be run here: torchft's only with torchft."""
    return not method.startswith("torchft") or find_spec("torchft") is not None


_NEVER = 10_000
"""Steps of a round that does not end."""


@contextmanager
def torch_post_local(
    model: nn.Module, optimizer: Optimizer, world: World, *, tau: int
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
def _manager(model: nn.Module, world: World) -> Iterator[Any]:
    """A Manager of torchft: every rank is a replica, rank 0 hosts the lighthouse.

    Replicas tell each other their host's name; nodes of the lab have only addresses.
    """
    host, size = _own_address(), world.layout.world_size
    socket.gethostname = lambda: host
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415 - may be missing
    from torchft._torchft import LighthouseServer  # noqa: PLC0415 - as above

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
    model: nn.Module, optimizer: Optimizer, world: World, *, tau: int
) -> Iterator[Attached]:
    """LocalSGD of torchft."""
    from torchft.local_sgd import LocalSGD as Theirs  # noqa: PLC0415 - may be missing

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
    tau: int,
    outer_lr: float,
    outer_momentum: float,
) -> Iterator[Attached]:
    """DiLoCo of torchft, the whole model as one fragment, in buckets of several tensors."""
    from torchft.local_sgd import DiLoCo as Theirs  # noqa: PLC0415 - may be missing

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
            use_bucketization=True,
        ),
    ):
        yield Attached(model, optimizer)


class Attachment(ExitStack):
    """A method of others in the place of an outer step: it tells nothing of itself."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: these runs are not resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def stats(self) -> Stats:
        """Nothing."""
        return Stats(
            rounds=0,
            steps=0,
            penalty=1.0,
            clipped=0.0,
            clip_residual=0.0,
            rounding_residual=0.0,
            waited=0.0,
            bytes_sent=0,
        )


@contextmanager
def always_sending(
    model: nn.Module, optimizer: Optimizer, world: World, *, elements: int
) -> Iterator[Attached]:
    """Local steps, and beside each an all-reduce of these elements, which ends before it."""
    group = world.group("calibration", WORLD)
    under_way: list[dist.Work] = []

    def send(*_: object) -> None:
        for before in under_way:
            before.wait()
        work = dist.all_reduce(torch.ones(elements), group=group, async_op=True)
        assert work is not None
        under_way[:] = [work]

    hook = optimizer.register_step_post_hook(send)
    yield Attached(model, optimizer)
    hook.remove()
    for work in under_way:
        work.wait()


@contextmanager
def torchft_small(
    model: nn.Module, optimizer: Optimizer, world: World, *, tau: int
) -> Iterator[Attached]:
    """Local steps of the model, and torchft's averages of a small tensor for each of its tensors.

    Gloo's ring cuts a tensor into two segments a rank, of one element at least.
    """
    elements = 2 * world.layout.world_size
    small = nn.ParameterList(torch.zeros(elements) for _ in model.parameters())
    with torchft_local(small, optimizer, world, tau=tau):
        yield Attached(model, optimizer)


def attach_of(peer: str, tau: int, outer: Mapping[str, str], elements: int = 0) -> Attach | None:
    """How a method of others, or a calibration, is attached; None for ours.

    `outer` are the options of DiLoCo's outer step; `elements` are sent beside each step.
    """
    if peer == "torchft DiLoCo":
        lr, momentum = float(outer["lr"]), float(outer["momentum"])
        return partial(torchft_diloco, tau=tau, outer_lr=lr, outer_momentum=momentum)
    return {
        "torch post-local SGD": partial(torch_post_local, tau=tau),
        "torchft LocalSGD": partial(torchft_local, tau=tau),
        "torchft small": partial(torchft_small, tau=tau),
        "torch alone": partial(torch_post_local, tau=_NEVER),
        "sending": partial(always_sending, elements=elements),
    }.get(peer)


def build_with(
    attach: Attach, settings: TrainSettings, model: nn.Module, world: World
) -> WrappedModel:
    """The model and the optimizer of the settings with a method of others."""
    ours = build(settings, model, world)
    assert ours.outer
    with ours.outer:
        pass  # it lets go of the optimizer
    stack = Attachment()
    theirs = stack.enter_context(attach(ours.bare, ours.optimizer, world))
    return WrappedModel(
        theirs.model,
        ours.bare,
        theirs.optimizer,
        ours.stepper,
        stack,
        world.group("training", WORLD),
        world.layout.world_size,
    )


def build_alone(settings: TrainSettings, model: nn.Module, world: World) -> WrappedModel:
    """Our own method with workers that do not average: all arithmetic, and nothing is sent."""
    own, _ = dist.new_subgroups(1)
    return build(settings, model, replace(world, _groups={("training", WORLD): own}))


@dataclass
class Pace:
    """Makes a local step take `target` at least: a device whose speed is known.

    The forward and backward pass are real, and the rest of the time is waited for, before anything
    is sent: in DDP before the last bucket, else before the optimizer's step. `late` of `steps` took
    longer than the target by themselves.
    """

    target: Seconds
    steps: int = 0
    late: int = 0
    _began: Seconds = 0.0

    def attach(self, method: WrappedModel) -> WrappedModel:
        """Pace the steps of a method from now on."""
        method.bare.register_forward_pre_hook(self._begin)
        model, optimizer = method.model, method.optimizer
        if isinstance(optimizer, PostLocalSGDOptimizer):
            optimizer.optim.register_step_pre_hook(self._wait)
        elif isinstance(model, DistributedDataParallel):
            model.register_comm_hook(model.process_group, self._reduce)
        else:
            optimizer.register_step_pre_hook(self._wait)
        return method

    def _begin(self, *_: object) -> None:
        self._began = time.monotonic()

    def _wait(self, *_: object) -> None:
        left = self._began + self.target - time.monotonic()
        self.steps += 1
        self.late += left < 0
        time.sleep(max(0.0, left))

    def _reduce(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            self._wait()
        return allreduce_hook(group, bucket)


def paced(
    pace: Pace, how: Build, settings: TrainSettings, model: nn.Module, world: World
) -> WrappedModel:
    """The method that `how` builds, at a pace."""
    return pace.attach(how(settings, model, world))


def figures(history: History) -> dict[str, Any]:
    """Of a run: seconds of a step after the first rows, waits, and the losses."""
    rows = history.rows
    first, last = rows[0], rows[-1]
    seen = [r for r in rows if r.validation_loss is not None]
    return {
        "step_s": (last.seconds - first.seconds) / (last.step - first.step),
        "waited": last.waited,
        "rounds": last.rounds,
        "used_delay": last.delay,
        "curve": json.dumps([[r.step, r.seconds, r.validation_loss] for r in seen]),
        "error": "",
    }


Point = tuple[float, float, float]
"""Step, seconds, validation loss."""


def curve(row: Mapping[str, Any]) -> list[Point]:
    """The validations of a run."""
    return [(float(step), float(s), float(loss)) for step, s, loss in json.loads(row["curve"])]
