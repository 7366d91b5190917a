"""The commands `co2analysis validate`, `figures`, `runs`, `goodput`, `whole` and `fabric`."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from analysis.published.runs import DATA_VARIABLE, PAPERS, TABLES_ELSEWHERE
from co2sim.cli import options
from co2sim.common.cli import command_line, print_json
from co2sim.common.errors import Co2simError, OptionError, nearest
from co2sim.common.files import check_writable, write_atomically
from co2sim.common.progress import progress_bar
from co2sim.report.bundle import check

if TYPE_CHECKING:
    from analysis.published.cells import Cell
    from analysis.published.goodput import Compared
    from analysis.published.paper_figures import PaperFigure
    from analysis.published.predict import CellPrediction
    from analysis.published.report import ValidationReport
    from analysis.published.run_errors import Left
    from analysis.published.runs import TrainingRun
    from analysis.published.stack_fit import StackFit
    from co2sim.prediction.intervals import MemoryErrors
    from co2sim.prediction.published import Use

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
        help=f"Folder with {' or '.join(TABLES_ELSEWHERE.values())}, or one of these files; by"
        f" default what {DATA_VARIABLE} names, else shared/data beside a checkout.",
    ),
]


def validate_command(
    data: Data = None,
    cells: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.csv",
            help="Predict further cells, in the format of one of the published tables, and the"
            " ratios that they state with known ones. Repeatable.",
        ),
    ] = None,
    papers_: Papers = PAPERS,
    markdown: Annotated[Path | None, typer.Option(help="Write the whole report here.")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Folder for figures of predicted and published values.")
    ] = None,
    report: options.Report = None,
    json_: Annotated[bool, typer.Option("--json", help="Print cells as JSON.")] = False,  # noqa: FBT002
) -> None:
    """Predict published results: signed errors, intervals, figures.

    A pipe or a file gets the report in Markdown; a terminal gets tables that fit.
    """
    from analysis.published import predict, tables  # noqa: PLC0415 - numpy, pydantic
    from analysis.published.cells import unpredicted  # noqa: PLC0415 - as above
    from analysis.published.report import ValidationReport, render  # noqa: PLC0415 - as above

    check("--report", report)
    for folder in filter(None, (markdown and markdown.parent, figures)):
        check_writable(folder)
    every = tables.known_cells(papers_, data)
    chosen = every
    if cells:
        say = partial(typer.echo, err=True)
        chosen = tables.further_cells(cells, every, papers_, say)
    missing = list(_missing(every, chosen, papers_))
    for note in missing:
        typer.echo(f"note: {note}", err=True)
    files: dict[Path, bytes] = {}
    with progress_bar("predicting published cells", after=1.0) as progress:
        rows = predict.validate(chosen, progress)
    if figures is not None:
        from analysis.published.paper_figures import draw  # noqa: PLC0415 - matplotlib

        files |= {figures / name: content for name, content in draw(rows, papers_).items()}
    text = ""
    if markdown is not None or report is not None or not json_:
        document = ValidationReport(rows=rows, unpredicted=() if cells else unpredicted(papers_))
        text = render(document)
    if markdown is not None:
        files[markdown] = text.encode()
    numbers = [row.to_dict() for row in rows] if json_ or report is not None else []
    if report is not None:
        files[report] = _page(document, text, numbers, missing)
    write_atomically(files)
    if json_:
        typer.echo(json.dumps(numbers, indent=2))
        return
    _print(text, files)


def _print(text: str, files: Iterable[Path]) -> None:
    """The report, and what was written."""
    from co2sim.common.tables import console, print_markdown  # noqa: PLC0415 - rich

    out = console()
    if out.is_terminal:
        print_markdown(out, text)
    else:
        typer.echo(text)
    for path in files:
        typer.echo(f"written {path}")


def _page(
    document: "ValidationReport",
    text: str,
    numbers: Sequence[Mapping[str, Any]],
    missing: Sequence[str],
) -> bytes:
    """The HTML page."""
    from analysis.published.page import page  # noqa: PLC0415 - Altair
    from co2sim.report.html import render  # noqa: PLC0415 - as above

    return render(page(document, text, numbers, command_line("co2analysis"), missing))


def _missing(every: Sequence["Cell"], chosen: Sequence["Cell"], folder: Path) -> Iterator[str]:
    """Of a table that is not at hand nothing is predicted, or every as fitted: what to say."""
    from analysis.published.runs import papers  # noqa: PLC0415 - pydantic

    for key in papers(folder).keys() & TABLES_ELSEWHERE.keys():
        if any(cell.source == key for cell in every):
            continue
        note = (
            f"{TABLES_ELSEWHERE[key]}, the table of {key}, was not read; --data names its"
            " folder (docs/validation.md says how to make it)"
        )
        if chosen is every:
            yield note
        elif any(cell.source == key for cell in chosen):
            yield f"{note}, so rows that were fitted on count as check"


_FORMATS = "pdf,svg,png"


def figures(
    out: Annotated[Path, typer.Option("--out", help="Folder for the files.")],
    format_: Annotated[
        str, typer.Option("--format", metavar="NAMES", help="Kinds of files, with commas between.")
    ] = _FORMATS,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this figure, such as co2-table-3. Repeatable."),
    ] = None,
    papers: Papers = PAPERS,
    json_: Annotated[  # noqa: FBT002
        bool, typer.Option("--json", help="Print what was written, with every value, as JSON.")
    ] = False,
) -> None:
    """Draw figures and tables of the CO2 and ZeRO++ papers, published values beside ours.

    Every file is named after what it mirrors. Values that constants were fitted on are hollow.
    """
    kinds = _kinds(format_)
    check_writable(out)
    from analysis.published.paper_figures import paper_figures  # noqa: PLC0415 - matplotlib

    with progress_bar("predicting published cells", after=1.0) as progress:
        drawn, left_out = paper_figures(papers, only or (), done=progress)
    made = [(figure, figure.files(kinds)) for figure in drawn]
    write_atomically({out / name: content for _, kind in made for name, content in kind.items()})
    if json_:
        figures = [
            figure.to_dict() | {"files": [str(out / name) for name in files]}
            for figure, files in made
        ]
        names = {"where": "where", "cell": "name", "published": "published", "reason": "reason"}
        not_drawn = [{key: getattr(c, name) for key, name in names.items()} for c in left_out]
        print_json({"figures": figures, "not_drawn": not_drawn})
        return
    for figure, files in made:
        _say(figure)
        for name in files:
            typer.echo(f"  written {out / name}")
    shown = sum(figure.published for figure in drawn)
    if not only:
        typer.echo(f"{shown} of {shown + len(left_out)} published numbers are drawn")
    for cell in left_out:
        typer.echo(f"not drawn: {cell.published:g} ({cell.name}; {cell.where}): {cell.reason}")


def _kinds(text: str) -> list[str]:
    """The formats of an option, each once. Raises OptionError for an unknown one."""
    kinds = list(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    for kind in kinds:
        if kind not in _FORMATS.split(","):
            others = nearest(kind, _FORMATS.split(","))
            raise OptionError(f"--format: {kind!r} is no kind of file; {others}")
    return kinds


def _say(figure: "PaperFigure") -> None:
    from analysis.published.report import signed  # noqa: PLC0415 - numpy, pydantic

    typer.echo(f"{figure.mirror.name}: mirrors {figure.mirror.where}")
    parts = [f"{figure.published} published"]
    uses: tuple[tuple[Use, str], ...] = (
        ("check", "predicted"),
        ("fit", "fitted on (no predictions)"),
    )
    for use, words in uses:
        if count := len(figure.of_use(use)):
            parts.append(f"{count} {words}")
            if errors := figure.errors(use):
                median, largest = signed(errors.median_bias), signed(errors.worst.error)
                parts[-1] += f": error median {median}, largest {largest}"
    if figure.alone:
        parts.append("not predicted: quality of training")
    typer.echo(f"  {'; '.join(parts)}")


Sources = Annotated[
    list[str] | None,
    typer.Option("--source", metavar="KEY", help="A folder of papers/, such as nanotron."),
]


_Evidence = Annotated[
    bool,
    typer.Option(
        "--evidence",
        help="Write the evidence and the errors of memory of the catalog again, by the fit that is"
        " there: two minutes.",
    ),
]
_Memory = Annotated[bool, typer.Option("--memory", help="Compare the peak of memory instead.")]
_Ratios = Annotated[
    bool,
    typer.Option(
        "--ratios",
        help="Compare the throughput per GPU of a job with that on fewer GPUs: the error that two"
        " runs do not share.",
    ),
]


_Unknown = Annotated[
    bool,
    typer.Option(
        "--unknown", help="Predict as if the stack of no run were known: with `--stack unknown`."
    ),
]


def runs(  # noqa: PLR0913, PLR0917 - one argument per option
    source: Sources = None,
    papers: Annotated[Path, typer.Option(help="Folder of the published runs.")] = PAPERS,
    fit: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--fit",
            help="Fit again, with each source left out in turn, and write the record: half an hour"
            " on 2 cores.",
        ),
    ] = False,
    evidence: _Evidence = False,  # noqa: FBT002
    own: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--own",
            help="Calibrate the stack by the run on the fewest GPUs of each series, as `co2sim"
            " calibrate` does, and predict the larger ones.",
        ),
    ] = False,
    memory: _Memory = False,  # noqa: FBT002
    ratios: _Ratios = False,  # noqa: FBT002
    unknown: _Unknown = False,  # noqa: FBT002
    jobs: options.Jobs = -1,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Predict published training runs, each by what was fitted without its source.

    Errors are predicted over published throughput, less 1. Without --source two rules that need no
    simulator stand beside, and the command fails where one has smaller errors.
    """
    from analysis.published import stack_fit  # noqa: PLC0415 - scipy
    from analysis.published.runs import training_runs  # noqa: PLC0415 - pydantic

    if fit + evidence + own + memory + ratios + unknown > 1:
        modes = "--fit, --evidence, --own, --memory, --ratios and --unknown"
        raise OptionError(f"give one of {modes}")
    every = training_runs(papers)
    kind = "memory_kind" if memory else "is_counted"
    chosen = _of_sources([run for run in every if getattr(run, kind)], source)
    if fit:
        _fit_runs(every, papers, jobs)
        print(f"written: {papers / stack_fit.RECORD}, and the catalog")
    elif evidence:
        write_atomically(_evidence(every, stack_fit.record(papers), papers, jobs))
        print("written: the catalog")
    elif memory:
        _print_memory(chosen, jobs, as_json=json_)
    elif ratios:
        _print_ratios(chosen, papers, jobs, as_json=json_)
    else:
        if unknown:
            chosen = [run.changed(stack=stack_fit.UNKNOWN) for run in chosen]
        rows, predicted = _predicted_runs(chosen, papers, jobs, of_series=own)
        if json_:
            print(json.dumps([*map(_plain_run, rows, predicted)], indent=2))
        else:
            _print_runs(rows, predicted, beside_rules=not source)


