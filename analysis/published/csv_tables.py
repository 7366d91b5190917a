"""Published cells from CSV tables in one of three formats, checked row by row."""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.published.paper_cells import SIZES, co2_cell, co2_ratio, zeropp_cell
from analysis.published.papers import PAPERS, Paper, papers
from analysis.published.parameters import cluster_of, model_of
from analysis.published.predict import ONE_BUCKET, Cell, Setup, Term, Use
from co2sim.errors import CatalogError, Co2simError
from co2sim.strategies import parse
from co2sim.workload import Workload

Row = Mapping[str, str]

_MOST_LINKS = 8
"""InfiniBand links of a DGX-2."""

_DIGITS = 9
"""Of a number that may be meant."""

_LEAST = 1e-9
"""Of a published number; its inverse is the largest."""

_RATIO = (16, 128)
"""GPUs between which CO2's table states a ratio."""


@dataclass(frozen=True, slots=True)
class Format:
    """A table: the source it is of, the columns it must have, and how to read one row."""

    source: str
    columns: tuple[str, ...]
    read: Callable[[Paper, Row, Use], Iterator[Cell]]


def from_csv(
    path: Path,
    use: Use,
    folder: Path = PAPERS,
    source: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Cell]:
    """The cells of a table in one of the formats of the published data, or in that of `source`.

    `say` is told of rows without a published number, which are left out.

    Raises CatalogError for another table, or for a row that cannot be read, with file and line.
    """
    sources = papers(folder)
    numbered, columns = _rows(path)
    form = _format(path, columns, source)
    if form.source not in sources:
        raise CatalogError(f"{path} is a table of {form.source}, which {folder} does not hold")
    found: list[Cell] = []
    for number, row in numbered:
        try:
            cells = list(form.read(sources[form.source], row, use))
            for cell in cells:
                _check(cell)
        except Co2simError as error:
            raise CatalogError(f"{path}, line {number}: {error}") from error
        if not cells:
            say(f"{path}, line {number}: no published number, left out")
        found += cells
    if not found:
        raise CatalogError(f"{path} holds no published number" if numbered else f"{path}: no rows")
    return found


def marked(cells: Iterable[Cell], known: Iterable[Cell]) -> list[Cell]:
    """The cells, with those marked fit whose configuration the constants were fitted on."""

    def configuration(cell: Cell) -> tuple[object, ...]:
        return cell.terms, cell.over, cell.pick, cell.per_gpu

    fitted = {configuration(cell) for cell in known if cell.use == "fit"}
    return [replace(cell, use="fit") if configuration(cell) in fitted else cell for cell in cells]


