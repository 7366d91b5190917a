"""A recorded cluster with some numbers changed, as `--set` does with those of a file."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from pydantic import ValidationError

from co2sim.catalog.facts import override, plain
from co2sim.catalog.rates import put_rates
from co2sim.catalog.specs import ClusterSpec
from co2sim.cluster import GPU, Cluster
from co2sim.errors import OptionError
from co2sim.units import Unit
from co2sim.validation import Place, first_problem, names_at

_INTENSITIES = "grid_intensity", "grid_intensity_low", "grid_intensity_high"
UNITS: dict[str, Unit] = {
    "bandwidth": "B/s",
    "latency": "s",
    "burst": "B",
    "burst_bandwidth": "B/s",
    "call_interference": "s",
    "call_overhead": "s",
    "wake_up": "s",
    "fully_idle": "s",
    "network_overhead": "s",
    "memory": "B",
    "memory_bandwidth": "B/s",
    "launch_overhead": "s",
    **dict.fromkeys(("tdp", "idle_power", "node_power"), "W"),
    **dict.fromkeys(_INTENSITIES, "kg/kWh"),
}
"""Units of the numbers that have one; the others are plain."""


def changed(cluster: Cluster, changes: Mapping[str, str]) -> Cluster:
    """The cluster with texts such as "25 Gbit/s" at dotted paths such as "inter.bandwidth".

    Raises OptionError, or CatalogError, in one line when anything is unknown or wrong.
    """
    if "gpu" in changes:
        raise OptionError("--set gpu: name a whole cluster with --cluster as well, or set gpu.NAME")
    tree = _texts(asdict(cluster)) | {"gpu": _gpu(cluster.gpu)}
    if cluster.calls:
        tree["calls"] = {kind: f"{more!r} s" for kind, more in asdict(cluster.calls).items()}
    shown = ", ".join(f"{p}={t}" for p, t in changes.items())
    currency = tree.pop("currency")  # a file says it with the price
    for name in ("price_per_gpu", "price_low", "price_high"):
        if name in tree:
            tree[name] = f"{tree[name]!r} {currency}/s"
    changes = put_rates(tree, changes)
    for path, text in changes.items():
        override(tree, path, text)
    tree["name"] = f"{cluster.name}, with {shown}"
    try:
        return ClusterSpec.model_validate(plain(tree)).build()
    except ValidationError as error:
        problem = first_problem(error, partial(names_at, ClusterSpec), _dotted)
        raise OptionError(f"--set: {problem}") from error


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


def _texts(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers as a file states them, with units."""
    texts: dict[str, Any] = {}
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            texts[name] = _texts(value)
        elif value is not None:
            texts[name] = f"{value!r} {UNITS[name]}" if name in UNITS else value
    return texts


def _gpu(gpu: GPU) -> dict[str, Any]:
    tree = _texts(asdict(gpu))
    tree["peak"] = {precision: f"{speed!r} FLOP/s" for precision, speed in gpu.peak.items()}
    tree["efficiency"] = [
        {"flops": f"{size!r} FLOP", "value": value} for size, value in gpu.efficiency
    ]
    return tree
