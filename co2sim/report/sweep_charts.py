"""Charts of a sweep: a figure over the first number that varies, or as bars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from co2sim.report.chart_style import (
    FAINT,
    HEIGHT,
    STRATEGIES,
    TEXT,
    NumberAxis,
    Rows,
    Spec,
    by_strategy,
    data,
    faded,
    high,
    log_ticks,
    picked,
    picking,
    points_of,
    scale_of,
    spec,
    wide,
)
from co2sim.report.sweep import Swept
from co2sim.report.tables import Answered

MAX_BARS = 40
MAX_LINES = 40
MAX_POINTS = 800
"""Of one chart."""
_OPACITY = 0.18


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a case with the ends of its interval, in `unit`; `format` is that of its axis."""

    title: str
    unit: str
    format: str
    of: Callable[[Answered], tuple[float, float | None, float | None]]


def measures(swept: Swept) -> list[Measure]:
    """Throughput; days, and money where all prices are in one currency, for tokens to train."""
    unit = f"{swept.all[0].result.unit}s/s"
    found = [Measure(f"{unit} of all GPUs", unit, "~s", _speed)]
    totals = [one.totals for one in swept.all]
    if not any(totals):
        return found
    found.append(Measure("Days", "days", ",~r", _days))
    currencies = {total.currency for total in totals if total}
    if len(currencies) == 1 and None not in currencies:
        currency = str(currencies.pop())
        found.append(Measure(f"Cost, {currency}", currency, "~s", _cost))
    return found


def _speed(one: Answered) -> tuple[float, float | None, float | None]:
    result = one.result
    return result.tokens_per_s, result.tokens_per_s_low, result.tokens_per_s_high


def _days(one: Answered) -> tuple[float, float | None, float | None]:
    assert one.totals is not None
    return one.totals.days, one.totals.days_low, one.totals.days_high


def _cost(one: Answered) -> tuple[float, float | None, float | None]:
    found = one.totals
    assert found is not None
    assert found.cost is not None
    return found.cost, found.cost_low, found.cost_high


def chart(swept: Swept, measure: Measure) -> tuple[Spec, str]:
    """Lines where the first thing that varies is a number, else bars; what was left out."""
    pairs = zip(swept.all, swept.placed, strict=True)
    known = [(one, place) for one, place in pairs if measure.of is _speed or one.totals]
    if swept.across is None:
        shown = [one for one, _ in known[:MAX_BARS]]
        return _bars(shown, measure), left_out("cases", len(known), MAX_BARS)
    lines: dict[str, Rows] = {}
    for one, (x, at, line) in known:
        lines.setdefault(line, []).append(_row(one, measure, line, x, at))
    kept = [sorted(rows, key=_x) for rows in list(lines.values())[:MAX_LINES]]
    count = sum(map(len, kept))
    every = -(-count // MAX_POINTS)
    words = left_out("lines", len(lines), MAX_LINES)
    words += f" Of {count:,} points one in {every} is drawn." if every > 1 else ""
    words += picking([rows[0]["strategy"] for rows in kept])
    return _lines(swept.across, [row for rows in kept for row in rows[::every]], measure), words


def _x(row: dict[str, Any]) -> float:
    return float(row["x"])


def left_out(what: str, count: int, most: int) -> str:
    """What is said of more than a page can show."""
    return f" The first {most} of {count:,} {what} are drawn." if count > most else ""


def _row(one: Answered, measure: Measure, line: str, x: float, at: str) -> dict[str, Any]:
    value, low, high_ = measure.of(one)
    return {
        "strategy": line,
        "x": x,
        "at": at,
        "value": value,
        "low": low,
        "high": high_,
        "fits": one.result.fits_in_memory,
    }


def _tips(measure: Measure) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("value:Q", title=measure.unit, format=",.4~r"),
        alt.Tooltip("low:Q", title="90 %: from", format=",.4~r"),
        alt.Tooltip("high:Q", title="to", format=",.4~r"),
        alt.Tooltip("fits:N", title="fits in memory"),
    ]


def _lines(across: NumberAxis, rows: Rows, measure: Measure) -> Spec:
    """A line for each combination of the others."""
    names = [row["strategy"] for row in rows]
    colour, _ = by_strategy(names)
    drawn = [row["x"] for row in rows]
    x = across.encoding("x", drawn, log=wide(drawn))
    ends = [end for row in rows for end in (row["value"], row["low"], row["high"]) if end]
    log = wide(ends)
    values = log_ticks(ends) if log else alt.Undefined
    scale, axis = scale_of(log=log, padding=10), alt.Axis(format=measure.format, values=values)
    y = alt.Y("value:Q", title=measure.unit, scale=scale, axis=axis)
    base = alt.Chart(data(rows))
    tips = [alt.Tooltip("strategy:N"), alt.Tooltip("at:N", title=across.path)]
    layers: list[Any] = [base.mark_line().encode(x=x, y=y, color=colour, opacity=faded(names))]
    known = [row for row in rows if row["low"] is not None]
    if known:
        low = alt.Y("low:Q", title=measure.unit, scale=scale, axis=axis)
        area = alt.Chart(data(known)).mark_area()
        thin = faded(names, _OPACITY, band=True)
        layers.insert(0, area.encode(x=x, y=low, y2="high:Q", color=colour, opacity=thin))
    layers += points_of(rows, x, y, names, [*tips, *_tips(measure)])
    return spec(alt.layer(*picked(layers, names)), HEIGHT)


def _bars(group: Sequence[Answered], measure: Measure) -> Spec:
    """A bar for each case, and a line for its interval."""
    rows = [_row(one, measure, one.strategy, 0.0, "") for one in group]
    x = alt.X("value:Q", title=measure.unit, axis=alt.Axis(format=measure.format))
    bars = alt.Chart(data(rows)).mark_bar(color=TEXT)
    layers: list[Any] = [
        bars.encode(
            x=x,
            y=STRATEGIES,
            opacity=alt.condition("datum.fits", alt.value(FAINT), alt.value(0.25)),
            tooltip=[alt.Tooltip("strategy:N", title="case"), *_tips(measure)],
        )
    ]
    known = [row for row in rows if row["low"] is not None]
    if known:
        rules = alt.Chart(data(known)).mark_rule(strokeWidth=2, color=TEXT)
        low = alt.X("low:Q", title=measure.unit)
        layers.append(rules.encode(x=low, x2="high:Q", y=STRATEGIES))
    return spec(alt.layer(*layers), high(group))
