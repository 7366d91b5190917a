"""The command `co2analysis runs`: published training runs beside predictions."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from analysis.published.papers import PAPERS
from co2sim.cli import options
from co2sim.common.errors import OptionError, nearest
from co2sim.common.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from analysis.published.runs import TrainingRun
    from analysis.published.stack_fit import Values
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
    known = [run for run in every if (run.unfitted if unfitted else run.headline)]
    if memory:
        _print_memory(every, source, jobs, as_json=json_)
        return
    _check(source, known)
    if fit:
        _fit(every, papers, jobs)
        print(f"written: {papers / stack_fit.RECORD}, and the catalog")
        return
    chosen = [run for run in known if not source or run.paper in source]
    rows = _predicted(chosen, papers, jobs, own=own)
    if json_:
        print(json.dumps(rows, indent=2))
    else:
        _print(rows)


def _check(source: list[str] | None, known: "Sequence[TrainingRun]") -> None:
    """Refuse a source of which no run is known."""
    keys = list(dict.fromkeys(run.paper for run in known))
    for key in source or ():
        if key not in keys:
            raise OptionError(f"unknown source {key!r}; {nearest(key, keys)}")


def _predicted(
    chosen: "Sequence[TrainingRun]", papers: Path, jobs: int, *, own: bool
) -> list[dict[str, Any]]:
    """Runs beside predictions without their source; of sources in no fit, by all of it."""
    from analysis.published import stack_fit  # noqa: PLC0415 - scipy

    record = stack_fit.record(papers)
    if own:
        return _rows_of_series(chosen, record.left_out, papers, jobs)
    values = [record.left_out.get(run.paper, record.values) for run in chosen]
    results = stack_fit.predictions(chosen, values, jobs, "predicting runs")
    return _rows(chosen, results, papers)


def _fit(every: "Sequence[TrainingRun]", papers: Path, jobs: int) -> None:
    """Fit again, and write what the catalog and `papers` say of it."""
    from analysis.published import run_errors, stack_fit  # noqa: PLC0415 - scipy
    from analysis.published.own_runs import further_runs  # noqa: PLC0415 - scipy
    from analysis.published.run_memory import memory_errors, run_memories  # noqa: PLC0415

    known = [run for run in every if run.headline]
    path = papers / stack_fit.RECORD
    start = stack_fit.record(papers).values if path.is_file() else None
    found = stack_fit.fit(known, start, iterations=2, jobs=jobs)
    values = [found.left_out[run.paper] for run in known]
    results = stack_fit.predictions(known, values, jobs, "predicting runs")
    further = further_runs(known, found.left_out, jobs)
    errors = run_errors.error_model(known, results, further)
    of_memory = memory_errors(run_memories(every, jobs))
    files = run_errors.catalog_files(found.values) | dict(
        [
            run_errors.errors_file(replace(errors, memory=of_memory)),
            run_errors.evidence_file(known, results),
            run_errors.models_file(run_errors.models_without(known, results, further), papers),
        ]
    )
    write_atomically({path: stack_fit.written(found).encode()} | files)


def _print_memory(
    every: "Sequence[TrainingRun]", source: list[str] | None, jobs: int, *, as_json: bool
) -> None:
    """Peaks of memory beside predictions. Raises OptionError for a source without any."""
    from analysis.published.run_memory import run_memories  # noqa: PLC0415 - scipy

    _check(source, [run for run in every if run.memory_gib is not None])
    chosen = [run for run in every if not source or run.paper in source]
    found = run_memories(chosen, jobs)
    if not found:
        raise OptionError("no run of these sources whose memory is published can be expressed")
    rows: list[dict[str, Any]] = [
        {
            "source": one.run.paper,
            "run": one.run.id,
            "kind": one.run.memory_kind,
            "published_gib": one.published,
            "predicted_gib": one.predicted,
            "error": one.error,
        }
        for one in found
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from co2sim.common.tables import console, print_table  # noqa: PLC0415 - rich

    by_source: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_source.setdefault(row["source"], []).append(row)
    table = [(key, *_errors([one["error"] for one in some])) for key, some in by_source.items()]
    if len(table) > 1:
        table.append(("all", *_errors([row["error"] for row in rows])))
    columns = "source", "runs", "mean error", "median error", "bias", "worst"
    print_table(console(), "errors of the peak of memory", columns, table)


def _rows_of_series(
    chosen: "Sequence[TrainingRun]",
    left_out: "Mapping[str, Values]",
    papers: Path,
    jobs: int,
) -> list[dict[str, Any]]:
    """The larger runs of each series. Raises OptionError where there are none."""
    from analysis.published.own_runs import further_runs  # noqa: PLC0415 - scipy

    further = further_runs(chosen, left_out, jobs)
    if not further:
        raise OptionError("no series in these sources has runs on more than one number of GPUs")
    results = [one.result for one in further]
    return _rows([one.run for one in further], results, papers, [one.apart for one in further])


def _rows(
    chosen: "Sequence[TrainingRun]",
    results: "Sequence[Result]",
    papers: Path,
    apart: "Sequence[float] | None" = None,
) -> list[dict[str, Any]]:
    """Runs beside predictions; intervals are by the errors of all other sources."""
    from analysis.published.run_errors import recorded_models  # noqa: PLC0415 - scipy
    from co2sim.prediction.error_model import Situation, error_model  # noqa: PLC0415

    models = recorded_models(papers)
    found = []
    distances = apart or [math.inf] * len(chosen)
    for run, result, distance in zip(chosen, results, distances, strict=True):
        published = run.tokens_per_s_per_gpu
        assert published is not None
        model = models.get(run.paper) or error_model()
        reach = model.reach(Situation.of(result, apart=distance, experts=run.ep > 1))
        row = {
            "source": run.paper,
            "run": run.id,
            "stack": run.stack,
            "model": run.model,
            "gpus": run.gpus,
            "strategy": run.strategy,
            "precision": run.precision,
            "ep": run.ep,
            "cp": run.cp,
            "published_tokens_per_s_per_gpu": published,
            "predicted_tokens_per_s_per_gpu": result.tokens_per_s_per_gpu,
            "error": result.tokens_per_s_per_gpu / published - 1,
            "low": result.tokens_per_s_per_gpu * math.exp(-reach),
            "high": result.tokens_per_s_per_gpu * math.exp(reach),
            "fits_in_memory": result.fits_in_memory,
        }
        found.append(row)
    return found


def _print(rows: "Sequence[dict[str, Any]]") -> None:
    from co2sim.common.tables import console, print_table  # noqa: PLC0415 - rich

    by_source: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kind = ", experts" if row["ep"] > 1 else ", context" if row["cp"] > 1 else ""
        by_source.setdefault(f"{row['source']}{kind}", []).append(row)
    table = [(key, *_figures(some)) for key, some in by_source.items()]
    if len(table) > 1:
        table.append(("all", *_figures(rows)))
    columns = (
        *("source", "runs", "mean error", "median error", "bias", "worst"),
        *("in 90 % interval", "high / low"),
    )
    print_table(console(), "errors of throughput, each source left out of the fit", columns, table)


def _figures(rows: "Sequence[dict[str, Any]]") -> tuple[str, ...]:
    """Mean and median of absolute errors, the median of signed ones, and the largest.

    Then the share of published values in the intervals, and how wide these are in the median.
    """
    inside = [row["low"] <= row["published_tokens_per_s_per_gpu"] <= row["high"] for row in rows]
    return (
        *_errors([row["error"] for row in rows]),
        f"{fmean(inside):.0%}",
        f"{median(row['high'] / row['low'] for row in rows):.2f}",
    )


def _errors(errors: "Sequence[float]") -> tuple[str, ...]:
    """How many; mean and median of absolute ones, the median of signed ones, and the largest."""
    absolute = [abs(error) for error in errors]
    return (
        str(len(errors)),
        f"{fmean(absolute):.1%}",
        f"{median(absolute):.1%}",
        f"{median(errors):+.1%}",
        f"{max(errors, key=abs):+.1%}",
    )
