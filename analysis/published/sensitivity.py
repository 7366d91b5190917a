"""How CO2's predictions depend on what was assumed: tokens per GPU and step, and collectives.

Under each assumption the two constants are set anew on the two fit cells, AdamW on 8 and on 16
GPUs, and the other cells are predicted. Where no value of a constant within its bounds meets its
fit cell, it stays at the bound, and `missed` says by how much the prediction is off.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from analysis.published.parameters import GROUPS, Constant
from analysis.published.predict import Cell, changed, predict, with_override

GROUP = "a100-co2"

_HALVINGS = 18
_MET = 1e-3
"""Relative error below which a fit cell counts as met."""


@dataclass(frozen=True, slots=True)
class Refitted:
    """The constants under an assumption, the errors of the check cells with them, and `missed`.

    That is the error of the fit cell that is met worst, 0 where both are met.
    """

    values: dict[str, float]
    errors: dict[str, float]
    missed: float


def with_tokens(cell: Cell, tokens: int) -> Cell:
    """The cell with another number of tokens per GPU and step."""
    shape = (("seq_len", str(tokens)),)
    return changed(cell, lambda setup: replace(setup, model_overrides=shape))


def solve(low: float, high: float, rising: Callable[[float], float]) -> float:
    """Where a rising function is zero, to five digits, or the nearer end of the range."""
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return math.sqrt(low * high)


def _meeting(cell: Cell, constant: Constant, values: dict[str, float]) -> dict[str, float]:
    """The values with one constant set so that the prediction of a cell is the published one."""

    def excess(value: float) -> float:
        return predict(cell, {**values, constant.name: value}) - cell.published

    return {**values, constant.name: solve(constant.low, constant.high, excess)}


def refitted(cells: Sequence[Cell]) -> Refitted:
    """Constants set on CO2's two fit cells, and what they give for its check cells."""
    compute, network = GROUPS[GROUP].constants
    here = [cell for cell in cells if cell.group == GROUP]
    small, large = sorted(
        (cell for cell in here if cell.use == "fit"), key=lambda cell: cell.terms[0].setup.gpus
    )
    values = _meeting(small, compute, {network.name: 1.0})
    values = _meeting(large, network, values)

    def error(cell: Cell) -> float:
        return predict(cell, values) / cell.published - 1

    worst = max((error(small), error(large)), key=abs)
    errors = {cell.name: error(cell) for cell in here if cell.use == "check"}
    return Refitted(values, errors, worst if abs(worst) > _MET else 0.0)


def study(cells: Sequence[Cell], counts: Sequence[int]) -> dict[int, Refitted]:
    """Predictions for every assumed number of tokens."""
    return {
        tokens: refitted([with_tokens(cell, tokens) for cell in cells if cell.group == GROUP])
        for tokens in counts
    }


def _with(cell: Cell, old: str, new: str) -> Cell:
    """The cell with another option of its strategy."""
    return changed(cell, lambda setup: replace(setup, strategy=setup.strategy.replace(old, new)))


OTHERWISE: dict[str, Callable[[Cell], Cell]] = {
    "as calibrated": lambda cell: cell,
    "1 channel": lambda cell: with_override(cell, "channels", "1"),
    "4 channels": lambda cell: with_override(cell, "channels", "4"),
    "8 channels": lambda cell: with_override(cell, "channels", "8"),
    "every rank averages its share": lambda cell: _with(cell, ",average=leader", ""),
    **{
        f"{one.name} {value:.2f}": partial(with_override, path=one.path, text=f"{value:.6g}")
        for one in GROUPS[GROUP].borrowed
        for value in (one.low, one.high, 1.0)
    },
    "averages in fp32": lambda cell: _with(cell, "dtype=bf16", "dtype=fp32"),
    "zero2 scatters and gathers": lambda cell: _with(
        cell, "zero2:owners=true,bucket=8388608", "zero2"
    ),
}
"""How tensors may travel instead, what is borrowed within its range, and DeepSpeed's ZeRO-2."""


def otherwise(cells: Sequence[Cell]) -> dict[str, Refitted]:
    """Predictions if tensors travel otherwise."""
    here = [cell for cell in cells if cell.group == GROUP]
    return {name: refitted([change(cell) for cell in here]) for name, change in OTHERWISE.items()}
