"""Two timelines of one rank, predicted above measured, on the same axis of time."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.measured.charts import PIXELS, WAITS, RankBar, bar_label, rounds_shown, windows
from analysis.measured.comparison import RunComparison
from co2sim.common.plots import (
    BLUE,
    GREEN,
    ORANGE,
    PLAIN_TEXT,
    PURPLE,
    SKY,
    STYLE,
    VERMILION,
    render,
)
from co2sim.common.units import duration, percent
from co2sim.schedule.schedule import Collective, Schedule

_PASSES = {"forward": BLUE, "backward": SKY, "optimizer": "#003F66"}
"""The same in every figure."""
_KERNELS = ("#7A6FAE", "#B9B3D6", "#4D4D4D", "#9AA5B1", "#3F3A75", "#6B8E9F", "#C5D5E4")
_COLLECTIVES = (VERMILION, ORANGE, GREEN, PURPLE, "#F0E442", "#8B2E00", "#5FD0B0")
"""Warm colours and greens for collectives, blues, violets and greys for computes."""
_WAITING = "#D9D9D9"
_PARTED = 4
"""Pixels above which a bar leaves a gap before the next; a gap would hide thinner ones."""
_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def draw(run: RunComparison, rank: int, suffix: str) -> bytes:
    """The figure as a file of the format that `suffix` names, ".png" or ".svg".

    It shows the last measured round, or two if a round is a single step. Raises OptionError for a
    rank that was not traced.
    """
    sides = windows(run, rank)
    length = max(during.end - during.start for during in sides)
    colours = _colours(run.schedule)
    with mpl.rc_context(STYLE | PLAIN_TEXT):
        lanes = len(run.schedule.streams)
        legend = -(-(len(colours) + 1) // 6)
        height = 1.9 + 2 * (0.35 + 0.42 * lanes) + 0.2 * legend
        figure = Figure(figsize=(11.0, height), layout="constrained")
        axes = figure.subplots(2, 1, sharex=True)
        scale, unit = next((s, u) for s, u in _SCALES if length >= s or u == "us")
        shown: dict[str, None] = {}
        for axis, during in zip(axes, sides, strict=True):
            bars = during.bars(length)
            axis.set_xlim(0, length * 1.01 / scale)
            _panel(axis, bars, run.schedule, colours, scale)
            shown |= dict.fromkeys(bar.label for bar in bars)
            axis.axvline((during.end - during.start) / scale, color="black", lw=1, ls="--")
        axes[0].set_title("predicted", loc="left", fontsize=9)
        axes[1].set_title("measured", loc="left", fontsize=9)
        rounds = rounds_shown(run)
        which = "the last round" if rounds == 1 else f"the last {rounds} rounds"
        axes[1].set_xlabel(f"{unit} since {which} of this rank began; dashed: the end")
        figure.suptitle(_heading(run, rank), fontsize=10)
        order = [label for label in (*colours, WAITS) if label in shown]
        figure.legend(
            handles=[Patch(color=_colour(label, colours), label=label) for label in order],
            loc="outside lower center",
            ncols=6,
            frameon=False,
            fontsize=8,
        )
        return render(figure, suffix.removeprefix("."))


def _heading(run: RunComparison, rank: int) -> str:
    here = run.predicted
    measured = float(run.measured["round_time_s"])
    return (
        f"{here.strategy}, {here.model}, {here.gpus} GPUs, rank {rank}\n{here.cluster}\n"
        f"round time: predicted {duration(here.round_time_s)}, measured"
        f" {duration(measured)}: {percent(run.round_time_error, 1)}"
    )


def _colours(schedule: Schedule) -> dict[str, str]:
    """Colour of every kernel, then of every kind of collective, in order of first use."""
    colours: dict[str, str] = {}
    for collective, palette in ((False, _KERNELS), (True, _COLLECTIVES)):
        chosen = (op for op in schedule.body if isinstance(op.work, Collective) is collective)
        known = _PASSES if not collective else {}
        labels = list(dict.fromkeys(bar_label(op) for op in chosen))
        others = [label for label in labels if label not in known]
        free = {label: palette[place % len(palette)] for place, label in enumerate(others)}
        ordered = [label for label in known if label in labels] + others
        colours |= {label: known.get(label) or free[label] for label in ordered}
    return colours


def _colour(label: str, colours: Mapping[str, str]) -> str:
    return colours.get(label, _WAITING)


def _panel(
    axis: Axes,
    bars: Sequence[RankBar],
    schedule: Schedule,
    colours: Mapping[str, str],
    scale: float,
) -> None:
    lanes = {stream: lane for lane, stream in enumerate(schedule.streams)}
    drawn: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for bar in bars:
        width = (bar.end - bar.start) / scale
        drawn.setdefault((lanes[bar.stream], bar.label), []).append((bar.start / scale, width))
    pixel = axis.get_xlim()[1] / PIXELS
    gap = 1.3 * pixel
    for (lane, label), pieces in drawn.items():
        shapes = [
            (at, width - gap if width > _PARTED * pixel else max(width, pixel))
            for at, width in pieces
        ]
        axis.broken_barh(shapes, (lane - 0.4, 0.8), facecolors=_colour(label, colours))
    axis.set_yticks(range(len(schedule.streams)), schedule.streams)
    axis.set_ylim(len(schedule.streams) - 0.5, -0.5)
    axis.grid(visible=True, axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
