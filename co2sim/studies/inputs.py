"""All inputs of a case: without files, so that it can travel, and as one hash, its key."""

import inspect
import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from typing import Any

from co2sim.catalog import Contents, cluster_contents, model_contents
from co2sim.common.convert import shown
from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.version import own_identity
from co2sim.prediction.case import Case
from co2sim.strategies import parse

_CHARACTERS = 32
"""Of a key: 128 bits, so that no two of any number of cases share one."""


class Inputs:
    """Reads the files of cases, each once: a study is of one state of them.

    `further` is what results depend on besides their case.
    """

    def __init__(self, further: Any = None) -> None:
        """Nothing is read yet."""
        self._files: dict[tuple[object, ...], Contents | None] = {}
        self._strategies: dict[str, Any] = {}
        self._trees: dict[int, tuple[object, str]] = {}  # which keeps the object, and so its id
        self._start = sha256(_text([str(own_identity()), own_identity().source, _plain(further)]))

    def inlined(self, case: Case) -> Case:
        """The case with what stands in its files in place of their names.

        Raises CatalogError for what cannot be read.
        """
        if isinstance(case.cluster, str):
            named = {k: v for k, v in case.overrides.items() if k in {"gpu", "failures"}}
            key = ("cluster", case.cluster, *named.items())
            if key not in self._files:
                self._files[key] = cluster_contents(case.cluster, named)
            if found := self._files[key]:
                case = replace(case, cluster=found)
        if isinstance(case.model, str):
            if ("model", case.model) not in self._files:
                self._files["model", case.model] = model_contents(case.model)
            if found := self._files["model", case.model]:
                case = replace(case, model=found)
        return case

    def key(self, case: Case) -> str:
        """A hash of an inlined case, of what results depend on besides, and of co2sim itself.

        Two cases that differ in how they are written only, such as co2:tau=2 and co2(tau=2), have
        one key. Raises OptionError for an object of which nobody can tell what it computes.
        """
        given = {field.name: getattr(case, field.name) for field in fields(case)}
        given["cluster"] = self._loaded(case.cluster)
        given["model"] = self._loaded(case.model)
        if isinstance(case.strategy, str):
            given["strategy"] = self._strategy(case.strategy)
        else:
            given["strategy"] = _plain(case.strategy)
        given["overrides"] = list(case.overrides.items())  # in order: it names the cluster
        given["noise"] = _plain(case.noise)
        found = self._start.copy()
        found.update(_text(given))
        return found.hexdigest()[:_CHARACTERS]

    def _loaded(self, given: Any) -> Any:
        """A name of the catalog as it is; the hash of all else."""
        if isinstance(given, str):
            return given
        if id(given) not in self._trees:
            read = isinstance(given, Contents)
            plain = [given.name, given.tree, str(given.chosen)] if read else _plain(given)
            self._trees[id(given)] = given, sha256(_text(plain)).hexdigest()
        return [self._trees[id(given)][1]]

    def _strategy(self, text: str) -> Any:
        if text not in self._strategies:
            try:
                self._strategies[text] = _plain(parse(text))
            except Co2simError:  # which the case will say
                self._strategies[text] = text
        return self._strategies[text]


def _text(plain: Any) -> bytes:
    return json.dumps(plain, default=str).encode()


def _plain(value: Any) -> Any:
    """A value for JSON: dataclasses with their names, and those of users with their source."""
    if value is None or isinstance(value, str | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        inside = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return [f"{kind.__module__}.{kind.__qualname__}", _source(kind), inside]
    if isinstance(value, Mapping):
        return [[_plain(k), _plain(v)] for k, v in value.items()]
    if isinstance(value, AbstractSet):
        return sorted(map(str, value))
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not getattr(value, "ndim", 1):
        return value.item()
    raise _unknown(value)


def _source(kind: type[Any]) -> str | None:
    """Of a class that is not ours, whose changes the hash of our source does not show."""
    if kind.__module__.partition(".")[0] == "co2sim":
        return None
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        raise _unknown(kind) from None


def _unknown(value: object) -> OptionError:
    return OptionError(
        f"{shown(value)}: nobody can tell when its results change; a strategy that is kept with its"
        " results must be a dataclass of plain values in a file of Python"
    )
