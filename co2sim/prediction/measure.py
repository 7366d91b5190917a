"""The figures of a job, from what traces of its stages say: their passes are lined up.

A stage alone takes the time of its passes, and more: what the strategy adds to a step, such as
reductions that nothing hides and the optimizer. The order of passes gives the time at which each
stage has ended its own; behind that comes what its strategy adds. The last stage to end is the
step. What a strategy hides behind passes it is not given credit for hiding behind the bubble, too.
A job without a pipeline has one stage, and its step is that of the stage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from co2sim.common.units import Bytes, Seconds
from co2sim.hardware.cluster import GPU, Cluster
from co2sim.prediction.job import Job, Stage, chunks_of, stage_of
from co2sim.prediction.notes import beyond_the_table
from co2sim.prediction.result import Result
from co2sim.schedule.mesh import MESH, OF_STAGES, Mesh
from co2sim.schedule.pipeline import PartTimes, PassTime, Pipeline, busy, ends
from co2sim.schedule.schedule import Collective, Compute, Kind, tensor
from co2sim.simulation import metrics
from co2sim.simulation.costs import compute_time, cost_of, kernel_parts, peak_flops, traffic
from co2sim.simulation.trace import Trace
from co2sim.strategies.step import title
from co2sim.training.memory import allocated
from co2sim.training.workload import BlockWork, Workload

_SEND = "send_receive"
"""In breakdowns: what stages send each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """What a trace of a stage alone says of a round of `steps` steps, in seconds and bytes.

    `free_round` is how long the round takes with free communication, by a second simulation; None
    for what was measured, where `exposed` is read from the trace: two runs differ in more. `sent`
    is what a GPU sends by collective, `nic` what leaves a node, and `wan` a site.
    """

    stage: Stage
    steps: int
    round_time: Seconds
    free_round: Seconds | None
    busy: Seconds
    waiting: Seconds
    exposed: Seconds
    breakdown: Mapping[str, Seconds]
    sent: Mapping[str, Bytes]
    nic: Bytes
    wan: Bytes
    steady: bool
    rounds: int

    @classmethod
    def of_trace(
        cls,
        stage: Stage,
        trace: Trace,
        rounds: int,
        steady: bool,  # noqa: FBT001
        free: Trace | None = None,
    ) -> "StageFigures":
        """Those of the last rounds of a trace; `free` is the same with free communication."""
        schedule = stage.schedule
        during = metrics.window(trace, schedule, rounds)
        moved = metrics.communication(trace, schedule, during)
        sent = traffic(schedule, stage.cluster)
        alone: Seconds | None = None
        if free is None:
            exposed = metrics.exposed(trace, schedule, during)
        else:
            alone = metrics.window(free, schedule, rounds).round_time
            exposed = metrics.exposed_by_difference(moved.busy, during.round_time, alone)
        return cls(
            stage=stage,
            steps=schedule.steps,
            round_time=during.round_time,
            free_round=alone,
            busy=moved.busy,
            waiting=moved.waiting,
            exposed=exposed,
            breakdown=metrics.breakdown(trace, schedule),
            sent=sent.by_collective,
            nic=sent.nic,
            wan=sent.wan,
            steady=steady,
            rounds=trace.rounds,
        )

    @property
    def step_time(self) -> Seconds:
        """Of an optimizer step."""
        return self.round_time / self.steps


def measured(
    stage: Stage, trace: Trace, rounds: int, *, steady: bool = False, free: Trace | None = None
) -> Result:
    """The figures of a job with one stage from its trace, as of a run that was measured.

    `free` is a trace with free communication, if there is one.
    """
    figures = StageFigures.of_trace(stage, trace, rounds, steady, free)
    return result_of(Line(stage.job, (figures,), order_of(stage.job)))


def rates(job: Job, step_time: Seconds) -> dict[str, Any]:
    """The fields of a result that follow from how long a step takes."""
    cluster, work = job.cluster, job.workload
    gpus = cluster.layout.world_size
    samples = gpus // work.together * work.samples_per_gpu / step_time
    tokens = samples * job.model.tokens
    flops = samples * _undivided(work).model.flops_per_sample / gpus
    cost = cluster.price_per_gpu and cluster.price_per_gpu * gpus / tokens * 1e9
    return {
        "samples_per_s": samples,
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": tokens / gpus,
        "model_tflops_per_gpu": flops / 1e12,
        "hardware_tflops_per_gpu": samples * _hardware_flops(job) / gpus / 1e12,
        "mfu": flops / peak_flops(cluster.gpu, work.peak),
        "usd_per_billion_tokens": cost if cluster.currency == "USD" else None,
        "cost_per_billion_tokens": cost,
        "currency": cluster.currency if cost is not None else None,
    }