def _of_sources(
    candidates: Sequence["TrainingRun"], sources: Sequence[str] | None
) -> list["TrainingRun"]:
    """Those of some sources, by default of all. Raises OptionError for an unknown one."""
    keys = list(dict.fromkeys(run.paper for run in candidates))
    for key in sources or ():
        if key not in keys:
            raise OptionError(f"unknown source {key!r}; {nearest(key, keys)}")
    return [run for run in candidates if not sources or run.paper in sources]


def _predicted_runs(
    chosen: Sequence["TrainingRun"], papers: Path, jobs: int, *, of_series: bool
) -> tuple[list["Left"], list["CellPrediction"]]:
    """Runs beside predictions without their site.

    With `of_series` they are the larger runs of each series. Raises OptionError where there are
    none.
    """
    from analysis.published import run_errors, stack_fit  # noqa: PLC0415 - scipy
    from analysis.published.runs import training_runs  # noqa: PLC0415 - pydantic

    record, measured = stack_fit.record(papers), []
    every = [run for run in training_runs(papers) if run.is_counted]
    if of_series:
        further = run_errors.further_runs(chosen, record.left_out, jobs)
        if not further:
            raise OptionError("no series in these sources has runs on more than one number of GPUs")
        chosen, results = ([getattr(run, name) for run in further] for name in ("run", "result"))
        measured = [[run.start] for run in further]
    else:
        values = [record.left_out[run.site] for run in chosen]
        results = stack_fit.predictions(chosen, values, jobs, "predicting runs")
    rows = run_errors.left(chosen, results, every)
    return rows, run_errors.compared(rows, papers, measured)


