"""`python -m realrun`, but one rank dies in a step of its training: DIES="1:30"."""

import os
import signal

from realrun.cli import main
from realrun.train.task import Batch, Task

RANK, STEP = map(int, os.environ["DIES"].split(":"))
draw = Task.batch


def batch(self: Task, seed: int, step: int, samples: int, part: int = 0, parts: int = 1) -> Batch:
    """Die, or give the samples of the step."""
    if (part, step) == (RANK, STEP):
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(self, seed, step, samples, part, parts)


Task.batch = batch  # type: ignore[method-assign]
main()
