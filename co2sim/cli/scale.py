"""`co2sim scale` and `report`: strategies over GPU counts, as tables and pictures, or as a page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from co2sim.cli import options, output
from co2sim.common.cli import print_json, refuse_twice
from co2sim.common.files import write_atomically
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted, scaled
from co2sim.prediction.figures import INTERVAL, brief_batch, shared_batch
from co2sim.prediction.published import SpeedComparison, cases_of, compare, read_speeds
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.prediction.totals import Totals, result_to_dict
from co2sim.report.bundle import MISSING, check, installed
from co2sim.report.tables import COMPARED, comparison_cells
from co2sim.report.text import answer, totals
from co2sim.report.text.cases import over_gpus
from co2sim.report.text.result import (
    not_told_apart,
    print_assumed,
    print_chosen,
    print_sources,
    print_warnings,
    relative,
    speeds,
    stacks_of,
)
from co2sim.report.text.screen import print_screen
from co2sim.simulation.noise import Noise
from co2sim.strategies import parse
from co2sim.strategies.step import title
from co2sim.studies import grid
from co2sim.studies.grid import strategy_title
from co2sim.studies.run_all import Interrupted, Outcome, efficiencies, run_all
from co2sim.studies.table import to_frame

_Clusters = Annotated[
    list[str],
    typer.Option("--cluster", "-c", help="Catalog name or TOML file. Repeatable: one panel each."),
]
_Strategies = Annotated[
    list[str], typer.Option("--strategy", "-s", help="As in `run`. Repeatable: one line each.")
]
_Counts = Annotated[
    str | None,
    typer.Option(
        "--gpus", "-g", help="Counts, such as 8,16,32; default: one node, doubled up to all."
    ),
]
_Varied = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        help="A number of the cluster, the model or the batch, and its values: --vary"
        ' inter.bandwidth="25 Gbit/s, 100 Gbit/s". A panel for each. Repeatable: all combinations.',
    ),
]
_Published = Annotated[
    Path | None,
    typer.Option(help="Published cells to compare with the prediction (papers/*/results.toml)."),
]


@options.open_job
@options.goal_options
def scale(  # noqa: PLR0913, PLR0917 - one argument per option
    job: Question,
    goal: Goal,
    cluster: _Clusters,
    strategy: _Strategies,
    gpus: _Counts = None,
    published: _Published = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for scale.csv, scale.png and scale.svg.")
    ] = Path("out"),
    jobs: options.Jobs = 1,
    tokens: totals.Tokens = None,
    full: options.Full = False,  # noqa: FBT002
    report: options.Report = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Compare strategies over GPU counts: a table, a CSV file and a figure."""
    refuse_twice("strategy", (title(parse(text)) for text in strategy))
    refuse_twice("cluster", cluster)
    cases = grid.over_sizes(job, cluster, strategy, gpus)
    check("--report", report)
    compared = _compared(cases, published, jobs, goal, tokens, out / "scale.csv")
    screen = over_gpus(**vars(compared))
    files = _csv(out / "scale.csv", cases, compared.results, goal, tokens)
    files |= {out / f"scale.{kind}": content for kind, content in _pictures(compared).items()}
    if report:
        study = output.study(**vars(compared), screen=over_gpus(**vars(compared), whole=True))
        files[report] = output.study_page(study)
    write_atomically(files)
    if json_:
        print_json(_plain(compared, list(files)))
        return
    lacking = "" if installed() else MISSING
    more = output.more(full=full, files=files, lacking=lacking)
    print_screen(screen, more, whole=full)
    if full:
        print_lines(console(), "")
        _print_details(console(), compared, published)


