"""The figures of papers from the cells of `papers/`: what each shows, and what none can show.

Then those of sources without figures that could be mirrored (`draw`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator
from matplotlib.typing import LineStyleType

from analysis.published.cells import Cell, Quantity, Unpredicted, from_papers, unpredicted
from analysis.published.figure_style import (
    PALE,
    PLAIN,
    SMALL,
    STAR,
    WIDTH,
    Look,
    PublishedBar,
    band,
    bar_panel,
    in_style,
    legend,
    looks,
    numbers,
    panels,
    patch,
    plain_log,
    shown,
    signs,
    star,
)
from analysis.published.predict import CellPrediction, ErrorSummary, validate
from analysis.published.tables import FsdpRow, IterationRow
from co2sim.common.errors import OptionError, nearest
from co2sim.common.progress import Done
from co2sim.prediction.published import QualityCell, Use

_GBITS_A_LINK = 100

_TABLE_3 = "a100-tcp80-calibrated"
"""The cluster of CO2's Table 3."""

_FEWEST = 2.4
"""Bars that a panel is at least as wide as."""

_BAR, _MIN = 0.7, 0.34
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
    bars: dict[tuple[int, str], list[CellPrediction]] = {}
    ratios: dict[tuple[int, int], list[CellPrediction]] = {}
    for row in rows:
        if row.cell.over:
            ratios.setdefault(_links(row.cell), []).append(row)
        else:
            labels = row.cell.labels
            bars.setdefault((_links(row.cell)[0], labels["tokens"]), []).append(row)
    widths: list[float] = [max(_FEWEST, len(some)) for some in (*bars.values(), *ratios.values())]
    roomy = min(WIDTH, 1.0 + _BAR * sum(widths)) if bars else 0.0
    width = max(WIDTH / 1.5, roomy, _MIN * sum(widths), _PANEL * len(widths))
    figure, axes = panels(width, 3.2, len(widths), width_ratios=widths)
    look = looks(["zero3", "zeropp"])
    plain = axes[: len(bars)]
    for axis, ((links, tokens), some) in zip(plain, bars.items(), strict=True):
        mine = [
            PublishedBar(row, row.cell.labels["model"], look[row.cell.strategy]) for row in some
        ]
        bar_panel(axis, mine)
        axis.set_title(f"{_gbits(links)},\n{tokens} tokens per GPU")
        axis.set_xlabel("size of the model")
    for axis in plain:
        axis.set_ylim(0, max(other.get_ylim()[1] for other in plain))
        axis.tick_params(labelleft=axis is plain[0])
        plain[0].set_ylabel("TFLOP/s per GPU")
    for axis, (links_of_both, some) in zip(axes[len(bars) :], ratios.items(), strict=True):
        _ratios(axis, some, *links_of_both)
    published = [patch(shown(name), series) for name, series in look.items() if bars]
    published += [patch("ratio", PLAIN)] if ratios else []
    legend(figure, [*published, *signs(rows)])
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
    speeds = (run.used_cluster().inter.bandwidth for run in (cell.runs[0], cell.setups[-1]))
    first, second = (round(speed * 8 / 1e9 / _GBITS_A_LINK) for speed in speeds)
    return first, second


def _runs(cell: Cell) -> str:
    """Which runs a ratio is of: one model, or the extreme of several."""
    if len(cell.runs) == 1:
        return cell.setup.model.removeprefix("gpt-").upper()
    tokens = dict.fromkeys(run.micro_batch * run.trained().tokens for run in cell.runs)
    which = "largest" if cell.pick == "max" else "smallest"
    return (
        f"{which},\n{next(iter(tokens))} tokens" if len(tokens) == 1 else f"{which} of\nall sizes"
    )


