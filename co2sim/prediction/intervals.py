"""How sure a prediction is: the errors of published runs, and its interval.

**The model of errors**: log(published / predicted) of runs has mean 0. What they differ by is
shared by all runs of a site (its GPUs, their power, who tuned it), shared by runs that are alike
(`near`, less and less with their distance), or a run's own. What a site shares is a sum of parts:
one of all runs, and one each for what waits for the network, the number of nodes, how layers are
divided, a slow host, experts, divided sequences, products in fp8, and a GPU of which nothing is
published. So errors of two runs of a site have a covariance (`ErrorModel.covariance`). The parts
are those that make errors of sites most likely which were left out of the fit (`co2analysis runs
--fit`), and a 90 % interval reaches so far that it holds nine tenths of them.

**The 90 % interval** of a stranger is by the variance alone. Where the stack was calibrated by runs
of its site, it is by the variance that is left once their errors are known: a dense run says
nothing about experts, and a small one little about thousands of GPUs. Of a cluster that was probed
the scatter of the probe counts instead.

**Order**: two runs of a model on one cluster with one stack share what is wrong with either, so the
error of their ratio has the variance of the difference. Of one job on two numbers of GPUs only what
the larger one loses may be wrong (`ErrorModel.scaling`).
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, TypeAlias, TypeVar

import numpy as np

from co2sim.common.units import Bytes, counted
from co2sim.hardware.cluster import Cluster, Link, Scatter
from co2sim.models.operators import NARROW
from co2sim.prediction.job import Job
from co2sim.prediction.likeness import shares
from co2sim.prediction.result import Result
from co2sim.training.stack import Setting, plain_name

# --- distances ------------------------------------------------------------------------------------


_OTHER = 2.0
"""What another GPU, way of sharing or kernels count: as much as four times the parameters."""


def setting_of(job: Job, result: Result) -> Setting:
    """What the result of a job is like."""
    cluster, model = job.stage_cluster, job.model
    several = result.nodes > 1
    network = 8 * cluster.inter.payload_bandwidth / cluster.gpus_per_node if several else 0.0
    return replace(
        alike(result),
        network=network,
        kernels=job.kernels,
        gpu=cluster.gpu.generation or cluster.gpu.name,
        parameters=model.parameters,
        experts=model.active_parameters < model.parameters,
        spread=job.stack.spread,
    )


def alike(result: Result) -> Setting:
    """What a result is like, but for what runs of a model on one cluster share."""
    return Setting(
        gpu="",
        gpus=result.gpus,
        parameters=1,
        shares=shares(result.strategy),
        divided=result.layer_gpus,
        tokens=result.tokens_per_gpu_per_step * result.apart / result.accumulation,
        nodes=result.nodes,
        exposed=result.exposed_share,
        host=min(1.0, result.host_load or 0.0),
        context=result.cp > 1,
        narrow=result.precision in NARROW,
    )


def distance(here: Setting, there: Setting) -> float:
    """Of two runs of one stack: 1 for twice the parameters, or four times of something else.

    The network counts where both use one, and kernels where both state them.
    """
    far = abs(math.log2(here.parameters / there.parameters))
    far += 0.5 * abs(math.log2(here.gpus / there.gpus))
    far += 0.5 * abs(math.log2(here.tokens / there.tokens))
    far += 0.5 * abs(math.log2(here.divided / there.divided))
    if here.network and there.network:
        far += abs(math.log2(here.network / there.network))
    if here.kernels and there.kernels and here.kernels != there.kernels:
        far += _OTHER
    return far + _OTHER * (here.gpu != there.gpu) + _OTHER * (here.shares != there.shares)


_MOST_MEASURED = 32
"""Runs of a site whose errors are taken into account: work grows with their square."""


def of_site(setting: Setting, measured: Sequence[Setting]) -> tuple[Setting, ...]:
    """Those of the runs that calibrated a stack whose errors are its errors, too.

    None are on another GPU, or train local steps where it does not. Of many the nearest count.
    """
    some = (
        run
        for run in measured
        if run.gpu == setting.gpu and (run.shares == "steps") == (setting.shares == "steps")
    )
    return tuple(sorted(some, key=lambda run: distance(setting, run))[:_MOST_MEASURED])


# --- the model of errors --------------------------------------------------------------------------


ERRORS = "errors.toml"
"""The record of the catalog."""


KIND_WORDS = {"experts": "experts", "context": "divided sequences", "narrow": "fp8 and below"}
"""What parts that are a kind of run are called."""

_MANY = 5
"""Sources of a kind from which on its spread is known."""


def parts_of(setting: Setting) -> dict[str, float]:
    """By how much each part counts of what the runs of a site share.

    Exposed communication counts less and less: half of a round that waits as 3/8, all of it as 1/2.
    """
    return {
        "site": 1.0,
        "exposed": setting.exposed * (1 - setting.exposed / 2),
        "nodes": math.log2(setting.nodes) / 10,
        "divided": math.log2(setting.divided) / 5,
        "host": setting.host**3,
        "experts": float(setting.experts),
        "context": float(setting.context),
        "narrow": float(setting.narrow),
        "strange": float(setting.strange),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class KindErrors:
    """Published runs of a kind that has its own part, left out of the fit.

    `mean` is that of absolute errors.
    """

    runs: int
    sites: int
    mean: float


@dataclass(frozen=True, slots=True)
class SourceErrors:
    """Errors on the runs of one source, left out of the fit: predicted / published - 1.

    `mean` is that of their sizes, `bias` the median with its sign.
    """

    title: str
    runs: int
    mean: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingErrors:
    """Errors of the throughput per GPU of a job, relative to the same job on other GPUs.

    What both share is not in them: speed of kernels, power, what a stack adds. The variance of
    log(measured / predicted) of the ratio is `any` squared, for what two published numbers differ
    by, and `lost` squared times the size of the logarithm of the ratio, as a loss is a sum of many
    parts, times log2 of the nodes of the larger job. A 90 % interval reaches `factor` standard
    deviations; `runs` are the pairs of runs.
    """

    any: float
    lost: float
    factor: float
    runs: int

    @staticmethod
    def parts(ratio: float, nodes: int) -> dict[str, float]:
        """By how much each part of the standard deviation counts, by the predicted ratio."""
        return {"any": 1.0, "lost": math.sqrt(abs(math.log(ratio)) * math.log2(max(2, nodes)))}

    def ends(self, ratio: float, nodes: int) -> tuple[float, float]:
        """The ends of the 90 % interval of a ratio: a larger job is faster per GPU by chance only.

        >>> low, high = ScalingErrors(any=0.01, lost=0.1, factor=2.0, runs=9).ends(0.9, 16)
        >>> round(low, 3), round(high, 3)
        (0.789, 1.02)
        """
        parts = self.parts(ratio, nodes)
        reach = self.factor * math.hypot(self.any * parts["any"], self.lost * parts["lost"])
        high, chance = ratio * math.exp(reach), math.exp(self.factor * self.any)
        return ratio * math.exp(-reach), max(ratio, min(high, chance)) if ratio <= 1 else high

    def waiting(self, share: float, nodes: int) -> tuple[float, float]:
        """The ends of the share of a round that waits for communication, the lesser one first.

        That is the loss of a job relative to itself with free communication.
        """
        if not 0 < share < 1:
            return share, share
        ratio = 1 - share
        reach = self.factor * self.lost * self.parts(ratio, nodes)["lost"]
        return max(0.0, 1 - ratio * math.exp(reach)), 1 - ratio * math.exp(-reach)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackMemory:
    """How far a 90 % interval of the memory of runs of a stack reaches, and of how many it is.

    `bounds` are further runs, whose peak is not published, and which ran though more memory was
    predicted than there was, or did not though less was.
    """

    reach: float
    runs: int
    bounds: int
    sources: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryErrors:
    """Errors of the peak of memory on published runs, of which it is known.

    A 90 % interval of log(published / predicted) reaches `reach` to both sides for a stack of which
    no memory is published; `stacks` are those of the others, by name. `mean` is that of absolute
    errors, `bias` the median of signed ones. `inside` is the share of these runs in intervals that
    were made without their source.
    """

    reach: float
    mean: float
    bias: float
    runs: int
    sources: int
    inside: float
    stacks: Mapping[str, StackMemory]

    def of(self, stack: str) -> tuple[float, str]:
        """How far the interval reaches for a stack, calibrated or not, and its source as a text."""
        of_stack = self.stacks.get(plain_name(stack))
        if of_stack is None:
            return self.reach, (
                f"no memory of runs of this stack is published: errors of {self.runs} runs of"
                f" others, of {counted(self.sources, 'source')}"
            )
        runs, sources = counted(of_stack.runs, "published run"), counted(of_stack.sources, "source")
        more = f", and of {of_stack.bounds} that show a bound" if of_stack.bounds else ""
        return of_stack.reach, f"errors of the memory of {runs} of this stack{more}, of {sources}"


@dataclass(frozen=True, slots=True)
class ErrorModel:
    """Standard deviations of log(published / predicted), and how many a 90 % interval reaches.

    `shared` are those of the parts that all runs of a site share, `near` of what those share that
    are alike, and `own` of a run. `kinds` are what is known of the kinds that have a part, and
    `scaling` the errors of two runs that differ in the number of GPUs alone.
    """

    shared: Mapping[str, float]
    near: float
    own: float
    factor: float
    sources: tuple[SourceErrors, ...] = ()
    kinds: Mapping[str, KindErrors] = field(default_factory=dict)
    memory: MemoryErrors | None = None
    scaling: ScalingErrors | None = None

    def covariance(self, here: Setting, there: Setting, apart: float) -> float:
        """Of two runs of a site that are so far `apart`, but for the part that is a run's own."""
        theirs = parts_of(there)
        common = (
            self.shared[name] ** 2 * size * theirs[name] for name, size in parts_of(here).items()
        )
        return sum(common) + here.spread * there.spread + self.near**2 * math.exp(-apart)

    def variance(self, here: Setting, measured: Sequence[Setting] = ()) -> float:
        """Of a run, once the errors of others of its site are known.

        A measured run that is still off by its `misfit` says less.
        """
        whole = self.covariance(here, here, 0.0) + self.own**2
        if not measured:
            return whole
        both = np.array([self.covariance(here, run, distance(here, run)) for run in measured])
        known = np.array(
            [[self.covariance(a, b, distance(a, b)) for b in measured] for a in measured]
        )
        known += np.diag([self.own**2 + run.misfit**2 for run in measured])
        return max(self.own**2, float(whole - both @ np.linalg.solve(known, both)))

    def reach(self, here: Setting, measured: Sequence[Setting] = ()) -> float:
        """How far a 90 % interval of log(published / predicted) reaches to both sides."""
        return self.factor * math.sqrt(self.variance(here, measured))

    def ratio_reach(self, first: Setting, second: Setting) -> float:
        """The same of the ratio of two runs of a model on one cluster."""
        apart = distance(first, second)
        single = [self.covariance(run, run, 0.0) for run in (first, second)]
        variance = sum(single) - 2 * self.covariance(first, second, apart) + 2 * self.own**2
        return self.factor * math.sqrt(variance)

    @property
    def runs(self) -> int:
        """In all sources."""
        return sum(source.runs for source in self.sources)


