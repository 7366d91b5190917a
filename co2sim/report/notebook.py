"""Charts for notebooks: those of the page, of one result, trace, schedule or table at a time.

They have dark text on white: readable in light and dark notebooks, and where one is printed.
"""

import json
from typing import Any

import altair as alt
import pandas as pd

from co2sim.errors import OptionError
from co2sim.memory import GIB
from co2sim.report.bar_charts import memory_bars, share_bars, timeline_bars
from co2sim.report.chart_style import CONFIG, ROW, TEXT
from co2sim.report.frame_chart import framed
from co2sim.report.rounds import round_of
from co2sim.report.schedule_chart import graph
from co2sim.result import Result
from co2sim.schedule import Schedule
from co2sim.trace import Trace
from co2sim.units import counted, duration

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
    shares, memory = share_bars(named, told=True), memory_bars(named, told=True)
    length = duration(result.round_time_s)
    has, needs = result.gpu_memory_bytes / GIB, result.memory_bytes_per_gpu["total"] / GIB
    fits = "" if result.fits_in_memory else "; DOES NOT FIT"
    size = f"{needs:.3g} GiB of {has:.3g} GiB (dashed){fits}"
    steps = counted(result.steps_per_round, "step")
    charts = [
        shares.properties(title=f"A round of {steps} takes {length}"),
        memory.properties(title=f"Memory of a GPU: {size}"),
    ]
    chart = alt.vconcat(*[one.properties(width=_WIDTH, height=2 * ROW) for one in charts])
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
    found = round_of(schedule, trace, traced.index(rank), _WIDTH)
    rows = [bar.to_dict() for bar in found.bars]
    kinds, lanes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("kind", "stream"))
    chart = timeline_bars(rows, kinds, found.length)
    count = trace.ranks[rank]
    stands = f", which stands for {count:,} equal ranks" if count > 1 else ""
    length = duration(found.length / 1e3)
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
    found = chart.properties(title=head).to_dict()
    found["config"] = json.loads(json.dumps(CONFIG).replace(TEXT, _INK)) | _PAPER
    return alt.Chart.from_dict(_inked(found))


def _cut(text: str) -> str:
    return text if len(text) <= _CUT else f"{text[: _CUT - 1]}…"


def _inked(value: Any) -> Any:
    """With a colour of its own where marks have that of the page."""
    if isinstance(value, list):
        return [_inked(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _ink(one) if key in _COLOURED else _inked(one) for key, one in value.items()}


_COLOURED = {"color", "range"}
"""Keys of a specification that hold colours. Others, and data, may hold the same word as a name."""


def _ink(value: Any) -> Any:
    if isinstance(value, list):
        return [_ink(one) for one in value]
    return _INK if value == TEXT else _inked(value)
