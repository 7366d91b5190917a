"""The chart of days against money."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt

from co2sim.report.answered import Answered
from co2sim.report.chart_style import (
    HEIGHT,
    TEXT,
    Rows,
    Spec,
    by_strategy,
    data,
    faded,
    picked,
    points_of,
    spec,
)

_BAND = 0.18


def front(
    every: Sequence[Answered],
    names: Sequence[str],
    marked: Mapping[str, Answered] | None = None,
    limits: Mapping[str, float] | None = None,
    *,
    hours: bool = False,
) -> Spec | None:
    """Days against money, with intervals; None where nothing has a price, or nobody asked.

    With `hours` GPU-hours stand for money where nothing has a price. `marked` are cases with the
    words beside them, `limits` the most days and the most money, by those names.
    """
    known = [one for one in every if one.totals is not None]
    priced = [one for one in known if one.totals and one.totals.cost is not None]
    currencies = {one.totals.currency for one in priced if one.totals}
    if not known or (not priced and not hours) or len(currencies) > 1:
        return None
    rows = [_training(one) for one in priced or known]
    least = {id(row) for row in _undominated([row for row in rows if row["fits"]])}
    said = {id(one): words for words, one in (marked or {}).items()}
    for row, one in zip(rows, priced or known, strict=True):
        row["front"] = id(row) in least
        row["mark"] = said.get(id(one))
    colour, _ = by_strategy(names)
    log = alt.Scale(type="log", nice=False, padding=24 if marked else 16)
    x = alt.X("days:Q", scale=log, title="days", axis=alt.Axis(format="~g"))
    unit = currencies.pop() if currencies else "GPU-hours"
    y = alt.Y("cost:Q", scale=log, title=unit, axis=alt.Axis(format="~s"))
    tips = [
        alt.Tooltip("name:N"),
        alt.Tooltip("days:Q", format=",.3~g"),
        alt.Tooltip("cost:Q", format=",.3~s", title=unit),
        alt.Tooltip("front:N", title="nothing is cheaper and faster"),
    ]
    line = [row for row in rows if row["front"]]
    dashed = alt.Chart(data(line)).mark_line(color=TEXT, strokeDash=[4, 3]).encode(x=x, y=y)
    across = alt.X("days_low:Q", scale=log, title="days")
    thin = faded(names, 0.4, band=True)
    layers = [
        *(
            rule.encode(x=across, x2="days_high:Q", y=y, color=colour, opacity=thin)
            for rule in _rules(rows, "days_low")
        ),
        *(
            rule.encode(
                x=x, y=alt.Y("cost_low:Q", scale=log), y2="cost_high:Q", color=colour, opacity=thin
            )
            for rule in _rules(rows, "cost_low")
        ),
        *([dashed] if line else []),
        *points_of(rows, x, y, names, tips),
        *_marks([row for row in rows if row["mark"]], x, y),
        *(_limit(name, value, log) for name, value in (limits or {}).items()),
    ]
    return spec(alt.layer(*picked(layers, names)), HEIGHT)


def _training(one: Answered) -> dict[str, Any]:
    """A row; GPU-hours where there is no price."""
    found = one.totals
    assert found is not None
    free = found.cost is None
    per_day = found.gpu_hours / found.days
    ends = (found.days_low, found.days_high)
    hours = [None if days is None else days * per_day for days in ends]
    return {
        "name": f"{one.strategy}, {one.result.gpus} GPUs, {one.cluster}",
        "strategy": one.strategy,
        "days": found.days,
        "cost": found.gpu_hours if free else found.cost,
        "days_low": found.days_low,
        "days_high": found.days_high,
        "cost_low": hours[0] if free else found.cost_low,
        "cost_high": hours[1] if free else found.cost_high,
        "fits": one.result.fits_in_memory,
    }


def _rules(rows: Rows, known: str) -> list[Any]:
    """Lines for intervals, where any is known."""
    found = [row for row in rows if row[known] is not None]
    return [alt.Chart(data(found)).mark_rule()] if found else []


def _marks(rows: Rows, x: alt.X, y: alt.Y) -> Iterator[Any]:
    """Rings, with words below the first one and above the others, which may lie near."""
    for row in rows:
        base = alt.Chart(data([row])).encode(x=x, y=y)
        yield base.mark_point(size=260, filled=False, color=TEXT, strokeWidth=1.5)
        below = row is rows[0]
        yield base.mark_text(dy=20 if below else -20, color=TEXT, fontSize=12).encode(text="mark:N")


def _limit(name: str, value: float, log: alt.Scale) -> Any:
    """A line at the most days, or the most money."""
    rule = alt.Chart(data([{name: value}])).mark_rule(strokeDash=[2, 3], color=TEXT)
    tip = [alt.Tooltip(f"{name}:Q", title=f"the most {name}", format=",.6~g")]
    if name == "days":
        return rule.encode(x=alt.X("days:Q", scale=log), tooltip=tip)
    return rule.encode(y=alt.Y("cost:Q", scale=log), tooltip=tip)


def _undominated(rows: Rows) -> Rows:
    """Those that no other one beats in both days and money."""
    return [
        row
        for row in rows
        if not any(
            other["days"] <= row["days"]
            and other["cost"] <= row["cost"]
            and (other["days"], other["cost"]) != (row["days"], row["cost"])
            for other in rows
        )
    ]
