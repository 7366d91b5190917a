"""The commands `co2analysis validate` and `co2analysis calibrate`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from analysis import ablation, explain, reporting, tokens, validate
from analysis.constants import GROUPS, record
from analysis.published import Cell, predict
from analysis.tables_published import PAPERS, co2_term, from_csv, from_papers, papers
from co2sim.cli.files import write_atomically
from co2sim.errors import CatalogError, OptionError

ITERATION_TIMES = "a100_dp_iteration_times.csv"

_BESIDE = PAPERS.parent.parent / "shared" / "data"
"""Where published tables that are not copied into the project may lie."""

_COUNTS = (512, 1024, 2048, 4096, 8192)
_GPUS = (8, 16, 32, 64, 128)
_LARGEST = 3

Papers = Annotated[Path, typer.Option(help="Folder of the published results.")]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help=f"Folder with {ITERATION_TIMES}, or that file; by default {_BESIDE} if it is there.",
    ),
]


def cells_of(folder: Path, data: Path | None) -> list[Cell]:
    """All cells with `use` as published, and the table that is only referred to, if it is there."""
    found = from_papers(folder)
    if data is None and (_BESIDE / ITERATION_TIMES).is_file():
        data = _BESIDE
    if data is not None:
        path = data / ITERATION_TIMES if data.is_dir() else data
        if not path.is_file():
            raise OptionError(f"--data {data}: {path} does not exist")
        about = papers(folder)["vtrain"].about["data"]
        found += from_csv(path, about["use"], folder)
    return found


def validate_command(
    data: Data = None,
    cells: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.csv",
            help="Predict further cells, in the format of one of the published tables. Repeatable.",
        ),
    ] = None,
    papers_: Annotated[
        Path, typer.Option("--papers", help="Folder of the published results.")
    ] = PAPERS,
    markdown: Annotated[Path | None, typer.Option(help="Write the whole report here.")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Folder for figures, prediction beside publication.")
    ] = None,
    brief: Annotated[  # noqa: FBT002
        bool, typer.Option("--brief", help="Errors only: no ablation, no dependence on tokens.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print cells as JSON.")] = False,  # noqa: FBT002
) -> None:
    """Predict published results: signed errors, fitted constants, ablation, figures."""
    known = cells_of(papers_, data)
    if cells:
        chosen = [cell for path in cells for cell in from_csv(path, "check", papers_)]
    else:
        chosen = known
    rows = validate.validate(chosen)
    files: dict[Path, bytes] = {}
    if figures is not None:
        files |= _figures(rows, figures, papers_)
    text = "" if json_ and markdown is None else report(rows, known, brief=brief or bool(cells))
    if markdown is not None:
        files[markdown] = text.encode()
    write_atomically(files)
    if json_:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2))
        return
    typer.echo(text)
    for path in files:
        typer.echo(f"written {path}")


def report(rows: Sequence[validate.Row], known: Sequence[Cell], *, brief: bool) -> str:
    """The report as Markdown."""
    largest = sorted(rows, key=lambda row: -abs(row.error))[:_LARGEST]
    parts = [
        "## Predicted against published\n",
        reporting.summary_table(validate.summaries(rows)),
        "Errors are of the prediction: positive where it is too high.\n",
        f"The {len(largest)} largest errors:\n",
        reporting.cell_table(largest),
    ]
    if not brief:
        parts += [
            "## The largest errors, looked into\n",
            *(_explained(row, rows, known) for row in largest),
            "## Fitted constants\n",
            reporting.constant_table(reporting.constants_of(record())),
            "## Mechanisms\n",
            reporting.ablation_table(ablation.ablate(known)),
            "## CO2: tokens per GPU and step are not published\n",
            _token_table(known),
        ]
    parts += ["## All cells\n", reporting.cell_table(rows)]
    return "\n".join(parts)


def _explained(row: validate.Row, rows: Sequence[validate.Row], known: Sequence[Cell]) -> str:
    return reporting.explanation(
        row,
        None if row.cell.terms[0].quantity == "iteration_ms" else explain.shares(row.cell),
        explain.alike(row, rows),
        explain.remedies(row.cell, known),
        ablation.mape([cell for cell in known if cell.group == row.cell.group]),
    )


def _token_table(known: Sequence[Cell]) -> str:
    found = tokens.study(known, _COUNTS)
    names = list(found[0].errors)
    rows = [
        (
            f"{item.tokens:,}",
            *(f"{value:.3f}" for value in item.values.values()),
            *(reporting.percent(item.errors[name]) for name in names),
        )
        for item in found
    ]
    columns = ("tokens", *found[0].values, *names)
    return reporting.table(columns, rows, 1)


def _figures(rows: Sequence[validate.Row], folder: Path, papers_: Path) -> dict[Path, bytes]:
    from analysis import validation_figures as drawn  # noqa: PLC0415 - matplotlib

    found: dict[Path, bytes] = {}
    sources = {row.cell.source for row in rows}
    if "zeropp" in sources:
        found[folder / "zeropp-bars.png"] = drawn.bars(rows, "png")
    if "co2" in sources:
        found[folder / "co2-scalability.png"] = drawn.scalability(rows, _curves(papers_), "png")
    if "vtrain" in sources:
        found[folder / "a100-iteration-errors.png"] = drawn.scatter(rows, "png")
    return found


def _curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Predicted throughput by GPUs, for CO2's figure."""
    paper = papers(folder)["co2"]
    inner = "worker=node,inner=zero2"
    found = {}
    for text in ("zero2", f"co2:tau=48,{inner}", f"co2:tau=12,{inner}"):
        name = text.partition(",")[0]
        points = []
        for gpus in _GPUS:
            cell = Cell(
                source="co2", name=name, strategy=name, group="a100-co2", published=1.0,
                use="check", terms=(co2_term(paper, text, gpus),),
            )  # fmt: skip
            points.append((gpus, predict(cell)))
        found[name] = points
    return found


