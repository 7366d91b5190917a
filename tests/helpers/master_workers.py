"""What ranks of the tests of master weights do: train in bf16, with masters in four layouts."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from local_problem import said
from torch import Tensor, nn

from realrun import algorithms
from realrun.execute.world import World

LR, TAU, STEPS = 0.05, 3, 8


def network() -> nn.Module:
    """A small model in bf16."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).bfloat16()


def slopes(model: nn.Module, worker: int, step: int) -> None:
    """The gradients of a worker at a step."""
    numbers = torch.Generator().manual_seed(100 * worker + step)
    x = torch.randn(8, 5, generator=numbers).to(next(model.parameters()).dtype)
    model.zero_grad()
    (model(x) - x[:, :1] * (worker - 0.5)).square().mean().backward()


class InState(torch.optim.SGD):
    """As FusedAdam of Transformer Engine: masters in the state, made at the first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """From the masters."""
        del closure
        for one in self.param_groups[0]["params"]:
            kept = self.state[one].setdefault("master_param", one.detach().float().clone())
            kept.sub_(one.grad.float(), alpha=LR)
            one.copy_(kept)


class InGroups(torch.optim.SGD):
    """As FusedAdam of Apex: masters in groups of their own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        copies = [one.detach().float().clone() for one in self.param_groups[0]["params"]]
        self.param_groups_master = [{"params": copies}]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """From the masters."""
        del closure
        pairs = zip(
            self.param_groups[0]["params"], self.param_groups_master[0]["params"], strict=True
        )
        for one, kept in pairs:
            kept.sub_(one.grad.float(), alpha=LR)
            one.copy_(kept)


def in_state(model: nn.Module) -> tuple[torch.optim.Optimizer, Any, Callable[[], None]]:
    """The optimizer, the option `master_weights`, and what a loop calls for a step."""
    made = InState(model.parameters(), LR)
    return made, "master_param", made.step


def in_groups(model: nn.Module) -> tuple[torch.optim.Optimizer, Any, Callable[[], None]]:
    """The same as Apex keeps them."""
    made = InGroups(model.parameters(), LR)
    return made, "param_groups_master", made.step


def as_main(model: nn.Module) -> tuple[torch.optim.Optimizer, Any, Callable[[], None]]:
    """As Megatron: the optimizer has the masters, each an attribute of its parameter."""
    for one in model.parameters():
        one.main_param = nn.Parameter(one.detach().float().clone())  # type: ignore[attr-defined]
    inner = torch.optim.SGD([one.main_param for one in model.parameters()], LR)  # type: ignore[attr-defined]
    return inner, lambda one: one.main_param, lambda: _step_main(model, inner)


def flat(model: nn.Module) -> tuple[torch.optim.Optimizer, Any, Callable[[], None]]:
    """As DeepSpeed: one flat master, of which each parameter has a part."""
    every = list(model.parameters())
    whole = nn.Parameter(torch.cat([one.detach().float().flatten() for one in every]))
    ends = torch.tensor([one.numel() for one in every]).cumsum(0).tolist()
    parts = {
        id(one): whole.detach()[end - one.numel() : end].view_as(one)
        for one, end in zip(every, ends, strict=True)
    }
    inner = torch.optim.SGD([whole], LR)

    def step() -> None:
        whole.grad = torch.cat([one.grad.float().flatten() for one in every])  # type: ignore[union-attr]
        inner.step()
        with torch.no_grad():
            for one in every:
                one.copy_(parts[id(one)])

    return inner, lambda one: parts[id(one)], step


def _step_main(model: nn.Module, inner: torch.optim.Optimizer) -> None:
    for one in model.parameters():
        one.main_param.grad = one.grad.float()  # type: ignore[attr-defined,union-attr]
    inner.step()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(one.main_param)  # type: ignore[attr-defined]


LAYOUTS = {"state": in_state, "groups": in_groups, "main": as_main, "flat": flat}


def reference(workers: int) -> Tensor:
    """The model that plain averages of fp32 masters give, after the last average."""
    models = [network() for _ in range(workers)]
    masters = [[one.detach().float().clone() for one in model.parameters()] for model in models]
    for step in range(STEPS):
        for worker, model in enumerate(models):
            slopes(model, worker, step)
            for one, kept in zip(model.parameters(), masters[worker], strict=True):
                kept.sub_(one.grad.float(), alpha=LR)  # type: ignore[union-attr]
                one.data.copy_(kept)
        if (step + 1) % TAU == 0 or step == STEPS - 1:
            for place, together in enumerate(zip(*masters, strict=True)):
                mean = torch.stack(list(together)).mean(0)
                for worker, model in enumerate(models):
                    masters[worker][place].copy_(mean)
                    list(model.parameters())[place].data.copy_(mean)
    return torch.cat([one.detach().float().flatten() for one in models[0].parameters()])


