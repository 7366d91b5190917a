"""The style of figures in papers: what tells series apart, and how a figure becomes files.

Published values are bars or stars. Ours are diamonds or points on lines, filled where they are
predicted and hollow where constants were fitted on the published value. Series differ in lightness,
hatch, marker and line as well as in colour, so that grey print shows them, too.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, TypeVar

import matplotlib as mpl
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator
from matplotlib.typing import LineStyleType

from analysis.published.cells import Cell
from analysis.published.predict import CellPrediction
from co2sim.common.plots import BLACK, BLUE, GREEN, PURPLE, VERMILION, render
from co2sim.prediction.published import Use

T = TypeVar("T")

STAR: dict[str, Any] = {"marker": "*", "ms": 11, "mec": "black", "mew": 0.8}
"""A published value beside lines."""

PALE = 0.2
"""Opacity of a band."""

STYLE_FILE = Path(__file__).with_name("paper.mplstyle")

WIDTH = 7.0
"""Of a figure, in inches: the text of a page."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a series looks: the `colour` of its lines and hatches, and the `fill` of its bars."""

    colour: str
    fill: str
    hatch: str
    marker: str
    line: LineStyleType

    @property
    def of_bars(self) -> dict[str, Any]:
        """As matplotlib takes it for bars."""
        return {"facecolor": self.fill, "edgecolor": self.colour, "hatch": self.hatch}


LOOKS = (
    Look(BLUE, "#C6E0F2", "", "o", "-"),
    Look(VERMILION, "#E8955B", "////", "s", "--"),
    Look(GREEN, "#DDF3EB", "....", "^", ":"),
    Look(PURPLE, "#CC9DB8", "xxxx", "v", "-."),
    Look(BLACK, "#F2F2F2", "----", "P", (0, (6, 1, 1, 1, 1, 1))),
)

PLAIN = Look("#666666", "#F6F6F6", "\\\\\\\\", "o", "-")
"""Of bars that are no series, such as ratios."""


def looks(names: Iterable[T]) -> dict[T, Look]:
    """A look for each name, in order; beyond the last they begin again."""
    distinct = dict.fromkeys(names)
    return dict(zip(distinct, cycle(LOOKS), strict=False))


_NAMES = {
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zeropp": "ZeRO++",
    "co2": "CO2",
    "co2.published": "CO2",
    "co2:penalty=off": "CO2 without penalty",
    "sgd": "SGD",
    "adamw": "AdamW",
    "slowmo": "SlowMo",
}


def shown(strategy: str) -> str:
    """A strategy as papers name it."""
    name, _, options = strategy.partition(":tau=")
    return f"{_NAMES.get(name, name)}, τ = {options}" if options else _NAMES.get(name, name)


def in_style(make: Callable[[], Figure], kinds: Sequence[str]) -> dict[str, bytes]:
    """Files of a figure by their kind.

    The figure is made again for each, so that no file depends on which others are asked for. What
    the user has set for matplotlib does not count.
    """
    with style.context(STYLE_FILE, after_reset=True):
        return {kind: render(make(), kind, mpl.rcParams["savefig.dpi"]) for kind in kinds}


def signs(rows: Sequence[CellPrediction]) -> list[Artist]:
    """What our signs mean, if they occur, as handles of a legend."""
    handles: list[Artist] = []
    uses: tuple[tuple[Use, str], ...] = (
        ("check", "predicted (plain)"),
        ("fit", "fitted, no prediction (italic)"),
    )
    for use, words in uses:
        mine = [row for row in rows if row.cell.use == use]
        if mine:
            interval = ", 90 % interval" if any(row.has_interval for row in mine) else ""
            style: dict[str, Any] = {"marker": "D", "ms": 5, "color": "black", "mfc": face(use)}
            handles.append(Line2D([], [], ls=line(use), label=words + interval, **style))
    return handles


def star(label: str, fill: str = PLAIN.fill) -> Line2D:
    """The handle of published values beside lines."""
    return Line2D([], [], ls="", mfc=fill, label=label, **STAR)


def band(label: str) -> Patch:
    """The handle of intervals of lines."""
    return Patch(color="black", alpha=PALE, lw=0, label=label)


