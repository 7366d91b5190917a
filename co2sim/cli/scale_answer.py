"""`co2sim scale`: strategies over GPU counts, as tables, a CSV file and a figure."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from rich.console import Console

from co2sim.cli.report_page import end_interrupted, end_with_failures, page
from co2sim.common.files import write_atomically
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted, percent, scaled
from co2sim.common.units import figures as shown
from co2sim.prediction.case import Case
from co2sim.prediction.figures import INTERVAL, brief_batch, shared_batch
from co2sim.prediction.published import SpeedComparison, cases_of, compare, read_speeds
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.prediction.totals import result_to_dict
from co2sim.report.bundle import MISSING, installed
from co2sim.report.text import result, totals
from co2sim.report.text.result import (
    division,
    print_assumed,
    print_chosen,
    print_warnings,
    speeds,
)
from co2sim.simulation.noise import Noise
from co2sim.studies.grid import strategy_title
from co2sim.studies.run_all import Failure, Interrupted, Outcome, efficiencies, run_all
from co2sim.studies.table import to_frame


def scale(
    cases: Sequence[Case],
    published: Path | None,
    out: Path,
    jobs: int,
    goal: Goal,
    tokens: float | None,
    report: Path | None,
    *,
    as_json: bool,
) -> None:
    """Simulate all cases, write scale.csv, scale.png and scale.svg into `out`, and print.

    The pictures need the extra `report`: without it one line says so.
    `report` is an HTML page to write besides. At control-C scale.csv holds what is done.
    """
    cells = read_speeds(published) if published else []
    everything = [*cases, *cases_of(cells, cases)]
    outcomes = _outcomes(cases, everything, out, jobs, goal, tokens)
    files = _csv(out, cases, outcomes[: len(cases)], goal, tokens)
    found = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    results = found[: len(cases)]
    comparisons = compare(cells, everything, found)
    named = [
        replace(result, strategy=strategy_title(case.strategy))
        for case, result in zip(cases, results, strict=True)
    ]
    pictures = _pictures(cases, named, comparisons)
    files |= {out / f"scale.{kind}": content for kind, content in pictures.items()}
    if report:
        files[report] = page(cases, results, goal, tokens, comparisons)
    write_atomically(files)
    if as_json:
        printed = {
            "results": [
                {"cluster_key": str(case.cluster), **result_to_dict(case, result, goal, tokens)}
                for case, result in zip(cases, results, strict=True)
            ],
            "published": [comparison.to_dict() for comparison in comparisons],
            "files": [str(path) for path in files],
        }
        print(json.dumps(printed, indent=2))
        return
    _print(cases, results, comparisons, published, out, goal, tokens)
    if report:
        print_lines(console(), f"report  {report}")


def _pictures(
    cases: Sequence[Case], named: Sequence[Result], comparisons: Sequence[SpeedComparison]
) -> dict[str, bytes]:
    """By kind of file; nothing where the extra is missing."""
    if not installed():
        return {}
    from co2sim.report.chart_style import picture  # noqa: PLC0415 - of an extra
    from co2sim.report.charts import chart  # noqa: PLC0415 - as above

    drawn = chart(cases, named, comparisons, speeds(cases[0].noise))
    return {kind: picture(drawn, kind, columns=2) for kind in ("png", "svg")}


def _outcomes(
    cases: Sequence[Case],
    everything: Sequence[Case],
    out: Path,
    jobs: int,
    goal: Goal,
    tokens: float | None,
) -> list[Outcome]:
    """Of everything; where one fails, or at control-C, scale.csv holds the others of the study."""
    try:
        outcomes = run_all(everything, jobs)
    except Interrupted as interrupt:
        done = interrupt.outcomes

        def keep(places: Sequence[int]) -> str:
            own = [i for i in places if i < len(cases)]
            write_atomically(
                _csv(out, [cases[i] for i in own], [done[i] for i in own], goal, tokens)
            )
            return f"those of the study are in {out / 'scale.csv'}"

        end_interrupted(interrupt, keep)
    if any(isinstance(outcome, Failure) for outcome in outcomes):
        write_atomically(_csv(out, cases, outcomes[: len(cases)], goal, tokens))
        names = [case.title for case in everything]
        end_with_failures(names, outcomes, f"no figure; the others are in {out / 'scale.csv'}")
    return outcomes


def _print(
    cases: Sequence[Case],
    results: Sequence[Result],
    comparisons: Sequence[SpeedComparison],
    published: Path | None,
    out: Path,
    goal: Goal,
    tokens: float | None,
) -> None:
    terminal = console()
    if tokens is not None:
        totals.print_answer(terminal, _trainings(cases, results, tokens, goal))
    pairs = zip(cases, results, strict=True)
    for cluster, group in groupby(pairs, key=lambda pair: pair[0].cluster):
        _print_cluster(terminal, str(cluster), list(group), goal, cases[0].noise)
    totals.print_remark(terminal, results, goal, "")
    if tokens is not None:
        _print_totals(terminal, cases, results, tokens, goal)
    if comparisons:
        _print_published(terminal, comparisons)
    elif published:
        what = "tokens_per_s or scalability_ratio of these clusters and this model"
        print_lines(terminal, f"no cell of {published} is a {what}", "")
    print_assumed(terminal, results)
    drawn = f"{out / 'scale.png'}, {out / 'scale.svg'}" if installed() else f"none: {MISSING}"
    print_lines(terminal, f"table   {out / 'scale.csv'}", f"figure  {drawn}")


def _csv(
    out: Path,
    cases: Sequence[Case],
    outcomes: Sequence[Outcome],
    goal: Goal,
    tokens: float | None,
) -> dict[Path, bytes]:
    frame = to_frame(cases, outcomes, goal=goal, tokens=tokens)
    return {out / "scale.csv": frame.to_csv(index=False).encode()}


def _trainings(
    cases: Sequence[Case], results: Sequence[Result], tokens: float, goal: Goal
) -> totals.Trainings:
    """The cases by strategy, GPUs and cluster."""
    found = totals.totals_for(cases, results, tokens, goal)
    return [
        (f"{totals.where(result)} of {case.cluster}", result, total)
        for case, result, total in zip(cases, results, found, strict=True)
    ]


def _print_totals(
    terminal: Console,
    cases: Sequence[Case],
    results: Sequence[Result],
    tokens: float,
    goal: Goal,
) -> None:
    found = totals.totals_for(cases, results, tokens, goal)
    texts = [
        totals.marked([str(case.cluster), strategy_title(case.strategy), str(result.gpus)], result)
        for case, result in zip(cases, results, strict=True)
    ]
    head = f"to train {tokens:.4g} {results[0].unit}s"
    named = list(zip(texts, found, strict=True))
    totals.print_totals(terminal, head, ("cluster", "strategy", "GPUs"), named, 2)
    totals.print_basis(terminal, cases, found, "")


def _title(cluster: str, results: Sequence[Result], noise: Noise) -> str:
    """What all results share."""
    first = results[0]
    parts = [
        f"{cluster}: {first.model}, {first.unit}s/s per GPU by number of GPUs",
        f"{shared_batch(results)}, {first.precision}",
        division(first),
        speeds(noise) if noise.uneven else "",
        result.stacks_of(results),
    ]
    return "; ".join(filter(None, parts))


def _print_cluster(
    terminal: Console,
    cluster: str,
    pairs: Sequence[tuple[Case, Result]],
    goal: Goal,
    noise: Noise,
) -> None:
    """The results with the strategies that were asked for, which may leave numbers open."""
    asked = [(strategy_title(case.strategy), result) for case, result in pairs]
    results = [result for _, result in asked]
    sizes = sorted({result.gpus for result in results})
    first = results[0]
    to_loss = totals.heads(results, goal)
    largest = [(case, result) for case, result in pairs if result.gpus == sizes[-1]]
    scaled_to = iter(efficiencies([case for case, _ in largest], [r for _, r in largest]))
    known = any(r.tokens_per_s_low is not None for r in results if r.gpus == sizes[-1])
    columns = [
        "strategy",
        *(str(size) for size in sizes),
        *([f"{INTERVAL} at {sizes[-1]}"] if known else []),
        f"efficiency at {sizes[-1]}",
        f"exposed at {sizes[-1]}",
        f"batch at {sizes[-1]}",
        f"memory at {sizes[-1]}",
        *(f"{head} at {sizes[-1]}" for head in to_loss),
    ]
    rows = []
    for strategy, group in groupby(asked, key=lambda pair: pair[0]):
        by_size = {result.gpus: result for _, result in group}
        last = by_size[sizes[-1]]
        efficiency, inside = next(scaled_to), last.fits_in_memory
        rows.append(
            [
                strategy,
                *(_throughput(by_size[size]) for size in sizes),
                *([result.relative(last) if inside else "-"] if known else []),
                f"{efficiency:.1%}" if inside and efficiency is not None else "-",
                f"{last.exposed_share:.1%}" if inside else "-",
                brief_batch(last),
                scaled(last.memory_bytes_per_gpu["total"], "B"),
                *(totals.cells(last, goal)[: len(to_loss)] if to_loss else ()),
            ]
        )
    far = _far([pair for pair in asked if pair[1].gpus == sizes[-1]])
    print_table(terminal, _title(cluster, results, noise) + far, columns, rows)
    notes = ["efficiency: throughput per GPU, relative to one node"]
    notes.append("batch: micro-batch x micro-steps, recomputation")
    if not all(result.fits_in_memory for result in results):
        size = scaled(first.gpu_memory_bytes, "B")
        notes.append(f"no fit: needs more than the {size} of a GPU; `co2sim run` says what would")
    print_lines(terminal, *notes)
    close = result.not_told_apart([pair for pair in asked if pair[1].gpus == sizes[-1]])
    result.print_sources(terminal, results, *([close] if close else []), "")
    named = [(f"{how} at {counted(r.gpus, 'GPU')}", r) for how, r in asked]
    print_chosen(terminal, named)
    print_warnings(terminal, named)


def _far(asked: Sequence[tuple[str, Result]]) -> str:
    """What to say of strategies that no published run is near."""
    far = [strategy for strategy, result in asked if result.unlike_published]
    which = "" if len(far) == len(asked) else f" to {', '.join(far)}"
    return f"; no published run is near{which}" if far else ""


def _throughput(result: Result) -> str:
    return f"{result.tokens_per_s_per_gpu:,.0f}" if result.fits_in_memory else "no fit"


def _print_published(terminal: Console, comparisons: Sequence[SpeedComparison]) -> None:
    """The cells by cluster; each row has the number of its note, and the notes follow."""
    notes = list(dict.fromkeys(c.cell.note for c in comparisons if c.cell.note))
    columns = ("strategy", "quantity", "GPUs", "published", "predicted", "error", "use", "note")
    for cluster, group in groupby(comparisons, key=lambda c: c.cell.cluster):
        rows = [
            (
                c.cell.strategy,
                c.cell.kind.replace("_per_s", "/s").replace("_", " "),
                "->".join(map(str, c.cell.sizes)),
                shown(c.cell.value),
                shown(c.predicted),
                percent(c.error),
                c.cell.use,
                str(notes.index(c.cell.note) + 1) if c.cell.note else "",
            )
            for c in group
        ]
        print_table(terminal, f"{cluster}: published and predicted", columns, rows, left=2)
    print_lines(terminal, *(f"note {place}: {note}" for place, note in enumerate(notes, 1)), "")
