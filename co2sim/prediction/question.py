"""A question: cluster, model, strategy and batch of one configuration, as a person types them."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, cast

from co2sim import strategies
from co2sim.catalog import (
    DEFAULT_STACK,
    Contents,
    Entry,
    Fact,
    cluster_contents,
    load_cluster,
    load_model,
    load_optimizer,
    load_stack,
    model_contents,
    optimizer_contents,
    stack_contents,
)
from co2sim.catalog.facts import is_file
from co2sim.common import convert, validation
from co2sim.common.convert import Count, Number, Reader, Within, option
from co2sim.common.errors import OptionError, nearest
from co2sim.hardware.cluster import GPU, Cluster
from co2sim.hardware.offloading import ASSUMED, LINK, unknown
from co2sim.models.operators import NARROW, Model
from co2sim.prediction.job import Job, Stage, stage_cluster
from co2sim.schedule.mesh import Mesh
from co2sim.schedule.pipeline import PipelineSchedule
from co2sim.schedule.schedule import DType
from co2sim.simulation.costs import peak_flops
from co2sim.simulation.noise import QUIET, Noise, RunOptions
from co2sim.strategies import LocalSteps, Strategy
from co2sim.strategies.step import title
from co2sim.training.framework import (
    AttentionKernel,
    Checkpointing,
    Loss,
    Recompute,
    check_applies,
    recomputation,
)
from co2sim.training.optimizer import Optimizer
from co2sim.training.stack import UNNAMED, Runs, Stack, needs_of
from co2sim.training.workload import MAX_RANK, Narrow, Offload, QuantizeBase, Workload

Thoroughness: TypeAlias = Literal["quick", "full"]
"""quick: no further simulation; full: some further ones, with moved constants."""

_OF_TOTALS = {"gpu.tdp", "gpu.idle_power", "node_power", "pue", "grid_intensity"}
"""Numbers of a cluster that no speed rests on: `totals` names those that it used."""
_MAX_GPUS = 10_000_000
_MAX_SAMPLES = 10**12
"""Of a global batch: beyond any training, and still exact as a float."""
AUTO = "auto"
"""To be chosen: `prediction.choose` does."""
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
    match = _TOKENS.fullmatch(value.strip()) if isinstance(value, str) else None
    if not match:
        return None
    try:
        amount = float(match[1])
    except ValueError:
        return None
    tokens = amount * {"": 1.0, "k": 1e3, "m": 1e6}[match[2].lower()]
    return tokens if 1 <= tokens <= _MAX_SAMPLES else None


_MAX_ROUNDS = 1_000_000
"""Far beyond what an average needs; what a machine can hold is checked before a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Mesh):
    """One configuration. Clusters and models are catalog names, paths of files, or objects.

    `Contents` stand for a name, or a file that was read before.

    `strategy` is a text such as "co2(tau=48, worker=node)". `gpus` defaults to the whole cluster,
    `precision` to bf16, or fp16 where the GPU has no bf16. A case is of one sample per GPU and step
    unless it says more; questions (`simulate`, the commands) leave the batch open instead, see
    `OPEN_BATCH`. `global_batch` (samples per step over all GPUs) sets `accumulation`. `overrides`
    maps dotted paths of the cluster, or of the model behind "model.", to texts with units. `rounds`
    is how many rounds are averaged (default 1, or 10 with jitter). `interval` says whether further
    simulations may be spent on the interval. `tp` GPUs of a node share every layer, and train on
    the same samples; with `sequence_parallel` they divide the sequence between matrix products,
    too. `pp` stages of a pipeline have a part of the layers each, in `interleave` chunks, and
    `schedule` is the order of their passes.

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
    optimizer: str | Optimizer | Contents = option(
        "adamw",
        "adamw, adamw_8bit (moments in 8 bits), adamw_bf16 (all in bf16), sgd, lion, adafactor,"
        " muon, soap, schedule_free (`co2sim list optimizers`), or a TOML file.",
        "job",
    )
    offload: Offload = option(
        "none",
        "What the host has instead of the GPU: none; optimizer (its states, which the host's"
        " processors update; gradients go there and parameters come back); parameters (these and"
        " gradients, too: zero3 and fsdp load a block's share before each gather); or activations"
        " (what layers keep, but for the last two).",
        "job",
    )
    lora: Annotated[int | None, Within((1, MAX_RANK))] = option(
        None,
        "Rank of adapters beside all matrices of attention and MLP, of experts, too; only these are"
        " trained (LoRA). Default: all is trained.",
        "job",
    )
    quantize_base: QuantizeBase = option(
        "none",
        "How frozen weights beside adapters are stored: none (in the precision), or nf4 (4 bits,"
        " made whole before each product: QLoRA).",
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
        'Override any number of the cluster or, behind "model.", "stack." and "optimizer.", of'
        ' these: --set inter.bandwidth="25 Gbit/s" --set model.seq_len=4096. Repeatable.',
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
        "How the 90 % interval is found: quick (no further simulation) or full (on a probed"
        " cluster, with its speeds moved).",
        "simulation",
    )

    def __post_init__(self) -> None:
        """Convert every value, once and for all."""
        stated = {f.name: getattr(self, f.name) for f in fields(self)}
        converted = convert.declared(Question, stated) | {
            "cluster": _named("cluster", self.cluster, Cluster),
            "model": _named("model", self.model, Model),
            "stack": _named("stack", self.stack, Stack),
            "optimizer": _named("optimizer", self.optimizer, Optimizer),
            "strategy": _strategy(self.strategy),
            "overrides": convert.texts("overrides", self.overrides),
        }
        if converted["recompute"] != AUTO:
            converted["recompute"] = str(recomputation(converted["recompute"]))
        if not isinstance(self.noise, Noise):
            raise OptionError(f"noise is {convert.shown(self.noise)}; it must be a Noise")
        for name, value in converted.items():
            if value is not stated[name]:
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
        options = {name for name in names if getattr(self, name) is not None}
        return frozenset(options | ({"stack"} if self.stack else set()))

    def load(self) -> tuple[Entry[Cluster], Entry[Model]]:
        """The cluster, with what the stack makes of its GPU, and the model."""
        cluster = self._bare_cluster()
        within = self.load_stack().value.within(cluster.value, self.cluster_overrides)
        if within != cluster.value:
            cluster = replace(cluster, value=within)
        return cluster, _entry(self.model, load_model, self._overrides_of("model."))

    def inlined(self, cache: dict[tuple[object, ...], Contents | None] | None = None) -> "Question":
        """The case with what stands in its files in place of their names.

        `cache` holds files that were read before, and gets those that are read now. Raises
        CatalogError for what cannot be read.
        """
        cache = {} if cache is None else cache

        def contents(read: Callable[..., Contents | None], name: Any, *more: Any) -> Any:
            if not isinstance(name, str) or not name:
                return name
            key = (read.__name__, name, *(str(value) for value in more))
            if key not in cache:
                cache[key] = read(name, *more)
            return cache[key] or name

        named = {k: v for k, v in self.overrides.items() if k in {"gpu", "failures"}}
        inlined = {
            "cluster": contents(cluster_contents, self.cluster, named),
            "model": contents(model_contents, self.model),
            "stack": contents(stack_contents, self.stack),
            "optimizer": contents(optimizer_contents, self.optimizer),
        }
        changed = {k: value for k, value in inlined.items() if value is not getattr(self, k)}
        return replace(self, **changed) if changed else self

    def load_stack(self) -> Entry[Stack]:
        """The software stack, from its name, file or object, or as the cluster has it."""
        entry = _entry(self.chosen_stack, load_stack, self._overrides_of("stack."))
        _check_runs(entry.value.name, entry.value.runs, entry.value.recomputes)
        return entry

    def load_optimizer(self) -> Entry[Optimizer]:
        """The optimizer, from its name, file or object."""
        return _entry(self.optimizer, load_optimizer, self._overrides_of("optimizer."))

    @property
    def chosen_stack(self) -> str | Stack | Contents:
        """The stack that was asked for, else that of the cluster, else the default."""
        return self.stack or self._bare_cluster().value.stack or DEFAULT_STACK

    def _bare_cluster(self) -> Entry[Cluster]:
        return _entry(self.cluster, load_cluster, self.cluster_overrides)

    def used_stack(self, gpu: GPU) -> Stack:
        """The stack, if the kernels of the loaded GPU are its; else what is taken of any."""
        stack = self.load_stack().value
        return stack if gpu.stack == stack.name else UNNAMED

    @property
    def cluster_overrides(self) -> dict[str, str]:
        """The overrides of numbers of the cluster."""
        others = "model.", "stack.", "optimizer."
        return {k: v for k, v in self.overrides.items() if not k.startswith(others)}

    def _overrides_of(self, prefix: str) -> dict[str, str]:
        return {
            k.removeprefix(prefix): v for k, v in self.overrides.items() if k.startswith(prefix)
        }

    def job(self) -> Job:
        """What is simulated. Raises Co2simError when anything is wrong."""
        cluster, model = self.load()
        stated = cluster.value
        sized = stated.resized(self.gpus) if self.gpus is not None else stated
        strategy = self.parsed
        _check_sites(strategy, stated)
        self.check()
        if self.experts_apart and not strategies.says(strategy, "divides_experts"):
            raise OptionError(
                f"{self.expert_words} does not combine with {strategy.name}, which does not say"
                " that it divides experts (divides_experts)"
            )
        able_here = {"none", *(strategies.says(strategy, "offloads") or ())}
        if strategies.is_built_in(strategy):
            able_here.add("activations")
        elif self.offload == "activations":
            raise OptionError(
                "offload=activations combines with the strategies of the catalog; not with"
                f" {strategy.name}"
            )
        if self.offload not in able_here:
            kinds = strategies.STRATEGIES.items()
            *able, last = [n for n, kind in kinds if self.offload in getattr(kind, "offloads", ())]
            raise OptionError(
                f"offload={self.offload} combines with {', '.join(able)} and {last}; not with"
                f" {strategy.name}"
            )
        stack = self.load_stack().value
        return Job(
            cluster=sized,
            workload=self._workload(model.value, stage_cluster(sized, self)),
            strategy=strategy,
            options=RunOptions(self.noise, self.rounds, self.fold),
            stack=self.used_stack(sized.gpu),
            measured=stack.measured,
            call_overhead=stack.call_overhead,
            assumed=(
                *assumed(cluster, model, offload=self.offload),
                *_under("optimizer", self.load_optimizer()),
                *beyond_the_file(stated, sized),
            ),
        )

    def stage(self) -> Stage:
        """The job with its schedule, which stages of a pipeline have not together.

        Raises Co2simError when anything is wrong.
        """
        if self.pp > 1:
            raise OptionError(
                f"pp={self.pp}: stages of a pipeline are simulated one by one, and it has no"
                " schedule to show or to execute; co2sim run, scale, sweep, solve and plan give"
                " its figures"
            )
        return self.job().stage()

    @property
    def parsed(self) -> Strategy:
        """The strategy as an object."""
        strategy = self.strategy
        return strategies.parse(strategy) if isinstance(strategy, str) else strategy

    def _workload(self, model: Model, cluster: Cluster) -> Workload:
        if self.recompute == AUTO:
            raise _open("recompute", self.recompute)
        precision, narrow = self._types(cluster.gpu)
        stack = self.used_stack(cluster.gpu)
        gathered = stack.keep_gathered and self.sequence_parallel
        check_applies(self.recompute, model, self.pp, gathered=gathered)
        accumulation = self._accumulation(self.replicas_in(cluster.layout))
        return Workload(
            model=model,
            micro_batch=_number("micro_batch", self.micro_batch),
            accumulation=accumulation,
            cast_steps=accumulation if narrow else 1,
            precision=precision,
            narrow=narrow,
            recompute=self.recompute,
            optimizer=self.load_optimizer().value,
            offload=self.offload,
            lora=self.lora,
            quantize_base=self.quantize_base,
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
        wanted = (self.precision or gpu.preferred_precision).lower()
        if wanted not in NARROW:
            if wanted not in gpu.precisions:
                allowed = [*gpu.precisions, *(n for n, k in NARROW.items() if k.peak in gpu.peak)]
                raise OptionError(
                    f"{gpu.name} has no {wanted} in our catalog; {nearest(wanted, allowed)}"
                )
            return DType(wanted), None
        kind = NARROW[wanted]
        peak_flops(gpu, kind.peak)
        if kind.also and not any(name in gpu.peak for name in kind.also):
            raise OptionError(f"{gpu.name} multiplies no {wanted}; it has {kind.peak}")
        if gpu.kernels is None:
            raise OptionError(
                f"precision={wanted} needs the speed of products, and nothing says how fast those"
                f" of {gpu.name} are"
            )
        return DType(gpu.preferred_precision), cast(Narrow, wanted)

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


@lru_cache(maxsize=64)
def _check_runs(stack: str, runs: tuple[Runs, ...], recomputes: tuple[str, ...]) -> None:
    """Refuse names that there are not, in what a stack says that it can run."""
    try:
        for run in runs:
            for text in run.strategies:
                _check_options(text)
        for recompute in recomputes:
            recomputation("full/2" if recompute == "full/K" else recompute)
    except OptionError as error:
        raise OptionError(f"what the stack {stack!r} can run: {error}") from error


def _check_options(text: str) -> None:
    """Refuse a strategy that there is not, and options that it has not."""
    strategy = strategies.parse(text.partition(":")[0])
    options = [name for name, _, _ in strategies.strategy_options(type(strategy))]
    for name in needs_of(text):
        if name not in options:
            raise OptionError(f"{text!r} names {name!r}; {nearest(name, options)}")


def assumed(
    cluster: Entry[Cluster], model: Entry[Model], *, offload: Offload = "none"
) -> tuple[Fact, ...]:
    """The assumed numbers of both, which no source supports; no step depends on failures.

    Those of the host are named where a job has states there, with activations those of the link.
    """
    used = {"none": (), "activations": LINK}.get(offload, ASSUMED)
    missing = {path: number for path, number in unknown(cluster.value).items() if path in used}
    of_host = [Fact(f"cluster.{k}", a.text, a.why, assumed=True) for k, a in missing.items()]
    stated = (
        fact
        for fact in _under("cluster", cluster)
        if fact.path.removeprefix("cluster.") in {*used}
        or (fact.path.removeprefix("cluster.") not in ASSUMED)
    )
    return (*stated, *of_host, *_under("model", model))


def _under(prefix: str, entry: Entry[Any]) -> list[Fact]:
    used = (
        f
        for f in entry.assumed
        if f.path.removesuffix("_low").removesuffix("_high") not in _OF_TOTALS
        and not f.path.startswith("failures.")
    )
    return [replace(fact, path=f"{prefix}.{fact.path}") for fact in used]


def beyond_the_file(stated: Cluster, sized: Cluster) -> list[Fact]:
    """More nodes than the cluster has: the what-if of buying more of the same."""
    if sized.nodes <= stated.nodes:
        return []
    why = f"the cluster has {stated.nodes}; more of the same kind were asked for"
    return [Fact("cluster.nodes", str(sized.nodes), why, assumed=True)]


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
    reference: Any,
    load: Callable[[Any, Mapping[str, str]], Entry[Any]],
    overrides: Mapping[str, str],
) -> Entry[Any]:
    if isinstance(reference, str | Contents):
        return load(reference, overrides)
    if overrides:
        raise OptionError(
            f"overrides ({next(iter(overrides))}) apply to names and files, not to objects"
        )
    assumed = getattr(reference, "assumed", ())
    source = "not known without data"
    return Entry(reference, tuple(Fact("trace", text, source, assumed=True) for text in assumed))


def _named(name: str, reference: Any, kind: type[Any]) -> Any:
    """A name, a path as a text, or an object of `kind`."""
    if isinstance(reference, os.PathLike):
        return str(reference) if is_file(str(reference)) else f"./{reference}"
    if not isinstance(reference, str | kind | Contents):
        raise OptionError(
            f"{name} is {convert.shown(reference)}; it must be a catalog name, the path of a file,"
            f" or a {kind.__name__}"
        )
    return reference


def _strategy(strategy: Any) -> Any:
    if isinstance(strategy, str):
        return strategy
    if not isinstance(strategy, type) and hasattr(strategy, "schedule"):
        return strategies.checked(strategy)
    raise OptionError(
        f"strategy is {convert.shown(strategy)}; it must be a text such as 'co2(tau=48)', or a"
        " strategy such as CO2(tau=48)"
    )


class JobOptions(TypedDict, total=False):
    """For type checkers: the fields of `Question` and `Noise` but for the number of GPUs."""

    micro_batch: Count
    accumulation: Count | None
    tp: Count
    sequence_parallel: bool
    ep: Count
    etp: Count
    cp: Count
    pp: Count
    interleave: Count
    schedule: PipelineSchedule
    global_batch: Count | None
    precision: str | None
    attention: AttentionKernel | None
    recompute: Recompute
    checkpointing: Checkpointing | None
    loss: Loss | None
    optimizer: str | Optimizer | Contents
    offload: Offload
    lora: Count | None
    quantize_base: QuantizeBase
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
