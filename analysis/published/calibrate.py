"""Fit the constants of a group on its fit cells: least squares in log space, cross-validated.

A residual is log(predicted / published). Bounds are physical: no rate above its peak, no time below
zero. Predictions are those of the simulator, by its shorter ways (`quick_step_time`). A robust fit
lets the loss of an outlier grow with its error only, not with its square ("soft l1").
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analysis.published.cells import Cell
from analysis.published.parameters import GROUPS, ConstantGroup, stated
from analysis.published.predict import predict
from co2sim.errors import OptionError

FOLDS = 5

_WITHIN, _QUANTILE = 0.9, 1.645
"""A share of the residuals, and of how many standard deviations a normal one holds as many."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted values, their covariance, and the scatter of the residuals around them.

    `scatter` is the standard deviation of log(predicted / published), None without degrees of
    freedom, and `unscaled` the covariance for a scatter of 1. In a robust fit the scatter is that
    of a normal distribution with nine tenths of the residuals in the same interval. `mape` and `cross_validated` are mean
    absolute errors as fractions; `by_label` is that of all cells with one value of a label at a
    time left out, such as those of one micro-batch.
    """

    group: str
    values: dict[str, float]
    covariance: Array
    unscaled: Array
    scatter: float | None
    freedom: int
    cells: int
    mape: float
    cross_validated: float | None
    by_label: dict[str, float]


def fit_cells(cells: Sequence[Cell], group: ConstantGroup) -> list[Cell]:
    """The cells that the group may be fitted on."""
    return [cell for cell in cells if cell.group == group.name and cell.use == "fit"]


def fit(group: ConstantGroup, cells: Sequence[Cell], *, cross_validate: bool = True) -> Fit:
    """Fit on the cells marked fit. Raises OptionError with fewer cells than constants."""
    chosen = fit_cells(cells, group)
    count = len(group.constants)
    if len(chosen) < count:
        raise OptionError(
            f"{group.name}: {len(chosen)} cells to fit {count} constants on; is --data missing?"
        )
    values, jacobian, residuals = _solve(group, chosen)
    scales = np.array([constant.high - constant.low for constant in group.constants])
    freedom = len(chosen) - count
    scatter = _scatter(residuals, freedom, robust=group.robust is not None) if freedom else None
    inverse = np.linalg.pinv(jacobian.T @ jacobian)  # of scaled constants: units differ by 1e9
    unscaled: Array = (np.outer(scales, scales) * inverse).astype(np.float64)
    covariance: Array = unscaled * (scatter or 0.0) ** 2
    held, by_label = None, {}
    if cross_validate and freedom >= FOLDS:
        # neighbouring cells are similar: each fold takes every fifth
        folds = [chosen[fold::FOLDS] for fold in range(FOLDS)]
        held = left_out(group, chosen, folds)
        by_label = {
            label: left_out(group, chosen, parts)
            for label, parts in parts_by_label(chosen).items()
            if label not in group.apart
        }
    mape = float(np.mean(np.abs(np.expm1(residuals))))
    return Fit(
        group=group.name,
        values=values,
        covariance=covariance,
        unscaled=unscaled,
        scatter=scatter,
        freedom=freedom,
        cells=len(chosen),
        mape=mape,
        cross_validated=held,
        by_label=by_label,
    )


def _scatter(residuals: Array, freedom: int, *, robust: bool) -> float:
    if not robust:
        return math.sqrt(float(residuals @ residuals) / freedom)
    within = float(np.quantile(np.abs(residuals), _WITHIN)) / _QUANTILE
    return within * math.sqrt(len(residuals) / freedom)


def residuals_of(cells: Sequence[Cell], values: Mapping[str, float]) -> Array:
    """log(predicted / published) of every cell."""
    return np.array([math.log(predict(cell, values, fast=True) / cell.published) for cell in cells])


def _solve(
    group: ConstantGroup, cells: Sequence[Cell], *, thorough: bool = True
) -> tuple[dict[str, float], Array, Array]:
    """Least squares inside the bounds, with constants scaled to [0, 1], as is the Jacobian.

    It starts in the middle of the bounds, and if `thorough` at the values of the catalog too: where
    cells are left out, what the catalog has learned from them must not come back.
    """
    from scipy.optimize import least_squares  # noqa: PLC0415 - slow

    low = np.array([constant.low for constant in group.constants])
    high = np.array([constant.high for constant in group.constants])

    def named(scaled: Array) -> dict[str, float]:
        found = low + (high - low) * scaled
        return {c.name: float(v) for c, v in zip(group.constants, found, strict=True)}

    def residuals(scaled: Array) -> Array:
        return residuals_of(cells, named(scaled))

    known = stated(group)
    here = np.array([known[constant.name] for constant in group.constants])
    starts = [np.full(len(low), 0.5)]
    if thorough:
        starts.append(np.clip((here - low) / (high - low), 0.01, 0.99))
    loss = {"loss": "soft_l1", "f_scale": group.robust} if group.robust else {}
    best = min(
        (
            least_squares(
                residuals,
                start,
                bounds=(0, 1),
                diff_step=np.array([1e-3]),
                ftol=1e-5,
                xtol=1e-5,
                **loss,
            )
            for start in starts
        ),
        key=lambda found: float(found.cost),
    )
    return named(best.x), np.asarray(best.jac), np.asarray(best.fun)


def left_out(group: ConstantGroup, cells: Sequence[Cell], parts: Sequence[Sequence[Cell]]) -> float:
    """Mean absolute error of cells that are left out of the fit, one part at a time."""
    errors: list[float] = []
    for left in parts:
        kept = [cell for cell in cells if cell not in left]
        values, _, _ = _solve(group, kept, thorough=False)
        errors += list(np.abs(np.expm1(residuals_of(left, values))))
    return float(np.mean(errors))


def parts_by_label(cells: Sequence[Cell]) -> dict[str, list[list[Cell]]]:
    """For every label that cells differ in, the cells grouped by its values."""
    found = {}
    for label in cells[0].labels:
        values = dict.fromkeys(cell.labels[label] for cell in cells)
        if len(values) > 1:
            found[label] = [[c for c in cells if c.labels[label] == value] for value in values]
    return found


def fit_all(cells: Sequence[Cell], names: Sequence[str] = tuple(GROUPS)) -> list[Fit]:
    """The fits of these groups."""
    return [fit(GROUPS[name], cells) for name in names]
