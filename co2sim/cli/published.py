"""Published throughputs, to show beside predictions."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from co2sim.errors import CatalogError, Co2simError
from co2sim.result import Result
from co2sim.strategies import parse
from co2sim.strategies.step import title
from co2sim.study import Case


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published cell and its prediction. `error` is signed: predicted / published - 1."""

    cluster: str
    strategy: str
    gpus: str
    quantity: str
    published: float
    predicted: float
    use: str
    note: str

    @property
    def error(self) -> float:
        """Relative, positive where the prediction is too high."""
        return self.predicted / self.published - 1


def load_cells(path: Path) -> list[dict[str, Any]]:
    """The `[[cell]]` tables of a results file. Raises CatalogError when it is none."""
    try:
        cells = tomllib.loads(path.read_text())["cell"]
        for number, cell in enumerate(cells):
            float(cell["value"])
            missing = [key for key in ("quantity", "where", "use") if key not in cell]
            if missing:
                raise CatalogError(f"{path}: cell {number} has no {missing[0]}")
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise CatalogError(f"{path} holds no published cells: {error}") from error
    return list(cells)


def compare(
    cells: Sequence[Mapping[str, Any]], cases: Sequence[Case], results: Sequence[Result]
) -> list[Comparison]:
    """The cells that the cases predict: throughputs, and ratios between two GPU counts."""
    predicted: dict[object, Result] = {
        (case.cluster, case.model, result.strategy, result.gpus): result
        for case, result in zip(cases, results, strict=True)
    }
    found = []
    for cell in cells:
        key = (cell.get("cluster"), cell.get("model"), _title(cell.get("strategy", "")))
        if cell["quantity"] == "tokens_per_s":
            result = predicted.get((*key, cell.get("gpus")))
            value, gpus = result and result.tokens_per_s, str(cell.get("gpus"))
        elif cell["quantity"] == "scalability_ratio":
            first, last = (predicted.get((*key, cell.get(end))) for end in ("from_gpus", "to_gpus"))
            value = first and last and last.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu
            gpus = f"{cell.get('from_gpus')} -> {cell.get('to_gpus')}"
        else:
            continue
        if value:
            found.append(
                Comparison(
                    str(key[0]),
                    str(key[2]),
                    gpus,
                    str(cell["quantity"]),
                    float(cell["value"]),
                    value,
                    str(cell["use"]),
                    str(cell.get("note", "")),
                )
            )
    return found


def _title(text: str) -> str | None:
    """The strategy as results name it; None for one that is not ours."""
    try:
        return title(parse(text))
    except Co2simError:
        return None
