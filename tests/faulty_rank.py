"""`python -m realrun`, but one rank fails at a stated moment: FAULT="kill:compute:1".

how: kill (SIGKILL), stop (SIGSTOP: not even its heart beats), hang (sleeps for good), raise.
phase: startup, compute, before (a collective), inside (one). The last part is the rank.
"""

import os
import signal
import threading
import time
from pathlib import Path

from torch import Tensor

from co2sim.schedule import Instance
from realrun import measure
from realrun.cli import main
from realrun.execute.kernels import KernelSet

HOW, PHASE, VICTIM = os.environ["FAULT"].split(":")
ROUND = 1
LOCK = threading.Lock()


def fail() -> None:
    """Do it, and leave word of when. Other streams that come here wait."""
    LOCK.acquire()
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()), encoding="ascii")
    match HOW:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(1000)
        case _:
            raise ValueError("a kernel went wrong")


class Faulty:
    """Kernels that fail in round 1."""

    def __init__(self, kernels: KernelSet) -> None:
        self.kernels = kernels

    def compute(self, instance: Instance, ready: float) -> float | None:
        """Fail, or compute."""
        if PHASE == "compute" and instance.round == ROUND:
            fail()
        return self.kernels.compute(instance, ready)

    def fill(self, instance: Instance, given: Tensor) -> None:
        """Fail, now or soon, or fill."""
        if PHASE == "before" and instance.round == ROUND:
            fail()
        if PHASE == "inside" and instance.round == ROUND:
            threading.Timer(0.02, fail).start()
        self.kernels.fill(instance, given)

    def drain(self, instance: Instance, taken: Tensor) -> None:
        """Drain."""
        self.kernels.drain(instance, taken)


if os.environ["RANK"] == VICTIM:
    if PHASE == "startup":
        fail()
    make = measure.make_kernels
    measure.make_kernels = lambda *given: Faulty(make(*given))
main()
