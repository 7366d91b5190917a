"""`co2sim sweep`: any parameter over values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from co2sim.cli import options, output
from co2sim.common.cli import command_line, print_json
from co2sim.common.errors import OptionError
from co2sim.common.files import write_atomically
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted
from co2sim.prediction.figures import in_table, shared_batch
from co2sim.prediction.question import OPEN_BATCH, Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.prediction.totals import result_to_dict
from co2sim.report.bundle import check
from co2sim.report.text import answer, totals
from co2sim.report.text.result import (
    print_assumed,
    print_remarks,
    print_sources,
    print_warnings,
    speeds,
    stacks_of,
)
from co2sim.report.text.screen import Screen, print_screen
from co2sim.studies import grid
from co2sim.studies.grid import LazyGrid, Setting, Shard, display_name, setting_name, strategy_title
from co2sim.studies.pools import Engine, opened
from co2sim.studies.results_folder import SweepTable, stream
from co2sim.studies.run_all import Failure, Interrupted, Outcome, run_all
from co2sim.studies.table import check_column, order, to_frame

_MAY_VARY = ("cluster", "model", "strategy")
"""What has to be given, unless it varies."""
_case_options = options.case_options(
    "place", "job", "pipeline", "simulation", optional=_MAY_VARY, defaults=OPEN_BATCH
)

_Varied = Annotated[
    list[str],
    typer.Option(
        "--vary",
        help='What to vary, and its values: --vary inter.bandwidth="25 Gbit/s, 100 Gbit/s",'
        " --vary strategy.tau=1,12,48, --vary gpus=8,64, --vary model.seq_len=1024,2048,"
        ' --vary strategy="ddp, co2:tau=48,worker=node".'
        " Repeatable: all combinations. What varies is not given as an option, too.",
    ),
]
_Folder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Write all figures to Parquet files in this folder, as they come, and print no"
        " table: for up to 10 million cases. What it has already is not computed again.",
    ),
]
_Shard = Annotated[
    str | None,
    typer.Option(
        metavar="N/COUNT",
        help="With --out: only every COUNT-th case, from the N-th on, such as 3/16.",
    ),
]
_Sort = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Sort by a column of the table or of the CSV file, such as step; by falling"
        " values: -tokens_per_s. A --vary name keeps the order that it was given in.",
    ),
]


def _refuse_varied(context: typer.Context, paths: Iterable[str]) -> None:
    """Refuse an option that is given together with a --vary of the same name.

    Of the cluster, the model and the strategy, each has to be given or varied.
    """
    varied = set(paths)
    for path in (*paths, *_MAY_VARY):
        source, flag = context.get_parameter_source(path), f"--{path.replace('_', '-')}"
        typed = source is not None and source.name == "COMMANDLINE"
        if typed and path in varied:
            raise OptionError(f"{flag} is given, and --vary {path}, too; leave one of them out")
        stated = typed or (source is not None and source.name == "DEFAULT_MAP")
        if not stated and path not in varied:
            raise OptionError(f"{flag} is missing; give it, or --vary {path}=...")


@_case_options
@options.goal_options
def sweep(  # noqa: PLR0913, PLR0917 - one argument per option
    context: typer.Context,
    case: Question,
    goal: Goal,
    over: _Varied,
    csv: Annotated[Path | None, typer.Option(help="Write all figures to this CSV file.")] = None,
    out: _Folder = None,
    shard: _Shard = None,
    sort: _Sort = None,
    jobs: options.Jobs = -1,
    engine: options.Name = "loky",
    scheduler: options.Scheduler = None,
    tokens: totals.Tokens = None,
    full: options.Full = False,  # noqa: FBT002
    report: options.Report = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Vary any parameter over values, in parallel."""
    varied = options.pairs(over, "--vary")
    _refuse_varied(context, varied)
    who = options.engine(context, engine, scheduler, jobs)
    if out is not None:
        _refuse_beside_out({"--csv": csv, "--sort": sort, "--report": report})
        part = Shard() if shard is None else Shard.read(shard)
        table = SweepTable(LazyGrid.of(case, varied), out, part, goal, tokens)
        _keep(table, who, as_json=json_)
        return
    if shard is not None:
        raise OptionError("--shard needs a folder: give --out, too")
    settings = grid.settings(varied)
    cases = grid.cases_of(case, settings)
    check("--report", report)
    if sort is not None:
        check_column(sort, settings, goal, tokens)
    study = _Swept(cases=cases, settings=settings, outcomes=(), goal=goal, tokens=tokens)
    show = partial(_show, csv=csv, report=report, full=full, ordered=bool(sort), as_json=json_)
    _sweep(study, who, sort, show, "above" if csv is None else f"in {csv}")