@options.open_job
@options.goal_options
def report(  # noqa: PLR0913, PLR0917 - one argument per option
    job: Question,
    goal: Goal,
    cluster: _Clusters,
    strategy: _Strategies,
    gpus: _Counts = None,
    over: _Varied = None,
    published: _Published = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE.html", help="The page to write.")
    ] = Path("out/report.html"),
    jobs: options.Jobs = 1,
    tokens: totals.Tokens = None,
) -> None:
    """Compare strategies over GPU counts: one HTML page to hand on, with all data inside."""
    check("--out", out)
    refuse_twice("strategy", (title(parse(text)) for text in strategy))
    refuse_twice("cluster", cluster)
    varied = options.pairs(over, "--vary")
    settings = grid.settings(varied) if varied else [{}]
    named = grid.cases_by_panel(job, cluster, strategy, gpus, settings)
    compared = _compared([case for _, case in named], published, jobs, goal, tokens)
    panels = [name for name, _ in named]
    whole = over_gpus(**vars(compared), panels=panels, whole=True)
    study = output.study(**vars(compared), panels=panels, screen=whole)
    write_atomically({out: output.study_page(study)})
    print_screen(over_gpus(**vars(compared), panels=panels), f"in {out}")


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """Cases with their results, published speeds beside them, and what is to be trained."""

    cases: Sequence[Question]
    results: Sequence[Result]
    comparisons: Sequence[SpeedComparison]
    goal: Goal
    tokens: float | None


def _compared(
    cases: Sequence[Question],
    published: Path | None,
    jobs: int,
    goal: Goal,
    tokens: float | None,
    table: Path | None = None,
) -> _Compared:
    """Simulate the cases, and what was published.

    Where one fails, or at control-C, `table` holds the others of the study, if there is to be one.
    """
    cells = read_speeds(published) if published else []
    everything = [*cases, *cases_of(cells, cases)]
    try:
        outcomes = run_all(everything, jobs)
    except Interrupted as interrupt:
        if table is None:
            raise
        done = {n: one for n, one in interrupt.outcomes.items() if n < len(cases)}

        def keep(_: object) -> str:
            some = [cases[n] for n in done]
            write_atomically(_csv(table, some, [*done.values()], goal, tokens))
            return f"those of the study are in {table}"

        output.end_interrupted(interrupt, keep)
    results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    if len(results) < len(outcomes):
        kept = "nothing was written"
        if table:
            write_atomically(_csv(table, cases, outcomes[: len(cases)], goal, tokens))
            kept = f"no figure; the others are in {table}"
        output.end_with_failures([case.title for case in everything], outcomes, kept)
    return _Compared(
        cases=cases,
        results=results[: len(cases)],
        comparisons=compare(cells, everything, results),
        goal=goal,
        tokens=tokens,
    )


def _csv(
    table: Path,
    cases: Sequence[Question],
    outcomes: Sequence[Outcome],
    goal: Goal,
    tokens: float | None,
) -> dict[Path, bytes]:
    frame = to_frame(cases, outcomes, goal=goal, tokens=tokens)
    return {table: frame.to_csv(index=False).encode()}


def _pictures(compared: _Compared) -> dict[str, bytes]:
    """By kind of file; nothing where the extra is missing."""
    if not installed():
        return {}
    from co2sim.report.chart_style import picture  # noqa: PLC0415 - of an extra
    from co2sim.report.charts import chart  # noqa: PLC0415 - as above

    cases = compared.cases
    named = [
        replace(result, strategy=strategy_title(case.strategy))
        for case, result in zip(cases, compared.results, strict=True)
    ]
    drawn = chart(cases, named, compared.comparisons, speeds(cases[0].noise))
    return {kind: picture(drawn, kind, columns=2) for kind in ("png", "svg")}


def _plain(compared: _Compared, files: Sequence[Path]) -> dict[str, Any]:
    goal, tokens = compared.goal, compared.tokens
    return {
        "results": [
            {"cluster_key": str(case.cluster), **result_to_dict(case, result, goal, tokens)}
            for case, result in zip(compared.cases, compared.results, strict=True)
        ],
        "published": [comparison.to_dict() for comparison in compared.comparisons],
        "files": [str(path) for path in files],
    }


def _asked(case: Question) -> str:
    return strategy_title(case.strategy)


