"""What ranks of the tests of several optimizers, and of other numbers of workers, do."""

import copy
import warnings
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from local_problem import co2_of, loss, network, optimizer, said, train, vector
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from co2sim.common.errors import Co2simError
from realrun.algorithms import Workers
from realrun.execute.world import World


def several(world: World) -> dict[str, Any]:
    """Two optimizers of half the layers each, and one of both as two groups."""
    ends = []
    for split in (True, False):
        model = network()
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.1},
            {"params": list(model[1:].parameters()), "lr": 0.05},
        ]
        optims = [torch.optim.SGD([one], momentum=0.9) for one in groups]
        one = torch.optim.SGD(groups, momentum=0.9)
        co2 = co2_of(model, optims if split else one, tau=3)
        for step in range(7):
            model.zero_grad()
            loss(model, world.rank, step).backward()
            for optim in optims if split else [one]:
                optim.step()
        ends.append((vector(model), co2.stats().steps))
        co2.close()
    return {"equal": torch.equal(ends[0][0], ends[1][0]), "steps": [steps for _, steps in ends]}


def muon(world: World) -> dict[str, Any]:
    """Muon for matrices and AdamW for all else; AdamW steps twice as often."""
    model = network()
    matrices = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim == 1]
    optims = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    first = loss(model, 0, 0).item()
    co2 = co2_of(model, optims, tau=4, delay=1)
    for step in range(60):
        model.zero_grad()
        loss(model, world.rank, step).backward()
        optims[1].step()
        if step % 2:
            optims[0].step()
    co2.finish()
    end = vector(model).tolist()
    return {"steps": co2.stats().steps, "end": end, "losses": [first, loss(model, 0, 0).item()]}


def refused(_: World) -> list[str]:
    """Optimizers that cannot be."""
    model = network()
    one, other = optimizer(model, "sgd"), optimizer(model, "sgd")
    half = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, when this is loaded
        optim = import_module("torch.distributed.optim")
    post = optim.PostLocalSGDOptimizer(one, PeriodicModelAverager(period=2))
    zero = optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    every = ([], [one, one], [one, other], [half], [half, "adam"], post, zero)
    return [said(lambda: co2_of(model, given)) for given in every]  # type: ignore[arg-type]  # noqa: B023


def fewer(world: World, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Three workers train; two of them, and the third alone, go on from the anchor."""
    pair = dist.new_group([0, 1])
    found = []
    for options in cases:
        model = network()
        optim = optimizer(model, "momentum")
        co2 = co2_of(model, optim, **options)
        train(model, optim, world.rank, range(8))
        state = copy.deepcopy(co2.state_dict())
        if options.get("fragments"):  # the progress since a launch is left out
            co2.close()
            co2.loop.use_all()
        else:
            co2.finish()
        wanted = vector(model)
        other = network(seed=1)
        again = optimizer(other, "momentum")
        mine = Workers(pair) if world.rank < 2 else Workers(None)
        less = co2_of(other, again, **options, worker=mine)
        hint = said(lambda: less.load_state_dict(state))  # noqa: B023 - called at once
        less.load_anchor(state)
        began = vector(other)
        train(other, again, world.rank, range(8, 14))
        less.finish()
        found.append(
            {
                "began": torch.equal(began, wanted),
                "hint": hint,
                "steps": less.stats().steps,
                "end": vector(other).tolist(),
            }
        )
    return found


def mixed(world: World) -> list[str]:
    """Ranks load what was saved at different steps; a state of another run; other anchors."""
    states: list[Any] = []
    told = []
    for case in range(6):
        model = network()
        optim = optimizer(model, "sgd")
        with suppress(Co2simError), co2_of(model, optim, tau=2) as co2:
            if case == 0:
                states.append(copy.deepcopy(co2.state_dict()))
                for step in range(4):
                    train(model, optim, world.rank, range(step, step + 1))
                    states.append(copy.deepcopy(co2.state_dict()))
                key, own = next(iter(states[0].items()))
                other = {key: own | {"layout": own["layout"].replace("tau = 2", "tau = 5")}}
                calls = [
                    ("load_state_dict", states[3 + (world.rank == 1)]),
                    ("load_anchor", states[4 * (world.rank == 1)]),
                    ("load_anchor", other),
                    ("load_anchor", {}),
                    ("load_state_dict", {}),
                ]
                continue
            name, state = calls[case - 1]
            told.append(said(lambda: getattr(co2, name)(state)))  # noqa: B023 - called at once
    return told
