"""Fit the constants of a group on its fit cells: least squares in log space, cross-validated.

A residual is log(predicted / published). Bounds are physical: no rate above its peak, no time below
zero. Predictions are those of the simulator, by its shorter ways (`quick_step_time`). A robust fit
lets the loss of an outlier grow with its error only, not with its square ("soft l1"); it is
cross-validated on the model linearised at the fit, as it has many cells and constants.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from analysis.published.cells import Cell, run_figures, run_kind
from analysis.published.parameters import GROUPS, Constant, ConstantGroup, stated
from analysis.published.predict import predict
from co2sim.common.errors import OptionError
from co2sim.prediction.calibrations import Ranges, ranges

FOLDS = 5

_WITHIN, _QUANTILE = 0.9, 1.645
"""A share of the residuals, and of how many standard deviations a normal one holds as many."""

Array = npt.NDArray[np.float64]

_STARTS = (0.2, 0.5, 0.8)
"""Where a fit starts, as fractions of the constants' ranges."""

_STEP = 1e-3
"""Of a derivative, as a fraction of a constant's range."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted values, their covariance, and the scatter of the residuals around them.

    `scatter` is the standard deviation of log(predicted / published), None without degrees of
    freedom, and `unscaled` the covariance for a scatter of 1. In a robust fit the scatter is that
    of a normal distribution with nine tenths of the residuals in the same interval. `mape` and
    `cross_validated` are mean absolute errors as fractions; `by_label` is that of all cells with
    one value of a label at a time left out, such as those of one micro-batch. `left_out` are
    log(predicted / published) of the runs, in order, each when its fold is left out. A 90 %
    interval reaches `factor` standard deviations to both sides, and `coverage` is the share of
    cells that, left out, lie in intervals whose factor the others determine. `kinds` are those of
    its runs, cells for checks included, `strategies` their names, and `ranges` where they lie.
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
    factor: float
    coverage: float | None = None
    left_out: tuple[float, ...] = ()
    kinds: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    ranges: Ranges = field(default_factory=dict)


def kinds_of(cells: Sequence[Cell]) -> tuple[str, ...]:
    """The kinds of the runs behind cells, as a text."""
    return tuple(sorted({str(kind) for cell in cells if (kind := run_kind(cell.setup))}))


def fit_cells(cells: Sequence[Cell], group: ConstantGroup) -> list[Cell]:
    """The cells that the group may be fitted on."""
    return [cell for cell in cells if cell.group == group.name and cell.use == "fit"]


def fit(group: ConstantGroup, cells: Sequence[Cell], *, cross_validate: bool = True) -> Fit:
    """Fit on the cells marked fit. Raises OptionError with fewer cells than constants.

    Ratios of fitted cells enter the fit, but not its errors and its scatter. A value of a label is
    left out where twice as many cells as constants remain.
    """
    chosen = fit_cells(cells, group)
    count = len(group.constants)
    if len(chosen) < count:
        raise OptionError(
            f"{group.name}: {len(chosen)} cells to fit {count} constants on; is --data missing?"
        )
    values, jacobian, residuals = _solve(group, chosen)
    runs = np.array([not cell.over for cell in chosen])
    scales = np.array([constant.high - constant.low for constant in group.constants])
    freedom = int(runs.sum()) - count
    robust = group.robust is not None
    scatter = _scatter(residuals[runs], freedom, robust=robust) if freedom else None
    inverse = np.linalg.pinv(jacobian.T @ jacobian)  # of scaled constants: units differ by 1e9
    unscaled: Array = (np.outer(scales, scales) * inverse).astype(np.float64)
    covariance: Array = unscaled * (scatter or 0.0) ** 2
    held, by_label, errors = None, {}, np.array([])
    if cross_validate and freedom >= FOLDS:
        refit = linearised(group, chosen, values) if robust else partial(_refitted, group)
        # neighbouring cells are similar: each fold takes every fifth
        rows = [cell for cell in chosen if not cell.over]
        folds = [rows[fold::FOLDS] for fold in range(FOLDS)]
        errors = np.empty(len(rows))
        for fold, of_fold in enumerate(left_out_errors(refit, chosen, folds)):
            errors[fold::FOLDS] = of_fold
        held = _mean_error(errors)
        by_label = {
            label: left_out(refit, chosen, [p for p in parts if len(rows) - len(p) >= 2 * count])
            for label, parts in parts_by_label(rows).items()
            if label not in group.apart
        }
    mine = [cell for cell in cells if cell.group == group.name]
    of_runs = jacobian[runs]
    leverages = np.einsum("ij,jk,ik->i", of_runs, inverse, of_runs)
    scores = list(errors / ((scatter or math.inf) * np.sqrt(1 + leverages))) if len(errors) else []
    return Fit(
        group=group.name,
        values=values,
        covariance=covariance,
        unscaled=unscaled,
        scatter=scatter,
        freedom=freedom,
        cells=int(runs.sum()),
        mape=_mean_error(residuals[runs]),
        cross_validated=held,
        by_label=by_label,
        factor=conformal_factor(scores) or student_factor(freedom or math.inf),
        coverage=covered(scores, FOLDS) if scores else None,
        left_out=tuple(map(float, errors)),
        kinds=kinds_of(mine),
        strategies=tuple(sorted({cell.setup.parsed().name for cell in mine})),
        ranges=ranges(run_figures(setup) for cell in mine for setup in cell.setups),
    )


def _scatter(residuals: Array, freedom: int, *, robust: bool) -> float:
    if not robust:
        return math.sqrt(float(residuals @ residuals) / freedom)
    within = float(np.quantile(np.abs(residuals), _WITHIN)) / _QUANTILE
    return within * math.sqrt(len(residuals) / freedom)


def residuals_of(cells: Sequence[Cell], values: Mapping[str, float]) -> Array:
    """log(predicted / published) of every cell."""
    return np.array([math.log(predict(cell, values, fast=True) / cell.published) for cell in cells])


def _named(group: ConstantGroup, scaled: Array) -> dict[str, float]:
    """Constants by name; `scaled` are fractions of their ranges."""
    return {
        constant.name: float(constant.low + (constant.high - constant.low) * share)
        for constant, share in zip(group.constants, scaled, strict=True)
    }


def _shares(group: ConstantGroup, values: Mapping[str, float]) -> Array:
    """The constants as fractions of their ranges."""
    return np.array([(values[c.name] - c.low) / (c.high - c.low) for c in group.constants])


def _solve(
    group: ConstantGroup, cells: Sequence[Cell], *, thorough: bool = True
) -> tuple[dict[str, float], Array, Array]:
    """Least squares inside the bounds, with constants scaled to [0, 1], as is the Jacobian.

    It starts at several places between the bounds, as there may be several minima, and if
    `thorough` at the values of the catalog too: where cells are left out, what the catalog has
    learned from them must not come back.
    """
    weights = _weights(group, cells)

    def residuals(scaled: Array) -> Array:
        return weights * residuals_of(cells, _named(group, scaled))

    starts = [np.full(len(group.constants), share) for share in _STARTS]
    if thorough:
        starts.append(np.clip(_shares(group, stated(group)), 0.01, 0.99))
    best = _minimum(group, residuals, starts)
    return _named(group, best.x), np.asarray(best.jac), np.asarray(best.fun) / weights


def _weights(group: ConstantGroup, cells: Sequence[Cell]) -> Array:
    return np.array([group.ratio_weight if cell.over else 1.0 for cell in cells])


def _minimum(
    group: ConstantGroup, residuals: Callable[[Array], Array], starts: Sequence[Array]
) -> Any:
    """The best solution from several starts, as SciPy gives it."""
    from scipy.optimize import least_squares  # noqa: PLC0415 - slow

    loss: dict[str, Any] = {"loss": "soft_l1", "f_scale": group.robust} if group.robust else {}
    options: dict[str, Any] = {"diff_step": np.array([_STEP]), "ftol": 1e-5, "xtol": 1e-5}
    solutions = (
        least_squares(residuals, start, bounds=(0, 1), **options, **loss) for start in starts
    )
    return min(solutions, key=lambda solution: float(solution.cost))


Refit: TypeAlias = Callable[[Sequence[Cell], Sequence[Cell]], Array]
"""Residuals of the second cells with constants that are fitted on the first."""


def _refitted(group: ConstantGroup, kept: Sequence[Cell], left: Sequence[Cell]) -> Array:
    values, _, _ = _solve(group, kept, thorough=False)
    return residuals_of(left, values)


def linearised(group: ConstantGroup, cells: Sequence[Cell], values: Mapping[str, float]) -> Refit:
    """Refits where residuals of these cells change in proportion to constants, from `values` on."""
    here = _shares(group, values)
    base = residuals_of(cells, values)
    columns = []
    for index in range(len(here)):
        step = -_STEP if here[index] > 0.5 else _STEP  # noqa: PLR2004 - to stay inside the bounds
        moved = here.copy()
        moved[index] += step
        columns.append((residuals_of(cells, _named(group, moved)) - base) / step)
    slopes, places = np.stack(columns, axis=1), {cell: i for i, cell in enumerate(cells)}

    def refit(kept: Sequence[Cell], left: Sequence[Cell]) -> Array:
        def residuals(rows: list[int], scaled: Array) -> Array:
            linear: Array = base[rows] + slopes[rows] @ (scaled - here)
            return linear

        rows, weights = [places[cell] for cell in kept], _weights(group, kept)
        start = np.full(len(here), 0.5)
        best = _minimum(group, lambda scaled: weights * residuals(rows, scaled), [start])
        return residuals([places[cell] for cell in left], best.x)

    return refit


def left_out(refit: Refit, cells: Sequence[Cell], parts: Sequence[Sequence[Cell]]) -> float:
    """Mean absolute error of cells that are left out of the fit, one part at a time."""
    return _mean_error(np.concatenate(left_out_errors(refit, cells, parts)))


def left_out_errors(
    refit: Refit, cells: Sequence[Cell], parts: Sequence[Sequence[Cell]]
) -> list[Array]:
    """log(predicted / published) of the cells of each part, left out of the fit.

    Ratios of runs that are left out are left out with them.
    """
    errors = []
    for left in parts:
        runs = {setup for cell in left for setup in cell.setups}
        kept = [cell for cell in cells if runs.isdisjoint(cell.setups)]
        errors.append(refit(kept, left))
    return errors


def _mean_error(residuals: Array) -> float:
    return float(np.mean(np.abs(np.expm1(residuals))))


def parts_by_label(cells: Sequence[Cell]) -> dict[str, list[list[Cell]]]:
    """For every label that cells differ in, the cells grouped by its values."""
    parts = {}
    for label in cells[0].labels:
        values = dict.fromkeys(cell.labels[label] for cell in cells)
        if len(values) > 1:
            parts[label] = [[c for c in cells if c.labels[label] == value] for value in values]
    return parts


def fit_all(cells: Sequence[Cell], names: Sequence[str] = tuple(GROUPS)) -> list[Fit]:
    """The fits of these groups."""
    return [fit(GROUPS[name], cells) for name in names]


_TOLERANCE = 1e-6
"""Of the root, as a fraction of the constant's range."""


