"""Charts of the page of `co2analysis compare`: predicted beside measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import altair as alt

from analysis.measured.attribution import Cause, active_starts
from analysis.measured.comparison import BREAKDOWN, OpError, RunComparison
from co2sim.common.errors import OptionError
from co2sim.common.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from co2sim.common.units import Seconds, duration, percent
from co2sim.report.chart_style import (
    HEIGHT,
    ROW,
    TEXT,
    Rows,
    Spec,
    coloured,
    data,
    equality,
    picture,
    shaped,
    spec,
    stacked,
)
from co2sim.report.charts import kinds_of, timeline_bars
from co2sim.report.rounds import Round, TimelineBar
from co2sim.schedule.schedule import Collective, Op, Schedule
from co2sim.simulation import metrics
from co2sim.simulation.trace import Trace

SIDES = ("predicted", "measured")
AGREES = "agrees"
"""Of ops without a cause: both times agree within a hundredth."""

_LOOKS = {
    Cause.BANDWIDTH.words: (VERMILION, "circle"),
    Cause.LATENCY.words: (ORANGE, "square"),
    Cause.CONTENTION.words: (PURPLE, "diamond"),
    Cause.WAITING.words: ("#b59f00", "cross"),
    Cause.STRAGGLER.words: (GREEN, "triangle-up"),
    Cause.LAUNCH.words: (SKY, "triangle-down"),
    Cause.COMPUTE.words: (BLUE, "triangle-right"),
    AGREES: (GREY, "circle"),
}
"""Colour and shape of a cause."""
_PARTS = dict(zip(BREAKDOWN.values(), (SKY, VERMILION, GREY, "#c9b458"), strict=True))
_TWO_LINES = "split(datum.label, ', ')"
_WIDE = 240
"""Pixels of labels."""
_MS = alt.X("ms:Q", title="ms", axis=alt.Axis(tickCount=6, labelSeparation=6))
_WHAT = alt.Y(
    "what:N", sort=None, title=None, axis=alt.Axis(labelExpr=_TWO_LINES, labelLimit=_WIDE)
)


_RUN = alt.Y("run:N", sort=None, title=None, axis=alt.Axis(labelLimit=_WIDE))


def errors(by_run: Mapping[str, Mapping[str, float]]) -> Spec:
    """Signed errors of each run, by what they are errors of."""
    rows: Rows = [
        {"run": run, "what": what, "error": error}
        for run, mine in by_run.items()
        for what, error in mine.items()
    ]
    names = list(dict.fromkeys(row["what"] for row in rows))
    shapes = dict(zip(names, ("circle", "diamond", "square"), strict=False))
    axis = alt.Axis(format="+.0%", tickCount=6)
    x = alt.X("error:Q", title="error of the prediction", axis=axis, scale=alt.Scale(padding=12))
    points = (
        alt.Chart(data(rows))
        .mark_point(size=70, filled=True)
        .encode(
            x=x,
            y=_RUN,
            color=coloured("what", dict(zip(names, (BLUE, VERMILION, GREEN), strict=False))),
            shape=shaped("what", shapes),
            tooltip=["run:N", "what:N", alt.Tooltip("error:Q", format="+.1%")],
        )
    )
    rule = alt.Chart(data([{"error": 0}])).mark_rule(color=TEXT).encode(x="error:Q")
    return spec(alt.layer(rule, points), ROW * len(by_run))


def times(rows: Rows) -> Spec:
    """Times of a round, predicted above measured; rows hold `what`, `side`, `ms` and `error`."""
    bars = alt.Chart(data(rows)).mark_bar()
    chart = bars.encode(
        x=_MS,
        y=_WHAT,
        yOffset=alt.YOffset("side:N", sort=list(SIDES)),
        color=coloured("side", dict(zip(SIDES, (BLUE, ORANGE), strict=True))),
        tooltip=["what:N", "side:N", alt.Tooltip("ms:Q", format=".4~g"), "error:N"],
    )
    return spec(chart, 2 * ROW * len({row["what"] for row in rows}))


def ops(every: Sequence[OpError]) -> Spec | None:
    """Measured over predicted time of ops by cause, with the line where they are equal.

    None where no op has a time in both.
    """
    rows: Rows = [
        {
            "op": op.label,
            "predicted": 1e3 * op.predicted,
            "measured": 1e3 * op.measured,
            "error": op.error,
            "share": op.share,
            "count": op.count,
            "cause": op.cause.words if op.cause else AGREES,
        }
        for op in every
        if op.predicted > 0 and op.measured > 0
    ]
    if not rows:
        return None
    drawn = [row[side] for row in rows for side in SIDES]
    ends = [min(drawn) / 2, max(drawn) * 2]
    first, last = (math.floor(math.log10(end)) for end in ends)
    axis = alt.Axis(format="~g", values=[10.0**power for power in range(first, last + 1)])
    log = alt.Scale(type="log", domain=ends, nice=False)
    x = alt.X("predicted:Q", scale=log, title="predicted ms", axis=axis)
    y = alt.Y("measured:Q", scale=log, title="measured ms", axis=axis)
    points = (
        alt.Chart(data(rows))
        .mark_point(filled=True, opacity=0.85)
        .encode(
            x=x,
            y=y,
            size=alt.Size("share:Q", legend=None, scale=alt.Scale(domain=[0, 1], range=[50, 900])),
            color=coloured("cause", _present(0, rows)),
            shape=shaped("cause", _present(1, rows)),
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
    return spec(alt.layer(equality(x, y, ends), points), HEIGHT)


def causes(by_run: Mapping[str, Mapping[Cause, float]]) -> Spec:
    """What part of the errors of a run each cause has, a bar for each run."""
    rows: Rows = [
        {"run": run, "cause": cause.words, "share": share, "place": list(Cause).index(cause)}
        for run, shares in by_run.items()
        for cause, share in shares.items()
        if share
    ]
    x = alt.X(
        "share:Q",
        title="share of all errors of ops",
        axis=alt.Axis(format=".0%"),
        scale=alt.Scale(domain=[0, 1]),
    )
    tips = ["run:N", "cause:N", alt.Tooltip("share:Q", format=".1%")]
    chart = stacked(data(rows), x, _RUN, coloured("cause", _present(0, rows)), tips)
    return spec(chart, ROW * len(by_run))


def spent(breakdowns: Mapping[str, Mapping[str, Seconds]]) -> Spec:
    """Where a round went, the fields of a `TimeBreakdown`; names are a run and a side."""
    rows: Rows = [
        {"what": name, "part": words, "ms": 1e3 * parts[key], "place": rank}
        for name, parts in breakdowns.items()
        for rank, (key, words) in enumerate(BREAKDOWN.items())
    ]
    tips = ["what:N", "part:N", alt.Tooltip("ms:Q", format=".4~g")]
    chart = stacked(data(rows), _MS, _WHAT, coloured("part", _PARTS), tips)
    return spec(chart, (ROW + 12) * len(breakdowns))


def _present(part: int, rows: Rows) -> dict[str, str]:
    """Colours (0) or shapes (1) of the causes that the rows have, in order."""
    causes = {row["cause"] for row in rows}
    return {cause: look[part] for cause, look in _LOOKS.items() if cause in causes}


WAITS = "waiting for the last rank"
PIXELS = 1500
"""Width of a timeline, about; what is thinner is drawn together with its neighbour."""


@dataclass(frozen=True, slots=True)
class _Bar:
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

    def round(self) -> Round:
        """What the rank does, its waiting for others apart; both ends are cut."""
        labels = {op.name: bar_label(op) for op in self.schedule.body}
        active = active_starts(self.trace, self.schedule)
        bars = []
        for span in self.trace.spans:
            if span.rank != self.rank or span.end <= self.start or span.start >= self.end:
                continue
            begins = active.get((span.op, span.round, self.rank), span.start)
            middle = min(max(begins, self.start), self.end)
            for label, first, last in (
                (WAITS, max(span.start, self.start), middle),
                (labels[span.op], middle, min(span.end, self.end)),
            ):
                if last > first:
                    ends = (first - self.start, last - self.start)
                    bars.append(_Bar(span.stream, label, *ends, span.op, span.op))
        lanes = {stream: lane for lane, stream in enumerate(self.schedule.streams)}
        bars.sort(key=lambda bar: (lanes[bar.stream], bar.start))
        length = self.end - self.start
        return Round(1e3 * length, tuple(map(_shown, _merged(bars, length / PIXELS))))


def _shown(bar: _Bar) -> TimelineBar:
    ops = bar.first if bar.count == 1 else f"{bar.first} to {bar.last} ({bar.count} ops)"
    return TimelineBar(bar.stream, bar.label, ops, 1e3 * bar.start, 1e3 * bar.end)


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


def _merged(bars: Iterable[_Bar], pixel: Seconds) -> list[_Bar]:
    """Thin bars of one stream and label with a gap of less than a pixel between them, as one."""
    merged: list[_Bar] = []
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


_FIGURE = 900
"""Pixels across."""


def draw(run: RunComparison, rank: int, suffix: str) -> bytes:
    """The timelines of the page as a file of the format that `suffix` names, ".png" or ".svg".

    It shows the last measured round, or two if a round is a single step. Raises OptionError for a
    rank that was not traced.
    """
    rounds = dict(zip(SIDES, (during.round() for during in windows(run, rank)), strict=True))
    end = max(during.length for during in rounds.values())
    colours = kinds_of(rounds.values(), {WAITS: GREY})
    panels = [
        timeline_bars([bar.to_dict() for bar in during.bars], colours, end).properties(
            title=alt.TitleParams(f"{side}, {duration(during.length / 1e3)}", anchor="start"),
            width=_FIGURE,
            height=ROW * len(run.schedule.streams),
        )
        for side, during in rounds.items()
    ]
    title = alt.TitleParams(_heading(run, rank), anchor="middle")
    return picture(alt.vconcat(*panels, title=title), suffix.removeprefix("."), columns=5)


def _heading(run: RunComparison, rank: int) -> list[str]:
    here, last = run.predicted, rounds_shown(run)
    which = "the last round" if last == 1 else f"the last {last} rounds"
    return [
        f"{here.strategy}, {here.model}, {here.gpus} GPUs: {which} of rank {rank}",
        here.cluster,
        (
            f"round time: predicted {duration(here.round_time_s)}, measured"
            f" {duration(run.measured_round)}: {percent(run.round_time_error, 1)}"
        ),
    ]
