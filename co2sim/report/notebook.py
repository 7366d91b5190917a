"""Charts for notebooks: those of the page, of one result, trace, schedule or table at a time.

They have dark text on white: readable in light and dark notebooks, and where one is printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import altair as alt
import pandas as pd

from co2sim.common.errors import OptionError, UnitError, nearest
from co2sim.common.units import EXAMPLES, counted, duration, parse
from co2sim.prediction.result import Result
from co2sim.report.chart_style import (
    COLUMNS,
    CONFIG,
    HEIGHT,
    ROW,
    TEXT,
    Drawn,
    Rows,
    banded,
    by_strategy,
    coloured,
    data,
    ends_of,
    figure_row,
    figure_tips,
    gpu_axis,
    inked,
    of_works,
    ranged_bars,
    wide,
)
from co2sim.report.charts import ZOOM, kinds_of, memory, shares, timeline_bars
from co2sim.report.rounds import kind_of, round_of
from co2sim.schedule.schedule import Op, Schedule
from co2sim.simulation.trace import Trace
from co2sim.studies.table import VARIED
from co2sim.training.memory import GIB

_WIDTH = 600
_INK = "#222222"
_PAPER = {
    "background": "white",
    "title": {"color": _INK, "subtitleColor": _INK, "anchor": "start", "offset": 10},
}
_CUT = 110
"""Characters of a title."""


def of_result(result: Result) -> alt.VConcatChart:
    """What a round is spent on, above what the memory of a GPU holds."""
    named = [(result.strategy, result)]
    bars = shares(named, in_legend=True), memory(named, in_legend=True)
    length = duration(result.round_time_s)
    has, needs = result.gpu_memory_bytes / GIB, result.memory_bytes_per_gpu["total"] / GIB
    size = f"{needs:.3g} GiB of {has:.3g} GiB (dashed); {result.memory_word}"
    steps = counted(result.steps_per_round, "step")
    titles = f"A round of {steps} takes {length}", f"Memory of a GPU: {size}"
    chart = alt.vconcat(
        *(
            drawn.properties(title=title, width=_WIDTH, height=2 * ROW)
            for drawn, title in zip(bars, titles, strict=True)
        )
    )
    chart = chart.resolve_scale(color="independent")
    where = f"{counted(result.gpus, 'GPU')} of {result.cluster}"
    shown: alt.VConcatChart = _shown(chart, result.strategy, where, result.model)
    return shown


def of_trace(trace: Trace, schedule: Schedule, rank: int | None = None) -> alt.Chart:
    """The timeline of the last round on a traced rank."""
    if trace.schedule != schedule.name:
        raise OptionError(f"the trace is of {trace.schedule!r}, not of {schedule.name!r}")
    traced = list(trace.ranks)
    if rank is None and traced:
        rank = traced[0]
    if rank not in traced:
        few = f"{', '.join(map(str, traced[:8]))}{', ...' if len(traced) > 8 else ''}"  # noqa: PLR2004
        raise OptionError(f"rank is {rank}, which was not traced; traced: {few or 'none'}")
    shown_round = round_of(schedule, trace, traced.index(rank), _WIDTH)
    rows = [bar.to_dict() for bar in shown_round.bars]
    lanes = {bar.stream for bar in shown_round.bars}
    chart = timeline_bars(rows, kinds_of([shown_round], {}), shown_round.length).add_params(ZOOM)
    count = trace.ranks[rank]
    stands = f", which stands for {count:,} equal ranks" if count > 1 else ""
    length = duration(shown_round.length / 1e3)
    shown: alt.Chart = _shown(
        chart.properties(width=_WIDTH, height=2 * ROW * len(lanes)),
        schedule.name,
        f"The last round, {length}, on rank {rank}{stands}",
    )
    return shown


def of_schedule(schedule: Schedule, first: int) -> alt.LayerChart:
    """The first ops by stream, in order of issue, and what waits for what."""
    chart, remarks = graph(schedule, first)
    shown: alt.LayerChart = _shown(chart, schedule.name, *remarks)
    return shown


def of_frame(frame: pd.DataFrame, y: str, x: str | None) -> alt.LayerChart | alt.Chart:
    """A line for each configuration over what differs."""
    chart, title, remarks = framed(frame, y, x)
    shown: alt.LayerChart = _shown(chart.properties(width=_WIDTH), title, *remarks)
    return shown


def _shown(chart: Any, title: str, *below: str) -> Any:
    """The chart with its title, in colours that do not depend on the page around it."""
    head = alt.TitleParams(
        _cut(title), subtitle=[_cut(text) for text in below if text], anchor="start"
    )
    drawn = chart.properties(title=head).to_dict()
    drawn["config"] = CONFIG | _PAPER
    return alt.Chart.from_dict(inked(drawn, _INK))


def _cut(text: str) -> str:
    return text if len(text) <= _CUT else f"{text[: _CUT - 1]}…"


_ROW = 20
_COLUMN = 120
_TOLD = 8
"""Waits that a tooltip names."""
_KINDS = 3
"""Kinds of work that a legend names for ops in a row."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Ops of one stream in a row: only the first one waits, and only the last one is waited for."""

    ops: tuple[Op, ...]

    @property
    def name(self) -> str:
        more = len(self.ops) - 1
        return f"{self.ops[0].name} and {more:,} more" if more else self.ops[0].name

    @property
    def stream(self) -> str:
        return self.ops[0].stream

    def to_row(self) -> dict[str, str]:
        kinds = list(dict.fromkeys(kind_of(op.work) for op in self.ops))
        after = self.ops[0].after
        more = len(after) - _TOLD
        waits = ", ".join(map(str, after[:_TOLD])) + (f" and {more} more" if more > 0 else "")
        last = self.ops[-1]
        return {
            "op": self.name,
            "stream": self.stream,
            "kind": ", ".join(kinds[:_KINDS]) + (", ..." if len(kinds) > _KINDS else ""),
            "work": str(last.work) if len(self.ops) == 1 else f"up to {last.name}",
            "after": waits or "its stream alone",
        }


