"""A job: what is simulated, as objects and numbers, and the stages that it has.

A job without a pipeline has one stage. Stages are consecutive nodes, or equal parts of a node; the
embedding is with the first layers, the head with the last ones, and where these share weights both
stages hold them.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias, TypeVar

from co2sim.catalog import Fact
from co2sim.common.errors import Co2simError, OptionError, ScheduleError
from co2sim.common.resources import LruCache
from co2sim.common.units import Bytes, Seconds
from co2sim.hardware.cluster import Cluster
from co2sim.models.operators import Attention, Block, Model, Product
from co2sim.schedule.exchanges import apply_tensor_parallelism
from co2sim.schedule.mesh import Mesh
from co2sim.schedule.pipeline import Held, Pipeline
from co2sim.schedule.schedule import Layout, Schedule
from co2sim.simulation.noise import RunOptions
from co2sim.strategies import LocalSteps, Strategy, is_built_in, options_of, with_options
from co2sim.strategies.local import OUTER, workers_of
from co2sim.strategies.step import title
from co2sim.training.framework import Recompute, check_applies
from co2sim.training.memory import STATES, Timeline, overhead, timeline
from co2sim.training.stack import UNNAMED, Setting, Stack
from co2sim.training.workload import Workload

_T = TypeVar("_T")
_QUIETLY = RunOptions()


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is simulated: a model on all GPUs of a cluster, and how.

    `stack` is that whose kernels run; `UNNAMED` where the file of the GPU says itself how fast it
    is. `measured` are the runs that it was calibrated by, and `call_overhead` is what its
    host needs for an operation. `assumed` are the inputs that no source supports. Without
    `averages` rounds of local updates are simulated as if nothing were averaged, or waited for.
    """

    cluster: Cluster
    workload: Workload
    strategy: Strategy
    options: RunOptions = _QUIETLY
    stack: Stack = UNNAMED
    measured: tuple[Setting, ...] = ()
    call_overhead: Seconds = 0.0
    assumed: tuple[Fact, ...] = ()
    averages: bool = True

    @property
    def model(self) -> Model:
        """The whole of it."""
        return self.workload.model

    @cached_property
    def stage_cluster(self) -> Cluster:
        """The GPUs of one stage. Raises OptionError where stages fill no nodes, nor equal parts."""
        return stage_cluster(self.cluster, self.workload)

    @property
    def layout(self) -> Layout:
        """Of data parallelism in a stage: GPUs that share layers count as one rank."""
        return self.workload.ranks(self.stage_cluster.layout)

    @property
    def kernels(self) -> str:
        """What its kernels do, besides the model: precision, attention, recomputation, adapters."""
        work = self.workload
        more = ", adapters" if work.lora else ""
        more += f" beside {work.quantize_base}" if work.quantize_base != "none" else ""
        return f"{work.narrow or work.precision}, {work.attention}, {work.recompute}{more}"

    @property
    def workers(self) -> int:
        """The replicas that step on their own; 1: all step together."""
        strategy = self.strategy
        return workers_of(strategy, self.layout) if isinstance(strategy, LocalSteps) else 1

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For every stage the number of the first one that has equal blocks in its chunks."""
        if self.workload.pp == 1:
            return (0,)
        first: dict[object, int] = {}
        numbers: list[int] = []
        for stage in range(self.workload.pp):
            parts = chunks_of(self.workload.share, stage)
            blocks = tuple(tuple(replace(block, name="") for block in part) for part in parts)
            numbers.append(first.setdefault(blocks, stage))
        return tuple(numbers)

    def stage(self, number: int = 0, micro_steps: int | None = None) -> "Stage":
        """A stage as if it were alone, with a schedule of `micro_steps`; default: all of a step.

        Raises Co2simError for what the strategy cannot do.
        """
        part = stage_of(self.workload, number)
        few = replace(part, accumulation=micro_steps or part.accumulation)
        kept, schedule = scheduled(self.strategy, few, self.stage_cluster.layout)
        if not self.averages:
            schedule = without_averages(schedule)
        part = replace(kept, accumulation=part.accumulation) if micro_steps else kept
        return Stage(job=self, number=number, workload=part, schedule=schedule)

    def with_batch(self, micro_batch: int, micro_steps: int, recompute: Recompute) -> "Job":
        """The job with another batch."""
        return replace(self, workload=_sized(self.workload, micro_batch, micro_steps, recompute))

    def memory(self, micro_batch: int, micro_steps: int, recompute: Recompute) -> Bytes:
        """What the fullest stage takes on a GPU with another batch, without a simulation.

        Raises OptionError for steps that interleaved stages cannot take.
        """
        return self.fullest(micro_batch, micro_steps, recompute).memory()["total"]

    def fullest(self, micro_batch: int, micro_steps: int, recompute: Recompute) -> "Stage":
        """The stage whose GPUs hold most with another batch; its schedule is of a short round."""
        return fullest(self._of_one_sample, micro_batch, micro_steps, recompute)

    def least_memory(self) -> Bytes:
        """What no run can do without: states, in the stage and at the moment with most of them."""
        stages = of_one_sample(self, lambda short, number: short.stage(number, 1))
        return max(stage.timeline().most(*STATES) for stage in stages)

    def lacks(self) -> tuple[str, ...]:
        """What the stack lacks of it, a text each; nothing where that is not known."""
        work, stack = self.workload, self.stack
        precision = work.narrow or str(work.precision)
        missing = {
            stack.lacks(self.strategy.name, options_of(self.strategy), work): is_built_in(
                self.strategy
            ),
            f"no {precision}": bool(stack.precisions) and precision not in stack.precisions,
            f"no copies of keys (tp={work.tp}, {self._keys} heads of keys)": bool(stack.runs)
            and not work.gathers_keys
            and work.tp > self._keys,
            f"tp={work.tp} with experts only with sequence_parallel": stack.experts_divide_sequence
            and self.has_experts
            and work.tp > 1
            and not work.sequence_parallel,
            f"no recomputation {work.recompute}": not stack.recomputes_by(work.recompute),
            f"no offload={work.offload}": work.offload not in {"none", *(stack.offloads or ())}
            and stack.offloads is not None,
        }
        return tuple(text for text, holds in missing.items() if text and holds)

    @property
    def has_experts(self) -> bool:
        """Whether tokens pass a part of the model only."""
        return self.model.active_parameters < self.model.parameters

    @property
    def _keys(self) -> int:
        """The fewest heads of keys of its attention, or as many as queries: ranks divide these."""
        attention = (op for block in self.model.blocks for op in block.of(Attention))
        return min(
            (op.heads if op.latent else op.keys for op in attention), default=self.workload.tp
        )

    def applying(self, recomputes: Sequence[Recompute]) -> tuple[Recompute, ...]:
        """Those that the model, and the stack, have something for. Raises OptionError for none.

        One alone is taken whether the stack has it or not.
        """
        work, reason = self.workload, ""
        applying: list[Recompute] = []
        gathered = work.keep_gathered and work.sequence_parallel
        for recompute in recomputes:
            if len(recomputes) > 1 and not self.stack.recomputes_by(recompute):
                reason = reason or f"{self.stack.name} has no recomputation {recompute}"
                continue
            try:
                check_applies(recompute, work.bare or work.model, work.pp, gathered=gathered)
            except OptionError as error:
                reason = str(error)
            else:
                again = replace(work, recompute=recompute)
                if recompute != "selective" or len(recomputes) == 1 or again.repeats_some:
                    applying.append(recompute)
        if not applying:
            raise OptionError(reason)
        return tuple(applying)

    @cached_property
    def _of_one_sample(self) -> "tuple[Stage, ...]":
        single = self.with_batch(1, 1, "none")
        return of_one_sample(single, Job.stage)


def of_one_sample(job: Job, stage_of_job: "Callable[[Job, int], Stage]") -> "tuple[Stage, ...]":
    """One of each kind of stage of a job of one sample: of those alike the first holds most.

    Their schedules are of the shortest rounds: memory depends on the groups in them alone.
    """
    short = replace(job, strategy=with_short_rounds(job.strategy))
    stages = (stage_of_job(short, number) for number in sorted(set(job.alike)))
    return tuple(replace(stage, job=job) for stage in stages)


def fullest(
    stages: "Sequence[Stage]", micro_batch: int, micro_steps: int, recompute: Recompute
) -> "Stage":
    """The fullest of `of_one_sample` with another batch."""
    size = micro_batch, micro_steps, recompute
    sized = [replace(stage, workload=_sized(stage.workload, *size)) for stage in stages]
    if len(sized) == 1:
        return sized[0]
    return max(sized, key=lambda stage: stage.memory()["total"])


def _sized(work: Workload, micro_batch: int, steps: int, recompute: Recompute) -> Workload:
    return replace(
        work,
        micro_batch=micro_batch,
        accumulation=steps,
        recompute=recompute,
        cast_steps=steps if work.narrow else 1,
    )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a job: its part of the model on its GPUs, with its schedule."""

    job: Job
    number: int
    workload: Workload
    schedule: Schedule

    @property
    def cluster(self) -> Cluster:
        """Its GPUs."""
        return self.job.stage_cluster

    @property
    def strategy(self) -> Strategy:
        """That of the job."""
        return self.job.strategy

    @property
    def precision(self) -> str:
        """Of all but narrow products."""
        return self.workload.precision

    @property
    def layout(self) -> Layout:
        """Of data parallelism: GPUs that share layers count as one rank."""
        return self.job.layout

    @property
    def layers(self) -> list[int]:
        """The layers of each of its chunks."""
        counts = self.workload.layer_counts(len(self.job.model.blocks) - 2)
        return [counts[part] for part in self.workload.parts_of(self.number)]

    @property
    def held(self) -> Held:
        """Of how many micro-batches it holds activations. Raises OptionError, see `Pipeline`."""
        work = self.workload
        if work.pp == 1:
            return Held(1.0, 0.0)
        order = Pipeline(work.pp, work.chunks, work.accumulation, work.schedule)
        return order.held(self.number, self.layers)

    def timeline(self) -> Timeline:
        """What PyTorch allocates on a GPU, by moment and item."""
        share = self.workload.share
        if share.stages_by_cost and share.pp > 1:
            whole = replace(share, model=self.job.workload.share.model)
            share = stage_of(whole, self.number, layers_by_cost(whole))
        held = call_strategy(self.strategy, self.strategy.memory, share, self.layout)
        return timeline(share, held, *self.held)

    def memory(self) -> dict[str, Bytes]:
        """Bytes on one GPU at the peak by item, and in all."""
        cluster, line = self.cluster, self.timeline()
        items = line.at(line.peak)
        if cluster.backend == "nccl":  # Gloo is for processors, which have no context
            groups, layout = self.schedule.groups, cluster.layout
            cached, eager = line.unused, self.workload.eager_loading
            items = items | overhead(items, cached, groups, layout, eager_loading=eager)
        return items | {"total": sum(items.values())}


