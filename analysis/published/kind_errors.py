"""Errors on published runs, by kind, of predictions that were not fitted to them.

A run on a calibrated cluster is predicted on the uncalibrated one that its `paper.toml` names
instead (`uncalibrated`). Where none is named the error is that of a fit that the cell is left out
of. What was never fitted is predicted as it is. Ratios and volumes are no speeds, and left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from analysis.published.catalog_writer import ranges_table
from analysis.published.cells import Cell, changed, run_figures, run_kind
from analysis.published.coverage import interval
from analysis.published.papers import Paper
from analysis.published.predict import predict
from co2sim.prediction.calibrations import CATALOG, Ranges, calibrations, ranges
from co2sim.prediction.intervals import ERRORS, RunKind

_SPEEDS = {"tokens_per_s", "tflops_per_gpu"}

_HEAD = (
    "Errors on published runs by kind, of predictions that were not fitted to them; written by",
    "`co2analysis validate --write`. 'low' and 'high' are the ends of a 90 % interval of",
    "log(published / predicted) of a further run of the kind, 'runs' counts those known by source,",
    "'ranges' are the least and the most of each figure among them: bit/s a GPU, seconds.",
    "[other]: of a run of a kind that is not here, from all kinds, each of which counts alike.",
)

KindSources: TypeAlias = Mapping[RunKind, Mapping[str, Sequence[float]]]
"""log(published speed / predicted) by kind and source."""


def errors_by_kind(cells: Sequence[Cell], sources: Mapping[str, Paper]) -> KindSources:
    """The errors of all cells that are speeds, by kind and source, sorted."""
    found: dict[RunKind, dict[str, list[float]]] = {}
    known = _left_out(cells)
    for cell in cells:
        kind = None if cell.over else run_kind(cell.setup)
        error = None if kind is None else _error(cell, sources.get(cell.source), known)
        if kind is not None and error is not None:
            found.setdefault(kind, {}).setdefault(cell.source, []).append(error)
    return {kind: found[kind] for kind in sorted(found)}


def _left_out(cells: Sequence[Cell]) -> dict[int, float]:
    """log(predicted / published) of fitted cells that are left out of their fit, by identity."""
    errors: dict[int, float] = {}
    for name, fit in calibrations().items():
        fitted = (cell for cell in cells if cell.group == name and cell.use == "fit")
        mine = [cell for cell in fitted if not cell.over]
        if len(mine) == len(fit.left_out_errors):
            errors |= {id(c): e for c, e in zip(mine, fit.left_out_errors, strict=True)}
    return errors


def _error(cell: Cell, paper: Paper | None, left_out: Mapping[int, float]) -> float | None:
    """log(published speed / predicted); None for what is no speed, or was fitted to the cell."""
    quantity = cell.terms[0].quantity
    way = 1 if quantity in _SPEEDS else -1
    if quantity not in {*_SPEEDS, "iteration_ms"}:
        return None
    other = paper.simulation.uncalibrated.get(cell.setup.cluster) if paper else None
    if other is not None:
        cell = changed(cell, lambda setup: replace(setup, cluster=other))
    elif cell.group:
        error = left_out.get(id(cell))
        return None if error is None else -way * error
    return way * math.log(cell.published / predict(cell, fast=True))


@dataclass(frozen=True, slots=True)
class KindCoverage:
    """How well the interval of a kind covers: with each run left out in turn, and each source.

    `runs` is how many there are by source; shares are None where too few runs are left.
    """

    kind: RunKind
    runs: Mapping[str, int]
    ends: tuple[float, float] | None
    by_run: float | None
    by_source: float | None


def coverage(errors: KindSources) -> list[KindCoverage]:
    """Of every kind."""
    return [
        KindCoverage(
            kind,
            {source: len(some) for source, some in sources.items()},
            interval(list(sources.values())),
            _share(
                [_inside(sources, s, n) for s, some in sources.items() for n in range(len(some))]
            ),
            _share([one for source in sources for one in _without(sources, source)]),
        )
        for kind, sources in errors.items()
    ]


def _inside(sources: Mapping[str, Sequence[float]], source: str, place: int) -> bool | None:
    """Whether one error lies in the interval of all others."""
    rest = [error for n, error in enumerate(sources[source]) if n != place]
    others = [some for name, some in sources.items() if name != source]
    ends = interval([*others, rest] if rest else others)
    return None if ends is None else ends[0] <= sources[source][place] <= ends[1]


def _without(sources: Mapping[str, Sequence[float]], source: str) -> list[bool | None]:
    """Whether each error of a source lies in the interval of the other sources."""
    ends = interval([some for name, some in sources.items() if name != source])
    return [None if ends is None else ends[0] <= error <= ends[1] for error in sources[source]]


def _share(inside: Sequence[bool | None]) -> float | None:
    known = [one for one in inside if one is not None]
    return sum(known) / len(known) if known else None


def ranges_by_kind(cells: Sequence[Cell]) -> dict[RunKind, Ranges]:
    """Where the runs of each kind lie."""
    found: dict[RunKind, list[dict[str, float]]] = {}
    for cell in cells:
        kind = None if cell.over else run_kind(cell.setup)
        if kind is not None:
            found.setdefault(kind, []).append(run_figures(cell.setup))
    return {kind: ranges(runs) for kind, runs in found.items()}


def record_file(errors: KindSources, lie: Mapping[RunKind, Ranges]) -> tuple[Path, bytes]:
    """The record of the catalog: kinds with an interval, and where their runs lie."""
    import tomlkit  # noqa: PLC0415 - only to write

    document = tomlkit.document()
    for line in _HEAD:
        document.add(tomlkit.comment(line))
    tables = tomlkit.aot()
    for kind, sources in errors.items():
        ends = interval(list(sources.values()))
        if ends is not None:
            tables.append(_table(kind, sources, ends, lie[kind]))
    document.add("kind", tables)
    pooled = interval([[e for some in kind.values() for e in some] for kind in errors.values()])
    assert pooled is not None
    counts: dict[str, list[float]] = {}
    for sources in errors.values():
        for name, some in sources.items():
            counts.setdefault(name, []).extend(some)
    document.add("other", _figures(tomlkit.table(), counts, pooled))
    return Path(str(CATALOG / ERRORS)), tomlkit.dumps(document).encode()


def _table(
    kind: RunKind,
    sources: Mapping[str, Sequence[float]],
    ends: tuple[float, float],
    lie: Ranges,
) -> Any:
    import tomlkit  # noqa: PLC0415 - only to write

    table = tomlkit.table()
    table["gpu"], table["exchange"], table["extent"] = kind.gpu, kind.exchange, kind.extent
    table["ranges"] = ranges_table(lie)
    return _figures(table, sources, ends)


def _figures(table: Any, sources: Mapping[str, Sequence[float]], ends: tuple[float, float]) -> Any:
    """A table with the ends, and how many runs there are by source."""
    import tomlkit  # noqa: PLC0415 - only to write

    for name, end in zip(("low", "high"), ends, strict=True):
        table[name] = tomlkit.value(f"{end:.4f}")
    runs = tomlkit.inline_table()
    runs.update({source: len(some) for source, some in sources.items()})
    table["runs"] = runs
    return table
