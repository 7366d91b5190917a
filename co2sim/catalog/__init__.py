"""Clusters, GPUs and models by name or file, with overrides and the source of every number."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from co2sim.catalog.facts import (
    Fact,
    Kind,
    Tree,
    config_of,
    default_price,
    facts,
    is_file,
    is_source,
    key_of,
    names,
    override,
    plain,
    put_rates,
    read,
    read_defaults,
    usual_sequence,
)
from co2sim.common.errors import CatalogError, OptionError
from co2sim.common.errors import given as shown
from co2sim.common.files import is_below, is_regular
from co2sim.common.validation import Place, first_problem, names_at
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.failures import ORIGINS, Failures
from co2sim.models.operators import Model
from co2sim.training.optimizer import Optimizer
from co2sim.training.stack import CHANGED, Stack

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

__all__ = [
    "DEFAULT_STACK",
    "NO_FAILURES",
    "Contents",
    "Entry",
    "Fact",
    "cluster_contents",
    "key_of",
    "load_cluster",
    "load_failures",
    "load_model",
    "load_optimizer",
    "load_stack",
    "model_contents",
    "names",
    "optimizer_contents",
    "stack_contents",
]

T = TypeVar("T")

_MAX_PARAMETERS = 10**15
"""Of a model: a thousand times the largest that are trained."""

_MAX_KEPT = 384
"""Clusters, models and stacks of the catalog that are kept, with their overrides."""

_NONE = {"value": 0, "assumed": True, "source": "default, not measured: none"}
_KIND_OF: Mapping[str, Kind] = {"gpu": "gpus", "failures": "failures"}
"""What a cluster may name instead of having its table."""
NO_FAILURES = "none"
"""The name of failures where none are to be counted."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """What was loaded, and the facts that it was made from."""

    value: T
    facts: tuple[Fact, ...]

    @property
    def assumed(self) -> tuple[Fact, ...]:
        """The facts that no source supports."""
        return tuple(fact for fact in self.facts if fact.assumed)


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What stands in the files of a cluster or a model: no file has to be read again.

    `tree` is never changed. `chosen` are facts about what the files name. `price` names the
    price of a cluster whose file gives none.
    """

    name: str
    tree: Tree
    chosen: tuple[Fact, ...] = ()
    price: str | None = None


def cluster_contents(reference: str, overrides: Mapping[str, str]) -> Contents | None:
    """What a user's files say of a cluster, with its GPU and failures; None if all is catalog.

    Of `overrides` those count that name a GPU or failures. Raises CatalogError like `load_cluster`.
    """
    named = (overrides[name] for name in _KIND_OF if name in overrides)
    return _of_cluster(reference, overrides) if any(map(is_file, (reference, *named))) else None


def model_contents(reference: str) -> Contents | None:
    """What a user's file says of a model; None for a key of the catalog. Raises CatalogError."""
    return Contents(reference, _of_model(reference)) if _is_own(reference) else None


def stack_contents(reference: str) -> Contents | None:
    """What a user's file says of a stack; None for a key of the catalog. Raises CatalogError."""
    return Contents(reference, read("stacks", reference)) if is_file(reference) else None


def optimizer_contents(reference: str) -> Contents | None:
    """What a user's file says of an optimizer; None for a key of the catalog.

    Raises CatalogError.
    """
    return Contents(reference, read("optimizers", reference)) if is_file(reference) else None


def _is_own(reference: str) -> bool:
    """Whether a model is a user's: a file, or a folder as of Hugging Face."""
    return is_file(reference) or config_of(reference) is not None


def _of_cluster(reference: str, overrides: Mapping[str, str]) -> Contents:
    tree, changes = read("clusters", reference), dict(overrides)
    chosen: list[Fact] = []
    price = _usual_price(tree, reference, changes)
    for name, kind in _KIND_OF.items():
        chosen += _named(tree, reference, changes, name, kind)
    return Contents(reference, tree, tuple(chosen), price)


def _usual_price(tree: Tree, reference: str, changes: Mapping[str, str]) -> str | None:
    """The name of the price of what is rented: a cluster of the catalog, or its GPU."""
    gpu = changes.get("gpu", plain({"gpu": tree.get("gpu")})["gpu"])
    cluster = "" if "gpu" in changes else key_of("clusters", reference)
    return default_price(cluster, key_of("gpus", gpu)) if isinstance(gpu, str) else None


