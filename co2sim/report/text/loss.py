"""Speed and learning in one answer, on the terminal: columns, figures, and a line on both."""

from collections.abc import Iterable, Sequence

from rich.console import Console

from co2sim.common.tables import print_lines
from co2sim.common.units import Seconds, duration
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal, remark, to_loss

_LONG = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))
"""Units of times that are longer than two of them."""


def print_remark(out: Console, results: Iterable[Result], goal: Goal, *after: str) -> None:
    """What a step of local updates is worth, if there are any; then the lines `after` it."""
    line = remark((result.strategy for result in results), goal)
    if line:
        print_lines(out, line, *after)


def heads(results: Sequence[Result], goal: Goal) -> list[str]:
    """The columns of `cells`: none without a goal, and no cost where nothing has a price."""
    if goal.steps is None:
        return []
    priced = any(result.cost_per_billion_tokens is not None for result in results)
    return ["to loss", *(["cost to loss"] if priced else [])]


def cells(result: Result, goal: Goal) -> list[str]:
    """The time and the cost to the loss, "-" where a factor or a price is not known."""
    found = to_loss(result, goal)
    if found is None:
        return ["-", "-"]
    cost = "-" if found.cost is None else f"{found.cost:,.2f} {found.currency}"
    return [_long(found.time_s), cost]


def loss_rows(result: Result, goal: Goal) -> list[tuple[str, str]]:
    """The same as rows of a single result."""
    if goal.steps is None:
        return []
    what = f"time to the loss of {goal.steps:,} steps of ddp"
    found = to_loss(result, goal)
    if found is None:
        return [(what, "steps factor not known")]
    rows = [(what, f"{_long(found.time_s)} ({found.steps:,.0f} steps)")]
    if found.cost is not None:
        rows.append((f"{found.currency} to the same loss", f"{found.cost:,.2f}"))
    return rows


def _long(seconds: Seconds) -> str:
    """A time that may be days."""
    for length, unit in _LONG:
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return duration(seconds)
