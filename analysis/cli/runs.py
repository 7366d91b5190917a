"""The command `co2analysis runs`: published training runs beside predictions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from analysis.published.papers import PAPERS
from co2sim.cli import options
from co2sim.common.errors import OptionError, nearest
from co2sim.common.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.published.errors import CellPrediction
    from analysis.published.runs import TrainingRun
    from co2sim.prediction.result import Result

Sources = Annotated[
    list[str] | None,
    typer.Option("--source", metavar="KEY", help="A folder of papers/, such as nanotron."),
]


def runs(  # noqa: PLR0917 - one argument per option
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
    own: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--own",
            help="Calibrate the stack by the run on the fewest GPUs of each series, as `co2sim"
            " calibrate` does, and predict the larger ones.",
        ),
    ] = False,
    memory: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--memory", help="Compare the peak of memory instead."),
    ] = False,
    unfitted: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--unfitted",
            help="Predict the runs that enter no fit: in fp8 or below, of experts, or with"
            " context parallelism.",
        ),
    ] = False,
    jobs: options.Jobs = -1,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Predict published training runs, each by what was fitted without its source.

    Errors are predicted over published throughput, less 1.
    """
    from analysis.published import stack_fit  # noqa: PLC0415 - scipy
    from analysis.published.runs import training_runs  # noqa: PLC0415 - pydantic

    if fit + own + memory + unfitted > 1:
        raise OptionError("give one of --fit, --own, --memory and --unfitted")
    every = training_runs(papers)
    if memory:
        candidates = [run for run in every if run.memory_gib is not None]
    else:
        candidates = [run for run in every if (run.unfitted if unfitted else run.headline)]
    keys = list(dict.fromkeys(run.paper for run in candidates))
    for key in source or ():
        if key not in keys:
            raise OptionError(f"unknown source {key!r}; {nearest(key, keys)}")
    chosen = [run for run in candidates if not source or run.paper in source]
    if fit:
        _fit(every, papers, jobs)
        print(f"written: {papers / stack_fit.RECORD}, and the catalog")
    elif memory:
        _print_memory(chosen, jobs, as_json=json_)
    else:
        rows = _predicted(chosen, papers, jobs, own=own)
        if json_:
            print(json.dumps([_plain(*row) for row in rows], indent=2))
        else:
            title = "errors of throughput, each source left out of the fit"
            _print(title, [row for _, row, _ in rows], intervals=True)


def _predicted(
    chosen: "Sequence[TrainingRun]", papers: Path, jobs: int, *, own: bool
) -> "list[tuple[TrainingRun, CellPrediction, Result]]":
    """Runs beside predictions without their source; of sources in no fit, by all of it.

    With `own` they are the larger runs of each series. Raises OptionError where there are none.
    """
    from analysis.published import stack_fit  # noqa: PLC0415 - scipy
    from analysis.published.run_errors import compared, further_runs  # noqa: PLC0415 - scipy

    record = stack_fit.record(papers)
    apart = None
    if own:
        further = further_runs(chosen, record.left_out, jobs)
        if not further:
            raise OptionError("no series in these sources has runs on more than one number of GPUs")
        chosen = [run.run for run in further]
        results = [run.result for run in further]
        apart = [run.apart for run in further]
    else:
        values = [record.left_out.get(run.paper, record.values) for run in chosen]
        results = stack_fit.predictions(chosen, values, jobs, "predicting runs")
    rows = compared(chosen, results, papers, apart)
    return list(zip(chosen, rows, results, strict=True))


def _fit(every: "Sequence[TrainingRun]", papers: Path, jobs: int) -> None:
    """Fit again, and write what the catalog and `papers` say of it."""
    from analysis.published import run_errors, stack_fit  # noqa: PLC0415 - scipy

    runs_of_fit = [run for run in every if run.headline]
    path = papers / stack_fit.RECORD
    start = stack_fit.record(papers).values if path.is_file() else None
    fitted = stack_fit.fit(runs_of_fit, start, iterations=2, jobs=jobs)
    values = [fitted.left_out[run.paper] for run in runs_of_fit]
    results = stack_fit.predictions(runs_of_fit, values, jobs, "predicting runs")
    further = run_errors.further_runs(runs_of_fit, fitted.left_out, jobs)
    errors = run_errors.errors_of(runs_of_fit, results, further)
    of_memory = run_errors.memory_errors(run_errors.run_memories(every, jobs))
    files = run_errors.catalog_files(fitted.values) | dict(
        [
            run_errors.errors_file(replace(errors, memory=of_memory)),
            run_errors.evidence_file(runs_of_fit, results),
            run_errors.models_file(
                run_errors.models_without(runs_of_fit, results, further), papers
            ),
        ]
    )
    write_atomically({path: stack_fit.written(fitted).encode()} | files)


def _print_memory(chosen: "Sequence[TrainingRun]", jobs: int, *, as_json: bool) -> None:
    """Peaks of memory beside predictions. Raises OptionError for sources without any."""
    from analysis.published.run_errors import run_memories  # noqa: PLC0415 - scipy
    from analysis.published.runs import TrainingRun  # noqa: PLC0415 - pydantic

    rows = run_memories(chosen, jobs)
    if not rows:
        raise OptionError("no run of these sources whose memory is published can be expressed")
    if not as_json:
        _print("errors of the peak of memory", rows)
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
        for row in rows
        for run in row.cell.runs
        if isinstance(run, TrainingRun)
    ]
    print(json.dumps(plain, indent=2))


def _plain(run: "TrainingRun", row: "CellPrediction", result: "Result") -> dict[str, Any]:
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
        "fits_in_memory": result.fits_in_memory,
    }


def _print(title: str, rows: "Sequence[CellPrediction]", *, intervals: bool = False) -> None:
    """Errors by source, and of all."""
    from analysis.published.errors import ErrorSummary, summarized  # noqa: PLC0415 - scipy
    from co2sim.common.tables import console, print_table  # noqa: PLC0415 - rich

    def source(row: "CellPrediction") -> list[str]:
        run = row.cell.setup
        kind = ", experts" if run.ep > 1 else ", context" if run.cp > 1 else ""
        return [f"{row.cell.source}{kind if intervals else ''}"]

    errors = summarized(rows, source)
    if len(errors) > 1:
        errors["all"] = ErrorSummary.of(rows)
    columns = ["source", "runs", "mean error", "median error", "bias", "worst"]
    columns += ["in 90 % interval", "high / low"] if intervals else []
    lines = [
        (
            *(name, str(of.cells), f"{of.mape:.1%}", f"{of.median:.1%}"),
            *(f"{of.median_bias:+.1%}", f"{of.worst.error:+.1%}"),
            *((f"{of.inside:.0%}", f"{of.width:.2f}") if intervals else ()),
        )
        for name, of in errors.items()
    ]
    print_table(console(), title, columns, lines)
