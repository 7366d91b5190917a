"""What ranks of the tests do: functions from a joined world to something that JSON can hold."""

import time
from dataclasses import replace
from typing import Any

import torch
from local_problem import said
from tiny import job

from co2sim import strategies
from co2sim.schedule.schedule import (
    NODE,
    PEERS,
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Instance,
    Kind,
    Op,
    Schedule,
    block,
)
from realrun.execute.collectives import allocate, carry_out, launch
from realrun.execute.executor import execute
from realrun.execute.kernels import KernelSet, Sleep, Synthetic
from realrun.execute.run import compare
from realrun.execute.world import World

SIZES = (1, 2, 7, 1000, 300_001)
"""Elements: fewer than ranks, uneven, and more than one segment."""
LARGE = 1_300_001
"""Elements of fp32 whose parts, of up to four ranks, have three segments or more."""


def collectives(world: World) -> list[str]:
    """Every kind, type and size against a single process that knows all inputs; gives mistakes."""
    wrong = []
    for kind in Kind:
        summed = kind in {Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE}
        for dtype in (DType.FP32, DType.FP16, DType.BF16) if summed else (DType.FP32, DType.INT4):
            for elements in (*SIZES, LARGE) if dtype is DType.FP32 else SIZES:
                # the last is a place beyond any group of the tests: it is counted around
                roots = (0, 1, 11) if kind in {Kind.BROADCAST, Kind.REDUCE} else (0,)
                for root in roots:
                    scales = 0 if summed else 64
                    work = Collective(kind, "x", elements, dtype, WORLD, scales, root)
                    wrong += _mistakes(world, work)
    return wrong


def _mistakes(world: World, work: Collective) -> list[str]:
    schedule = Schedule("one", (Op("c", work, "comm"),))
    world.connect(schedule)
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
    parts = inputs.view(n, n, -1) if shape[1] % n == 0 else None
    match work.kind:
        case Kind.ALL_REDUCE:
            expected = inputs.sum(0)
        case Kind.REDUCE_SCATTER:
            assert parts is not None
            expected = parts[:, me].sum(0)
        case Kind.ALL_GATHER:
            expected = inputs.reshape(-1)
        case Kind.ALL_TO_ALL:
            assert parts is not None
            expected = parts[:, me].reshape(-1)
        case Kind.BROADCAST:
            expected = inputs[work.root % n]
        case Kind.REDUCE:
            expected = inputs.sum(0) if me == work.root % n else buffers.taken
    if torch.equal(buffers.taken.cpu(), expected.to(buffers.taken.dtype)):
        return []
    return [f"{work} on rank {me} of {n}"]


def all_strategies(world: World, variants: list[str]) -> list[list[str]]:
    """Run every strategy for three rounds; give the rules that this rank's trace breaks."""
    found = []
    for text in variants:
        schedule = strategies.parse(text).schedule(job(), world.layout)
        seconds = {op.work: 1e-4 for op in schedule.body if isinstance(op.work, Compute)}
        trace = execute(schedule, sleeping(world, seconds), 3, world, check=True)
        found.append([text, *trace.violations(schedule, skew=float("inf"))])
    return found


def sleeping(world: World, seconds: dict[Compute, float]) -> KernelSet:
    """Kernels that hold a thread, or a GPU's stream."""
    if world.device.type == "cpu":
        return Sleep(seconds)
    from realrun.execute.cuda_streams import GpuSleep  # noqa: PLC0415 - needs a GPU

    return GpuSleep(seconds)


def gpu_overlap(world: World) -> list[list[Any]]:
    """Two streams that each sleep, and what waits for both: the spans of the second round."""
    nap, short = Compute("nap", 1.0), Compute("short", 1.0)
    body = (
        Op("a", nap, "one"),
        Op("b", nap, "two"),
        Op("c", short, "three", (After("a"), After("b"))),
    )
    kernels = sleeping(world, {nap: 0.2, short: 0.001})
    trace = execute(Schedule("two", body), kernels, 2, world)
    return [[span.op, span.start, span.end] for span in trace.spans if span.round == 1]


