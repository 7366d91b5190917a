"""Convert values that users give to the types that dataclasses declare.

A count may be 16, 16.0, "16" or NumPy's 16; a name may be a path. What could mean two things is
refused with a reason.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from co2sim.common import validation
from co2sim.common.errors import OptionError, UnitError, nearest
from co2sim.common.units import parse

Count: TypeAlias = int | float | str
"""A whole number, as a number or as a text."""

Number: TypeAlias = float | str
"""A number, or a text that is one."""

Reference: TypeAlias = str | os.PathLike[str]
"""A catalog name, or the path of a file."""

_SHOWN = 60
"""Characters of a wrong value that a message repeats."""


class Within(tuple[int, int]):
    """The range of a count, both ends allowed: `Annotated[int, Within((1, 10))]`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Reader:
    """How a field is read that takes words besides numbers: `Annotated[int | str, Reader(read)]`.

    `read` takes the name of the field and what was given. `metavar` is what a help shows of it.
    """

    read: Callable[[str, Any], Any]
    metavar: str = "N"


@dataclass(frozen=True, slots=True)
class Option:
    """How a field of a dataclass is an option of a command line.

    `help` is what it prints. The flag is the name of the field with hyphens, unless `flags` says
    otherwise. `group` says which commands have it.
    """

    help: str
    group: str
    flags: tuple[str, ...] = ()


