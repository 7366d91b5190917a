"""Charts of the page of `co2analysis compare`: predicted beside measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import altair as alt
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.measured.attribution import Cause, active_starts
from analysis.measured.comparison import RunComparison, TimeBreakdown
from analysis.measured.op_table import OpError
from co2sim.common.errors import OptionError
from co2sim.common.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PLAIN_TEXT,
    PURPLE,
    SKY,
    STYLE,
    VERMILION,
    render,
)
from co2sim.common.units import Seconds, duration, percent
from co2sim.report.chart_style import HEIGHT, ROW, TEXT, Rows, Spec, data, spec
from co2sim.schedule.schedule import Collective, Op, Schedule
from co2sim.simulation import metrics
from co2sim.simulation.trace import Trace

SIDES = ("predicted", "measured")
AGREES = "agrees"
"""Of ops without a cause: both times agree within a hundredth."""

_SIDES = alt.Scale(domain=list(SIDES), range=[BLUE, ORANGE])
_CAUSES = dict(
    zip(
        [*(cause.words for cause in Cause), AGREES],
        [VERMILION, ORANGE, PURPLE, "#b59f00", GREEN, SKY, BLUE, GREY],
        strict=True,
    )
)
_SHAPES = dict(
    zip(
        _CAUSES,
        [
            "circle",
            "square",
            "diamond",
            "cross",
            "triangle-up",
            "triangle-down",
            "triangle-right",
            "circle",
        ],
        strict=True,
    )
)
_PARTS = {
    "computing": SKY,
    "communicating, nothing computed": VERMILION,
    "waiting in a collective, nothing computed": GREY,
    "idle": "#c9b458",
}
_TWO_LINES = "split(datum.label, ', ')"
_WIDE = 240
"""Pixels of labels."""
_MS = alt.X("ms:Q", title="ms", axis=alt.Axis(tickCount=6, labelSeparation=6))
_WHAT = alt.Y(
    "what:N", sort=None, title=None, axis=alt.Axis(labelExpr=_TWO_LINES, labelLimit=_WIDE)
)


def errors(found: Mapping[str, Mapping[str, float]]) -> Spec:
    """Signed errors of each run, by what they are errors of."""
    rows: Rows = [
        {"run": run, "what": what, "error": error}
        for run, mine in found.items()
        for what, error in mine.items()
    ]
    names = list(_names(rows, "what"))
    colour = alt.Scale(domain=names, range=[BLUE, VERMILION, GREEN][: len(names)])
    shape = alt.Scale(domain=names, range=["circle", "diamond", "square"][: len(names)])
    points = (
        alt.Chart(data(rows))
        .mark_point(size=70, filled=True)
        .encode(
            x=alt.X(
                "error:Q",
                title="error of the prediction",
                axis=alt.Axis(format="+.0%", tickCount=6),
                scale=alt.Scale(padding=12),
            ),
            y=alt.Y("run:N", sort=None, title=None, axis=alt.Axis(labelLimit=_WIDE)),
            color=alt.Color("what:N", title=None, scale=colour),
            shape=alt.Shape("what:N", title=None, scale=shape),
            tooltip=["run:N", "what:N", alt.Tooltip("error:Q", format="+.1%")],
        )
    )
    rule = alt.Chart(data([{"error": 0}])).mark_rule(color=TEXT).encode(x="error:Q")
    return spec(alt.layer(rule, points), ROW * len(found))


def times(rows: Rows) -> Spec:
    """Times of a round, predicted above measured; rows hold `what`, `side`, `ms` and `error`."""
    chart = (
        alt.Chart(data(rows))
        .mark_bar()
        .encode(
            x=_MS,
            y=_WHAT,
            yOffset=alt.YOffset("side:N", sort=list(SIDES)),
            color=alt.Color("side:N", title=None, scale=_SIDES),
            tooltip=["what:N", "side:N", alt.Tooltip("ms:Q", format=".4~g"), "error:N"],
        )
    )
    return spec(chart, 2 * ROW * len(_names(rows, "what")))


def ops(found: Sequence[OpError]) -> Spec | None:
    """Measured over predicted time of ops by cause, with the line where they are equal.

    None where no op has a time in both.
    """
    rows: Rows = [
        {
            "op": one.label,
            "predicted": 1e3 * one.predicted,
            "measured": 1e3 * one.measured,
            "error": one.error,
            "share": one.share,
            "count": one.count,
            "cause": one.cause.words if one.cause else AGREES,
        }
        for one in found
        if one.predicted > 0 and one.measured > 0
    ]
    if not rows:
        return None
    every = [row[side] for row in rows for side in SIDES]
    ends = [min(every) / 2, max(every) * 2]
    first, last = (math.floor(math.log10(end)) for end in ends)
    axis = alt.Axis(format="~g", values=[10.0**power for power in range(first, last + 1)])
    log = alt.Scale(type="log", domain=ends, nice=False)
    line = [{"predicted": end, "measured": end} for end in ends]
    x = alt.X("predicted:Q", scale=log, title="predicted ms", axis=axis)
    y = alt.Y("measured:Q", scale=log, title="measured ms", axis=axis)
    points = (
        alt.Chart(data(rows))
        .mark_point(filled=True, opacity=0.85)
        .encode(
            x=x,
            y=y,
            size=alt.Size("share:Q", legend=None, scale=alt.Scale(domain=[0, 1], range=[50, 900])),
            color=alt.Color("cause:N", title=None, scale=_present(_CAUSES, rows, "cause")),
            shape=alt.Shape("cause:N", title=None, scale=_present(_SHAPES, rows, "cause")),
            tooltip=[
                "op:N",
                alt.Tooltip("count:Q", format="~g", title="per round"),
                alt.Tooltip("predicted:Q", format=".4~g", title="predicted, ms"),
                alt.Tooltip("measured:Q", format=".4~g", title="measured, ms"),
                alt.Tooltip("error:Q", format="+.1%"),
                alt.Tooltip("share:Q", format=".1%", title="share of all errors"),
                "cause:N",
            ],
        )
    )
    equal = alt.Chart(data(line)).mark_line(color=TEXT, strokeDash=[4, 3]).encode(x=x, y=y)
    return spec(alt.layer(equal, points), HEIGHT)


def causes(found: Mapping[str, Mapping[Cause, float]]) -> Spec:
    """What part of the errors of a run each cause has, a bar for each run."""
    rows: Rows = [
        {"run": run, "cause": cause.words, "share": share, "place": list(Cause).index(cause)}
        for run, shares in found.items()
        for cause, share in shares.items()
        if share
    ]
    chart = (
        alt.Chart(data(rows))
        .mark_bar()
        .encode(
            x=alt.X(
                "share:Q",
                title="share of all errors of ops",
                axis=alt.Axis(format=".0%"),
                scale=alt.Scale(domain=[0, 1]),
            ),
            y=alt.Y("run:N", sort=None, title=None, axis=alt.Axis(labelLimit=_WIDE)),
            color=alt.Color("cause:N", title=None, scale=_present(_CAUSES, rows, "cause")),
            order=alt.Order("place:Q"),
            tooltip=["run:N", "cause:N", alt.Tooltip("share:Q", format=".1%")],
        )
    )
    return spec(chart, ROW * len(found))


def spent(found: Mapping[str, TimeBreakdown]) -> Spec:
    """Where a round went, on average of ranks; names are a run and a side, with a comma."""
    rows: Rows = [
        {"what": name, "part": part, "ms": 1e3 * seconds, "place": place}
        for name, one in found.items()
        for place, (part, seconds) in enumerate(
            zip(_PARTS, (one.compute, one.communication, one.waiting, one.idle), strict=True)
        )
    ]
    chart = (
        alt.Chart(data(rows))
        .mark_bar()
        .encode(
            x=_MS,
            y=_WHAT,
            color=alt.Color(
                "part:N",
                title=None,
                scale=alt.Scale(domain=list(_PARTS), range=list(_PARTS.values())),
            ),
            order=alt.Order("place:Q"),
            tooltip=["what:N", "part:N", alt.Tooltip("ms:Q", format=".4~g")],
        )
    )
    return spec(chart, (ROW + 12) * len(found))


def _names(rows: Rows, key: str) -> dict[str, None]:
    return dict.fromkeys(row[key] for row in rows)


def _present(values: Mapping[str, str], rows: Rows, key: str) -> alt.Scale:
    """A scale of those that the rows have, in order."""
    here = [name for name in values if name in _names(rows, key)]
    return alt.Scale(domain=here, range=[values[name] for name in here])


WAITS = "waiting for the last rank"
PIXELS = 1500
"""Width of a timeline, about; what is thinner is drawn together with its neighbour."""


@dataclass(frozen=True, slots=True)
class RankBar:
    """Ops of one label on a stream; `first` and `last` name them, `count` says how many."""

    stream: str
    label: str
    start: Seconds
    end: Seconds
    first: str
    last: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class RankWindow:
    """The rounds of one rank that are drawn: they begin and end by its own computes."""

    trace: Trace
    schedule: Schedule
    rank: int
    start: Seconds
    end: Seconds

    def bars(self, length: Seconds) -> list[RankBar]:
        """What the rank does so long from the start on; the start is 0, and both ends are cut."""
        start, end = self.start, self.start + length
        labels = {op.name: bar_label(op) for op in self.schedule.body}
        active = active_starts(self.trace, self.schedule)
        bars = []
        for span in self.trace.spans:
            if span.rank != self.rank or span.end <= start or span.start >= end:
                continue
            begins = active.get((span.op, span.round, self.rank), span.start)
            middle = min(max(begins, start), end)
            for name, first, last in (
                (WAITS, max(span.start, start), middle),
                (labels[span.op], middle, min(span.end, end)),
            ):
                if last > first:
                    place = (span.stream, name, first - start, last - start)
                    bars.append(RankBar(*place, span.op, span.op))
        lanes = {stream: lane for lane, stream in enumerate(self.schedule.streams)}
        ordered = sorted(bars, key=lambda bar: (lanes[bar.stream], bar.start))
        return _merged(ordered, length / PIXELS)


def windows(run: RunComparison, rank: int) -> tuple[RankWindow, RankWindow]:
    """Predicted and measured. Raises OptionError for a rank that was not traced."""
    ranks = run.record.trace.ranks
    if rank not in ranks:
        raise OptionError(f"--rank {rank}: {run.name} has the ranks 0 to {max(ranks)}")
    rounds = rounds_shown(run)
    before, after = (
        RankWindow(trace, run.schedule, rank, during.start, during.end)
        for trace in (run.simulated, run.record.trace)
        for during in (metrics.window(_only(trace, rank), run.schedule, rounds),)
    )
    return before, after


def rounds_shown(run: RunComparison) -> int:
    """The last measured round, or two if a round is a single step."""
    return min(2 if run.schedule.steps == 1 else 1, run.record.rounds)


def bar_label(op: Op) -> str:
    """The kernel, or the kind of the collective."""
    work = op.work
    return f"{work.kind} over {work.group}" if isinstance(work, Collective) else work.kernel


def _only(trace: Trace, rank: int) -> Trace:
    return replace(trace, spans=tuple(span for span in trace.spans if span.rank == rank))


def _merged(bars: Iterable[RankBar], pixel: Seconds) -> list[RankBar]:
    """Thin bars of one stream and label with a gap of less than a pixel between them, as one."""
    merged: list[RankBar] = []
    for bar in bars:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.stream, last.label) == (bar.stream, bar.label)
            and bar.start - last.end < pixel / 2
            and min(bar.end - bar.start, last.end - last.start) < 4 * pixel
        ):
            end, count = max(last.end, bar.end), last.count + bar.count
            merged[-1] = replace(last, end=end, last=bar.last, count=count)
        else:
            merged.append(bar)
    return merged


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