def volume(rows: Sequence[CellPrediction]) -> Figure:
    """What a node sends in a step, by collective, as a multiple of the model in 2 bytes."""
    look = looks(["zero3", "zeropp"])
    figure, (axis,) = panels(WIDTH / 1.3, 3.0)
    bars = [PublishedBar(row, _PARTS[row.cell.part], look[row.cell.strategy]) for row in rows]
    bar_panel(axis, sorted(bars, key=lambda bar: list(_PARTS.values()).index(bar.group)), digits=2)
    axis.set_ylabel("sent between nodes in a step,\nin sizes of the model (fp16)")
    published = [patch(shown(name), series) for name, series in look.items()]
    legend(figure, [*published, *signs(rows)])
    return figure


def _gbits(links: int) -> str:
    return f"{links * _GBITS_A_LINK} Gbit/s"


# --- CO2's table 3: throughput over GPUs, and the scalability ratios ------------------------------

Series: TypeAlias = tuple[str, str, str]
"""Strategy, cluster and model."""

SIZES = (8, 16, 32, 64, 128)
"""GPUs of the curves, beside those of the published cells."""

_MAX_POINTS = 512
"""Points of curves that are kept."""


def scalability(rows: Sequence[CellPrediction]) -> Figure:
    """Lines over GPUs with published stars, and published ratios as bars with ours on them."""
    lines = curves(rows)
    look = looks(lines)
    speeds, ratios = (
        [row for row in rows if bool(row.cell.over) is both] for both in (False, True)
    )
    figure, (left, right) = panels(WIDTH, 4.1, 2, width_ratios=(3, 2))
    _throughputs(left, speeds, lines, look)
    if ratios:
        _ratio_bars(right, ratios, look)
    else:
        right.remove()
    handles: list[Artist] = [
        Line2D([], [], color=its.colour, ls=its.line, marker=its.marker, label=_name(series))
        for series, its in look.items()
    ]
    handles.append(star("tokens/s, published (bold)"))
    if ratios:
        handles.append(Patch(facecolor="white", edgecolor="black", label="ratio, published (bold)"))
    legend(figure, [*handles, band("90 % interval of a line"), *signs(rows)])
    return figure


def _series(row: CellPrediction) -> Series:
    return row.cell.strategy, row.cell.setup.cluster, row.cell.setup.model


def _name(series: Series) -> str:
    """The strategy; clusters of the catalog other than the one of Table 3 are named, too."""
    strategy, cluster, _ = series
    return shown(strategy) if cluster == _TABLE_3 else f"{shown(strategy)}, {cluster}"


def _ratio_bars(axis: Axes, rows: Sequence[CellPrediction], look: Mapping[Series, Look]) -> None:
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
    by_series: dict[Series, list[CellPrediction]] = {}
    for row in rows:
        if _series(row) in by_series:
            continue
        points = by_series[_series(row)] = []
        for gpus in sizes:
            setup = row.cell.setup.changed(gpus=gpus)
            plain = replace(row.cell, runs=(setup,), over=())
            use: Use = "fit" if setup in fitted else "check"
            points.append(_predicted(replace(plain, rounding=0.0, published=1.0, use=use)))
    return by_series


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
        lowest = min(lines[_series(row)], key=lambda point: point.predicted)
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


def _line(
    axis: Axes, points: Sequence[CellPrediction], look: Look, units: Sequence[float] = ()
) -> None:
    """A curve in its band; points are filled where they are predicted, hollow where fitted on.

    Of each point what is drawn is divided by its unit; default: 1.
    """
    gpus = [point.cell.setup.gpus for point in points]
    pairs = list(zip(points, units or [1.0] * len(points), strict=True))
    values = [point.predicted / unit for point, unit in pairs]
    if all(point.has_interval for point in points):
        low = [point.low / unit for point, unit in pairs]
        high = [point.high / unit for point, unit in pairs]
        axis.fill_between(gpus, low, high, color=look.colour, alpha=PALE, lw=0)
    axis.plot(gpus, values, ls=look.line, color=look.colour)
    for point, size, value in zip(points, gpus, values, strict=True):
        fitted = point.cell.use == "fit"
        inside, layer = ("white", 5) if fitted else (look.colour, 4)
        axis.plot(size, value, look.marker, color=look.colour, mfc=inside, ms=4, zorder=layer)


