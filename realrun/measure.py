"""Measure one case: warm up, run, and merge the traces of all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch

from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.units import Seconds
from co2sim.prediction.job import Stage
from co2sim.prediction.measure import measured
from co2sim.prediction.question import Question
from co2sim.schedule.schedule import Compute, DType
from co2sim.simulation.costs import work_time
from co2sim.simulation.trace import Span, Trace
from realrun.errors import MismatchError
from realrun.execute.executor import execute
from realrun.execute.kernels import Burn, KernelSet, Sleep
from realrun.execute.matmul_speed import each_round, slowest
from realrun.execute.world import World, describe, gather_objects
from realrun.record import Record, resolve

KernelName: TypeAlias = Literal["flops", "sleep"]
"""flops: as much arithmetic as every op states. sleep: hold the stream for the simulated time."""

Say: TypeAlias = Callable[[str], None]
"""Gets a few words on what is being measured."""

TORCH_DTYPE = {DType.FP32: torch.float32, DType.FP16: torch.float16, DType.BF16: torch.bfloat16}


def measure(
    case: Question,
    world: World,
    kernels: KernelName,
    *,
    rounds: int,
    check: bool = False,
    progress: Say | None = None,
) -> Record | None:
    """Run a case on all ranks; every rank calls this, and rank 0 gets the record.

    Layout and backend of the cluster are those of `world`, whatever the case says, but for its
    sites. At least one
    round warms up, and as many as the schedule looks back. Raises as `execute` does, and
    MismatchError when the trace breaks a rule of the schedule.
    """
    case, assumed = resolve(case, world.layout, world.backend)
    job = case.job()
    stage = replace(job, assumed=(*assumed, *job.assumed)).stage()
    schedule = stage.schedule
    world.place(stage.cluster.layout)
    warm_up = max(schedule.lag, 1)
    doing = make_kernels(kernels, stage, world)
    total = warm_up + rounds

    def tell(turn: int) -> None:
        if progress:
            progress(f"{schedule.name}: round {turn + 1} of {total}")

    seen = execute(schedule, doing, total, world, check=check, progress=tell if progress else None)
    timed = dict(doing.timed) if isinstance(doing, Burn) else {}
    products = each_round(seen, schedule, timed, rounds)
    gathered = gather_objects(world, (seen, world.clock.error, products))
    if gathered is None:
        return None
    runs, errors, ranks = zip(*gathered, strict=True)
    trace, tolerance = merge(runs), 2 * max(errors)
    broken = trace.violations(schedule, tolerance, skew=float("inf"))
    if broken:
        raise MismatchError(f"the trace breaks {len(broken)} rules of the schedule: {broken[0]}")
    return Record(
        case=case,
        kernels=kernels,
        rounds=rounds,
        trace=trace,
        clock_error=tolerance,
        figures=measured(stage, trace, rounds).to_dict(),
        environment=describe(world.device, world.backend),
        product_speed=(
            slowest(doing.product, ranks, schedule.lag) if isinstance(doing, Burn) else None
        ),
    )


def computing_time(case: Question, world: World, rounds: int) -> Seconds:
    """What `measure` takes at least: the kernels of all rounds, by the GPU of the cluster."""
    stage = resolve(case, world.layout, world.backend)[0].stage()
    schedule, each = stage.schedule, durations(stage)
    works = (op.work for op in schedule.body)
    once = sum(each[work] for work in works if isinstance(work, Compute))
    return (max(schedule.lag, 1) + rounds) * once


def make_kernels(name: KernelName, stage: Stage, world: World) -> KernelSet:
    """Synthetic kernels for a case."""
    if name == "flops":
        if stage.workload.offload != "none":
            raise OptionError(
                f"offload={stage.workload.offload} is predicted only; --kernels sleep takes the"
                " predicted times of the host"
            )
        if stage.workload.narrow:
            raise OptionError(
                f"precision={stage.workload.narrow} is predicted only; --kernels sleep takes the"
                f" predicted times, {stage.workload.precision} runs products"
            )
        if stage.workload.quantize_base != "none":
            raise OptionError(
                f"quantize_base={stage.workload.quantize_base} is predicted only; --kernels sleep"
                " takes the predicted times"
            )
        return Burn(world.device, TORCH_DTYPE[stage.workload.precision])
    if world.device.type == "cuda":
        from realrun.execute.cuda_streams import GpuSleep  # noqa: PLC0415 - only where there is one

        return GpuSleep(durations(stage))
    return Sleep(durations(stage))


def durations(stage: Stage) -> dict[Compute, Seconds]:
    """Seconds that every compute work takes in the simulation."""
    cluster, precision = stage.cluster, stage.workload.precision
    works = dict.fromkeys(op.work for op in stage.schedule.body)
    return {
        work: work_time(work, cluster, precision) for work in works if isinstance(work, Compute)
    }


def merge(traces: Sequence[Trace]) -> Trace:
    """One trace of all ranks from the traces of each."""
    spans: list[Span] = [span for trace in traces for span in trace.spans]
    ranks = {rank: 1 for trace in traces for rank in trace.ranks}
    return replace(traces[0], ranks=ranks, spans=tuple(spans))


def partial_trace(error: Co2simError) -> Trace | None:
    """The spans that this rank had finished when it failed, if the error holds them."""
    trace = getattr(error, "trace", None)
    return trace if isinstance(trace, Trace) else None
