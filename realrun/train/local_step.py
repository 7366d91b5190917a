"""One optimizer step of a rank, on its share of the samples."""

import math
from dataclasses import dataclass

from torch.nn.utils import clip_grad_norm_

from realrun.errors import TrainingError
from realrun.train.methods import Method
from realrun.train.settings import TrainSettings
from realrun.train.task import Task, loss_of


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What a rank trains: share `part` of `parts` equal shares of every step's samples."""

    settings: TrainSettings
    task: Task
    method: Method
    part: int
    parts: int

    def gradients(self, step: int) -> float:
        """The gradients of a step; gives the loss."""
        self.method.optimizer.zero_grad()
        settings = self.settings
        batch = self.task.batch(settings.seed, step, settings.batch, self.part, self.parts)
        loss = loss_of(self.method.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def take(self, step: int) -> float:
        """A step; gives the loss. One that is no number never reaches the parameters.

        Raises TrainingError then.
        """
        settings, method = self.settings, self.method
        method.set_rate(settings.learning_rate(step))
        loss = self.gradients(step)
        if settings.clip_grad:
            clip_grad_norm_(method.bare.parameters(), settings.clip_grad)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss of step {step} is {loss} on rank {self.part}: training cannot go on; a"
                " lower lr, a longer warmup or a lower clip_grad may help"
            )
        method.optimizer.step()
        return loss

    def warm_up(self) -> None:
        """One pass that changes nothing, off the clock.

        What is made in a first pass is there afterwards: above all, DDP has its final buckets, and
        a resumed run sums in the same order as one that was not interrupted.
        """
        self.gradients(0)
        self.method.optimizer.zero_grad()