def load_cluster(
    reference: str | Contents, overrides: Mapping[str, str] | None = None
) -> Entry[Cluster]:
    """A cluster by catalog key, by the path of a TOML file, or by what stands in it.

    `overrides` maps dotted paths, such as "inter.bandwidth", to texts, such as "25 Gbit/s".
    Raises CatalogError when anything is unknown, missing, or of the wrong kind.
    """
    changes = overrides or {}
    named = (reference, *(changes[name] for name in _KIND_OF if name in changes))
    in_file = not isinstance(reference, Contents) and any(is_file(str(name)) for name in named)
    return _loaded(_cluster, reference, changes, in_file)


def _loaded(
    make: Callable[[str | Contents, Mapping[str, str]], Entry[T]],
    reference: str | Contents,
    overrides: Mapping[str, str] | None,
    in_file: bool,  # noqa: FBT001
) -> Entry[T]:
    """What is made; it is kept unless a file says it, which may change."""
    if in_file and not isinstance(reference, Contents):
        return make(reference, overrides or {})
    return cast("Entry[T]", _kept(make, reference, tuple((overrides or {}).items())))


@lru_cache(maxsize=_MAX_KEPT)
def _kept(make: Any, reference: str | Contents, overrides: tuple[tuple[str, str], ...]) -> Any:
    return make(reference, dict(overrides))


def _opened(reference: str | Contents, read_tree: Callable[[str], Tree]) -> tuple[Tree, str]:
    """The tree, which may be changed, and what it is called."""
    if isinstance(reference, Contents):
        return deepcopy(reference.tree), reference.name
    return read_tree(reference), reference


def _cluster(reference: str | Contents, overrides: Mapping[str, str]) -> Entry[Cluster]:
    from co2sim.catalog.specs import ClusterSpec  # noqa: PLC0415 - pydantic is slow

    if isinstance(reference, Contents):
        contents, tree = reference, deepcopy(reference.tree)
    else:
        contents = _of_cluster(reference, overrides)
        tree = contents.tree
    chosen, reference = [*contents.chosen], contents.name
    changes = {path: text for path, text in overrides.items() if path not in _KIND_OF}
    _put_defaults(tree)
    changes = put_rates(tree, changes, contents.price)
    _check_kernels(tree, reference, changes)
    _apply(tree, reference, changes, overrides)
    if isinstance(tree.get("failures"), dict):
        chosen += [
            Fact(f"failures.{name}", value, source, assumed=True)
            for name, (value, source) in ORIGINS.items()
            if name not in tree["failures"]
        ]
    return Entry(_built(ClusterSpec, plain(tree), reference), (*chosen, *facts(tree)))


@lru_cache
def load_failures(key: str) -> Entry[Failures]:
    """Rates of failures by catalog key. Raises CatalogError for others."""
    from co2sim.catalog.specs import FailuresSpec  # noqa: PLC0415 - pydantic is slow

    tree = read("failures", key)
    return Entry(_built(FailuresSpec, plain(tree), key), tuple(facts(tree)))


def _put_defaults(tree: Tree) -> None:
    """What published runs say of clusters whose files do not; of processors they say nothing."""
    on_gpus = plain({"backend": tree.get("backend", "nccl")})["backend"] == "nccl"
    defaults = read_defaults()
    links = defaults.pop("inter")
    for name, fact in defaults.items():
        tree.setdefault(name, fact if on_gpus else {**_NONE})
    if on_gpus and isinstance(tree.get("inter"), dict):
        for name, fact in links.items():
            tree["inter"].setdefault(name, fact)


def _named(
    tree: Tree, reference: str, changes: dict[str, str], name: str, kind: Kind
) -> list[Fact]:
    """Put the entry of the catalog in place of its name, if a name is given; its facts, if any."""
    overridden = name in changes
    value = changes.pop(name, tree.get(name))
    chosen: list[Fact] = []
    if isinstance(value, dict) and isinstance(value.get("value"), str):
        chosen, value = list(facts({name: value})), value["value"]
    if (name, value) == ("failures", NO_FAILURES):
        tree.pop(name, None)
        tree["count_failures"] = False
    elif isinstance(value, str):
        tree[name] = read(kind, _meant(reference, name, value, in_file=not overridden))
    return chosen


