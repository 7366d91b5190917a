"""LLM Foundry's runs: errors over the length of sequences, and throughput over GPUs."""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.published.errors import CellPrediction
from analysis.published.fsdp_rows import FsdpRow
from co2sim.console.figures import BLUE, GREEN, STYLE, VERMILION, render

_COLOURS = (BLUE, VERMILION, GREEN)
_SIDE = 0.07
"""By which the GPUs stand apart, as a power of two."""


def fsdp_runs(rows: Sequence[CellPrediction], kind: str) -> bytes:
    """Signed errors of all runs; tokens/s per GPU of those on several nodes, with intervals."""
    mine = [row for row in rows if row.cell.source == FsdpRow.source]
    gpus = list(dict.fromkeys(row.cell.labels["gpu"] for row in mine))
    colours = dict(zip(gpus, _COLOURS, strict=False))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for place, (gpu, colour) in enumerate(colours.items()):
            some = [row for row in mine if row.cell.labels["gpu"] == gpu]
            shift = 2.0 ** (_SIDE * (place - 1))
            for use, fill in (("fit", colour), ("check", "none")):
                left.plot(
                    [_tokens(row) * shift for row in some if row.cell.use == use],
                    [row.error * 100 for row in some if row.cell.use == use],
                    "o",
                    color=colour,
                    markerfacecolor=fill,
                    markersize=4,
                )
            left.plot([], [], "o", color=colour, markersize=4, label=_shown(gpu))
        left.axhline(0, color="black", lw=0.8)
        left.set_xscale("log", base=2)
        left.set_xlabel("tokens in a sequence")
        left.set_ylabel("error of the prediction, %")
        left.legend(frameon=False, fontsize=8)
        _families(right, [r for r in mine if r.cell.labels["nodes"] == "several nodes"], colours)
        for axis in (left, right):
            axis.grid(visible=True, axis="y", alpha=0.3)
            axis.set_axisbelow(True)
        figure.suptitle("MPT with FSDP: predicted against published", fontsize=10)
        return render(figure, kind)


def _tokens(row: CellPrediction) -> float:
    return float(dict(row.cell.setup.model_overrides)["seq_len"])


def _shown(gpu: str) -> str:
    return gpu.upper().replace("_", "-").removesuffix("GB")


def _families(
    axis: Axes, rows: Sequence[CellPrediction], colours: dict[str, str]
) -> None:
    """Predictions with their intervals as lines and bands, published values as stars."""
    families: dict[tuple[str, str], list[CellPrediction]] = {}
    for row in sorted(rows, key=lambda row: row.cell.setup.gpus):
        families.setdefault((row.cell.labels["model"], row.cell.labels["gpu"]), []).append(row)
    for (model, gpu), some in families.items():
        sizes = [row.cell.setup.gpus for row in some]

        def each(values: Sequence[float], sizes: Sequence[int] = sizes) -> list[float]:
            return [value / size for value, size in zip(values, sizes, strict=True)]

        colour = colours[gpu]
        axis.plot(sizes, each([row.predicted for row in some]), color=colour, lw=1.2)
        ends = each([row.low for row in some]), each([row.high for row in some])
        axis.fill_between(sizes, *ends, color=colour, alpha=0.15, lw=0)
        axis.plot(
            sizes, each([row.cell.published for row in some]), "*", color=colour, mec="black", ms=9
        )
        axis.annotate(
            f"{model}, {_shown(gpu)}",
            (sizes[0], each([some[0].high])[0] if some[0].has_interval else 0),
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=8,
        )
    axis.plot([], [], "k*", ms=9, label="published")
    axis.plot([], [], "k-", lw=1.2, label="predicted, 90 % interval")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({row.cell.setup.gpus for row in rows})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    levels = [500, 1000, 2000, 5000, 10000]
    axis.set_yticks(levels, [f"{level:,}" for level in levels])
    axis.set_xlabel("GPUs")
    axis.set_ylabel("tokens per second and GPU")
    axis.legend(frameon=False, fontsize=8)
