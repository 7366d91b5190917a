"""Figures of a pipeline: each kind of stage is simulated alone, and passes are lined up.

A stage alone takes the time of its passes, and more: what the strategy adds to a step, such as
reductions that nothing hides and the optimizer. `pipeline` gives the time at which each stage has
ended its passes; behind that comes what its strategy adds. The last stage to end is the step. What
a strategy hides behind passes it is not given credit for hiding behind the bubble, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from co2sim.common.errors import OptionError
from co2sim.common.progress import Done
from co2sim.common.units import Bytes, Seconds
from co2sim.hardware.cluster import Cluster
from co2sim.models.recompute import Recompute
from co2sim.models.workload import Workload
from co2sim.prediction.auto_delay import has_auto_options
from co2sim.prediction.case import Case, LoadedCase, each
from co2sim.prediction.micro_steps import stage_figures
from co2sim.prediction.pipeline_order import chunks_of, first_alike, stage_of
from co2sim.prediction.result import Result
from co2sim.schedule.mesh import Mesh
from co2sim.schedule.schedule import Collective, Compute, Kind, tensor
from co2sim.simulation.collective_cost import cost_of
from co2sim.simulation.compute_cost import compute_time, peak_flops
from co2sim.strategies import parse

_NOT_YET: Seconds = -1.0
_SEND = "send_receive"
"""In breakdowns: what stages send each other."""
MAX_PASSES = 2_000_000
"""Of all stages in a step: seconds of computing."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`stages` with `chunks` of layers each, and the micro-batches of a step.

    Raises OptionError for what the order does not allow, and for too many passes.
    """

    stages: int
    chunks: int
    micros: int

    def __post_init__(self) -> None:
        """Refuse micro-batches that interleaved stages cannot take in turn."""
        passes = 2 * self.stages * self.chunks * self.micros
        if passes > MAX_PASSES:
            raise OptionError(
                f"pp={self.stages}, interleave={self.chunks} and {self.micros:,} micro-steps are"
                f" {passes:,} passes in a step; at most {MAX_PASSES:,} are simulated"
            )
        if self.chunks > 1 and self.micros % self.stages:
            raise OptionError(
                f"interleave={self.chunks} needs micro-steps in multiples of pp={self.stages}, and"
                f" a step has {self.micros}; give accumulation or global_batch"
            )

    def warm_up(self, stage: int) -> int:
        """Forward passes before the first backward pass of a stage."""
        later = self.stages - 1 - stage
        if self.chunks > 1:
            later = 2 * later + (self.chunks - 1) * self.stages
        return min(later, self.chunks * self.micros)

    def microbatches_in_flight(self, stage: int) -> int:
        """Passes whose activations a stage holds at its peak."""
        return min(self.warm_up(stage) + 1, self.chunks * self.micros)

    def held(self, stage: int, counts: Sequence[int]) -> float:
        """The most of a stage's activations, in micro-batches; its chunks have `counts` layers."""
        if len(set(counts)) == 1:
            return self.microbatches_in_flight(stage) / self.chunks
        most = now = 0
        for number in self.order(stage):
            backward, part = divmod(number // self.micros, self.stages * self.chunks)
            now += counts[part // self.stages] * (1 - 2 * backward)
            most = max(most, now)
        return most / sum(counts)

    def order(self, stage: int) -> list[int]:
        """The numbers of the passes of a stage in turn.

        Parts of the layers are numbered in turn, all first chunks first: `part` is that of a chunk
        of a stage. A forward pass has the number part x micros + micro-batch, and a backward pass
        as many more as there are forward passes.
        """
        forward, backward = (self._of(stage, way) for way in (False, True))
        before = self.warm_up(stage)
        found = forward[:before]
        for pair in zip(forward[before:], backward, strict=False):
            found += pair
        return found + backward[len(forward) - before :]

    def _of(self, stage: int, backward: bool) -> list[int]:  # noqa: FBT001
        """All passes in one direction: as many micro-batches as stages on each chunk in turn."""
        group = min(self.stages, self.micros) if self.chunks > 1 else self.micros
        parts = range(stage, self.stages * self.chunks, self.stages)
        before = len(parts) * self.stages * self.micros if backward else 0
        return [
            before + part * self.micros + micro
            for first in range(0, self.micros, group)
            for part in (reversed(parts) if backward else parts)
            for micro in range(first, first + group)
        ]


def ends(
    pipeline: Pipeline,
    forward: Sequence[Sequence[Seconds]],
    backward: Sequence[Sequence[Seconds]],
    between: Seconds,
) -> list[Seconds]:
    """When each stage ends its last pass; passes take `forward[stage][chunk]`, and `backward`.

    `between` passes from the end of a pass until another stage has what it made.
    """
    stages, micros = pipeline.stages, pipeline.micros
    parts = stages * pipeline.chunks
    took = [way[n % stages][n // stages] for way in (forward, backward) for n in range(parts)]
    # a pass waits for that of the part before or behind, the first backward pass for the forward
    away = [0, *[-micros] * (parts - 1), *[micros] * (parts - 1), -parts * micros]
    sent = [between if stages > 1 and abs(n) == micros else 0.0 for n in away[:-1]] + [0.0]
    ended = [_NOT_YET] * (2 * parts * micros)
    orders = [pipeline.order(stage) for stage in range(stages)]
    place, free = [0] * stages, [0.0] * stages
    there_and_back = [*range(stages), *range(stages - 2, 0, -1)]
    while any(at < len(order) for at, order in zip(place, orders, strict=True)):
        for stage in there_and_back:
            order, at, now = orders[stage], place[stage], free[stage]
            while at < len(order):
                number = order[at]
                part = number // micros
                if away[part]:
                    come = ended[number + away[part]]
                    if come < 0:
                        break
                    now = max(now, come + sent[part])
                now = ended[number] = now + took[part]
                at += 1
            place[stage], free[stage] = at, now
    return free


@dataclass(frozen=True)
class _Stage:
    """A stage alone: how long a step takes, and its passes over each chunk."""

    prepared: LoadedCase
    result: Result
    step: Seconds
    forward: tuple[Seconds, ...]
    backward: tuple[Seconds, ...]

    @property
    def passes(self) -> Seconds:
        """Of all micro-batches of a step."""
        return self.prepared.job.accumulation * (sum(self.forward) + sum(self.backward))


@dataclass(frozen=True)
class _Line:
    """All stages, with what they send each other."""

    pipeline: Pipeline
    stages: tuple[_Stage, ...]
    between: Seconds

    @cached_property
    def ended(self) -> list[Seconds]:
        """When each stage has ended its passes."""
        forward, backward = (
            [one.forward for one in self.stages],
            [one.backward for one in self.stages],
        )
        return ends(self.pipeline, forward, backward, self.between)

    @property
    def step(self) -> Seconds:
        """Until the last stage has ended its step."""
        return max(
            end + max(0.0, one.step - one.passes)
            for end, one in zip(self.ended, self.stages, strict=True)
        )


def measured(case: Case, done: Done | None) -> Result:
    """The figures of a case with several stages. Raises OptionError for what has none."""
    _check(case)
    first = case.stage(0, micro_steps=1)
    pipeline = Pipeline(case.pp, case.interleave, first.job.accumulation)
    whole = case.load()[0].value
    whole = whole.resized(case.gpus) if case.gpus is not None else whole
    sent = sent_on(case, case.job())
    paid, free = zip(*_stages(case, pipeline, done), strict=True)
    between = between_stages(whole, first.cluster, sent)
    lines = _Line(pipeline, paid, between), _Line(pipeline, free, 0.0)
    return _result(case, whole, *lines, sent)


class StageMemory:
    """What the fullest stage takes on its GPUs, without a simulation.

    Cases that differ in micro-batch, micro-steps and recomputation alone share the stages.
    """

    def __init__(self, case: Case) -> None:
        few = replace(case, global_batch=None, accumulation=1, micro_batch=1)
        alike = first_alike(few.job())
        self._stages = {number: few.stage(number) for number in sorted(set(alike))}
        self._layers = {number: _layers(few, number) for number in self._stages}
        self._case = case

    def total(self, micro_batch: int, micro_steps: int, recompute: Recompute) -> Bytes:
        """Bytes on a GPU. Raises OptionError for steps that interleaved stages cannot take."""
        pipeline, most = Pipeline(self._case.pp, self._case.interleave, micro_steps), 0.0
        for number, one in self._stages.items():
            job = replace(
                one.job, micro_batch=micro_batch, accumulation=micro_steps, recompute=recompute
            )
            held = pipeline.held(number, self._layers[number])
            most = max(most, replace(one, job=job, microbatches_in_flight=held).memory()["total"])
        return most


def _check(case: Case) -> None:
    if case.noise.uneven:
        raise OptionError(f"pp={case.pp} does not combine with jitter, straggle or node_speed")
    if case.interval == "full":
        raise OptionError(f"pp={case.pp}: interval=full needs a schedule; take quick")
    strategy = case.strategy
    if has_auto_options(parse(strategy) if isinstance(strategy, str) else strategy):
        raise OptionError(f"pp={case.pp}: tau and delay are not chosen for it; give numbers")


def _stages(case: Case, pipeline: Pipeline, done: Done | None) -> list[tuple["_Stage", "_Stage"]]:
    """Every stage, and the same with free communication; of those alike the first holds most."""
    alike = first_alike(case.job())
    found = {number: _stage(case, pipeline, number, done) for number in sorted(set(alike))}
    return [found[number] for number in alike]


def _stage(
    case: Case, pipeline: Pipeline, number: int, done: Done | None
) -> tuple["_Stage", "_Stage"]:
    parts = chunks_of(case.job().share, number)
    counts = list(map(len, parts))
    held = pipeline.held(number, _layers(case, number))
    prepared, result, free_round = stage_figures(case, number, held, pipeline.micros, done)

    precision = prepared.job.precision

    def alone(step: Seconds, *, free: bool) -> _Stage:
        ways = (
            [
                pass_times(getattr(work, way), prepared.cluster, precision, free=free).took
                for work in prepared.job.works()
            ]
            for way in ("forward", "backward")
        )
        return _Stage(prepared, result, step, *(_by_chunk(times, counts) for times in ways))

    return (
        alone(result.step_time_s, free=False),
        alone(free_round / result.steps_per_round, free=True),
    )


def _layers(case: Case, number: int) -> list[int]:
    """The layers of each chunk of a stage."""
    layers = len(case.job().model.blocks) - 2
    return case.layer_counts(layers)[number :: case.pp]


def _by_chunk(times: Sequence[Seconds], counts: Sequence[int]) -> tuple[Seconds, ...]:
    """The sum of the times of several blocks, one after the other."""
    rest = iter(times)
    return tuple(sum(islice(rest, count)) for count in counts)


class PassTimes(NamedTuple):
    """Of a pass: computing, exchanges beside it, and those that it waits for."""

    computing: Seconds
    beside: Seconds
    blocking: Seconds

    @property
    def took(self) -> Seconds:
        """All of it: what is beside is hidden as far as computing is long enough."""
        return self.blocking + max(self.computing, self.beside)


def pass_times(
    work: Compute,
    cluster: Cluster,
    precision: str,
    *,
    free: bool,
    alone: Callable[[Collective], Seconds] | None = None,
) -> PassTimes:
    """Those of a pass with its exchanges, which `free` ones have not.

    `alone` gives the time of an exchange, for who asks often.
    """
    gpu = cluster.gpu
    if free or work.exchanges is None:
        return PassTimes(compute_time(work, gpu, precision), 0.0, 0.0)
    alone = alone or (lambda one: cost_of(one, cluster).duration_alone(cluster))
    before, beside, behind = (
        sum(map(alone, found))
        for found in (work.exchanges.before, work.exchanges.beside, work.exchanges.behind)
    )
    compute = compute_time(work, gpu, precision, before + beside + behind)
    return PassTimes(compute, beside, before + behind)


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a GPU sends to the next stage behind a pass, and gathers there with its group."""

    bytes: Bytes
    gathered: Collective | None


def sent_on(case: Case, job: Workload) -> _Sent:
    """The output of a pass. GPUs that share layers send a part each, and gather it behind.

    Source: the scatter/gather optimization of Narayanan et al. 2021, arXiv 2104.04473, section 4.1.
    With a divided sequence each has only its part in any case.
    """
    edge = job.share.model.blocks[1].boundary_bytes
    size = edge * job.micro_batch * job.precision.bytes / 2
    if case.tp == 1 or case.sequence_parallel:
        return _Sent(size, None)
    elements = round(size / job.precision.bytes)
    work = Collective(Kind.ALL_GATHER, "boundary", elements, job.precision, tensor(case.tp))
    return _Sent(size / case.tp, work)


def between_stages(whole: Cluster, stage: Cluster, sent: _Sent) -> Seconds:
    """From the end of a pass until the next stage has its output, by the slowest link."""
    link, sharing = whole.intra, 1
    if whole.nodes > 1:
        link, sharing = whole.inter, min(whole.gpus_per_node, stage.layout.world_size)
    time = link.latency + whole.call_overhead + sharing * sent.bytes / link.payload_bandwidth
    return time + (cost_of(sent.gathered, stage).duration_alone(stage) if sent.gathered else 0.0)


def _result(case: Case, whole: Cluster, line: _Line, free: _Line, sent: _Sent) -> Result:
    """The result of the whole: that of the first stage, but for what is of all stages."""
    stage = line.stages[0]
    result, job = stage.result, stage.prepared.job
    model, steps, gpus = case.load()[1].value, result.steps_per_round, whole.layout.world_size
    step = line.step
    samples = gpus // case.together * job.samples_per_gpu / step
    undivided = Mesh(pp=job.pp, interleave=job.interleave)
    full = replace(job, model=model, bare=None, **undivided.mesh_values(), divided_already=False)
    flops = full.model.flops_per_sample
    tokens, trained = samples * model.tokens, job.samples_per_gpu * model.tokens
    exposed = max(0.0, step - free.step) * steps
    times = 2 * case.interleave * job.accumulation  # outputs forward, their gradients backward
    busy = result.comm_busy_s + times * line.between * steps
    tight = max(
        (one.result for one in line.stages), key=lambda one: one.memory_bytes_per_gpu["total"]
    )
    moved, far = _moved(line, whole, sent)
    alone = result.sent_bytes_per_gpu_per_step
    by_collective = alone | {name: alone.get(name, 0.0) + size for name, size in moved.items()}
    price = whole.price_per_gpu
    cost = price * gpus / tokens * 1e9 if price is not None else None
    return replace(
        result,
        gpus=gpus,
        nodes=whole.nodes,
        model=model.name,
        pp=case.pp,
        interleave=case.interleave,
        trained_parameters=full.trained if case.lora else None,
        parameters=full.parameters,
        tokens_per_gpu_per_step=each(trained, case.together),
        round_time_s=step * steps,
        step_time_s=step,
        samples_per_s=samples,
        tokens_per_s=tokens,
        tokens_per_s_per_gpu=tokens / gpus,
        model_tflops_per_gpu=samples * flops / gpus / 1e12,
        hardware_tflops_per_gpu=samples * _hardware_flops(full) / gpus / 1e12,
        mfu=samples * flops / gpus / peak_flops(whole.gpu, job.peak),
        comm_busy_s=busy,
        exposed_comm_s=exposed,
        overlap_ratio=max(0.0, 1 - exposed / busy) if busy else None,
        breakdown_s=result.breakdown_s
        | {_SEND: times * line.between * steps, "idle": _idle(line) * steps},
        sent_bytes_per_gpu_per_step=by_collective,
        wire_bytes_per_gpu_per_step=sum(by_collective.values()),
        nic_bytes_per_node_per_step=result.nic_bytes_per_node_per_step + far,
        memory_bytes_per_gpu=tight.memory_bytes_per_gpu,
        allocated_bytes_per_gpu=tight.allocated_bytes_per_gpu,
        fits_in_memory=tight.fits_in_memory,
        usd_per_billion_tokens=cost if whole.currency == "USD" else None,
        cost_per_billion_tokens=cost,
    )


def _hardware_flops(full: Workload) -> float:
    """Of a sample over all stages: which layers a stage repeats depends on what it has."""
    alike = first_alike(full)
    return sum(
        alike.count(number) * stage_of(full, number).hardware_flops_per_sample
        for number in set(alike)
    )


def _moved(line: _Line, whole: Cluster, sent: _Sent) -> tuple[dict[str, Bytes], Bytes]:
    """What is sent for other stages in a step: by a GPU of the first stage, and by its node's NICs.

    That of the GPU is by collective.
    The first stage sends the outputs of all chunks, and gradients of all chunks but its first. It
    receives as many messages, each of which GPUs that share layers gather.
    """
    pipeline, first = line.pipeline, line.stages[0].prepared.cluster
    times = (2 * pipeline.chunks - 1) * pipeline.micros
    gathered = cost_of(sent.gathered, first).sent if sent.gathered else 0.0
    crossing = min(whole.gpus_per_node, first.layout.world_size) if whole.nodes > 1 else 0
    moved = {_SEND: times * sent.bytes}
    if sent.gathered:
        moved[sent.gathered.label] = times * gathered
    return moved, times * sent.bytes * crossing


def _idle(line: _Line) -> Seconds:
    """Of the first stage in a step: until it has ended its passes, less what they take."""
    return line.ended[0] - line.stages[0].passes
