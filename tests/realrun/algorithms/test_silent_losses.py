"""Trainings that would be lost without a word: they are counted, kept, or refused by name."""

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from local_problem import co2_of, network, optimizer, said, slopes, train, vector
from ranks import ranked
from torch import Tensor, nn
from torch import distributed as dist

from realrun.algorithms import Co2simError, DiLoCo, LocalSGD
from realrun.execute.world import World


class Sam(torch.optim.Optimizer):
    """Sharpness-aware: its `step` is never called, that of the optimizer inside is."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr)

    def first_step(self) -> None:
        """Climb, and remember where from."""
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["held"] = parameter.detach().clone()
            parameter.data.add_(parameter.grad, alpha=0.01)

    def second_step(self) -> None:
        """Step from there."""
        for parameter in self.param_groups[0]["params"]:
            parameter.data.copy_(self.state[parameter]["held"])
        self.base.step()


class Twice(torch.optim.AdamW):
    """Its step calls that of its parent, which has hooks, too."""

    def step(self, closure: Any = None) -> Any:
        """As the parent."""
        return super().step(closure)


@ranked(2)
def test_a_local_step_is_the_outermost_step_however_it_is_taken(world: World) -> None:
    """Of an optimizer inside, through a parent's step, and compiled: eight steps, four rounds."""

    def sam(model: nn.Module, optim: Any, step: int) -> None:
        optim.first_step()
        slopes(model, world.rank, step)
        optim.second_step()

    def plain(_: nn.Module, optim: Any, __: int) -> None:
        optim.step()

    def compiled(_: nn.Module, optim: Any, __: int) -> None:
        torch.compile(optim.step, backend="eager")()

    torch.optim.AdamW(network().parameters())  # whose class then has hooks
    for kind, step in ((Sam, sam), (Twice, plain), (torch.optim.SGD, compiled)):
        model = network()
        optim = kind(model.parameters(), lr=0.01)
        with LocalSGD(model, optim, tau=2) as local:
            for number in range(8):
                slopes(model, world.rank, number)
                step(model, optim, number)
        assert (local.stats().steps, local.stats().rounds) == (8, 4)


@ranked(2)
def test_training_that_is_not_counted_is_refused_and_kept(world: World) -> None:
    """By another optimizer, by none that counts, and without gradients; a clamp is no training."""

    def another(model: nn.Module, step: int) -> None:
        train(model, optimizer(model, "sgd"), world.rank, range(step, step + 1))

    def by_hand(model: nn.Module, _: int) -> None:
        for parameter in model.parameters():  # as the replay of a graph: no gradient, no hook
            parameter.data.add_(1.0)

    def clamp(model: nn.Module, _: int) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-2, 2)

    def assign(model: nn.Module, _: int) -> None:
        state = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: value + 1 for name, value in state.items()}, assign=True)

    for uncounted, steps, words in (
        (another, 4, "has moved|moved without"),
        (another, 0, "has moved|moved without"),
        (by_hand, 4, "has moved|moved without"),
        (assign, 0, "another tensor"),
        (clamp, 4, ""),
    ):
        model = network()
        local = LocalSGD(model, optimizer(model, "sgd"), tau=2)
        train(model, local.optimizers[0], world.rank, range(steps))
        for step in range(3):
            uncounted(model, step)
        kept = vector(model)
        if not words:
            local.finish()
            continue
        with pytest.raises(Co2simError, match=words):
            local.finish()
        assert torch.equal(kept, vector(model))
        local._close(KeyError())
        dist.barrier()


@ranked(2, last=True)
def test_a_training_that_goes_on_uncounted_is_told_of_itself(world: World) -> None:
    """After some backward passes, not only in the end."""
    model = network()
    local = LocalSGD(model, optimizer(model, "sgd"), tau=2)
    other, step_without_hooks = optimizer(model, "sgd"), torch.optim.SGD.step

    def go_on() -> None:
        for step in range(60):
            slopes(model, world.rank, step)
            step_without_hooks(other)

    assert "backward passes" in said(go_on)
    local._close(KeyError())