def read_error_model(entry: Mapping[str, Any]) -> ErrorModel:
    """From the record."""
    return ErrorModel(
        shared=entry["shared"],
        near=entry["near"],
        own=entry["own"],
        factor=entry["factor"],
        sources=tuple(SourceErrors(**source) for source in entry.get("source", ())),
        kinds={name: KindErrors(**kind) for name, kind in entry.get("kinds", {}).items()},
        memory=_memory_errors(entry["memory"]) if "memory" in entry else None,
        scaling=ScalingErrors(**entry["scaling"]) if "scaling" in entry else None,
    )


def _memory_errors(entry: Mapping[str, Any]) -> MemoryErrors:
    stacks = {name: StackMemory(**one) for name, one in entry["stacks"].items()}
    return MemoryErrors(**{**entry, "stacks": stacks})


@cache
def error_model() -> ErrorModel:
    """That of the catalog."""
    text = (resources.files("co2sim.catalog") / ERRORS).read_text("utf-8")
    return read_error_model(tomllib.loads(text))


# --- the interval ---------------------------------------------------------------------------------


L = TypeVar("L", Link, Link | None)

TAIL = 1.645
"""Standard deviations of a normal distribution that a 90 % interval reaches to both sides."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Ends of a 90 % interval, both None for what was measured, and its source as a text.

    `by_runs` says that the errors of all published training runs made it.
    """

    low: float | None
    high: float | None
    source: str
    by_runs: bool = False