def _fit_runs(every: Sequence["TrainingRun"], papers: Path, jobs: int) -> None:
    """Fit again, and write what the catalog and `papers` say of it."""
    from analysis.published import stack_fit  # noqa: PLC0415 - scipy

    counted = [run for run in every if run.is_counted]
    path = papers / stack_fit.RECORD
    start = stack_fit.record(papers).values if path.is_file() else {}
    fitted = stack_fit.fit(counted, start, iterations=2, jobs=jobs)
    written = {path: stack_fit.written(fitted).encode()}
    write_atomically(written | _evidence(every, fitted, papers, jobs))


def _evidence(
    every: Sequence["TrainingRun"], fitted: "StackFit", papers: Path, jobs: int
) -> dict[Path, bytes]:
    """What the catalog says of a fit, and of published runs beside it."""
    from analysis.published import run_errors, stack_fit  # noqa: PLC0415 - scipy

    counted = [run for run in every if run.is_counted]
    values = [fitted.left_out[run.site] for run in counted]
    results = stack_fit.predictions(counted, values, jobs, "predicting runs")
    rows = run_errors.left(counted, results)
    errors = replace(run_errors.errors_of(rows), memory=_memory_errors(every, jobs))
    strangers = [run.changed(stack=stack_fit.UNKNOWN) for run in counted]
    unknown = stack_fit.predictions(strangers, values, jobs, "with an unknown stack")
    spread = run_errors.spread_between(run_errors.left(strangers, unknown), errors)
    return run_errors.catalog_files(fitted.values, spread) | dict(
        [
            run_errors.errors_file(errors),
            run_errors.evidence_file(counted, results),
            run_errors.models_file(run_errors.models_without(rows), papers),
        ]
    )


