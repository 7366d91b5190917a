"""Whether a run is near those whose errors are known: by its GPUs, links, model and numbers.

A fit, or the errors of a kind of runs, tell of runs like those that they are from. How far beyond
them a figure may lie is taken from predictions of runs that were left out of a fit: sequence and
larger models; see docs/validation.md. GPUs are near as long as NCCL's choice of a protocol, which
is not known, changes no more beyond the known runs than the interval says. Links may differ by a
factor of two, a step of the datasheets, and vocabularies by four, as those in use do; less latency
is near. What is further away has another interval (`intervals`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from co2sim.cluster import Cluster
from co2sim.schedule import DType
from co2sim.units import duration, scaled
from co2sim.workload import Model

Ranges: TypeAlias = Mapping[str, tuple[float, float]]
"""The least and the most of each figure among some runs."""

_BILLION = 1e9


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure: how many times less, or more, than in known runs is near; and how people see it.

    `most` is `more` where an interval is as wide as that of a kind; inf: any is near.
    """

    words: str
    less: float
    more: float
    most: float
    shown: Callable[[float], str]


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _large(value: float) -> str:
    return f"{value / 1e9:.3g} billion" if value >= _BILLION else f"{value / 1e6:.3g} million"


def _speed(value: float) -> str:
    return scaled(value, "bit/s")


def _share(value: float) -> str:
    return f"{value:.3g}"


_FIGURES: Mapping[str, _Figure] = {
    "gpus": _Figure("GPUs", math.inf, 2.0, 4.0, _whole),
    "intra": _Figure("inside nodes", 2.0, 2.0, 2.0, _speed),
    "inter": _Figure("a GPU between nodes", 2.0, 2.0, 2.0, _speed),
    "parameters": _Figure("parameters", 2.0, 4.0, 4.0, _large),
    "sequence": _Figure("tokens in a sequence", 8.0, 8.0, 8.0, _whole),
    "vocabulary": _Figure("tokens in the vocabulary", 4.0, 4.0, 4.0, _whole),
    "bits": _Figure("bits a number", 1.0, 1.0, 1.0, _whole),
    "intra_latency": _Figure("latency inside nodes", math.inf, 2.0, 4.0, duration),
    "inter_latency": _Figure("latency between nodes", math.inf, 2.0, 4.0, duration),
    "step_spread": _Figure("step_spread", 1.0, 1.0, math.inf, _share),
}


def figures_of(cluster: Cluster, model: Model, precision: str) -> dict[str, float]:
    """The figures of a run on all of the cluster; speeds in bit/s a GPU, latencies in seconds.

    `inter` is that of the narrowest place between nodes: network cards, switches, or sites;
    `inter_latency` that of the slowest.
    """
    found = {
        "gpus": float(cluster.nodes * cluster.gpus_per_node),
        "parameters": float(model.parameters),
        "sequence": float(model.tokens),
        "bits": 8.0 * DType(precision).bytes,
        "step_spread": cluster.step_spread,
    }
    if vocabulary := max(block.logits for block in model.blocks) / model.tokens:
        found["vocabulary"] = vocabulary
    if cluster.gpus_per_node > 1:
        found["intra"] = 8 * cluster.intra.bandwidth
        found["intra_latency"] = cluster.intra.latency
    if cluster.nodes > 1:
        found["inter"] = 8 * _between_nodes(cluster)
        far = cluster.wan.latency if cluster.sites > 1 and cluster.wan is not None else 0.0
        found["inter_latency"] = max(cluster.inter.latency, far)
    return found


def _between_nodes(cluster: Cluster) -> float:
    """Bytes per second that a GPU may send to other nodes at the narrowest place."""
    crossed = [tier for tier in cluster.inter.tiers if tier.nodes < cluster.nodes]
    narrow = max((tier.oversubscription * tier.congestion for tier in crossed), default=1.0)
    node = cluster.inter.bandwidth / narrow
    if cluster.sites > 1 and cluster.wan is not None:
        node = min(node, cluster.wan.bandwidth / cluster.nodes_per_site)
    return node / cluster.gpus_per_node


def ranges(runs: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """The least and the most of every figure that some of the runs have."""
    found: dict[str, tuple[float, float]] = {}
    for run in runs:
        for name, value in run.items():
            low, high = found.get(name, (value, value))
            found[name] = min(low, value), max(high, value)
    return {name: found[name] for name in _FIGURES if name in found}


def ranges_from(entry: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """From a record of the catalog."""
    return {name: (low, high) for name, (low, high) in entry.items()}


def beyond(run: Mapping[str, float], known: Ranges, *, wide: bool = False) -> str:
    """In words, which figures are far from known runs, such as "16,384 GPUs, there 8 to 512".

    Empty where none is. A figure that no known run has is not compared. `wide` is for an interval
    of a kind, which tells of more than that of a fit.
    """
    found = []
    for name, (low, high) in known.items():
        one = _FIGURES[name]
        more = one.most if wide else one.more
        most = math.inf if more == math.inf else high * more  # also of 0
        if name in run and not low / one.less <= run[name] <= most:
            there = " to ".join(dict.fromkeys(map(one.shown, (low, high))))
            found.append(f"{one.shown(run[name])} {one.words}, there {there}")
    return "; ".join(found)
