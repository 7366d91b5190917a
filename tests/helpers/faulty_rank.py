"""`python -m realrun`, but one rank fails at a stated moment: FAULT="kill:compute:1".

how: kill (SIGKILL), stop (SIGSTOP: not even its heart beats), hang (sleeps for good), raise.
phase: startup, clocks (compared), compute, before (a collective), inside (one); then the rank.
PERIOD is the time between two heartbeats, SILENT after how long without one a heart has stopped.
"""

import os
import signal
import threading
import time

from torch import Tensor

from co2sim.schedule.schedule import Instance
from realrun import cli, measure
from realrun.execute import world
from realrun.execute.kernels import KernelSet
from realrun.launch import monitor

ROUND = 1
LOCK = threading.Lock()


def fail(how: str) -> None:
    """Do it. Other streams that come here wait."""
    LOCK.acquire()
    match how:
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

    def __init__(self, kernels: KernelSet, how: str, phase: str) -> None:
        self.kernels, self.how, self.phase = kernels, how, phase

    def compute(self, instance: Instance, ready: float) -> float | None:
        """Fail, or compute."""
        if self.phase == "compute" and instance.round == ROUND:
            fail(self.how)
        return self.kernels.compute(instance, ready)

    def fill(self, instance: Instance, given: Tensor) -> None:
        """Fail, now or soon, or fill."""
        if self.phase == "before" and instance.round == ROUND:
            fail(self.how)
        if self.phase == "inside" and instance.round == ROUND:
            threading.Timer(0.02, fail, [self.how]).start()
        self.kernels.fill(instance, given)

    def drain(self, instance: Instance, taken: Tensor) -> None:
        """Drain."""
        self.kernels.drain(instance, taken)


def main() -> None:
    """Be the rank that the environment says, faulty or not."""
    how, phase, victim = os.environ["FAULT"].split(":")
    monitor._PERIOD, monitor._SILENT = float(os.environ["PERIOD"]), float(os.environ["SILENT"])
    if os.environ["RANK"] == victim:
        if phase == "startup":
            fail(how)
        if phase == "clocks":
            world.synchronize = lambda *_: fail(how)
        make = measure.make_kernels
        measure.make_kernels = lambda *given: Faulty(make(*given), how, phase)
    cli.main()
