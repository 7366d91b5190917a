"""The figures of one configuration, measured on its trace."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from co2sim import metrics
from co2sim.catalog import Fact
from co2sim.cluster import Cluster
from co2sim.cost import peak_flops, traffic
from co2sim.memory import activations
from co2sim.schedule import Schedule
from co2sim.strategies import Strategy
from co2sim.strategies.step import title
from co2sim.trace import Trace
from co2sim.units import Bytes, Seconds
from co2sim.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Figures of one configuration. Times are of the steady state; a step is an optimizer step.

    `tokens` are the model's units: tokens, or images. `exposed_comm_s` is the round time minus that
    of the same round with free communication, `waiting_s` what a rank spends in collectives before
    the last member is there, hidden or not, `straggler_delay_s` what slower or uneven ranks add to
    the round (None without any, and for what was measured), and `overlap_ratio` 1 - exposed / busy
    (None without communication). `breakdown_s` sums the spans of one rank in the last round by
    kernel or collective, waiting included. `assumed` lists the inputs that no source supports.
    `cost_per_billion_tokens` is in `currency`; `usd_per_billion_tokens` is None for other ones.
    """

    cluster: str
    model: str
    unit: str
    strategy: str
    gpus: int
    nodes: int
    micro_batch: int
    accumulation: int
    tokens_per_gpu_per_step: int
    precision: str
    steps_per_round: int
    round_time_s: Seconds
    step_time_s: Seconds
    samples_per_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    hardware_tflops_per_gpu: float
    mfu: float
    comm_busy_s: Seconds
    waiting_s: Seconds
    straggler_delay_s: Seconds | None = None
    exposed_comm_s: Seconds
    overlap_ratio: float | None
    breakdown_s: dict[str, Seconds]
    wire_bytes_per_gpu_per_step: Bytes
    nic_bytes_per_node_per_step: Bytes
    wan_bytes_per_site_per_step: Bytes
    memory_bytes_per_gpu: dict[str, Bytes]
    gpu_memory_bytes: Bytes
    fits_in_memory: bool
    usd_per_billion_tokens: float | None
    cost_per_billion_tokens: float | None = None
    currency: str | None = None
    steady: bool
    rounds_simulated: int
    assumed: tuple[Fact, ...] = ()

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a fraction of the round."""
        return self.exposed_comm_s / self.round_time_s

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Result":
        """From `to_dict`, or its JSON. Raises ValueError for anything else."""
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A case with everything loaded and sized."""

    cluster: Cluster
    job: Workload
    strategy: Strategy
    schedule: Schedule
    assumed: tuple[Fact, ...]

    def memory(self) -> dict[str, Bytes]:
        """Bytes on one GPU by item, and in all."""
        items = self.strategy.memory(self.job, self.cluster.layout)
        items = items | {"activations": activations(self.job)}
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
        samples = gpus * job.samples_per_gpu / step_time
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
            tokens_per_gpu_per_step=job.samples_per_gpu * job.model.tokens,
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
            gpu_memory_bytes=cluster.gpu.memory,
            fits_in_memory=memory["total"] <= cluster.gpu.memory,
            usd_per_billion_tokens=cost if cluster.currency == "USD" else None,
            cost_per_billion_tokens=cost,
            currency=cluster.currency if cost is not None else None,
            steady=steady,
            rounds_simulated=trace.rounds,
            assumed=self.assumed,
        )
