"""How a probe executes a schedule on all ranks, and what all of them learn from it."""

from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from co2sim.common.units import Seconds
from co2sim.schedule.schedule import DType, Schedule
from co2sim.simulation.trace import Trace
from realrun.execute.executor import execute
from realrun.execute.kernels import Burn, KernelSet
from realrun.execute.world import World, gather_objects
from realrun.measure import TORCH_DTYPE
from realrun.probe.schedules import durations

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """A schedule whose ops are to be timed, `rounds` times in every pass."""

    label: str
    schedule: Schedule
    kernels: KernelSet
    rounds: int


def shared(world: World, value: T) -> T:
    """The value of rank 0, on all ranks."""
    box: list[T] = [value]
    if world.layout.world_size > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]


def traces(world: World, task: ProbeTask) -> list[Trace]:
    """Execute a task once more than its rounds; the traces of all ranks, on rank 0."""
    own = execute(task.schedule, task.kernels, task.rounds + 1, world)
    return gather_objects(world, own) or []  # type: ignore[return-value]


def time(world: World, task: ProbeTask) -> dict[str, list[Seconds]]:
    """`durations` of a task, on all ranks."""
    return shared(world, durations(traces(world, task), task.schedule))


def burn(world: World, precision: str) -> Burn:
    """Kernels that compute in a precision, on the device of this rank."""
    return Burn(world.device, TORCH_DTYPE[DType(precision)])
