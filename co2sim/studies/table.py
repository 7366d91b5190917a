"""One case as a row of a table: figures with units in the names of their columns."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, get_type_hints

from co2sim.common.errors import OptionError, nearest
from co2sim.common.units import CURRENCIES
from co2sim.prediction.figures import COLUMNS
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, to_loss
from co2sim.prediction.totals import Totals, totals_of
from co2sim.studies.grid import Setting, display_name
from co2sim.studies.run_all import Failure, Outcome

if TYPE_CHECKING:
    import pandas as pd

VARIED = "vary "
"""What the name of a column starts with that holds the values of a path."""
NESTED = {
    "assumed",
    "breakdown_s",
    "memory_bytes_per_gpu",
    "notes",
    "sent_bytes_per_gpu_per_step",
    "warnings",
}
"""Fields of a result that are no column, or several."""
DERIVED = ("efficiency_vs_free_communication",)
"""Properties of a result that are columns too."""
TOTAL = "memory_total_bytes"
"""The column of all memory."""
TO_LOSS = ("steps_factor", "steps_to_loss", "time_to_loss_s", "cost_to_loss")
"""Columns of what it takes to the loss of a goal."""
TOTALS = tuple(
    f.name
    for f in fields(Totals)
    if f.name not in {"factor", "failures", "goodput", "project", "currency", "bill", "missing"}
)
"""Columns of what the training of a number of tokens takes."""


def row_of(
    case: Question, outcome: Outcome, goal: Goal = NO_GOAL, tokens: float | None = None
) -> dict[str, object]:
    """Names of columns with their values; memory items in their own columns.

    A case that failed has its reason in `error`, and no figures. Columns of `TO_LOSS` only if the
    goal has steps, of `TOTALS` only with `tokens` to train; None where no factor is known.
    """
    return _row(case, outcome) | _loss(outcome, goal) | _totals(case, outcome, goal, tokens)


def _row(case: Question, outcome: Outcome) -> dict[str, object]:
    keys: dict[str, object] = {
        "cluster_key": display_name(case.cluster),
        "model_key": display_name(case.model),
    }
    if isinstance(outcome, Failure):
        failed = {
            "strategy": display_name(case.strategy),
            "gpus": case.gpus,
            "error": outcome.reason,
            "warnings": "",
        }
        return keys | dict.fromkeys(sortable(), None) | failed
    figures = {f.name: getattr(outcome, f.name) for f in fields(Result) if f.name not in NESTED}
    derived = {name: getattr(outcome, name) for name in DERIVED}
    memory = outcome.memory_bytes_per_gpu
    items = {memory_column(item): size for item, size in memory.items()}
    return keys | figures | derived | items | {"warnings": "; ".join(outcome.warnings)}


def _loss(outcome: Outcome, goal: Goal) -> dict[str, object]:
    """Factor, steps, seconds and cost to the loss of the goal."""
    if goal.steps is None:
        return {}
    loss = to_loss(outcome, goal) if isinstance(outcome, Result) else None
    if loss is None:
        return dict.fromkeys(TO_LOSS)
    values = (loss.factor.factor, loss.steps, loss.time_s, loss.cost)
    return dict(zip(TO_LOSS, values, strict=True))


def _totals(
    case: Question, outcome: Outcome, goal: Goal, tokens: float | None
) -> dict[str, object]:
    """What the training of a number of tokens takes."""
    if tokens is None:
        return {}
    totals = totals_of(case, outcome, tokens, goal) if isinstance(outcome, Result) else None
    return {name: getattr(totals, name, None) for name in TOTALS}


def sortable() -> list[str]:
    """Columns with figures of every table, in order."""
    return [*(f.name for f in fields(Result) if f.name not in NESTED), *DERIVED, TOTAL]


def memory_column(item: str) -> str:
    """The column of an item of memory."""
    return f"memory_{item}_bytes"


_IN_TABLES = {
    **COLUMNS,
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
    cases: Sequence[Question],
    outcomes: Sequence[Outcome],
    settings: Sequence[Setting] | None = None,
    goal: Goal = NO_GOAL,
    tokens: float | None = None,
) -> "pd.DataFrame":
    """One row per case; memory items in their own columns, `settings` in the first columns.

    See `row_of` for what stands in a row.
    """
    import pandas as pd  # noqa: PLC0415 - 0.3 s that no help needs

    rows = [
        row_of(case, outcome, goal, tokens) for case, outcome in zip(cases, outcomes, strict=True)
    ]
    frame = pd.DataFrame(rows)
    frame["error"] = frame.pop("error") if "error" in frame else None
    whole = [name for name in _COUNTS if frame[name].isna().any()]
    frame = frame.astype(dict.fromkeys(whole, "Int64"))
    for column, path in enumerate(settings[0] if settings else ()):
        values = [display_name(setting[path]) for setting in settings or ()]
        frame.insert(column, f"{VARIED}{path}", values)
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
    columns = [*sortable(), *settings[0], *(TO_LOSS if goal.steps is not None else ())]
    columns += TOTALS if tokens is not None else ()
    name = column.removeprefix("-")
    if name not in columns and _meant(name).removeprefix("-") not in columns:
        said = nearest(name, [*columns, *_IN_TABLES])
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


def order(frame: "pd.DataFrame", column: str) -> list[int]:
    """The places of the rows by rising values, or falling ones of "-column"; failed ones last.

    Values that vary are in the order that they were given in. Equal rows keep their order.
    """
    import pandas as pd  # noqa: PLC0415 - 0.3 s that no help needs

    name, falling = column.removeprefix("-"), column.startswith("-")
    if name not in frame and f"{VARIED}{name}" not in frame:
        meant = _meant(name)
        name, falling = meant.removeprefix("-"), falling != meant.startswith("-")
    keys = frame[name] if name in frame else pd.Series(pd.factorize(frame[f"{VARIED}{name}"])[0])
    keys = keys.where(frame["error"].isna())
    ordered = keys.sort_values(ascending=not falling, kind="stable", na_position="last")
    return [int(index) for index in ordered.index]
