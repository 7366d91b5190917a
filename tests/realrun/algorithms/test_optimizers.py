"""Local updates take several optimizers, wrapped ones, and go on with other numbers of workers."""

import copy
import warnings
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from local_problem import co2_of, loss, network, optimizer, said, slopes, train, vector
from ranks import everywhere, ranked
from torch import distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from realrun.algorithms import Workers
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
