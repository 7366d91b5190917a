"""One clock for all ranks: offsets to rank 0's, measured by ping-pong, exact on one machine."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from co2sim.units import Seconds
from realrun.dilation import now

_PINGS = 32


@dataclass(frozen=True, slots=True)
class Clock:
    """Gives rank 0's clock (`dilation.now`), wrong by at most `error` seconds."""

    offset: Seconds = 0.0
    error: Seconds = 0.0

    def now(self) -> Seconds:
        """Seconds since some moment that all ranks share."""
        return now() + self.offset


def synchronize(rank: int, world_size: int, machine: str) -> Clock:
    """Agree on rank 0's clock; ranks of one machine share it anyway. All ranks call this.

    Each rank asks rank 0 for its time; the answer of the fastest of several round trips is taken
    to be from its middle, which is wrong by at most half of that trip (Cristian 1989).
    """
    machines: list[str | None] = [None] * world_size
    dist.all_gather_object(machines, machine)
    if len(set(machines)) == 1:
        return Clock()
    found = Clock()
    for other in range(1, world_size):
        if rank == 0:
            _answer(other)
        elif rank == other:
            found = _ask()
    return found


def _answer(other: int) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        dist.recv(message, other)
        message[0] = now()
        dist.send(message, other)


def _ask() -> Clock:
    message = torch.zeros(1, dtype=torch.float64)
    best = Clock(error=float("inf"))
    for _ in range(_PINGS):
        start = now()
        dist.send(message, 0)
        dist.recv(message, 0)
        end = now()
        if (end - start) / 2 < best.error:
            best = Clock(message.item() - (start + end) / 2, (end - start) / 2)
    return best
