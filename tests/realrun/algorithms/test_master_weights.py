"""Optimizers that keep the parameters once more: averaged by name, or refused."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from local_problem import network, said, slopes, vector
from ranks import everywhere, ranked
from torch import Tensor, nn

from realrun.algorithms import LocalSGD
from realrun.execute.world import World

LR, TAU, STEPS = 0.05, 3, 8
Made = tuple[torch.optim.Optimizer, Any, Callable[[], object]]
"""The optimizer, the option `master_weights`, and what a loop calls for a step."""


class InState(torch.optim.SGD):
    """As FusedAdam of Transformer Engine: masters in the state, made at the first step."""

    def masters(self) -> list[Tensor]:
        """One for each parameter."""
        return [
            self.state[each].setdefault("master_param", each.detach().float().clone())
            for each in self.param_groups[0]["params"]
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """From the masters."""
        del closure
        for each, kept in zip(self.param_groups[0]["params"], self.masters(), strict=True):
            kept.sub_(each.grad.float(), alpha=LR)
            each.copy_(kept)


class InGroups(InState):
    """As FusedAdam of Apex: masters in groups of their own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.param_groups_master = [{"params": super().masters()}]
        self.state.clear()

    def masters(self) -> list[Tensor]:
        """Those that were made first."""
        return self.param_groups_master[0]["params"]


class Slow(torch.optim.SGD):
    """As Lookahead, with its slow weights in the state, which a later step would go back to."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Keep them."""
        for each in self.param_groups[0]["params"]:
            self.state[each].setdefault("slow", each.detach().clone())
        super().step(closure)


class Hidden(torch.optim.SGD):
    """SGD on one master of all parameters, which an object of its own holds."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        every = self.param_groups[0]["params"]
        self.kept = SimpleNamespace(whole=torch.cat([each.detach().flatten() for each in every]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step the master, and write the parameters."""
        del closure
        every = self.param_groups[0]["params"]
        self.kept.whole -= LR * torch.cat([each.grad.flatten() for each in every])
        parts = self.kept.whole.split([each.numel() for each in every])
        for each, part in zip(every, parts, strict=True):
            each.copy_(part.view_as(each))


def of(kind: type[torch.optim.Optimizer], option: str | None = None) -> Callable[[nn.Module], Made]:
    """By an optimizer of the parameters."""

    def make(model: nn.Module) -> Made:
        made = kind(model.parameters(), LR)
        return made, option, made.step

    return make


def as_main(model: nn.Module) -> Made:
    """As Megatron: the optimizer has the masters, each an attribute of its parameter."""
    every = list(model.parameters())
    for each in every:
        each.main_param = nn.Parameter(each.detach().float().clone())
    inner = torch.optim.SGD([each.main_param for each in every], LR)

    def step() -> None:
        for each in every:
            each.main_param.grad = each.grad.float()
        inner.step()
        with torch.no_grad():
            for each in every:
                each.copy_(each.main_param)

    return inner, lambda each: each.main_param, step


def flat(model: nn.Module) -> Made:
    """As DeepSpeed: one flat master, of which each parameter has a part."""
    every = list(model.parameters())
    whole = nn.Parameter(torch.cat([each.detach().float().flatten() for each in every]))
    pieces = whole.detach().split([each.numel() for each in every])
    parts = {id(each): piece.view_as(each) for each, piece in zip(every, pieces, strict=True)}
    inner = torch.optim.SGD([whole], LR)

    def step() -> None:
        whole.grad = torch.cat([each.grad.float().flatten() for each in every])
        inner.step()
        with torch.no_grad():
            for each in every:
                each.copy_(parts[id(each)])

    return inner, lambda each: parts[id(each)], step


IN_STATE = of(InState, "master_param")
LAYOUTS = {
    "state": IN_STATE,
    "groups": of(InGroups, "param_groups_master"),
    "main": as_main,
    "flat": flat,
}