Speeds: TypeAlias = Sequence[Sequence[float]]
"""Tokens/s on the clusters of `Predicted.moved`, in the same pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A prediction: on what, the tokens/s, and what makes it more or less sure.

    `measured` are runs of its site.
    """

    cluster: Cluster
    tokens_per_s: float
    setting: Setting
    measured: tuple[Setting, ...] = ()

    def moved(self) -> list[list[Cluster]]:
        """Pairs of clusters, of the same layout, that a full interval simulates.

        None where the interval is made of errors.
        """
        if self.cluster.scatter is None:
            return []
        sigmas = self.cluster.scatter.compute, self.cluster.scatter.communication
        return [
            [faster(self.cluster, **{name: math.exp(way * TAIL * sigma)}) for way in (1, -1)]
            for name, sigma in zip(("compute", "communication"), sigmas, strict=True)
        ]

    def interval(self, speeds: Speeds | None = None) -> Interval:
        """Its interval; a full one with the `speeds` of what `moved` says."""
        if self.cluster.scatter is not None:
            return self._of_probe(self.cluster.scatter, speeds)
        return self._of_errors()

    def _of_errors(self) -> Interval:
        errors = error_model()
        words = (
            f"errors on {counted(errors.runs, 'published training run')} of"
            f" {counted(len(errors.sources), 'source')}, each left out of the fit"
        )
        few = [
            f"{KIND_WORDS[name]} {counted(kind.sites, 'source')} ({counted(kind.runs, 'run')})"
            for name, kind in errors.kinds.items()
            if kind.sites < _MANY and parts_of(self.setting)[name]
        ]
        if few:
            words += f"; of {', of '.join(few)} only"
        if self.measured:
            words += f", and {counted(len(self.measured), 'run')} that calibrated the stack"
        reach = errors.reach(self.setting, self.measured)
        return replace(self._from(reach, reach, words), by_runs=not self.measured)

    def _of_probe(self, scatter: Scatter, speeds: Speeds | None) -> Interval:
        words = (
            f"probe: scatter of {scatter.compute:.1%} in compute and of"
            f" {scatter.communication:.1%} in communication"
        )
        if speeds is None:
            sigmas = scatter.compute, scatter.communication
            shares = 1 - self.setting.exposed, self.setting.exposed
            reach = TAIL * math.hypot(*(a * b for a, b in zip(sigmas, shares, strict=True)))
            return self._from(reach, reach, f"{words}, each by its share of the round")
        down, up = self._falls_and_rises(speeds)
        return self._from(down, up, f"{words}, each simulated")

    def _falls_and_rises(self, speeds: Speeds) -> tuple[float, float]:
        """How far log(prediction) falls and rises: the root of the sum of squares over the pairs.

        Communication that is hidden on one side may be exposed on the other: both are kept apart.
        """
        effects = [
            [0.0, *(math.log(speed / self.tokens_per_s) for speed in pair)] for pair in speeds
        ]
        return math.hypot(*map(min, effects)), math.hypot(*map(max, effects))

    def _from(self, down: float, up: float, source: str) -> Interval:
        """From how far it may fall and rise, as logarithms."""
        value = self.tokens_per_s
        return Interval(value * math.exp(-down), value * math.exp(up), source)


