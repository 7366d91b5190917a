"""The scaling figure: throughput, and throughput per GPU, one column per cluster."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import (
    EngFormatter,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)

from co2sim.case import Case
from co2sim.console.figures import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from co2sim.console.result_tables import speeds
from co2sim.published_cells import ThroughputCell
from co2sim.published_speeds import SpeedComparison
from co2sim.result import Result
from co2sim.units import counted

_MARKERS = "osD^vPpX"
"""A star is a published value."""
_DASHES: tuple[Any, ...] = ("-", "-.", (0, (6, 1.5, 1, 1.5, 1, 1.5)))
"""Lines of the first eight strategies, the second and the third; "--" does not fit in memory."""
_PANEL = 4.6
"""Inches of a column."""
_PER_INCH = 13
"""Characters of the font of 9 points."""
_HANDLE = 8
"""Characters that the sign before a name in the legend takes, with its gaps."""
_LINE = 0.17
"""Inches."""
_TICKS = 3
"""Labelled ticks of a log axis, at least."""
_BAND = 0.18
"""Opacity of an interval: a few of them may lie on each other."""
_LINEAR: Any = {"color": "black", "linestyle": ":", "linewidth": 1.2}
_MOST_SIZES = 9
"""Labels of GPU counts that one axis has room for."""


def draw(
    cases: Sequence[Case], results: Sequence[Result], comparisons: Sequence[SpeedComparison]
) -> dict[str, bytes]:
    """The figure as PNG and SVG. Bands are 90 % intervals, stars are published.

    Dashed lines do not fit in memory.
    """
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        drawn = figure(cases, results, comparisons)
        return {kind: render(drawn, kind) for kind in ("png", "svg")}


def figure(
    cases: Sequence[Case], results: Sequence[Result], comparisons: Sequence[SpeedComparison]
) -> Figure:
    """The figure, as large as its panels and its legend need."""
    pairs = list(zip(cases, results, strict=True))
    panels = [
        (str(cluster), [result for _, result in group])
        for cluster, group in groupby(pairs, key=lambda pair: pair[0].cluster)
    ]
    names = list(dict.fromkeys(result.strategy for result in results))
    published = [
        comparison
        for comparison in comparisons
        if isinstance(comparison.cell, ThroughputCell) and comparison.strategy in names
    ]
    width = _PANEL * max(len(panels), 1.3) + 0.4
    text = int(width * _PER_INCH)
    handles = _handles(names, [found for _, found in panels], published)
    columns = max(1, min(3, text // (max(len(str(h.get_label())) for h in handles) + _HANDLE)))
    labels = [fill(str(h.get_label()), text - _HANDLE) for h in handles]
    titles = [fill(found[0].cluster, text // len(panels) - 4) for _, found in panels]
    lines = sum(label.count("\n") + 1 for label in labels) / columns
    lines += max(title.count("\n") for title in titles)
    drawn = Figure(figsize=(width, 6.6 + _LINE * lines), layout="constrained")
    axes = drawn.subplots(2, len(panels), squeeze=False, sharex="col", sharey="row")
    for (cluster, found), title, above, below in zip(panels, titles, *axes, strict=True):
        stars = [star for star in published if star.cell.cluster == cluster]
        _throughput(above, found, names, stars)
        _per_gpu(below, found, names)
        _count_ticks(below, [*(r.gpus for r in found), *(star.cell.sizes[0] for star in stars)])
        above.set_title(title, fontsize=9)
    _log_ticks(axes[0][0])
    axes[0][0].set_ylabel(f"{results[0].unit}s/s, all GPUs")
    smallest = counted(min(result.gpus for result in results), "GPU")
    axes[1][0].set_ylabel(f"throughput per GPU, relative to {smallest}")
    drawn.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    first = results[0]
    batch = counted(first.tokens_per_gpu_per_step, first.unit)
    uneven = speeds(cases[0].noise)
    heading = f"{first.model}, {batch} per GPU and step, {first.precision}"
    heading += f"; {uneven}" if uneven else ""
    drawn.suptitle(fill(heading, int(0.8 * text)))
    return drawn


def _handles(
    names: Sequence[str], panels: Sequence[Sequence[Result]], stars: Sequence[SpeedComparison]
) -> list[Line2D | Patch]:
    """The legend: a line for every strategy, and one for every other sign that occurs."""

    def sign(label: str, color: str, linestyle: Any, marker: str, *, full: bool) -> Line2D:
        face = color if full else "white"
        return Line2D(
            [],
            [],
            color=color,
            linestyle=linestyle,
            marker=marker,
            markersize=5 if marker != "*" else 11,
            markerfacecolor=face,
            label=label,
        )

    found: list[Line2D | Patch] = [
        sign(name, *_look(place), full=True) for place, name in enumerate(names)
    ]
    if not all(result.fits_in_memory for results in panels for result in results):
        found.append(sign("hollow: does not fit in memory", "grey", "--", "o", full=False))
    if stars:
        found.append(sign("published", "grey", "none", "*", full=False))
    if any(_has_band(result) for results in panels for result in results):
        found.append(Patch(color="grey", alpha=_BAND, linewidth=0, label="90 % interval"))
    if any(_has_line(group) for group in panels):
        found.append(Line2D([], [], **_LINEAR, label="linear from the best per GPU"))
    return found


def _look(place: int) -> tuple[str, Any, str]:
    """Colour, line and marker of a strategy by its place: no two of the first 64 are alike."""
    turn, at = divmod(place, len(COLOURS))
    return COLOURS[at], _DASHES[turn % len(_DASHES)], _MARKERS[(at + turn) % len(_MARKERS)]


def _has_line(results: Sequence[Result]) -> bool:
    """Whether there are two sizes, between which a line can be drawn."""
    return len({result.gpus for result in results}) > 1


def _lines(axis: Axes, results: Sequence[Result], names: Sequence[str], per_gpu: bool) -> None:  # noqa: FBT001
    for strategy, group in groupby(results, key=lambda result: result.strategy):
        found = list(group)
        color, line, marker = _look(names.index(strategy))
        base = found[0].tokens_per_s_per_gpu
        x = [r.gpus for r in found]
        y = [r.tokens_per_s_per_gpu / base if per_gpu else r.tokens_per_s for r in found]
        fits = [r.fits_in_memory for r in found]
        _band(axis, found, color, base if per_gpu else None)
        style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 5}
        axis.plot(x, y, **style, linestyle=line if all(fits) else "--")
        hollow = [at for at, fit in enumerate(fits) if not fit]
        axis.plot(
            [x[at] for at in hollow],
            [y[at] for at in hollow],
            **style,
            linestyle="none",
            markerfacecolor="white",
        )


def _band(axis: Axes, results: Sequence[Result], color: str, base: float | None) -> None:
    """The 90 % intervals of one strategy, in all or per GPU relative to `base`.

    A single size has a vertical line. Nothing is drawn where there is no interval.
    """
    known = [
        (r.gpus, r.tokens_per_s_low, r.tokens_per_s_high)
        for r in results
        if r.tokens_per_s_low is not None and r.tokens_per_s_high is not None
    ]
    if not known:
        return
    x = [gpus for gpus, _, _ in known]
    low, high = (
        [pair[place] / (pair[0] * base if base else 1) for pair in known] for place in (1, 2)
    )
    if len(known) > 1:
        axis.fill_between(x, low, high, color=color, alpha=_BAND, linewidth=0)
    else:
        axis.vlines(x, low, high, color=color, alpha=2 * _BAND, linewidth=4)


def _has_band(result: Result) -> bool:
    return result.tokens_per_s_low is not None


def _count_ticks(axis: Axes, gpus: Sequence[int]) -> None:
    """A label for every count, or for as many as there is room for."""
    sizes = sorted(set(gpus))
    axis.set_xscale("log", base=2)
    labelled = list(_spread(sizes))
    axis.set_xticks(labelled, [str(size) for size in labelled])
    axis.xaxis.set_minor_locator(NullLocator())


def _spread(sizes: Sequence[int]) -> Iterator[int]:
    """The sizes that have room for a label: the last one, and those far enough from others."""
    least = math.log(sizes[-1] / sizes[0]) / _MOST_SIZES
    last = -math.inf
    for size in sizes[:-1]:
        place = math.log(size)
        if place - last >= least and math.log(sizes[-1]) - place >= least:
            last = place
            yield size
    yield sizes[-1]


def _throughput(
    axis: Axes, results: Sequence[Result], names: Sequence[str], stars: Sequence[SpeedComparison]
) -> None:
    _lines(axis, results, names, per_gpu=False)
    best = max(results, key=lambda result: result.tokens_per_s_per_gpu)
    ends = [min(r.gpus for r in results), max(r.gpus for r in results)]
    linear = [best.tokens_per_s_per_gpu * gpus for gpus in ends]
    if _has_line(results):
        axis.plot(ends, linear, **_LINEAR, zorder=3)  # seen on top of a strategy that is as good
    for place, name in enumerate(names):
        mine = [star for star in stars if star.strategy == name]
        axis.plot(
            [star.cell.sizes[0] for star in mine],
            [star.cell.value for star in mine],
            color=_look(place)[0],
            marker="*",
            markersize=13,
            markerfacecolor="none",
            linestyle="none",
        )
    axis.set_yscale("log")


def _log_ticks(axis: Axes) -> None:
    """Label at least three values: powers of ten, then 1, 2, 5 of each, then round numbers."""
    low, high = axis.get_ylim()
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in ((1,), (1, 2, 5), range(1, 10)):
        ticks = [digit * 10.0**power for power in exponents for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= _TICKS:
            break
    else:
        values = MaxNLocator(nbins=5).tick_values(low, high)
        ticks = [float(value) for value in values if low <= value <= high]
    axis.set_yticks(ticks)
    axis.yaxis.set_major_formatter(EngFormatter(sep=""))  # 100k: math is off, for names with $
    axis.yaxis.set_minor_formatter(NullFormatter())


def _per_gpu(axis: Axes, results: Sequence[Result], names: Sequence[str]) -> None:
    _lines(axis, results, names, per_gpu=True)
    axis.set_xlabel("GPUs")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
