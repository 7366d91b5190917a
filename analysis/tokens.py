"""How CO2's predictions depend on the tokens per GPU and step, which are not published.

For each assumed number the two constants are set so that the two fit cells, on 8 and on 16 GPUs,
are met exactly; the other cells are then predicted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from analysis.constants import GROUPS, Constant
from analysis.published import Cell, Term, predict

_HALVINGS = 24


@dataclass(frozen=True, slots=True)
class Assumed:
    """Predictions of the check cells at one assumed number of tokens per GPU and step."""

    tokens: int
    values: dict[str, float]
    errors: dict[str, float]


def with_tokens(cell: Cell, tokens: int) -> Cell:
    """The cell with another number of tokens per GPU and step."""

    def of(term: Term) -> Term:
        changed = (("seq_len", str(tokens)),)
        return replace(term, setup=replace(term.setup, model_overrides=changed))

    return replace(
        cell,
        terms=tuple(of(term) for term in cell.terms),
        over=tuple(of(term) for term in cell.over),
    )


def solve(low: float, high: float, rising: Callable[[float], float]) -> float:
    """Where a rising function is zero, to seven digits, or the nearer end of the range."""
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return math.sqrt(low * high)


def _meeting(cell: Cell, constant: Constant, values: dict[str, float]) -> dict[str, float]:
    """The values with one constant set so that the prediction of a cell is the published one."""

    def excess(value: float) -> float:
        return predict(cell, {**values, constant.name: value}) - cell.published

    return {**values, constant.name: solve(constant.low, constant.high, excess)}


def study(cells: Sequence[Cell], counts: Sequence[int]) -> list[Assumed]:
    """Predictions for every assumed number of tokens."""
    group = GROUPS["a100-co2"]
    compute, network = group.constants
    found = []
    for tokens in counts:
        here = [with_tokens(cell, tokens) for cell in cells if cell.group == group.name]
        small, large = sorted(
            (cell for cell in here if cell.use == "fit"), key=lambda cell: cell.terms[0].setup.gpus
        )
        values = _meeting(small, compute, {network.name: 1.0})
        values = _meeting(large, network, values)
        errors = {
            cell.name: predict(cell, values) / cell.published - 1
            for cell in here
            if cell.use == "check"
        }
        found.append(Assumed(tokens, dict(values), errors))
    return found
