"""The axis of a chart for a number of a case: its values in units that readers know."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import altair as alt

from co2sim.decide.axis import Axis

_WIDE = 8.0
"""Values that differ by more than such a factor are drawn on a log scale."""
_DAY = 86400.0
_LONG = 60.0
"""Seconds from which on times are drawn in days."""
_DECADES = 100.0
"""Over such a factor only powers of ten have ticks."""
_MOST_TICKS = 9


@dataclass(frozen=True, slots=True)
class NumberAxis:
    """The number at a path: `factor` times its value is drawn, in `unit`.

    `prefixed` says that the unit may have a prefix, as in Gbit/s.
    """

    path: str
    unit: str = ""
    factor: float = 1.0
    prefixed: bool = False

    def encoding(self, field: str, drawn: Sequence[float], *, log: bool) -> alt.X:
        """The channel of a field that holds one of the values `drawn`."""
        axis = alt.Axis(labelExpr=self.label)
        few = sorted(set(drawn))
        if len(few) <= _MOST_TICKS:
            axis = alt.Axis(labelExpr=self.label, values=few)
        elif log and max(drawn) >= _DECADES * min(drawn):
            axis = alt.Axis(labelExpr=self.label, values=_powers(min(drawn), max(drawn)))
        return alt.X(f"{field}:Q", title=self.path, scale=scale_of(log=log), axis=axis)

    @property
    def label(self) -> str:
        """An expression of Vega for the label of a tick: a number, with its unit."""
        if self.prefixed:
            return prefixed(self.unit)
        behind = f" + ' {self.unit}'" if self.unit else ""
        return f"format(datum.value, ',~r'){behind}"


def prefixed(unit: str) -> str:
    """An expression of Vega for a number with a prefix before its unit: "25 Gbit/s"."""
    return f"replace(format(datum.value, '~s'), regexp('([a-zA-Zµ]?)$'), ' $1') + '{unit}'"


def number_axis(axis: Axis) -> NumberAxis:
    """How a number is drawn: bandwidths between nodes in bits, long times in days."""
    path = axis.path
    if axis.unit == "USD/s":
        return NumberAxis(path, f"{axis.currency}/h", 3600.0)
    if axis.unit == "B/s" and path.startswith(("inter.", "wan.")):
        return NumberAxis(path, "bit/s", 8.0, prefixed=True)
    if axis.unit == "s" and axis.low >= _LONG:
        return NumberAxis(path, "days", 1 / _DAY)
    return NumberAxis(path, axis.unit, 1.0, prefixed=bool(axis.unit))


def scale_of(*, log: bool, padding: int = 16) -> alt.Scale:
    """Around what is drawn, without a zero that is not drawn."""
    if log:
        return alt.Scale(type="log", nice=False, padding=padding)
    return alt.Scale(nice=False, zero=False, padding=padding)


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten in a range."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = (last - first) // _MOST_TICKS + 1
    return [10.0**power for power in range(first, last + 1, step)]


def wide(values: Iterable[float]) -> bool:
    """Whether values are better drawn on a log scale."""
    known = list(values)
    return bool(known) and min(known) > 0 and max(known) > _WIDE * min(known)
