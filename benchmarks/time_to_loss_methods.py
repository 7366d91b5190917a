"""The methods that `time_to_loss.py` trains by: ours, the peers', and those that only calibrate."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from peers_methods import Attach, Attached, torch_post_local, torchft_diloco, torchft_local
from time_to_loss_contenders import NEVER, TAU, Contender
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from co2sim.schedule import WORLD
from co2sim.units import Seconds
from realrun.algorithms.counters import Stats
from realrun.execute.world import World
from realrun.train import TrainSettings
from realrun.train.loop import Build
from realrun.train.methods import Method, build
from realrun.train.outer import pairs


@dataclass
class Attachment:
    """A method of others in the place of an outer step: it tells nothing of itself."""

    stack: ExitStack

    def state_dict(self) -> dict[str, Any]:
        """Nothing: these runs are not resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def stats(self) -> Stats:
        """Nothing."""
        return Stats(rounds=0, steps=0, penalty=1.0, clipped=0.0, waited=0.0, bytes_sent=0)

    def __enter__(self) -> None:
        """It is attached already."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Detach."""
        self.stack.__exit__(kind, error, trace)


@contextmanager
def always_sending(
    model: nn.Module, optimizer: Optimizer, world: World, *, elements: int
) -> Iterator[Attached]:
    """Local steps, and beside each an all-reduce of so many elements, which ends before it."""
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
def torchft_small(model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[Attached]:
    """Local steps of the model, and torchft's averages of a small tensor for each of its tensors.

    Gloo's ring cuts a tensor into two segments a rank, of one element at least.
    """
    elements = 2 * world.layout.world_size
    small = nn.ParameterList(torch.zeros(elements) for _ in model.parameters())
    with torchft_local(small, optimizer, world, tau=TAU):
        yield Attached(model, optimizer)


def attach_of(entry: Contender, sent: int) -> Attach | None:
    """How others than ours are attached; None for those. `sent`: elements that SENDING sends."""
    if entry.peer == "torchft DiLoCo":
        options = {name: float(value) for name, value in pairs(entry.outer).items()}
        return partial(
            torchft_diloco,
            tau=TAU,
            outer_lr=options["lr"],
            outer_momentum=options["momentum"],
            bucketed=True,
        )
    return {
        "": None,
        "alone": None,
        "torch post-local SGD": partial(torch_post_local, tau=TAU),
        "torchft LocalSGD": partial(torchft_local, tau=TAU),
        "torchft small": torchft_small,
        "DDP alone": partial(torch_post_local, tau=NEVER),
        "sending": partial(always_sending, elements=sent),
    }[entry.peer]


def build_with(attach: Attach, settings: TrainSettings, model: nn.Module, world: World) -> Method:
    """The model and the optimizer of the settings with a method of others."""
    ours = build(settings, model, world)
    assert ours.outer
    with ours.outer:
        pass  # it lets go of the optimizer
    stack = ExitStack()
    theirs = stack.enter_context(attach(ours.bare, ours.optimizer, world))
    return Method(
        theirs.model,
        ours.bare,
        theirs.optimizer,
        ours.stepper,
        Attachment(stack),
        world.group("training", WORLD),
        world.layout.world_size,
    )


def build_alone(settings: TrainSettings, model: nn.Module, world: World) -> Method:
    """Our own method with workers that average with nobody: all arithmetic, and nothing is sent."""
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

    def attach(self, method: Method) -> Method:
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
) -> Method:
    """The method that `how` builds, at a pace."""
    return pace.attach(how(settings, model, world))
