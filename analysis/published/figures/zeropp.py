"""ZeRO++'s figures: throughput by model, speed-ups, and the volume between nodes."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.published.cells import Cell
from analysis.published.errors import CellPrediction
from analysis.published.figures.style import (
    PLAIN,
    WIDTH,
    PublishedBar,
    bar_panel,
    legend,
    looks,
    patch,
    shown,
    signs,
)
from analysis.published.parameters import model_of

_GBITS_A_LINK = 100

_FEWEST = 2.4
"""Bars that a panel is at least as wide as."""

_BAR, _LEAST = 0.7, 0.34
"""Inches for a bar: where there is room, and at least."""

_PANEL = 1.7
"""Inches that a panel has at least, for its title."""

_PARTS = {
    "forward_all_gather": "forward\nall-gather",
    "backward_all_gather": "backward\nall-gather",
    "gradient_reduce_scatter": "gradients'\nreduce-scatter",
    "total": "total",
}


def throughput(rows: Sequence[CellPrediction]) -> Figure:
    """Throughput by model, a panel for each number of links and micro-batch, and ratios at last."""
    bars: dict[tuple[str, str], list[CellPrediction]] = {}
    ratios: dict[tuple[int, int], list[CellPrediction]] = {}
    for row in rows:
        if row.cell.over:
            ratios.setdefault(_links(row.cell), []).append(row)
        else:
            labels = row.cell.labels
            bars.setdefault((labels["links"], labels["tokens"]), []).append(row)
    widths: list[float] = [max(_FEWEST, len(some)) for some in (*bars.values(), *ratios.values())]
    roomy = min(WIDTH, 1.0 + _BAR * sum(widths)) if bars else 0.0
    width = max(WIDTH / 1.5, roomy, _LEAST * sum(widths), _PANEL * len(widths))
    figure = Figure(figsize=(width, 3.2), layout="constrained")
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    look = looks(["zero3", "zeropp"])
    plain = axes[: len(bars)]
    for axis, ((links, tokens), some) in zip(plain, bars.items(), strict=True):
        mine = [PublishedBar(row, row.cell.labels["size"], look[row.cell.strategy]) for row in some]
        bar_panel(axis, mine)
        axis.set_title(f"{_gbits(int(links))},\n{tokens} tokens per GPU")
        axis.set_xlabel("size of the model")
    for axis in plain:
        axis.set_ylim(0, max(other.get_ylim()[1] for other in plain))
        axis.tick_params(labelleft=axis is plain[0])
        plain[0].set_ylabel("TFLOP/s per GPU")
    for axis, (links_of_both, some) in zip(axes[len(bars) :], ratios.items(), strict=True):
        _ratios(axis, some, *links_of_both)
    published = [patch(shown(name), one) for name, one in look.items() if bars]
    published += [patch("ratio", PLAIN)] if ratios else []
    legend(figure, signs(rows, published))
    return figure


def _ratios(axis: Axes, rows: Sequence[CellPrediction], links: int, others: int) -> None:
    """Ratios of one cluster from 1 on, where both are as fast; those of two clusters from 0 on."""
    bars = [PublishedBar(row, _runs(row.cell), PLAIN) for row in rows]
    bar_panel(axis, bars, base=1.0 if links == others else 0.0, digits=2)
    if links == others:
        axis.set_title(f"speed-up,\n{_gbits(links)}")
        axis.set_ylabel("ZeRO++ over ZeRO-3")
        axis.set_xlabel("of all sizes of the model" if len(rows) > 1 else "")
    else:
        axis.set_title(f"ZeRO++ at {_gbits(links)}\nover ZeRO-3 at {_gbits(others)}")
        axis.set_ylabel('published: "similar"')
        axis.set_xlabel("size of the model")


def _links(cell: Cell) -> tuple[int, int]:
    """InfiniBand links of both sides of a ratio."""
    speeds = (term.setup.used_cluster().inter.bandwidth for term in (cell.terms[0], cell.over[0]))
    one, other = (round(speed * 8 / 1e9 / _GBITS_A_LINK) for speed in speeds)
    return one, other


def _runs(cell: Cell) -> str:
    """Which runs a ratio is of: one model, or the extreme of several."""
    if len(cell.terms) == 1:
        return cell.setup.model.removeprefix("gpt-").upper()
    tokens = dict.fromkeys(
        term.setup.micro_batch * model_of(term.setup.model, term.setup.model_overrides).tokens
        for term in cell.terms
    )
    which = "largest" if cell.pick == "max" else "smallest"
    return (
        f"{which},\n{next(iter(tokens))} tokens" if len(tokens) == 1 else f"{which} of\nall sizes"
    )


def volume(rows: Sequence[CellPrediction]) -> Figure:
    """What a node sends in a step, by collective, as a multiple of the model in 2 bytes."""
    look = looks(["zero3", "zeropp"])
    figure = Figure(figsize=(WIDTH / 1.3, 3.0), layout="constrained")
    axis = figure.subplots()
    bars = [
        PublishedBar(row, _PARTS[row.cell.terms[0].part], look[row.cell.strategy]) for row in rows
    ]
    bar_panel(axis, sorted(bars, key=lambda bar: list(_PARTS.values()).index(bar.group)), digits=2)
    axis.set_ylabel("sent between nodes in a step,\nin sizes of the model (fp16)")
    legend(figure, signs(rows, [patch(shown(name), one) for name, one in look.items()]))
    return figure


def _gbits(links: int) -> str:
    return f"{links * _GBITS_A_LINK} Gbit/s"
