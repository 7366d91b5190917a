"""The 90 % interval of a prediction, and where it comes from.

Three sources, the nearest first: the scatter of the probe that measured the cluster; the fit of the
constants that the cluster has (`calibrations`), which tells of runs that are near those fitted; the
errors on all published runs, of predictions that were not fitted to their source (`error_model`).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypeVar

from co2sim.common.units import counted
from co2sim.hardware.cluster import Cluster, Link, Scatter
from co2sim.models.workload import Model
from co2sim.prediction.calibrations import (
    Calibration,
    calibrations,
    describe_extrapolation,
    figures_of,
    replaced,
    squares,
)
from co2sim.prediction.error_model import EXPERT_RUNS, Situation, error_model
from co2sim.schedule.schedule import WORLD, Layout
from co2sim.strategies import LocalSteps, Strategy
from co2sim.strategies.fsdp import FSDP
from co2sim.strategies.zeropp import ZeroPP

Exchange: TypeAlias = Literal["gradients", "parameters", "quantized", "averages"]
Extent: TypeAlias = Literal["one node", "several nodes"]

_EXCHANGED: dict[str, Exchange] = {
    **dict.fromkeys(("ddp", "zero1", "zero2"), "gradients"),
    **dict.fromkeys(("zero3", "zeropp", "fsdp"), "parameters"),
}

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


def why_not_comparable(strategy: Strategy, layout: Layout, known: Collection[str]) -> str:
    """A text: what a strategy gathers otherwise than those of these names; empty if nothing.

    When blocks are gathered is the framework's own: what is known of FSDP, over all ranks, is not
    known of DeepSpeed's ZeRO-3, nor of groups. Gradients and averages are sent as a whole.
    """
    if _EXCHANGED.get(strategy.name) != "parameters":
        return ""
    there = f"there {' and '.join(known)}"
    if strategy.name not in known:
        return f"{strategy.name}, {there}"
    if isinstance(strategy, FSDP) and strategy.sharding(layout, WORLD).replicas:
        return f"{strategy.name} in groups, {there} over all GPUs"
    return ""


def kind_of(cluster: Cluster, strategy: Strategy, model: Model) -> RunKind | None:
    """The kind of a run on all of the cluster; None where nothing that is published is like it.

    That is so for other GPUs, for strategies that are not ours, and for models of images.
    """
    gpu = cluster.gpu.generation
    local = isinstance(strategy, LocalSteps)
    exchange = "averages" if local else _EXCHANGED.get(strategy.name)
    if isinstance(strategy, ZeroPP) and (strategy.qwz or strategy.qgz):
        exchange = "quantized"
    if isinstance(strategy, FSDP) and strategy.shard == 1:
        exchange = "gradients"
    if gpu is None or exchange is None or model.unit != "token":
        return None
    return RunKind(gpu, exchange, "several nodes" if cluster.nodes > 1 else "one node")


L = TypeVar("L", Link, Link | None)

Thoroughness: TypeAlias = Literal["quick", "full"]
"""quick: no further simulation; full: some further ones, with moved constants."""

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


def overlaps(one: Interval, other: Interval) -> bool:
    """Whether two predictions have intervals, and these overlap.

    Errors of two strategies on one cluster are alike, in part: their order is surer than this says.
    """
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.low <= other.high and other.low <= one.high