def faster(cluster: Cluster, compute: float = 1.0, communication: float = 1.0) -> Cluster:
    """The cluster with all computation, or all communication, faster by a factor."""
    gpu = cluster.gpu
    peak = {name: speed * compute for name, speed in gpu.peak.items()}
    gpu = replace(
        gpu,
        peak=peak,
        memory_bandwidth=gpu.memory_bandwidth * compute,
        launch_overhead=gpu.launch_overhead / compute,
    )

    def quicker(link: L) -> L:
        if link is None:
            return link
        return replace(
            link,
            bandwidth=link.bandwidth * communication,
            latency=link.latency / communication,
        )

    return replace(
        cluster,
        gpu=gpu,
        intra=quicker(cluster.intra),
        inter=quicker(cluster.inter),
        wan=quicker(cluster.wan),
    )


def overlaps(first: Interval, second: Interval) -> bool:
    """Whether two predictions have intervals, and these overlap.

    Errors of two strategies on one cluster are alike, in part: their order is surer than this says.
    """
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return False
    return first.low <= second.high and second.low <= first.high


def memory_ends(
    total: Bytes, stack: str, certain: Bytes = 0.0
) -> tuple[Bytes | None, Bytes | None, str]:
    """The 90 % interval of memory, and its source; None and "" where nothing is known.

    No run can do without `certain` bytes.
    """
    errors = error_model().memory
    if errors is None:
        return None, None, ""
    reach, source = errors.of(stack)
    return max(total * math.exp(-reach), certain), total * math.exp(reach), source


