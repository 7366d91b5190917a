"""What ranks of several tests do: schedules, collectives, and what torch is asked for meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny import job
from torch import Tensor

from co2sim import strategies
from co2sim.schedule.schedule import WORLD, Collective, Compute, DType, Kind, Op, Schedule
from realrun.execute.collectives import allocate, carry_out, launch
from realrun.execute.executor import execute
from realrun.execute.kernels import KernelSet, Sleep
from realrun.execute.world import World

SIZES = (1, 2, 7, 1000, 300_001)
"""Elements: fewer than ranks, uneven, and more than one segment."""
LARGE = 1_300_001
"""Elements of fp32 whose parts, of up to four ranks, have three segments or more."""


def collectives(world: World) -> None:
    """Every kind, type and size against a single process that knows all inputs."""
    for kind in Kind:
        summed = kind in {Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE}
        for dtype in (DType.FP32, DType.FP16, DType.BF16) if summed else (DType.FP32, DType.INT4):
            for elements in (*SIZES, LARGE) if dtype is DType.FP32 else SIZES:
                # the last is a place beyond any group of the tests: it is counted around
                roots = (1, 0, 11) if kind in {Kind.BROADCAST, Kind.REDUCE} else (0,)
                for root in roots if elements < max(SIZES) else roots[:1]:
                    scales = 0 if summed else 64
                    work = Collective(kind, "x", elements, dtype, WORLD, scales, root)
                    check_collective(world, work)


def check_collective(world: World, work: Collective) -> None:
    """Whether it gives this rank what it has to."""
    world.connect(Schedule("one", (Op("c", work, "comm"),)))
    at = world.communicator("comm", WORLD)
    assert at is not None
    n, me = len(at.members), at.me
    buffers = allocate(work, n, world.device)
    generator = torch.Generator().manual_seed(1)
    shape = (n, len(buffers.given))
    inputs = torch.randint(0, 200 // n, shape, generator=generator).to(buffers.given.dtype)
    buffers.given.copy_(inputs[me])
    if world.device.type == "cuda":
        launch(work, buffers, at).wait()
    else:
        carry_out(work, buffers, at, 20.0)

    def parts() -> Tensor:
        return inputs.view(n, n, -1)[:, me]

    match work.kind:
        case Kind.ALL_REDUCE:
            expected = inputs.sum(0)
        case Kind.REDUCE_SCATTER:
            expected = parts().sum(0)
        case Kind.ALL_GATHER:
            expected = inputs.reshape(-1)
        case Kind.ALL_TO_ALL:
            expected = parts().reshape(-1)
        case Kind.BROADCAST:
            expected = inputs[work.root % n]
        case Kind.REDUCE:
            expected = inputs.sum(0) if me == work.root % n else buffers.taken
    assert torch.equal(buffers.taken.cpu(), expected.to(buffers.taken.dtype)), (
        f"{work}, {me} of {n}"
    )


def all_strategies(world: World, variants: list[str]) -> None:
    """Run every strategy."""
    for text in variants:
        executed(world, strategies.parse(text).schedule(job(), world.layout))


def executed(world: World, schedule: Schedule) -> None:
    """Run a schedule for three rounds; this rank's trace must break no rule."""
    seconds = {op.work: 1e-4 for op in schedule.body if isinstance(op.work, Compute)}
    trace = execute(schedule, sleeping(world, seconds), 3, world, check=True)
    assert not list(trace.violations(schedule, skew=float("inf"))), schedule.name


def sleeping(world: World, seconds: dict[Compute, float]) -> KernelSet:
    """Kernels that hold a thread, or a GPU's stream."""
    if world.device.type == "cpu":
        return Sleep(seconds)
    from realrun.execute.cuda_streams import GpuSleep  # noqa: PLC0415 - needs a GPU

    return GpuSleep(seconds)


@contextmanager
def listening(*calls: tuple[Any, str]) -> Iterator[list[tuple[str, Any, Tensor]]]:
    """The name, the group and the largest tensor of every call of these functions."""
    heard: list[tuple[str, Any, Tensor]] = []

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            heard.append((name, kwargs["group"], max(tensors, key=Tensor.numel)))
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for holder, name in calls:
            patch.setattr(holder, name, wrap(name, getattr(holder, name)))
        yield heard