def stage_cluster(cluster: Cluster, mesh: Mesh) -> Cluster:
    """The GPUs of one stage. Raises OptionError where stages fill no nodes, nor equal parts."""
    if mesh.pp == 1:
        return cluster
    if cluster.sites > 1:
        raise OptionError(
            f"pp={mesh.pp} needs a cluster of one site, and {cluster.name} has several"
        )
    return cluster.resized(mesh.stage_gpus(cluster.layout))


def layers_by_cost(share: Workload) -> list[int]:
    """The layers of each part, where the next one begins behind an equal part of the products.

    Source: nanotron v0.4, models/base.py, build_model; get_block_compute_costs of models/llama.py.
    """
    costs = [sum(op.flops for op in block.of(Product)) for block in share.model.blocks[1:]]
    counts = [0] * share.parts
    stage, behind = 0, list(accumulate(costs))
    for place in behind[:-1]:
        counts[stage] += 1
        stage += bool(place > behind[-1] * (stage + 1) / share.parts)
    return counts


def chunks_of(share: Workload, stage: int, counts: Sequence[int] = ()) -> list[list[Block]]:
    """The blocks of each chunk of a stage, of `counts` layers, or of equal numbers.

    Raises OptionError for a model without layers.
    """
    model, stages = share.model, share.pp
    first, layers, last = model.blocks[0], model.blocks[1:-1], model.blocks[-1]
    if not layers or not all(block.boundary for block in layers):
        raise OptionError(
            f"pp={stages} does not apply to {model.name}: its blocks have no input sizes"
        )
    counts = counts or share.layer_counts(len(layers))
    chunks: list[list[Block]] = []
    parts = share.parts_of(stage)
    for part in parts:
        start = sum(counts[:part])
        chunks.append(list(layers[start : start + counts[part]]))
    if 0 in parts:
        chunks[0] = [first, *chunks[0]]
    if share.parts - 1 in parts:
        chunks[-1] = [*chunks[-1], last if 0 in parts else last.untied()]
    return chunks


