"""The methods that `time_to_loss.py` trains by: ours, the peers', and those that only calibrate."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peers_methods import Attach, Attached, torch_post_local, torchft_diloco, torchft_local
from time_to_loss_contenders import NEVER, TAU, Contender
from torch import nn
from torch.optim import Optimizer

from co2sim.schedule import WORLD
from realrun.algorithms.auto_delay import AutoDelay
from realrun.algorithms.counters import Stats
from realrun.execute.world import World
from realrun.train import TrainSettings
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
    """Local steps, and after each an all-reduce of so many elements that nothing waits for."""
    group = world.group("calibration", WORLD)
    under_way: list[dist.Work] = []

    def send(*_: object) -> None:
        under_way[:] = [work for work in under_way if not work.is_completed()]
        work = dist.all_reduce(torch.ones(elements), group=group, async_op=True)
        assert work is not None
        under_way.append(work)

    hook = optimizer.register_step_post_hook(send)
    yield Attached(model, optimizer)
    hook.remove()
    for work in under_way:
        work.wait()


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


@contextmanager
def said(delay: int) -> Iterator[None]:
    """Within, CO2 with delay="auto" takes this for what it measured; 0: what it did measure."""
    if not delay:
        yield
        return
    measured = AutoDelay.used

    def used(self: AutoDelay, *arguments: Any) -> int | None:
        return None if measured(self, *arguments) is None else delay

    with mock.patch.object(AutoDelay, "used", used):
        yield