def order_of(job: Job) -> Pipeline:
    """That of the passes of a step. Raises OptionError for what it does not allow."""
    work = job.workload
    return Pipeline(work.pp, work.chunks, work.accumulation, work.schedule)


def _undivided(work: Workload) -> Workload:
    """As if one GPU did all of every stage."""
    if work.is_plain:
        return work
    stages = {name: getattr(work, name) for name in OF_STAGES}
    return replace(work, **Mesh(**stages).mesh_values())


def _hardware_flops(job: Job) -> float:
    """Of a sample over all stages: which layers a stage repeats depends on what it has."""
    whole = _undivided(job.workload)
    every = sum(
        job.alike.count(stage) * stage_of(whole, stage).hardware_flops_per_sample
        for stage in set(job.alike)
    )
    return every * whole.apart / whole.pp


def result_of(line: "Line") -> Result:
    """The result of all stages: of the first, but for what is of all."""
    job, first = line.job, line.stages[0]
    cluster, work, steps = job.cluster, job.workload, first.steps
    gpus, step = cluster.layout.world_size, line.step
    of_stages = (figures.stage.memory() for figures in line.different)
    memory = max(of_stages, key=lambda items: items["total"])
    sent = {name: size / steps for name, size in first.sent.items()}
    sent |= {name: sent.get(name, 0.0) + size for name, size in line.sent.items()}
    busy = first.busy + line.sending * steps
    names = (*MESH, "micro_batch", "accumulation", "lora", "quantize_base", "recompute")
    names = (*names, "offload", "attention")
    return Result(
        **rates(job, step),
        **{name: getattr(work, name) for name in names},
        cluster=cluster.name,
        model=job.model.name,
        stack=job.stack.name,
        optimizer=work.optimizer.name,
        unit=job.model.unit,
        strategy=title(job.strategy),
        gpus=gpus,
        nodes=cluster.nodes,
        trained_parameters=work.trained if work.lora else None,
        parameters=work.model.parameters,
        workers=job.workers,
        global_batch=gpus // work.together * work.samples_per_gpu,
        tokens_per_gpu_per_step=_each(work.samples_per_gpu * job.model.tokens, work.together),
        precision=work.narrow or str(work.precision),
        steps_per_round=steps,
        round_time_s=step * steps,
        step_time_s=step,
        host_load=host_load(first.stage.workload.share, cluster.gpu, job.call_overhead),
        comm_busy_s=busy,
        waiting_s=first.waiting,
        exposed_comm_s=line.exposed,
        overlap_ratio=metrics.overlap_ratio(busy, min(busy, line.exposed)),
        breakdown_s=dict(first.breakdown) | line.breakdown,
        sent_bytes_per_gpu_per_step=sent,
        wire_bytes_per_gpu_per_step=sum(sent.values()),
        nic_bytes_per_node_per_step=first.nic / steps + line.far,
        wan_bytes_per_site_per_step=first.wan / steps,
        memory_bytes_per_gpu=memory,
        allocated_bytes_per_gpu=allocated(memory),
        gpu_memory_bytes=cluster.gpu.memory,
        fits_in_memory=memory["total"] <= cluster.gpu.memory,
        steady=first.steady,
        rounds_simulated=first.rounds,
        assumed=(*job.assumed, *beyond_the_table(cluster.gpu, first.stage.workload.share)),
    )


def _each(tokens: int, gpus: int) -> float:
    """What each of some GPUs has of tokens: a whole number wherever it is one."""
    return tokens // gpus if tokens % gpus == 0 else tokens / gpus


