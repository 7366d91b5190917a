"""Where a large error may come from: time, similar cells, constants, omitted mechanisms."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from analysis.published.ablation import OMITTED, mape
from analysis.published.calibrate import root_of
from analysis.published.cells import Cell
from analysis.published.errors import CellPrediction
from analysis.published.parameters import GROUPS, Constant, stated
from analysis.published.predict import predict
from co2sim.prediction import driver

_VISIBLE = 1e-3
"""Smallest change of an error that is reported."""
_SIMILAR = 3
"""Smallest number of cells whose mean error is reported."""


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Seconds of a round of the cell's first configuration, and their parts.

    `compute_s` is the round with free communication, `communication_s` the time during which some
    communication is under way.
    """

    round_s: float
    compute_s: float
    communication_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class SimilarCells:
    """Mean signed errors of the cells that share these labels with a cell, and of all others."""

    labels: tuple[tuple[str, str], ...]
    cells: int
    error: float
    others: float


@dataclass(frozen=True, slots=True)
class RequiredValue:
    """The value of one constant that would reproduce a cell; None if none within its bounds does.

    `mape` is then the mean absolute error of the constant's group of cells.
    """

    constant: Constant
    stated: float
    needed: float | None
    mape: float | None


@dataclass(frozen=True, slots=True)
class OmittedMechanism:
    """A mechanism that the model leaves out: errors of a cell and of its group with it."""

    name: str
    error: float
    mape: float


def round_time(cell: Cell) -> RoundTime:
    """What a round consists of, by the simulation."""
    result = driver.run(cell.setup.case())
    busy = result.round_time_s - result.exposed_comm_s - result.waiting_s
    return RoundTime(result.round_time_s, busy, result.comm_busy_s, result.exposed_comm_s)


def similar_cells(row: CellPrediction, rows: Sequence[CellPrediction]) -> SimilarCells | None:
    """The label, or pair of labels, of the cell whose cells differ most from all others."""
    found = []
    labels = sorted(row.cell.labels.items())
    group = [other for other in rows if other.cell.group == row.cell.group]
    for chosen in (*combinations(labels, 1), *combinations(labels, 2)):
        same = [r.error for r in group if set(chosen) <= set(r.cell.labels.items())]
        rest = [r.error for r in group if not set(chosen) <= set(r.cell.labels.items())]
        if len(same) >= _SIMILAR and rest:
            found.append(SimilarCells(chosen, len(same), fmean(same), fmean(rest)))
    return max(found, key=lambda one: abs(one.error - one.others), default=None)


def required_values(cell: Cell, cells: Sequence[Cell]) -> list[RequiredValue]:
    """For every constant of the cell's group, the value that reproduces it, and its errors."""
    group = GROUPS[cell.group]
    values = stated(group)
    same_group = [other for other in cells if other.group == cell.group]
    found = []
    for constant in group.on(cell.setup.cluster):
        known = values[constant.name]
        root = root_of(cell, constant, values)
        if root.reproduces:
            errors = mape(same_group, {**values, constant.name: root.value})
            found.append(RequiredValue(constant, known, root.value, errors))
        else:
            found.append(RequiredValue(constant, known, None, None))
    return found


def omitted_mechanisms(cell: Cell, cells: Sequence[Cell]) -> list[OmittedMechanism]:
    """What the model leaves out and would change the cell, with the constants as they are."""
    same_group = [other for other in cells if other.group == cell.group]
    before = predict(cell, fast=True) / cell.published - 1
    found = []
    for one in OMITTED:
        if one.group != cell.group:
            continue
        error = predict(one.flip(cell), fast=True) / cell.published - 1
        if abs(error - before) > _VISIBLE:
            mean = mape([one.flip(other) for other in same_group])
            found.append(OmittedMechanism(one.name, error, mean))
    return found
