"""A chart of a table of `sweep` or `scale`: a line for each configuration over what differs."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from co2sim.common.errors import OptionError, UnitError, nearest
from co2sim.common.units import EXAMPLES, counted, parse
from co2sim.report.chart_style import HEIGHT, ROW, Drawn, Rows, by_strategy, data
from co2sim.report.line_charts import banded
from co2sim.studies.table import VARIED

_MAX = 5000
"""Rows of a chart."""
_NAMES = {"cluster": "cluster_key", "model": "model_key", "gpus": "gpus"}
"""Columns that hold what some paths vary."""
_WIDE = 10
"""A range from which on the axis is logarithmic: the most, divided by the least."""


def framed(frame: Any, y: str, x: str | None) -> tuple[Drawn, str, list[str]]:
    """The chart, its title, and remarks on what it shows. Raises OptionError for what is none."""
    _check(frame, y, x)
    asked = len(frame)
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
        chart, remarks = _bars(rows, unit), _remarks(rows, y, "Black lines", "Pale bars")
    else:
        chart = _lines(rows, across, unit, joined=across in differ)
        remarks = _remarks(rows, y, "Bands", "Hollow points")
    if len(frame) < asked:
        remarks.append(f"{counted(asked - len(frame), 'row')} without this figure left out.")
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
    given = frame[y]
    numbers = pd.to_numeric(given, errors="coerce").astype(float)
    if given.dtype == bool or (numbers.isna() & given.notna()).any():
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
    low, high = (
        frame[name] if name in frame else pd.Series([None] * len(frame))
        for name in (f"{y}_low", f"{y}_high")
    )
    fits = frame["fits_in_memory"] if "fits_in_memory" in frame else [True] * len(frame)
    rows = []
    for place, (_, row) in enumerate(frame.iterrows()):
        ends = [None if pd.isna(end[place]) else float(end[place]) for end in (low, high)]
        rows.append(
            {
                "strategy": ", ".join(_word(name, row[name]) for name in series) or alone,
                "at": _plain(row[across]) if across else "",
                "value": float(row[y]),
                "low": ends[0] if None not in ends else None,
                "high": ends[1] if None not in ends else None,
                "interval": f"{ends[0]:,.4g} to {ends[1]:,.4g}" if None not in ends else "-",
                "fits": bool(fits[place]),
                "memory": "fits" if fits[place] else "DOES NOT FIT",
            }
        )
    return rows


def _word(name: str, value: Any) -> str:
    """What tells a line from others."""
    if name == "gpus":
        return counted(int(value), "GPU")
    path = name.removeprefix(VARIED)
    return f"{value}" if path in {name, "strategy"} else f"{path}={value}"


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _lines(rows: Rows, across: str, unit: str, *, joined: bool) -> Drawn:
    names = [row["strategy"] for row in rows]
    places = _ordered([row["at"] for row in rows])
    title = across.removeprefix(VARIED).replace("gpus", "GPUs")
    x = alt.X("at:N", title=title, sort=places, axis=alt.Axis(labelAngle=0))
    if across == "gpus":
        scale = alt.Scale(type="log", base=2, nice=False, padding=16)
        x = alt.X(
            "at:Q", title=title, scale=scale, axis=alt.Axis(values=places[:_TICKS], format=",d")
        )
    elif all(isinstance(place, int | float) for place in places):
        x = alt.X("at:Q", title=title, scale=alt.Scale(zero=False, padding=16))
    values = [row[key] for row in rows for key in ("value", "low", "high") if row[key] is not None]
    wide = min(values) > 0 and max(values) > _WIDE * min(values)
    scale = alt.Scale(type="log", nice=False, padding=10) if wide else alt.Scale(zero=True)
    y = alt.Y("value:Q", title=unit, scale=scale, axis=alt.Axis(format="~s"))
    tips = [*_tips(unit), alt.Tooltip("at:N", title=title)]
    layers = banded(rows, x, y, names, tips, several=joined)
    return alt.layer(*layers).properties(height=HEIGHT)


_TICKS = 40
"""Of the axis of GPUs."""


def _bars(rows: Rows, unit: str) -> Drawn:
    """Names alone differ: a bar for each, with its interval."""
    names = [row["strategy"] for row in rows]
    colour, _ = by_strategy(names)
    y = alt.Y("strategy:N", sort=None, title=None, axis=alt.Axis(labelLimit=300))
    base = alt.Chart(data(rows)).encode(y=y, tooltip=_tips(unit))
    axis = alt.Axis(format="~s", tickCount=8)
    bars = base.mark_bar().encode(
        x=alt.X("value:Q", title=unit, axis=axis),
        color=colour.legend(None),
        opacity=alt.condition("datum.fits", alt.value(0.9), alt.value(0.35)),
    )
    ends = base.transform_filter("isValid(datum.low)").mark_rule(color="#000000", strokeWidth=2)
    shown = ends.encode(x=alt.X("low:Q", title=unit), x2="high:Q")
    return alt.layer(bars, shown).properties(height=ROW * len(set(names)))


def _tips(unit: str) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("strategy:N", title="what"),
        alt.Tooltip("value:Q", title=unit, format=",.4~g"),
        alt.Tooltip("interval:N"),
        alt.Tooltip("memory:N"),
    ]


def _ordered(values: Sequence[Any]) -> list[Any]:
    """Each value once: quantities by size, whatever the order of the rows; others as they come."""
    known = list(dict.fromkeys(values))
    if all(isinstance(value, int | float) for value in known):
        return sorted(known)
    for unit in EXAMPLES:
        try:
            return sorted(known, key=lambda value, unit=unit: parse(value, unit))  # type: ignore[misc]
        except UnitError:
            continue
    return known


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
    found: list[str] = []
    for names in (("model", "model_key"), ("cluster", "cluster_key")):
        known = [name for name in names if name in frame and len(frame[name].unique()) == 1]
        found.extend(str(frame[name].iloc[0]) for name in known[:1])
    return " on ".join(found)


def _remarks(rows: Rows, y: str, intervals: str, misfits: str) -> list[str]:
    remarks = []
    if any(row["low"] is not None for row in rows):
        remarks.append(f"{intervals} are {'90 % ' if y == 'tokens_per_s' else ''}intervals.")
    if not all(row["fits"] for row in rows):
        remarks.append(f"{misfits} do not fit in memory.")
    return remarks
