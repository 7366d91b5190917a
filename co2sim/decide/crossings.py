"""Where a figure crosses a value: the ranges of an axis in which it is enough."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from scipy.optimize import brentq

from co2sim.decide.axis import Axis
from co2sim.decide.targets import Target

Figure: TypeAlias = Callable[[float], float | None]
"""A figure at a value of the axis; None where there is none."""

_EXACT = 1e-7
"""How near to a crossing the search comes, relative to it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Values that meet a target, both ends included.

    `open_low` and `open_high` say that an end is that of the searched range, and not a crossing.
    """

    low: float
    high: float
    open_low: bool
    open_high: bool


def spans(
    figure: Figure, points: Sequence[float], axis: Axis, target: Target, value: float
) -> Iterable[Stretch]:
    """The ranges of the axis in which the figure meets the value, from the lowest on."""
    met = [target.met(figure(x), value) for x in points]
    low: tuple[float, bool] | None = (points[0], True) if met[0] else None
    for (x, before), (y, after) in pairwise(zip(points, met, strict=True)):
        if before == after:
            continue
        edge = _edge(figure, axis, target, value, x, y)
        if after:
            low = (edge, False)
        else:
            assert low is not None
            yield Stretch(low[0], edge, low[1], open_high=False)
            low = None
    if low:
        yield Stretch(low[0], points[-1], low[1], open_high=True)


def _edge(
    figure: Figure, axis: Axis, target: Target, value: float, low: float, high: float
) -> float:
    """The last value that meets the target, between two of which one does."""

    def meets(x: float) -> bool:
        return target.met(figure(x), value)

    inside, outside = (low, high) if meets(low) else (high, low)
    if axis.step:
        while abs(inside - outside) > axis.step:
            middle = axis.low + axis.step * axis.place((inside + outside) / 2)
            inside, outside = (middle, outside) if meets(middle) else (inside, middle)
        return inside
    root = _root(figure, value, inside, outside)
    if root is not None:
        for place in (root, root * (1 + _EXACT), root * (1 - _EXACT)):
            near = min(max(place, low), high)
            if meets(near):
                inside = near
            else:
                outside = near
    while abs(math.log(inside / outside)) > 2 * _EXACT:  # a jump, or a figure that is missing
        middle = math.sqrt(inside * outside)
        inside, outside = (middle, outside) if meets(middle) else (inside, middle)
    return inside


def _root(figure: Figure, value: float, inside: float, outside: float) -> float | None:
    """Where the figure is the value; None where it is not known between the two."""

    def beyond(place: float) -> float:
        found = figure(math.exp(place))
        if found is None:
            raise _UnknownError
        return found - value

    try:
        return math.exp(brentq(beyond, math.log(inside), math.log(outside), xtol=_EXACT / 4))
    except (_UnknownError, ValueError):  # no figure, or one that rounds to the value at an end
        return None


class _UnknownError(Exception):
    """There is no figure at a point."""


def monotone(figures: Sequence[float]) -> bool:
    """Whether they never turn, but for rounding."""
    if not figures:
        return True
    small = 1e-9 * max(map(abs, figures))
    steps = [b - a for a, b in pairwise(figures)]
    return all(step >= -small for step in steps) or all(step <= small for step in steps)
