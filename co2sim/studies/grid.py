"""Many configurations from one: what varies, over which values, in all combinations."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_type_hints

from co2sim.catalog import load_cluster
from co2sim.catalog.facts import is_file
from co2sim.common import convert
from co2sim.common.convert import shown
from co2sim.common.errors import OptionError, nearest
from co2sim.hardware.cluster import Cluster, Link
from co2sim.prediction.question import Question
from co2sim.simulation.noise import Noise
from co2sim.strategies import parse, with_options
from co2sim.strategies.step import title

Grid: TypeAlias = Mapping[str, str | Iterable[Any]]
"""Paths, as `vary` takes them, with their values: "8, 16", or anything that yields values."""

Setting: TypeAlias = Mapping[str, Any]
"""One point of a grid: a value for every path."""

_MAX_CASES = 10_000
"""Of one study: hours of simulation, and what a reader can still sort."""
_OF_A_CASE = ("cluster", "model", "strategy", "stack", "optimizer", *convert.plain_fields(Question))
_OF_NOISE = convert.plain_fields(Noise)
_OF_A_CLUSTER = (
    *(n for n, hint in get_type_hints(Cluster).items() if Link not in {hint, *get_args(hint)}),
    "grid",
)
"""What `vary` changes by a single name; what is inside a link or a GPU has a dot in its path."""


def with_change(case: Question, path: str, value: Any) -> Question:
    """The case with one thing changed.

    `path` is a field of `Question` or of `Noise` that holds one value, an option of the strategy
    ("strategy.tau"), or anything that `overrides` takes ("inter.bandwidth", "model.layers"). The
    value may be a text.
    """
    if path.startswith("strategy."):
        return with_changes(case, {path: value})
    if path in _OF_A_CASE:
        return replace(case, **{path: value})
    if path in _OF_NOISE:
        return replace(case, noise=replace(case.noise, **convert.declared(Noise, {path: value})))
    if "." not in path and path not in _OF_A_CLUSTER:
        meant = nearest(path, [*_OF_A_CASE, *_OF_NOISE, *_OF_A_CLUSTER])
        raise OptionError(
            f"nothing is called {path!r}; {meant} (or strategy.OPTION, model.NAME, inter.NAME,"
            " intra.NAME, gpu.NAME, wan.NAME)"
        )
    return replace(case, overrides={**case.overrides, path: value})


def with_changes(case: Question, changes: Setting) -> Question:
    """The case with several things changed: the strategy first, then all its options at once."""
    options = {
        path.removeprefix("strategy."): convert.text(value)
        for path, value in changes.items()
        if path.startswith("strategy.")
    }
    rest = {path: value for path, value in changes.items() if not path.startswith("strategy.")}
    for path in sorted(rest, key=lambda path: path != "strategy"):
        case = with_change(case, path, rest[path])
    if not options:
        return case
    strategy = case.strategy
    if isinstance(strategy, str):
        strategy = parse(strategy)
    return replace(case, strategy=with_options(strategy, options))


def check(grid: Any) -> None:
    """Raise OptionError for what is no grid."""
    if not isinstance(grid, Mapping):
        raise OptionError(
            f"vary is {convert.shown(grid)}; it must map paths to values, such as"
            ' {"gpus": "8, 16"}'
        )
    for path, values in grid.items():
        if not isinstance(path, str):
            raise OptionError(f"vary: {convert.shown(path)} is not a path, such as 'gpus'")
        if values is None:
            raise OptionError(f"{path} has no values to vary over")


def settings(grid: Grid) -> list[Setting]:
    """All combinations, the last path fastest. Raises OptionError for none, or too many."""
    varied = axes(grid, _MAX_CASES, "; give a folder (--out) for more")
    return [dict(zip(varied, point, strict=True)) for point in product(*varied.values())]


def axes(grid: Grid, most: int, otherwise: str = "") -> dict[str, list[Any]]:
    """The values of every path. Raises OptionError for none, or for more than `most` cases."""
    check(grid)
    found = {path: _values(path, given) for path, given in grid.items()}
    if not found:
        raise OptionError("nothing varies; give a path with values, such as gpus=8,16")
    count = math.prod(map(len, found.values()))
    if count > most:
        sizes = " x ".join(str(len(axis)) for axis in found.values())
        raise OptionError(
            f"the grid has {sizes} = {count} cases; at most {most} are run{otherwise}"
        )
    for path, values in found.items():
        _refuse_twice(path, values)
    return found


def cases_of(case: Question, points: Sequence[Setting]) -> list[Question]:
    """The case at every setting. Raises OptionError for a path that is overridden already.

    Clusters and models are loaded, each once: what cannot be read is better said before any run.
    """
    refuse_both(case, points[0])
    cases = [with_changes(case, setting) for setting in points]
    check_inputs(cases)
    return cases


def refuse_both(case: Question, setting: Setting) -> None:
    """Raise OptionError for a path that is overridden and varied."""
    both = case.overrides.keys() & setting.keys()
    if both:
        raise OptionError(f"{both.pop()} is both overridden (--set) and varied (--vary)")


def check_inputs(cases: Sequence[Question]) -> None:
    """Load what the cases name, each combination once, and read their strategies."""
    loaded: set[object] = set()
    texts = [case.strategy for case in cases if isinstance(case.strategy, str)]
    for strategy in dict.fromkeys(texts):
        parse(strategy)
    for case in cases:
        inputs = (display_name(case.cluster), display_name(case.model), *case.overrides.items())
        if inputs not in loaded:
            case.load()
            loaded.add(inputs)


def over_sizes(
    job: Question, clusters: Sequence[Any], strategies: Sequence[Any], gpus: Any = None
) -> list[Question]:
    """Every strategy on every cluster at every GPU count; see `gpu_counts`.

    Raises OptionError for what is given twice, and for counts that a cluster cannot have.
    """
    for what, names in (
        ("cluster", [display_name(cluster) for cluster in clusters]),
        ("strategy", [strategy_title(strategy) for strategy in strategies]),
    ):
        if not names:
            raise OptionError(f"no {what} is given")
        if len(set(names)) < len(names):
            raise OptionError(f"a {what} is given twice: {', '.join(names)}")
    cases = [
        replace(job, cluster=cluster, strategy=strategy, gpus=count)
        for cluster in clusters
        for sizes in [gpu_counts(replace(job, cluster=cluster), gpus)]
        for strategy in strategies
        for count in sizes
    ]
    if len(cases) > _MAX_CASES:
        raise OptionError(f"these are {len(cases)} cases; at most {_MAX_CASES} are run")
    check_inputs(cases)
    return cases


def cases_by_panel(
    job: Question,
    clusters: Sequence[str],
    strategies: Sequence[Any],
    gpus: Any,
    points: Sequence[Setting],
) -> list[tuple[str, Question]]:
    """As `over_sizes` for each cluster at every setting: the name of its panel with every case.

    Raises OptionError for paths of what is compared inside of a panel, too.
    """
    for path in points[0]:
        if path in {"cluster", "strategy", "gpus"} or path.startswith("strategy."):
            flag = path.partition(".")[0]
            raise OptionError(f"--vary {path}: here give --{flag} as often as it takes")
    refuse_both(job, points[0])
    made = []
    for cluster, setting in product(clusters, points):
        name = ", ".join(filter(None, [cluster, setting_name(setting)]))
        cases = over_sizes(with_changes(job, setting), [cluster], strategies, gpus)
        made += [(name, case) for case in cases]
    if len(made) > _MAX_CASES:
        raise OptionError(f"these are {len(made)} cases; at most {_MAX_CASES} are run")
    return made


def gpu_counts(case: Question, given: Any = None) -> list[int]:
    """GPU counts: those given, or one node doubled up to the whole cluster, where sites divide."""
    cluster, changes = case.cluster, case.cluster_overrides
    loaded = cluster if isinstance(cluster, Cluster) else load_cluster(cluster, changes).value
    if given is not None:
        values = _values("gpus", given)
        _refuse_twice("gpus", values)
        counts = [replace(case, gpus=value).gpus for value in values]
        sizes = sorted(size for size in counts if size is not None)
        for size in sizes:
            loaded.resized(size)
        return sizes
    return list(_doubled(loaded))


_ALL = 64
"""Nodes up to which a plan tries every number of them."""
_APART = 1.08
"""How far numbers of more nodes are apart, as a ratio."""


def all_counts(case: Question) -> list[int]:
    """GPUs of every whole number of nodes of the cluster, of many only some, where sites divide."""
    cluster, changes = case.cluster, case.cluster_overrides
    loaded = cluster if isinstance(cluster, Cluster) else load_cluster(cluster, changes).value
    sizes, nodes = set(gpu_counts(case)), 1
    while nodes <= loaded.nodes:
        if nodes % min(loaded.sites, nodes) == 0:
            sizes.add(nodes * loaded.gpus_per_node)
        nodes = nodes + 1 if loaded.nodes <= _ALL else max(nodes + 1, int(nodes * _APART))
    return sorted(sizes)


def _doubled(cluster: Cluster) -> Iterator[int]:
    count, most = cluster.gpus_per_node, cluster.layout.world_size
    while count < most:
        nodes = count // cluster.gpus_per_node
        if nodes % min(cluster.sites, nodes) == 0:
            yield count
        count *= 2
    yield most


def display_name(value: Any) -> str:
    """A value of a grid in a table: objects by their name."""
    if isinstance(value, str):
        return value
    if hasattr(value, "schedule"):
        return title(value)
    return str(value.name) if hasattr(value, "name") else convert.text(value)


def setting_name(setting: Setting, between: str = ", ") -> str:
    """What a case varies, as a text."""
    return between.join(f"{path}={display_name(value)}" for path, value in setting.items())


_LONG_NAME = 40
"""Characters of the name of an offer."""


def offer_name(cluster: Any) -> str:
    """A cluster as people name it: by its key in the catalog, else by its name up to a colon."""
    if isinstance(cluster, str) and not is_file(cluster):
        return cluster
    loaded = cluster if isinstance(cluster, Cluster) else load_cluster(cluster).value
    short = loaded.name.partition(":")[0].strip()
    return short if len(short) <= _LONG_NAME else f"{short[: _LONG_NAME - 1]}…"


def short_names(clusters: Iterable[Any]) -> dict[str, str]:
    """What screens and pages call each `display_name`, in full: the key of the catalog, or a file.

    A file is called as it is without its folder and ending, where that tells it from the others.
    """
    named = {display_name(cluster): offer_name(cluster) for cluster in clusters}
    stems = {key: Path(key).stem if is_file(key) else name for key, name in named.items()}
    every = list(stems.values())
    return {key: stem if every.count(stem) == 1 else key for key, stem in stems.items()}


def strategy_title(strategy: Any) -> str:
    """The strategy as results name it, but for numbers that are still to be chosen."""
    if isinstance(strategy, str):
        return title(parse(strategy))
    return title(strategy) if hasattr(strategy, "schedule") else convert.shown(strategy)


def _values(path: str, given: Any) -> list[Any]:
    """The values of one path."""
    if isinstance(given, str):
        return _split(path, given)
    values = list(given) if isinstance(given, Iterable) else [given]
    if not values:
        raise OptionError(f"{path} has no values to vary over")
    missing = any(value is None for value in values)
    if missing and not path.startswith("strategy."):  # there "none" may be a choice
        raise OptionError(f"{path}: None is no value to vary over; give numbers or texts")
    return values


def _refuse_twice(path: str, values: Sequence[Any]) -> None:
    """Raise OptionError for a value that is there twice, also where it is written in two ways."""
    seen: dict[Any, Any] = {}
    for value in values:
        key = _meaning(path, value)
        if key in seen:
            first, other = display_name(seen[key]), display_name(value)
            same = f"{first} is" if first == other else f"{first} and {other} are the same,"
            raise OptionError(f"{path}: {same} given twice")
        seen[key] = value


def _meaning(path: str, value: Any) -> Any:
    """What is equal for two values of a path that mean the same."""
    if path == "strategy":
        return strategy_title(value)
    if path in {"cluster", "model"}:
        return value if isinstance(value, str) else id(value)  # objects may share a name
    for owner, names in ((Question, _OF_A_CASE), (Noise, _OF_NOISE)):
        if path in names:
            return convert.declared(owner, {path: value})[path]
    text = display_name(value)
    try:
        return convert.number(path, text)
    except OptionError:
        return text.lower() if path.startswith("strategy.") else text


def _split(path: str, text: str) -> list[str]:
    """Values between semicolons, or between commas; those inside parentheses belong to a value.

    So do those before an option of a strategy: "co2:tau=48,worker=node, ddp" are two.
    """
    parts = text.split(";") if ";" in text else convert.outside_parentheses(text.split(","))
    values: list[str] = []
    for part in parts:
        if path == "strategy" and values and ":" in values[-1] and re.match(r"\s*\w+\s*=", part):
            values[-1] += f",{part}"
        else:
            values.append(part.strip())
    if not all(values):
        raise OptionError(f"{path}: {text!r} has an empty value")
    return values


MAX_CASES = 10_000_000
"""Of a table that is written as it grows: their keys take 240 MB, a tenth of a day on 100 cores."""
_MAX_SHARDS = 10_000
_TRIED = 1000
"""Values of a path that are read before anything runs: a second or two."""


@dataclass(frozen=True)
class LazyGrid:
    """A case at every point of a grid, the last path fastest."""

    case: Question
    axes: dict[str, Sequence[Any]]

    @classmethod
    def of(cls, case: Question, given: Grid) -> "LazyGrid":
        """Of values as users give them.

        Raises Co2simError for a grid that cannot be, and for a value with which no case can be:
        of each path the first thousand are tried, the others being the first of theirs.
        """
        made = cls(case, dict(axes(given, MAX_CASES)))
        first = made.setting(0)
        refuse_both(case, first)
        for path, values in made.axes.items():
            tried = [with_changes(case, {**first, path: value}) for value in values[:_TRIED]]
            check_inputs(tried)
        return made

    def __len__(self) -> int:
        return self._sizes[0]

    @cached_property
    def _sizes(self) -> list[int]:
        """How many cases there are from each path on; 1 behind the last."""
        gpu_counts = [len(values) for values in self.axes.values()]
        return [math.prod(gpu_counts[path:]) for path in range(len(gpu_counts) + 1)]

    def setting(self, index: int) -> Setting:
        """What varies there."""
        sizes = self._sizes[1:]
        return {
            path: values[index // size % len(values)]
            for (path, values), size in zip(self.axes.items(), sizes, strict=True)
        }

    def at(self, index: int) -> Question:
        """The case there. Raises Co2simError where none can be."""
        return with_changes(self.case, self.setting(index))


@dataclass(frozen=True, slots=True)
class Shard:
    """Every `count`-th case, from the `number`-th on: so all shards take about as long."""

    number: int = 1
    count: int = 1

    @classmethod
    def read(cls, text: Any) -> "Shard":
        """From a text such as 3/16. Raises OptionError for anything else."""
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*/\s*([0-9]{1,9})\s*", str(text))
        number, count = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= count <= _MAX_SHARDS:
            raise OptionError(
                f"shard is {shown(text)}; it must be N/COUNT, such as 3/16: the third of sixteen,"
                f" at most {_MAX_SHARDS:,}"
            )
        return cls(number, count)

    def places(self, cases: int) -> range:
        """The places of its cases, among all."""
        return range(self.number - 1, cases, self.count)

    @property
    def prefix(self) -> str:
        """What the names of its files begin with; nothing where it is all."""
        return "" if self.count == 1 else f"shard-{self.number}-of-{self.count}-"