def _meant(reference: str, name: str, text: str, *, in_file: bool) -> str:
    """The entry of the catalog, or the file, that the name of a GPU or of failures means.

    A file may come from others: it may name what lies beside it or below, and nothing else of this
    disk. On the command line a name may be any file.
    """
    folder = Path(reference).parent
    if in_file and is_file(text):
        path = folder / text
        if Path(text).is_absolute() or not is_below(path, folder):
            raise CatalogError(
                f"{reference}: {name} is {shown(text)}; it must be a name from `co2sim list"
                f" {_KIND_OF[name]}`, a table, or a file in the folder of this one (any other file:"
                f" --set {name}=PATH)"
            )
        return str(path) if is_file(str(path)) else f"./{path}"
    beside = folder / text  # as a file of the user's may name its neighbour
    return str(beside) if text.endswith(".toml") and is_regular(beside) else text


def _check_kernels(tree: Tree, reference: str, changes: Mapping[str, str]) -> None:
    """Refuse one number of kernels, where a GPU has no others and the first is not given."""
    first, gpu = "gpu.kernels.gemm_efficiency", tree.get("gpu")
    path = next((path for path in changes if path.startswith("gpu.kernels.")), None)
    if path is None or first in changes or not isinstance(gpu, dict) or gpu.get("kernels"):
        return
    raise CatalogError(
        f"--set {path}: the file of the GPU of {reference} states no kernels; give {first}, too, or"
        " change what the stack does by --set stack.PATH"
    )


def _apply(
    tree: Tree, reference: str, changes: Mapping[str, str], shown: Mapping[str, str] | None
) -> None:
    """Override in place, and say so in the name, which heads every result."""
    for path, text in changes.items():
        override(tree, path, text)
    tree.setdefault("name", reference)
    if shown and "name" not in shown:
        changed = ", ".join(f"{path}={text}" for path, text in shown.items())
        tree["name"] = f"{tree['name']}{CHANGED}{changed}"


def _of_model(reference: str) -> Tree:
    if is_source(reference):
        from co2sim.catalog.own_models import traced_tree  # noqa: PLC0415 - of few models

        return traced_tree(reference)
    tree = read("models", reference)
    if "format" in tree:
        return tree
    config = config_of(reference)
    if config or reference.endswith(".json"):
        from co2sim.catalog import huggingface, own_models  # noqa: PLC0415 - of few models

        if config and config.parent != Path(reference):
            tree.setdefault("_name_or_path", reference)
        if not huggingface.is_known(tree) and own_models.can_trace(tree.get("model_type")):
            return own_models.transformers_tree(tree, reference)
        tree = _at_usual_length(huggingface.convert(tree, reference), reference)
    tree.setdefault("name", reference)
    return tree


def _at_usual_length(tree: Tree, reference: str) -> Tree:
    """A model of Hugging Face, on sequences as models of its size are trained on.

    Its file says the longest that it allows, which few tokens of a training have.
    """
    from co2sim.catalog.specs import ModelSpec  # noqa: PLC0415 - pydantic is slow

    if "seq_len" not in tree:
        return tree
    longest = tree["seq_len"]["value"]
    named = {"name": reference, **tree}
    like = usual_sequence(_built(ModelSpec, {"model": plain(named)}, reference).parameters)
    if like["tokens"] >= longest:
        return tree
    why = f"as {like['name']} was trained ({like['source']}); the model allows {longest:,}"
    length = {"value": like["tokens"], "source": f"{why}; set model.seq_len to yours"}
    return tree | {"seq_len": length | {"assumed": True}}


def load_model(
    reference: str | Contents, overrides: Mapping[str, str] | None = None
) -> Entry[Model]:
    """A model by catalog key, by a file, or by what stands there.

    A file is TOML, a Hugging Face `config.json`, of `co2sim model --out`, or "my_model.py:build".

    `overrides` maps names, such as "seq_len", to texts. Raises CatalogError like `load_cluster`.
    """
    in_file = isinstance(reference, str) and _is_own(reference)
    return _loaded(_model, reference, overrides, in_file)


def _model(reference: str | Contents, overrides: Mapping[str, str]) -> Entry[Model]:
    from co2sim.catalog.specs import ModelSpec  # noqa: PLC0415 - pydantic is slow

    tree, reference = _opened(reference, _of_model)
    if "format" in tree:
        from co2sim.catalog.own_models import read_model  # noqa: PLC0415 - of few models

        return Entry(*read_model(tree, reference, overrides))
    for path, text in overrides.items():
        if path == "parameters":
            raise CatalogError(
                "parameters follows from the shape of the model; set layers or hidden"
            )
        override(tree, path, text)
    model = _built(ModelSpec, {"model": plain(tree)}, reference)
    if model.parameters > _MAX_PARAMETERS:
        raise CatalogError(
            f"{reference}: the model has {model.parameters:.3g} parameters; it must be at most"
            f" {_MAX_PARAMETERS:.0e}"
        )
    return Entry(model, tuple(facts(tree)))


