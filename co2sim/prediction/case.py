"""One configuration: cluster, model, strategy and batch, by names, files or objects."""

import os
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypedDict, TypeVar, cast

from co2sim import strategies
from co2sim.catalog import (
    DEFAULT_STACK,
    Contents,
    Entry,
    Fact,
    cluster_contents,
    load_cluster,
    load_model,
    load_stack,
    model_contents,
    stack_contents,
)
from co2sim.catalog.facts import is_file
from co2sim.common import convert, validation
from co2sim.common.convert import Count, Number, Reader, Within, option
from co2sim.common.errors import Co2simError, OptionError, ScheduleError, nearest
from co2sim.common.resources import LruCache
from co2sim.common.units import Bytes, Seconds
from co2sim.hardware.cluster import GPU, Cluster
from co2sim.models.framework import AttentionKernel, Checkpointing, Loss
from co2sim.models.memory import activations, allocated, overhead
from co2sim.models.recompute import Recompute, check_applies, recomputation
from co2sim.models.stack import UNNAMED, Setting, Stack
from co2sim.models.workload import (
    MAX_RANK,
    NARROW,
    Model,
    Narrow,
    Offload,
    Optimizer,
    Workload,
)
from co2sim.prediction.intervals import Thoroughness
from co2sim.prediction.notes import assumed, beyond_the_file, beyond_the_table
from co2sim.prediction.pipeline_order import stage_cluster, stage_of
from co2sim.prediction.result import Result
from co2sim.schedule.exchanges import apply_tensor_parallelism
from co2sim.schedule.mesh import Mesh
from co2sim.schedule.schedule import DType, Layout, Schedule
from co2sim.simulation import metrics
from co2sim.simulation.collective_cost import Traffic, traffic
from co2sim.simulation.compute_cost import compute_time, kernel_parts, peak_flops
from co2sim.simulation.noise import QUIET, Noise, RunOptions
from co2sim.simulation.trace import Trace
from co2sim.strategies import STRATEGIES, LocalSteps, Strategy
from co2sim.strategies.local import workers_of
from co2sim.strategies.step import title

_T = TypeVar("_T")