def _memory_errors(every: Sequence["TrainingRun"], jobs: int) -> "MemoryErrors":
    from analysis.published import run_errors  # noqa: PLC0415 - scipy

    peaks = [row for _, row in run_errors.run_memories(every, jobs)]
    return run_errors.memory_errors(peaks, run_errors.memory_bounds(every, jobs))


def _print_memory(chosen: Sequence["TrainingRun"], jobs: int, *, as_json: bool) -> None:
    """Peaks of memory beside predictions. Raises OptionError for sources without any."""
    from analysis.published.run_errors import run_memories  # noqa: PLC0415 - scipy

    rows = run_memories(chosen, jobs)
    if not rows:
        raise OptionError("no run of these sources whose memory is published can be expressed")
    if not as_json:
        _print_errors("errors of the peak of memory", [row for _, row in rows])
        return
    plain = [
        {
            "source": run.paper,
            "run": run.id,
            "kind": run.memory_kind,
            "published_gib": row.cell.published,
            "predicted_gib": row.predicted,
            "error": row.error,
        }
        for run, row in rows
    ]
    print(json.dumps(plain, indent=2))


def _print_ratios(
    chosen: Sequence["TrainingRun"], papers: Path, jobs: int, *, as_json: bool
) -> None:
    """Ratios of a job on two numbers of GPUs. Raises OptionError for sources without any."""
    from statistics import fmean, median  # noqa: PLC0415

    from analysis.published import stack_fit  # noqa: PLC0415 - scipy
    from analysis.published.run_errors import compared_scalings  # noqa: PLC0415 - scipy
    from co2sim.common.tables import console, print_table  # noqa: PLC0415 - rich

    left_out = stack_fit.record(papers).left_out
    values = [left_out[run.site] for run in chosen]
    pairs = compared_scalings(
        chosen, stack_fit.predictions(chosen, values, jobs, "predicting runs"), papers
    )
    if not pairs:
        raise OptionError("no job of these sources was published on two numbers of GPUs")
    if as_json:
        print(json.dumps([asdict(pair) | {"error": pair.error} for pair in pairs], indent=2))
        return
    groups = {name: [p for p in pairs if p.source == name] for name in {p.source for p in pairs}}
    lines = [
        (
            name,
            str(len(some)),
            f"{fmean(abs(pair.error) for pair in some):.1%}",
            f"{median(pair.error for pair in some):+.1%}",
            f"{fmean(pair.low <= pair.published <= pair.high for pair in some):.0%}",
            f"{median(pair.high / pair.low for pair in some):.2f}",
        )
        for name, some in [*sorted(groups.items()), ("all", pairs)]
    ]
    columns = ["source", "ratios", "mean error", "bias", "in 90 % interval", "high / low"]
    title = "throughput per GPU of a job, relative to fewer GPUs"
    print_table(console(), title, columns, lines)


