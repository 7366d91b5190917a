"""Published cells from CSV tables in one of several formats, checked row by row."""

import csv
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, TypeVar

from pydantic import ValidationError

from analysis.published.cells import Cell, RunSetup, check_runs, from_papers
from analysis.published.csv_rows import CO2Row, IterationRow, TableRow, ZeroppRow
from analysis.published.fsdp_rows import FsdpRow, ratios
from analysis.published.papers import PAPERS, TABLES_ELSEWHERE, Paper, papers, tables_elsewhere
from co2sim.common.errors import CatalogError, Co2simError, given, visible
from co2sim.common.files import is_below, text_of
from co2sim.common.validation import first_problem
from co2sim.prediction.published import Use

Row: TypeAlias = Mapping[str, str]
T = TypeVar("T", bound=TableRow)

TABLES: tuple[type[TableRow], ...] = (ZeroppRow, CO2Row, IterationRow, FsdpRow)
"""The tables that can be read."""


def known_cells(folder: Path = PAPERS, data: Path | None = None) -> list[Cell]:
    """All cells of `papers/`, and of the tables that are only referred to, where at hand.

    Of those tables the cells of configurations that constants were fitted on are marked fit.

    Raises CatalogError where `data` is given, but the folder of papers says nothing of its table.
    """
    found, sources = from_papers(folder), papers(folder)
    for path in tables_elsewhere(data):
        if data is None and not any(TABLES_ELSEWHERE.get(key) == path.name for key in sources):
            continue
        read = from_csv(path, "check", folder, tuple(TABLES_ELSEWHERE))
        fitted = _fitted(sources[read[0].source], folder)
        read = [replace(c, use="fit") if c.setup in fitted else c for c in read]
        found += [*read, *ratios(read)]
    return found


def _fitted(paper: Paper, folder: Path) -> set[RunSetup]:
    """The configurations that constants were fitted on, which the `[data]` of a paper may name."""
    data = paper.about.get("data", {})
    name = data.get("fitted") if isinstance(data, dict) else data
    if name is None:
        return set()
    if not isinstance(name, str) or not is_below(folder / paper.key / name, folder / paper.key):
        raise CatalogError(
            f"{folder / paper.key / 'paper.toml'}: [data] fitted is {given(name)}; it must be a"
            " file in this folder"
        )
    path = folder / paper.key / name
    numbered, columns = _rows(path)
    table = next(table for table in TABLES if table.source == paper.key)
    found = set()
    for number, row in numbered:
        try:
            numbers = dict.fromkeys(set(table.model_fields) - set(columns), "1")
            found |= {c.setup for c in _parsed(table, {**row, **numbers}).cells(paper, "fit")}
        except Co2simError as error:
            raise CatalogError(f"{path}, line {number}: {error}") from error
    return found


def further_cells(
    paths: Sequence[Path], known: Sequence[Cell], folder: Path, say: Callable[[str], None]
) -> list[Cell]:
    """The cells of further tables; those of configurations that were fitted on are marked fit.

    Ratios that rows of one table state are added, also with rows that are known already. Raises
    CatalogError as `from_csv` does, and for a number that stands in two tables.
    """
    places: dict[Cell, Path] = {}
    for path in paths:
        for cell in from_csv(path, "check", folder, say=say):
            if cell in places:
                raise CatalogError(
                    f"{path}: {cell.name} stands in {places[cell]}, too; each number counts once"
                )
            places[cell] = path
    read = marked(places, known)
    runs = {cell.setup for cell in read}
    before = [cell for cell in known if not cell.over and cell.setup not in runs]
    return [*read, *(c for c in ratios([*read, *before]) if runs & {c.setup, c.over[0].setup})]


