"""One case as a row of a table: figures with units in the names of their columns."""

from dataclasses import fields

from co2sim.batch import Failure, Outcome
from co2sim.case import Case
from co2sim.grid import label
from co2sim.result import Result
from co2sim.step_factors import NO_GOAL, Goal, to_loss
from co2sim.totals import Totals, totals_of

VARIED = "vary "
"""What the name of a column starts with that holds the values of a path."""
NESTED = {"assumed", "breakdown_s", "memory_bytes_per_gpu", "notes", "warnings"}
"""Fields of a result that are no column, or several."""
DERIVED = ("efficiency_vs_free_communication",)
"""Properties of a result that are columns too."""
TOTAL = "memory_total_bytes"
"""The column of all memory."""
TO_LOSS = ("steps_factor", "steps_to_loss", "time_to_loss_s", "cost_to_loss")
"""Columns of what it takes to the loss of a goal."""
TOTALS = tuple(
    f.name for f in fields(Totals) if f.name not in {"factor", "goodput", "currency", "missing"}
)
"""Columns of what it takes to train so many tokens."""


def row_of(
    case: Case, outcome: Outcome, goal: Goal = NO_GOAL, tokens: float | None = None
) -> dict[str, object]:
    """Names of columns with their values; memory items in columns of their own.

    A case that failed has its reason in `error`, and no figures. Columns of `TO_LOSS` only if the
    goal has steps, of `TOTALS` only with `tokens` to train; None where no factor is known.
    """
    return _row(case, outcome) | _loss(outcome, goal) | _totals(case, outcome, goal, tokens)


def _row(case: Case, outcome: Outcome) -> dict[str, object]:
    keys: dict[str, object] = {"cluster_key": label(case.cluster), "model_key": label(case.model)}
    if isinstance(outcome, Failure):
        known = {
            "strategy": label(case.strategy),
            "gpus": case.gpus,
            "error": outcome.reason,
            "warnings": "",
        }
        return keys | dict.fromkeys(sortable(), None) | known
    figures = {f.name: getattr(outcome, f.name) for f in fields(Result) if f.name not in NESTED}
    derived = {name: getattr(outcome, name) for name in DERIVED}
    memory = outcome.memory_bytes_per_gpu
    items = {memory_column(item): size for item, size in memory.items()}
    return keys | figures | derived | items | {"warnings": "; ".join(outcome.warnings)}


def _loss(outcome: Outcome, goal: Goal) -> dict[str, object]:
    """Factor, steps, seconds and cost to the loss of the goal."""
    if goal.steps is None:
        return {}
    found = to_loss(outcome, goal) if isinstance(outcome, Result) else None
    if found is None:
        return dict.fromkeys(TO_LOSS)
    values = (found.factor.factor, found.steps, found.time_s, found.cost)
    return dict(zip(TO_LOSS, values, strict=True))


def _totals(case: Case, outcome: Outcome, goal: Goal, tokens: float | None) -> dict[str, object]:
    """What it takes to train so many tokens."""
    if tokens is None:
        return {}
    found = totals_of(case, outcome, tokens, goal) if isinstance(outcome, Result) else None
    return {name: getattr(found, name, None) for name in TOTALS}


def sortable() -> list[str]:
    """Columns with figures of every table, in order."""
    return [*(f.name for f in fields(Result) if f.name not in NESTED), *DERIVED, TOTAL]


def memory_column(item: str) -> str:
    """The column of an item of memory."""
    return f"memory_{item}_bytes"
