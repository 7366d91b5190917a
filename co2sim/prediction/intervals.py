"""How sure a prediction is: the errors of published runs, and its interval.

**The model of errors**: log(published / predicted) of a further run has mean 0, and a variance that
is a sum of parts: one for any run, and one each for what grows with exposed communication, nodes,
divided layers, and what the host needs for what the GPU needs. They are smooth, and are estimated
on errors of sources that were left out of the fit (`co2analysis runs --fit`). Where the stack was
calibrated by its own runs, the variance is that of the errors of runs that were predicted from one
run of their series, which grow with the distance to it.

**The 90 % interval** has three sources, the nearest first: the scatter of the probe that measured
the cluster; the fit of the constants that the cluster has (`calibrations`), which tells of runs
that are near those fitted; the model of errors.

**Order**: two runs of a model on one cluster with one stack share much of what is wrong with
either. What they do not share is the error of their ratio: on published runs it grows with the
distance of the two (`ErrorModel.pairs`). Of one job on two numbers of GPUs it is smaller: only what
the larger one loses may be wrong (`ErrorModel.scaling`).
"""

import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeAlias, TypeVar

from co2sim.common.units import Bytes, counted
from co2sim.hardware.cluster import Cluster, Link, Scatter
from co2sim.models.operators import Model
from co2sim.prediction.calibrations import (
    Calibration,
    calibrations,
    describe_extrapolation,
    figures_of,
    replaced,
    squares,
)
from co2sim.prediction.likeness import shares
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import WORLD, Layout
from co2sim.strategies import Strategy, says
from co2sim.strategies.fsdp import FSDP
from co2sim.training.stack import Setting, plain_name

# --- distances ------------------------------------------------------------------------------------


_OTHER = 2.0
"""What another GPU, way of sharing or kernels count: as much as four times the parameters."""


