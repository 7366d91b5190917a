"""Published values as bars, in groups as in the papers, with our value on each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer

from analysis.published.cells import Cell
from analysis.published.errors import CellPrediction
from analysis.published.figures.style import Look, face, line

_WIDTH = 0.82
"""Of a group, of which the next one is 1 away."""

_ROOM = 1.24
"""Height of an axis, as a multiple of what is drawn: numbers stand above."""

_GAP = 2.5
"""Between what is drawn and the numbers above it, in points."""

_LINE = 8.5
"""Height of a number, in points."""


@dataclass(frozen=True, slots=True)
class PublishedBar:
    """One published value, in a group on the axis."""

    row: CellPrediction
    group: str
    look: Look


def bar_panel(
    axis: Axes, bars: Sequence[PublishedBar], *, base: float = 0.0, digits: int = 1
) -> None:
    """Bars from `base` on, with the published number in bold and ours, with `digits`, below it."""
    groups: dict[str, list[PublishedBar]] = {}
    for bar in bars:
        groups.setdefault(bar.group, []).append(bar)
    width = _WIDTH / max(2, *(len(some) for some in groups.values()))
    for centre, some in enumerate(groups.values()):
        for number, bar in enumerate(some):
            place = centre + (number - (len(some) - 1) / 2) * width
            _draw(axis, bar, place, width, base)
            numbers(axis, bar.row, (place, _top(bar.row)), digits)
    axis.set_xticks(range(len(groups)), list(groups))
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(-0.6, len(groups) - 0.4)
    top = max(_top(bar.row) for bar in bars)
    axis.set_ylim(base, base + (top - base) * _ROOM)


def _draw(axis: Axes, bar: PublishedBar, place: float, width: float, base: float) -> None:
    look, row = bar.look, bar.row
    axis.bar(
        place,
        row.cell.published - base,
        width,
        bottom=base,
        facecolor=look.fill,
        edgecolor=look.colour,
        hatch=look.hatch,
        linewidth=0.7,
    )
    our_value(axis, row, place)


def our_value(axis: Axes, row: CellPrediction, place: float) -> ErrorbarContainer:
    """A diamond with its interval: hollow, with a dotted line, where the value was fitted on."""
    low, high = _ends(row)
    found = axis.errorbar(
        place,
        row.predicted,
        yerr=[[row.predicted - low], [high - row.predicted]],
        fmt="D",
        color="black",
        markersize=4,
        markerfacecolor=face(row.cell.use),
        markeredgewidth=0.8,
        elinewidth=0.9,
        capsize=2.2 if row.has_interval else 0,
        clip_on=False,
        zorder=4,
    )
    for segment in found.lines[2]:
        segment.set_linestyle(line(row.cell.use))
    return found


def _top(row: CellPrediction) -> float:
    """The end of what is drawn of a row."""
    return max(row.cell.published, _ends(row)[1])


def _ends(row: CellPrediction) -> tuple[float, float]:
    return (row.low, row.high) if row.has_interval else (row.predicted, row.predicted)


def numbers(
    axis: Axes,
    row: CellPrediction,
    at: tuple[float, float],
    digits: int,
    *,
    above: bool = True,
    gap: float = _GAP,
) -> None:
    """The published number in bold over ours, above or below a place; ours italic if fitted on."""
    first, second = (gap, gap + _LINE) if above else (-gap - _LINE, -gap)
    ours, kind = f"{row.predicted:,.{digits}f}", "italic" if row.cell.use == "fit" else "normal"
    common: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 7}
    common["va"] = "bottom" if above else "top"
    common["bbox"] = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.2}
    axis.annotate(ours, at, (0, first), fontstyle=kind, **common)
    axis.annotate(as_printed(row.cell), at, (0, second), fontweight="bold", **common)


def as_printed(cell: Cell) -> str:
    """The published number with the digits that it was printed with."""
    if cell.rounding and cell.rounding < 1:
        return f"{cell.published:.{round(-math.log10(cell.rounding))}f}"
    return f"{cell.published:,}".removesuffix(".0")