# --- order ----------------------------------------------------------------------------------------


def interval_of(result: Result) -> Interval:
    """The interval of a result."""
    return Interval(result.tokens_per_s_low, result.tokens_per_s_high, result.interval_source)


def unshared(first: Result, second: Result) -> float:
    """How far a 90 % interval of the logarithm of their ratio reaches.

    inf for runs of two models, or on two clusters or stacks.
    """
    names = "cluster", "model", "stack"
    if any(getattr(first, name) != getattr(second, name) for name in names):
        return math.inf
    return error_model().ratio_reach(alike(first), alike(second))


_JOB = (
    "strategy",
    "tp",
    "cp",
    "ep",
    "etp",
    "pp",
    "micro_batch",
    "recompute",
    "precision",
    "attention",
)
"""What a GPU does of a job, whatever the number of GPUs and of micro-steps."""


def efficiency_ends(many: Result, alone: Result) -> tuple[float, float] | None:
    """The 90 % interval of the throughput per GPU of a job, relative to that on other GPUs.

    Both are of one cluster, model and stack. Where a GPU does the same in both, only what is lost
    may be wrong; else they are two jobs. Never wider than that of the throughput itself, and None
    where that has none.
    """
    model, low, high = error_model(), many.tokens_per_s_low, many.tokens_per_s_high
    if low is None or high is None:
        return None
    ratio = many.tokens_per_s_per_gpu / alone.tokens_per_s_per_gpu
    down, up = low / many.tokens_per_s, high / many.tokens_per_s
    ends = ratio * down, ratio * up
    if model.scaling and all(getattr(many, name) == getattr(alone, name) for name in _JOB):
        ends = model.scaling.ends(ratio, many.nodes)
    else:
        reach = model.ratio_reach(alike(many), alike(alone))
        ends = ratio * math.exp(-reach), ratio * math.exp(reach)
    return max(ends[0], ratio * down), min(ends[1], ratio * up)


def undecided(first: Result, second: Result) -> bool:
    """Whether either may be the faster one: their intervals overlap, and so do what they differ by.

    Two without an interval, such as measured ones, are never undecided.
    """
    if not overlaps(interval_of(first), interval_of(second)):
        return False
    return abs(math.log(first.tokens_per_s / second.tokens_per_s)) <= unshared(first, second)
