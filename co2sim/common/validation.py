"""Numbers and their ranges: what is wrong, what was given, what is allowed, in one line.

A number of a cluster has its unit and range at its field: `Annotated[float, Quantity(unit="B/s",
least=1)]`. `check` checks it, and a file of the catalog gives it as a text (`catalog.specs`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from numbers import Integral, Real
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from co2sim.common.errors import Co2simError, OptionError, given, nearest
from co2sim.common.units import (
    Bytes,
    BytesPerSecond,
    FlopsPerSecond,
    KgPerKwh,
    Seconds,
    Unit,
    UsdPerSecond,
    Watts,
)

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

Place: TypeAlias = tuple[int | str, ...]
"""Names and places in lists that lead to a value."""

_MAX_UNKNOWN = 3
"""Unknown names that a message about missing ones tells, too."""

_RULES = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "bool_parsing": "true or false",
    "literal_error": "{expected}",
    "model_type": "a table",
}
"""What a value must be, by pydantic's type of error."""


def last_name(location: Place) -> str:
    """The name of a value in its table."""
    return str(location[-1]) if location else ""


def first_problem(
    error: "ValidationError",
    allowed: Callable[[Place], Iterable[str]] | None = None,
    path: Callable[[Place], str] = last_name,
) -> str:
    """The first thing that is wrong; of names that are missing, all.

    Unknown names are listed with missing ones: one may be the other, misspelt. `allowed` gives the
    names that are known at a place, of which the nearest to a wrong one is shown, and `path` writes
    a place as a user does. A validator's ValueError that begins with "must be" is a rule for the
    value; any other is shown as it is, behind the path.
    """
    problems = error.errors(include_url=False)
    problem = problems[0]
    name, context = path(problem["loc"]), problem.get("ctx", {})
    match problem["type"]:
        case "missing":
            missing = [path(other["loc"]) for other in problems if other["type"] == "missing"]
            others = (other for other in problems if other["type"] == "extra_forbidden")
            first = islice(others, _MAX_UNKNOWN)
            unknown = "".join(f"; {_unknown(other['loc'], allowed, path)}" for other in first)
            return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing{unknown}"
        case "extra_forbidden":
            return _unknown(problem["loc"], allowed, path)
        case "union_tag_not_found":
            return f"{context['discriminator'].strip(chr(39))} is missing"
        case "union_tag_invalid":
            tag = context["discriminator"].strip("'")
            return f"{tag} is {given(context['tag'])}; it must be one of {context['expected_tags']}"
    return _about_value(name, problem)


def _unknown(
    location: Place,
    allowed: Callable[[Place], Iterable[str]] | None,
    path: Callable[[Place], str],
) -> str:
    name = path(location)
    parent = name[: name.rfind(".") + 1]
    paths = [parent + other for other in (allowed(location) if allowed else ())]
    return f"unknown name {given(name)}; {nearest(name, paths)}"


def _about_value(name: str, problem: "ErrorDetails") -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in _RULES:
        message = f"must be {_RULES[problem['type']].format(**problem.get('ctx', {}))}"
    message = message.replace("Input should be", "must be", 1)
    if not name:
        return message
    shown = given(problem["input"])
    is_table = isinstance(problem["input"], dict | list)
    if message.startswith("must be ") and not is_table:
        return f"{name} is {shown}; it {message}"
    says_value = is_table or shown in message or repr(problem["input"]) in message
    return f"{name}: {message}" if says_value else f"{name}: {message}, given {shown}"