def host_load(work: Workload, gpu: GPU, call_overhead: Seconds) -> float | None:
    """What the host needs for all passes over what the GPU needs; None where they have no kernels.

    `call_overhead` is that of the stack, for a GPU of whose kernels nothing is known.
    """
    overhead = gpu.kernels.call_overhead if gpu.kernels else call_overhead
    host = device = 0.0
    for block in work.works():
        for half in (block.forward, block.backward):
            if half.kernels is None:
                continue
            host += half.kernels.calls * overhead
            if gpu.kernels is None:
                device += compute_time(half, gpu, str(work.precision))
            else:
                parts = kernel_parts(half.kernels, gpu, gpu.kernels, str(work.precision))
                device += parts.products + parts.attention + parts.elementwise
    return host / device if device else None


@dataclass(frozen=True)
class Line:
    """All stages of a job, with what they send each other: nothing where there is one."""

    job: Job
    stages: tuple[StageFigures, ...]
    order: Pipeline

    @property
    def several(self) -> bool:
        """Whether there is a pipeline."""
        return len(self.stages) > 1

    @property
    def different(self) -> list[StageFigures]:
        """One of each kind."""
        return [self.stages[stage] for stage in sorted(set(self.job.alike))]

    @cached_property
    def between(self) -> Seconds:
        """From the end of a pass until the next stage has its output."""
        return between_stages(self.job, sent_on(self.job.workload)) if self.several else 0.0

    @cached_property
    def paid(self) -> "_Ended":
        """When the stages end."""
        passes = {part.stage.number: _passes(part.stage, free=False) for part in self.different}
        return _Ended.of(self, passes, [figures.step_time for figures in self.stages], self.between)

    @property
    def step(self) -> Seconds:
        """Until the last stage has ended its step."""
        return self.paid.step if self.several else self.stages[0].step_time

    @cached_property
    def exposed(self) -> Seconds:
        """What a round takes longer than one with free communication, between stages, too."""
        first = self.stages[0]
        if not self.several:
            return first.exposed
        passes = {part.stage.number: _passes(part.stage, free=True) for part in self.different}
        steps = [(part.free_round or part.round_time) / part.steps for part in self.stages]
        free = _Ended.of(self, passes, steps, 0.0).step
        return max(0.0, self.step - free) * first.steps

    @property
    def sending(self) -> Seconds:
        """Of a step: outputs forward and their gradients backward, of the first stage."""
        return 2 * self.order.chunks * self.order.micros * self.between

    @property
    def breakdown(self) -> dict[str, Seconds]:
        """What a round has besides that of the first stage alone.

        It waits until it has ended its passes, less what they take.
        """
        if not self.several:
            return {}
        steps = self.stages[0].steps
        idle = max(0.0, self.paid.ended[0] - self.paid.first)
        return {_SEND: self.sending * steps, "idle": idle * steps}

    @cached_property
    def _messages(self) -> int:
        """Those that the first stage sends: outputs of its chunks, and gradients of their inputs.

        It receives as many messages, each of which GPUs that share layers gather.
        """
        return self.order.messages(0) if self.several else 0

    @property
    def sent(self) -> dict[str, Bytes]:
        """By a GPU of the first stage for other stages in a step, by collective."""
        if not self.several:
            return {}
        message = sent_on(self.job.workload)
        sent = {_SEND: self._messages * message.bytes}
        if message.gathered:
            gathered = cost_of(message.gathered, self.job.stage_cluster).sent
            sent[message.gathered.label] = self._messages * gathered
        return sent

    @property
    def far(self) -> Bytes:
        """By the NICs of a node of the first stage in a step."""
        cluster = self.job.cluster
        if not self.several or cluster.nodes == 1:
            return 0.0
        crossing = min(cluster.gpus_per_node, cluster.layout.world_size // self.order.stages)
        return self._messages * sent_on(self.job.workload).bytes * crossing


class _Ended(NamedTuple):
    """When each stage has ended its passes, what the first one's take, and when the step ends."""

    ended: Sequence[Seconds]
    first: Seconds
    step: Seconds

    @classmethod
    def of(
        cls,
        line: Line,
        passes: Mapping[int, Sequence[PartTimes]],
        steps: Sequence[Seconds],
        between: Seconds,
    ) -> "_Ended":
        """`passes` of the chunks of each kind of stage, `steps` of each alone."""
        work, micros = line.job.workload, line.order.micros
        of_parts = {
            part: times
            for stage, kind in enumerate(line.job.alike)
            for part, times in zip(work.parts_of(stage), passes[kind], strict=True)
        }
        times = [of_parts[part] for part in sorted(of_parts)]
        slower = slowdown(line.job.cluster)
        ended = ends(line.order, times, between, slower)
        taken = [micros * sum(part.took for part in passes[kind]) for kind in line.job.alike]
        behind = (max(0.0, step - took) for step, took in zip(steps, taken, strict=True))
        step = max(end + more for end, more in zip(ended, behind, strict=True))
        return cls(ended, busy(line.order, times, 0, slower), step)


def slowdown(cluster: Cluster) -> float:
    """Of what exchanges take: by how much computing beside them takes longer."""
    return cluster.interference / (1 + cluster.interference)


def _passes(stage: Stage, *, free: bool) -> list[PartTimes]:
    """Of a micro-batch over each chunk of a stage."""
    work, blocks = stage.workload, iter(stage.workload.works())
    parts = chunks_of(stage.job.workload.share, stage.number)
    times = partial(block_times, cluster=stage.cluster, precision=work.precision, free=free)
    return [PartTimes.over([times(next(blocks)) for _ in part]) for part in parts]


def block_times(
    work: BlockWork,
    cluster: Cluster,
    precision: str,
    *,
    free: bool,
    alone: Callable[[Collective], Seconds] | None = None,
) -> PartTimes:
    """Of a micro-batch over a block; see `pass_times`."""
    there, back = (
        pass_times(half, cluster, precision, free=free, alone=alone)
        for half in (work.forward, work.backward)
    )
    return PartTimes(there, back, back.computing * _share_of_weights(work, cluster.gpu, precision))


def _share_of_weights(work: BlockWork, gpu: GPU, precision: str) -> float:
    """Of what a backward pass computes: by times of kernels, or by FLOP where none are known."""
    whole, part = work.backward, work.weights
    if not (whole.kernels and part.kernels and gpu.kernels):
        return part.flops / whole.flops if whole.flops else 0.0
    some, every = (
        times.products + times.attention + times.elementwise
        for kernels in (part.kernels, whole.kernels)
        for times in [kernel_parts(kernels, gpu, gpu.kernels, precision)]
    )
    return some / every if every else 0.0


def pass_times(
    work: Compute,
    cluster: Cluster,
    precision: str,
    *,
    free: bool,
    alone: Callable[[Collective], Seconds] | None = None,
) -> PassTime:
    """Those of a pass with its exchanges, which `free` ones have not.

    `alone` gives the time of an exchange, for who asks often.
    """
    gpu = cluster.gpu
    if free or work.exchanges is None:
        return PassTime.of(compute_time(work, gpu, precision), 0.0, 0.0)
    alone = alone or (lambda exchange: cost_of(exchange, cluster).duration_alone(cluster))
    before, beside, behind = (
        sum(map(alone, exchanges))
        for exchanges in (work.exchanges.before, work.exchanges.beside, work.exchanges.behind)
    )
    compute = compute_time(work, gpu, precision, before + beside + behind)
    return PassTime.of(compute, beside, before + behind)


@dataclass(frozen=True, slots=True)
class Sent:
    """What a GPU sends to the next stage behind a pass, and gathers there with its group."""

    bytes: Bytes
    gathered: Collective | None


def sent_on(work: Workload) -> Sent:
    """The output of a pass. GPUs that share layers send a part each, and gather it behind.

    Source: the scatter/gather optimization of Narayanan et al. 2021, arXiv 2104.04473, section 4.1.
    With a divided sequence each has only its part in any case.
    """
    edge = work.share.model.blocks[1].boundary
    size = edge * work.micro_batch * work.precision.bytes
    if work.tp == 1 or work.sequence_parallel:
        return Sent(size, None)
    elements = round(size / work.precision.bytes)
    gather = Collective(Kind.ALL_GATHER, "boundary", elements, work.precision, tensor(work.tp))
    return Sent(size / work.tp, gather)


def between_stages(job: Job, sent: Sent) -> Seconds:
    """From the end of a pass until the next stage has its output, by the slowest link."""
    whole, stage = job.cluster, job.stage_cluster
    link, sharing = whole.intra, 1
    if whole.nodes > 1:
        of_stage = whole.layout.world_size // job.workload.pp
        link, sharing = whole.inter, min(whole.gpus_per_node, of_stage)
    time = link.latency + whole.call_overhead + sharing * sent.bytes / link.payload_bandwidth
    return time + (cost_of(sent.gathered, stage).duration_alone(stage) if sent.gathered else 0.0)
