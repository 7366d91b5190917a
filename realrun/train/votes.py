"""Whether to stop: ranks vote, and read the result some steps later, so that no rank waits."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from co2sim.schedule import WORLD
from realrun.execute.world import World


class Votes:
    """A vote every `every` steps; its result, which is that of all, counts at the next one.

    Ranks of local updates may be at different steps; a rank that stopped at once would leave the
    others waiting. Each vote is 4 bytes that travel while the steps go on.
    """

    def __init__(self, world: World, every: int, wish: Callable[[], bool]) -> None:
        self._every, self._wish = every, wish
        self._group = world.group("votes", WORLD)
        self._given = torch.zeros(1, dtype=torch.int32, device=world.device)
        self._work: dist.Work | None = None

    def take(self, step: int) -> bool:
        """Vote, if it is time to; whether the vote before was to stop. All ranks call it."""
        if step % self._every:
            return False
        stop = self.close()
        if not stop:
            self._given.fill_(int(self._wish()))
            self._work = dist.all_reduce(
                self._given, op=dist.ReduceOp.MAX, group=self._group, async_op=True
            )
        return stop

    def close(self) -> bool:
        """Wait for the vote that is under way; its result."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._given.item())