def _alternatives(
    schema: dict[str, Any], definitions: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A JSON schema, or those of which a value fits one."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rsplit("/", 1)[1]]
    for option in schema.get("anyOf", []) + schema.get("oneOf", []):
        yield from _alternatives(option, definitions)
    yield schema


def names_at(spec: "type[BaseModel]", location: Place) -> list[str]:
    """The names that the table at a place of a model may hold."""
    allowed = spec.model_json_schema()
    definitions = allowed.get("$defs", {})
    names_here: list[str] = []
    for part in location:
        resolved = list(_alternatives(allowed, definitions))
        kinds = [option.get("discriminator", {}).get("mapping", {}) for option in resolved]
        if of_kind := [mapping[part] for mapping in kinds if part in mapping]:
            allowed = {"$ref": of_kind[0]}
            continue
        names_here = [name for option in resolved for name in option.get("properties", {})]
        following = [
            option["properties"][part]
            for option in resolved
            if part in option.get("properties", {})
        ] or [option["items"] for option in resolved if isinstance(part, int) and "items" in option]
        allowed = following[0] if following else allowed
    return names_here or ["nothing"]


_MAX_DIGITS = 20
"""Of a whole number in a message: enough for all that 64 bits hold."""


def at_least(
    name: str, value: float, least: float, *, error: type[Co2simError] = OptionError
) -> float:
    """A finite number of `least` or more."""
    allowed = f"at least {_short(least)}"
    return _checked(name, value, least, math.inf, allowed, error)


def above(
    name: str, value: float, bound: float, *, error: type[Co2simError] = OptionError
) -> float:
    """A finite number greater than `bound`."""
    allowed = f"above {_short(bound)}"
    return _checked(name, value, math.nextafter(bound, math.inf), math.inf, allowed, error)


def between(
    name: str, value: float, least: float, most: float, *, error: type[Co2simError] = OptionError
) -> float:
    """A number from `least` to `most`, both allowed."""
    allowed = f"{_short(least)} to {_short(most)}"
    return _checked(name, value, least, most, allowed, error)


def fraction(name: str, value: float, *, error: type[Co2simError] = OptionError) -> float:
    """A number above 0 and at most 1."""
    return _checked(name, value, math.nextafter(0, 1), 1.0, "above 0 and at most 1", error)


def whole(
    name: str,
    value: float,
    least: int = 0,
    most: int | None = None,
    *,
    error: type[Co2simError] = OptionError,
) -> int:
    """A whole number from `least` to `most`, or without an upper bound; 48.0 is 48."""
    allowed = f"at least {least}" if most is None else f"{least} to {_bound(most)}"
    if not _is_number(value) or (_is_finite(value) and value != int(value)):
        raise error(f"{name} is {_given(value)}; it must be a whole number, {allowed}")
    if not (_is_finite(value) and least <= value and (most is None or value <= most)):
        raise error(f"{name} is {_given(value)}; it must be {allowed}")
    return int(value)


def parse_number(name: str, text: str) -> float:
    """A text as a finite number, 0 or more."""
    value = _read(text)
    if not 0 <= value < math.inf:
        raise OptionError(f"{name} is {text!r}; it must be a number, 0 or more")
    return value


def _read(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _checked(
    name: str, value: float, least: float, most: float, allowed: str, error: type[Co2simError]
) -> float:
    if not _is_number(value):
        raise error(f"{name} is {_given(value)}; it must be a number, {allowed}")
    finite = _is_finite(value)
    if not (finite and least <= value <= most):
        raise error(
            f"{name} is {_given(value)}; it must be {'' if finite else 'finite and '}{allowed}"
        )
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _given(value: object) -> str:
    """A value as a user would write it."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        few = abs(int(value)) < 10**_MAX_DIGITS
        return str(int(value)) if few else f"a number of more than {_MAX_DIGITS} digits"
    return (
        repr(float(value)).removesuffix(".0")
        if isinstance(value, Real) and _is_number(value)
        else given(value)
    )


def _bound(most: int) -> str:
    """A whole number with all its digits, unless they are too many to read."""
    return str(most) if abs(most) < 10**_MAX_DIGITS else _short(most)


def _short(bound: float) -> str:
    """A bound without needless digits: 0, 1e+12, 0.5."""
    return str(int(bound)) if bound == int(bound) and abs(bound) < 1e9 else f"{bound:g}"  # noqa: PLR2004 - beyond it zeros are miscounted


# --- quantities: numbers of dataclasses, with units and ranges ------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A finite number in `unit`: `least` or more, or above 0; and `most` or less where given."""

    unit: Unit = ""
    least: float | None = None
    most: float | None = None

    def allowed_for(self, value: float) -> str:
        """The range as a text: `at least 1 B/s`, `above 0 and at most 1`; or why it is absurd."""
        unit = f" {self.unit}" if self.unit else ""
        if value > (self.least or 0) and self._absurd(value) and value <= (self.most or math.inf):
            return self._sane + unit
        low = "above 0" if self.least is None else f"at least {self.least:g}"
        return low + (f" and at most {self.most:g}" if self.most is not None else "") + unit

    def checked(self, name: str, value: float) -> float:
        """The value, if it is in range. Raises OptionError in one line."""
        name = f"{name} in {self.unit}" if self.unit else name
        valid = self._in_range(name, value)
        if self._absurd(valid):
            raise OptionError(f"{name} is {valid!r}; it must be {self._sane}")
        return valid

    def _absurd(self, value: float) -> bool:
        """Whether a number in range is so large or so small that figures from it would be lost.

        Those that may be 0, such as latencies, are added: as small as they like.
        """
        return value > _LARGEST or (self.least != 0 and 0 < value < _SMALLEST)

    @property
    def _sane(self) -> str:
        least = "" if self.least == 0 else f"0, or at least {_SMALLEST:g} and "
        return f"{least}at most {_LARGEST:g}"

    def _in_range(self, name: str, value: float) -> float:
        if self.least is None:
            return above(name, value, 0) if self.most is None else fraction(name, value)
        if self.most is None:
            return at_least(name, value, self.least)
        return between(name, value, self.least, self.most)


_SMALLEST, _LARGEST = 1e-18, 1e60
"""Far from all that is built: what is computed from such numbers neither overflows nor vanishes."""


Size = Annotated[Bytes, Quantity(unit="B", least=1)]
Bandwidth = Annotated[BytesPerSecond, Quantity(unit="B/s", least=1)]
Speed = Annotated[FlopsPerSecond, Quantity(unit="FLOP/s", least=1)]
Time = Annotated[Seconds, Quantity(unit="s", least=0)]
Between = Annotated[Seconds, Quantity(unit="s")]
"""The mean time between failures."""
Price = Annotated[UsdPerSecond, Quantity(unit="USD/s", least=0)]
PriceToStore = Annotated[float, Quantity(unit="USD/B/s", least=0)]
PricePerByte = Annotated[float, Quantity(unit="USD/B", least=0)]
Power = Annotated[Watts, Quantity(unit="W", least=0)]
Intensity = Annotated[KgPerKwh, Quantity(unit="kg/kWh", least=0)]
Fraction = Annotated[float, Quantity(most=1)]
Slowdown = Annotated[float, Quantity(least=0, most=10)]
"""The fraction by which something takes longer; at 10 it takes eleven times as long."""
Multiple = Annotated[float, Quantity(least=1)]
Spread = Annotated[float, Quantity(least=0, most=1)]
"""Sigma of a lognormal factor."""
Deviation = Annotated[float, Quantity(least=0, most=5)]
"""Of a logarithm, where it was measured; at 5 a prediction may be off by factors of thousands."""
MAX_NODES = 1_000_000
Count = Annotated[int, Quantity(least=1, most=MAX_NODES)]
"""Nodes, GPUs of a node, or sites: far beyond any machine, and still quick to count."""

Natural = Annotated[int, Quantity(least=0, most=1_000_000)]
"""What there may be none of."""


def check(thing: Any, what: str) -> None:
    """Check every field of a dataclass that is a quantity. Raises OptionError in one line."""
    kind: Any = type(thing)
    for name, (base, quantity) in _quantities(kind).items():
        value = getattr(thing, name)
        if value is None:
            continue
        if base is int:
            least, most = int(quantity.least or 0), int(quantity.most or 0)
            object.__setattr__(thing, name, whole(f"{what}: {name}", value, least, most))
        else:
            quantity.checked(f"{what}: {name}", value)


def in_order(thing: Any, what: str, *names: str) -> None:
    """Check that of these fields those that are known do not fall. Raises OptionError."""
    kind: Any = type(thing)
    unit = f" {_quantities(kind)[names[0]][1].unit}".rstrip()
    stated = [(name, getattr(thing, name)) for name in names if getattr(thing, name) is not None]
    for (low, least), (high, most) in pairwise(stated):
        if least > most:
            raise OptionError(
                f"{what}: {low} is {least:g}{unit}, above {high}, which is {most:g}{unit}"
            )


@cache
def _quantities(kind: Any) -> dict[str, tuple[Any, Quantity]]:
    """Type and quantity of the fields that are one, or may be None."""
    quantities: dict[str, tuple[Any, Quantity]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        options = get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)
        for option in options:
            if get_origin(option) is Annotated:
                base, quantity = get_args(option)
                quantities[name] = (base, quantity)
                break
    return quantities