def _print_details(terminal: Console, compared: _Compared, published: Path | None) -> None:
    """All figures, each table once."""
    cases, results = compared.cases, compared.results
    goal, tokens = compared.goal, compared.tokens
    pairs = zip(cases, results, strict=True)
    for cluster, group in groupby(pairs, key=lambda pair: pair[0].cluster):
        _print_cluster(terminal, str(cluster), list(group), goal, cases[0].noise)
    totals.print_worth(terminal, results, goal, "")
    if tokens is not None:
        trained = totals.totals_for(cases, results, tokens, goal)
        for cluster, some in groupby(
            zip(cases, results, trained, strict=True), key=lambda each: each[0].cluster
        ):
            _print_totals(terminal, str(cluster), tokens, *zip(*some, strict=True))
        print_lines(terminal, *totals.basis_lines(cases, trained), "")
    if compared.comparisons:
        _print_published(terminal, compared.comparisons)
    elif published:
        what = "tokens_per_s or scalability_ratio of these clusters and this model"
        print_lines(terminal, f"no cell of {published} is a {what}", "")
    print_assumed(terminal, results)


def _print_totals(
    terminal: Console,
    cluster: str,
    tokens: float,
    cases: Sequence[Question],
    results: Sequence[Result],
    trained: Sequence[Totals | None],
) -> None:
    """What it takes on one cluster: the columns that name a case are repeated where it is cut."""
    short = answer.labels(map(_asked, cases))
    rows = [[short[_asked(c)], f"{r.gpus:,}"] for c, r in zip(cases, results, strict=True)]
    columns = ("strategy", "GPUs")
    totals.print_totals(terminal, tokens, columns, rows, results, trained, left=2, where=cluster)


def _title(cluster: str, results: Sequence[Result], noise: Noise) -> str:
    """What all results share."""
    first = results[0]
    parts = [
        f"{cluster}: {first.model}, {first.unit}s/s per GPU by number of GPUs",
        f"{shared_batch(results)}, {first.precision}",
        first.division,
        speeds(noise) if noise.uneven else "",
        stacks_of(results),
    ]
    return "; ".join(filter(None, parts))


def _print_cluster(
    terminal: Console,
    cluster: str,
    pairs: Sequence[tuple[Question, Result]],
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
    ranged = any(r.tokens_per_s_low is not None for r in results if r.gpus == sizes[-1])
    columns = [
        "strategy",
        *(str(size) for size in sizes),
        *([f"{INTERVAL} at {sizes[-1]}"] if ranged else []),
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
                *([relative(last) if inside else "-"] if ranged else []),
                str(efficiency) if inside and efficiency is not None else "-",
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
    close = not_told_apart([pair for pair in asked if pair[1].gpus == sizes[-1]])
    print_sources(terminal, results, *([close] if close else []), "")
    named = [(f"{how} at {counted(r.gpus, 'GPU')}", r) for how, r in asked]
    print_chosen(terminal, named)
    print_warnings(terminal, named)


def _far(named: Sequence[tuple[str, Result]]) -> str:
    """What to say of strategies that no published run is near."""
    far = [strategy for strategy, result in named if result.unlike_published]
    which = "" if len(far) == len(named) else f" to {', '.join(far)}"
    return f"; no published run is near{which}" if far else ""


def _throughput(result: Result) -> str:
    return f"{result.tokens_per_s_per_gpu:,.0f}" if result.fits_in_memory else "no fit"


def _print_published(terminal: Console, comparisons: Sequence[SpeedComparison]) -> None:
    """The cells by cluster; each row has the number of its note, and the notes follow."""
    notes = list(dict.fromkeys(c.cell.note for c in comparisons if c.cell.note))
    for cluster, group in groupby(comparisons, key=lambda c: c.cell.cluster):
        rows = [
            [
                *comparison_cells(c),
                c.cell.use,
                str(notes.index(c.cell.note) + 1) if c.cell.note else "",
            ]
            for c in group
        ]
        columns = (*COMPARED, "use", "note")
        print_table(terminal, f"{cluster}: published and predicted", columns, rows, left=2)
    print_lines(terminal, *(f"note {turn}: {note}" for turn, note in enumerate(notes, 1)), "")