_Scheduled: TypeAlias = tuple[str, Strategy, Workload, Model, Layout]
"""What a schedule depends on: two models with equal blocks may have different parts."""
_MAX_OPS = 10_000
"""Of a schedule that is kept: about 10 MB."""
_SCHEDULES: LruCache[_Scheduled, tuple[Workload, Schedule]] = LruCache(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCase:
    """A case with everything loaded and sized.

    Of a stage of a pipeline these are its GPUs and its part of the model; it holds the activations
    of `microbatches_in_flight`. `stack` is the name of that whose kernels run; empty where the file
    of the GPU says itself how fast it is. `measured` are the runs that it was calibrated by, and
    `call_overhead` is what its host needs for an operation.
    """

    cluster: Cluster
    job: Workload
    strategy: Strategy
    schedule: Schedule
    assumed: tuple[Fact, ...]
    microbatches_in_flight: float = 1.0
    stack: str = ""
    measured: tuple[Setting, ...] = ()
    call_overhead: Seconds = 0.0

    @property
    def precision(self) -> str:
        """Of the job."""
        return self.job.precision

    @property
    def kernels(self) -> str:
        """What its kernels do, besides the model: precision, attention, recomputation, adapters."""
        kind = self.job.narrow or self.job.precision
        more = ", adapters" if self.job.lora else ""
        return f"{kind}, {self.job.attention}, {self.job.recompute}{more}"

    @property
    def layout(self) -> Layout:
        """Of data parallelism: tensor-parallel GPUs count as one rank."""
        return self.job.ranks(self.cluster.layout)

    def memory(self) -> dict[str, Bytes]:
        """Bytes on one GPU by item, and in all."""
        items = of_strategy(self.strategy, self.strategy.memory, self.job.share, self.layout)
        items = items | activations(self.job.share, self.microbatches_in_flight)
        if self.cluster.backend == "nccl":  # Gloo is for processors, which have no context
            items = items | overhead(items, self.schedule.groups, self.cluster.layout)
        return items | {"total": sum(items.values())}

    def measure(
        self,
        trace: Trace,
        rounds: int,
        steady: bool,  # noqa: FBT001
        free: Trace | None = None,
    ) -> Result:
        """The figures of a trace.

        `free` is the same simulation with free communication. Without it, as in a run that was
        measured, exposed communication is read from the trace itself: two runs differ in more.
        """
        cluster, job, schedule = self.cluster, self.job, self.schedule
        during = metrics.window(trace, schedule, rounds)
        round_time = during.round_time
        comm = metrics.communication(trace, schedule, during)
        if free is None:
            exposed = metrics.exposed(trace, schedule, during)
        else:
            alone = metrics.window(free, schedule, rounds).round_time
            exposed = metrics.exposed_by_difference(comm.busy, round_time, alone)
        step_time = round_time / schedule.steps
        memory = self.memory()
        return Result(
            **self.rates(step_time),
            cluster=cluster.name,
            model=job.model.name,
            stack=self.stack,
            unit=job.model.unit,
            strategy=title(self.strategy),
            gpus=cluster.layout.world_size,
            nodes=cluster.nodes,
            **_described(job),
            parameters=job.parameters,
            workers=workers_of(self.strategy, self.layout),
            global_batch=cluster.layout.world_size // job.in_stage * job.samples_per_gpu,
            tokens_per_gpu_per_step=each(job.samples_per_gpu * job.model.tokens, job.in_stage),
            precision=job.narrow or str(job.precision),
            steps_per_round=schedule.steps,
            round_time_s=round_time,
            step_time_s=step_time,
            host_load=host_load(job.share, cluster.gpu, self.call_overhead),
            comm_busy_s=comm.busy,
            waiting_s=comm.waiting,
            exposed_comm_s=exposed,
            overlap_ratio=metrics.overlap_ratio(comm.busy, exposed),
            breakdown_s=metrics.breakdown(trace, schedule),
            **_sent(traffic(schedule, cluster), schedule.steps),
            memory_bytes_per_gpu=memory,
            allocated_bytes_per_gpu=allocated(memory),
            gpu_memory_bytes=cluster.gpu.memory,
            fits_in_memory=memory["total"] <= cluster.gpu.memory,
            steady=steady,
            rounds_simulated=trace.rounds,
            assumed=self.assumed,
        )

    def rates(self, step_time: Seconds) -> dict[str, Any]:
        """The fields of a result that follow from how long a step takes."""
        cluster, job = self.cluster, self.job
        gpus = cluster.layout.world_size
        samples = gpus // job.in_stage * job.samples_per_gpu / step_time
        tokens = samples * job.model.tokens
        model_flops = samples * job.model.flops_per_sample / gpus
        cost = cluster.price_per_gpu and cluster.price_per_gpu * gpus / tokens * 1e9
        return {
            "samples_per_s": samples,
            "tokens_per_s": tokens,
            "tokens_per_s_per_gpu": tokens / gpus,
            "model_tflops_per_gpu": model_flops / 1e12,
            "hardware_tflops_per_gpu": samples * job.hardware_flops_per_sample / gpus / 1e12,
            "mfu": model_flops / peak_flops(cluster.gpu, job.peak),
            "usd_per_billion_tokens": cost if cluster.currency == "USD" else None,
            "cost_per_billion_tokens": cost,
            "currency": cluster.currency if cost is not None else None,
        }


def _sent(sent: Traffic, steps: int) -> dict[str, Any]:
    """The fields of a result that say what is sent in a step."""
    return {
        "sent_bytes_per_gpu_per_step": {
            label: size / steps for label, size in sent.by_collective.items()
        },
        "wire_bytes_per_gpu_per_step": sent.gpu / steps,
        "nic_bytes_per_node_per_step": sent.nic / steps,
        "wan_bytes_per_site_per_step": sent.wan / steps,
    }


def _described(job: Workload) -> dict[str, Any]:
    """What a result repeats of its job."""
    names = (
        *("micro_batch", "accumulation", "lora"),
        *("recompute", "optimizer", "offload", "attention"),
        *("tp", "sequence_parallel", "ep", "cp"),
    )
    trained = {"trained_parameters": job.trained} if job.lora else {}
    return {name: getattr(job, name) for name in names} | trained


def host_load(job: Workload, gpu: GPU, call_overhead: Seconds) -> float | None:
    """What the host needs for all passes over what the GPU needs; None where they have no kernels.

    `call_overhead` is that of the stack, for a GPU of whose kernels nothing is known.
    """
    overhead = gpu.kernels.call_overhead if gpu.kernels else call_overhead
    host = device = 0.0
    for work in job.works():
        for one in (work.forward, work.backward):
            if one.kernels is None:
                continue
            host += one.kernels.calls * overhead
            if gpu.kernels is None:
                device += compute_time(one, gpu, str(job.precision))
            else:
                parts = kernel_parts(one.kernels, gpu, gpu.kernels, str(job.precision))
                device += parts.products + parts.attention + parts.elementwise
    return host / device if device else None


def scheduled(strategy: Strategy, job: Workload, layout: Layout) -> tuple[Workload, Schedule]:
    """The schedule of a strategy, and the job: an equal one, if it is kept from another case.

    What changes in a sweep is mostly the cluster, which no schedule depends on but for its layout.
    A strategy of the user's own is asked each time.
    """
    if type(strategy) not in STRATEGIES.values():
        return job, schedule_of(strategy, job, layout)
    given = title(strategy), strategy, job, job.share.model, layout
    known = _SCHEDULES.get(given)
    if known is None:
        known = job, schedule_of(strategy, job, layout)
        if len(known[1].body) <= _MAX_OPS:
            _SCHEDULES.put(given, known)
    return known


def each(tokens: int, gpus: int) -> float:
    """What each of some GPUs has of tokens: a whole number wherever it is one."""
    return tokens // gpus if tokens % gpus == 0 else tokens / gpus


def schedule_of(strategy: Strategy, job: Workload, layout: Layout) -> Schedule:
    """What every rank does in a round of a job on GPUs of a layout."""
    among = job.ranks(layout)
    try:
        found = of_strategy(strategy, strategy.schedule, job.share, among)
    except OptionError as error:
        if job.tp == 1:
            raise
        raise OptionError(f"{error} ({job.tp} GPUs that share layers count as one)") from error
    return apply_tensor_parallelism(found, job.tp)


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


_MAX_GPUS = 10_000_000
_MAX_SAMPLES = 10**12
"""Of a global batch: beyond any training, and still exact as a float."""
AUTO = "auto"
"""To be chosen: `prediction.batch` does."""
OPEN_BATCH = {"micro_batch": AUTO, "global_batch": AUTO, "recompute": AUTO}
"""What a question leaves open unless it says it; who executes a case needs numbers."""
_TOKENS = re.compile(r"([0-9.]+(?:e[+]?[0-9]+)?) *([km]?)[ -]*tok(?:en)?s?", re.IGNORECASE)


def _number(name: str, value: int | str) -> int:
    """What a schedule is made of. Raises OptionError for words."""
    if isinstance(value, int):
        return value
    raise _open(name, value)


def _open(name: str, word: str) -> OptionError:
    return OptionError(f"{name}={word} is chosen by simulation (`co2sim run` names it); give it")


def read_micro_batch(name: str, value: Any) -> int | str:
    """A number of samples, or "auto"."""
    return AUTO if value == AUTO else convert.whole(name, value)


def read_global_batch(name: str, value: Any) -> int | str:
    """A number of samples, "auto", or tokens as a text, such as "4e+06-tokens"."""
    if value == AUTO:
        return AUTO
    tokens = tokens_of_batch(value)
    if tokens is not None:
        return f"{tokens:g}-tokens"
    try:
        return validation.whole(name, convert.whole(name, value), 1, _MAX_SAMPLES)
    except OptionError as error:
        more = "" if isinstance(value, int | float) else ", a number of tokens (4M-tokens), or auto"
        raise OptionError(f"{error}{more}") from None


def tokens_of_batch(value: Any) -> float | None:
    """Those that a text such as "4M-tokens" says; None for others."""
    found = _TOKENS.fullmatch(value.strip()) if isinstance(value, str) else None
    if not found:
        return None
    try:
        number = float(found[1])
    except ValueError:
        return None
    tokens = number * {"": 1.0, "k": 1e3, "m": 1e6}[found[2].lower()]
    return tokens if 1 <= tokens <= _MAX_SAMPLES else None


_MAX_ROUNDS = 1_000_000
"""Far beyond what an average needs; what a machine can hold is checked before a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Mesh):
    """One configuration. Clusters and models are catalog names, paths of files, or objects.

    `Contents` stand for a name, or a file that was read before.

    `strategy` is a text such as "co2(tau=48, worker=node)". `gpus` defaults to the whole cluster,
    `precision` to bf16, or fp16 where the GPU has no bf16. A case is of one sample per GPU and step
    unless it says more; questions (`simulate`, the commands) leave the batch open instead, see
    `OPEN_BATCH`. `global_batch` (samples per step over all GPUs) sets `accumulation`. `overrides`
    maps dotted paths of the cluster, or of the model behind "model.", to texts with units. `rounds`
    is
    how many rounds are averaged (default 1, or 10 with jitter). `interval` says whether further
    simulations may be spent on the interval. `tp` GPUs of a node share every layer, and train on
    the same samples; with `sequence_parallel` they divide the sequence between matrix products,
    too. `pp` stages of a pipeline have a part of the layers each, in `interleave` chunks.

    Values are converted where they are unambiguous: counts may be 16.0, "16" or NumPy's, names may
    be paths, overrides plain numbers. Raises OptionError for others, and for counts out of range.
    """

    cluster: str | Cluster | Contents
    model: str | Model | Contents
    strategy: str | Strategy
    gpus: Annotated[int | None, Within((1, _MAX_GPUS))] = option(
        None, "Number of GPUs; default: the whole cluster.", "place", "--gpus", "-g"
    )
    micro_batch: Annotated[int | str, Reader(read_micro_batch)] = option(
        1, "Samples per GPU and micro-step; or auto: as many as fit and are fastest.", "job"
    )
    accumulation: int | None = option(
        None, "Micro-steps per optimizer step; default: what the global batch gives, else 1.", "job"
    )
    global_batch: Annotated[int | str | None, Reader(read_global_batch)] = option(
        None,
        "Samples per optimizer step over all GPUs, or tokens (4M-tokens), or auto: what a given"
        " accumulation makes of it, else that of published trainings of models of that size.",
        "job",
    )
    precision: str | None = option(
        None,
        "bf16, fp16 or fp32; or fp8, mxfp8 or nvfp4, for products of layers alone; default: bf16 if"
        " the GPU has it, else fp16.",
        "job",
    )
    attention: AttentionKernel | None = option(
        None,
        "flash (one kernel, the scores are never kept) or eager (products and softmax, the"
        " scores are kept); default: what the stack does.",
        "job",
    )
    recompute: Recompute = option(
        "none",
        "Activations to recompute: none, selective (what the stack repeats: the scores of eager"
        " attention, or every second product), full (only the inputs of layers are kept), full/2"
        " (of every second layer), or operators of all layers, joined by +: norms, attention,"
        " activation, mlp; or auto: of none, selective, full, full/2 and norms+activation what fits"
        " and is fastest.",
        "job",
    )
    checkpointing: Checkpointing | None = option(
        None,
        "How full recomputation runs a layer again: non_reentrant (up to its last product, as"
        " PyTorch does) or reentrant (all of it, as Megatron-LM and DeepSpeed do); default: what"
        " the stack does.",
        "job",
    )
    loss: Loss | None = option(
        None,
        "Cross entropy: fused (one kernel on 16-bit logits) or eager (PyTorch's, in fp32);"
        " default: what the stack does.",
        "job",
    )
    optimizer: Optimizer = option("adamw", "adamw, adamw_8bit (moments in 8 bits) or sgd.", "job")
    offload: Offload = option(
        "none",
        "What the host has instead of the GPU: none, or optimizer (its states, which the host's"
        " processors update; gradients go there and parameters come back).",
        "job",
    )
    lora: Annotated[int | None, Within((1, MAX_RANK))] = option(
        None,
        "Rank of adapters beside all matrices of attention and MLP, of experts, too; only these are"
        " trained (LoRA). Default: all is trained.",
        "job",
    )
    stack: str | Stack | Contents = option(
        "",
        "Software stack: the training framework of a year (`co2sim list stacks`), or a TOML file;"
        " `co2sim plan` tries several, as torchtitan,megatron-core;"
        f" default: the one that the cluster's file names, else {DEFAULT_STACK}.",
        "job",
    )
    overrides: Mapping[str, str] = option(
        {},
        'Override any number of the cluster or, behind "model." and "stack.", of the model and the'
        ' stack: --set inter.bandwidth="25 Gbit/s" --set model.seq_len=4096. Repeatable.',
        "job",
        "--set",
    )
    noise: Noise = QUIET
    rounds: Annotated[int | None, Within((1, _MAX_ROUNDS))] = option(
        None, "Rounds to average over; default: 1, or 10 with jitter.", "simulation"
    )
    fold: bool = option(
        True,  # noqa: FBT003
        "Let one rank stand for all equal ones, or simulate each.",
        "simulation",
    )
    interval: Thoroughness = option(
        "quick",
        "How the 90 % interval is found: quick (no further simulation) or full (with every"
        " uncertain constant moved, where there are any).",
        "simulation",
    )

    def __post_init__(self) -> None:
        """Convert every value, once and for all."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        found = convert.declared(Case, given) | {
            "cluster": _named("cluster", self.cluster, Cluster),
            "model": _named("model", self.model, Model),
            "stack": _named("stack", self.stack, Stack),
            "strategy": _strategy(self.strategy),
            "overrides": convert.texts("overrides", self.overrides),
        }
        if found["recompute"] != AUTO:
            found["recompute"] = str(recomputation(found["recompute"]))
        if not isinstance(self.noise, Noise):
            raise OptionError(f"noise is {convert.shown(self.noise)}; it must be a Noise")
        for name, value in found.items():
            if value is not given[name]:
                object.__setattr__(self, name, value)

    @property
    def title(self) -> str:
        """The case in a message: its strategy, size and cluster, and what is overridden."""
        strategy = self.strategy if isinstance(self.strategy, str) else title(self.strategy)
        cluster = self.cluster if isinstance(self.cluster, str) else self.cluster.name
        changed = "".join(f", {path}={text}" for path, text in self.overrides.items())
        return f"{strategy} on {self.gpus or 'all'} GPUs of {cluster}{changed}"

    @property
    def asked(self) -> frozenset[str]:
        """The stack and the options that it has values for, as far as a user gave them."""
        names = ("attention", "checkpointing", "loss")
        given = {name for name in names if getattr(self, name) is not None}
        return frozenset(given | ({"stack"} if self.stack else set()))

    @property
    def run_options(self) -> RunOptions:
        """What the simulation of its schedule needs to know."""
        return RunOptions(self.noise, self.rounds, self.fold)

    def load(self) -> tuple[Entry[Cluster], Entry[Model]]:
        """The cluster, with what the stack makes of its GPU, and the model."""
        cluster = self._bare_cluster()
        within = self.load_stack().value.within(cluster.value, self.cluster_overrides)
        if within != cluster.value:
            cluster = replace(cluster, value=within)
        return cluster, _entry(self.model, load_model, self._overrides_of("model."))

    def inlined(self, known: dict[tuple[object, ...], Contents | None] | None = None) -> "Case":
        """The case with what stands in its files in place of their names.

        `known` are files that were read before, and gets those that are read now. Raises
        CatalogError for what cannot be read.
        """
        known = {} if known is None else known

        def contents(read: Callable[..., Contents | None], name: Any, *more: Any) -> Any:
            if not isinstance(name, str) or not name:
                return name
            key = (read.__name__, name, *(str(one) for one in more))
            if key not in known:
                known[key] = read(name, *more)
            return known[key] or name

        named = {k: v for k, v in self.overrides.items() if k in {"gpu", "failures"}}
        found = {
            "cluster": contents(cluster_contents, self.cluster, named),
            "model": contents(model_contents, self.model),
            "stack": contents(stack_contents, self.stack),
        }
        changed = {name: one for name, one in found.items() if one is not getattr(self, name)}
        return replace(self, **changed) if changed else self

    def load_stack(self) -> Entry[Stack]:
        """The software stack, from its name, file or object, or as the cluster has it."""
        return _entry(self.chosen_stack, load_stack, self._overrides_of("stack."))

    @property
    def chosen_stack(self) -> str | Stack | Contents:
        """The stack that was asked for, else that of the cluster, else the default."""
        return self.stack or self._bare_cluster().value.stack or DEFAULT_STACK

    def _bare_cluster(self) -> Entry[Cluster]:
        return _entry(self.cluster, load_cluster, self.cluster_overrides)

    def _used_stack(self, gpu: GPU) -> Stack:
        """The stack, if the kernels of the loaded GPU are its; else what is taken of any."""
        stack = self.load_stack().value
        return stack if gpu.stack == stack.name else UNNAMED

    @property
    def cluster_overrides(self) -> dict[str, str]:
        """The overrides of numbers of the cluster."""
        others = "model.", "stack."
        return {k: v for k, v in self.overrides.items() if not k.startswith(others)}

    def _overrides_of(self, prefix: str) -> dict[str, str]:
        return {
            k.removeprefix(prefix): v for k, v in self.overrides.items() if k.startswith(prefix)
        }

    def prepare(self) -> LoadedCase:
        """Load everything and build the schedule. Raises Co2simError when anything is wrong."""
        self.check_single_stage()
        return self._prepared()

    def check_single_stage(self) -> None:
        """Refuse the stages of a pipeline, which have no schedule together."""
        if self.pp > 1:
            raise OptionError(
                f"pp={self.pp}: stages of a pipeline are simulated one by one, and it has no"
                " schedule to show or to execute; co2sim run, scale, sweep, solve and plan give"
                " its figures"
            )

    def stage(
        self, number: int, microbatches_in_flight: float = 1.0, micro_steps: int | None = None
    ) -> LoadedCase:
        """A stage of a pipeline, as if it were alone. Raises as `prepare` does.

        Its schedule is that of `micro_steps` micro-steps; default: all of a step.
        """
        return self._prepared(number, microbatches_in_flight, micro_steps)

    def stage_jobs(self) -> list[Workload]:
        """What each stage of a pipeline has to do, without its schedule."""
        job = self.job()
        return [stage_of(job, number) for number in range(self.pp)]

    def job(self) -> Workload:
        """What all stages have to do together."""
        cluster, model = self.load()
        return self._workload(model.value, self._sized(cluster.value))

    def _sized(self, cluster: Cluster) -> Cluster:
        """The GPUs of the case, or of one of its stages."""
        sized = cluster.resized(self.gpus) if self.gpus is not None else cluster
        if self.pp == 1:
            return sized
        return stage_cluster(sized, self)

    def _prepared(
        self,
        number: int = 0,
        microbatches_in_flight: float = 1.0,
        micro_steps: int | None = None,
    ) -> LoadedCase:
        cluster, model = self.load()
        sized = self._sized(cluster.value)
        job = self._workload(model.value, sized)
        if self.pp > 1:
            job = stage_of(job, number)
        strategy = self.strategy
        if isinstance(strategy, str):
            strategy = strategies.parse(strategy)
        _check_sites(strategy, cluster.value)
        if self.ep > 1 and not getattr(strategy, "divides_experts", False):
            raise OptionError(
                f"ep={self.ep} combines with ddp, zero1, zero2 and fsdp; not with {strategy.name}"
            )
        if self.offload != "none" and not getattr(strategy, "offloads", False):
            raise OptionError(
                f"offload={self.offload} combines with ddp, zero1, zero2, zero3 and fsdp; not with"
                f" {strategy.name}"
            )
        few = replace(job, accumulation=micro_steps or job.accumulation)
        known, schedule = scheduled(strategy, few, sized.layout)
        job = replace(known, accumulation=job.accumulation) if micro_steps else known
        return LoadedCase(
            cluster=sized,
            job=job,
            strategy=strategy,
            schedule=schedule,
            assumed=(
                *assumed(cluster, model, offload=self.offload != "none"),
                *beyond_the_file(cluster.value, sized),
                *beyond_the_table(sized.gpu, job.share),
            ),
            microbatches_in_flight=microbatches_in_flight,
            stack=self._used_stack(sized.gpu).name,
            measured=self.load_stack().value.measured,
            call_overhead=self.load_stack().value.call_overhead,
        )

    def _workload(self, model: Model, cluster: Cluster) -> Workload:
        if self.recompute == AUTO:
            raise _open("recompute", self.recompute)
        precision, narrow = self._types(cluster.gpu)
        stack = self._used_stack(cluster.gpu)
        gathered = stack.keep_gathered and self.sequence_parallel
        check_applies(self.recompute, model, self.pp, gathered=gathered)
        ranks = self.ranks(cluster.layout).world_size
        if ranks % self.cp:
            raise OptionError(f"cp={self.cp} does not divide {ranks} data-parallel GPUs")
        groups = ranks // self.cp
        accumulation = self._accumulation(groups)
        return Workload(
            model=model,
            micro_batch=_number("micro_batch", self.micro_batch),
            accumulation=accumulation,
            cast_steps=accumulation if narrow else 1,
            precision=precision,
            narrow=narrow,
            recompute=self.recompute,
            optimizer=self.optimizer,
            offload=self.offload,
            lora=self.lora,
            **self.mesh_values(),
            **stack.habits(
                attention=self.attention,
                checkpointing=self.checkpointing,
                loss=self.loss,
                experts_all_to_all=self.load_stack().value.experts_all_to_all,  # whatever the GPU
            ),
        )

    def _types(self, gpu: GPU) -> tuple[DType, Narrow | None]:
        """Of all but products of layers, and of these, if it is narrower."""
        asked = (self.precision or gpu.preferred_precision).lower()
        if asked not in NARROW:
            if asked not in gpu.precisions:
                known = [*gpu.precisions, *(n for n, k in NARROW.items() if k.peak in gpu.peak)]
                raise OptionError(
                    f"{gpu.name} has no {asked} in our catalog; {nearest(asked, known)}"
                )
            return DType(asked), None
        kind = NARROW[asked]
        peak_flops(gpu, kind.peak)
        if kind.also and not any(one in gpu.peak for one in kind.also):
            raise OptionError(f"{gpu.name} multiplies no {asked}; it has {kind.peak}")
        if gpu.kernels is None:
            raise OptionError(
                f"precision={asked} needs the speed of products, and nothing says how fast those of"
                f" {gpu.name} are"
            )
        return DType(gpu.preferred_precision), cast(Narrow, asked)

    def _accumulation(self, groups: int) -> int:
        micro_batch = _number("micro_batch", self.micro_batch)
        if self.global_batch is None:
            return 1 if self.accumulation is None else self.accumulation
        global_batch = _number("global_batch", self.global_batch)
        if self.accumulation not in {None, 1}:
            raise OptionError(
                "give accumulation or global_batch, not both: one follows from the other"
            )
        per_micro_step = groups * micro_batch
        together = self.in_stage
        who = "GPUs" if together == 1 else f"groups of {together} GPUs"
        if per_micro_step < 1 or global_batch % per_micro_step:
            raise OptionError(
                f"global_batch={global_batch} is not a multiple of {groups} {who} x"
                f" micro_batch={micro_batch} = {per_micro_step}"
            )
        return global_batch // per_micro_step


