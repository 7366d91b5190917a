"""How CO2's predictions depend on what was assumed: tokens per GPU and step, and communication.

Under each assumption the two constants are set again on the two fit cells, AdamW on 8 and on 16
GPUs, and the other cells are predicted. Where no value of a constant within its bounds reproduces
its fit cell, the constant stays at the nearer bound, and `missed` is the error that is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from analysis.published.calibrate import root_of
from analysis.published.cells import Cell, with_override, with_strategy_options
from analysis.published.parameters import GROUPS
from analysis.published.predict import predict

GROUP = "a100-co2"

_FIT_CELLS = 2
_MET = 1e-3
"""Relative error below which a fit cell counts as met."""


@dataclass(frozen=True, slots=True)
class Refit:
    """The constants under an assumption, and the errors of the check cells with them.

    `missed` is the error of the fit cell that is met worst, 0 where both are met.
    """

    values: dict[str, float]
    errors: dict[str, float]
    missed: float


def can_refit(cells: Sequence[Cell]) -> bool:
    """Whether the cells hold the two fit cells of CO2."""
    return len(_fit_cells(cells)) == _FIT_CELLS


def _fit_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Those of CO2, by their GPUs."""
    chosen = (cell for cell in cells if cell.group == GROUP and cell.use == "fit")
    return sorted(chosen, key=lambda cell: cell.setup.gpus)


def refit(cells: Sequence[Cell]) -> Refit:
    """Constants set on CO2's two fit cells, and what they give for its check cells."""
    compute, network = GROUPS[GROUP].constants
    small, large = _fit_cells(cells)
    values = {network.name: 1.0}  # a single node has no network
    values[compute.name] = root_of(small, compute, values).value
    values[network.name] = root_of(large, network, values).value

    def error(cell: Cell) -> float:
        return predict(cell, values) / cell.published - 1

    worst = max((error(small), error(large)), key=abs)
    checks = [cell for cell in cells if cell.group == GROUP and cell.use == "check"]
    errors = {cell.name: error(cell) for cell in checks}
    return Refit(values, errors, worst if abs(worst) > _MET else 0.0)


def with_tokens(cell: Cell, tokens: int) -> Cell:
    """The cell with another number of tokens per GPU and step."""
    return with_override(cell, "model.seq_len", str(tokens))


def refits_by_tokens(cells: Sequence[Cell], counts: Sequence[int]) -> dict[int, Refit]:
    """Predictions for every assumed number of tokens per GPU and step."""
    here = [cell for cell in cells if cell.group == GROUP]
    return {tokens: refit([with_tokens(cell, tokens) for cell in here]) for tokens in counts}


COMMUNICATION: dict[str, Callable[[Cell], Cell]] = {
    "as calibrated": lambda cell: cell,
    "1 channel": partial(with_override, path="channels", text="1"),
    "4 channels": partial(with_override, path="channels", text="4"),
    "8 channels": partial(with_override, path="channels", text="8"),
    "every rank averages its share": partial(
        with_strategy_options, strategy="co2.published", options={"average": "shares"}
    ),
    **{
        f"{each.name} {value:.2f}": partial(with_override, path=each.path, text=f"{value:.6g}")
        for each in GROUPS[GROUP].external
        for value in (each.low, each.high, 1.0)
    },
    "averages in fp32": partial(
        with_strategy_options, strategy="co2.published", options={"dtype": "fp32"}
    ),
    "zero2 scatters and gathers": partial(
        with_strategy_options, strategy="zero2", options={"owners": "false", "bucket": "500000000"}
    ),
}
"""Assumptions about communication: channels, who averages and in which type, external constants
within their ranges, and DeepSpeed's collectives for ZeRO-2."""


def refits_by_communication(cells: Sequence[Cell]) -> dict[str, Refit]:
    """Predictions under each assumption about communication."""
    here = [cell for cell in cells if cell.group == GROUP]
    return {name: refit([change(cell) for cell in here]) for name, change in COMMUNICATION.items()}
