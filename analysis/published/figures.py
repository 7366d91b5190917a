"""Figures in the style of the papers: predictions and published values side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.published.errors import CellPrediction
from analysis.published.fsdp_figure import fsdp_errors, fsdp_scaling
from analysis.published.fsdp_rows import FsdpRow
from analysis.published.paper_cells import PublishedRun, throughput_cell
from analysis.published.papers import Paper, papers
from analysis.published.parameters import GROUPS
from analysis.published.predict import predict
from analysis.published.sensitivity import GROUP
from co2sim.console.figures import BLUE, GREEN, PURPLE, STYLE, VERMILION, render

Curves = Mapping[str, Sequence[tuple[int, float]]]
"""Predicted throughput by GPUs, for each strategy."""

_STRATEGIES = (
    "zero2",
    "co2:tau=48,worker=node,inner=zero2",
    "co2:tau=12,worker=node,inner=zero2",
)
_GPUS = (8, 16, 32, 64, 128)
"""Of the curves in CO2's figure."""

_COLOURS = {"zero3": BLUE, "zeropp": VERMILION}
_MARKERS = "os^vDP"
_PALE = 0.45
_WIDTH = 0.2


def draw(rows: Sequence[CellPrediction], folder: Path) -> dict[str, bytes]:
    """The figures that the rows have data for, by the names of their files."""
    found: dict[str, bytes] = {}
    sources = {row.cell.source for row in rows}
    if "zeropp" in sources:
        found["zeropp-bars.png"] = bars(rows, "png")
    if GROUP in {row.cell.group for row in rows}:
        found["co2-scalability.png"] = scalability(rows, curves(papers(folder)["co2"]), "png")
    if "vtrain" in sources:
        found["a100-iteration-errors.png"] = scatter(rows, "png")
    if FsdpRow.source in sources:
        found["fsdp-errors.png"] = fsdp_errors(rows, "png")
        found["fsdp-scaling.png"] = fsdp_scaling(rows, "png")
    return found


def curves(paper: Paper) -> Curves:
    """The predictions of CO2's figure."""
    found = {}
    for text in _STRATEGIES:
        name = text.partition(",")[0]
        run = PublishedRun(
            cluster=GROUPS[GROUP].clusters[0], model=paper.setting("model"), strategy=text
        )
        points = []
        for gpus in _GPUS:
            cell = throughput_cell(paper, run, gpus, value=1.0, use="check")
            points.append((gpus, predict(cell)))
        found[name] = points
    return found


def _plain(axis: Axes) -> None:
    axis.grid(visible=True, axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def bars(rows: Sequence[CellPrediction], kind: str) -> bytes:
    """ZeRO++'s bars: throughput by model, one panel for each micro-batch and number of links."""
    cells = [row for row in rows if row.cell.source == "zeropp" and row.cell.labels]
    panels: dict[tuple[str, str], list[CellPrediction]] = {}
    for row in cells:
        labels = row.cell.labels
        panels.setdefault((labels["links"], labels["tokens"]), []).append(row)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.0 * max(1, len(panels)), 3.6), layout="constrained")
        axes = figure.subplots(1, max(1, len(panels)), sharey=True, squeeze=False)[0]
        for axis, ((links, tokens), found) in zip(axes, panels.items(), strict=True):
            _bar_panel(axis, found)
            axis.set_title(f"{links} x 100 Gbit/s, {tokens} tokens per GPU", fontsize=9)
        axes[0].set_ylabel("TFLOP/s per GPU")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False)
        figure.suptitle("ZeRO++ on 384 V100: published and predicted", fontsize=10)
        return render(figure, kind)


def _bar_panel(axis: Axes, found: Sequence[CellPrediction]) -> None:
    sizes = list(dict.fromkeys(row.cell.labels["size"] for row in found))
    for number, strategy in enumerate(("zero3", "zeropp")):
        mine = [row for row in found if row.cell.strategy == strategy]
        places = [
            sizes.index(row.cell.labels["size"]) + (2 * number - 1.5) * _WIDTH for row in mine
        ]
        colour = _COLOURS[strategy]
        axis.bar(
            places,
            [row.cell.published for row in mine],
            _WIDTH,
            color=colour,
            alpha=_PALE,
            label=f"{strategy}, published",
        )
        predicted = [row.predicted for row in mine]
        spread = [
            [max(0.0, row.predicted - row.low) for row in mine],
            [max(0.0, row.high - row.predicted) for row in mine],
        ]
        axis.bar(
            [place + _WIDTH for place in places],
            predicted,
            _WIDTH,
            color=colour,
            yerr=spread,
            error_kw={"elinewidth": 0.8, "capsize": 2},
            label=f"{strategy}, predicted",
        )
    axis.set_xticks(range(len(sizes)), sizes)
    _plain(axis)


