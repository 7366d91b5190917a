"""One configuration: cluster, model, strategy and batch, by names, files or objects."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from co2sim import strategies
from co2sim.catalog import Contents, Entry, load_cluster, load_model
from co2sim.catalog.facts import is_file
from co2sim.common import convert
from co2sim.common.convert import Within
from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import Cluster
from co2sim.models.workload import (
    AttentionKernel,
    Checkpointing,
    Loss,
    Model,
    Optimizer,
    Recompute,
    Workload,
)
from co2sim.prediction.advice import assumed, beyond_the_file, beyond_the_table
from co2sim.prediction.intervals import Thoroughness
from co2sim.prediction.pipeline_order import stage_cluster, stage_of
from co2sim.prediction.prepared import Prepared, scheduled
from co2sim.schedule.schedule import DType
from co2sim.schedule.tensor_parallel import data_layout
from co2sim.simulation.collective_cost import peak_flops
from co2sim.simulation.noise import QUIET, Noise, RunOptions
from co2sim.strategies import LocalSteps, Strategy
from co2sim.strategies.step import title

_MOST_GPUS = 10_000_000
_MOST_TP = 1024
_MOST_PP = 1024
_MOST_CHUNKS = 128
_MOST_SAMPLES = 10**12
"""Of a global batch: beyond any training, and still exact as a float."""
_MOST_ROUNDS = 1_000_000
"""Far beyond what an average needs; what a machine can hold is checked before a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration. Clusters and models are catalog names, paths of files, or objects.

    `Contents` stand for a name, or a file that was read before.

    `strategy` is a text such as "co2(tau=48, worker=node)". `gpus` defaults to the whole cluster,
    `precision` to bf16, or fp16 where the GPU has no bf16. `global_batch` (samples per step over
    all GPUs) sets `accumulation`. `overrides` maps dotted paths of the cluster, or of the model
    behind "model.", to texts with units. `rounds` is how many rounds are averaged (default 1, or 10
    with jitter). `interval` says whether further simulations may be spent on the interval. `tp`
    GPUs of a node share every layer, and train on the same samples; with `sequence_parallel` they
    divide the sequence between matrix products, too. `pp` stages of a pipeline have a part of the
    layers each, in `interleave` chunks.

    Values are converted where they are unambiguous: counts may be 16.0, "16" or NumPy's, names may
    be paths, overrides plain numbers. Raises OptionError for others, and for counts out of range.
    """

    cluster: str | Cluster | Contents
    model: str | Model | Contents
    strategy: str | Strategy
    gpus: Annotated[int | None, Within((1, _MOST_GPUS))] = None
    micro_batch: int = 1
    accumulation: int = 1
    tp: Annotated[int, Within((1, _MOST_TP))] = 1
    sequence_parallel: bool = False
    pp: Annotated[int, Within((1, _MOST_PP))] = 1
    interleave: Annotated[int, Within((1, _MOST_CHUNKS))] = 1
    global_batch: Annotated[int | None, Within((1, _MOST_SAMPLES))] = None
    precision: str | None = None
    attention: AttentionKernel = "flash"
    recompute: Recompute = "none"
    checkpointing: Checkpointing = "non_reentrant"
    loss: Loss = "fused"
    optimizer: Optimizer = "adamw"
    overrides: Mapping[str, str] = field(default_factory=dict)
    noise: Noise = QUIET
    rounds: Annotated[int | None, Within((1, _MOST_ROUNDS))] = None
    fold: bool = True
    interval: Thoroughness = "quick"

    def __post_init__(self) -> None:
        """Convert every value, once and for all."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        found = convert.declared(Case, given) | {
            "cluster": _named("cluster", self.cluster, Cluster),
            "model": _named("model", self.model, Model),
            "strategy": _strategy(self.strategy),
            "overrides": convert.texts("overrides", self.overrides),
        }
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
    def run_options(self) -> RunOptions:
        """What the simulation of its schedule needs to know."""
        return RunOptions(self.noise, self.rounds, self.fold)

    def load(self) -> tuple[Entry[Cluster], Entry[Model]]:
        """The cluster and the model, from names, files or objects."""
        for_model = {
            k.removeprefix("model."): v for k, v in self.overrides.items() if k.startswith("model.")
        }
        for_cluster = {k: v for k, v in self.overrides.items() if not k.startswith("model.")}
        cluster = _entry(self.cluster, load_cluster, for_cluster)
        return cluster, _entry(self.model, load_model, for_model)

    def prepare(self) -> Prepared:
        """Load everything and build the schedule. Raises Co2simError when anything is wrong."""
        if self.pp > 1:
            raise OptionError(
                f"pp={self.pp}: stages of a pipeline are simulated one by one, and it has no"
                " schedule of its own to show or to execute; co2sim run, scale, sweep, solve and"
                " plan give its figures"
            )
        if self.interleave > 1:
            raise OptionError(f"interleave={self.interleave} needs pp of 2 or more")
        return self._prepared()

    def stage(self, number: int, held: float = 1.0) -> Prepared:
        """A stage of a pipeline, as if it were alone; see `Prepared`. Raises as `prepare` does."""
        return self._prepared(number, held)

    def stage_jobs(self) -> list[Workload]:
        """What each stage of a pipeline has to do, without its schedule."""
        cluster, model = self.load()
        job = self._workload(model.value, self._sized(cluster.value))
        return [stage_of(job, number, self.pp, self.interleave) for number in range(self.pp)]

    def _sized(self, cluster: Cluster) -> Cluster:
        """The GPUs of the case, or of one of its stages."""
        sized = cluster.resized(self.gpus) if self.gpus is not None else cluster
        if self.pp == 1:
            return sized
        sized = stage_cluster(sized, self.pp)
        if sized.gpus_per_node % self.tp:
            raise OptionError(
                f"tp={self.tp} does not divide the {sized.gpus_per_node} GPUs of a node that"
                f" one of the pp={self.pp} stages has"
            )
        return sized

    def _prepared(self, number: int = 0, held: float = 1.0) -> Prepared:
        cluster, model = self.load()
        sized = self._sized(cluster.value)
        job = self._workload(model.value, sized)
        if self.pp > 1:
            job = stage_of(job, number, self.pp, self.interleave)
        strategy = self.strategy
        if isinstance(strategy, str):
            strategy = strategies.parse(strategy)
        _check_sites(strategy, cluster.value)
        job, schedule = scheduled(strategy, job, sized.layout)
        return Prepared(
            cluster=sized,
            job=job,
            strategy=strategy,
            schedule=schedule,
            assumed=(
                *assumed(cluster, model),
                *beyond_the_file(cluster.value, sized),
                *beyond_the_table(sized.gpu, job.share),
            ),
            held=held,
        )

    def _workload(self, model: Model, cluster: Cluster) -> Workload:
        precision = self.precision or cluster.gpu.preferred_precision
        peak_flops(cluster.gpu, precision)
        if self.recompute == "full" and not any(block.boundary_bytes for block in model.blocks):
            raise OptionError(
                f"recompute=full does not apply to {model.name}: its blocks have no input sizes"
            )
        return Workload(
            model=model,
            micro_batch=self.micro_batch,
            accumulation=self._accumulation(data_layout(cluster.layout, self.tp).world_size),
            precision=DType(precision),
            attention=self.attention,
            recompute=self.recompute,
            checkpointing=self.checkpointing,
            loss=self.loss,
            optimizer=self.optimizer,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
        )

    def _accumulation(self, groups: int) -> int:
        if self.global_batch is None:
            return self.accumulation
        if self.accumulation != 1:
            raise OptionError(
                "give accumulation or global_batch, not both: one follows from the other"
            )
        per_micro_step = groups * self.micro_batch
        who = "GPUs" if self.tp == 1 else f"groups of {self.tp} GPUs"
        if per_micro_step < 1 or self.global_batch % per_micro_step:
            raise OptionError(
                f"global_batch={self.global_batch} is not a multiple of {groups} {who} x"
                f" micro_batch={self.micro_batch} = {per_micro_step}"
            )
        return self.global_batch // per_micro_step


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