def _built(spec: Any, tree: Tree, reference: str) -> Any:
    """What a specification makes of a tree; the first thing that is wrong becomes one line."""
    from pydantic import ValidationError  # noqa: PLC0415

    try:
        return spec.model_validate(tree).build()
    except ValidationError as error:
        raise CatalogError(f"{reference}: {_first(error, spec)}") from error
    except OptionError as error:
        raise CatalogError(f"{reference}: {error}") from error


DEFAULT_STACK = "torchtitan"
"""The stack of an answer, unless another is asked for: a current one."""


def load_stack(
    reference: str | Contents, overrides: Mapping[str, str] | None = None
) -> Entry[Stack]:
    """A software stack by catalog key, by a TOML file, or by what stands there.

    `overrides` maps dotted paths, such as "call_overhead", to texts. Raises CatalogError like
    `load_cluster`.
    """
    in_file = isinstance(reference, str) and is_file(reference)
    return _loaded(_stack, reference, overrides, in_file)


def _stack(reference: str | Contents, overrides: Mapping[str, str]) -> Entry[Stack]:
    from co2sim.catalog.specs import StackSpec  # noqa: PLC0415 - pydantic is slow

    tree, reference = _opened(reference, partial(read, "stacks"))
    _apply(tree, reference, overrides, overrides)
    return Entry(_built(StackSpec, plain(tree), reference), tuple(facts(tree)))


def load_optimizer(
    reference: str | Contents, overrides: Mapping[str, str] | None = None
) -> Entry[Optimizer]:
    """An optimizer by catalog key, by a TOML file, or by what stands there.

    `overrides` maps names, such as "newton_schulz", to texts. Raises CatalogError like
    `load_cluster`.
    """
    in_file = isinstance(reference, str) and is_file(reference)
    return _loaded(_optimizer, reference, overrides, in_file)


def _optimizer(reference: str | Contents, overrides: Mapping[str, str]) -> Entry[Optimizer]:
    from co2sim.catalog.specs import OptimizerSpec  # noqa: PLC0415 - pydantic is slow

    tree, reference = _opened(reference, partial(read, "optimizers"))
    _apply(tree, reference, overrides, overrides)
    stated = tuple(facts(tree))
    others = plain({"others": tree.pop("others", None)})["others"]
    made = _built(OptimizerSpec, plain(tree), reference)
    if isinstance(others, str):
        if is_file(others):
            raise CatalogError(
                f"{reference}: others is {shown(others)}; it must be a name from `co2sim list"
                " optimizers`, or a table"
            )
        others = load_optimizer(others).value
    elif others is not None:
        others = _built(OptimizerSpec, {"name": f"others of {made.name}"} | others, reference)
    return Entry(replace(made, others=others), stated)


_KINDS = {"transformer", "vit", "dit", "blocks"}
_NO_NAMES = {"[key]", "[number]", "[table]"}
"""Parts of a place that stand in no file: pydantic's, and the tags of `specs`."""


def _where(location: Place) -> str:
    """The dotted path of a value in its file; for models, behind "model" and a kind."""
    parts = [str(part) for part in location if part not in _NO_NAMES]
    if parts[:1] == ["model"]:
        parts = parts[2:] if parts[1:2] and parts[1] in {*_KINDS, "traced"} else parts[1:]
        if parts[:1] == ["scan"]:
            del parts[1:2]  # its kind
    return ".".join(parts)


def _first(error: "ValidationError", spec: "type[BaseModel]") -> str:
    from co2sim.catalog.specs import SCANS, ClusterSpec, TransformerSpec  # noqa: PLC0415

    problem = error.errors(include_url=False)[0]
    if problem["type"].startswith("union_tag"):
        if "scan" in problem["loc"]:
            return f"scan.kind must be one of {', '.join(SCANS)}"
        return (
            f"kind must be one of {', '.join(sorted(_KINDS))}; a model is such a TOML file, or a"
            " config.json of Hugging Face (the file of a trainer is neither)"
        )
    name = _where(problem["loc"])
    if problem["type"] == "extra_forbidden" and spec is ClusterSpec:
        table, _, inner = name.partition("_")
        if name in TransformerSpec.model_fields:
            return f"unknown name {shown(name)}; it is one of the model: model.{name}"
        if inner and inner in names_at(spec, (table, inner)):
            return f"unknown name {shown(name)}; did you mean {table}.{inner}?"
    return first_problem(error, partial(names_at, spec), _where)