def _plain_run(left: "Left", row: "CellPrediction") -> dict[str, Any]:
    run = left.run
    names = "stack", "model", "gpus", "strategy", "precision", "ep", "cp"
    return {
        "source": row.cell.source,
        "run": run.id,
        **{name: getattr(run, name) for name in names},
        "published_tokens_per_s_per_gpu": row.cell.published,
        "predicted_tokens_per_s_per_gpu": row.predicted,
        "error": row.error,
        "low": row.low,
        "high": row.high,
        "fits_in_memory": left.result.fits_in_memory,
    }


def _print_runs(
    rows: Sequence["Left"], predicted: Sequence["CellPrediction"], *, beside_rules: bool
) -> None:
    """Errors by source; of all sources also by kind, beside baselines, of which none is better.

    Raises Co2simError where one is.
    """
    from analysis.published import run_errors  # noqa: PLC0415 - scipy

    title = "errors of throughput, each source left out of the fit"
    if not beside_rules:
        _print_errors(title, predicted)
        return
    simple = run_errors.baselines(rows)
    beside = [
        [
            replace(row, predicted=getattr(rule, name))
            for row, rule in zip(predicted, simple, strict=True)
        ]
        for name in ("half", "single")
    ]
    kinds = [run_errors.kind_of_run(row) for row in rows]
    _print_errors(title, predicted, beside)
    _print_errors("the same by kind", predicted, beside, kinds)
    if worse := run_errors.beaten(rows, simple):
        raise Co2simError(f"a baseline has smaller errors on {', '.join(worse)}")


