"""The style of figures in papers: what tells series apart, and how a figure becomes files.

Published values are bars or stars. Ours are diamonds or points on lines, filled where they are
predicted and hollow where constants were fitted on the published value. Series differ in lightness,
hatch, marker and line as well as in colour, so that grey print shows them, too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import matplotlib as mpl
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator
from matplotlib.typing import LineStyleType

from analysis.published.errors import CellPrediction
from co2sim.common.plots import BLACK, BLUE, GREEN, PURPLE, VERMILION, render
from co2sim.prediction.published import Use

T = TypeVar("T")

FORMATS = ("pdf", "svg", "png")
"""Kinds of files of a paper figure."""

PREDICTED, FITTED = "predicted", "fitted, no prediction"
"""What our values are, in legends."""

STAR: dict[str, Any] = {"marker": "*", "ms": 11, "mec": "black", "mew": 0.8}
"""A published value beside lines."""

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
    return {name: LOOKS[place % len(LOOKS)] for place, name in enumerate(distinct)}


_NAMES = {
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zeropp": "ZeRO++",
    "co2": "CO2",
    "co2:penalty=off": "CO2 without penalty",
    "sgd": "SGD",
    "adamw": "AdamW",
    "slowmo": "SlowMo",
}


def shown(strategy: str) -> str:
    """A strategy as papers name it."""
    name, _, options = strategy.partition(":tau=")
    return f"{_NAMES.get(name, name)}, τ = {options}" if options else _NAMES.get(name, name)


def in_style(make: Callable[[], Figure], kinds: Sequence[str] = FORMATS) -> dict[str, bytes]:
    """Files of a figure by their kind.

    The figure is made anew for each, so that no file depends on which others are asked for. What
    the user has set for matplotlib does not count.
    """
    with style.context(STYLE_FILE, after_reset=True):
        return {kind: render(make(), kind, mpl.rcParams["savefig.dpi"]) for kind in kinds}


def signs(rows: Sequence[CellPrediction], published: Sequence[Artist]) -> list[Artist]:
    """Handles of a legend: those of published values, and what our signs mean, if they occur."""
    found = list(published)
    uses: tuple[tuple[Use, str], ...] = (
        ("check", f"{PREDICTED} (plain)"),
        ("fit", f"{FITTED} (italic)"),
    )
    for use, words in uses:
        mine = [row for row in rows if row.cell.use == use]
        if mine:
            interval = ", 90 % interval" if any(row.has_interval for row in mine) else ""
            sign = Line2D([], [], ls=line(use), marker="D", ms=5, color="black", mfc=face(use))
            sign.set_label(words + interval)
            found.append(sign)
    return found


def legend(figure: Figure, handles: Sequence[Artist], columns: int = 2) -> None:
    """Below the figure."""
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


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
    return Patch(facecolor=look.fill, edgecolor=look.colour, hatch=look.hatch, label=label)