@dataclass(frozen=True, kw_only=True)
class _Swept:
    """Cases with what each varies and what became of it, and what is asked of them besides."""

    cases: Sequence[Question]
    settings: Sequence[Setting]
    outcomes: Sequence[Outcome]
    goal: Goal
    tokens: float | None

    @property
    def results(self) -> list[Result]:
        """Of those that gave one."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Result)]

    def at(
        self, places: Sequence[int], outcomes: Sequence[Outcome] | Mapping[int, Outcome]
    ) -> "_Swept":
        """Those at some places, with these outcomes."""
        return replace(
            self,
            cases=[self.cases[n] for n in places],
            settings=[self.settings[n] for n in places],
            outcomes=[outcomes[n] for n in places],
        )

    def figures(self) -> list[dict[str, object]]:
        """What --json prints."""
        return [
            {"setting": dict(setting)}
            | (
                {"error": outcome.reason}
                if isinstance(outcome, Failure)
                else result_to_dict(case, outcome, self.goal, self.tokens)
            )
            for case, setting, outcome in zip(self.cases, self.settings, self.outcomes, strict=True)
        ]


def _sweep(
    study: _Swept, engine: Engine, sort: str | None, show: Callable[..., None], where: str
) -> None:
    """Simulate all cases, and show them in order. Those that fail are named.

    At control-C those that are done are shown, and written.
    """

    def ordered(swept: _Swept) -> _Swept:
        if sort is None:
            return swept
        frame = to_frame(swept.cases, swept.outcomes, swept.settings, swept.goal, swept.tokens)
        return swept.at(order(frame, sort), swept.outcomes)

    try:
        outcomes = run_all(study.cases, engine=engine)
    except Interrupted as interrupt:
        done, missing = interrupt.outcomes, str(interrupt)

        def keep(places: Sequence[int]) -> str:
            show(ordered(study.at(places, done)), missing=missing)
            return f"they are {where}"

        output.end_interrupted(interrupt, keep)
    swept = ordered(replace(study, outcomes=outcomes))
    show(swept)
    if len(swept.results) < len(outcomes):
        kept = f"the others are {where}"
        output.end_with_failures(map(setting_name, swept.settings), swept.outcomes, kept)


def _refuse_beside_out(flags: dict[str, object]) -> None:
    """What would need all cases in memory."""
    for flag, value in flags.items():
        if value is not None:
            raise OptionError(
                f"{flag} and --out are both given; --out writes a folder of Parquet files, in the"
                " order of the grid, and nothing else: leave one of them out"
            )


def _show(
    swept: _Swept,
    csv: Path | None,
    report: Path | None,
    missing: str = "",
    *,
    full: bool,
    ordered: bool,
    as_json: bool,
) -> None:
    """Write the files and print; `missing` says how many were done before control-C.

    Unless they are `ordered` by the user, cases that do not fit on the screen begin with the best.
    """
    files, screen = {}, _screen(swept, ordered=ordered)
    if csv:
        frame = to_frame(swept.cases, swept.outcomes, swept.settings, swept.goal, swept.tokens)
        files[csv] = frame.to_csv(index=False).encode()
    if report:
        from co2sim.report.sweep_page import Swept, page  # noqa: PLC0415 - Altair

        command = command_line("co2sim")
        about = Swept(
            **vars(swept), screen=screen, rows=swept.figures(), command=command, missing=missing
        )
        files[report] = output.rendered(page(about))
    write_atomically(files)
    if as_json:
        print_json(swept.figures())
        return
    print_screen(screen, output.more(full=full, files=[csv, report]), whole=full)
    if full:
        print_lines(console(), "")
        _print_details(console(), swept)


_FEW = 8
"""Cases that a screen shows in the order that they have."""


def _screen(swept: _Swept, *, ordered: bool) -> Screen:
    """The answer: the best, and a row for each case; the best first where there are many."""
    goal, tokens = swept.goal, swept.tokens
    varied = list(swept.settings[0])
    trained = totals.totals_for(swept.cases, swept.outcomes, tokens, goal)
    short = answer.labels(strategy_title(case.strategy) for case in swept.cases)
    rows = []
    for case, setting, result, total in zip(
        swept.cases, swept.settings, swept.outcomes, trained, strict=True
    ):
        if isinstance(result, Failure):
            continue
        method = short[strategy_title(case.strategy)]
        cells = [method if path == "strategy" else display_name(setting[path]) for path in varied]
        name = ", ".join(map(_named, varied, cells))
        cells = [answer.marked(cell, result) if cell is method else cell for cell in cells]
        about = {"name": name, "label": name, "method": method}
        rows.append((answer.Simulated(**about, case=case, result=result, totals=total), cells))
    if len(rows) > _FEW and not ordered:
        rows.sort(key=lambda row: answer.pace(row[0]), reverse=True)
    first = rows[0][0].result
    job = answer.job(first, tokens) if "model" not in varied else ""
    alike = [
        next(iter(texts))
        for texts in (
            {entry.result.strategy for entry, _ in rows},
            {counted(entry.result.gpus, "GPU") for entry, _ in rows},
        )
        if len(texts) == 1
    ]
    places = {answer.place(entry.result) for entry, _ in rows}
    clusters = {display_name(entry.case.cluster) for entry, _ in rows}
    place = next((list(names) for names in (places, clusters) if len(names) == 1), [])
    return answer.of_several(
        [entry for entry, _ in rows],
        (varied, [cells for _, cells in rows]),
        answer.setup([*filter(None, [job]), *place, *alike], swept.results),
        goal,
        tokens,
        key=answer.legend(
            {entry.method: entry.result.strategy for entry, _ in rows}, results=swept.results
        )
        if "strategy" in varied
        else (),
    )


def _named(path: str, cell: str) -> str:
    """A value that varies, in a sentence."""
    words = {"gpus": f"{cell} GPUs", "strategy": cell, "cluster": cell, "model": cell}
    return words.get(path, f"{path} {cell}")


def _print_details(terminal: Console, swept: _Swept) -> None:
    """All figures, each table once."""
    cases, settings, outcomes = swept.cases, swept.settings, swept.outcomes
    results, goal, tokens = swept.results, swept.goal, swept.tokens
    unit = results[0].unit
    columns = [*settings[0], *(one.headed(results[0]) for one in in_table("sweep"))]
    currencies = {r.currency for r in results if r.currency is not None}
    columns += [f"{' or '.join(sorted(currencies))} per billion {unit}s"] if currencies else []
    mixed = len(currencies) > 1
    rows = [
        [*map(display_name, setting.values()), *_cells(outcome, len(columns) - len(setting), mixed)]
        for setting, outcome in zip(settings, outcomes, strict=True)
    ]
    to_loss = totals.heads(results, goal)
    columns += to_loss
    for row, outcome in zip(rows, outcomes, strict=True):
        loss = totals.cells(outcome, goal) if to_loss and isinstance(outcome, Result) else ["", ""]
        row.extend(loss[: len(to_loss)])
    left = len(settings[0])
    titles = [strategy_title(case.strategy) for case in cases]
    taken = [
        how if isinstance(one, Failure) else one.strategy
        for how, one in zip(titles, outcomes, strict=True)
    ]
    if taken != titles:
        columns.insert(left, "chosen")
        for row, outcome in zip(rows, outcomes, strict=True):
            row.insert(left, outcome.strategy if isinstance(outcome, Result) else "")
        left += 1
    title = _title(swept)
    trained = [] if tokens is None else totals.totals_for(cases, outcomes, tokens, goal)
    print_table(terminal, title, columns, rows, left=left)
    _print_notes(terminal, results, goal)
    if tokens is not None:
        texts = [[*map(display_name, setting.values())] for setting in settings]
        paths = list(settings[0])
        totals.print_totals(terminal, tokens, paths, texts, outcomes, trained, left=len(paths))
        print_lines(terminal, *totals.basis_lines(cases, trained), "")
    print_remarks(terminal, results)
    named = [
        (setting_name(setting, " "), one)
        for setting, one in zip(settings, outcomes, strict=True)
        if isinstance(one, Result)
    ]
    print_warnings(terminal, named)
    print_assumed(terminal, results)


def _title(swept: _Swept) -> str:
    """What all rows share, and what varies."""
    varied = swept.settings[0]
    parts = [
        ", ".join([*_shared(swept), f"by {' and '.join(varied)}"]),
        shared_batch(swept.results),
        speeds(swept.cases[0].noise, varied=varied),
        "" if "stack" in varied else stacks_of(swept.results),
    ]
    return "; ".join(filter(None, parts))


def _shared(swept: _Swept) -> list[str]:
    """What all cases have in common: inputs, strategy, GPUs; as asked for where some failed."""
    if len(swept.results) == len(swept.cases):
        rows = [
            (f"{r.model} on {r.cluster}", r.strategy, counted(r.gpus, "GPU")) for r in swept.results
        ]
    else:
        rows = [
            (
                f"{display_name(case.model)} on {display_name(case.cluster)}",
                display_name(case.strategy),
                counted(case.gpus, "GPU") if case.gpus else "",
            )
            for case in swept.cases
        ]
    return [column[0] for column in zip(*rows, strict=True) if len({*column}) == 1 and column[0]]


def _print_notes(terminal: Console, results: Sequence[Result], goal: Goal) -> None:
    notes = ["batch: micro-batch x micro-steps, recomputation"]
    if not all(r.fits_in_memory for r in results):
        notes.append("* needs more than the memory of a GPU: as fast as if it fitted")
    if not any(r.fits_in_memory for r in results):
        notes.append("none fits: run one of them (`co2sim run`) to see what would")
    print_lines(terminal, *notes)
    print_sources(terminal, results)
    totals.print_worth(terminal, results, goal)
    print_lines(terminal, "")


def _cells(outcome: Outcome, count: int, mixed: bool) -> list[str]:  # noqa: FBT001
    """The first `count` figures of a row; the last is the cost, which not every cluster has.

    It names its currency if the column is `mixed`.
    """
    if isinstance(outcome, Failure):
        return ["failed", *[""] * (count - 1)]
    r = outcome
    currency = f" {r.currency}" if mixed else ""
    cost = (
        "-" if r.cost_per_billion_tokens is None else f"{r.cost_per_billion_tokens:,.2f}{currency}"
    )
    cells = [*(figure.shown(r) or "-" for figure in in_table("sweep")), cost]
    return cells[:count]


def _keep(table: SweepTable, engine: Engine, *, as_json: bool) -> None:
    """Simulate what the folder does not have, and say so; exit code 1 if a case failed."""
    with opened(engine, len(table.shard.places(len(table.points)))) as pool:
        kept = stream(table, pool)
    if as_json:
        print_json(kept.summary())
    else:
        reused = f", {kept.reused:,} were there already" if kept.reused else ""
        computed = f"{counted(kept.computed, 'case')} simulated{reused}"
        print(f"{computed}: all {kept.cases:,} in {kept.folder}")
    if kept.failed:
        failed = [(setting_name(setting), failure) for setting, failure in kept.failures]
        output.end_with(failed, kept.failed, kept.cases, f"the others are in {kept.folder}")
