"""Facts: numbers with unit and source, as TOML holds them, and as users override them.

And published prices, and carbon of grids, which clusters name.
"""

import datetime as dt
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from co2sim.common import files
from co2sim.common.errors import CatalogError, given, nearest
from co2sim.common.files import is_folder, is_regular, text_of

Kind: TypeAlias = Literal["clusters", "gpus", "models", "stacks", "optimizers", "failures"]
Tree: TypeAlias = dict[str, Any]

_MAX_PLACES = 9
"""Digits of a place in a list."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One value of a file: where it stands, what it says, where it comes from."""

    path: str
    value: str
    source: str
    assumed: bool = False


def names(kind: Kind) -> list[str]:
    """Catalog keys of one kind."""
    folder = resources.files("co2sim.catalog") / kind
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )


def _folded(name: str) -> str:
    """A name as aliases are compared: capitals do not matter, nor which mark divides words."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


@cache
def _meant(kind: Kind) -> Mapping[str, str]:
    """Keys by all names that are meant so."""
    others = read_table("aliases").get(kind, {})
    keys = names(kind)
    listed = {_folded(other): key for key in others for other in others[key]}
    return listed | {_folded(key): key for key in keys}


def key_of(kind: Kind, name: str) -> str:
    """The catalog key that a name means: itself, or that whose alias it is; else the name.

    A model may have the name of its repository on the Hugging Face Hub, with its owner.
    """
    if name in names(kind):
        return name
    short = name.rpartition("/")[2] if kind == "models" else name
    return _meant(kind).get(_folded(short), name)


def is_file(reference: str) -> bool:
    """Whether a reference is a path, not a catalog key, nor a model of the Hub that is one."""
    if reference in {".", ".."} or _has_ending(reference):
        return True
    return "/" in reference and not _on_hub(reference)


def _has_ending(reference: str) -> bool:
    """Whether a reference ends as files of the catalog, of Hugging Face and of Python do."""
    return Path(reference).suffix in {".toml", ".json"} or is_source(reference)


def is_source(reference: str) -> bool:
    """Whether a reference names a Python file, and maybe a function of it: my_model.py:build."""
    return Path(reference).suffix.partition(":")[0] == ".py"


def _on_hub(reference: str) -> bool:
    """Whether OWNER/NAME means a model of the catalog, and no file is called so."""
    path = Path(reference)
    return (
        reference.count("/") == 1
        and reference.partition("/")[0] not in {"", ".", "..", "~"}
        and key_of("models", reference) in names("models")
        and not path.exists()
    )


_ON_HUB = re.compile(r"\w[\w.-]*/[\w.-]+")
"""What may be OWNER/NAME of a model on the Hugging Face Hub, and is no path such as ./model."""


def config_of(reference: str) -> Path | None:
    """The config.json of a folder, or of OWNER/NAME of the Hub in the cache of this machine."""
    inside = Path(reference) / "config.json"
    if is_regular(inside):
        return inside
    if not is_file(reference) or _has_ending(reference) or reference.count("/") != 1:
        return None
    if Path(reference).exists() or find_spec("huggingface_hub") is None:
        return None
    hub = import_module("huggingface_hub")
    try:
        path = hub.try_to_load_from_cache(reference, "config.json")
    except ValueError:  # no name that a model of the Hub may have
        return None
    return Path(path) if isinstance(path, str) else None


@lru_cache(maxsize=16)
def _toml(text: str) -> Tree:
    """The tree of a text, which a study reads for every one of its cases."""
    return files.toml(text)


def read(kind: Kind, reference: str) -> Tree:
    """The tree behind a catalog key, or a file of the user's: a path with a slash or a suffix."""
    if not reference.strip():
        raise CatalogError(
            f"the name of the {kind.removesuffix('s')} is empty; `co2sim list {kind}` shows those"
            " known (a file of yours: give its path, ending in .toml or .json)"
        )
    path = Path(reference)
    if kind == "models":
        path = config_of(reference) or path
    if is_file(reference) or path != Path(reference):
        of_a_kind = _has_ending(reference) or reference.startswith("/") or path.exists()
        if kind == "models" and not of_a_kind:
            raise _no_model(reference)
        text = _text(path, reference)
    else:
        key, keys = key_of(kind, reference), names(kind)
        if key not in keys:
            raise _unknown(kind, reference, keys)
        text = (resources.files("co2sim.catalog") / kind / f"{key}.toml").read_text("utf-8")
    if not text.strip():
        raise CatalogError(f"{reference} is empty")
    try:
        tree = files.json_tree(text) if path.suffix == ".json" else deepcopy(_toml(text))
    except ValueError as error:
        raise CatalogError(f"{reference}: {error}") from error
    if not isinstance(tree, dict):
        raise CatalogError(f"{reference}: expected a table of names and values")
    return tree


