"""LLM Foundry's runs: errors over the length of sequences, and how throughput scales with GPUs."""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from analysis.published.errors import CellPrediction
from analysis.published.fsdp_rows import FsdpRow
from co2sim.console.figures import BLUE, COLOURS, GREEN, STYLE, VERMILION, render

_COLOURS = (BLUE, VERMILION, GREEN)
_SIDE = 0.07
"""By which the GPUs stand apart, as a power of two."""


def fsdp_errors(rows: Sequence[CellPrediction], kind: str) -> bytes:
    """Signed errors of all runs over the length of a sequence."""
    mine = [row for row in rows if row.cell.source == FsdpRow.source]
    gpus = list(dict.fromkeys(row.cell.labels["gpu"] for row in mine))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.0, 4.0), layout="constrained")
        axis = figure.subplots()
        for place, (gpu, colour) in enumerate(zip(gpus, _COLOURS, strict=False)):
            some = [row for row in mine if row.cell.labels["gpu"] == gpu]
            shift = 2.0 ** (_SIDE * (place - 1))
            for use, fill in (("fit", colour), ("check", "none")):
                axis.plot(
                    [_tokens(row) * shift for row in some if row.cell.use == use],
                    [row.error * 100 for row in some if row.cell.use == use],
                    "o",
                    color=colour,
                    markerfacecolor=fill,
                    markersize=4,
                )
            axis.plot([], [], "o", color=colour, markersize=4, label=_shown(gpu))
        axis.axhline(0, color="black", lw=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens in a sequence")
        axis.set_ylabel("error of the prediction, %")
        axis.legend(frameon=False, fontsize=8)
        axis.grid(visible=True, axis="y", alpha=0.3)
        axis.set_title("MPT with FSDP: error of every run", fontsize=10)
        return render(figure, kind)


def fsdp_scaling(rows: Sequence[CellPrediction], kind: str) -> bytes:
    """Throughput per GPU over GPUs, relative to the prediction for the fewest: band and stars.

    A panel for each model and GPU that ran on several nodes.
    """
    families: dict[tuple[str, str], list[CellPrediction]] = {}
    for row in sorted(rows, key=lambda row: row.cell.setup.gpus):
        labels = row.cell.labels
        if row.cell.source == FsdpRow.source and labels["nodes"] == "several nodes":
            families.setdefault((labels["gpu"], labels["model"]), []).append(row)
    families = {key: some for key, some in sorted(families.items()) if len(some) > 1}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.4 * max(2, len(families)), 3.4), layout="constrained")
        axes = figure.subplots(1, max(1, len(families)), sharey=True, squeeze=False)[0]
        for axis, ((gpu, model), some), colour in zip(
            axes, families.items(), COLOURS, strict=False
        ):
            sizes = [row.cell.setup.gpus for row in some]
            base = some[0].predicted / sizes[0] / 100
            shares = {
                name: [value / size / base for value, size in zip(values, sizes, strict=True)]
                for name, values in {
                    "low": [row.low for row in some],
                    "high": [row.high for row in some],
                    "predicted": [row.predicted for row in some],
                    "published": [row.cell.published for row in some],
                }.items()
            }
            axis.fill_between(sizes, shares["low"], shares["high"], color=colour, alpha=0.2, lw=0)
            axis.plot(sizes, shares["predicted"], "o-", color=colour, lw=1.4, markersize=3)
            axis.plot(sizes, shares["published"], "*", color=colour, mec="black", ms=9)
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [f"{size}" for size in sizes])
            axis.minorticks_off()
            axis.margins(x=0.12)
            axis.set_title(f"{model.upper()}, {_shown(gpu)}", fontsize=9)
            axis.set_xlabel("GPUs")
            axis.grid(visible=True, axis="y", alpha=0.3)
        axes[0].set_ylabel("tokens/s per GPU, % of the\nprediction for the fewest")
        axes[0].plot([], [], "k*", ms=9, label="published")
        axes[0].plot([], [], "ko-", lw=1.4, markersize=3, label="predicted")
        axes[0].fill_between([], [], [], color="black", alpha=0.2, label="90 % interval")
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        return render(figure, kind)


def _tokens(row: CellPrediction) -> float:
    return float(dict(row.cell.setup.model_overrides)["seq_len"])


def _shown(gpu: str) -> str:
    return gpu.upper().replace("_", "-").removesuffix("GB")
