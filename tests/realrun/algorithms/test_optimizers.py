"""Local updates take several optimizers, wrapped ones and those with masters; others go on."""

import copy
import warnings
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from local_problem import co2_of, loss, network, optimizer, said, slopes, train, vector, warned
from ranks import everywhere, ranked
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from realrun.algorithms import LocalSGD, Workers
from realrun.execute.world import World


@ranked(3)
def test_two_optimizers_train_as_two_groups_of_one(world: World) -> None:
    """Bit for bit: the last of them to step ends the local step."""
    ends = []
    for split in (True, False):
        model = network()
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.1},
            {"params": list(model[1:].parameters()), "lr": 0.05},
        ]
        optims = [
            torch.optim.SGD(each, momentum=0.9)
            for each in ([[group] for group in groups] if split else [groups])
        ]
        co2 = co2_of(model, optims, tau=3)
        for step in range(7):
            slopes(model, world.rank, step)
            for optim in optims:
                optim.step()
        assert co2.stats().steps == 7
        ends.append(vector(model))
        co2.close()
    assert torch.equal(*ends)


@ranked(3)
def test_a_step_is_over_when_each_optimizer_has_taken_one(world: World) -> None:
    """Muon every second step, AdamW every step: 30 local steps, and all ranks end alike."""
    model = network()
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim == 1]
    optims = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    first = loss(model, 0, 0).item()
    co2 = co2_of(model, optims, tau=4, delay=1)
    for step in range(60):
        slopes(model, world.rank, step)
        optims[1].step()
        if step % 2:
            optims[0].step()
    co2.finish()
    assert co2.stats().steps == 30
    assert everywhere(vector(model).tolist()) == [vector(model).tolist()] * 3
    assert loss(model, 0, 0).item() < 0.5 * first


@ranked(3)
def test_optimizers_that_cannot_be_are_refused(_: World) -> None:
    """None, one twice, a parameter in two, in none, something else, and what averages itself."""
    model = network()
    first, second = optimizer(model, "sgd"), optimizer(model, "sgd")
    half = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, when this is loaded
        optim = import_module("torch.distributed.optim")
    post = optim.PostLocalSGDOptimizer(first, PeriodicModelAverager(period=2))
    zero = optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for optims, words in (
        ([], "empty"),
        ([first, first], "twice"),
        ([first, second], "'0.weight'"),
        ([half], "'1.weight'"),
        ([half, "adam"], "str"),
        (post, "inside"),
        (zero, "[0, 1, 2]"),
    ):
        assert words in said(lambda: co2_of(model, optims))  # noqa: B023 - called at once


@pytest.mark.parametrize(
    "options",
    [
        {"tau": 2},
        {"tau": 2, "staleness": 2, "outer_momentum": 0.5, "clip": 0.1},
        {"tau": 4, "delay": 1},
        {"tau": 4, "delay": 3, "fragments": 2, "keep": 0.5},
        {"tau": 4, "delay": 4, "keep": 1.0},
    ],
)
@ranked(3)
def test_other_numbers_of_workers_go_on_from_the_anchor(
    world: World, options: dict[str, Any]
) -> None:
    """They begin at what all agreed on, averages under way included, and stay equal.

    Of three workers two go on, and the third alone.
    """
    model, other = network(), network(seed=1)
    optim, again = optimizer(model, "momentum"), optimizer(other, "momentum")
    co2 = co2_of(model, optim, **options)
    train(model, optim, world.rank, range(8))
    state = copy.deepcopy(co2.state_dict())
    if options.get("fragments"):  # the progress since a launch is left out
        co2.close()
        co2.loop.use_all()
    else:
        co2.finish()
    pair = dist.new_group([0, 1])
    mine = Workers(pair) if world.rank < 2 else Workers(None)
    fewer = co2_of(other, again, **options, worker=mine)
    assert "load_anchor()" in said(lambda: fewer.load_state_dict(state))
    fewer.load_anchor(state)
    assert torch.equal(vector(other), vector(model))
    train(other, again, world.rank, range(8, 14))
    fewer.finish()
    assert fewer.stats().steps == 14
    two, same, alone = everywhere(vector(other).tolist())
    assert two == same != alone


@ranked(3)
def test_states_that_do_not_fit_are_refused(world: World) -> None:
    """Of different steps, of different anchors, of another run, and none."""
    odd = world.rank == 1
    model = network()
    optim = optimizer(model, "sgd")
    states = []
    with co2_of(model, optim, tau=2) as co2:
        for step in range(5):
            states.append(copy.deepcopy(co2.state_dict()))
            train(model, optim, world.rank, range(step, step + 1))
    key, mine = next(iter(states[0].items()))
    other = {key: mine | {"layout": mine["layout"].replace("tau = 2", "tau = 5")}}
    for name, state, words in (
        ("load_state_dict", states[3 + odd], "MismatchError: rank 1 "),
        ("load_anchor", states[4 * odd], "MismatchError: rank 1 "),
        ("load_anchor", other, "tau = 5"),
        ("load_anchor", {}, "load_anchor()"),
        ("load_state_dict", {}, "load_anchor()"),
    ):
        model = network()
        co2 = co2_of(model, optimizer(model, "sgd"), tau=2)
        heard = said(lambda: getattr(co2, name)(state))  # noqa: B023 - called at once
        co2.close()
        assert words in heard
        if "Mismatch" in words:
            assert heard.startswith(words)


# --- optimizers that keep the parameters once more: averaged by name, or refused -----------------


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
        with warned() as texts:
            trained(model, of(kind)(model), world.rank, steps=24, tau=4)
        assert any("steps take back" in text for text in texts) == hidden
        assert hidden or not texts


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