def graph(schedule: Schedule, first: int) -> tuple[Drawn, list[str]]:
    """The first ops from top to bottom in order of issue, and remarks on what the picture shows.

    Streams are columns. A line goes from an op to one on another stream that waits for it. Ops in a
    row of a stream that no other stream waits for are one point.
    """
    runs = _runs(schedule)[:first]
    rows = [run.to_row() for run in runs]
    names = [run.name for run in runs]
    streams = list(dict.fromkeys(run.stream for run in runs))
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    y = alt.Y(
        "op:N",
        title=None,
        scale=alt.Scale(type="point", domain=names),
        axis=alt.Axis(labelLimit=260, ticks=False, domain=False, grid=True),
    )
    x = alt.X(
        "stream:N",
        title=None,
        scale=alt.Scale(type="point", domain=streams),
        axis=alt.Axis(orient="top", labelAngle=0, labelLimit=_COLUMN - 10, domain=False),
    )
    waits, hidden = _waits(runs)
    lines: list[tuple[Rows, dict[str, Any]]] = [
        (_follow(runs), {"opacity": 0.25, "strokeWidth": 1})
    ]
    lines += [
        ([row for row in waits if not row["earlier"]], {"opacity": 0.7}),
        ([row for row in waits if row["earlier"]], {"opacity": 0.7, "strokeDash": [4, 3]}),
    ]
    rules = [
        alt.Chart(data(here)).mark_rule(color=TEXT, **style).encode(x=x, y=y, x2="to", y2="for")
        for here, style in lines
        if here
    ]
    points = (
        alt.Chart(data(rows))
        .mark_point(filled=True, size=110, opacity=1)
        .encode(
            x=x,
            y=y,
            color=coloured("kind", of_works(kinds), alt.Legend(columns=COLUMNS)),
            tooltip=["op:N", "stream:N", "work:N", alt.Tooltip("after:N", title="waits for")],
        )
    )
    chart = alt.layer(*rules, points).properties(
        width=_COLUMN * len(streams), height=_ROW * max(len(runs), 2)
    )
    return chart, _remarks(schedule, runs, hidden, waits)


def _runs(schedule: Schedule) -> list[_Stretch]:
    streams = {op.name: op.stream for op in schedule.body}
    awaited = {
        wait.op for op in schedule.body for wait in op.after if streams[wait.op] != op.stream
    }
    runs: list[list[Op]] = []
    for op in schedule.body:
        waits = any(streams[wait.op] != op.stream for wait in op.after)
        last = runs[-1][-1] if runs else None
        if last and last.stream == op.stream and last.name not in awaited and not waits:
            runs[-1].append(op)
        else:
            runs.append([op])
    return [_Stretch(tuple(ops)) for ops in runs]


def _follow(runs: Sequence[_Stretch]) -> Rows:
    """A stream runs its ops one by one."""
    by_stream: dict[str, list[_Stretch]] = {}
    for run in runs:
        by_stream.setdefault(run.stream, []).append(run)
    return [
        {"op": before.name, "stream": before.stream, "for": after.name, "to": after.stream}
        for along in by_stream.values()
        for before, after in pairwise(along)
    ]