def from_csv(
    path: Path,
    use: Use,
    folder: Path = PAPERS,
    sources: Collection[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Cell]:
    """The cells of a table in one of the formats of the published data, or in those of `sources`.

    `say` gets rows without a published number, which are left out.

    Raises CatalogError for another table, for a row that cannot be read, and for one that stands
    there twice, with file and line.
    """
    known = papers(folder)
    numbered, columns = _rows(path)
    table = _table(path, columns, sources)
    if table.source not in known:
        raise CatalogError(f"{path} is a table of {table.source}, which {folder} does not hold")
    found: dict[Cell, int] = {}
    for number, row in numbered:
        try:
            cells = list(_parsed(table, row).cells(known[table.source], use))
            for cell in cells:
                check_runs(cell)
        except Co2simError as error:
            raise CatalogError(f"{path}, line {number}: {error}") from error
        if not cells:
            say(f"{path}, line {number}: no published number, left out")
        before = next((found[cell] for cell in cells if cell in found), None)
        if before is not None:
            raise CatalogError(
                f"{path}, line {number}: it says the same as line {before}; each number counts once"
            )
        found |= dict.fromkeys(cells, number)
    if not found:
        raise CatalogError(f"{path} holds no published number" if numbered else f"{path}: no rows")
    return [*found]


def marked(cells: Iterable[Cell], known: Iterable[Cell]) -> list[Cell]:
    """The cells, with those marked fit whose configuration the constants were fitted on."""

    def configuration(cell: Cell) -> tuple[object, ...]:
        return cell.terms, cell.over, cell.pick, cell.per_gpu

    fitted = {configuration(cell) for cell in known if cell.use == "fit"}
    return [replace(cell, use="fit") if configuration(cell) in fitted else cell for cell in cells]


def _rows(path: Path) -> tuple[list[tuple[int, Row]], list[str]]:
    """The rows with the number of their line, and the columns; lines with # are comments."""
    try:
        lines = visible(text_of(path)).splitlines()
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CatalogError(f"cannot read {path}: it is not a text in UTF-8") from error
    kept = [
        (number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.startswith("#")
    ]
    try:
        rows = list(csv.reader((line for _, line in kept), strict=True))
    except csv.Error as error:
        raise CatalogError(f"cannot read {path}: {error}") from error
    if not rows:
        raise CatalogError(f"{path}: no rows")
    columns = [name.strip() for name in rows[0]]
    twice = next((name for name in columns if name and columns.count(name) > 1), None)
    if twice:
        raise CatalogError(f"{path} has the column {twice} twice")
    found: list[tuple[int, Row]] = []
    for (number, _), row in zip(kept[1:], rows[1:], strict=False):
        if len(row) > len(columns):
            raise CatalogError(
                f"{path}, line {number}: {len(row)} fields under {len(columns)} columns"
            )
        texts = [text.strip() for text in row] + [""] * (len(columns) - len(row))
        found.append((number, dict(zip(columns, texts, strict=True))))
    return found, columns


def _table(path: Path, columns: Sequence[str], sources: Collection[str] | None) -> type[TableRow]:
    """The table whose columns these are, or nearly are."""
    tables = [table for table in TABLES if sources is None or table.source in sources]

    def missing(table: type[TableRow]) -> list[str]:
        return [name for name in table.model_fields if name not in columns]

    table = min(tables, key=lambda table: len(missing(table)) / len(table.model_fields))
    lacking = missing(table)
    if not lacking:
        return table
    if sources is None and 2 * len(lacking) > len(table.model_fields):
        known = "; or ".join(", ".join(table.model_fields) for table in tables)
        raise CatalogError(f"{path} holds no known table; expected the columns {known}")
    raise CatalogError(
        f"{path} is not a table of {table.source}: it has no column {', '.join(lacking)}"
    )


def _parsed(table: type[T], row: Row) -> T:
    """The row by its model. Raises CatalogError with the column, what is given and the rule."""
    try:
        return table.model_validate(row)
    except ValidationError as error:
        raise CatalogError(first_problem(error)) from error
