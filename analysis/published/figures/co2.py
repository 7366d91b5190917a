"""CO2's Table 3 as a figure: throughput over GPUs, and the scalability ratios."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from analysis.published.cells import Cell
from analysis.published.errors import CellPrediction, validate
from analysis.published.figures.style import (
    PLAIN,
    STAR,
    WIDTH,
    Look,
    PublishedBar,
    bar_panel,
    legend,
    looks,
    numbers,
    plain_log,
    shown,
    signs,
)
from analysis.published.parameters import GROUPS
from analysis.published.sensitivity import GROUP
from co2sim.prediction.published import Use

Series: TypeAlias = tuple[str, str, str]
"""Strategy, cluster and model."""

SIZES = (8, 16, 32, 64, 128)
"""GPUs of the curves, beside those of the published cells."""

_PALE = 0.2
"""Opacity of a band."""

_MAX_POINTS = 512
"""Points of curves that are kept."""


def scalability(rows: Sequence[CellPrediction]) -> Figure:
    """Lines over GPUs with published stars, and published ratios as bars with ours on them."""
    lines = curves(rows)
    look = looks(lines)
    speeds, ratios = (
        [row for row in rows if bool(row.cell.over) is both] for both in (False, True)
    )
    figure = Figure(figsize=(WIDTH, 4.1), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _throughputs(left, speeds, lines, look)
    if ratios:
        _ratios(right, ratios, look)
    else:
        right.remove()
    handles: list[Artist] = [
        Line2D([], [], color=one.colour, ls=one.line, marker=one.marker, label=_name(series))
        for series, one in look.items()
    ]
    star = Line2D([], [], ls="", mfc=PLAIN.fill, label="tokens/s, published (bold)", **STAR)
    band = Patch(color="black", alpha=_PALE, lw=0, label="90 % interval of a line")
    bar = Patch(facecolor="white", edgecolor="black", label="ratio, published (bold)")
    handles += [star, *([bar] if ratios else []), band]
    legend(figure, signs(rows, handles))
    return figure


def _series(row: CellPrediction) -> Series:
    return row.cell.strategy, row.cell.setup.cluster, row.cell.setup.model


def _name(series: Series) -> str:
    """The strategy; clusters of the catalog other than the one of Table 3 are named, too."""
    strategy, cluster, _ = series
    return shown(strategy) if cluster in GROUPS[GROUP].clusters else f"{shown(strategy)}, {cluster}"


def _ratios(axis: Axes, rows: Sequence[CellPrediction], look: Mapping[Series, Look]) -> None:
    sizes = [(row.cell.setup.gpus, row.cell.over[0].gpus) for row in rows]
    same = len(set(sizes)) == 1
    bars = []
    for row, (large, small) in zip(rows, sizes, strict=True):
        group = _name(_series(row)).replace(", ", ",\n")
        group += "" if same else f"\n{large} over {small}"
        bars.append(PublishedBar(row, group, look[_series(row)]))
    bar_panel(axis, bars, digits=2)
    words = f": {sizes[0][0]} over {sizes[0][1]} GPUs" if same else ""
    axis.set_title(f"throughput per GPU{words}")


def curves(rows: Sequence[CellPrediction]) -> dict[Series, list[CellPrediction]]:
    """Our throughput over GPUs with its interval; a point is fitted where a published one was."""
    sizes = sorted({*SIZES, *(setup.gpus for row in rows for setup in row.cell.setups)})
    fitted = {row.cell.setup for row in rows if row.cell.use == "fit" and not row.cell.over}
    found: dict[Series, list[CellPrediction]] = {}
    for row in rows:
        if _series(row) in found:
            continue
        points = found[_series(row)] = []
        for gpus in sizes:
            setup = row.cell.setup.changed(gpus=gpus)
            plain = replace(row.cell, runs=(setup,), over=())
            use: Use = "fit" if setup in fitted else "check"
            points.append(_predicted(replace(plain, rounding=0.0, published=1.0, use=use)))
    return found


@lru_cache(_MAX_POINTS)
def _predicted(cell: Cell) -> CellPrediction:
    """A point of a curve, which every kind of file needs."""
    return validate([cell])[0]


def _throughputs(
    axis: Axes,
    rows: Sequence[CellPrediction],
    lines: Mapping[Series, Sequence[CellPrediction]],
    look: Mapping[Series, Look],
) -> None:
    for name, points in lines.items():
        _line(axis, points, look[name])
    for row in rows:
        gpus = row.cell.setup.gpus
        fill = look[_series(row)].fill
        axis.plot(gpus, row.cell.published, ls="", mfc=fill, zorder=3, **STAR)
        lowest = min(lines[_series(row)], key=lambda one: one.predicted)
        above = lowest.cell.setup != row.cell.setup
        ends = (row.cell.published, row.predicted)
        numbers(axis, row, (gpus, max(ends) if above else min(ends)), 0, above=above, gap=6)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    sizes = [row.cell.setup.gpus for row in next(iter(lines.values()))]
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_xlim(sizes[0] / 1.45, sizes[-1] * 1.45)
    low, high = axis.get_ylim()
    axis.set_ylim(low / 1.8, high * 1.7)
    plain_log(axis.yaxis, subs=(1, 3))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("GPUs")
    axis.set_title("tokens per second")


def _line(axis: Axes, points: Sequence[CellPrediction], look: Look) -> None:
    """A curve in its band; points are filled where they are predicted, hollow where fitted on."""
    gpus = [point.cell.setup.gpus for point in points]
    values = [point.predicted for point in points]
    if all(point.has_interval for point in points):
        low, high = [point.low for point in points], [point.high for point in points]
        axis.fill_between(gpus, low, high, color=look.colour, alpha=_PALE, lw=0)
    axis.plot(gpus, values, ls=look.line, color=look.colour)
    for point, size, value in zip(points, gpus, values, strict=True):
        fitted = point.cell.use == "fit"
        inside, layer = ("white", 5) if fitted else (look.colour, 4)
        axis.plot(size, value, look.marker, color=look.colour, mfc=inside, ms=4, zorder=layer)
