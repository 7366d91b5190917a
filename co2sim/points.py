"""The cases of a grid by their place, made when they are asked for; and every n-th of them."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from co2sim import grid
from co2sim.case import Case
from co2sim.convert import shown
from co2sim.errors import OptionError
from co2sim.grid import Setting

MOST_CASES = 10_000_000
"""Of a table that is written as it grows: their keys take 240 MB, a tenth of a day on 100 cores."""
_MOST_SHARDS = 10_000
_TRIED = 1000
"""Values of a path that are read before anything runs: a second or two."""


@dataclass(frozen=True)
class Points:
    """A case at every point of a grid, the last path fastest."""

    case: Case
    axes: dict[str, Sequence[Any]]

    @classmethod
    def of(cls, case: Case, given: grid.Grid) -> "Points":
        """Of values as users give them.

        Raises Co2simError for a grid that cannot be, and for a value with which no case can be:
        of each path the first thousand are tried, the others being the first of theirs.
        """
        made = cls(case, dict(grid.axes(given, MOST_CASES)))
        first = made.setting(0)
        grid.refuse_both(case, first)
        for path, values in made.axes.items():
            tried = [grid.varied(case, {**first, path: one}) for one in values[:_TRIED]]
            grid.check_inputs(tried)
        return made

    def __len__(self) -> int:
        return self._sizes[0]

    @cached_property
    def _sizes(self) -> list[int]:
        """How many cases there are from each path on; 1 behind the last."""
        counts = [len(values) for values in self.axes.values()]
        return [math.prod(counts[path:]) for path in range(len(counts) + 1)]

    def setting(self, place: int) -> Setting:
        """What varies there."""
        sizes = self._sizes[1:]
        return {
            path: values[place // size % len(values)]
            for (path, values), size in zip(self.axes.items(), sizes, strict=True)
        }

    def at(self, place: int) -> Case:
        """The case there. Raises Co2simError where none can be."""
        return grid.varied(self.case, self.setting(place))


@dataclass(frozen=True, slots=True)
class Shard:
    """Every `count`-th case, from the `number`-th on: so all shards take about as long."""

    number: int = 1
    count: int = 1

    @classmethod
    def read(cls, text: Any) -> "Shard":
        """From a text such as 3/16. Raises OptionError for anything else."""
        found = re.fullmatch(r"\s*([0-9]{1,9})\s*/\s*([0-9]{1,9})\s*", str(text))
        number, count = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= count <= _MOST_SHARDS:
            raise OptionError(
                f"shard is {shown(text)}; it must be N/COUNT, such as 3/16: the third of sixteen,"
                f" at most {_MOST_SHARDS:,}"
            )
        return cls(number, count)

    def places(self, cases: int) -> range:
        """The places of its cases, of so many."""
        return range(self.number - 1, cases, self.count)

    @property
    def prefix(self) -> str:
        """What the names of its files begin with; nothing where it is all."""
        return "" if self.count == 1 else f"shard-{self.number}-of-{self.count}-"
