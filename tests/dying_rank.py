"""`python -m realrun`, but one rank dies in a step of its training: DIES="1:30".

With RAISES set it raises a ValueError there. Started again by torchrun, it lives.
"""

import os
import signal

from realrun.cli import main
from realrun.train.task import Batch, Task

RANK, STEP = os.environ["DIES"].split(":")
draw = Task.batch


def batch(self: Task, seed: int, step: int, samples: int, part: int = 0, parts: int = 1) -> Batch:
    """Die, or give the samples of the step."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if (str(part), str(step)) == (RANK, STEP) and not again:
        if "RAISES" in os.environ:
            raise ValueError("no such\nletter")
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(self, seed, step, samples, part, parts)


Task.batch = batch  # type: ignore[method-assign]
main()