def _print_errors(
    title: str,
    rows: Sequence["CellPrediction"],
    beside: Sequence[Sequence["CellPrediction"]] = (),
    groups: Sequence[str] = (),
) -> None:
    """Errors by source, or by `groups`, and of all; `beside` are those of two baselines."""
    from analysis.published.predict import ErrorSummary  # noqa: PLC0415 - scipy
    from co2sim.common.tables import console, print_table  # noqa: PLC0415 - rich

    keys = groups or [row.cell.source for row in rows]
    names = list(dict.fromkeys(keys))
    columns = ["kind" if groups else "source", "runs", "mean error", "median error", "bias"]
    columns += ["worst"]
    intervals = rows[0].has_interval
    columns += ["in 90 % interval", "high / low"] if intervals else []
    columns += ["half of peak", "one MFU"] if beside else []
    lines = []
    for name in [*names, *(["all"] if len(names) > 1 else [])]:
        chosen = [index for index, key in enumerate(keys) if name in {key, "all"}]
        of, *others = (ErrorSummary.of([some[i] for i in chosen]) for some in (rows, *beside))
        lines.append(
            (
                *(name, str(of.cells), f"{of.mape:.1%}", f"{of.median:.1%}"),
                *(f"{of.median_bias:+.1%}", f"{of.worst.error:+.1%}"),
                *((f"{of.inside:.0%}", f"{of.width:.2f}") if intervals else ()),
                *(f"{other.mape:.1%}" for other in others),
            )
        )
    print_table(console(), title, columns, lines)


def goodput(papers: Papers = PAPERS, json_: options.Json = False) -> None:  # noqa: FBT002
    """Predict published mean times to failure and shares of useful time, with signed errors."""
    from analysis.published.goodput import compared, read  # noqa: PLC0415 - scipy, pydantic

    rows = compared(read(papers))
    if json_:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2))
        return
    from co2sim.common.tables import console, print_lines, print_table  # noqa: PLC0415 - rich

    out = console()
    columns = ["source", "what", "published", "predicted", "range", "error"]
    lines = [_goodput_row(row) for row in rows]
    print_table(out, "published, and predicted; nothing is fitted", columns, lines, left=2)
    print_lines(out, "errors of shares are in points, those of times in per cent", "")
    print_lines(out, *dict.fromkeys(_assumed(row) for row in rows if row.cell.assumed))


def whole(
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Write the factors, as the catalog has them."),
    ] = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Predict whole published trainings: GPU-hours beside those of their authors."""
    from analysis.published import whole as compared  # noqa: PLC0415 - pydantic

    rows = compared.predicted()
    if write:
        write_atomically({write: compared.factors_file(rows).encode()})
    if json_:
        print_json([row.to_dict() for row in rows])
        return
    from co2sim.common.tables import console, print_lines, print_table  # noqa: PLC0415 - rich

    out = console()
    print_table(out, "whole trainings", compared.COLUMNS, [row.cells() for row in rows], left=1)
    print_lines(out, *compared.summary(rows), "", *compared.assumed(rows))


def fabric(papers: Papers = PAPERS, json_: options.Json = False) -> None:  # noqa: FBT002
    """Predict published collectives over congested networks; nothing is fitted."""
    from analysis.published import fabric as networks  # noqa: PLC0415 - pydantic, simpy

    rows = networks.compared(papers)
    if json_:
        print_json([asdict(row) | {"error": row.error} for row in rows])
        return
    from co2sim.common.tables import console, print_lines, print_table  # noqa: PLC0415 - rich

    out = console()
    columns = ["source", "row", "jobs", "measured", "predicted", "error"]
    lines = [
        [
            *(row.source, f"{row.row}", f"{row.jobs}"),
            *(f"{row.measured:.3f}", f"{row.predicted:.3f}", f"{100 * row.error:+.1f}"),
        ]
        for row in rows
    ]
    title = "parts of the speed without congestion, errors in per cent"
    print_table(out, title, columns, lines, left=1)
    print_lines(out, *networks.summary(rows))


def _goodput_row(row: "Compared") -> list[str]:
    cell = row.cell
    limit = "> " if cell.at_least else ""
    span = "" if row.low == row.high else f"{row.shown(row.low)} to {row.shown(row.high)}"
    error = f"{100 * row.error:+.1f}" if cell.use == "check" else "input"
    published = f"{limit}{row.shown(row.published)}"
    return [cell.source, cell.where, published, row.shown(row.predicted), span, error]


def _assumed(row: "Compared") -> str:
    what = row.cell.source if row.cell.quantity == "learners" else row.cell.where
    return f"assumed of {what}: {'; '.join(row.cell.assumed)}"
