"""`python -m realrun`, but one rank does something in a step of its training: DIES="kill:1:30".

kill: itself, with SIGKILL; raise: a ValueError; stop: its launcher, with SIGTERM. Started again by
torchrun, it does nothing.
"""

import os
import signal

from realrun.cli import main
from realrun.train.tasks.task import Batch, Task

HOW, RANK, STEP = os.environ["DIES"].split(":")
draw = Task.batch


def batch(self: Task, seed: int, step: int, samples: int, part: int = 0, parts: int = 1) -> Batch:
    """Die, or give the samples of the step."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if (str(part), str(step)) == (RANK, STEP) and not again:
        if HOW == "raise":
            raise ValueError("no such\nletter")
        if HOW == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getppid(), signal.SIGTERM)
    return draw(self, seed, step, samples, part, parts)


Task.batch = batch  # type: ignore[method-assign]
main()