# --- what a paper shows ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mirror:
    """A figure, `where` in a source it mirrors one, and the quantity that it shows.

    The field `where` of its cells begins with its own. A number in `name` is in there, too.
    Without `draw` it shows what is published only.
    """

    name: str
    where: str
    title: str
    quantity: Quantity | Literal["quality"]
    draw: Callable[[Sequence[CellPrediction]], Figure] | None = None

    def holds(self, where: str) -> bool:
        """Whether a cell of this place is in it; figure 7 does not hold what figure 70 says."""
        rest = where.removeprefix(self.where)
        return rest != where and not rest[:1].isalnum()


_DEEPSPEED = "DeepSpeed ZeRO++ announcement, June 2023"

MIRRORS = (
    Mirror(
        "co2-table-3",
        "CO2, ICLR 2024, Table 3",
        "CO2, table 3: TransNormerLLM 7B, 8 A100 a node, 80 Gbit/s TCP/IP between nodes",
        "tokens_per_s",
        scalability,
    ),
    Mirror(
        "co2-quality-results",
        "CO2, ICLR 2024, quality results",
        "CO2, quality of trained models",
        "quality",
    ),
    Mirror(
        "co2-ablation-of-the-staleness-gap-penalty",
        "CO2, ICLR 2024, ablation of the staleness gap penalty",
        "CO2, ablation of the staleness gap penalty",
        "quality",
    ),
    *(
        Mirror(
            f"zeropp-announcement-figure-{figure}",
            f"{_DEEPSPEED}, figure {figure}",
            f"Announcement of ZeRO++, figure {figure}: 384 V100, 16 a node",
            "tflops_per_gpu",
            throughput,
        )
        for figure in (6, 7, 8)
    ),
    Mirror(
        "zeropp-announcement-table-of-communication-volume",
        f"{_DEEPSPEED}, table of communication volume",
        "Announcement of ZeRO++, table of communication volume",
        "inter_node_volume",
        volume,
    ),
)


def mirror_of(where: str, quantity: str) -> Mirror | None:
    """The figure that shows a cell of this place and quantity."""
    return next((m for m in MIRRORS if m.quantity == quantity and m.holds(where)), None)


_MODELS = {
    "resnet-50": "ResNet-50",
    "vit-b16": "ViT-B",
    "gpt2-small": "GPT-2 small",
    "transnormer-7b": "TransNormerLLM\n7B",
}
_QUANTITIES = {"top1_accuracy_percent": "top-1 accuracy, %", "perplexity": "perplexity"}


