"""Every figure of a set of predictions, as `co2analysis validate` writes them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from analysis.published.errors import CellPrediction
from analysis.published.figures.co2 import scalability
from analysis.published.figures.paper_figures import (
    fsdp_errors,
    fsdp_scaling,
    paper_figures,
    throughput,
)
from analysis.published.figures.style import WIDTH, in_style, plain_log
from analysis.published.tables import FsdpRow, IterationRow

_MARKERS = "os^vDP"


def iteration_errors(rows: Sequence[CellPrediction]) -> Figure:
    """Signed errors over published times: a shade for each micro-batch, a marker per hidden."""
    series: dict[tuple[int, int], list[CellPrediction]] = {}
    for row in rows:
        labels = row.cell.labels
        series.setdefault((int(labels["micro_batch"]), int(labels["hidden"])), []).append(row)
    micros = sorted({micro for micro, _ in series})
    hiddens = sorted({hidden for _, hidden in series})
    shades = mpl.colormaps["viridis"].resampled(len(micros) + 1)
    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    axis = figure.subplots()
    for (micro, hidden), some in sorted(series.items()):
        sign: dict[str, Any] = {
            "marker": _MARKERS[hiddens.index(hidden) % len(_MARKERS)],
            "color": shades(micros.index(micro)),
            "ms": 4,
            "ls": "",
        }
        axis.plot([], [], label=f"batch {micro}, hidden {hidden}", **sign)
        for row in some:
            inside = {"mfc": "white"} if row.cell.use == "fit" else {}
            axis.plot(row.cell.published, row.error * 100, **sign | inside)
    axis.axhline(0, color="black", lw=0.8)
    axis.set_xscale("log")
    plain_log(axis.xaxis, subs=(1, 2, 5))
    axis.set_xlabel("published iteration time, ms")
    axis.set_ylabel("error of ours, %; hollow: fitted on")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


_KIND = "png"

_BY_SOURCE: tuple[tuple[str, str, Callable[[Sequence[CellPrediction]], Figure]], ...] = (
    (IterationRow.source, "a100-iteration-errors", iteration_errors),
    (FsdpRow.source, "fsdp-errors", fsdp_errors),
    (FsdpRow.source, "fsdp-scaling", fsdp_scaling),
)
"""Source, name and function of the figures that mirror none of the source."""

_FURTHER = (("co2", "co2-cells", scalability), ("zeropp", "zeropp-cells", throughput))
"""The same of further cells, which are of no figure."""


def draw(rows: Sequence[CellPrediction], folder: Path) -> dict[str, bytes]:
    """The figures that the rows have data for, by the names of their files."""
    found: dict[str, bytes] = {}
    if any(row.cell.where for row in rows):
        figures, _ = paper_figures(folder, known={row.cell: row for row in rows})
        for figure in figures:
            found |= figure.files([_KIND])
    further = [row for row in rows if not row.cell.where]
    for source, name, make in (*_BY_SOURCE, *_FURTHER):
        mine = [row for row in further if row.cell.source == source]
        if mine:
            found[f"{name}.{_KIND}"] = in_style(partial(make, mine), [_KIND])[_KIND]
    return found
