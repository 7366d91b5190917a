"""Execute a schedule on real process groups: the executor issues, streams do the waiting."""

from co2sim.schedule import Schedule
from co2sim.trace import Trace
from realrun.kernels import Kernels
from realrun.run import Progress, Run
from realrun.threads import run_on_threads
from realrun.world import World


def execute(
    schedule: Schedule,
    kernels: Kernels,
    rounds: int,
    world: World,
    *,
    check: bool = False,
    free_communication: bool = False,
    progress: Progress | None = None,
) -> Trace:
    """Run `rounds` rounds of `schedule` on all ranks of `world`; every rank calls this.

    Gives the trace of this rank, in seconds since a start that all ranks share. With `check` the
    members of every collective first compare what they are about to do. With `free_communication`
    collectives are left out: the baseline of exposed communication.

    Raises RankFailure when a rank dies, hangs longer than the world's deadline or raises, and
    MismatchError when ranks do not do the same; both carry the spans finished so far as `trace`.
    """
    world.agree("run", f"{schedule}\nfor {rounds} rounds")
    world.connect(schedule)
    run = Run(schedule, kernels, rounds, world, check, free_communication, progress)
    if world.device.type == "cuda":
        from realrun.gpu import run_on_gpu  # noqa: PLC0415 - only where there is one

        return run_on_gpu(run)
    return run_on_threads(run)