def _waits(runs: Sequence[_Stretch]) -> tuple[Rows, int]:
    """The waits for ops of other streams, and how many are for ops that are not shown."""
    run_of = {op.name: run for run in runs for op in run.ops}
    waits = [(wait, run) for run in runs for wait in run.ops[0].after]
    rows = [
        {
            "op": run_of[wait.op].name,
            "stream": run_of[wait.op].stream,
            "for": run.name,
            "to": run.stream,
            "earlier": bool(wait.rounds_ago),
        }
        for wait, run in waits
        if wait.op in run_of and run_of[wait.op].stream != run.stream
    ]
    return rows, sum(wait.op not in run_of for wait, _ in waits)


def _remarks(schedule: Schedule, runs: Sequence[_Stretch], hidden: int, waits: Rows) -> list[str]:
    ops, whole = sum(len(run.ops) for run in runs), len(schedule.body)
    shown = f"The {counted(whole, 'op')}" if ops == whole else f"{ops:,} of {counted(whole, 'op')}"
    remarks = [f"{shown} of a round, in order of issue; streams are columns."]
    if waits:
        remarks.append("Lines: the lower op waits for the upper one.")
    if any(row["earlier"] for row in waits):
        remarks.append("Dashed: the upper op waits for the lower one of an earlier round.")
    if hidden:
        remarks.append(f"{counted(hidden, 'wait')} for ops further down.")
    return remarks


_MAX = 5000
"""Rows of a chart."""
_NAMES = {"cluster": "cluster_key", "model": "model_key", "gpus": "gpus"}
"""Columns that hold what some paths vary."""


def framed(frame: Any, y: str, x: str | None) -> tuple[Drawn, str, list[str]]:
    """The chart, its title, and remarks on what it shows. Raises OptionError for what is none."""
    _check(frame, y, x)
    count = len(frame)
    numbers = _numbers(frame, y)
    frame = frame.assign(**{y: numbers})[numbers.notna()].reset_index(drop=True)
    if frame.empty:
        raise OptionError(f"no row of the table has a figure in {y!r}")
    differ = _differ(frame)
    across = x or _across(differ)
    keys = [name for name in differ if name != across]
    series = [name for name in keys if _apart(frame, across, name)] if across in differ else keys
    rows = _rows(frame, y, across, series)
    unit = _title(frame, y)
    if across is None:
        chart, remarks = _bars(rows, unit), _table_remarks(rows, y, "Black lines", "Pale bars")
    else:
        chart = _lines(rows, across, unit, joined=across in differ)
        remarks = _table_remarks(rows, y, "Bands", "Hollow points")
    if len(frame) < count:
        remarks.append(f"{counted(count - len(frame), 'row')} without this figure left out.")
    return chart, unit, [_in_common(frame), *remarks]


def _check(frame: Any, y: str, x: str | None) -> None:
    if not isinstance(frame, pd.DataFrame):
        raise OptionError(
            f"plot takes a Result, a Trace, a Schedule, or a table of co2sim.sweep or co2sim.scale,"
            f" not a {type(frame).__name__}"
        )
    if len(frame) > _MAX:
        raise OptionError(f"the table has {len(frame):,} rows; a chart shows at most {_MAX:,}")
    for name in (y, x):
        if name is not None and name not in frame:
            raise OptionError(f"no column is called {name!r}; {nearest(str(name), frame.columns)}")


def _numbers(frame: pd.DataFrame, y: str) -> "pd.Series[float]":
    """The column as floats; rows that failed have none."""
    column = frame[y]
    numbers = pd.to_numeric(column, errors="coerce").astype(float)
    if column.dtype == bool or (numbers.isna() & column.notna()).any():
        raise OptionError(f"{y!r} is no column of numbers")
    return numbers


def _differ(frame: pd.DataFrame) -> list[str]:
    """Columns that tell rows apart: paths that vary, and what is not varied by its path."""
    paths = [name for name in map(str, frame) if name.startswith(VARIED)]
    named = [name for name in paths if name.removeprefix(VARIED) not in _NAMES]
    if not any(name.removeprefix(VARIED).startswith("strategy") for name in paths):
        named.append("strategy")
    columns = [name for name in _NAMES.values() if name in frame] + named
    return [name for name in columns if name in frame and len(frame[name].unique()) > 1]


def _across(differ: Sequence[str]) -> str | None:
    """What the x axis shows: the GPUs, or the path that was varied last; None for names alone."""
    if "gpus" in differ:
        return "gpus"
    paths = [name for name in differ if name.startswith(VARIED) and name != f"{VARIED}strategy"]
    return paths[-1] if paths else None


def _apart(frame: pd.DataFrame, across: str, name: str) -> bool:
    """Whether a column tells rows apart that are at one place of the x axis."""
    if not (name.startswith(VARIED) or name == "gpus"):
        return True
    return bool(frame.groupby(across, dropna=False)[name].nunique(dropna=False).max() > 1)


