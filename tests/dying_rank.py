"""`python -m realrun`, but one rank dies in a step of its training: DIES="1:30".

With RAISES set it raises a ValueError there. With DIES="1:start" it dies when all are ready, while
they connect for their votes. Started again by torchrun, it lives.
"""

import os
import signal
from typing import Any

from realrun.cli import main
from realrun.train.task import Batch, Task
from realrun.train.votes import Votes

RANK, STEP = os.environ["DIES"].split(":")
draw, connect = Task.batch, Votes.__init__


def batch(self: Task, seed: int, step: int, samples: int, part: int = 0, parts: int = 1) -> Batch:
    """Die, or give the samples of the step."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if (str(part), str(step)) == (RANK, STEP) and not again:
        if "RAISES" in os.environ:
            raise ValueError("no such\nletter")
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(self, seed, step, samples, part, parts)


def votes(self: Votes, *given: Any) -> None:
    """Die, or connect."""
    if (os.environ["RANK"], "start") == (RANK, STEP):
        os.kill(os.getpid(), signal.SIGKILL)
    connect(self, *given)


Task.batch = batch  # type: ignore[method-assign]
Votes.__init__ = votes  # type: ignore[method-assign]
main()