def _rows(path: Path) -> tuple[list[tuple[int, Row]], list[str]]:
    """The rows with the number of their line, and the columns; lines with # are comments."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CatalogError(f"cannot read {path}: it is no text") from error
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


def _format(path: Path, columns: Sequence[str], source: str | None) -> Format:
    forms = [form for form in _FORMATS if source in {None, form.source}]

    def missing(form: Format) -> list[str]:
        return [name for name in form.columns if name not in columns]

    form = min(forms, key=lambda form: len(missing(form)) / len(form.columns))
    lacking = missing(form)
    if not lacking:
        return form
    if source is None and 2 * len(lacking) > len(form.columns):
        known = "; or ".join(", ".join(form.columns) for form in forms)
        raise CatalogError(f"{path} holds no known table; expected the columns {known}")
    raise CatalogError(
        f"{path} is no table of {form.source}: it has no column {', '.join(lacking)}"
    )


def _check(cell: Cell) -> None:
    """Refuse what the simulator cannot run: GPUs that fill no nodes, such a model, batch or tau."""
    for term in (*cell.terms, *cell.over):
        setup = term.setup
        cluster_of(setup.cluster, setup.overrides).resized(setup.gpus)
        parse(setup.strategy)
        model = model_of(setup.model, setup.model_overrides)
        Workload(model, setup.micro_batch, setup.accumulation)


def _text(row: Row, column: str, known: Iterable[str]) -> str:
    """One of the known texts."""
    text, names = row[column], list(known)
    if text not in names:
        raise CatalogError(f"unknown {column} {text!r}; known: {', '.join(names)}")
    return text


def _count(row: Row, column: str) -> int:
    """A whole number, at least 1."""
    text = row[column]
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS and int(text)):
        raise CatalogError(f"{column} is {text!r}; it must be a whole number, at least 1")
    return int(text)


def _published(row: Row, column: str) -> float | None:
    """A published number; None where the field is empty."""
    text = row[column]
    if not text:
        return None
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not _LEAST <= value <= 1 / _LEAST:
        raise CatalogError(
            f"{column} is {text!r}; it must be a number above 0, from {_LEAST:g} to {1 / _LEAST:g}"
        )
    return value


def _zeropp_row(paper: Paper, row: Row, use: Use) -> Iterator[Cell]:
    size = int(_text(row, "model_params_b", map(str, SIZES)))
    tokens, links = _count(row, "tokens_per_gpu"), _count(row, "ib_links_100gbps_per_node")
    if links > _MOST_LINKS:
        raise CatalogError(f"{links} links per node; a DGX-2 has at most {_MOST_LINKS}")
    for strategy in ("zero3", "zeropp"):
        value = _published(row, f"{strategy}_tflops_per_gpu")
        if value is not None:
            yield zeropp_cell(paper, size, tokens, links, strategy, value, use)


def _co2_row(paper: Paper, row: Row, use: Use) -> Iterator[Cell]:
    plan = paper.simulation
    strategy = plan["methods"][_text(row, "method", plan["methods"])]
    on = paper.on(plan["networks"][_text(row, "network", plan["networks"])])
    if "TAU" in strategy:
        strategy = strategy.replace("TAU", str(_count(row, "tau")))
    elif row["tau"]:
        raise CatalogError(f"tau is {row['tau']!r}, but {row['method']} has none")
    gpus = _count(row, "gpus")
    speed, ratio = _published(row, "words_per_s"), _published(row, "scalability_16_to_128")
    if speed is not None:
        yield co2_cell(on, strategy, gpus, speed, use)
    if ratio is not None:
        if gpus != _RATIO[1]:
            raise CatalogError(f"scalability_16_to_128 on {gpus} GPUs; it belongs to 128")
        yield co2_ratio(on, strategy, _RATIO, ratio, use)


def _iteration_setup(paper: Paper, row: Row) -> Setup:
    """The run behind a row of the iteration times."""
    plan = paper.simulation
    shape = {name: _count(row, name) for name in ("layers", "hidden", "heads", "seq_len")}
    shape |= {
        "ffn": 4 * shape["hidden"],
        "vocab": plan["vocab"],
        "positions": shape["seq_len"],
    }
    gpus, micro = _count(row, "gpus"), _count(row, "micro_batch")
    most = cluster_of(plan["cluster"], ()).layout.gpus_per_node
    if gpus > most:
        raise CatalogError(f"{gpus} GPUs; these runs are of one node, which has {most}")
    batch = _count(row, "global_batch")
    steps, left = divmod(batch, gpus * micro)
    if left or not steps:
        raise CatalogError(f"global_batch {batch} is no multiple of {gpus} x {micro}")
    return Setup(
        cluster=plan["cluster"],
        model=plan["model"],
        model_overrides=tuple((name, str(value)) for name, value in shape.items()),
        strategy=ONE_BUCKET,
        gpus=gpus,
        precision=plan["precision"],
        micro_batch=micro,
        accumulation=steps,
        recompute=plan["recompute"],
    )


def _iteration_row(paper: Paper, row: Row, use: Use) -> Iterator[Cell]:
    published = _published(row, "iteration_ms")
    if published is None:
        return
    setup = _iteration_setup(paper, row)
    name = (
        f"{row['gpus']} GPUs, batch {row['global_batch']}, micro-batch {row['micro_batch']},"
        f" hidden {row['hidden']}, {row['layers']} layers"
    )
    yield Cell(
        source="vtrain",
        name=name,
        strategy="ddp",
        group="a100-data-parallel",
        published=published,
        use=use,
        terms=(Term(setup=setup, quantity="iteration_ms"),),
        labels={key: row[key] for key in ("gpus", "micro_batch", "hidden", "layers")},
    )


_FORMATS = (
    Format(
        "zeropp",
        (
            *("model_params_b", "tokens_per_gpu", "ib_links_100gbps_per_node"),
            *("zero3_tflops_per_gpu", "zeropp_tflops_per_gpu"),
        ),
        _zeropp_row,
    ),
    Format(
        "co2",
        ("method", "network", "tau", "gpus", "words_per_s", "scalability_16_to_128"),
        _co2_row,
    ),
    Format(
        "vtrain",
        (
            *("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq_len"),
            "iteration_ms",
        ),
        _iteration_row,
    ),
)
