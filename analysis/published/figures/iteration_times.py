"""vTrain's iteration times: the error of every run."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from analysis.published.errors import CellPrediction
from analysis.published.figures.style import WIDTH, plain_log

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
