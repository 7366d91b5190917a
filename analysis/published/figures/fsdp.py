"""LLM Foundry's runs: errors over the length of sequences, and how throughput scales with GPUs."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.typing import LineStyleType

from analysis.published.errors import CellPrediction
from analysis.published.figures.style import STAR, WIDTH, legend, looks, plain_log

_SIDE = 0.07
"""By which the GPUs stand apart, as a power of two."""


def fsdp_errors(rows: Sequence[CellPrediction]) -> Figure:
    """Signed errors of all runs over the length of a sequence."""
    look = looks(row.cell.labels["gpu"] for row in rows)
    figure = Figure(figsize=(WIDTH / 1.2, 4.0), layout="constrained")
    axis = figure.subplots()
    for place, (gpu, one) in enumerate(look.items()):
        shift = 2.0 ** (_SIDE * (place - 1))
        for use, fill in (("fit", "white"), ("check", one.colour)):
            some = [row for row in rows if (row.cell.labels["gpu"], row.cell.use) == (gpu, use)]
            axis.plot(
                [_tokens(row) * shift for row in some],
                [row.error * 100 for row in some],
                one.marker,
                color=one.colour,
                markerfacecolor=fill,
                markersize=4,
            )
    axis.axhline(0, color="black", lw=0.8)
    axis.set_xscale("log", base=2)
    plain_log(axis.xaxis, 2)
    axis.set_xlabel("tokens in a sequence")
    axis.set_ylabel("error of ours, %")
    gpus = [_sign(one.marker, one.colour, _shown(gpu), ls="") for gpu, one in look.items()]
    legend(figure, [*gpus, *_uses(rows, "")], columns=3)
    return figure


def fsdp_scaling(rows: Sequence[CellPrediction]) -> Figure:
    """Throughput per GPU over GPUs, relative to ours for the fewest: band and stars.

    A panel for each model and GPU that ran on several nodes.
    """
    families: dict[tuple[str, str], list[CellPrediction]] = {}
    for row in sorted(rows, key=lambda row: row.cell.setup.gpus):
        labels = row.cell.labels
        if labels["nodes"] == "several nodes":
            families.setdefault((labels["gpu"], labels["model"]), []).append(row)
    families = {key: some for key, some in sorted(families.items()) if len(some) > 1}
    shown = [row for some in families.values() for row in some]
    figure = Figure(figsize=(max(WIDTH, 1.75 * len(families)), 3.0), layout="constrained")
    axes = figure.subplots(1, max(1, len(families)), sharey=True, squeeze=False)[0]
    look = looks(families)
    for axis, (family, some) in zip(axes, families.items(), strict=False):
        sizes = [row.cell.setup.gpus for row in some]
        base = some[0].predicted / sizes[0] / 100
        shares = {
            name: [value / size / base for value, size in zip(values, sizes, strict=True)]
            for name, values in {
                "low": [row.low for row in some],
                "high": [row.high for row in some],
                "ours": [row.predicted for row in some],
                "published": [row.cell.published for row in some],
            }.items()
        }
        one = look[family]
        axis.fill_between(sizes, shares["low"], shares["high"], color=one.colour, alpha=0.2, lw=0)
        axis.plot(sizes, shares["ours"], "-", color=one.colour)
        for row, size, share in zip(some, sizes, shares["ours"], strict=True):
            fill = "white" if row.cell.use == "fit" else one.colour
            axis.plot(size, share, "o", color=one.colour, mfc=fill, ms=4, zorder=4)
        axis.plot(sizes, shares["published"], ls="", mfc=one.fill, **STAR)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{size}" for size in sizes], fontsize=7)
        axis.minorticks_off()
        axis.margins(x=0.12)
        gpu, model = family
        axis.set_title(f"{model.upper()}, {_shown(gpu)}")
        axis.set_xlabel("GPUs")
    axes[0].set_ylabel("tokens/s per GPU, % of ours\nfor the fewest GPUs")
    star = Line2D([], [], ls="", mfc="white", label="published", **STAR)
    band = Patch(color="black", alpha=0.2, lw=0, label="90 % interval")
    legend(figure, [star, *_uses(shown, "-"), band], columns=4)
    return figure


def _uses(rows: Sequence[CellPrediction], ls: LineStyleType) -> list[Line2D]:
    """Handles for hollow and filled points, if they occur."""
    signs = (("check", "black", "ours, predicted"), ("fit", "white", "ours, fitted on these runs"))
    uses = {row.cell.use for row in rows}
    return [_sign("o", "black", words, ls, fill) for use, fill, words in signs if use in uses]


def _sign(marker: str, colour: str, label: str, ls: LineStyleType, fill: str = "white") -> Line2D:
    made = Line2D([], [], marker=marker, color=colour, markerfacecolor=fill, ms=4, label=label)
    made.set_linestyle(ls)
    return made


def _tokens(row: CellPrediction) -> float:
    return float(dict(row.cell.setup.model_overrides)["seq_len"])


def _shown(gpu: str) -> str:
    return gpu.upper().replace("_", "-").removesuffix("GB")
