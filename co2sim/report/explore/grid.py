"""The grid behind a page without a server, and the figures between what was simulated."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any, TypeAlias

from co2sim.report.explore.controls import Control

LOGARITHMIC = ("tokens_per_s", "lost", "lost_least", "lost_most")
"""Figures that are interpolated by their logarithms."""
CHOSEN = (
    *("strategy", "samples", "micro_batch", "micro_steps", "recompute", "precision", "stack"),
    *("memory", "fits"),
)
"""What is chosen, and what follows from it alone: it is that of the nearest knot."""
_DIGITS = 6

Positions: TypeAlias = tuple[int, ...]
"""Of every control of a page, the place of the stop that is set."""


@dataclass(frozen=True, slots=True)
class StrategyGrid:
    """The figures of a strategy at all combinations of the knots of the controls that it has.

    `controls` are their places, `knots` the stops that were simulated, by control, and `points`
    their combinations, the last control fastest. `values` has a list for each figure, None where
    nothing is known; `failed` says why places of these lists have nothing. `lost` has such lists
    one behind the other for each stop of the control of failures; it is empty without one.
    """

    strategy: str
    controls: tuple[int, ...]
    knots: tuple[tuple[int, ...], ...]
    points: Sequence[Positions]
    values: Mapping[str, Sequence[Any]]
    failed: Mapping[int, str]
    lost: Mapping[str, Sequence[Any]]

    def to_dict(self) -> dict[str, Any]:
        """For the page: figures with six digits, and one value where all are the same."""
        return {
            "strategy": self.strategy,
            "controls": self.controls,
            "knots": self.knots,
            "values": {name: _short(found) for name, found in self.values.items()},
            "failed": self.failed,
            "lost": {name: _short(found) for name, found in self.lost.items()},
        }


@dataclass(frozen=True, slots=True)
class Exactness:
    """How far figures of a page are from the simulator's at positions between those simulated.

    `checked` positions, taken at random; errors of throughput are relative, as is the `tolerance`
    that was asked for, those of the exposed share absolute. With `checked` 0 there are no positions
    between.
    """

    tolerance: float
    checked: int
    median: float
    largest: float
    largest_exposed: float

    @property
    def met(self) -> bool:
        """Whether throughput is as exact as asked for; else no more could be simulated."""
        return self.largest <= self.tolerance


@dataclass(frozen=True, slots=True)
class ExploreGrid:
    """All that a page without a server knows; `failures` is the place of their control, if any.

    `ended` says that control-C came before all was as exact as asked for.
    """

    controls: tuple[Control, ...]
    failures: int | None
    strategies: tuple[StrategyGrid, ...]
    exactness: Exactness
    simulated: int
    ended: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For the page."""
        return {
            "controls": [control.to_dict() for control in self.controls],
            "failures": self.failures,
            "strategies": [one.to_dict() for one in self.strategies],
            "exactness": asdict(self.exactness),
            "simulated": self.simulated,
            "logarithmic": LOGARITHMIC,
            "chosen": CHOSEN,
        }


def between(
    grid: StrategyGrid, controls: Sequence[Control], positions: Positions
) -> dict[str, Any] | None:
    """The figures of the simulator at any positions; None where a knot beside them has none.

    Linear in the logarithm of what is set; throughput by its logarithm, too. A figure that is
    unknown at a knot is None. What is `CHOSEN` is that of the nearest knot.
    """
    corners = list(_corners(grid, controls, positions))
    if any(at in grid.failed for at, _ in corners):
        return None
    return {name: _mixed(name, values, corners) for name, values in grid.values.items()}


def _corners(
    grid: StrategyGrid, controls: Sequence[Control], positions: Positions
) -> Iterator[tuple[int, float]]:
    """Places in the lists of values, with their weights."""
    sides = [
        _sides(controls[at], knots, positions[at])
        for at, knots in zip(grid.controls, grid.knots, strict=True)
    ]
    for corner in product(*sides):
        place = 0
        for (at, _), knots in zip(corner, grid.knots, strict=True):
            place = place * len(knots) + at
        yield place, math.prod(weight for _, weight in corner)


def _sides(control: Control, knots: Sequence[int], stop: int) -> list[tuple[int, float]]:
    """The knot that a stop is, or those at both sides of it, with their weights."""
    low = max(place for place, knot in enumerate(knots) if knot <= stop)
    if knots[low] == stop:
        return [(low, 1.0)]
    ends = (knots[low], stop, knots[low + 1])
    first, here, last = (math.log(control.stops[at].value or 1.0) for at in ends)
    share = (here - first) / (last - first)
    return [(low, 1.0 - share), (low + 1, share)]


def _mixed(name: str, values: Sequence[Any], corners: Sequence[tuple[int, float]]) -> Any:
    found = [values[place] for place, _ in corners]
    if name in CHOSEN:
        return found[max(range(len(corners)), key=lambda at: corners[at][1])]
    if any(value is None for value in found):
        return None
    weighed = [(weight, value) for (_, weight), value in zip(corners, found, strict=True)]
    if name in LOGARITHMIC and min(found) > 0:
        return math.exp(sum(weight * math.log(value) for weight, value in weighed))
    return sum(weight * value for weight, value in weighed)


def _short(values: Sequence[Any]) -> Any:
    """Six digits; one value instead of a list where all are the same."""
    rounded = [
        float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value for value in values
    ]
    same = all(one == other for one, other in pairwise(rounded))
    return rounded[0] if same and rounded else rounded