class Recursion(Synthetic):
    """x <- x + rank + 1 per step; every round the sum of all x, one round late, is added."""

    def __init__(self, rank: int) -> None:
        self.x, self.sum, self.rank, self.buffer = 0.0, 0.0, rank, 0.0
        self.history: list[float] = []

    def compute(self, instance: Instance, ready: float) -> None:
        """One step, or what closes a round."""
        del ready
        if instance.op.name == "step":
            self.x += self.rank + 1
        else:
            self.x += self.sum
            self.buffer = self.x  # the average starts now; the next step does not wait for it
            self.history.append(self.x)

    def fill(self, instance: Instance, given: torch.Tensor) -> None:
        """Send what the last outer step left."""
        del instance
        given.fill_(self.buffer)

    def drain(self, instance: Instance, taken: torch.Tensor) -> None:
        """Take the sum, slowly."""
        del instance
        time.sleep(0.01)
        self.sum = taken[0].item()


def recursion(world: World) -> list[float]:
    """An overlapped schedule with kernels that compute something."""
    body = (
        Op("step", Compute("step", 1.0), "compute"),
        Op("outer", Compute("outer", 1.0), "compute", (After("average", 1),)),
        Op(
            "average",
            Collective(Kind.ALL_REDUCE, "x", 3, DType.FP32, WORLD),
            "comm",
            (After("outer"),),
        ),
    )
    kernels = Recursion(world.rank)
    execute(Schedule("late", body), kernels, 5, world)
    return kernels.history


def overlap(world: World) -> list[list[Any]]:
    """Two streams that sleep, a collective, and one of a rank alone: the spans of this rank."""
    nap = Compute("nap", 1.0)
    work = Collective(Kind.ALL_REDUCE, "x", 10, DType.FP32, WORLD)
    body = (
        Op("a", nap, "one"),
        Op("b", nap, "two"),
        Op("c", work, "comm", (After("a"), After("b"))),
        Op("d", replace(work, group=PEERS), "alone", (After("a"),)),
    )
    trace = execute(Schedule("two", body), Sleep({nap: 0.2}), 2, world)
    return list(map(list, trace.spans))


def other_schedule(world: World) -> str:
    """Rank 1 has another schedule than rank 0; gives the error."""
    work = Collective(Kind.ALL_REDUCE, "x", 10 + world.rank, DType.FP32, WORLD)
    schedule = Schedule("s", (Op("average", work, "comm"),))
    return said(lambda: execute(schedule, Sleep({}), 1, world))


def other_collective(world: World) -> str:
    """Rank 1 is about to launch another collective than rank 0; gives the error."""
    work = Collective(Kind.ALL_REDUCE, "x", 10, DType.FP32, WORLD)
    schedule = Schedule("s", (Op("average", work, "comm"), Op("again", work, "comm")))
    world.connect(schedule)
    at = world.communicator("comm", WORLD)
    assert at is not None
    instances = list(schedule.instances(1))
    compare(instances[0], at)
    return said(lambda: compare(instances[world.rank], at))


def groups(world: World) -> list[Any]:
    """Members of this rank's communicators in every group, and whether streams have their own."""
    body = tuple(
        Op(f"c{number}", Collective(Kind.ALL_REDUCE, "x", 4, DType.FP32, group), f"s{number}")
        for number, group in enumerate((WORLD, WORLD, NODE, PEERS, block(2)))
    )
    schedule = Schedule("s", body)
    world.connect(schedule)
    made = [
        world.communicator(op.stream, op.work.group)
        for op in body
        if isinstance(op.work, Collective)
    ]
    members = [list(one.members) if one else [] for one in made]
    assert made[0] is not None
    assert made[1] is not None
    return [*members, made[0].group is not made[1].group]
