"""The fits behind the catalog's constants: how uncertain they are, and what follows from it."""

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, TypeAlias, TypeVar

import numpy as np

from co2sim.common.errors import OptionError
from co2sim.common.units import duration, scaled
from co2sim.hardware.cluster import Cluster
from co2sim.models.operators import Model
from co2sim.schedule.schedule import DType

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


def describe_extrapolation(run: Mapping[str, float], known: Ranges, *, wide: bool = False) -> str:
    """A text: which figures are far from known runs, such as "16,384 GPUs, there 8 to 512".

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


T = TypeVar("T")

CATALOG = resources.files("co2sim.catalog")
RECORD = "calibrations.toml"
"""The record of the fits in the catalog: what was fitted on what, how well, and how certain."""

_MIDDLE = (0.05, 0.95)
"""The shares of its range between which a number that was measured elsewhere is moved."""
_LINEAR = 0.2
"""The share of its value by which a constant is moved at most; of a quarter of its range near 0."""

Move: TypeAlias = tuple[dict[str, float], float]
"""Values by path, and how many times their effect on a logarithm counts."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the catalog's record says of a fit: its errors, and how uncertain its constants are.

    `paths` are places in a `Cluster`, `values` what was fitted and `bounds` what is possible, in SI
    units like their `covariance`; `gpus` are the names of the GPUs that each constant holds for.
    `external` are paths of numbers that were measured elsewhere, with their ranges. `scatter` is
    the standard deviation of log(predicted / published), and `assumed` says where that is from if
    not from this fit. An interval reaches `factor` standard deviations to both sides; `coverage` is
    the share of cells, left out of the fit, in such intervals. `kinds` are those of the runs that
    were fitted to, or checked with, `strategies` names those of these runs, and `ranges` says where
    they lie (`describe_extrapolation`). `mape`, `cross_validated` and `left_out` (by label) are
    mean absolute errors as fractions; `left_out_errors` are log(predicted / published) of the cells
    when they are left out, in their order.
    """

    group: str
    constants: tuple[str, ...]
    paths: tuple[str, ...]
    values: tuple[float, ...]
    bounds: tuple[tuple[float, float], ...]
    gpus: tuple[tuple[str, ...], ...]
    external: Mapping[str, tuple[float, float]]
    covariance: tuple[tuple[float, ...], ...]
    scatter: float
    factor: float
    kinds: tuple[str, ...]
    strategies: tuple[str, ...]
    ranges: Ranges
    cells: int
    mape: float
    cross_validated: float | None
    coverage: float | None
    left_out: Mapping[str, float]
    left_out_errors: tuple[float, ...]
    assumed: str

    @classmethod
    def of(cls, group: str, entry: Mapping[str, Any]) -> "Calibration":
        """From the record."""
        external = entry.get("external", {}).items()
        return cls(
            group=group,
            constants=tuple(entry["constants"]),
            paths=tuple(entry["paths"]),
            values=tuple(entry["values"]),
            bounds=tuple((low, high) for low, high in entry["bounds"]),
            gpus=tuple(tuple(names) for names in entry["gpus"]),
            external={path: (low, high) for path, (low, high) in external},
            covariance=tuple(tuple(row) for row in entry["covariance"]),
            scatter=float(entry["scatter"]),
            factor=float(entry["interval_factor"]),
            kinds=tuple(entry["kinds"]),
            strategies=tuple(entry["strategies"]),
            ranges=ranges_from(entry["ranges"]),
            cells=int(entry["cells"]),
            mape=float(entry["mape"]),
            cross_validated=entry.get("cross_validated"),
            coverage=entry.get("coverage"),
            left_out=entry.get("left_out", {}),
            left_out_errors=tuple(entry.get("left_out_errors", ())),
            assumed=entry.get("assumed", ""),
        )

    @property
    def quick_scatter(self) -> float:
        """The scatter with the uncertainty of the constants, as large as it is in the mean cell.

        The variance of a fitted value is, in the mean over the cells of a fit, constants / cells of
        the scatter's (the trace of the hat matrix; Draper and Smith, Applied Regression Analysis).
        """
        return self.scatter * math.sqrt(1 + len(self.constants) / self.cells)

    def on(self, gpu: str) -> list[int]:
        """The places of the constants that hold for a GPU."""
        return [place for place, names in enumerate(self.gpus) if gpu in names]

    def holds_for(self, cluster: Cluster) -> bool:
        """Whether the cluster has all constants of its GPU, with the values that were fitted.

        On one node those of the links between nodes do not matter.
        """
        found = [
            (value_at(cluster, self.paths[place]), self.values[place])
            for place in self.on(cluster.gpu.name)
            if cluster.nodes > 1 or not self.paths[place].startswith("inter.")
        ]
        return bool(found) and all(
            value is not None and math.isclose(value, fitted, rel_tol=1e-9, abs_tol=1e-15)
            for value, fitted in found
        )

    def moves(self, gpu: str) -> list[list[Move]]:
        """Pairs of values by path, to simulate: see `squares`.

        The constants of the GPU move
        along each axis of their covariance, both ways, as far as the interval's level asks, but not
        beyond their bounds. The covariance is that of a linear model: where it would move a
        constant by more than a fifth, which it says little about, the effect of a fifth is
        extrapolated. Communication that is hidden on one side may be exposed on the other, so both
        sides are kept apart. External numbers move over the middle nine tenths of their range.
        """
        mine = self.on(gpu)
        low, high = np.array([self.bounds[place] for place in mine]).T
        values, scales = np.array(self.values)[mine], high - low
        covariance = np.array(self.covariance)[np.ix_(mine, mine)]
        variances, axes = np.linalg.eigh(covariance / np.outer(scales, scales))
        paths = [self.paths[place] for place in mine]
        pairs: list[list[Move]] = []
        for variance, axis in zip(variances, axes.T, strict=True):
            step = axis * scales * self.factor * math.sqrt(max(0.0, float(variance)))
            furthest = _LINEAR * np.maximum(np.abs(values), scales / 4)
            times = max(1.0, float(np.max(np.abs(step) / furthest)))
            both = (np.clip(values + way * step / times, low, high) for way in (1, -1))
            pairs.append([(dict(zip(paths, map(float, v), strict=True)), times) for v in both])
        for path, (least, most) in self.external.items():
            pairs.append([({path: least + share * (most - least)}, 1.0) for share in _MIDDLE])
        return pairs


def squares(base: float, pairs: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """Sums over pairs of the squares by which log(prediction) falls and rises most, from `base`.

    Each of a pair is a prediction, and how many times its effect counts.
    """
    down = up = 0.0
    for pair in pairs:
        effects = [0.0, *((math.log(value) - math.log(base)) * times for value, times in pair)]
        down += min(effects) ** 2
        up += max(effects) ** 2
    return down, up


def replaced(thing: T, path: str, value: float) -> T:
    """A copy of a frozen dataclass with the value at a dotted path replaced.

    An efficiency that is a table becomes the same at every size.
    """
    first, _, rest = path.partition(".")
    if not is_dataclass(thing) or first not in {field.name for field in fields(thing)}:
        raise OptionError(f"{type(thing).__name__} has no {first!r}")
    old = getattr(thing, first)
    new: Any = replaced(old, rest, value) if rest else value
    if isinstance(old, tuple):
        new = tuple((size, value) for size, _ in old)
    return replace(thing, **{first: new})  # type: ignore[type-var]


def value_at(cluster: Cluster, path: str) -> float | None:
    """The number at a dotted path, of a table the first; None where the cluster has none."""
    value: Any = cluster
    for part in path.split("."):
        value = getattr(value, part, None)
    if isinstance(value, tuple):
        value = value[0][1] if value else None
    return None if value is None else float(value)


def record() -> dict[str, Any]:
    """The fits behind the catalog's constants, by group, as the file has them."""
    return tomllib.loads((CATALOG / RECORD).read_text("utf-8"))


@cache
def calibrations() -> Mapping[str, Calibration]:
    """The fits behind the catalog, by group."""
    return {name: Calibration.of(name, entry) for name, entry in record().items()}
