"""Unit and range of each number of a cluster, declared once, at its field.

`check` checks a field of type `Annotated[float, Quantity(unit="B/s", least=1)]`, and a file of the
catalog gives it as a text with a unit (`co2sim.catalog.specs`).
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from co2sim.common.errors import OptionError
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
from co2sim.common.validation import above, at_least, between, fraction, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A finite number in `unit`: `least` or more, or above 0; and `most` or less where given."""

    unit: Unit = ""
    least: float | None = None
    most: float | None = None

    def allowed_for(self, value: float) -> str:
        """The range in words: `at least 1 B/s`, `above 0 and at most 1`; or why it is absurd."""
        unit = f" {self.unit}" if self.unit else ""
        if value > (self.least or 0) and self._absurd(value) and value <= (self.most or math.inf):
            return self._sane + unit
        low = "above 0" if self.least is None else f"at least {self.least:g}"
        return low + (f" and at most {self.most:g}" if self.most is not None else "") + unit

    def checked(self, name: str, value: float) -> float:
        """The value, if it is in range. Raises OptionError in one line."""
        name = f"{name} in {self.unit}" if self.unit else name
        found = self._in_range(name, value)
        if self._absurd(found):
            raise OptionError(f"{name} is {found!r}; it must be {self._sane}")
        return found

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
MOST_NODES = 1_000_000
Count = Annotated[int, Quantity(least=1, most=MOST_NODES)]
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
    known = [(name, getattr(thing, name)) for name in names if getattr(thing, name) is not None]
    for (low, least), (high, most) in pairwise(known):
        if least > most:
            raise OptionError(
                f"{what}: {low} is {least:g}{unit}, above {high}, which is {most:g}{unit}"
            )


@cache
def _quantities(kind: Any) -> dict[str, tuple[Any, Quantity]]:
    """Type and quantity of the fields that are one, or may be None."""
    found: dict[str, tuple[Any, Quantity]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        options = get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)
        for option in options:
            if get_origin(option) is Annotated:
                base, quantity = get_args(option)
                found[name] = (base, quantity)
                break
    return found