def _no_model(reference: str) -> CatalogError:
    """The refusal of a path, or of OWNER/NAME on the Hub, which this machine may get."""
    of_hub = (
        "of one on the Hugging Face Hub download config.json and give its path, or get it into the"
        f" cache of this machine: hf download {reference} config.json"
    )
    return CatalogError(
        f"{reference} is no file, and no model of the catalog (`co2sim list models`); "
        f"{of_hub if _ON_HUB.fullmatch(reference) else 'give one, or a folder with config.json'}"
    )


def _unknown(kind: Kind, reference: str, keys: Sequence[str]) -> CatalogError:
    """The refusal of a name; that of a cluster has the lines of a file that describes one."""
    what = f"unknown {kind.removesuffix('s')} {given(reference)}; "
    close = nearest(reference, keys)
    if kind != "clusters":
        of_yours = "a file of yours: give its path, ending in .toml or .json"
        return CatalogError(f"{what}{close} ({of_yours})")
    hint = close if close.startswith("did") else "`co2sim list clusters` shows those known."
    lines = " | ".join(A_CLUSTER)
    return CatalogError(
        f"{what}{hint} A file of yours, -c mine.toml, needs {len(A_CLUSTER)} lines: {lines}"
    )


A_CLUSTER = (
    'name = "mine"',
    'gpu = "h100"',
    "nodes = 4",
    "gpus_per_node = 8",
    'intra = {bandwidth = "450 GB/s", latency = "3 us"}',
    'inter = {bandwidth = "400 Gbit/s", latency = "14 us"}',
)
"""Lines of the least file of a cluster, as an example."""


def usual_sequence(parameters: float) -> Tree:
    """What is known of the sequences that models of about that size are trained on."""
    rows: list[Tree] = read_table("batches")["sequence"]
    return min(rows, key=lambda row: abs(math.log(row["parameters"] / max(1, parameters))))


def read_defaults() -> Tree:
    """What a cluster of GPUs has where its file does not say."""
    return deepcopy(read_table("defaults"))


@cache
def read_table(name: str) -> Tree:
    """A file of the catalog itself, beside its folders. It is shared: do not change it."""
    return _toml((resources.files("co2sim.catalog") / f"{name}.toml").read_text("utf-8"))


def _text(path: Path, reference: str) -> str:
    """The text of a file, without the byte order mark that some editors put before it."""
    if is_folder(path):
        raise CatalogError(
            f"{reference} is a folder without a config.json; give the path of a file that ends in"
            " .toml or .json"
        )
    try:
        return text_of(path)
    except UnicodeDecodeError as error:
        raise CatalogError(f"cannot read {reference}: it is not a text in UTF-8") from error
    except OSError as error:
        raise CatalogError(f"cannot read {reference}: {error.strerror}") from error


def override(tree: Tree, path: str, text: str) -> None:
    """Set the value at a dotted path, as text, in place."""
    node: Any = tree
    *parents, last = path.split(".")
    for parent in parents:
        if isinstance(node, list):
            node = node[_index(node, parent, path)]
        else:
            node = node.setdefault(parent, {})
        if not isinstance(node, dict | list) or (isinstance(node, dict) and _is_fact(node)):
            raise CatalogError(f"--set {path}: {parent!r} is a single value, not a table")
    where = _index(node, last, path) if isinstance(node, list) else last
    node[where] = {"value": text, "source": "set by the user"}


