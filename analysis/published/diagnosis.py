"""Where a large error may come from: what the time goes to, who shares it, what would mend it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from analysis.published.ablation import ADDED, mape
from analysis.published.errors import Row
from analysis.published.parameters import GROUPS, Constant, cluster_of, stated
from analysis.published.predict import Cell, predict
from co2sim import study

_HALVINGS = 20
_VISIBLE = 1e-3
"""A change of an error by less is none."""
_ALIKE = 3
"""Cells that share labels must be so many for their mean to say something."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Seconds of a round of the cell's first configuration, and how much of it is what."""

    round_s: float
    compute_s: float
    communication_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Alike:
    """Mean signed errors of the cells that share these labels with a cell, and of all others."""

    labels: tuple[tuple[str, str], ...]
    cells: int
    error: float
    others: float


@dataclass(frozen=True, slots=True)
class Remedy:
    """The value of one constant that would meet a published cell; None if none within its bounds.

    `mape` is then the mean absolute error of the constant's group of cells.
    """

    constant: Constant
    value: float
    needed: float | None
    mape: float | None


@dataclass(frozen=True, slots=True)
class Otherwise:
    """What the model leaves out: the error of a cell with it, and the mean of its group."""

    name: str
    error: float
    mape: float


def shares(cell: Cell) -> Shares:
    """What a round is made of, by the simulation."""
    result = study.run(cell.terms[0].setup.case(cell.group, None))
    busy = result.round_time_s - result.exposed_comm_s - result.waiting_s
    return Shares(result.round_time_s, busy, result.comm_busy_s, result.exposed_comm_s)


def alike(row: Row, rows: Sequence[Row]) -> Alike | None:
    """The label, or pair of labels, that sets the cell and its like most apart from all others."""
    found = []
    labels = sorted(row.cell.labels.items())
    group = [other for other in rows if other.cell.group == row.cell.group]
    for chosen in (*combinations(labels, 1), *combinations(labels, 2)):
        same = [r.error for r in group if set(chosen) <= set(r.cell.labels.items())]
        rest = [r.error for r in group if not set(chosen) <= set(r.cell.labels.items())]
        if len(same) >= _ALIKE and rest:
            found.append(Alike(chosen, len(same), fmean(same), fmean(rest)))
    return max(found, key=lambda one: abs(one.error - one.others), default=None)


def remedies(cell: Cell, cells: Sequence[Cell]) -> list[Remedy]:
    """For every constant of the cell's group, the value that would meet it, and at what price."""
    group = GROUPS[cell.group]
    setup = cell.terms[0].setup
    values = stated(group, cluster_of(setup.cluster, setup.overrides))
    fellows = [other for other in cells if other.group == cell.group]
    found = []
    for constant in group.constants:
        needed = _needed(cell, constant, values)
        price = None
        if needed is not None:
            price = mape(fellows, {**values, constant.name: needed})
        found.append(Remedy(constant, values[constant.name], needed, price))
    return found


def otherwise(cell: Cell, cells: Sequence[Cell]) -> list[Otherwise]:
    """What is left out of the model and changes the cell, with the constants as they are."""
    fellows = [other for other in cells if other.group == cell.group]
    before = predict(cell, fast=True) / cell.published - 1
    found = []
    for one in ADDED:
        if one.group != cell.group:
            continue
        error = predict(one.flip(cell), fast=True) / cell.published - 1
        if abs(error - before) > _VISIBLE:
            found.append(Otherwise(one.name, error, mape([one.flip(c) for c in fellows])))
    return found


def _needed(cell: Cell, constant: Constant, values: dict[str, float]) -> float | None:
    """By bisection: predictions rise, or fall, with every constant, but for small jumps."""

    def excess(value: float) -> float:
        return predict(cell, {**values, constant.name: value}, fast=True) - cell.published

    low, high = constant.low, constant.high
    at_low = excess(low)
    if at_low * excess(high) > 0:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if (excess(middle) > 0) == (at_low > 0):
            low = middle
        else:
            high = middle
    return (low + high) / 2
