"""The commands `co2analysis validate` and `co2analysis calibrate`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from analysis.published import ablation, consistency, diagnosis, errors, report, sensitivity
from analysis.published.csv_tables import from_csv, marked
from analysis.published.paper_cells import co2_term, from_papers, unpredicted
from analysis.published.papers import (
    DATA_VARIABLE,
    ITERATION_TIMES,
    PAPERS,
    iteration_times,
    papers,
)
from analysis.published.parameters import GROUPS, record
from analysis.published.predict import Cell, predict
from co2sim.errors import CatalogError, OptionError
from co2sim.files import write_atomically

_REFERRED = "vtrain"
"""The source whose table is only referred to."""

_COUNTS = (512, 1024, 2048, 4096, 8192)
_GPUS = (8, 16, 32, 64, 128)
_LARGEST = 3

Papers = Annotated[
    Path,
    typer.Option(
        "--papers", help="Folder of the published results.", show_default="those of the package"
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help=f"Folder with {ITERATION_TIMES}, or that file; by default what {DATA_VARIABLE} names.",
    ),
]


def cells_of(folder: Path, data: Path | None) -> list[Cell]:
    """All cells with `use` as published, and the table that is only referred to, if it is there."""
    found = from_papers(folder)
    path = iteration_times(data)
    if path is not None:
        about = papers(folder)[_REFERRED].about["data"]
        found += from_csv(path, about["use"], folder, _REFERRED)
    return found


def _say_what_is_missing(known: Sequence[Cell], chosen: Sequence[Cell]) -> None:
    """On stderr: without their table no A100 iteration time is predicted, or known as fitted."""
    if any(cell.source == _REFERRED for cell in known):
        return
    note = "the A100 iteration times were not read; --data names their folder"
    if chosen is known:
        typer.echo(f"note: {note}", err=True)
    elif any(cell.source == _REFERRED for cell in chosen):
        typer.echo(f"note: {note}, so that rows that were fitted on count as check", err=True)


def validate_command(
    data: Data = None,
    cells: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.csv",
            help="Predict further cells, in the format of one of the published tables. Repeatable.",
        ),
    ] = None,
    papers_: Papers = PAPERS,
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
        read = [
            cell
            for path in cells
            for cell in from_csv(path, "check", papers_, say=partial(typer.echo, err=True))
        ]
        chosen = marked(read, known)
    else:
        chosen = known
    _say_what_is_missing(known, chosen)
    rows = errors.validate(chosen)
    files: dict[Path, bytes] = {}
    if figures is not None:
        files |= _figures(rows, figures, papers_)
    text = ""
    if markdown is not None or not json_:
        text = _whole_report(rows, known, brief=brief or bool(cells))
        if not cells:
            text += "\n## Not predicted\n\n" + report.unpredicted_table(unpredicted(papers_))
    if markdown is not None:
        files[markdown] = text.encode()
    write_atomically(files)
    if json_:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2))
        return
    typer.echo(text)
    for path in files:
        typer.echo(f"written {path}")


def _whole_report(rows: Sequence[errors.Row], known: Sequence[Cell], *, brief: bool) -> str:
    """The report as Markdown."""
    largest = sorted(rows, key=lambda row: -abs(row.error))[:_LARGEST]
    parts = [
        "## Predicted against published\n",
        report.summary_table(errors.summaries(rows)),
        "Errors are of the prediction: positive where it is too high.\n",
        f"The {len(largest)} largest errors:\n",
        report.cell_table(largest),
    ]
    if not brief:
        parts += [
            "## The largest errors, looked into\n",
            *(_explained(row, rows, known) for row in largest if row.has_interval),
            *map(report.speeds_text, consistency.hidden_speeds(known)),
            "## Fitted constants\n",
            report.constant_table(report.constants_of(record())),
            report.fit_table(record()),
            "## Mechanisms\n",
            report.ablation_table(ablation.ablate(known)),
        ]
        if any(cell.group == sensitivity.GROUP for cell in known):
            by_tokens = sensitivity.study(known, _COUNTS)
            parts += [
                "## CO2: tokens per GPU and step are not published\n",
                "Here and in the next table both constants are set anew for every row.\n",
                report.refit_table({f"{n:,}": it for n, it in by_tokens.items()}, "tokens"),
                "## CO2: if tensors travelled otherwise\n",
                report.refit_table(sensitivity.otherwise(known), "assumed"),
                *map(report.consistency_text, consistency.least_ratios(known)),
            ]
    parts += ["## All cells\n", report.cell_table(rows)]
    return "\n".join(parts)


def _explained(row: errors.Row, rows: Sequence[errors.Row], known: Sequence[Cell]) -> str:
    return report.explanation(
        row,
        None if row.cell.terms[0].quantity == "iteration_ms" else diagnosis.shares(row.cell),
        diagnosis.alike(row, rows),
        diagnosis.remedies(row.cell, known),
        diagnosis.otherwise(row.cell, known),
        ablation.mape([cell for cell in known if cell.group == row.cell.group]),
    )


def _figures(rows: Sequence[errors.Row], folder: Path, papers_: Path) -> dict[Path, bytes]:
    from analysis.published import figures as drawn  # noqa: PLC0415 - matplotlib

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
    papers_: Papers = PAPERS,
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

        from analysis.published import catalog_writer  # noqa: PLC0415 - scipy, only for this command
        from analysis.published.calibrate import fit_all  # noqa: PLC0415
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
        for label, left in found.by_label.items():
            typer.echo(f"  with one value of {label} left out: {left:.2%}")
        for constant in GROUPS[found.group].constants:
            value = shown["values"][constant.name]
            typer.echo(f"  {constant.name}: {report.at_bound(constant, value)}")
    if write:
        files = catalog_writer.catalog_files(fits)
        files |= dict([catalog_writer.record_file(fits)])
        write_atomically(files)
        for path in files:
            typer.echo(f"written {path}")