def _index(items: list[Any], text: str, path: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > _MAX_PLACES:
        index = len(items)
    else:
        index = int(text)
    if index >= len(items):
        raise CatalogError(
            f"--set {path}: {given(text)} is not a place in the list, 0 to {len(items) - 1}"
        )
    return index


def plain(tree: Mapping[str, Any]) -> Tree:
    """The tree with every fact replaced by its value."""

    def value_of(node: object) -> object:
        if isinstance(node, dict):
            return node["value"] if _is_fact(node) else plain(node)
        return [value_of(item) for item in node] if isinstance(node, list) else node

    return {key: value_of(node) for key, node in tree.items() if key not in {"source", "assumed"}}


def facts(
    tree: Mapping[str, Any], prefix: str = "", source: str = "", *, assumed: bool = False
) -> Iterator[Fact]:
    """Every fact of a tree, in file order; a table's `source` and `assumed` hold for all inside."""
    source, assumed = _origin(tree, prefix, source, assumed=assumed)
    for key, node in tree.items():
        path = f"{prefix}{key}"
        if key in {"source", "assumed", "name", "title", "kind"}:
            continue
        if isinstance(node, dict) and _is_fact(node):
            origin, marked = _origin(node, path, source, assumed=assumed)
            yield Fact(path, str(node["value"]), origin, marked)
        elif isinstance(node, dict):
            yield from facts(node, f"{path}.", source, assumed=assumed)
        elif isinstance(node, list) and node and all(isinstance(item, dict) for item in node):
            for index, item in enumerate(node):
                yield from facts(item, f"{path}.{index}.", source, assumed=assumed)
        else:
            yield Fact(path, str(node), source, assumed)


def _origin(node: Mapping[str, Any], path: str, source: str, *, assumed: bool) -> tuple[str, bool]:
    """Where a table or a fact says that it comes from, or what it inherits."""
    origin, marked = node.get("source", source), node.get("assumed", assumed)
    if not isinstance(origin, str) or not isinstance(marked, bool):
        raise CatalogError(f"{path}: source must be a text, and assumed true or false")
    return origin, marked


def _is_fact(node: Mapping[str, Any]) -> bool:
    return "value" in node and node.keys() <= {"value", "source", "assumed"}


RateKind: TypeAlias = Literal["prices", "grids", "nodes", "electricity", "ownership"]
"""Tables of the catalog: prices of rent, grids, and what `co2sim own` needs."""

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
    """A published figure; `low` and `high` are the ends of its range, None where none is known.

    `title` says in a few words what it is. A price is the default of the GPUs and clusters that
    `default_of` names.
    """

    name: str
    value: str
    date: str
    source: str
    low: str | None = None
    high: str | None = None
    title: str = ""
    default_of: tuple[str, ...] = ()

    def dated(self, today: dt.date | None = None) -> str:
        """Its year and month, and whether that is too long ago, by `today` (None: it is now)."""
        now = today or dt.datetime.now(dt.UTC).date()
        year, month = (int(part) for part in f"{self.date}-12".split("-")[:2])
        months = 12 * (now.year - year) + now.month - month
        return f"{self.date[:7]}{', more than two years old' if months > _OLD else ''}"


_OLD = 24
"""Months: by then prices have fallen or risen by a factor of two (prices.toml)."""


@cache
def rates(kind: RateKind) -> Mapping[str, Rate]:
    """All of one kind, by name."""
    return {name: Rate(name=name, **entry) for name, entry in read_table(kind).items()}


def default_price(cluster: str, gpu: str) -> str | None:
    """The name of the price of a cluster of the catalog, else of its GPU; None: none is known."""
    by_name = {of: rate.name for rate in rates("prices").values() for of in rate.default_of}
    return by_name.get(cluster) or by_name.get(gpu)


def put_rates(tree: Tree, changes: Mapping[str, str], usual: str | None) -> dict[str, str]:
    """Put prices and grids that are meant by name into the tree of a cluster, with their ranges.

    `grid` names a grid, and `price_per_gpu` may name a price, in the file or in `changes`; without
    one it is the `usual` price, if there is one. Gives the other changes. What a user changes has
    no range unless the user gives one. Raises CatalogError for unknown names, and where a grid and
    its intensity are both given.
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
    grid = rest.pop("grid", None) or _text_of(file_grid)
    if "grid_intensity" in changes:
        grid = None
    elif grid is None and "grid_intensity" not in tree:
        grid = DEFAULT_GRID
    if grid is not None:
        if "grid_intensity" in tree:
            raise CatalogError("grid and grid_intensity are both given; leave one of them out")
        _put_rate(tree, "grids", grid, assumed=grid == DEFAULT_GRID)
    _put_price(tree, rest, usual)
    tree.setdefault("pue", DEFAULT_PUE)
    return rest


def _put_price(tree: Tree, changes: dict[str, str], usual: str | None) -> None:
    """Put a price that is meant by name into the tree, and take it from the changes."""
    price = changes.get("price_per_gpu") or _text_of(tree.get("price_per_gpu"))
    if price is None and usual:
        _put_rate(tree, "prices", usual, assumed=True)
    elif price and price[0].isalpha():
        changes.pop("price_per_gpu", None)
        _put_rate(tree, "prices", price, assumed=False)


def _text_of(node: object) -> str | None:
    """The text of a value, or of a fact."""
    value = node.get("value") if isinstance(node, dict) else node
    return None if value is None else str(value)


def _put_rate(tree: Tree, kind: RateKind, name: str, *, assumed: bool) -> None:
    table = rates(kind)
    if name not in table:
        what = "grid" if kind == "grids" else "price"
        example = "grid_intensity='56 g/kWh'" if kind == "grids" else "price_per_gpu='2.5 USD/h'"
        raise CatalogError(
            f"unknown {what} {name!r}; {nearest(name, list(table))} (one of yours: {example})"
        )
    rate = table[name]
    when = rate.dated() if kind == "prices" else rate.date
    source = f"{rate.title or name}, {when}: {rate.source}"
    for field, value in zip(_FIELDS[kind], (rate.value, rate.low, rate.high), strict=True):
        if value is not None:
            tree[field] = {"value": value, "source": source, "assumed": assumed}