def legend(figure: Figure, handles: Sequence[Artist], columns: int = 2) -> None:
    """Below the figure."""
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def panels(
    width: float, height: float, count: int = 1, **options: Any
) -> tuple[Figure, Sequence[Axes]]:
    """A figure of this width and height, in inches, and its axes, side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False, **options)[0]


def plain_log(axis: Axis, base: float = 10, subs: Sequence[float] = (1,)) -> None:
    """Numbers without exponents along an axis with a logarithmic scale, at these multiples."""
    axis.set_major_locator(LogLocator(base, subs))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_minor_locator(NullLocator())


def face(use: Use) -> str:
    """The inside of a marker: hollow for what was fitted on."""
    return "white" if use == "fit" else "black"


def line(use: Use) -> Literal["-", ":"]:
    """The line of an interval."""
    return ":" if use == "fit" else "-"


def patch(name: str, look: Look) -> Patch:
    """The handle of a published bar."""
    label = f"{name}, published (bold)" if name else "published (bold)"
    return Patch(label=label, **look.of_bars)


_WIDTH = 0.82
"""Of a group, of which the next one is 1 away."""

_ROOM = 1.24
"""Height of an axis, as a multiple of what is drawn: numbers stand above."""

_GAP = 2.5
"""Between what is drawn and the numbers above it, in points."""

_LINE = 8.5
"""Height of a number, in points."""

SMALL: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 7}
"""Of numbers, which stand some points beside what is drawn."""


@dataclass(frozen=True, slots=True)
class PublishedBar:
    """One published value, in a group on the axis."""

    row: CellPrediction
    group: str
    look: Look

    @property
    def top(self) -> float:
        """The end of what is drawn of it."""
        return max(self.row.cell.published, _ends(self.row)[1])


def bar_panel(
    axis: Axes, bars: Sequence[PublishedBar], *, base: float = 0.0, digits: int = 1
) -> None:
    """Bars from `base` on, with the published number in bold and ours, with `digits`, below it."""
    groups: dict[str, list[PublishedBar]] = {}
    for bar in bars:
        groups.setdefault(bar.group, []).append(bar)
    width = _WIDTH / max(2, *(len(some) for some in groups.values()))
    for centre, some in enumerate(groups.values()):
        for index, bar in enumerate(some):
            x = centre + (index - (len(some) - 1) / 2) * width
            height = bar.row.cell.published - base
            axis.bar(x, height, width, bottom=base, linewidth=0.7, **bar.look.of_bars)
            our_value(axis, bar.row, x)
            numbers(axis, bar.row, (x, bar.top), digits)
    axis.set_xticks(range(len(groups)), list(groups))
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(-0.6, len(groups) - 0.4)
    axis.set_ylim(base, base + (max(bar.top for bar in bars) - base) * _ROOM)


def our_value(axis: Axes, row: CellPrediction, x: float) -> None:
    """A diamond with its interval: hollow, with a dotted line, where the value was fitted on."""
    low, high = _ends(row)
    drawn = axis.errorbar(
        x,
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
    for segment in drawn.lines[2]:
        segment.set_linestyle(line(row.cell.use))


def _ends(row: CellPrediction) -> tuple[float, float]:
    return (row.low, row.high) if row.has_interval else (row.predicted, row.predicted)


def numbers(
    axis: Axes,
    row: CellPrediction,
    point: tuple[float, float],
    digits: int,
    *,
    above: bool = True,
    gap: float = _GAP,
) -> None:
    """The published number in bold over ours, above or below a point; ours italic if fitted on."""
    first, second = (gap, gap + _LINE) if above else (-gap - _LINE, -gap)
    ours, kind = f"{row.predicted:,.{digits}f}", "italic" if row.cell.use == "fit" else "normal"
    common: dict[str, Any] = {**SMALL, "va": "bottom" if above else "top"}
    common["bbox"] = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.2}
    axis.annotate(ours, point, (0, first), fontstyle=kind, **common)
    axis.annotate(as_printed(row.cell), point, (0, second), fontweight="bold", **common)


def as_printed(cell: Cell) -> str:
    """The published number with the digits that it was printed with."""
    if cell.rounding and cell.rounding < 1:
        return f"{cell.published:.{round(-math.log10(cell.rounding))}f}"
    return f"{cell.published:,}".removesuffix(".0")