def trained(model: nn.Module, made: Made, rank: int, steps: int = STEPS, **options: Any) -> None:
    """Train a model to the end of its LocalSGD; `options` may say more than what was made."""
    optimizer, _, step = made
    with LocalSGD(model, optimizer, **{"tau": TAU, **options}):
        for number in range(steps):
            slopes(model, rank, number)
            step()


def reference(workers: int) -> Tensor:
    """The model that plain averages of fp32 masters give, after the last average."""
    models = [network(torch.bfloat16) for _ in range(workers)]
    masters = [[each.detach().float().clone() for each in model.parameters()] for model in models]
    for step in range(STEPS):
        for worker, model in enumerate(models):
            slopes(model, worker, step)
            for each, kept in zip(model.parameters(), masters[worker], strict=True):
                kept.sub_(each.grad.float(), alpha=LR)
                each.data.copy_(kept)
        if (step + 1) % TAU == 0 or step == STEPS - 1:
            for index, together in enumerate(zip(*masters, strict=True)):
                mean = torch.stack(list(together)).mean(0)
                for worker, model in enumerate(models):
                    masters[worker][index].copy_(mean)
                    list(model.parameters())[index].data.copy_(mean)
    return vector(models[0])


@ranked(2)
def test_master_weights_are_averaged_in_the_layouts_of_four_libraries(world: World) -> None:
    """The model ends, bit for bit, where plain averages of fp32 masters end."""
    expected = reference(world.layout.world_size)
    for name, make in LAYOUTS.items():
        model = network(torch.bfloat16)
        made = make(model)
        trained(model, made, world.rank, master_weights=made[1])
        assert torch.equal(vector(model), expected), name


@ranked(2)
def test_what_would_undo_averages_is_refused_with_a_remedy(world: World) -> None:
    """Masters that are not named, or shared out among ranks, slow weights, a wrong name."""

    def refused(make: Callable[[nn.Module], Made], dtype: torch.dtype, **options: Any) -> str:
        model = network(dtype)
        heard = said(lambda: trained(model, make(model), world.rank, **options))
        assert heard.startswith("OptionError")
        return heard

    not_held = "the optimizer does not hold '0.weight'"
    remedies = {
        "state": "master_weights='master_param'",
        "groups": "master_weights='param_groups_master'",
        "main": not_held,
        "flat": not_held,
        "slow": "'slow' of Slow",
    }
    for name, make in {**LAYOUTS, "slow": of(Slow)}.items():
        assert remedies[name] in refused(make, torch.bfloat16)
        refused(make, torch.float32)
    refused(IN_STATE, torch.bfloat16, master_weights="masters")
    model = network(torch.bfloat16)
    optimizer, whole, step = flat(model)
    heard = said(
        lambda: trained(
            model,
            (optimizer, None, step),
            world.rank,
            master_weights=lambda each: whole(each).flatten()[: each.numel() // 2],
        )
    )
    assert "have 17 elements on this rank, the parameter 35" in heard


@ranked(2)
def test_averages_that_something_hidden_takes_back_are_warned_of(world: World) -> None:
    """A flat master in an object that nobody looks into; a plain optimizer is not."""
    for kind, hidden in ((Hidden, True), (torch.optim.SGD, False)):
        model = network()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(model, of(kind)(model), world.rank, steps=24, tau=4)
        assert any("steps take back" in str(each.message) for each in caught) == hidden
        assert hidden or not caught


@ranked(2)
def test_masters_of_fp32_parameters_and_means_that_follow_end_alike_on_all_ranks(
    world: World,
) -> None:
    """The model gets what its masters get; the mean of ASGD, never written back, needs no name."""
    for make in (IN_STATE, of(torch.optim.ASGD)):
        model = network()
        made = make(model)
        trained(model, made, world.rank, steps=24, tau=4, master_weights=made[1])
        assert torch.equal(*everywhere(vector(model)))
