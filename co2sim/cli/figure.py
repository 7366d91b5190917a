"""The scaling figure: throughput and what is left of it per GPU, one column per cluster."""

import io
from collections.abc import Sequence
from itertools import groupby
from textwrap import fill

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter, NullLocator, PercentFormatter

from co2sim.case import Case
from co2sim.cli.published import THROUGHPUT, Cell, Comparison
from co2sim.result import Result

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#888888")
"""Okabe and Ito: told apart by colour-blind readers."""
_MARKERS = "osD^vP*X"
_WIDTH = 60
"""Characters of a line of a title or of the legend."""


def draw(
    cases: Sequence[Case], results: Sequence[Result], comparisons: Sequence[Comparison]
) -> dict[str, bytes]:
    """The figure as PNG and SVG. Dashed lines do not fit in memory; stars are published."""
    pairs = list(zip(cases, results, strict=True))
    panels = [
        (str(cluster), [result for _, result in group])
        for cluster, group in groupby(pairs, key=lambda pair: pair[0].cluster)
    ]
    names = list(dict.fromkeys(result.strategy for result in results))
    with mpl.rc_context(
        {
            "font.size": 9,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "svg.hashsalt": "co2sim",
            "text.parse_math": False,
        }
    ):
        figure = Figure(figsize=(4.6 * len(panels) + 0.4, 7.2), layout="constrained")
        axes = figure.subplots(2, len(panels), squeeze=False, sharex="col", sharey="row")
        for column, (cluster, found) in enumerate(panels):
            above, below = axes[0][column], axes[1][column]
            cells = [comparison.cell for comparison in comparisons]
            stars = [c for c in cells if (c.cluster, c.quantity) == (cluster, THROUGHPUT)]
            _throughput(above, found, names, stars)
            _per_gpu(below, found, names)
            above.set_title(fill(found[0].cluster, _WIDTH), fontsize=9)
        axes[0][0].set_ylabel(f"{results[0].unit}s/s, all GPUs")
        smallest = min(result.gpus for result in results)
        counted = "1 GPU" if smallest == 1 else f"{smallest} GPUs"
        axes[1][0].set_ylabel(f"throughput per GPU, relative to {counted}")
        handles = {
            label: handle
            for row in axes
            for axis in row
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        labels = [fill(label, _WIDTH) for label in handles]
        figure.legend(handles.values(), labels, loc="outside lower center", ncols=2, frameon=False)
        first = results[0]
        figure.suptitle(
            f"{first.model}, {first.tokens_per_gpu_per_step:,} {first.unit}s per GPU and step,"
            f" {first.precision}"
        )
        return {kind: _render(figure, kind) for kind in ("png", "svg")}


def _render(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def _lines(axis: Axes, results: Sequence[Result], names: Sequence[str], per_gpu: bool) -> None:  # noqa: FBT001
    for strategy, group in groupby(results, key=lambda result: result.strategy):
        found = list(group)
        place = names.index(strategy)
        base = found[0].tokens_per_s_per_gpu
        fits = all(result.fits_in_memory for result in found)
        axis.plot(
            [r.gpus for r in found],
            [r.tokens_per_s_per_gpu / base if per_gpu else r.tokens_per_s for r in found],
            color=_COLOURS[place % len(_COLOURS)],
            marker=_MARKERS[place % len(_MARKERS)],
            linestyle="-" if fits else "--",
            markerfacecolor=None if fits else "white",
            label=strategy if fits else f"{strategy} (does not fit in memory)",
            markersize=5,
        )
    sizes = sorted({result.gpus for result in results})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.xaxis.set_minor_locator(NullLocator())


def _throughput(
    axis: Axes, results: Sequence[Result], names: Sequence[str], stars: Sequence[Cell]
) -> None:
    _lines(axis, results, names, per_gpu=False)
    best = max(results, key=lambda result: result.tokens_per_s_per_gpu)
    ends = [min(r.gpus for r in results), max(r.gpus for r in results)]
    axis.plot(
        ends,
        [best.tokens_per_s_per_gpu * gpus for gpus in ends],
        color="grey",
        linestyle=":",
        label="linear from the best per GPU",
        zorder=1,
    )
    for place, name in enumerate(names):
        mine = [star for star in stars if star.strategy == name]
        if mine:
            axis.plot(
                [star.sizes[0] for star in mine],
                [star.value for star in mine],
                color=_COLOURS[place % len(_COLOURS)],
                marker="*",
                markersize=13,
                markerfacecolor="none",
                linestyle="none",
                label=f"{name}, published",
            )
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(EngFormatter(sep=""))  # 100k: math is off, for names with $
    axis.yaxis.set_minor_formatter(NullFormatter())


def _per_gpu(axis: Axes, results: Sequence[Result], names: Sequence[str]) -> None:
    _lines(axis, results, names, per_gpu=True)
    axis.set_xlabel("GPUs")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