def scalability(rows: Sequence[CellPrediction], predicted: Curves, kind: str) -> bytes:
    """CO2's figure: throughput by GPUs, and the scalability ratios."""
    found = [row for row in rows if row.cell.group == GROUP]
    colours = dict(zip(predicted, (BLUE, GREEN, VERMILION, PURPLE), strict=False))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _throughputs(left, [row for row in found if not row.cell.over], predicted, colours)
        _ratios(right, [row for row in found if row.cell.over], colours)
        figure.suptitle("CO2: TransNormerLLM 7B on 80 Gbit/s TCP/IP", fontsize=10)
        return render(figure, kind)


def _throughputs(
    axis: Axes,
    rows: Sequence[CellPrediction],
    predicted: Curves,
    colours: dict[str, str],
) -> None:
    styles = dict(zip(predicted, ("-", "-", "--", ":"), strict=False))
    for name, points in predicted.items():
        axis.plot(
            [gpus for gpus, _ in points],
            [value for _, value in points],
            styles[name],
            color=colours[name],
            label=f"{name}, predicted",
        )
    for row in rows:
        axis.plot(
            int(row.cell.labels["gpus"]),
            row.cell.published,
            "o" if row.cell.use == "fit" else "*",
            color=colours.get(row.cell.strategy, "black"),
            markersize=9,
            markeredgecolor="black",
        )
    axis.plot([], [], "ko", label="published, fitted on")
    axis.plot([], [], "k*", markersize=9, label="published, only compared with")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({gpus for points in predicted.values() for gpus, _ in points})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlabel("GPUs")
    axis.set_ylabel("tokens per second")
    _plain(axis)
    axis.legend(frameon=False, fontsize=8)


def _ratios(axis: Axes, rows: Sequence[CellPrediction], colours: dict[str, str]) -> None:
    """Throughput per GPU on many GPUs over that on few: predicted with its interval, published."""
    for place, row in enumerate(rows):
        colour = colours.get(row.cell.strategy, "black")
        spread = [[row.predicted - row.low], [row.high - row.predicted]]
        axis.errorbar(place - 0.1, row.predicted, yerr=spread, fmt="s", color=colour, capsize=4)
        axis.plot(place + 0.1, row.cell.published, "*", color=colour, ms=11, mec="black")
        for side, value, align in (
            (-0.17, row.predicted, "right"),
            (0.19, row.cell.published, "left"),
        ):
            axis.annotate(f"{value:.2f}", (place + side, value), ha=align, va="center", fontsize=8)
    axis.errorbar([], [], yerr=[], fmt="ks", capsize=4, label="predicted, 90 % interval")
    axis.plot([], [], "k*", ms=9, label="published, only compared with")
    axis.set_xticks(range(len(rows)), [row.cell.strategy for row in rows])
    axis.set_xlim(-0.6, max(0, len(rows) - 1) + 0.6)
    axis.margins(y=0.25)
    axis.set_ylabel("throughput per GPU, 128 over 16 GPUs")
    _plain(axis)
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def scatter(rows: Sequence[CellPrediction], kind: str) -> bytes:
    """Signed errors of the iteration times: a colour for each micro-batch, a marker per hidden."""
    series: dict[tuple[int, int], list[CellPrediction]] = {}
    for row in rows:
        if row.cell.source == "vtrain":
            labels = row.cell.labels
            series.setdefault((int(labels["micro_batch"]), int(labels["hidden"])), []).append(row)
    micros = sorted({micro for micro, _ in series})
    hiddens = sorted({hidden for _, hidden in series})
    shades = mpl.colormaps["viridis"].resampled(len(micros) + 1)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 4.0), layout="constrained")
        axis = figure.subplots()
        for (micro, hidden), some in sorted(series.items()):
            axis.plot(
                [row.cell.published for row in some],
                [row.error * 100 for row in some],
                _MARKERS[hiddens.index(hidden) % len(_MARKERS)],
                color=shades(micros.index(micro)),
                markersize=4,
                label=f"batch {micro}, hidden {hidden}",
            )
        axis.axhline(0, color="black", lw=0.8)
        axis.set_xscale("log")
        axis.set_xlabel("published iteration time, ms")
        axis.set_ylabel("error of the prediction, %")
        axis.set_title("Data-parallel GPT training on A100 of one node", fontsize=10)
        _plain(axis)
        figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=4)
        return render(figure, kind)
