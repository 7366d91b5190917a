"""Prices of GPUs and grids of electricity by name: published, with date, source and range."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, TypeAlias

from co2sim.catalog.facts import Tree
from co2sim.common.errors import CatalogError, nearest

RateKind: TypeAlias = Literal["prices", "grids"]

_FIELDS: Mapping[RateKind, tuple[str, str, str]] = {
    "prices": ("price_per_gpu", "price_low", "price_high"),
    "grids": ("grid_intensity", "grid_intensity_low", "grid_intensity_high"),
}
"""The numbers of a cluster that each sets: the value, and the ends of its range."""

DEFAULT_PUE = {
    "value": 1.58,
    "assumed": True,
    "source": "average of data centres in 2023: default; Uptime Institute, Global Data Center"
    " Survey 2023, and 1.55 to 1.59 since about 2020 (Uptime Intelligence, update 221,"
    " 23 November 2023)",
}
DEFAULT_GRID = "world"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A published figure; `low` and `high` are the ends of its range, None where none is known."""

    name: str
    value: str
    date: str
    source: str
    low: str | None = None
    high: str | None = None


@cache
def rates(kind: RateKind) -> Mapping[str, Rate]:
    """All of one kind, by name."""
    text = (resources.files("co2sim.catalog") / f"{kind}.toml").read_text("utf-8")
    return {name: Rate(name=name, **entry) for name, entry in tomllib.loads(text).items()}


def put_rates(tree: Tree, changes: Mapping[str, str]) -> dict[str, str]:
    """Put prices and grids that are meant by name into the tree of a cluster, with their ranges.

    `grid` names a grid, and `price_per_gpu` may name a price, in the file or in `changes`. Gives
    the other changes. What a user changes has no range unless the user gives one. Raises
    CatalogError for unknown names, and where a grid and its intensity are both given.
    """
    rest = dict(changes)
    if "grid" in changes and "grid_intensity" in changes:
        raise CatalogError("grid and grid_intensity are both given; leave one of them out")
    for kind in _FIELDS:
        value, low, high = _FIELDS[kind]
        if value in changes or (kind == "grids" and "grid" in changes):
            for name in (value, low, high):
                tree.pop(name, None)
    file_grid = tree.pop("grid", None)
    grid = rest.pop("grid", None) or _text(file_grid)
    if "grid_intensity" in changes:
        grid = None
    elif grid is None and "grid_intensity" not in tree:
        grid = DEFAULT_GRID
    if grid is not None:
        if "grid_intensity" in tree:
            raise CatalogError("grid and grid_intensity are both given; leave one of them out")
        _put(tree, "grids", grid, assumed=grid == DEFAULT_GRID)
    price = rest.get("price_per_gpu") or _text(tree.get("price_per_gpu"))
    if price and price[0].isalpha():
        rest.pop("price_per_gpu", None)
        _put(tree, "prices", price, assumed=False)
    tree.setdefault("pue", DEFAULT_PUE)
    return rest


def _text(node: object) -> str | None:
    """The text of a value, or of a fact."""
    value = node.get("value") if isinstance(node, dict) else node
    return None if value is None else str(value)


def _put(tree: Tree, kind: RateKind, name: str, *, assumed: bool) -> None:
    known = rates(kind)
    if name not in known:
        what = "grid" if kind == "grids" else "price"
        example = "grid_intensity='56 g/kWh'" if kind == "grids" else "price_per_gpu='2.5 USD/h'"
        raise CatalogError(
            f"unknown {what} {name!r}; {nearest(name, list(known))} (one of yours: {example})"
        )
    rate = known[name]
    source = f"{name}, {rate.date}: {rate.source}"
    for field, value in zip(_FIELDS[kind], (rate.value, rate.low, rate.high), strict=True):
        if value is not None:
            tree[field] = {"value": value, "source": source, "assumed": assumed}
