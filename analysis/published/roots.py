"""The value of a constant that reproduces a published cell."""

from collections.abc import Mapping
from dataclasses import dataclass

from analysis.published.cells import Cell
from analysis.published.parameters import Constant
from analysis.published.predict import predict

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
    found = brentq(excess, low, high, xtol=_TOLERANCE * (high - low))
    return Root(float(found), reproduces=True)
