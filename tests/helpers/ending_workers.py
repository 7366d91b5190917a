"""What ranks of the tests of how algorithms end do."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from local_problem import algorithm_of, co2_of, network, optimizer, train, vector
from torch import nn

from co2sim.common.errors import Co2simError
from realrun.algorithms import DiLoCo, LocalSGD
from realrun.execute.world import World


def uneven(world: World, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank 1 leaves after fewer steps than all others: what everybody is told, and when."""
    found = []
    for case in cases:
        model = network()
        optim = optimizer(model, "sgd")
        steps = case["steps"] if world.rank == 1 else 12
        told = ""
        try:
            with co2_of(model, optim, tau=3, **case["options"]):
                train(model, optim, world.rank, range(steps))
                if world.rank == 1 and case.get("raises"):
                    raise ValueError("bad sample")  # noqa: TRY301 - what a user's loop might do
        except (Co2simError, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
        found.append({"told": told})
        dist.barrier()
    return found


def finished(world: World, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What all end with, after full rounds and a part of one; and what LocalSGD's mean is."""
    found = []
    for case in cases:
        model = network()
        optim = optimizer(model, "sgd")
        algorithm = algorithm_of(case["algorithm"], model, optim, **case["options"])
        train(model, optim, world.rank, range(case["steps"]))
        before = vector(model)
        means: list[Any] = [None] * world.layout.world_size
        dist.all_gather_object(means, before)
        algorithm.finish()
        after = vector(model)
        train(model, optim, world.rank, range(1))
        found.append(
            {
                "end": after.tolist(),
                "mean": torch.stack(means).mean(0).tolist(),
                "moved": float((vector(model) - after).abs().max()),
                "steps": algorithm.stats().steps,
            }
        )
    return found


def evaluated(world: World) -> dict[str, Any]:
    """Buffers and a copy of the model within `consensus`, before, after, and after `finish`."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    optim = optimizer(model, "sgd")
    ema = copy.deepcopy(model)
    co2 = co2_of(model, optim, tau=2)
    with torch.no_grad():
        model[1].running_mean.fill_(world.rank)
        model[1].num_batches_tracked.fill_(7 + world.rank)
        ema[0].bias.fill_(10.0 * world.rank)

    def look() -> list[float]:
        return [
            float(model[1].running_mean[0]),
            float(model[1].num_batches_tracked),
            float(ema[0].bias[0].detach()),
        ]

    before = look()
    with co2.consensus(ema, buffers=True):
        inside = look()
    with co2.consensus():
        plain = look()
    after = look()
    co2.finish(ema, buffers=True)
    return {"before": before, "inside": inside, "plain": plain, "after": after, "end": look()}


def misused(world: World) -> dict[str, Any]:
    """A step within `consensus`, and whether training goes on; finishing twice."""
    model = network()
    optim = optimizer(model, "sgd")
    found: dict[str, Any] = {}
    with LocalSGD(model, optim, tau=2) as local:
        train(model, optim, world.rank, range(2))
        with local.consensus():
            before = vector(model)
            try:
                train(model, optim, world.rank, range(1))
            except Co2simError as error:
                found["inside"] = f"{type(error).__name__}: {error}"
            found["same"] = torch.equal(before, vector(model))
        train(model, optim, world.rank, range(2, 4))
        found["rounds"] = local.stats().rounds
    try:
        local.finish()
    except Co2simError as error:
        found["twice"] = f"{type(error).__name__}: {error}"
    return found


def joined(world: World, cases: list[dict[str, Any]]) -> list[list[float]]:
    """What all hold after ranks took other numbers of steps within `join`."""
    found = []
    for case in cases:
        model = network()
        optim = optimizer(model, "sgd")
        algorithm = algorithm_of(case["algorithm"], model, optim, **case["options"])
        with algorithm.join():
            train(model, optim, world.rank, range(case["steps"][world.rank]))
        found.append(vector(model).tolist())
    return found


def not_joined(world: World) -> dict[str, str]:
    """What `join` says in the middle of a round, and when a rank raises within."""
    model = network()
    optim = optimizer(model, "sgd")
    found = {}
    with co2_of(model, optim, tau=2) as co2:
        train(model, optim, world.rank, range(1))
        try:
            with co2.join():
                pass
        except Co2simError as error:
            found["middle"] = f"{type(error).__name__}: {error}"
        train(model, optim, world.rank, range(1, 2))
    dist.barrier()
    try:
        with co2_of(model, optim, tau=2) as co2, co2.join():
            train(model, optim, world.rank, range(3 + world.rank))
            if world.rank == 2:
                raise ValueError("bad sample")  # noqa: TRY301 - what a user's loop might do
    except (Co2simError, ValueError) as error:
        found["raised"] = f"{type(error).__name__}: {error}"
    dist.barrier()
    return found


def rates(world: World) -> list[str]:
    """What is said where rank 2 begins with another learning rate, has one later, or neither."""
    said = []
    for odd in ("first", "later", ""):
        model = network()
        rate = 0.2 if odd == "first" and world.rank == 2 else 0.1
        optim = torch.optim.SGD(model.parameters(), lr=rate)
        with (
            warnings.catch_warnings(record=True) as caught,
            DiLoCo(model, optim, tau=1),
        ):
            warnings.simplefilter("always")
            train(model, optim, world.rank, range(2))
            if odd == "later" and world.rank == 2:
                optim.param_groups[0]["lr"] = 0.05
            train(model, optim, world.rank, range(2, 9))
        said.append(" ".join(str(one.message) for one in caught))
    return said


def told(call: Callable[[], Any]) -> str:
    """The error in words that a call ends with."""
    try:
        call()
    except (Co2simError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def unfrozen(world: World) -> dict[str, str]:
    """A parameter is trained since the last round: what evaluates, saves and ends says."""
    model = network()
    model[0].weight.requires_grad_(requires_grad=False)
    optim = optimizer(model, "sgd")
    co2 = co2_of(model, optim, tau=4, delay=2)
    train(model, optim, world.rank, range(5))
    model[0].weight.requires_grad_(requires_grad=True)
    train(model, optim, world.rank, range(5, 6))
    return {
        "consensus": told(lambda: co2.consensus().__enter__()),
        "state": told(co2.state_dict),
        "finish": told(co2.finish),
    }


def within(world: World) -> dict[str, str]:
    """What cannot be done where the model holds the consensus, nor after an attempt."""
    model = network()
    optim = optimizer(model, "sgd")
    with LocalSGD(model, optim, tau=2) as local:
        state = local.state_dict()
        with local.consensus():
            calls = {
                "consensus()": lambda: local.consensus().__enter__(),
                "finish()": local.finish,
                "join()": lambda: local.join().__enter__(),
                "state_dict()": local.state_dict,
                "load_state_dict()": lambda: local.load_state_dict(state),
                "step": lambda: train(model, optim, world.rank, range(1)),
            }
            found = {name: told(call) for name, call in calls.items()}
        found["dict"] = told(lambda: local.finish({"weight": torch.ones(2)}))  # type: ignore[arg-type]
    return found


def elsewhere(world: World, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank 1 comes to `finish` after 6 steps; the others take more, and do something."""
    found = []
    for case in cases:
        model = network()
        optim = optimizer(model, "sgd")

        def end(case: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer) -> None:
            with co2_of(model, optim, tau=4, **case["options"]) as co2:
                train(model, optim, world.rank, range(6 if world.rank == 1 else case["steps"]))
                if world.rank != 1 and case["evaluates"]:
                    with co2.consensus(buffers=True):
                        pass
                co2.finish()

        found.append({"told": told(lambda: end(case, model, optim))})  # noqa: B023 - called at once
        dist.barrier()
    return found