def _rows(frame: pd.DataFrame, y: str, across: str | None, series: Sequence[str]) -> Rows:
    kinds = {str(name).partition("(")[0] for name in frame.get("strategy", [])}
    alone = kinds.pop() if len(kinds) == 1 else "all"
    rows = []
    for row in frame.to_dict("records"):
        low, high = (row.get(f"{y}_{end}") for end in ("low", "high"))
        figure = row[y], None if pd.isna(low) else low, None if pd.isna(high) else high
        name = ", ".join(_word(name, row[name]) for name in series) or alone
        fits = bool(row.get("fits_in_memory", True))
        memory, where = str(row.get("memory_fit") or ""), row[across] if across else ""
        rows.append(figure_row(name, figure, fits=fits, memory=memory, at=where))
    return rows


def _word(name: str, value: Any) -> str:
    """What tells a line from others."""
    if name == "gpus":
        return counted(int(value), "GPU")
    path = name.removeprefix(VARIED)
    return f"{value}" if path in {name, "strategy"} else f"{path}={value}"


def _lines(rows: Rows, across: str, unit: str, *, joined: bool) -> Drawn:
    names = [row["strategy"] for row in rows]
    stops = _ordered([row["at"] for row in rows])
    title = across.removeprefix(VARIED).replace("gpus", "GPUs")
    x = alt.X("at:N", title=title, sort=stops, axis=alt.Axis(labelAngle=0))
    if across == "gpus":
        x = gpu_axis(stops[:_TICKS], "at")
    elif all(isinstance(stop, int | float) for stop in stops):
        x = alt.X("at:Q", title=title, scale=alt.Scale(zero=False, padding=16))
    log = alt.Scale(type="log", nice=False, padding=10)
    scale = log if wide(ends_of(rows)) else alt.Scale(zero=True)
    y = alt.Y("value:Q", title=unit, scale=scale, axis=alt.Axis(format="~s"))
    tips = figure_tips(unit, alt.Tooltip("at:N", title=title))
    layers = banded(rows, x, y, names, tips, several=joined)
    return alt.layer(*layers).properties(height=HEIGHT)


_TICKS = 40
"""Of the axis of GPUs."""


def _bars(rows: Rows, unit: str) -> Drawn:
    """Names alone differ: a bar for each, with its interval."""
    names = [row["strategy"] for row in rows]
    encoding = {
        "x": alt.X("value:Q", title=unit, axis=alt.Axis(format="~s", tickCount=8)),
        "y": alt.Y("strategy:N", sort=None, title=None, axis=alt.Axis(labelLimit=300)),
        "color": by_strategy(names)[0].legend(None),
    }
    bars = ranged_bars(rows, encoding, 0.9, figure_tips(unit), "#000000")
    return bars.properties(height=ROW * len(set(names)))


def _ordered(values: Sequence[Any]) -> list[Any]:
    """Each value once: quantities by size, whatever the order of the rows; others as they come."""
    distinct = list(dict.fromkeys(values))
    if all(isinstance(value, int | float) for value in distinct):
        return sorted(distinct)
    for unit in EXAMPLES:
        try:
            return sorted(distinct, key=lambda value, unit=unit: parse(value, unit))  # type: ignore[misc]
        except UnitError:
            continue
    return distinct


def _title(frame: pd.DataFrame, y: str) -> str:
    """The name of a column, or of its path."""
    units = set(frame["unit"]) if "unit" in frame else set()
    if len(units) == 1 and y.startswith("tokens_per_s"):
        return y.replace("tokens_per_s", f"{units.pop()}s/s").replace("_per_gpu", " of a GPU")
    currencies = set(frame["currency"]) if "currency" in frame else set()
    if len(currencies) == 1 and y.startswith("cost"):
        return f"{y}, {currencies.pop()}"
    return y


def _in_common(frame: pd.DataFrame) -> str:
    """The model and the cluster of all rows, where there is one."""
    shared: list[str] = []
    for names in (("model", "model_key"), ("cluster", "cluster_key")):
        columns = [name for name in names if name in frame and len(frame[name].unique()) == 1]
        shared.extend(str(frame[name].iloc[0]) for name in columns[:1])
    return " on ".join(shared)


def _table_remarks(rows: Rows, y: str, intervals: str, misfits: str) -> list[str]:
    remarks = []
    if any(row["low"] is not None for row in rows):
        remarks.append(f"{intervals} are {'90 % ' if y == 'tokens_per_s' else ''}intervals.")
    if not all(row["fits"] for row in rows):
        remarks.append(f"{misfits} do not fit in memory.")
    return remarks
