"""The validation loss of a training: of the mean of all workers, at once or once it is over."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from realrun.execute.world import World
from realrun.train.log import Log
from realrun.train.parallelize import Method
from realrun.train.tasks.task import Task, means, scores


class Validation:
    """Validations of a method on a task. `last` is the last loss, None before the first.

    Those that wait for the end are kept as copies of the parameters, by step.
    """

    def __init__(self, task: Task, method: Method, world: World) -> None:
        """Nothing was validated yet."""
        self._task, self._method, self._world = task, method, world
        self._pending: dict[int, list[Tensor]] = {}
        self.last: float | None = None

    def take(self, parts: Sequence[Tensor] | None = None) -> tuple[float, float | None]:
        """Loss and accuracy of the mean of all workers; ranks share the samples.

        `parts` are the parameters to take instead of those of now. All ranks call this.
        """
        batches, size = self._task.validation, self._world.layout.world_size
        total = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        with torch.no_grad(), self._method.mean(parts) as model:
            for turn in range(-(-len(batches) // size)):
                place = turn * size + self._world.rank
                seen = scores(model, batches[min(place, len(batches) - 1)])  # all ranks call it
                if place < len(batches):
                    total += seen
        dist.all_reduce(total)
        loss, accuracy = means(total)
        self.last = loss
        return loss, accuracy

    def keep(self, step: int) -> None:
        """Keep the parameters of a step, to be validated once training is over."""
        self._pending[step] = self._method.copy()

    def take_pending(self, log: Log) -> None:
        """Validate what was kept, and fill it into the log. All ranks call this."""
        for step, parts in self._pending.items():
            loss, accuracy = self.take(parts)
            log.fill(step, loss, accuracy)
        self._pending.clear()
