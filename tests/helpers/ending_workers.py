"""What ranks of the tests of how algorithms end do."""

import os
import signal
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from local_problem import algorithm_of, co2_of, network, optimizer, said, train, vector
from torch import nn

from realrun.algorithms import LocalSGD, RankFailure
from realrun.algorithms.departures import DepartureLog
from realrun.execute.world import World


def raised(world: World, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank 1 raises after fewer steps than all others take: what everybody is told."""
    found = []
    for case in cases:
        model = network()
        optim = optimizer(model, "sgd")
        steps = case["steps"] if world.rank == 1 else 12

        def go_on(model: Any = model, optim: Any = optim, steps: int = steps) -> None:
            with co2_of(model, optim, tau=3, **case["options"]):  # noqa: B023 - called at once
                train(model, optim, world.rank, range(steps))
                if world.rank == 1:
                    raise ValueError("bad sample")

        found.append({"told": said(go_on)})
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
    with co2_of(model, optim, tau=2) as co2:
        train(model, optim, world.rank, range(1))
        found = {"middle": said(lambda: co2.join().__enter__())}
        train(model, optim, world.rank, range(1, 2))
    dist.barrier()

    def raising() -> None:
        with co2_of(model, optim, tau=2) as co2, co2.join():
            train(model, optim, world.rank, range(3 + world.rank))
            if world.rank == 2:
                raise ValueError("bad sample")

    found["raised"] = said(raising)
    dist.barrier()
    return found


def within(world: World) -> dict[str, Any]:
    """What cannot be done where the model holds the consensus, nor after an attempt, nor twice."""
    model = network()
    optim = optimizer(model, "sgd")
    with LocalSGD(model, optim, tau=2) as local:
        train(model, optim, world.rank, range(2))
        state = local.state_dict()
        with local.consensus():
            before = vector(model)
            calls = {
                "consensus()": lambda: local.consensus().__enter__(),
                "finish()": local.finish,
                "join()": lambda: local.join().__enter__(),
                "state_dict()": local.state_dict,
                "load_state_dict()": lambda: local.load_state_dict(state),
                "step": lambda: train(model, optim, world.rank, range(1)),
            }
            found: dict[str, Any] = {name: said(call) for name, call in calls.items()}
            found["same"] = torch.equal(before, vector(model))
        train(model, optim, world.rank, range(2, 4))
        found["rounds"] = local.stats().rounds
        found["dict"] = said(lambda: local.finish({"weight": torch.ones(2)}))  # type: ignore[arg-type]
    return {**found, "twice": said(local.finish)}


def sliding() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A model of zeros whose gradient is -1: a step of rate 1 adds 1 to all parameters."""
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def slide(model: nn.Linear, optim: torch.optim.Optimizer, *, spoilt: bool = False) -> None:
    """A step; the gradient of a `spoilt` one is NaN in the bias."""
    optim.zero_grad()
    (-sum(each.sum() for each in model.parameters())).backward()  # type: ignore[arg-type]
    if spoilt:
        model.bias.grad.fill_(torch.nan)  # type: ignore[union-attr]
    optim.step()


def settled(world: World, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ranks take other numbers of steps: what each ends with, and is told."""
    found = []
    for case in cases:
        model, optim = sliding()
        make = partial(algorithm_of, case["algorithm"], timeout=60, **case["options"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with make(model, optim) as training:
                for _ in range(case["steps"][world.rank]):
                    slide(model, optim)
        told = [str(each.message) for each in caught if "steps" in str(each.message)]
        line = [Path(each.filename).name for each in caught]
        end, steps = vector(model).tolist(), training.stats().steps
        found.append({"end": end, "said": told, "line": line, "steps": steps})
    return found


def not_finite(world: World, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank 1 has a NaN in a parameter after one step, with on_nonfinite='anchor'."""
    found = []
    for case in cases:
        model, optim = sliding()
        make = partial(algorithm_of, case["algorithm"], on_nonfinite="anchor", **case["options"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with make(model, optim):
                for step in range(case["steps"]):
                    spoilt = step == case["nan"] and world.rank in case["ranks"]
                    slide(model, optim, spoilt=spoilt)
        told = [str(each.message) for each in caught]
        found.append({"end": vector(model).tolist(), "said": told})
    return found


def nobody_finite(world: World) -> str:
    """All ranks have a NaN, with on_nonfinite='anchor'."""
    model = network()
    optim = optimizer(model, "sgd")

    def end() -> None:
        with LocalSGD(model, optim, tau=2, on_nonfinite="anchor"):
            with torch.no_grad():
                model[0].bias[0] = torch.nan
            train(model, optim, world.rank, range(2))

    return said(end)


def outside(world: World) -> dict[str, Any]:
    """Rank 1 makes no algorithm at first, and raises in a constructor later."""
    if world.rank != 1:
        model = network()
        before = time.monotonic()
        absent = said(lambda: LocalSGD(model, optimizer(model, "sgd"), timeout=2))
        waited = time.monotonic() - before
    dist.barrier()
    model = network()
    optim = optimizer(model, "sgd")
    if world.rank == 1:
        optim.param_groups[0]["params"].pop()
        DepartureLog.of_all_ranks().end()  # of the algorithm that it has not made
    raises = said(lambda: LocalSGD(model, optim, timeout=60))
    if world.rank == 1:
        return {"raises": raises}
    return {"absent": absent, "waited": waited, "raises": raises}


def again(world: World) -> list[list[float]]:
    """Several algorithms in one process, also after the default group was made anew."""
    found = []
    store = dist.distributed_c10d._get_default_store()
    for time_ in range(2):
        for _ in range(2):
            model = network()
            optim = optimizer(model, "sgd")
            with LocalSGD(model, optim, tau=2, timeout=60):
                train(model, optim, world.rank, range(3))
            found.append(vector(model).tolist())
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"again{time_}", store),
            rank=world.rank,
            world_size=world.layout.world_size,
            timeout=timedelta(seconds=41),
        )
    model = network()
    with LocalSGD(model, optimizer(model, "sgd")) as last:
        found.append([last._links.deadline])
    return found


def lose(world: World, phase: str, victims: list[int], how: str) -> dict[str, Any]:
    """Ranks are killed or stopped in a phase of a training: what the others are told."""
    model = network()
    optim = optimizer(model, "sgd")

    def fails(now: str) -> None:
        if now == phase and world.rank in victims:
            os.kill(os.getpid(), getattr(signal, how))

    try:
        fails("start")
        with LocalSGD(model, optim, tau=2, timeout=4) as local:
            train(model, optim, world.rank, range(3))
            fails("step")
            train(model, optim, world.rank, range(3, 5))
            fails("consensus")
            with local.consensus(buffers=True):
                pass
            fails("end")
    except RankFailure as error:
        return {"ranks": list(error.ranks), "said": str(error)}
    return {"ranks": [], "said": "no error"}


def unequal_consensus(world: World) -> str:
    """What a rank hears that evaluates inside the block, after fewer steps than the other."""
    model = network()
    optim = optimizer(model, "sgd")

    def go_on() -> None:
        with co2_of(model, optim, tau=4, delay=2) as co2:
            train(model, optim, world.rank, range(20 - 6 * world.rank))
            with co2.consensus():
                pass

    return said(go_on)
