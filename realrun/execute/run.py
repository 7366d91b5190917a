"""One execution of a schedule on this rank: what threads and CUDA streams share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

from co2sim.common.units import Seconds
from co2sim.schedule.schedule import Collective, Instance, Schedule
from co2sim.simulation.trace import Span, Trace
from realrun.errors import MismatchError
from realrun.execute.collectives import Buffers, allocate
from realrun.execute.kernels import KernelSet
from realrun.execute.world import RankCommunicator, World

OnRound: TypeAlias = Callable[[int], None]
"""Called with the number of every round that this rank has begun."""


@dataclass(frozen=True)
class Run:
    """What to execute, and where."""

    schedule: Schedule
    kernels: KernelSet
    rounds: int
    world: World
    check: bool
    progress: OnRound | None

    def buffers(self) -> dict[str, Buffers]:
        """Buffers of every collective by the name of its op.

        Equal collectives of one stream share them: they never run at once.
        """
        made: dict[tuple[object, ...], Buffers] = {}
        by_op = {}
        for op in self.schedule.body:
            if not isinstance(op.work, Collective):
                continue
            work = op.work
            key = (op.stream, work.kind, work.group, work.bytes, work.dtype, work.routed)
            if key not in made:
                comm = self.world.communicator(op.stream, work.group)
                size, where = (len(comm.members), (comm.me, comm.nodes)) if comm else (1, ())
                made[key] = allocate(work, size, self.world.device, *where)
            by_op[op.name] = made[key]
        return by_op

    def reports(self, instance: Instance) -> bool:
        """Whether this instance is reported: it is the first of its round."""
        return self.progress is not None and instance.op is self.schedule.body[0]

    def begin(self, instance: Instance) -> None:
        """Report the round, if this instance is the first of it."""
        if self.progress and self.reports(instance):
            self.progress(instance.round)

    def trace(self, spans: list[Span]) -> Trace:
        """The trace of this rank."""
        return Trace(
            self.schedule.name,
            self.world.layout,
            self.rounds,
            {self.world.rank: 1},
            tuple(sorted(spans, key=lambda span: (span.start, span.end))),
        )


def common_start(world: World) -> Seconds:
    """A moment just passed that all ranks agree on, on this rank's clock."""
    here = torch.tensor([world.clock.now()], dtype=torch.float64)
    with world.together("common start"):
        dist.all_reduce(here, op=dist.ReduceOp.MAX)
    start: float = here.item()
    return start - world.clock.offset


def compare(instance: Instance, comm: RankCommunicator) -> None:
    """Check that all members are about to run the same collective.

    Raises MismatchError, which names the first member that is not.
    """
    text = f"{instance.op.name!r} of round {instance.round}: {instance.op.work}"
    texts = [""] * len(comm.members)
    dist.all_gather_object(texts, text, group=comm.group)
    for rank, other in zip(comm.members, texts, strict=True):
        if other != texts[0]:
            raise MismatchError(
                f"rank {rank} is about to run {other}, but rank {comm.members[0]} {texts[0]}"
            )
