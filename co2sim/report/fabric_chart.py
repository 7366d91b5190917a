"""The picture of `co2sim fabric`: what a network costs against the time to the loss."""

from operator import itemgetter
from textwrap import wrap
from typing import Any

import altair as alt

from co2sim.prediction.step_factors import NO_GOAL, Goal
from co2sim.prediction.totals import DAY
from co2sim.report.chart_style import (
    HEIGHT,
    TEXT,
    Rows,
    by_strategy,
    data,
    fit_points,
    log_ticks,
    scale_of,
)
from co2sim.report.text.answer import labels
from co2sim.report.text.fabric import job
from co2sim.studies.fabric import Networks, Training

_WIDTH = 560
_LETTER = 7
"""Pixels, about."""
_MINUTES = 1440.0
"""A day."""
_SAME = 1e-9
"""Of a time: what is no difference."""


def chart(answer: Networks, goal: Goal = NO_GOAL) -> Any:
    """A point for each strategy on each network; lines join those that nothing beats in both.

    Rings are the networks that are recommended. Strategies whose steps have no known worth are left
    out.
    """
    short = labels(answer.strategies)
    shown = [trained for trained in answer.trainings if trained.days is not None]
    longest = max((trained.days or 0.0 for trained in shown), default=0.0)
    unit, size = next((u, s) for least, u, s in _UNITS if longest >= least)
    rows = [_row(trained, short[trained.strategy], size) for trained in shown]
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    x, y = (
        _axis(rows, "usd", "network, USD a GPU"),
        _axis(rows, "time", f"time to the loss, {unit}"),
    )
    colour, shape = by_strategy(names)
    front = [row for name in names for row in _undominated(rows, name)]
    rings = [
        _row(trained, short[trained.strategy], size)
        for trained in map(answer.chosen, answer.strategies)
        if trained.days is not None and trained.result.fits_in_memory
    ]
    named = {row["network"]: row for row in sorted(rings, key=itemgetter("time"))}
    lines = alt.Chart(data(front)).mark_line(strokeWidth=2).encode(x=x, y=y, color=colour)
    marks = alt.Chart(data(rings)).mark_point(filled=False, size=320, color=TEXT, strokeWidth=1.5)
    words = alt.Chart(data([*named.values()])).encode(x=x, y=y, text="network:N")
    loses = f"{100 * answer.tried.loses:.3g} %"
    signs = [f"rings: the cheapest network that loses at most {loses}"] if rings else []
    signs += ["lines join the fronts"]
    signs += [] if all(row["fits"] for row in rows) else ["hollow: does not fit in memory"]
    title = alt.TitleParams(
        wrap(job(answer, goal), _WIDTH // _LETTER), subtitle="; ".join(signs), anchor="middle"
    )
    return alt.layer(
        lines,
        words.mark_text(dy=-20, fontSize=11, stroke="white", strokeWidth=5, strokeJoin="round"),
        *fit_points(rows, {"x": x, "y": y, "color": colour, "shape": shape}, size=60),
        marks.encode(x=x, y=y),
        words.mark_text(dy=-20, fontSize=11, color=TEXT),
        title=title,
        width=_WIDTH,
        height=HEIGHT + 60,
    )


def _axis(rows: Rows, field: str, title: str) -> Any:
    """A log axis of what all rows have, which says so."""
    kind = alt.X if field == "usd" else alt.Y
    axis = alt.Axis(values=log_ticks(row[field] for row in rows), format=",~r")
    return kind(f"{field}:Q", title=f"{title} (log scale)", scale=scale_of(log=True), axis=axis)


_UNITS = (
    (2.0, "days", 1.0),
    (1 / 12, "hours", 1 / 24),
    (1 / 720, "minutes", 1 / _MINUTES),
    (0.0, "s", 1 / DAY),
)
"""From how many days on which unit is used, and its days."""


def _row(trained: Training, name: str, size: float) -> dict[str, Any]:
    assert trained.days is not None
    return {
        "strategy": name,
        "network": trained.network.name,
        "usd": trained.network.usd,
        "time": trained.days / size,
        "fits": trained.result.fits_in_memory,
    }


def _undominated(rows: Rows, name: str) -> Rows:
    """Those of a strategy of which no cheaper one is as fast."""
    front: Rows = []
    here = (row for row in rows if row["strategy"] == name)
    for row in sorted(here, key=itemgetter("usd", "time")):
        if not front or row["time"] < front[-1]["time"] * (1 - _SAME):
            front.append(row)
    return front
