"""What ranks of the tests do in which a training could be lost without a word."""

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from local_problem import co2_of, said
from torch import Tensor, nn

from realrun.algorithms import DiLoCo, LocalSGD
from realrun.execute.world import World


def network() -> nn.Module:
    """A small model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


def slopes(model: nn.Module, rank: int, step: int) -> None:
    """Gradients of this rank's data of a step."""
    numbers = torch.Generator().manual_seed(1000 * rank + step)
    x, y = torch.randn(4, 6, generator=numbers), torch.randn(4, 1, generator=numbers)
    model.zero_grad()
    ((model(x) - y) ** 2).mean().backward()


def flat(model: nn.Module) -> Tensor:
    """All parameters."""
    return torch.cat([one.detach().flatten() for one in model.parameters()])


class Sam(torch.optim.Optimizer):
    """Sharpness-aware: its `step` is never called, that of the optimizer inside is."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr)

    def first_step(self) -> None:
        """Climb, and remember where from."""
        for one in self.param_groups[0]["params"]:
            self.state[one]["held"] = one.detach().clone()
            one.data.add_(one.grad, alpha=0.01)

    def second_step(self) -> None:
        """Step from there."""
        for one in self.param_groups[0]["params"]:
            one.data.copy_(self.state[one]["held"])
        self.base.step()


class Twice(torch.optim.AdamW):
    """Its step calls that of its parent, which has hooks, too."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """As the parent."""
        return super().step(closure)


def counted(world: World) -> dict[str, list[int]]:
    """Steps and rounds of eight steps in rounds of two, however they are taken."""
    torch.optim.AdamW(network().parameters())  # whose class then has hooks

    def count(optimizer: Callable[[Any], torch.optim.Optimizer], step: Any) -> list[int]:
        model = network()
        made = optimizer(model.parameters())
        with LocalSGD(model, made, tau=2) as local:
            for number in range(8):
                slopes(model, world.rank, number)
                step(model, made, number)
        return [local.stats().steps, local.stats().rounds]

    def sam(model: nn.Module, made: Any, number: int) -> None:
        made.first_step()
        slopes(model, world.rank, number)
        made.second_step()

    return {
        "inside": count(lambda each: Sam(each, 0.05), sam),
        "twice": count(lambda each: Twice(each, lr=0.01), lambda _, made, __: made.step()),
        "compiled": count(
            lambda each: torch.optim.AdamW(each, lr=0.01),
            lambda _, made, __: torch.compile(made.step, backend="eager")(),
        ),
    }


def lost(world: World) -> dict[str, Any]:
    """What is said where the model is trained by steps that are not counted; it keeps them."""
    found: dict[str, Any] = {}

    def train(name: str, uncounted: Callable[[nn.Module, int], None], steps: int = 4) -> None:
        model = network()
        local = LocalSGD(model, torch.optim.SGD(model.parameters(), 0.05), tau=2)
        for number in range(steps):
            slopes(model, world.rank, number)
            local.optimizers[0].step()
        for number in range(3):
            uncounted(model, number)
        kept = flat(model)
        found[name] = [said(local.finish), bool(torch.equal(kept, flat(model)))]
        with_error = local.close if not found[name][0] else lambda: local._close(KeyError())
        with_error()
        dist.barrier()

    def another(model: nn.Module, number: int) -> None:
        slopes(model, world.rank, number)
        torch.optim.SGD(model.parameters(), 0.05).step()

    def by_hand(model: nn.Module, number: int) -> None:
        del number
        for one in model.parameters():  # as the replay of a graph: no gradient, no hook
            one.data.add_(1.0)

    train("another optimizer", another)
    train("never counted", another, steps=0)
    train("by hand", by_hand)
    train("clamped", lambda model, _: [one.data.clamp_(-1, 1) for one in model.parameters()][:0])
    model = network()
    other = {name: one + 1 for name, one in copy.deepcopy(model.state_dict()).items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    local = LocalSGD(model, optimizer, tau=2)
    model.load_state_dict(other, assign=True)
    found["assigned"] = [said(local.finish), True]
    local._close(KeyError())
    return found


def in_passes(world: World) -> str:
    """What is said in the midst of a training that no algorithm counts."""
    model = network()
    local = LocalSGD(model, torch.optim.SGD(model.parameters(), 0.05), tau=2)
    second = torch.optim.SGD(model.parameters(), 0.05)
    second_step = torch.optim.SGD.step

    def train() -> None:
        for number in range(60):
            slopes(model, world.rank, number)
            second_step(second)

    try:
        return said(train)
    finally:
        local._close(KeyError())


def resumed(world: World) -> list[float]:
    """How far a run that loads, and then wraps, ends from the one that was not interrupted."""
    found = []
    for made in (
        lambda model, optimizer: LocalSGD(model, optimizer, tau=4),
        lambda model, optimizer: co2_of(model, optimizer, tau=4, delay=2),
    ):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        local = made(model, optimizer)
        for number in range(10):
            slopes(model, world.rank, number)
            optimizer.step()
        parts = [copy.deepcopy(one.state_dict()) for one in (model, optimizer, local)]
        again = network()
        again.load_state_dict(parts[0])
        fresh = torch.optim.AdamW(again.parameters(), lr=0.01)
        fresh.load_state_dict(parts[1])
        other = made(again, fresh)
        other.load_state_dict(parts[2])
        for one, stepped in ((model, optimizer), (again, fresh)):
            for number in range(10, 16):
                slopes(one, world.rank, number)
                stepped.step()
        local.finish()
        other.finish()
        found.append(float((flat(model) - flat(again)).abs().max()))
    return found


def uneven(world: World) -> str:
    """What is said of nodes of one and of two ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = "1" if world.rank < 2 else "2"
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    return said(lambda: LocalSGD(model, optimizer, tau=2, worker="node"))


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


def _embedding(way: str) -> nn.Module:
    if way == "max_norm":
        return nn.Embedding(8, 6, max_norm=1.0)
    if way == "bag":
        return nn.EmbeddingBag(8, 6, max_norm=1.0)
    return Rows(way)


def in_forward(world: World, way: str, container: str) -> float:
    """How far DiLoCo ends from its equations where the forward pass changes weights.

    Batches are accumulated, and the last ones make no step.
    """

    def trained(model: nn.Module, each: Sequence[nn.Module], ended: Callable[[], None]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = DiLoCo(model, optimizer, tau=2, outer_lr=0.7, outer_momentum=0) if counted else None
        for batch in range(23):
            numbers = torch.Generator().manual_seed(100 * world.rank + batch)
            out = torch.randint(0, 8, (5, 1), generator=numbers)
            for one in each if container == "dict" else (model,):
                out = one(out)
            out.sub(1).square().mean().backward()
            if batch % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            if batch % 6 == 5:
                ended()
        ended()
        if local:
            local.finish()

    ends = []
    for counted in (True, False):
        torch.manual_seed(0)
        each = [_embedding(way), nn.Linear(6, 1)]
        model: nn.Module = nn.Sequential(*each)
        if container == "dict":
            model = nn.ModuleDict({str(at): one for at, one in enumerate(each)})
        anchor = flat(model)

        def average(model: nn.Module = model, anchor: Tensor = anchor) -> None:
            mean = flat(model)
            dist.all_reduce(mean)
            anchor.lerp_(mean / dist.get_world_size(), 0.7)
            nn.utils.vector_to_parameters(anchor.clone(), model.parameters())

        trained(model, each, (lambda: None) if counted else average)
        ends.append(flat(model))
    return float((ends[0] - ends[1]).abs().max())
