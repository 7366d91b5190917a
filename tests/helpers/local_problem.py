"""A small training problem whose workers differ: the same for ranks and for references."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from co2sim.common.errors import Co2simError
from realrun import algorithms
from realrun.algorithms import CO2, Clipping, LateAverage, LocalUpdate, Transport

INNER = ("sgd", "momentum", "adamw")
RATE = {"sgd": 0.1, "momentum": 0.05, "adamw": 0.02}


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Three layers, an unused-size bias, and a buffer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))
    return model.to(dtype)


def optimizer(model: nn.Module, inner: str) -> torch.optim.Optimizer:
    """One of INNER."""
    if inner == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=RATE[inner])
    momentum = 0.9 if inner == "momentum" else 0.0
    return torch.optim.SGD(model.parameters(), lr=RATE[inner], momentum=momentum)


def said(call: Callable[[], object]) -> str:
    """Type and text of the error for users that a call ends with; nothing where it ends well.

    On a rank rather than `pytest.raises`, whose `as` keeps process groups until a collection.
    """
    try:
        call()
    except (Co2simError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def warned() -> Iterator[list[str]]:
    """What is warned of within."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught if "deprecated" not in str(each.message)]


LATE = ("delay", "keep", "predict", "fragments", "preview")


def with_transport(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with those of a Transport in one."""
    parts = {name: options.pop(name) for name in ("bucket_mib", "pg_options") if name in options}
    if parts:
        options["dtype"] = Transport(options.pop("dtype", "fp32"), **parts)
    return options


def co2_of(model: nn.Module, optim: Any, **options: Any) -> CO2:
    """CO2 with options of late averages beside the others; without any of them as published."""
    options = with_transport(options)
    late = {name: options.pop(name) for name in LATE if name in options}
    if "residual_decay" in options:
        options["clip"] = Clipping(options.pop("clip"), options.pop("residual_decay"))
    if not late:
        return CO2.published(model, optim, **options)
    return CO2(model, optim, delay=LateAverage(**late), **options)


def algorithm_of(name: str, model: nn.Module, optim: Any, **options: Any) -> LocalUpdate:
    """An algorithm by name."""
    if name == "CO2":
        return co2_of(model, optim, **options)
    algorithm: LocalUpdate = attrgetter(name)(algorithms)(model, optim, **with_transport(options))
    return algorithm


def begun(
    name: str = "CO2", inner: str = "sgd", **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Model and optimizer of the problem, and an algorithm of both."""
    model = network()
    optim = optimizer(model, inner)
    return model, optim, algorithm_of(name, model, optim, **options)


def batch(worker: int, step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """What a worker sees in a step: workers have different targets."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    given = torch.randn(rows, 5, generator=generator)
    wanted = torch.sin(given[:, :3] * (1 + worker)) + 0.1 * worker
    return given, wanted


def loss(model: nn.Module, worker: int, step: int) -> Tensor:
    """Mean squared error on the batch of a step."""
    given, wanted = batch(worker, step)
    like = next(model.parameters())
    return (model(given.to(like)) - wanted.to(like)).square().mean()


def slopes(model: nn.Module, worker: int, step: int) -> None:
    """The gradients of a step."""
    model.zero_grad()
    loss(model, worker, step).backward()


def train(model: nn.Module, optim: torch.optim.Optimizer, worker: int, steps: range) -> None:
    """Plain steps; whatever hangs on the optimizer's hook happens inside."""
    for step in steps:
        slopes(model, worker, step)
        optim.step()


def vector(model: nn.Module) -> Tensor:
    """All parameters in one row, gathered, in fp32, on the CPU."""
    wholes = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return torch.cat([whole.detach().float().cpu().reshape(-1) for whole in wholes])


def set_vector(model: nn.Module, values: Tensor) -> None:
    """Write all parameters from one row."""
    at = 0
    with torch.no_grad():
        for parameter in model.parameters():
            part = values[at : at + parameter.numel()].view_as(parameter)
            parameter.copy_(part)
            at += parameter.numel()


def followed(
    case: dict[str, Any],
    algorithm: LocalUpdate,
    steps: Callable[[range], None],
    held: Callable[[], Tensor],
) -> dict[str, Any]:
    """What is `held` after each round of a case, and the algorithm's stats."""
    tau, history, stats = case["options"]["tau"], [], []
    with algorithm:
        for t in range(case["rounds"]):
            steps(range(t * tau, (t + 1) * tau))
            history.append(held().tolist())
            stats.append(algorithm.stats())
    return {
        "history": history,
        "penalties": [each.penalty for each in stats],
        "clipped": stats[-1].clipped,
        "residual": stats[-1].clip_residual,
        "counts": [stats[-1].rounds, stats[-1].steps],
        "sent": stats[-1].bytes_sent,
    }