def option(default: Any, help_: str, group: str, *flags: str) -> Any:
    """A field with this default that is an option, too; see `Option`."""
    metadata = {"option": Option(help_, group, flags)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(owner: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as the types that the fields of the dataclass `owner` declare.

    Numbers, truths, texts and choices are converted; all else is left as it is. Raises OptionError
    for what does not fit, and for a name that is no field.
    """
    hints = _hints(owner)
    unknown = [name for name in values if name not in hints]
    if unknown:
        raise OptionError(f"unknown option {unknown[0]!r}; {nearest(unknown[0], hints)}")
    return {name: _as_declared(name, value, hints[name]) for name, value in values.items()}


def reader(owner: type[Any], name: str) -> Reader | None:
    """That of a field of a dataclass, if it has one."""
    return _reader(_hints(owner).get(name))


def _reader(hint: Any) -> Reader | None:
    reader = hint.__metadata__[0] if _annotated(hint) else None
    return reader if isinstance(reader, Reader) else None


def plain_fields(owner: type[Any]) -> tuple[str, ...]:
    """The fields of a dataclass that hold one plain value: a number, a text or a choice."""
    return tuple(name for name, hint in _hints(owner).items() if _plain(hint) is not None)


def text(value: object) -> str:
    """A value as a user would write it in a cluster file, or as an option of a strategy."""
    value = _item(value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, str | int | float):
        return str(value)
    raise OptionError(f"{shown(value)} is not a value: give a text or a number")


def texts(name: str, values: Any) -> dict[str, str]:
    """A mapping of paths to values as texts."""
    if not isinstance(values, Mapping):
        raise OptionError(
            f"{name} is {shown(values)}; it must map names such as 'inter.bandwidth' to texts such"
            " as '25 Gbit/s'"
        )
    return {str(path): text(value) for path, value in values.items()}


def shown(value: object) -> str:
    """A wrong value in a message, cut where it is long."""
    line = " ".join(repr(value).split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def whole(name: str, value: Any) -> int:
    """A whole number from a number or a text: 16, 16.0, "16", "5e8"."""
    parsed = _number(value)
    if parsed is None or parsed != parsed // 1:
        raise OptionError(f"{name} is {shown(value)}; it must be a whole number")
    return int(parsed)


def number(name: str, value: Any) -> float:
    """A finite number from a number or a text."""
    parsed = _number(value)
    if parsed is None:
        raise OptionError(f"{name} is {shown(value)}; it must be a number")
    try:
        return float(parsed)
    except OverflowError:
        raise OptionError(f"{name} is {shown(value)}; it must be at most 1.8e308") from None


_LARGE = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def amount(name: str, text: str) -> float:
    """A large number from a text: 1e12, 1T, 300B, 50k."""
    stripped = text.strip()
    factor = _LARGE.get(stripped[-1:].lower(), 1.0)
    parsed = _number(stripped[:-1] if factor > 1 else stripped)
    if parsed is None:
        raise OptionError(
            f"{name} is {shown(text)}; it must be a number, such as 50000, 5e4 or 50k (k, M, B and"
            " T stand for thousands, millions, billions and trillions)"
        )
    return factor * parsed


class Money(float):
    """An amount of money; `currency` is empty where none was said."""

    currency: str = ""


def money(name: str, text: str) -> Money:
    """The same of an amount of money, that may have `$` before it or a currency behind it."""
    said = _CURRENCY.search(text.strip())
    value = Money(amount(name, _CURRENCY.sub("", text.strip()) or text))
    value.currency = (said[1] or "USD") if said else ""
    return value


_CURRENCY = re.compile(r"^\$\s*|\s*(USD|EUR)$")


def seconds(name: str, text: str, least: float = 0.0) -> float:
    """A length of time with its unit, above 0. Raises OptionError that names the option."""
    try:
        time = parse(text, "s")
    except UnitError as error:
        if text.strip().replace(".", "", 1).isdecimal():
            raise OptionError(
                f"{name} is {text!r}, without a unit; write '{text.strip()} days', or hours (h),"
                " minutes or seconds (s)"
            ) from None
        raise OptionError(f"{name}: {error}") from None
    if time <= 0:
        raise OptionError(f"{name} is {text!r}; it must be above 0")
    if time < least:
        raise OptionError(f"{name} is {text!r}; it must be at least {least:g} s")
    return time


def wholes(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers between commas, from the least on."""
    return tuple(sorted(whole(name, part.strip()) for part in text.split(",")))


def share(name: str, text: str) -> float:
    """A share from a text: 10% or 0.1."""
    bare = text.strip().removesuffix("%")
    return number(name, bare) / (100 if bare != text.strip() else 1)


def _number(value: Any) -> int | float | None:
    """The number that `value` is, or None: True and "1,000" are none, nor is infinity."""
    value = _item(value)
    if isinstance(value, str):
        value = _read(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _item(value: Any) -> Any:
    """Python's own number for one of NumPy's, or of another library of arrays."""
    return value.item() if hasattr(value, "item") and not getattr(value, "ndim", 1) else value


def _read(text: str) -> int | float | None:
    """Digits, a point and an exponent; Python's `1_000` is a typing error more often than 1000."""
    for kind in (int, float):
        try:
            return None if "_" in text else kind(text)
        except ValueError:
            continue
    return None


def _truth(name: str, value: Any) -> bool:
    truth = {"true": True, "false": False}.get(str(_item(value)).strip().lower())
    if truth is None:
        raise OptionError(f"{name} is {shown(value)}; it must be true or false")
    return truth


def _chosen(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(f"{name} is {shown(value)}; it is one of {', '.join(map(str, allowed))}")
    return str(value)


def _word(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name} is {shown(value)}; it must be a text")
    return str(value) if isinstance(value, StrEnum) else value


_READERS = {int: whole, float: number, bool: _truth, str: _word}


def _as_declared(name: str, value: Any, hint: Any) -> Any:
    hint, bounds = (hint.__origin__, hint.__metadata__[0]) if _annotated(hint) else (hint, None)
    if NoneType in get_args(hint) and (value is None or (value == "none" and _plain(hint) is int)):
        return None
    if isinstance(bounds, Reader):
        return bounds.read(name, value)
    plain = _plain(hint)
    if plain is None:
        return value
    if get_origin(plain) is Literal:
        return _chosen(name, value, get_args(plain))
    parsed: Any = _READERS[plain](name, value)
    return validation.whole(name, parsed, *bounds) if bounds else parsed


def _plain(hint: Any) -> Any:
    """int, float, bool, str or the Literal that `hint` is, without None; None for all else."""
    if _reader(hint):
        return str
    hint = hint.__origin__ if _annotated(hint) else hint
    if get_origin(hint) in {Union, UnionType}:
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        hint = kinds[0] if len(kinds) == 1 else None
    return hint if hint in _READERS or get_origin(hint) is Literal else None


def _annotated(hint: Any) -> bool:
    return get_origin(hint) is Annotated


_hints: Callable[[Any], Mapping[str, Any]] = lru_cache(64)(
    lambda owner: MappingProxyType(get_type_hints(owner, include_extras=True))
)


def outside_parentheses(parts: list[str]) -> list[str]:
    """The parts between commas, joined again where the next parenthesis is a closing one."""
    joined, inside = [parts[-1]], ")" in parts[-1].partition("(")[0]
    for part in reversed(parts[:-1]):
        if inside:
            joined[-1] = f"{part},{joined[-1]}"
        else:
            joined.append(part)
        if "(" in part or ")" in part:
            inside = ")" in part.partition("(")[0]
    return joined[::-1]
