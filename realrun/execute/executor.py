"""Execute a schedule on real process groups."""

import math

from co2sim.common.units import Seconds
from co2sim.schedule.schedule import Schedule
from co2sim.simulation.trace import Trace
from realrun.errors import MismatchError
from realrun.execute.kernels import KernelSet
from realrun.execute.run import OnRound, Run
from realrun.execute.threads import Threads, short_collections
from realrun.execute.world import World

_ROUNDING: Seconds = 2e-6
"""CUDA events count microseconds, in single precision."""


def execute(
    schedule: Schedule,
    kernels: KernelSet,
    rounds: int,
    world: World,
    *,
    check: bool = False,
    progress: OnRound | None = None,
) -> Trace:
    """Run `rounds` rounds of `schedule` on all ranks of `world`; every rank calls this.

    Gives the trace of this rank, in seconds since a start that all ranks share. With `check` the
    members of every collective first compare what they are about to do.

    Raises RankFailure when a rank dies, hangs longer than the world's deadline or raises, and
    MismatchError when ranks do not do the same, or an op did not run or did not wait; both carry
    the spans finished so far as `trace`, if there are any.
    """
    world.agree("run", f"{schedule}\nfor {rounds} rounds")
    world.connect(schedule)
    run = Run(schedule, kernels, rounds, world, check, progress)
    with short_collections():
        if world.device.type == "cuda":
            from realrun.execute.cuda_streams import run_on_gpu  # noqa: PLC0415 - only where there is one

            trace = run_on_gpu(run)
        else:
            trace = Threads(run).trace()
    broken = trace.violations(schedule, _ROUNDING, skew=math.inf)
    if broken:
        raise MismatchError(f"the trace breaks {len(broken)} rules of its schedule: {broken[0]}")
    return trace
