"""Published throughputs and scalability ratios, and their prediction."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from co2sim.common import files
from co2sim.common.errors import CatalogError, Co2simError
from co2sim.common.files import text_of
from co2sim.prediction.case import Case
from co2sim.prediction.published import (
    ScalabilityCell,
    SpeedCell,
    ThroughputCell,
    read_cells,
    with_options,
)
from co2sim.prediction.result import Result
from co2sim.simulation.metrics import scalability_ratio
from co2sim.strategies import parse
from co2sim.strategies.step import title


@dataclass(frozen=True, slots=True)
class SpeedComparison:
    """A published throughput or scalability ratio, and its prediction.

    `strategy` is the cell's, as results name it.
    """

    cell: SpeedCell
    strategy: str
    predicted: float

    @property
    def error(self) -> float:
        """Signed and relative: positive where the prediction is too high."""
        return self.predicted / self.cell.value - 1

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the cell, its prediction and the error."""
        cell = self.cell
        return {
            "cluster": cell.cluster,
            "model": cell.model,
            "strategy": self.strategy,
            "quantity": cell.quantity,
            "sizes": cell.sizes,
            "value": cell.value,
            "use": cell.use,
            "note": cell.note,
            "predicted": self.predicted,
            "error": self.error,
        }


def read_speeds(path: Path) -> list[SpeedCell]:
    """The throughputs and scalability ratios of a results file, of strategies that are ours.

    Where a `paper.toml` beside the file says on which `clusters` its runs are simulated, or with
    which options of strategies, such cells are there twice: as published, and as simulated.
    """
    speeds = [one for one in read_cells(path) if isinstance(one, ThroughputCell | ScalabilityCell)]
    plan = _simulation(path.with_name("paper.toml"))
    found = []
    for cell in speeds:
        run = with_options(cell.strategy, plan.get("options", {}))
        if _title(cell.strategy):
            found.append(cell)
        cluster = plan.get("clusters", {}).get(cell.cluster, cell.cluster)
        simulated = cell.model_copy(update={"cluster": cluster, "strategy": run})
        if simulated != cell and _title(run):
            found.append(simulated)
    return found


def _simulation(path: Path) -> dict[str, Any]:
    """The `[simulation]` table of a paper; empty where there is none."""
    if not path.exists():
        return {}
    try:
        plan = files.toml(text_of(path)).get("simulation", {})
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CatalogError(f"{path} names no paper: {error}") from error
    tables = (plan, *(plan.get(name, {}) for name in _TEXTS)) if isinstance(plan, dict) else (plan,)
    if not all(isinstance(table, dict) for table in tables) or not all(
        isinstance(text, str) for table in tables[1:] for text in table.values()
    ):
        raise CatalogError(
            f"{path}: [simulation] must be a table, and {' and '.join(_TEXTS)} in it must be tables"
            " of texts"
        )
    found: dict[str, Any] = plan
    return found


_TEXTS = "options", "clusters"


def cases_of(cells: Sequence[SpeedCell], cases: Sequence[Case]) -> list[Case]:
    """Further cases to simulate, so that every cell of the clusters of `cases` has a prediction."""
    like = {(case.cluster, case.model): case for case in cases}
    found = {}
    for cell, strategy in _named(cells):
        case = like.get((cell.cluster, cell.model))
        for size in cell.sizes if case else ():
            assert case is not None
            found[cell.cluster, cell.model, strategy, size] = replace(
                case, strategy=strategy, gpus=size
            )
    return list(found.values())


def compare(
    cells: Sequence[SpeedCell], cases: Sequence[Case], results: Sequence[Result]
) -> list[SpeedComparison]:
    """The cells that the cases predict."""
    predicted: dict[object, Result] = {
        (case.cluster, case.model, result.strategy, result.gpus): result
        for case, result in zip(cases, results, strict=True)
    }
    found = []
    for cell, strategy in _named(cells):
        at = [predicted.get((cell.cluster, cell.model, strategy, size)) for size in cell.sizes]
        known = [result for result in at if result]
        if len(known) < len(at):
            continue
        first, last = known[0], known[-1]
        value = last.tokens_per_s
        if isinstance(cell, ScalabilityCell):
            value = scalability_ratio(last.tokens_per_s_per_gpu, first.tokens_per_s_per_gpu)
        found.append(SpeedComparison(cell, strategy, value))
    return found


def _named(cells: Sequence[SpeedCell]) -> Iterator[tuple[SpeedCell, str]]:
    """The cells whose strategy is ours, with its name in results."""
    for cell in cells:
        strategy = _title(cell.strategy)
        if strategy:
            yield cell, strategy


def _title(text: str) -> str | None:
    """The strategy as results name it; None for one that is not ours."""
    try:
        return title(parse(text))
    except Co2simError:
        return None
