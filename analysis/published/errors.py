"""Published cells with their prediction, its signed error and its interval."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from analysis.published.catalog_writer import ranges_table
from analysis.published.cells import Cell, RunSetup, changed, run_figures, run_kind, with_values
from analysis.published.coverage import interval
from analysis.published.papers import Paper
from analysis.published.predict import memory_of, phases, predict
from co2sim.common.progress import Done
from co2sim.prediction.calibrations import CATALOG, Calibration, Ranges, calibrations, ranges
from co2sim.prediction.intervals import (
    ERRORS,
    RunKind,
    beyond_fit,
    interval_halfwidths,
    nearest_errors,
)


@dataclass(frozen=True, slots=True)
class CellPrediction:
    """A cell, its prediction, and the interval of the prediction; errors are of the prediction.

    Without fitted constants there is no interval: its ends are NaN.
    """

    cell: Cell
    predicted: float
    low: float = field(default=math.nan)
    high: float = field(default=math.nan)

    @property
    def error(self) -> float:
        """Signed and relative: positive where the prediction is too high."""
        return self.predicted / self.cell.published - 1

    @property
    def has_interval(self) -> bool:
        """Whether the prediction depends on fitted constants, and so has an interval."""
        return not math.isnan(self.low)

    @property
    def inside(self) -> bool:
        """Whether the published value lies in the interval."""
        return self.low <= self.cell.published <= self.high

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `phases_s` are seconds of a step without overlap, by kernel or collective.

        Of a cell of several runs, memory is that of the run that needs most of its GPU.
        """
        memory = max(map(memory_of, self.cell.setups), key=lambda one: one.share)
        return {
            "source": self.cell.source,
            "cell": self.cell.name,
            "strategy": self.cell.strategy,
            "use": self.cell.use,
            "labels": dict(self.cell.labels),
            "fits_in_memory": memory.share <= 1,
            "memory_bytes_per_gpu": memory.needed,
            "published": self.cell.published,
            "predicted": self.predicted,
            "error": self.error,
            "low": self.low if self.has_interval else None,
            "high": self.high if self.has_interval else None,
            "phases_s": phases(self.cell),
        }


def validate(cells: Sequence[Cell], done: Done | None = None) -> list[CellPrediction]:
    """Predict every cell with the constants of the catalog."""
    known = calibrations()
    found = []
    for place, cell in enumerate(cells, 1):
        found.append(_predicted(cell, known.get(cell.group)))
        if done:
            done(place, len(cells))
    return found


def _predicted(cell: Cell, calibration: Calibration | None) -> CellPrediction:
    predicted = predict(cell)
    if calibration is None:
        return CellPrediction(cell, predicted)
    several = math.sqrt(2) if cell.over else 1.0
    if (other := _unknown_to(calibration, cell)) is not None:
        known, _ = nearest_errors(run_kind(other), run_figures(other))
        down, up = -known.low * several, known.high * several
        return CellPrediction(
            cell, predicted, predicted * math.exp(-down), predicted * math.exp(up)
        )

    def moved(values: Mapping[str, float]) -> float:
        return predict(with_values(cell, values), fast=True)

    scatter = calibration.scatter * several
    rounded = cell.rounding / predicted / math.sqrt(12)
    reach = calibration.factor * math.hypot(scatter, rounded)
    gpu = cell.setup.whole_cluster().gpu.name
    down, up = interval_halfwidths(calibration.moves(gpu, moved), reach)
    return CellPrediction(cell, predicted, predicted * math.exp(-down), predicted * math.exp(up))


def _unknown_to(calibration: Calibration, cell: Cell) -> RunSetup | None:
    """The first of a cell's runs of which the fit does not tell, as `co2sim run` would say."""
    for run in cell.setups:
        layout = run.used_cluster().layout
        if beyond_fit(calibration, run.strategy, layout, run_figures(run)):
            return run
    return None


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Errors over several cells; `inside` is None where none has an interval."""

    cells: int
    mape: float
    bias: float
    worst: CellPrediction
    inside: float | None

    @classmethod
    def of(cls, rows: Sequence[CellPrediction]) -> "ErrorSummary":
        """Of at least one row."""
        errors = [row.error for row in rows]
        inside = [row.inside for row in rows if row.has_interval]
        return cls(
            len(rows),
            fmean(abs(error) for error in errors),
            fmean(errors),
            max(rows, key=lambda row: abs(row.error)),
            fmean(inside) if inside else None,
        )


def summaries(rows: Iterable[CellPrediction]) -> dict[tuple[str, str, str], ErrorSummary]:
    """By source, use and strategy; "all" stands for every strategy of a source and use."""
    return _grouped(
        ((row.cell.source, row.cell.use, strategy), row)
        for row in rows
        for strategy in ("all", row.cell.strategy)
    )


def summaries_by_hardware(
    rows: Iterable[CellPrediction],
) -> dict[tuple[str, str, str, str], ErrorSummary]:
    """By source, use, GPU and "one node", "several nodes" or "ratios", of cells with these labels.

    "all" stands for every GPU, and for any number of nodes; ratios are of several.
    """
    found = []
    for row in rows:
        cell = row.cell
        if not {"gpu", "nodes"} <= cell.labels.keys():
            continue
        sizes = ("ratios",) if cell.over else ("all", cell.labels["nodes"])
        found += [
            ((cell.source, cell.use, gpu, size), row)
            for gpu in ("all", cell.labels["gpu"])
            for size in sizes
        ]
    return _grouped(found)


def _grouped(
    rows: Iterable[tuple[tuple[str, ...], CellPrediction]],
) -> dict[Any, ErrorSummary]:
    found: dict[tuple[str, ...], list[CellPrediction]] = {}
    for key, row in rows:
        found.setdefault(key, []).append(row)
    return {key: ErrorSummary.of(some) for key, some in sorted(found.items())}


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