def quality(rows: Sequence[QualityCell]) -> Figure:
    """A panel for each model: a star for each method, with its published plus-minus."""
    by_model: dict[tuple[str, str], list[QualityCell]] = {}
    for row in rows:
        by_model.setdefault((row.model, row.quantity), []).append(row)
    figure, axes = panels(WIDTH * max(2.4, len(by_model)) / 4, 2.8, len(by_model))
    sign: dict[str, Any] = {"fmt": "*", "ms": 10, "mfc": PLAIN.fill, "color": "black", "capsize": 3}
    for axis, ((model, quantity), some) in zip(axes, by_model.items(), strict=True):
        for x, row in enumerate(some):
            axis.errorbar(x, row.value, yerr=row.spread or None, **sign)
            words = f"{row.value:g}" + (f"\n± {row.spread:g}" if row.spread else "")
            axis.annotate(words, (x, row.value + row.spread), (0, 7), fontweight="bold", **SMALL)
        axis.set_xticks(range(len(some)), [shown(row.strategy) for row in some])
        axis.set_xlim(-0.7, len(some) - 0.3)
        axis.margins(y=0.45)
        axis.set_title(_MODELS.get(model, model))
        axis.set_ylabel(_QUANTITIES[quantity])
    label = "published; co2sim does not\npredict the quality of training"
    legend(
        figure, [Line2D([], [], ls="", marker="*", ms=10, mfc=PLAIN.fill, mec="black", label=label)]
    )
    return figure


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """One figure: published values with ours (`rows`), or published ones only (`alone`)."""

    mirror: Mirror
    rows: tuple[CellPrediction, ...]
    alone: tuple[QualityCell, ...] = ()

    @property
    def published(self) -> int:
        """How many published values it shows."""
        return len(self.rows) + len(self.alone)

    def of_use(self, use: Use) -> list[CellPrediction]:
        """What was predicted, or what was fitted on."""
        return [row for row in self.rows if row.cell.use == use]

    def errors(self, use: Use) -> ErrorSummary | None:
        """Of these; a published zero has no relative error. None where there is none."""
        rows = [row for row in self.of_use(use) if row.cell.published]
        return ErrorSummary.of(rows) if rows else None

    def make(self) -> Figure:
        """The figure, in the style that is set."""
        figure = self.mirror.draw(self.rows) if self.mirror.draw else quality(self.alone)
        figure.suptitle(self.mirror.title)
        return figure

    def files(self, kinds: Sequence[str]) -> dict[str, bytes]:
        """Contents by the names of the files."""
        made = in_style(self.make, kinds)
        return {f"{self.mirror.name}.{kind}": content for kind, content in made.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON: errors of predictions and of fitted values apart, and every cell."""
        values: dict[str, Any] = {"name": self.mirror.name, "mirrors": self.mirror.where}
        values |= {"published": self.published, "published_only": len(self.alone)}
        for name, use in _USES.items():
            errors = self.errors(use)
            values[name] = len(self.of_use(use))
            values[f"{name}_error_median"] = errors and errors.median_bias
            values[f"{name}_error_largest"] = errors and errors.worst.error
        values["cells"] = [*map(_row, self.rows), *map(_alone, self.alone)]
        return values


_USES: dict[str, Use] = {"predicted": "check", "fitted": "fit"}


def _row(row: CellPrediction) -> dict[str, Any]:
    cell = row.cell
    return {
        "cell": cell.name,
        "where": cell.where,
        "published": cell.published,
        "ours": row.predicted,
        "is": "fitted" if cell.use == "fit" else "predicted",
        "low": row.low if row.has_interval else None,
        "high": row.high if row.has_interval else None,
        "error": row.error if cell.published else None,
    }


def _alone(cell: QualityCell) -> dict[str, Any]:
    name = f"{cell.quantity.replace('_', ' ')}, {cell.model}, {cell.strategy}"
    alone = {"cell": name, "where": cell.where, "published": cell.value, "ours": None}
    return {**alone, "is": "not predicted"}


def paper_figures(
    folder: Path,
    only: Sequence[str] = (),
    predicted: Mapping[Cell, CellPrediction] | None = None,
    done: Done | None = None,
) -> tuple[list[PaperFigure], list[Unpredicted]]:
    """All figures that the folder has cells for, or those of some names; and what is in none.

    Those `predicted` need not be made again. `done` gets how many are made.

    Raises OptionError for an unknown name, and where there is nothing to draw.
    """
    contents, left_out = _contents(folder)
    chosen = [m for m in MIRRORS if m in contents and (not only or m.name in only)]
    names = [mirror.name for mirror in contents]
    for name in only:
        if name not in names:
            raise OptionError(f"--only {name}: there is no such figure; {nearest(name, names)}")
    if not chosen:
        raise OptionError(f"{folder} holds no published cell of a figure that is drawn")
    cells = [cell for mirror in chosen for cell in contents[mirror] if isinstance(cell, Cell)]
    rows: dict[Cell, CellPrediction] = dict(predicted or {})
    new = [cell for cell in cells if cell not in rows]
    rows |= zip(new, validate(new, done), strict=True)
    figures = [
        PaperFigure(
            mirror,
            tuple(rows[cell] for cell in contents[mirror] if isinstance(cell, Cell)),
            tuple(cell for cell in contents[mirror] if isinstance(cell, QualityCell)),
        )
        for mirror in chosen
    ]
    return figures, [] if only else left_out


def _contents(
    folder: Path,
) -> tuple[dict[Mirror, list[Cell | QualityCell]], list[Unpredicted]]:
    """What each figure is to show, in the order of the file, and the cells of none.

    Sources of which nothing is drawn, such as tables of many runs, are left out without a word.
    """
    contents: dict[Mirror, list[Cell | QualityCell]] = {}
    rest = unpredicted(folder)
    cells = [*from_papers(folder), *(each.cell for each in rest if each.cell)]
    for cell in cells:
        if mirror := mirror_of(cell.where, cell.quantity):
            contents.setdefault(mirror, []).append(cell)
    drawn = {cell for some in contents.values() for cell in some}
    sources = {cell.source for cell in cells if cell in drawn}
    nothing = "no figure is drawn of this place"
    left_out = [
        Unpredicted(cell.source, cell.name, cell.where, cell.published, nothing)
        for cell in cells
        if cell.source in sources and cell not in drawn
    ]
    for each in rest:
        mirror = mirror_of(each.where, "quality")
        if mirror and each.quality:
            contents.setdefault(mirror, []).append(each.quality)
        elif not each.cell:
            left_out.append(each)
    return contents, left_out


_SIDE = 0.07
"""By which the GPUs stand apart, as a power of two."""


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
    drawn = [row for some in families.values() for row in some]
    width, count = max(WIDTH, 1.75 * len(families)), max(1, len(families))
    figure, axes = panels(width, 3.0, count, sharey=True)
    look = looks(families)
    for axis, (family, some) in zip(axes, families.items(), strict=False):
        sizes = [row.cell.setup.gpus for row in some]
        units = [size * some[0].predicted / sizes[0] / 100 for size in sizes]
        _line(axis, some, replace(look[family], marker="o", line="-"), units)
        published = [row.cell.published / unit for row, unit in zip(some, units, strict=True)]
        axis.plot(sizes, published, ls="", mfc=look[family].fill, **STAR)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{size}" for size in sizes], fontsize=7)
        axis.minorticks_off()
        axis.margins(x=0.12)
        gpu, model = family
        axis.set_title(f"{model.upper()}, {_shown(gpu)}")
        axis.set_xlabel("GPUs")
    axes[0].set_ylabel("tokens/s per GPU, % of ours\nfor the fewest GPUs")
    handles = [star("published", "white"), *_uses(drawn, "-"), band("90 % interval")]
    legend(figure, handles, columns=4)
    return figure


def _uses(rows: Sequence[CellPrediction], ls: LineStyleType) -> list[Line2D]:
    """Handles for hollow and filled points, if they occur."""
    signs = (("check", "black", "ours, predicted"), ("fit", "white", "ours, fitted on these runs"))
    uses = {row.cell.use for row in rows}
    style: dict[str, Any] = {"ls": ls, "marker": "o", "color": "black", "ms": 4}
    return [
        Line2D([], [], mfc=fill, label=words, **style) for use, fill, words in signs if use in uses
    ]


def _shown(gpu: str) -> str:
    return gpu.upper().replace("_", "-").removesuffix("GB")


def _error_points(
    axis: Axes,
    rows: Sequence[CellPrediction],
    x: Callable[[CellPrediction], float],
    sign: Callable[[CellPrediction], dict[str, Any]],
) -> None:
    """Signed errors, in percent, over some value; hollow where it was fitted on."""
    for row in sorted(rows, key=lambda row: row.cell.use, reverse=True):
        inside = {"mfc": "white"} if row.cell.use == "fit" else {}
        axis.plot(x(row), row.error * 100, ls="", ms=4, **sign(row) | inside)
    axis.axhline(0, color="black", lw=0.8)


def fsdp_errors(rows: Sequence[CellPrediction]) -> Figure:
    """Signed errors of all runs over the length of a sequence; GPUs stand apart."""
    look = looks(row.cell.labels["gpu"] for row in rows)
    signs: dict[str, dict[str, Any]] = {
        gpu: {"marker": its.marker, "color": its.colour} for gpu, its in look.items()
    }
    shifts = {gpu: 2.0 ** (_SIDE * (index - 1)) for index, gpu in enumerate(look)}
    figure, (axis,) = panels(WIDTH / 1.2, 4.0)

    def tokens(row: CellPrediction) -> float:
        length = float(row.cell.setup.overrides["model.seq_len"])
        return float(length * shifts[row.cell.labels["gpu"]])

    _error_points(axis, rows, tokens, lambda row: signs[row.cell.labels["gpu"]])
    axis.set_xscale("log", base=2)
    plain_log(axis.xaxis, 2)
    axis.set_xlabel("tokens in a sequence")
    axis.set_ylabel("error of ours, %")
    gpus = [
        Line2D([], [], ls="", ms=4, mfc="white", label=_shown(gpu), **sign)
        for gpu, sign in signs.items()
    ]
    legend(figure, [*gpus, *_uses(rows, "")], columns=3)
    return figure


_MARKERS = "os^vDP"


def iteration_errors(rows: Sequence[CellPrediction]) -> Figure:
    """Signed errors over published times: a shade for each micro-batch, a marker per hidden."""

    def key(row: CellPrediction) -> tuple[int, int]:
        return int(row.cell.labels["micro_batch"]), int(row.cell.labels["hidden"])

    series = sorted(set(map(key, rows)))
    micros, hiddens = (sorted(set(sizes)) for sizes in zip(*series, strict=True))
    shades = mpl.colormaps["viridis"].resampled(len(micros) + 1)
    signs: dict[tuple[int, int], dict[str, Any]] = {
        (micro, hidden): {
            "marker": _MARKERS[hiddens.index(hidden) % len(_MARKERS)],
            "color": shades(micros.index(micro)),
        }
        for micro, hidden in series
    }
    figure, (axis,) = panels(WIDTH, 4.0)
    _error_points(axis, rows, lambda row: row.cell.published, lambda row: signs[key(row)])
    axis.set_xscale("log")
    plain_log(axis.xaxis, subs=(1, 2, 5))
    axis.set_xlabel("published iteration time, ms")
    axis.set_ylabel("error of ours, %; hollow: fitted on")
    handles = [
        Line2D([], [], ls="", ms=4, label=f"batch {micro}, hidden {hidden}", **sign)
        for (micro, hidden), sign in signs.items()
    ]
    legend(figure, handles, columns=4)
    return figure


_KIND = "png"

_FIGURES: tuple[tuple[str, str, Callable[[Sequence[CellPrediction]], Figure]], ...] = (
    (IterationRow.source, "a100-iteration-errors", iteration_errors),
    (FsdpRow.source, "fsdp-errors", fsdp_errors),
    (FsdpRow.source, "fsdp-scaling", fsdp_scaling),
    ("co2", "co2-cells", scalability),
    ("zeropp", "zeropp-cells", throughput),
)
"""Source, name and function of the figures that mirror none of the source."""


def draw(rows: Sequence[CellPrediction], folder: Path) -> dict[str, bytes]:
    """The figures that the rows have data for, by the names of their files."""
    files: dict[str, bytes] = {}
    if any(row.cell.where for row in rows):
        figures, _ = paper_figures(folder, predicted={row.cell: row for row in rows})
        for figure in figures:
            files |= figure.files([_KIND])
    further = [row for row in rows if not row.cell.where]
    for source, name, make in _FIGURES:
        mine = [row for row in further if row.cell.source == source]
        if mine:
            files[f"{name}.{_KIND}"] = in_style(partial(make, mine), [_KIND])[_KIND]
    return files