def stage_of(work: Workload, stage: int, counts: Sequence[int] = ()) -> Workload:
    """What the GPUs of a stage do together: all of it without a pipeline; see `chunks_of`."""
    if work.pp == 1:
        return work
    share = work.share
    blocks = [block for part in chunks_of(share, stage, counts) for block in part]
    return replace(share, model=replace(share.model, blocks=tuple(blocks)))


_Scheduled: TypeAlias = tuple[str, Strategy, Workload, Model, Layout]
"""What a schedule depends on: two models with equal blocks may have different parts."""
_MAX_OPS = 20_000
"""Of a schedule that is kept: about 20 MB."""
_SCHEDULES: LruCache[_Scheduled, tuple[Workload, Schedule]] = LruCache(8)


def scheduled(strategy: Strategy, work: Workload, layout: Layout) -> tuple[Workload, Schedule]:
    """The schedule of a strategy, and the workload: an equal one, if it is kept from another job.

    What changes in a sweep is mostly the cluster, which no schedule depends on but for its layout.
    A strategy of the user's own is asked each time.
    """
    if not is_built_in(strategy):
        return work, schedule_of(strategy, work, layout)
    key = title(strategy), strategy, work, work.share.model, layout
    kept = _SCHEDULES.get(key)
    if kept is None:
        kept = work, schedule_of(strategy, work, layout)
        if len(kept[1].body) <= _MAX_OPS:
            _SCHEDULES.put(key, kept)
    return kept