def calibrate_command(
    data: Data = None,
    papers_: Annotated[
        Path, typer.Option("--papers", help="Folder of the published results.")
    ] = PAPERS,
    group: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this group: {', '.join(GROUPS)}. Repeatable; not with --write."),
    ] = None,
    write: Annotated[  # noqa: FBT002
        bool, typer.Option("--write", help="Write the constants into the catalog.")
    ] = False,
) -> None:
    """Fit the physical constants on the cells marked fit, cross-validated (needs scipy)."""
    try:
        import scipy  # noqa: F401, PLC0415

        from analysis import writing  # noqa: PLC0415 - scipy, only for this command
        from analysis.calibrate import fit_all  # noqa: PLC0415
    except ImportError as error:
        raise CatalogError(f"{error.name} is missing: pip install 'co2sim[analysis]'") from error
    unknown = [name for name in group or () if name not in GROUPS]
    if unknown:
        raise OptionError(f"--group {unknown[0]}: it is one of {', '.join(GROUPS)}")
    if write and group:
        raise OptionError("--write needs all groups; leave --group out")
    fits = fit_all(cells_of(papers_, data), tuple(group or GROUPS))
    for found in fits:
        shown: dict[str, Any] = asdict(found)
        typer.echo(f"{found.group}: {found.cells} cells, MAPE {found.mape:.2%}")
        if found.cross_validated is not None:
            typer.echo(f"  cross-validated: {found.cross_validated:.2%}")
        for constant in GROUPS[found.group].constants:
            value = shown["values"][constant.name]
            at_bound = value in {constant.low, constant.high}
            typer.echo(
                f"  {constant.name}: {constant.shown(value)}{' (at its bound)' if at_bound else ''}"
            )
    if write:
        files = writing.catalog_files(fits)
        files |= dict([writing.record_file(fits)])
        write_atomically(files)
        for path in files:
            typer.echo(f"written {path}")