def setting_of(cluster: Cluster, model: Model, result: Result, kernels: str = "") -> Setting:
    """What a result is like; `kernels` names precision, attention and recomputation."""
    several = result.nodes > 1
    network = 8 * cluster.inter.payload_bandwidth / cluster.gpus_per_node if several else 0.0
    return Setting(
        network=network,
        kernels=kernels,
        gpu=cluster.gpu.generation or cluster.gpu.name,
        gpus=result.gpus,
        parameters=model.parameters,
        shares=shares(result.strategy),
        divided=result.layer_gpus,
        tokens=result.tokens_per_gpu_per_step * result.pp / result.accumulation,
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


def between(first: Result, second: Result) -> float:
    """The distance of two results of one model on one GPU."""
    here, there = (
        Setting(
            gpu="",
            gpus=result.gpus,
            parameters=1,
            shares=shares(result.strategy),
            divided=result.layer_gpus,
            tokens=result.tokens_per_gpu_per_step * result.pp / result.accumulation,
        )
        for result in (first, second)
    )
    return distance(here, there)


def from_measured(setting: Setting, measured: Sequence[Setting]) -> tuple[float, float]:
    """The distance to the nearest of the runs that calibrated a stack, and the misfit of that one.

    inf where none is on this GPU, or where only one of the two trains local steps.
    """
    alike = [
        (distance(setting, run), run.misfit)
        for run in measured
        if run.gpu == setting.gpu and (run.shares == "steps") == (setting.shares == "steps")
    ]
    return min(alike, default=(math.inf, 0.0))


# --- the model of errors --------------------------------------------------------------------------


ERRORS = "errors.toml"
"""The record of the catalog."""

_UNKNOWN_GPU = 0.25
"""Standard deviation for a GPU of whose kernels, or trainings, nothing is published. Assumed:
between the best and the worst of those that are, half of their efficiencies lie so near."""


_EXPERTS = 0.25
"""Standard deviation that mixtures of experts add: on the published runs of them the root of the
mean square is 0.28, a part of which any run has."""
EXPERT_RUNS, EXPERT_ERROR = 19, 0.27
"""Published runs of mixtures of experts, which entered no fit, and the mean of their errors
(docs/stacks.md). All of them divide the experts of a layer, and are of ZeRO-1."""
CONTEXT_RUNS, CONTEXT_ERROR, CONTEXT_TORCHTITAN = 51, 0.11, 0.57
"""The same with context parallelism, and the mean of the three runs of torchtitan among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What makes a prediction more or less sure.

    `exposed` is the share of the round that waits for the network, `divided` how many GPUs share
    the layers (tp x pp), `host` what the host needs to issue passes over what the GPU needs for
    them, and `known` says whether something is published of the GPU's kernels, and of trainings on
    its generation. `apart` is the
    distance to the nearest of the runs that the stack was calibrated by, inf without any, and
    `misfit` by how much the logarithm of that is still off. `experts` says whether the model is a
    mixture of them.
    """

    exposed: float
    nodes: int
    divided: int
    host: float
    known: bool = True
    apart: float = math.inf
    misfit: float = 0.0
    experts: bool = False

    @classmethod
    def of(
        cls,
        result: Result,
        *,
        known: bool = True,
        apart: float = math.inf,
        misfit: float = 0.0,
        experts: bool = False,
    ) -> "Situation":
        """That of a result."""
        return cls(
            exposed=result.exposed_share,
            nodes=result.nodes,
            divided=result.layer_gpus,
            host=result.host_load or 0.0,
            known=known,
            apart=apart,
            misfit=misfit,
            experts=experts,
        )

    @property
    def parts(self) -> dict[str, float]:
        """By how much each part of the standard deviation counts."""
        return {
            "any": 1.0,
            "exposed": self.exposed,
            "nodes": math.log2(self.nodes) / 10,
            "divided": math.log2(self.divided) / 5,
            "host": min(1.0, self.host),
        }


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
class DistanceErrors:
    """Errors that grow with the distance from another run of the same stack.

    Standard deviations beside that run, and for a distance of 1 from it; how many of both a 90 %
    interval reaches; and how many runs, or pairs of runs, they are of.
    """

    any: float
    apart: float
    factor: float
    runs: int

    def reach(self, apart: float, misfit: float = 0.0) -> float:
        """How far a 90 % interval of log(measured / predicted) reaches to both sides.

        `misfit` is by how much the other run is off itself.
        """
        return self.factor * math.hypot(self.any, self.apart * apart, misfit)


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
    """Standard deviations of the parts, and how many of all a 90 % interval reaches.

    `own` are errors of runs that were predicted by a stack which one run of their series
    calibrated, `pairs` those of ratios of two runs of a model on one cluster, and `scaling` of two
    that differ in the number of GPUs alone.
    """

    deviations: Mapping[str, float]
    factor: float
    sources: tuple[SourceErrors, ...]
    own: DistanceErrors | None = None
    pairs: DistanceErrors | None = None
    memory: MemoryErrors | None = None
    scaling: ScalingErrors | None = None

    def deviation(self, situation: Situation) -> float:
        """Of log(published / predicted)."""
        parts = [self.deviations[name] * size for name, size in situation.parts.items()]
        more = 0.0 if situation.known else _UNKNOWN_GPU, _EXPERTS if situation.experts else 0.0
        return math.hypot(*parts, *more)

    def reach(self, situation: Situation) -> float:
        """How far a 90 % interval of log(published / predicted) reaches to both sides."""
        reach = self.factor * self.deviation(situation)
        return min(reach, self.own.reach(situation.apart, situation.misfit)) if self.own else reach

    def by_own(self, situation: Situation) -> bool:
        """Whether the runs that the stack was calibrated by make the interval narrower."""
        return self.reach(situation) < self.factor * self.deviation(situation)

    @property
    def runs(self) -> int:
        """In all sources."""
        return sum(source.runs for source in self.sources)


def read_error_model(entry: Mapping[str, Any]) -> ErrorModel:
    """From the record."""
    sources = tuple(SourceErrors(**source) for source in entry.get("source", ()))
    own, pairs = (
        DistanceErrors(**entry[name]) if name in entry else None for name in ("own", "pairs")
    )
    memory = _memory_errors(entry["memory"]) if "memory" in entry else None
    scaling = ScalingErrors(**entry["scaling"]) if "scaling" in entry else None
    factor = float(entry["interval_factor"])
    return ErrorModel(entry["deviations"], factor, sources, own, pairs, memory, scaling)


def _memory_errors(entry: Mapping[str, Any]) -> MemoryErrors:
    stacks = {name: StackMemory(**one) for name, one in entry["stacks"].items()}
    return MemoryErrors(**{**entry, "stacks": stacks})


@cache
def error_model() -> ErrorModel:
    """That of the catalog."""
    text = (resources.files("co2sim.catalog") / ERRORS).read_text("utf-8")
    return read_error_model(tomllib.loads(text))


# --- the interval ---------------------------------------------------------------------------------


Exchange: TypeAlias = Literal["gradients", "parameters", "quantized", "averages"]
Extent: TypeAlias = Literal["one node", "several nodes"]

_IN_WORDS: dict[Exchange, str] = {
    "gradients": "gradients exchanged every step",
    "parameters": "parameters gathered block by block",
    "quantized": "quantized parameters and gradients, block by block",
    "averages": "averages of local steps",
}


@dataclass(frozen=True, slots=True, order=True)
class RunKind:
    """GPU generation, what is exchanged (the family of the strategy), and one node or several."""

    gpu: str
    exchange: Exchange
    extent: Extent

    def __str__(self) -> str:
        return f"{self.gpu}, {_IN_WORDS[self.exchange]}, {self.extent}"


def why_not_comparable(strategy: Strategy, layout: Layout, names: Collection[str]) -> str:
    """A text: what a strategy gathers otherwise than those of these names; empty if nothing.

    When blocks are gathered is the framework's own: what is known of FSDP, over all ranks, is not
    known of DeepSpeed's ZeRO-3, nor of groups. Gradients and averages are sent as a whole.
    """
    if says(strategy, "shares") != "parameters":
        return ""
    there = f"there {' and '.join(names)}"
    if strategy.name not in names:
        return f"{strategy.name}, {there}"
    if isinstance(strategy, FSDP) and strategy.sharding(layout, WORLD).replicas:
        return f"{strategy.name} in groups, {there} over all GPUs"
    return ""


def kind_of(cluster: Cluster, strategy: Strategy, model: Model) -> RunKind | None:
    """The kind of a run on all of the cluster; None where nothing that is published is like it.

    That is so for other GPUs, for strategies that are not ours, and for models of images.
    """
    gpu = cluster.gpu.generation
    exchange = says(strategy, "exchanges")
    if gpu is None or exchange is None or model.unit != "token":
        return None
    return RunKind(gpu, exchange, "several nodes" if cluster.nodes > 1 else "one node")


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
    """A prediction: of what, the tokens/s, and what makes it more or less sure.

    `precision` names the type of numbers.
    """

    cluster: Cluster
    strategy: Strategy
    model: Model
    precision: str
    tokens_per_s: float
    situation: Situation

    def moved(self) -> list[list[tuple[Cluster, float]]]:
        """Pairs of clusters, of the same layout, that a full interval simulates, and their weights.

        None where the interval is made of errors.
        """
        if self.cluster.scatter is not None:
            sigmas = self.cluster.scatter.compute, self.cluster.scatter.communication
            return [
                [
                    (faster(self.cluster, **{name: math.exp(way * TAIL * sigma)}), 1.0)
                    for way in (1, -1)
                ]
                for name, sigma in zip(("compute", "communication"), sigmas, strict=True)
            ]
        fit, far = self._fit()
        if fit is None or far:
            return []
        return [
            [(_with_values(self.cluster, values), times) for values, times in pair]
            for pair in fit.moves(self.cluster.gpu.name)
        ]

    def interval(self, speeds: Speeds | None = None) -> Interval:
        """Its interval; a full one with the `speeds` of what `moved` says."""
        if self.cluster.scatter is not None:
            return self._of_probe(self.cluster.scatter, speeds)
        fit, far = self._fit()
        if fit and not far:
            return self._of_fit(fit, speeds)
        return self._of_errors(f"far from calibration {fit.group} ({far}): " if fit else "")

    def _fit(self) -> tuple[Calibration | None, str]:
        """The fit of the cluster's constants, and in what the run is far from those fitted."""
        alike = self.situation.divided == 1  # as in the runs that were fitted
        if self.situation.apart < math.inf or not alike:
            return None, ""
        kind = kind_of(self.cluster, self.strategy, self.model)
        fit = None if kind is None else calibration_of(self.cluster, kind)
        if fit is None:
            return None, ""
        run = figures_of(self.cluster, self.model, self.precision)
        return fit, beyond_fit(fit, self.strategy, self.cluster.layout, run)

    def _of_errors(self, before: str = "") -> Interval:
        errors = error_model()
        words = (
            f"{before}errors on {counted(errors.runs, 'published training run')} of"
            f" {counted(len(errors.sources), 'source')}, each left out of the fit"
        )
        if self.situation.experts:
            words += f", and on {EXPERT_RUNS} of mixtures of experts"
        if errors.own and errors.by_own(self.situation):
            words = (
                f"the stack was calibrated by runs, the nearest {self.situation.apart:.1f} away:"
                f" errors on {counted(errors.own.runs, 'published run')} so predicted"
            )
        reach = errors.reach(self.situation)
        by_runs = not errors.by_own(self.situation)
        return replace(self._from(reach, reach, words), by_runs=by_runs)

    def _of_fit(self, fit: Calibration, speeds: Speeds | None) -> Interval:
        words = f"calibration {fit.group}: scatter of {counted(fit.cells, 'published run')}"
        if fit.assumed:
            words = f"calibration {fit.group} ({fit.assumed})"
        if speeds is None:
            reach = fit.factor * fit.quick_scatter
            return self._from(reach, reach, words)
        down, up = interval_halfwidths(self._squares(speeds), fit.factor * fit.scatter)
        return self._from(down, up, f"{words}; its constants moved")

    def _of_probe(self, scatter: Scatter, speeds: Speeds | None) -> Interval:
        words = (
            f"probe: scatter of {scatter.compute:.1%} in compute and of"
            f" {scatter.communication:.1%} in communication"
        )
        if speeds is None:
            sigmas = scatter.compute, scatter.communication
            shares = 1 - self.situation.exposed, self.situation.exposed
            reach = TAIL * math.hypot(*(a * b for a, b in zip(sigmas, shares, strict=True)))
            return self._from(reach, reach, f"{words}, each by its share of the round")
        down, up = interval_halfwidths(self._squares(speeds), 0.0)
        return self._from(down, up, f"{words}, each simulated")

    def _squares(self, speeds: Speeds) -> tuple[float, float]:
        pairs = [
            [(speed, times) for speed, (_, times) in zip(of_pair, pair, strict=True)]
            for of_pair, pair in zip(speeds, self.moved(), strict=True)
        ]
        return squares(self.tokens_per_s, pairs)

    def _from(self, down: float, up: float, source: str) -> Interval:
        """From how far it may fall and rise, as logarithms."""
        value = self.tokens_per_s
        return Interval(value * math.exp(-down), value * math.exp(up), source)


def _with_values(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    for path, value in values.items():
        cluster = replaced(cluster, path, value)
    return cluster


def interval_halfwidths(sums: tuple[float, float], scatter: float) -> tuple[float, float]:
    """How far log(prediction) reaches down and up, from `squares` and a scatter.

    Both are at the level of the interval already, and independent of each other.
    """
    down, up = sums
    return math.sqrt(down + scatter**2), math.sqrt(up + scatter**2)


def beyond_fit(
    fit: Calibration, strategy: Strategy, layout: Layout, run: Mapping[str, float]
) -> str:
    """A text: what is far from the runs of a fit; empty where the fit tells of the run."""
    far = (
        why_not_comparable(strategy, layout, fit.strategies),
        describe_extrapolation(run, fit.ranges),
    )
    return "; ".join(filter(None, far))


def calibration_of(cluster: Cluster, kind: RunKind) -> Calibration | None:
    """The fit whose constants the cluster has, if it was fitted to runs of the kind."""
    fits = (fit for fit in calibrations().values() if str(kind) in fit.kinds)
    return next((fit for fit in fits if fit.holds_for(cluster)), None)


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
    """How far a 90 % interval of the logarithm of their ratio reaches, by their own errors.

    inf for runs of two models, or on two clusters or stacks, whose errors are not alike.
    """
    pairs = error_model().pairs
    return pairs.reach(between(first, second)) if pairs and _alike(first, second) else math.inf


def _alike(first: Result, second: Result) -> bool:
    """Whether much of what is wrong with either is wrong with both."""
    return all(
        getattr(first, name) == getattr(second, name) for name in ("cluster", "model", "stack")
    )


_JOB = ("strategy", "tp", "cp", "ep", "pp", "micro_batch", "recompute", "precision", "attention")
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
    elif model.pairs:
        reach = model.pairs.reach(between(many, alone))
        ends = ratio * math.exp(-reach), ratio * math.exp(reach)
    return max(ends[0], ratio * down), min(ends[1], ratio * up)


def undecided(first: Result, second: Result) -> bool:
    """Whether either may be the faster one: their intervals overlap, and so do what they differ by.

    Two without an interval, such as measured ones, are never undecided.
    """
    if not overlaps(interval_of(first), interval_of(second)):
        return False
    return abs(math.log(first.tokens_per_s / second.tokens_per_s)) <= unshared(first, second)
