"""A case with everything loaded and sized, and what a simulation of it says."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from co2sim.catalog import Fact
from co2sim.common.errors import Co2simError, OptionError, ScheduleError
from co2sim.common.resources import Recent
from co2sim.common.units import Bytes
from co2sim.hardware.cluster import Cluster
from co2sim.models.memory import activations, allocated, overhead
from co2sim.models.workload import Workload
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Layout, Schedule
from co2sim.schedule.tensor_parallel import data_layout, divided
from co2sim.simulation import metrics
from co2sim.simulation.collective_cost import peak_flops, traffic
from co2sim.simulation.trace import Trace
from co2sim.strategies import STRATEGIES, Strategy
from co2sim.strategies.step import title

_T = TypeVar("_T")

_MOST_OPS = 10_000
"""Of a schedule that is kept: about 10 MB."""
_SCHEDULES: Recent[tuple[str, Strategy, Workload, Layout], tuple[Workload, Schedule]] = Recent(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A case with everything loaded and sized.

    Of a stage of a pipeline these are its GPUs and its part of the model; it holds the activations
    of `held` micro-batches.
    """

    cluster: Cluster
    job: Workload
    strategy: Strategy
    schedule: Schedule
    assumed: tuple[Fact, ...]
    held: float = 1.0

    @property
    def precision(self) -> str:
        """Of the job."""
        return self.job.precision

    @property
    def layout(self) -> Layout:
        """Of data parallelism: tensor-parallel GPUs count as one rank."""
        return data_layout(self.cluster.layout, self.job.tp)

    def memory(self) -> dict[str, Bytes]:
        """Bytes on one GPU by item, and in all."""
        items = of_strategy(self.strategy, self.strategy.memory, self.job.share, self.layout)
        items = items | activations(self.job.share, self.held)
        if self.cluster.backend == "nccl":  # Gloo is for processors, which have no context
            items = items | overhead(items, self.schedule.groups, self.cluster.layout)
        return items | {"total": sum(items.values())}

    def measure(self, trace: Trace, rounds: int, steady: bool, free: Trace) -> Result:  # noqa: FBT001
        """The figures of a trace, given the same rounds with free communication."""
        cluster, job, schedule = self.cluster, self.job, self.schedule
        during = metrics.window(trace, schedule, rounds)
        round_time = during.round_time
        exposed = max(0.0, round_time - metrics.window(free, schedule, rounds).round_time)
        comm = metrics.communication(trace, schedule, during)
        gpus = cluster.layout.world_size
        step_time = round_time / schedule.steps
        samples = gpus // job.tp * job.samples_per_gpu / step_time
        tokens = samples * job.model.tokens
        model_flops = samples * job.model.flops_per_sample / gpus
        sent = traffic(schedule, cluster)
        memory = self.memory()
        price = cluster.price_per_gpu
        cost = price * gpus / tokens * 1e9 if price is not None else None
        return Result(
            cluster=cluster.name,
            model=job.model.name,
            unit=job.model.unit,
            strategy=title(self.strategy),
            gpus=gpus,
            nodes=cluster.nodes,
            micro_batch=job.micro_batch,
            accumulation=job.accumulation,
            tp=job.tp,
            sequence_parallel=job.sequence_parallel,
            tokens_per_gpu_per_step=each(job.samples_per_gpu * job.model.tokens, job.tp),
            precision=str(job.precision),
            steps_per_round=schedule.steps,
            round_time_s=round_time,
            step_time_s=step_time,
            samples_per_s=samples,
            tokens_per_s=tokens,
            tokens_per_s_per_gpu=tokens / gpus,
            model_tflops_per_gpu=model_flops / 1e12,
            hardware_tflops_per_gpu=samples * job.hardware_flops_per_sample / gpus / 1e12,
            mfu=model_flops / peak_flops(cluster.gpu, job.precision),
            comm_busy_s=comm.busy,
            waiting_s=comm.waiting,
            exposed_comm_s=exposed,
            overlap_ratio=max(0.0, 1 - exposed / comm.busy) if comm.busy else None,
            breakdown_s=metrics.breakdown(trace, schedule),
            wire_bytes_per_gpu_per_step=sent.gpu / schedule.steps,
            nic_bytes_per_node_per_step=sent.nic / schedule.steps,
            wan_bytes_per_site_per_step=sent.wan / schedule.steps,
            memory_bytes_per_gpu=memory,
            allocated_bytes_per_gpu=allocated(memory),
            gpu_memory_bytes=cluster.gpu.memory,
            fits_in_memory=memory["total"] <= cluster.gpu.memory,
            usd_per_billion_tokens=cost if cluster.currency == "USD" else None,
            cost_per_billion_tokens=cost,
            currency=cluster.currency if cost is not None else None,
            steady=steady,
            rounds_simulated=trace.rounds,
            assumed=self.assumed,
        )


def scheduled(strategy: Strategy, job: Workload, layout: Layout) -> tuple[Workload, Schedule]:
    """The schedule of a strategy, and the job: an equal one, if it is kept from another case.

    What changes in a sweep is mostly the cluster, which no schedule depends on but for its layout.
    A strategy of the user's own is asked each time.
    """
    if type(strategy) not in STRATEGIES.values():
        return job, schedule_of(strategy, job, layout)
    given = title(strategy), strategy, job, layout
    known = _SCHEDULES.find(given)
    if known is None:
        known = job, schedule_of(strategy, job, layout)
        if len(known[1].body) <= _MOST_OPS:
            _SCHEDULES.keep(given, known)
    return known


def each(tokens: int, gpus: int) -> float:
    """What each of some GPUs has of tokens: a whole number wherever it is one."""
    return tokens // gpus if tokens % gpus == 0 else tokens / gpus


def schedule_of(strategy: Strategy, job: Workload, layout: Layout) -> Schedule:
    """What every rank does in a round of a job on GPUs of a layout."""
    among = data_layout(layout, job.tp)
    try:
        found = of_strategy(strategy, strategy.schedule, job.share, among)
    except OptionError as error:
        if job.tp == 1:
            raise
        raise OptionError(f"{error} ({job.tp} GPUs that share layers count as one)") from error
    return divided(found, job.tp)


def of_strategy(
    strategy: Strategy, ask: Callable[[Workload, Layout], _T], job: Workload, layout: Layout
) -> _T:
    """What a strategy answers. An error in its own code is one line, with its place in that code.

    Raises ScheduleError for it.
    """
    try:
        return ask(job, layout)
    except (Co2simError, MemoryError):
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ScheduleError(
            f"{title(strategy)} cannot be used here: {type(error).__name__}: {error}"
            f" ({Path(place.filename).name}, line {place.lineno})"
        ) from error
