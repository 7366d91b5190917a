"""The columns of a table that is kept in parts: the same in all of them, whatever the cases."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from co2sim.result import Result
from co2sim.rows import DERIVED, NESTED, TO_LOSS, TOTALS, VARIED, memory_column
from co2sim.step_factors import Goal

MEMORY_ITEMS = (
    *("parameters", "gradients", "optimizer", "gathered", "bucket", "secondary", "outer"),
    *("activations", "checkpoints", "tied_gradient", "logits", "workspace"),
    *("fragmentation", "nccl", "context", "total"),
)
"""Of every strategy of ours; `_OTHER` is the sum of what others keep."""
_OTHER = "other"

_KINDS: Mapping[type[Any], str] = {int: "int64", float: "double", bool: "bool", str: "string"}
"""Types of Arrow."""


def columns(paths: Iterable[str], goal: Goal, tokens: float | None) -> dict[str, str]:
    """Names with types of Arrow: place and key of a case, what varies, its figures, its error."""
    hints = get_type_hints(Result)
    found = {"case": "int64", "key": "string"}
    found |= {f"{VARIED}{path}": "string" for path in paths}
    found |= {"cluster_key": "string", "model_key": "string"}
    found |= {f.name: _kind(hints[f.name]) for f in fields(Result) if f.name not in NESTED}
    found |= dict.fromkeys(DERIVED, "double")
    found |= {memory_column(item): "double" for item in (*MEMORY_ITEMS, _OTHER)}
    found |= dict.fromkeys(TO_LOSS, "double") if goal.steps is not None else {}
    found |= dict.fromkeys(TOTALS, "double") if tokens is not None else {}
    return found | {"warnings": "string", "error": "string"}


def fitted(row: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """A row with these columns only, None where it has no value, and their types."""
    found = {name: _value(row.get(name), kind) for name, kind in kinds.items()}
    unknown = [name for name in row if name not in kinds and name.startswith("memory_")]
    if unknown:
        found[memory_column(_OTHER)] = float(sum(row[name] for name in unknown))
    return found


def _value(value: Any, kind: str) -> Any:
    return float(value) if kind == "double" and value is not None else value


def _kind(hint: Any) -> str:
    options = [option for option in get_args(hint) if option is not NoneType]
    return _KINDS[options[0] if options else hint]