def trained(world: World) -> dict[str, Any]:
    """How far a training ends from the reference, by layout."""
    expected, found = reference(world.layout.world_size), {}
    for name, made in LAYOUTS.items():
        model = network()
        optimizer, option, step = made(model)
        with algorithms.LocalSGD(model, optimizer, tau=TAU, master_weights=option):
            for number in range(STEPS):
                slopes(model, world.rank, number)
                step()
        ended = torch.cat([one.detach().float().flatten() for one in model.parameters()])
        found[name] = float((ended - expected).abs().max())
    return found


def refused(world: World) -> dict[str, str]:
    """What is said of masters that were not named, of slow weights, and of wrong names."""
    found = {}
    for name, made in {**LAYOUTS, "slow": slow}.items():
        for kind, model in (("", network()), (" of fp32", network().float())):
            optimizer, _, step = made(model)
            found[name + kind] = _said(model, optimizer, step, world.rank)
    model = network()
    optimizer, _, step = in_state(model)
    found["wrong"] = _said(model, optimizer, step, world.rank, master_weights="masters")
    model = network()
    optimizer, whole, step = flat(model)

    def part(one: Tensor) -> Tensor:
        shared: Tensor = whole(one).flatten()[: one.numel() // 2]
        return shared

    found["part"] = _said(model, optimizer, step, world.rank, master_weights=part)
    return found


class Slow(torch.optim.SGD):
    """As Lookahead, with its slow weights in the state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """With weights that a later step would go back to."""
        for one in self.param_groups[0]["params"]:
            self.state[one].setdefault("slow", one.detach().clone())
        super().step(closure)


def slow(model: nn.Module) -> tuple[torch.optim.Optimizer, Any, Callable[[], None]]:
    """Lookahead."""
    made = Slow(model.parameters(), LR)
    return made, None, made.step


def in_fp32(world: World) -> list[Any]:
    """Masters of fp32 parameters, and the mean of ASGD: the model of every rank at the end."""
    found: list[Any] = []
    for made in (in_state, averaging):
        model = network().float()
        optimizer, option, step = made(model)
        with algorithms.LocalSGD(model, optimizer, tau=4, master_weights=option):
            for number in range(24):
                slopes(model, world.rank, number)
                step()
        found.append([one.detach().flatten().tolist() for one in model.parameters()])
    return found


def averaging(model: nn.Module) -> tuple[torch.optim.Optimizer, Any, Callable[[], None]]:
    """ASGD: its mean follows the model, and is never written back."""
    made = torch.optim.ASGD(model.parameters(), LR)
    return made, None, made.step


class Hidden(torch.optim.SGD):
    """SGD on one master of all parameters, which an object of its own holds."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        every = self.param_groups[0]["params"]
        self.kept = SimpleNamespace(whole=torch.cat([one.detach().flatten() for one in every]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the master, and write the parameters."""
        del closure
        every = self.param_groups[0]["params"]
        self.kept.whole -= LR * torch.cat([one.grad.flatten() for one in every])
        parts = self.kept.whole.split([one.numel() for one in every])
        for one, part in zip(every, parts, strict=True):
            one.copy_(part.view_as(one))


def taken_back(world: World) -> list[str]:
    """What is warned of where masters are hidden, and where there are none."""
    found = []
    for kind in (Hidden, torch.optim.SGD):
        model = network().float()
        optimizer = kind(model.parameters(), LR)
        with (
            warnings.catch_warnings(record=True) as told,
            algorithms.LocalSGD(model, optimizer, tau=4),
        ):
            warnings.simplefilter("always")
            for number in range(24):
                slopes(model, world.rank, number)
                optimizer.step()
        found.append("; ".join(str(one.message) for one in told))
    return found


def _said(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], None],
    rank: int,
    **options: Any,
) -> str:
    def go_on() -> None:
        with algorithms.LocalSGD(model, optimizer, tau=TAU, **options):
            for number in range(STEPS):
                slopes(model, rank, number)
                step()

    return said(go_on)
