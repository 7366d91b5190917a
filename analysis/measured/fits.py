"""Two small fits: fixed and growing time per op, and the slowdown of computes by communication."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from co2sim.units import Seconds

_MOST_INFLATION = 6.0
"""Variance inflation above which sizes are too similar to separate fixed from growing time."""
_LEAST_SPREAD = 0.05
"""Standard deviation of the overlap of equal works below which it explains nothing."""
_RATES = np.linspace(0.0, 0.9, 181)


class WorkTime(NamedTuple):
    """A work: its family, predicted fixed and growing time alone, and its measured time alone."""

    family: str
    fixed: Seconds
    growing: Seconds
    measured: Seconds


def fixed_and_slope(points: Sequence[WorkTime]) -> float | None:
    """The factor a of the best fit measured = a x fixed + b x growing, with one b per family.

    Least squares of relative errors, a >= 0. No fixed time may exceed what was measured. None where
    the points are too few, or their sizes too similar.
    """
    used = [p for p in points if p.measured > 0]
    if not any(p.fixed for p in used):
        return None
    fixed = np.array([p.fixed / p.measured for p in used])
    growing = np.array([p.growing / p.measured for p in used])
    rest_fixed, rest_measured = fixed.copy(), np.ones(len(used))
    for family in {p.family for p in used}:
        mine = np.array([p.family == family for p in used])
        slope = growing[mine]
        square = float(slope @ slope)
        if square:
            rest_fixed[mine] -= slope * (slope @ fixed[mine]) / square
            rest_measured[mine] -= slope * (slope @ rest_measured[mine]) / square
    left = float(rest_fixed @ rest_fixed)
    if left * _MOST_INFLATION < float(fixed @ fixed):
        return None
    most = 1 / float(fixed.max())
    return float(min(max(0.0, float(rest_fixed @ rest_measured) / left), most))


def interference(samples: Sequence[tuple[Hashable, Seconds, float]]) -> float:
    """The fraction of their speed, 0 to 0.9, that computes lose while communication is under way.

    Samples are (work, seconds, fraction of them with communication); samples of one work should
    take equally long alone. The fraction is the one of `_RATES` that makes them most nearly so: 0
    where no work ran both with and without communication.
    """
    if not samples:
        return 0.0
    numbers: dict[Hashable, int] = {}
    group = np.array([numbers.setdefault(work, len(numbers)) for work, _, _ in samples])
    times = np.array([time for _, time, _ in samples])
    overlap = np.array([fraction for _, _, fraction in samples])
    count = np.bincount(group, weights=times)

    def variance(values: NDArray[np.float64]) -> float:
        centred = values - (np.bincount(group, weights=values * times) / count)[group]
        return float((centred**2) @ times) / float(times.sum())

    if variance(overlap) < _LEAST_SPREAD**2:
        return 0.0
    spread = [variance(np.log(times) + np.log(1 - rate * overlap)) for rate in _RATES]
    return float(_RATES[int(np.argmin(spread))])
