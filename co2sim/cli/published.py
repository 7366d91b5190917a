"""Published throughputs, to show beside predictions."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from co2sim.case import Case
from co2sim.errors import CatalogError, Co2simError
from co2sim.result import Result
from co2sim.strategies import parse
from co2sim.strategies.step import title

THROUGHPUT, RATIO = "tokens_per_s", "scalability_ratio"


@dataclass(frozen=True, slots=True)
class Cell:
    """One published number. `sizes` is the GPU count of a throughput, or both of a ratio."""

    cluster: str
    model: str
    strategy: str
    quantity: str
    sizes: tuple[int, ...]
    value: float
    use: str
    note: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A cell and its prediction."""

    cell: Cell
    predicted: float

    @property
    def error(self) -> float:
        """Signed and relative: positive where the prediction is too high."""
        return self.predicted / self.cell.value - 1


def load_cells(path: Path) -> list[Cell]:
    """The throughputs and scalability ratios among the `[[cell]]` tables of a results file.

    Where a `paper.toml` beside the file says on which cluster its runs are simulated, and with
    which options of strategies, every cell is there twice: as published, and as simulated.
    Cells of other quantities, and of strategies that are not ours, are left out. Raises
    CatalogError when the file is no results file.
    """
    found = []
    try:
        simulated = _simulation(path.with_name("paper.toml"))
        for number, cell in enumerate(tomllib.loads(path.read_text())["cell"]):
            missing = [key for key in ("quantity", "value", "where", "use") if key not in cell]
            if missing:
                raise CatalogError(f"{path}: cell {number} has no {missing[0]}")
            keys = {THROUGHPUT: ("gpus",), RATIO: ("from_gpus", "to_gpus")}.get(cell["quantity"])
            strategy = _title(str(cell.get("strategy", "")))
            if not 0 < float(cell["value"]) < math.inf:
                raise CatalogError(f"{path}: cell {number} has the value {cell['value']}")
            if keys and strategy:
                found.append(
                    Cell(
                        cluster=str(cell["cluster"]),
                        model=str(cell["model"]),
                        strategy=strategy,
                        quantity=cell["quantity"],
                        sizes=tuple(int(cell[key]) for key in keys),
                        value=float(cell["value"]),
                        use=str(cell["use"]),
                        note=str(cell.get("note", "")),
                    )
                )
                options = simulated.get("options", {})
                run = _title(_with_options(str(cell.get("strategy", "")), options))
                if keys and run and simulated:
                    found.append(replace(found[-1], cluster=simulated["cluster"], strategy=run))
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise CatalogError(f"{path} holds no published cells: {error}") from error
    return found


def _simulation(path: Path) -> Mapping[str, Any]:
    """The `[simulation]` table of a paper; empty where there is none."""
    found: Mapping[str, Any] = {}
    if path.is_file():
        found = tomllib.loads(path.read_text()).get("simulation", found)
    return found


def _with_options(strategy: str, options: Mapping[str, str]) -> str:
    """A strategy, as published, with the options that its framework gives it."""
    extra = options.get(strategy.partition(":")[0].partition("(")[0])
    if not extra:
        return strategy
    return f"{strategy},{extra}" if ":" in strategy else f"{strategy}:{extra}"


def cases_of(cells: Sequence[Cell], cases: Sequence[Case]) -> list[Case]:
    """What to simulate besides `cases`, so that every cell of their clusters has a prediction."""
    alike = {(case.cluster, case.model): case for case in cases}
    found = {}
    for cell in cells:
        like = alike.get((cell.cluster, cell.model))
        for size in cell.sizes if like else ():
            assert like is not None
            found[cell.cluster, cell.model, cell.strategy, size] = replace(
                like, strategy=cell.strategy, gpus=size
            )
    return list(found.values())


def compare(
    cells: Sequence[Cell], cases: Sequence[Case], results: Sequence[Result]
) -> list[Comparison]:
    """The cells that the cases predict."""
    predicted: dict[object, Result] = {
        (case.cluster, case.model, result.strategy, result.gpus): result
        for case, result in zip(cases, results, strict=True)
    }
    found = []
    for cell in cells:
        at = [predicted.get((cell.cluster, cell.model, cell.strategy, n)) for n in cell.sizes]
        known = [result for result in at if result]
        if len(known) < len(at):
            continue
        value = known[-1].tokens_per_s
        if cell.quantity == RATIO:
            value = known[-1].tokens_per_s_per_gpu / known[0].tokens_per_s_per_gpu
        found.append(Comparison(cell, value))
    return found


def _title(text: str) -> str | None:
    """The strategy as results name it; None for one that is not ours."""
    try:
        return title(parse(text))
    except Co2simError:
        return None