def _check_sites(strategy: Strategy, cluster: Cluster) -> None:
    """Refuse sites as workers where there are none; a part of a cluster may lie at one of several.

    Raises OptionError.
    """
    if isinstance(strategy, LocalSteps) and strategy.worker == "site" and cluster.sites == 1:
        raise OptionError(
            f"{strategy.name}: worker=site needs a cluster of 2 sites or more, and {cluster.name}"
            " has 1; use worker=node, or give sites and [wan] in its file, as two-sites-wan has"
        )


def _entry(
    given: Any, load: Callable[[Any, Mapping[str, str]], Entry[Any]], overrides: Mapping[str, str]
) -> Entry[Any]:
    if isinstance(given, str | Contents):
        return load(given, overrides)
    if overrides:
        raise OptionError(
            f"overrides ({next(iter(overrides))}) apply to names and files, not to objects"
        )
    return Entry(given, ())


def _named(name: str, given: Any, kind: type[Any]) -> Any:
    """A name, a path as a text, or an object of `kind`."""
    if isinstance(given, os.PathLike):
        return str(given) if is_file(str(given)) else f"./{given}"
    if not isinstance(given, str | kind | Contents):
        raise OptionError(
            f"{name} is {convert.shown(given)}; it must be a catalog name, the path of a file, or"
            f" a {kind.__name__}"
        )
    return given


def _strategy(given: Any) -> Any:
    if isinstance(given, str):
        return given
    if not isinstance(given, type) and hasattr(given, "schedule"):
        return strategies.checked(given)
    raise OptionError(
        f"strategy is {convert.shown(given)}; it must be a text such as 'co2(tau=48)', or a"
        " strategy such as CO2(tau=48)"
    )


class JobOptions(TypedDict, total=False):
    """For type checkers: the fields of `Case` and `Noise` but for the number of GPUs."""

    micro_batch: Count
    accumulation: Count | None
    tp: Count
    sequence_parallel: bool
    ep: Count
    cp: Count
    pp: Count
    interleave: Count
    global_batch: Count | None
    precision: str | None
    attention: AttentionKernel | None
    recompute: Recompute
    checkpointing: Checkpointing | None
    loss: Loss | None
    optimizer: Optimizer
    offload: Offload
    lora: Count | None
    stack: str | Stack | Contents
    overrides: Mapping[str, Number] | None
    noise: Noise
    jitter: Number
    straggle: Number
    seed: Count
    node_speed: Mapping[int, float] | None
    rounds: Count | None
    fold: bool
    interval: Thoroughness


class Options(JobOptions, total=False):
    """The keywords of `simulate`."""

    gpus: Count | None
