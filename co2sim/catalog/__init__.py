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
    chosen: list[Fact] = []
    if isinstance(gpu, dict) and isinstance(gpu.get("value"), str):
        chosen, gpu = list(facts({"gpu": gpu})), gpu["value"]
    if isinstance(gpu, str):
        beside = Path(reference).parent / gpu  # a file of the user's may name its neighbour
        tree["gpu"] = read(
            "gpus", str(beside) if gpu.endswith(".toml") and beside.exists() else gpu
        )
    tree.setdefault("interference", _NO_PROBE)
    _apply(tree, reference, changes, overrides)
    spec = _checked(ClusterSpec, plain(tree), reference)
    try:
        return Entry(spec.build(), (*chosen, *facts(tree)))
    except OptionError as error:
        raise CatalogError(f"{reference}: {error}") from error


def _apply(
    tree: Tree, reference: str, changes: Mapping[str, str], shown: Mapping[str, str] | None
) -> None:
    """Override in place, and say so in the name, which heads every result."""
    for path, text in changes.items():
        override(tree, path, text)
    tree.setdefault("name", reference)
    if shown and "name" not in shown:
        changed = ", ".join(f"{path}={text}" for path, text in shown.items())
        tree["name"] = f"{tree['name']}, with {changed}"


def load_model(reference: str, overrides: Mapping[str, str] | None = None) -> Entry[Model]:
    """A model by catalog key, by the path of a TOML file, or of a Hugging Face `config.json`.

    `overrides` maps names, such as "seq_len", to texts. Raises CatalogError like `load_cluster`.
    """
    from co2sim.catalog.model_specs import ModelSpec  # noqa: PLC0415 - pydantic is slow

    tree = read("models", reference)
    if reference.endswith(".json") or (Path(reference) / "config.json").is_file():
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


_KINDS = {"transformer", "vit", "blocks"}


_WORDS = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "bool_parsing": "must be true or false",
    "literal_error": "must be {expected}",
}
"""What is wrong with a value, by pydantic's type of error."""


def _where(place: tuple[int | str, ...]) -> str:
    """The dotted path of a value in its file; for models, behind "model" and a kind."""
    parts = [str(part) for part in place if part != "[key]"]
    if parts[:1] == ["model"]:
        parts = parts[2:] if parts[1:2] and parts[1] in _KINDS else parts[1:]
    return ".".join(parts)


def _first(error: "ValidationError", spec: "type[BaseModel]") -> str:
    problems = error.errors(include_url=False)
    problem = problems[0]
    where = _where(problem["loc"])
    match problem["type"]:
        case "missing":
            missing = [_where(p["loc"]) for p in problems if p["type"] == "missing"]
            return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        case "extra_forbidden":
            parent = where.rpartition(".")[0]
            allowed = _allowed(spec, problem["loc"])
            paths = [f"{parent}.{name}" if parent else name for name in allowed]
            return f"unknown name {where!r}; {nearest(where, paths)}"
        case "union_tag_invalid" | "union_tag_not_found":
            return f"kind must be one of {', '.join(sorted(_KINDS))}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in _WORDS:
        message = _WORDS[problem["type"]].format(**problem.get("ctx", {}))
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