@ranked(2)
def test_what_is_loaded_before_the_algorithm_is_made_goes_on_bit_for_bit(world: World) -> None:
    """Within a round, and with an average under way."""
    for options in ({"staleness": 0}, {"delay": 2}):
        model, again = network(), network()
        optim = optimizer(model, "adamw")
        whole = co2_of(model, optim, tau=4, **options)
        train(model, optim, world.rank, range(10))
        states = [copy.deepcopy(part.state_dict()) for part in (model, optim, whole)]
        again.load_state_dict(states[0])
        fresh = optimizer(again, "adamw")
        fresh.load_state_dict(states[1])
        resumed = co2_of(again, fresh, tau=4, **options)
        resumed.load_state_dict(states[2])
        for trained, stepped, algorithm in ((model, optim, whole), (again, fresh, resumed)):
            train(trained, stepped, world.rank, range(10, 16))
            algorithm.finish()
        assert torch.equal(vector(model), vector(again))


@ranked(4, last=True)
def test_nodes_of_unequal_size_are_refused_on_all_ranks(world: World) -> None:
    """One, one and two ranks, each size of which divides the world."""
    os.environ["LOCAL_WORLD_SIZE"] = "1" if world.rank < 2 else "2"
    model = network()
    with pytest.raises(Co2simError, match="same number of ranks"):
        LocalSGD(model, optimizer(model, "sgd"), tau=2, worker="node")


class Rows(nn.Module):
    """An embedding whose forward pass changes its weights, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, rows: Tensor) -> Tensor:
        """Some rows, once they are short."""
        weight = self.weight
        match self.way:
            case "functional":
                return nn.functional.embedding(rows, weight, max_norm=1.0)
            case "halved":
                weight.data.div_(2.0)
            case "clamp":
                with torch.no_grad():
                    weight.clamp_(-0.5, 0.5)
            case "data":
                weight.data.clamp_(-0.5, 0.5)
            case "assigned":
                weight.data = torch.renorm(weight.data, 2, 0, 1.0)
            case "drawn rows":
                with torch.no_grad():
                    weight[rows] = nn.functional.normalize(weight[rows], dim=-1)
        return nn.functional.embedding(rows, weight)


WAYS = ["max_norm", "bag", "functional", "clamp", "data", "assigned", "drawn rows", "halved"]


def embedding(way: str) -> nn.Module:
    """A layer of that way."""
    if way in {"max_norm", "bag"}:
        return (nn.Embedding if way == "max_norm" else nn.EmbeddingBag)(8, 6, max_norm=1.0)
    return Rows(way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("container", ["sequential", "dict"])
@ranked(2)
def test_layers_that_change_their_weights_in_forward_train_by_the_equations(
    world: World, way: str, container: str
) -> None:
    """On each rank's own data, before the first step, and in batches that make no step.

    Those of DiLoCo; batches are accumulated.
    """
    ends = []
    for counted in (True, False):
        torch.manual_seed(0)
        layers: Sequence[nn.Module] = [embedding(way), nn.Linear(6, 1)]
        model: nn.Module = nn.Sequential(*layers)
        if container == "dict":
            model = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})
        anchor = vector(model)

        def average(model: nn.Module = model, anchor: Tensor = anchor) -> None:
            mean = vector(model)
            dist.all_reduce(mean)
            anchor.lerp_(mean / dist.get_world_size(), 0.7)
            nn.utils.vector_to_parameters(anchor.clone(), model.parameters())

        ended: Callable[[], object] = bool if counted else average
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        local = DiLoCo(model, optim, tau=2, outer_lr=0.7, outer_momentum=0) if counted else None
        for batch in range(23):
            numbers = torch.Generator().manual_seed(100 * world.rank + batch)
            out = torch.randint(0, 8, (5, 1), generator=numbers)
            for layer in layers if container == "dict" else (model,):
                out = layer(out)
            out.sub(1).square().mean().backward()
            if batch % 3 == 2:
                optim.step()
                optim.zero_grad()
            if batch % 6 == 5:
                ended()
        ended()
        if local:
            local.finish()
        ends.append(vector(model))
    assert (ends[0] - ends[1]).abs().max() < 1e-6
