"""The 90 % interval of a prediction, and where it comes from.

Three sources, the nearest first: the scatter of the probe that measured the cluster; the fit of the
constants that the cluster has (`calibrations`); the errors on published runs of the same kind
(`kinds`), of predictions that were not fitted to them. The last two tell of runs that are `near`.
Where no published run of the kind is, it is the errors on runs of all kinds, each counted alike.
"""

import math
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar

from co2sim.common.units import counted
from co2sim.hardware.cluster import Cluster, Link
from co2sim.models.workload import Model
from co2sim.prediction.calibrations import (
    CATALOG,
    Calibration,
    Ranges,
    calibrations,
    describe_extrapolation,
    figures_of,
    ranges_from,
    replaced,
    squares,
)
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

ERRORS = "published_errors.toml"
"""The record of errors on published runs by kind."""

NOTHING_NEAR = "no published run is near this"
ALL_KINDS = "errors on published runs of all kinds, each alike"

TAIL = 1.645
"""Standard deviations of a normal distribution that a 90 % interval reaches to both sides."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Ends of a 90 % interval, both None for what was measured, and its source as a text."""

    low: float | None
    high: float | None
    source: str


@dataclass(frozen=True, slots=True)
class KindErrors:
    """Errors of predictions on published runs of one kind, none of which was fitted to its run.

    `low` and `high` are the ends of a 90 % interval of log(published / predicted) of a further run;
    `runs` says of how many runs of which source they are, and `ranges` where these lie (`near`).
    """

    low: float
    high: float
    runs: Mapping[str, int]
    ranges: Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A prediction: of what, the tokens/s, and the share of the round that waits for the network.

    `precision` names the type of numbers. `again` simulates it on a changed cluster of the same
    layout, and gives tokens/s.
    """

    cluster: Cluster
    strategy: Strategy
    model: Model
    precision: str
    tokens_per_s: float
    exposed_share: float
    again: Callable[[Cluster], float]
    alike: bool = True
    """Whether errors on published runs tell of it: they share no layers, and have no pipeline."""

    def interval(self, thoroughness: Thoroughness = "quick") -> Interval:
        """Its interval."""
        full = thoroughness == "full"
        if self.cluster.scatter is not None:
            return self._of_probe(full=full)
        kind = kind_of(self.cluster, self.strategy, self.model) if self.alike else None
        run = figures_of(self.cluster, self.model, self.precision)
        fit = None if kind is None else calibration_of(self.cluster, kind)
        far = beyond_fit(fit, self.strategy, self.cluster.layout, run) if fit else ""
        if fit and not far:
            return self._of_fit(fit, full=full)
        known, words = nearest_errors(kind, run, told=bool(far))
        if fit:
            words = f"far from calibration {fit.group} ({far}): {words}"
        return self._from(-known.low, known.high, words)

    def _of_fit(self, fit: Calibration, *, full: bool) -> Interval:
        words = f"calibration {fit.group}: scatter of {counted(fit.cells, 'published run')}"
        if fit.assumed:
            words = f"calibration {fit.group} ({fit.assumed})"
        if not full:
            reach = fit.factor * fit.quick_scatter
            return self._from(reach, reach, words)

        def predicted(values: Mapping[str, float]) -> float:
            cluster = self.cluster
            for path, value in values.items():
                cluster = replaced(cluster, path, value)
            return self.again(cluster) if values else self.tokens_per_s

        down, up = interval_halfwidths(
            fit.moves(self.cluster.gpu.name, predicted), fit.factor * fit.scatter
        )
        return self._from(down, up, f"{words}; its constants moved")

    def _of_probe(self, *, full: bool) -> Interval:
        scatter = self.cluster.scatter
        assert scatter is not None
        sigmas = scatter.compute, scatter.communication
        words = (
            f"probe: scatter of {scatter.compute:.1%} in compute and of"
            f" {scatter.communication:.1%} in communication"
        )
        if not full:
            shares = 1 - self.exposed_share, self.exposed_share
            reach = TAIL * math.hypot(*(a * b for a, b in zip(sigmas, shares, strict=True)))
            return self._from(reach, reach, f"{words}, each by its share of the round")

        def predicted(factors: Mapping[str, float]) -> float:
            return self.again(faster(self.cluster, **factors))

        pairs = [
            [({name: math.exp(way * TAIL * sigma)}, 1.0) for way in (1, -1)]
            for name, sigma in zip(("compute", "communication"), sigmas, strict=True)
        ]
        down, up = interval_halfwidths(squares(math.log(self.tokens_per_s), pairs, predicted), 0.0)
        return self._from(down, up, f"{words}, each simulated")

    def _from(self, down: float, up: float, source: str) -> Interval:
        """From how far it may fall and rise, as logarithms."""
        value = self.tokens_per_s
        return Interval(value * math.exp(-down), value * math.exp(up), source)


def interval_halfwidths(sums: tuple[float, float], scatter: float) -> tuple[float, float]:
    """How far log(prediction) reaches down and up, from `Calibration.moves` and a scatter.

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


def nearest_errors(
    kind: RunKind | None, run: Mapping[str, float], *, told: bool = False
) -> tuple[KindErrors, str]:
    """Errors on published runs, and their name: of the kind where the run is near, else all.

    What is far from runs of the kind is left out where it has been `told`.
    """
    known = kind_errors().get(kind)
    far = describe_extrapolation(run, known.ranges, wide=True) if known else ""
    if known and not far:
        words = f"errors on published runs of the kind ({kind})"
    else:
        known = other_errors()
        words = f"{NOTHING_NEAR} ({far})" if far and not told else NOTHING_NEAR
        words += f": {ALL_KINDS}"
    counts = ", ".join(f"{source} {count}" for source, count in known.runs.items())
    return known, f"{words}: {counts}"


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


@cache
def kind_errors() -> Mapping[RunKind | None, KindErrors]:
    """The record of errors on published runs, by kind."""
    return {
        RunKind(entry["gpu"], entry["exchange"], entry["extent"]): _read(entry)
        for entry in _record()["kind"]
    }


@cache
def other_errors() -> KindErrors:
    """Errors on a run of a kind without published runs: those of all kinds, each alike."""
    return _read(_record()["other"])


def _record() -> Mapping[str, Any]:
    return tomllib.loads((CATALOG / ERRORS).read_text("utf-8"))


def _read(entry: Mapping[str, Any]) -> KindErrors:
    lie = ranges_from(entry.get("ranges", {}))
    return KindErrors(entry["low"], entry["high"], entry["runs"], lie)