@dataclass(frozen=True, slots=True)
class Root:
    """A value within the bounds of a constant, and whether it reproduces the cell.

    If none does, the value is the bound whose prediction is nearer.
    """

    value: float
    reproduces: bool


def root_of(cell: Cell, constant: Constant, values: Mapping[str, float]) -> Root:
    """Find the value by Brent's method; `values` are those of the other constants."""
    from scipy.optimize import brentq  # noqa: PLC0415 - slow, and not needed for a brief report

    def excess(value: float) -> float:
        return predict(cell, {**values, constant.name: value}, fast=True) - cell.published

    low, high = constant.low, constant.high
    at_low, at_high = excess(low), excess(high)
    if at_low * at_high > 0:
        return Root(low if abs(at_low) < abs(at_high) else high, reproduces=False)
    root = brentq(excess, low, high, xtol=_TOLERANCE * (high - low))
    return Root(float(root), reproduces=True)


# --- how far a 90 % interval has to reach --------------------------------------------------------
#
# For many cells the reach is a quantile of their errors, in units of the standard deviation that
# each is expected to have (split conformal prediction: Vovk et al. 2005; Barber et al. 2021 for
# errors of cells that are left out in turn). A further cell like them lies in the interval with a
# probability of at least 90 %, whatever the distribution. For few it is Student's t.

LEVEL = 0.9
"""Of all intervals."""

_TAIL = (1 + LEVEL) / 2


def conformal_factor(scores: Sequence[float]) -> float | None:
    """The quantile of |error| / standard deviation, for a further cell; None for fewer than 9."""
    count = math.ceil(LEVEL * (len(scores) + 1))
    return sorted(map(abs, scores))[count - 1] if count <= len(scores) else None


def student_factor(freedom: float) -> float:
    """The quantile of Student's t, the normal one for infinite degrees of freedom."""
    from scipy.stats import norm, t  # noqa: PLC0415 - slow

    return float(norm.ppf(_TAIL) if math.isinf(freedom) else t.ppf(_TAIL, freedom))


def covered(scores: Sequence[float], folds: int) -> float | None:
    """The share of cells in intervals whose reach is set by the cells of the other folds.

    None where these are too few. Every fold takes each `folds`-th cell.
    """
    inside: list[bool] = []
    for fold in range(folds):
        others = [score for index, score in enumerate(scores) if index % folds != fold]
        factor = conformal_factor(others)
        if factor is None:
            return None
        inside += [abs(score) <= factor for score in scores[fold::folds]]
    return float(np.mean(inside))