def schedule_of(strategy: Strategy, work: Workload, layout: Layout) -> Schedule:
    """What every rank does in a round of a workload on GPUs of a layout."""
    ranks = work.ranks(layout)
    try:
        schedule = call_strategy(strategy, strategy.schedule, work.share, ranks)
    except OptionError as error:
        if work.tp == 1:
            raise
        raise OptionError(f"{error} ({work.tp} GPUs that share layers count as one)") from error
    return apply_tensor_parallelism(schedule, work.tp)


def with_short_rounds(strategy: Strategy) -> Strategy:
    """Local updates with the shortest rounds that they can have; others as they are."""
    if not (is_built_in(strategy) and isinstance(strategy, LocalSteps)):
        return strategy
    least = {name: "1" for name in ("delay", "fragments") if getattr(strategy, name, None)}
    try:
        return with_options(strategy, {**least, "tau": "1"})
    except OptionError:  # a delay that has to end before the round does
        return with_options(strategy, {**least, "tau": "2"})


_BARE: LruCache[Schedule, Schedule] = LruCache(8, same=True)


def without_averages(schedule: Schedule) -> Schedule:
    """The same rounds, where nothing is averaged and nothing waits for an average."""
    kept = [op for op in schedule.body if op.stream != OUTER]
    if len(kept) == len(schedule.body):
        return schedule
    bare = _BARE.get(schedule)
    if bare is None:
        names = {op.name for op in kept}
        body = [replace(op, after=tuple(w for w in op.after if w.op in names)) for op in kept]
        bare = _BARE.put(schedule, Schedule(schedule.name, tuple(body), schedule.steps))
    return bare


def call_strategy(
    strategy: Strategy, method: Callable[[Workload, Layout], _T], work: Workload, layout: Layout
) -> _T:
    """What a strategy answers. An error in its own code is one line, with its place in that code.

    Raises ScheduleError for it.
    """
    try:
        return method(work, layout)
    except (Co2simError, MemoryError):
        raise
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise ScheduleError(
            f"{title(strategy)} cannot be used here: {type(error).__name__}: {error}"
            f" ({Path(line.filename).name}, line {line.lineno})"
        ) from error
