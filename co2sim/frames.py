"""Results as a table: one row a case, units in the names of the columns."""

from collections.abc import Sequence
from typing import get_type_hints

import pandas as pd

from co2sim.batch import Outcome
from co2sim.case import Case
from co2sim.errors import OptionError, nearest
from co2sim.grid import Setting, label
from co2sim.result import Result
from co2sim.rows import TO_LOSS, TOTAL, TOTALS, VARIED, row_of, sortable
from co2sim.step_factors import NO_GOAL, Goal
from co2sim.units import CURRENCIES

_IN_TABLES = {
    "per GPU": "tokens_per_s_per_gpu",
    "90 % interval": "tokens_per_s_low",
    "step": "step_time_s",
    "exposed": "-efficiency_vs_free_communication",  # of which it is the rest to 1
    "efficiency": "efficiency_vs_free_communication",
    "overlap": "overlap_ratio",
    "MFU": "mfu",
    "memory": TOTAL,
    "to loss": "time_to_loss_s",
    "cost to loss": "cost_to_loss",
    "GPU-hours": "gpu_hours",
    "kW": "power_w",
    "kWh": "energy_kwh",
    "kg CO2e": "co2e_kg",
}
"""Names in the table of `co2sim sweep`, with their columns; see `_meant` for the others."""
_COUNTS = [name for name, hint in get_type_hints(Result).items() if hint is int]


def to_frame(
    cases: Sequence[Case],
    outcomes: Sequence[Outcome],
    settings: Sequence[Setting] | None = None,
    goal: Goal = NO_GOAL,
    tokens: float | None = None,
) -> pd.DataFrame:
    """One row per case; memory items in columns of their own, `settings` in the first columns.

    See `row_of` for what stands in a row.
    """
    rows = [
        row_of(case, outcome, goal, tokens) for case, outcome in zip(cases, outcomes, strict=True)
    ]
    frame = pd.DataFrame(rows)
    frame["error"] = frame.pop("error") if "error" in frame else None
    whole = [name for name in _COUNTS if frame[name].isna().any()]
    frame = frame.astype(dict.fromkeys(whole, "Int64"))
    for place, path in enumerate(settings[0] if settings else ()):
        values = [label(setting[path]) for setting in settings or ()]
        frame.insert(place, f"{VARIED}{path}", values)
    return frame


def check_column(
    column: str,
    settings: Sequence[Setting],
    goal: Goal = NO_GOAL,
    tokens: float | None = None,
) -> None:
    """Raise OptionError unless a table has the column; "-" before it turns the order round.

    A name of the table that `co2sim sweep` prints will do, such as "per GPU".
    """
    known = [*sortable(), *settings[0], *(TO_LOSS if goal.steps is not None else ())]
    known += TOTALS if tokens is not None else ()
    name = column.removeprefix("-")
    if name not in known and _meant(name).removeprefix("-") not in known:
        said = nearest(name, [*known, *_IN_TABLES])
        raise OptionError(f"no column is called {column!r}; {said}")


def _meant(name: str) -> str:
    """The column behind a name of the printed table, with "-" if it falls where the name rises."""
    if name.endswith("s/s"):  # tokens, images or samples
        return "tokens_per_s"
    if " per billion " in name:
        return "cost_per_billion_tokens"
    if set(name.split(" or ")) <= set(CURRENCIES):
        return "cost"
    return _IN_TABLES.get(name, name)


def order(frame: pd.DataFrame, column: str) -> list[int]:
    """The places of the rows by rising values, or falling ones of "-column"; failed ones last.

    Values that vary are in the order that they were given in. Equal rows keep their order.
    """
    name, falling = column.removeprefix("-"), column.startswith("-")
    if name not in frame and f"{VARIED}{name}" not in frame:
        meant = _meant(name)
        name, falling = meant.removeprefix("-"), falling != meant.startswith("-")
    keys = frame[name] if name in frame else pd.Series(pd.factorize(frame[f"{VARIED}{name}"])[0])
    keys = keys.where(frame["error"].isna())
    found = keys.sort_values(ascending=not falling, kind="stable", na_position="last")
    return [int(place) for place in found.index]
