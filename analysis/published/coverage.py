"""How far a 90 % interval has to reach, from errors of cells that no constant was fitted to.

For many cells the reach is a quantile of their errors, in units of the standard deviation that each
is expected to have (split conformal prediction: Vovk et al. 2005; Barber et al. 2021 for errors of
cells that are left out in turn). A further cell like them lies in the interval with a probability
of at least 90 %, whatever the distribution, heavy tails included. For few it is Student's t.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEVEL = 0.9
"""Of all intervals."""

_TAIL = (1 + LEVEL) / 2

Array = npt.NDArray[np.float64]


def conformal_factor(scores: Sequence[float]) -> float | None:
    """The quantile of |error| / standard deviation, for a further cell; None for fewer than 9."""
    place = math.ceil(LEVEL * (len(scores) + 1))
    return sorted(map(abs, scores))[place - 1] if place <= len(scores) else None


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
        others = [score for place, score in enumerate(scores) if place % folds != fold]
        factor = conformal_factor(others)
        if factor is None:
            return None
        inside += [abs(score) <= factor for score in scores[fold::folds]]
    return float(np.mean(inside))
