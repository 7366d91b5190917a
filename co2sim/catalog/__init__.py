"""Clusters, GPUs and models by name or file, with overrides and the source of every number."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from co2sim.catalog import huggingface
from co2sim.catalog.facts import Fact, Tree, facts, names, override, plain, read
from co2sim.cluster import Cluster
from co2sim.errors import CatalogError, OptionError, nearest
from co2sim.workload import Model

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

__all__ = ["Entry", "Fact", "load_cluster", "load_model", "names"]

T = TypeVar("T")

_NO_PROBE = {
    "value": 0,
    "assumed": True,
    "source": "default, no probe at hand: communication does not slow compute down; 19 % on"
    " average and up to 40 % have been measured elsewhere (Lee et al. 2025, arXiv 2507.03114)",
}


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """What was loaded, and the facts that it was made from."""

    value: T
    facts: tuple[Fact, ...]

    @property
    def assumed(self) -> tuple[Fact, ...]:
        """The facts that no source supports."""
        return tuple(fact for fact in self.facts if fact.assumed)


def load_cluster(reference: str, overrides: Mapping[str, str] | None = None) -> Entry[Cluster]:
    """A cluster by catalog key or by the path of a TOML file.

    `overrides` maps dotted paths, such as "inter.bandwidth", to texts, such as "25 Gbit/s".
    Raises CatalogError when anything is unknown, missing, or of the wrong kind.
    """
    from co2sim.catalog.specs import ClusterSpec  # noqa: PLC0415 - pydantic is slow

    tree = read("clusters", reference)
    changes = dict(overrides or {})
    gpu = changes.pop("gpu", tree.get("gpu"))
    if isinstance(gpu, dict) and isinstance(gpu.get("value"), str):
        gpu = gpu["value"]
    if isinstance(gpu, str):
        beside = Path(reference).parent / gpu  # a file of the user's may name its neighbour
        tree["gpu"] = read(
            "gpus", str(beside) if gpu.endswith(".toml") and beside.exists() else gpu
        )
    tree.setdefault("name", reference)
    tree.setdefault("interference", _NO_PROBE)
    for path, text in changes.items():
        override(tree, path, text)
    spec = _checked(ClusterSpec, plain(tree), reference)
    try:
        return Entry(spec.build(), tuple(facts(tree)))
    except OptionError as error:
        raise CatalogError(f"{reference}: {error}") from error


def load_model(reference: str, overrides: Mapping[str, str] | None = None) -> Entry[Model]:
    """A model by catalog key, by the path of a TOML file, or of a Hugging Face `config.json`.

    `overrides` maps names, such as "seq_len", to texts. Raises CatalogError like `load_cluster`.
    """
    from co2sim.catalog.specs import ModelSpec  # noqa: PLC0415 - pydantic is slow

    tree = read("models", reference)
    if reference.endswith(".json"):
        tree = huggingface.convert(tree, reference)
    tree.setdefault("name", reference)
    for path, text in (overrides or {}).items():
        if path == "parameters":
            raise CatalogError(
                "parameters follows from the shape of the model; set layers or hidden"
            )
        override(tree, path, text)
    spec = _checked(ModelSpec, {"model": plain(tree)}, reference)
    return Entry(spec.model.build(), tuple(facts(tree)))


def _checked(spec: Any, tree: Tree, reference: str) -> Any:
    """Validate; the first thing that is wrong becomes one line."""
    from pydantic import ValidationError  # noqa: PLC0415

    try:
        return spec.model_validate(tree)
    except ValidationError as error:
        raise CatalogError(f"{reference}: {_first(error, spec)}") from error


def _first(error: "ValidationError", spec: "type[BaseModel]") -> str:
    problem = error.errors(include_url=False)[0]
    kinds = {"transformer", "vit", "blocks"}
    place = [str(part) for part in problem["loc"]]
    if place[:1] == ["model"]:  # then comes the kind
        place = place[2:] if place[1:2] and place[1] in kinds else place[1:]
    where = ".".join(place)
    match problem["type"]:
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden":
            return f"unknown name {where!r}; {nearest(place[-1], _allowed(spec, problem['loc']))}"
        case "union_tag_invalid" | "union_tag_not_found":
            return f"kind must be one of {', '.join(sorted(kinds))}"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem["input"]
    shown = "" if isinstance(given, dict | list) or repr(given) in message else f", given {given!r}"
    return f"{where}: {message}{shown}" if where else message


def _allowed(spec: "type[BaseModel]", place: tuple[int | str, ...]) -> list[str]:
    """The names that the table at `place` may hold."""
    allowed = spec.model_json_schema()
    definitions = allowed.get("$defs", {})
    names_here: list[str] = []
    for part in place:
        options = allowed.get("anyOf", []) + allowed.get("oneOf", []) + [allowed]
        resolved = [definitions[o["$ref"].rsplit("/", 1)[1]] if "$ref" in o else o for o in options]
        names_here = [name for option in resolved for name in option.get("properties", {})]
        following = [
            option["properties"][part]
            for option in resolved
            if part in option.get("properties", {})
        ]
        allowed = following[0] if following else allowed
    return names_here or ["nothing"]
