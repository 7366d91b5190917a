"""`co2sim sweep`: any parameter over values."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from co2sim.cli import report_page
from co2sim.cli.report_page import end_interrupted, end_with, end_with_failures
from co2sim.common.cli import command_line
from co2sim.common.files import write_atomically
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted
from co2sim.prediction.case import Case
from co2sim.prediction.figures import in_table, shared_batch
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.prediction.totals import Totals, result_to_dict
from co2sim.report.text import result, totals
from co2sim.report.text.result import (
    print_assumed,
    print_remarks,
    print_warnings,
    speeds,
    stacks_of,
)
from co2sim.studies.grid import Setting, display_name, strategy_title
from co2sim.studies.pools import Engine, opened
from co2sim.studies.results_folder import FolderSummary, SweepTable, stream
from co2sim.studies.run_all import Failure, Interrupted, Outcome, run_all
from co2sim.studies.table import check_column, order, to_frame

if TYPE_CHECKING:
    from co2sim.report.sweep_page import Swept


@dataclass(frozen=True, kw_only=True)
class SweepOutput:
    """What becomes of the figures: files to write, the column to sort by, and what is added.

    `report` is an HTML page.
    """

    csv: Path | None
    report: Path | None
    sort: str | None
    goal: Goal
    tokens: float | None
    as_json: bool


def sweep(
    cases: Sequence[Case], settings: Sequence[Setting], engine: Engine, wishes: SweepOutput
) -> None:
    """Simulate all cases; `settings` says what each varies. Those that fail are named.

    At control-C those that are done are shown, and written.
    """
    csv = wishes.csv
    if wishes.sort is not None:
        check_column(wishes.sort, settings, wishes.goal, wishes.tokens)
    try:
        outcomes = run_all(cases, engine=engine)
    except Interrupted as interrupt:
        done, missing = interrupt.outcomes, str(interrupt)

        def keep(places: Sequence[int]) -> str:
            part = [cases[i] for i in places], [settings[i] for i in places]
            _show(*part, [done[i] for i in places], wishes, missing)
            return "they are above" if csv is None else f"they are in {csv}"

        end_interrupted(interrupt, keep)
    settings, shown = _show(cases, settings, outcomes, wishes)
    if any(isinstance(outcome, Failure) for outcome in shown):
        names = (
            ", ".join(f"{path}={display_name(value)}" for path, value in setting.items())
            for setting in settings
        )
        kept = "the others are above" if csv is None else f"the others are in {csv}"
        end_with_failures(names, shown, kept)


def _show(
    cases: Sequence[Case],
    settings: Sequence[Setting],
    outcomes: Sequence[Outcome],
    wishes: SweepOutput,
    missing: str = "",
) -> tuple[Sequence[Setting], Sequence[Outcome]]:
    """Write the files and print; gives the settings and the outcomes as they are sorted.

    `missing` says how many cases were done before control-C.
    """
    csv, goal, tokens = wishes.csv, wishes.goal, wishes.tokens
    frame = to_frame(cases, outcomes, settings, goal, tokens)
    if wishes.sort is not None:
        places = order(frame, wishes.sort)
        frame = frame.iloc[places]
        cases, settings = [cases[i] for i in places], [settings[i] for i in places]
        outcomes = [outcomes[i] for i in places]
    rows = [
        {"setting": dict(setting), **_figures(case, outcome, goal, tokens)}
        for case, setting, outcome in zip(cases, settings, outcomes, strict=True)
        if wishes.as_json or wishes.report
    ]
    files = {} if csv is None else {csv: frame.to_csv(index=False).encode()}
    if wishes.report:
        from co2sim.report.sweep_page import Swept  # noqa: PLC0415 - Altair

        swept = Swept(
            cases=cases,
            settings=settings,
            outcomes=outcomes,
            rows=rows,
            goal=goal,
            tokens=tokens,
            command=command_line("co2sim"),
            missing=missing,
        )
        files[wishes.report] = _page(swept)
    write_atomically(files)
    if wishes.as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print(cases, settings, outcomes, goal, tokens)
        print_lines(console(), *([] if csv is None else [f"table   {csv}"]))
    report_page.print_where(wishes.report, quiet=wishes.as_json)
    return settings, outcomes


def _page(swept: "Swept") -> bytes:
    from co2sim.report import html, sweep_page  # noqa: PLC0415 - Altair

    return html.render(sweep_page.page(swept))


def _figures(case: Case, outcome: Outcome, goal: Goal, tokens: float | None) -> dict[str, object]:
    if isinstance(outcome, Failure):
        return {"error": outcome.reason}
    return result_to_dict(case, outcome, goal, tokens)


def _print(
    cases: Sequence[Case],
    settings: Sequence[Setting],
    outcomes: Sequence[Outcome],
    goal: Goal,
    tokens: float | None,
) -> None:
    results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
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
        known = totals.cells(outcome, goal) if to_loss and isinstance(outcome, Result) else ["", ""]
        row.extend(known[: len(to_loss)])
    left = len(settings[0])
    asked = [strategy_title(case.strategy) for case in cases]
    taken = [
        how if isinstance(one, Failure) else one.strategy
        for how, one in zip(asked, outcomes, strict=True)
    ]
    if taken != asked:
        columns.insert(left, "chosen")
        for row, outcome in zip(rows, outcomes, strict=True):
            row.insert(left, outcome.strategy if isinstance(outcome, Result) else "")
        left += 1
    terminal = console()
    title = _title(cases, settings, outcomes)
    found = None if tokens is None else totals.totals_for(cases, outcomes, tokens, goal)
    if found is not None:
        totals.print_answer(terminal, _trainings(settings, outcomes, found))
    print_table(terminal, title, columns, rows, left=left)
    _print_notes(terminal, results, goal)
    if found is not None:
        texts = [
            totals.marked([*map(display_name, setting.values())], outcome)
            for setting, outcome in zip(settings, outcomes, strict=True)
        ]
        head = f"to train {tokens:.4g} {unit}s"
        pairs = list(zip(texts, found, strict=True))
        totals.print_totals(terminal, head, list(settings[0]), pairs, len(settings[0]))
        totals.print_basis(terminal, cases, found, "")
    named = [
        (" ".join(f"{path}={display_name(value)}" for path, value in setting.items()), outcome)
        for setting, outcome in zip(settings, outcomes, strict=True)
        if isinstance(outcome, Result)
    ]
    print_remarks(terminal, results)
    print_warnings(terminal, named)
    print_assumed(terminal, results)


def _title(cases: Sequence[Case], settings: Sequence[Setting], outcomes: Sequence[Outcome]) -> str:
    """What all rows share, and what varies."""
    results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    parts = [
        ", ".join([*_shared(cases, outcomes), f"by {' and '.join(settings[0])}"]),
        shared_batch(results),
        speeds(cases[0].noise, varied=settings[0]),
        "" if "stack" in settings[0] else stacks_of(results),
    ]
    return "; ".join(filter(None, parts))


def _trainings(
    settings: Sequence[Setting], outcomes: Sequence[Outcome], found: Sequence[Totals | None]
) -> totals.Trainings:
    """The cases with figures, by what varies."""
    names = (
        ", ".join(f"{path}={display_name(value)}" for path, value in setting.items())
        for setting in settings
    )
    return [
        (name, outcome, total)
        for name, outcome, total in zip(names, outcomes, found, strict=True)
        if isinstance(outcome, Result)
    ]


def _shared(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> list[str]:
    """What all cases have in common, those that failed included: inputs, strategy, GPUs."""
    results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    whole = len(results) == len(outcomes)

    def same(shown: Callable[[Result], str], asked: Callable[[Case], object]) -> str:
        """What all results show; where some are missing, if it was asked of all alike."""
        alike = whole or len({str(asked(case)) for case in cases}) == 1
        return _same([shown(result) for result in results]) if alike else ""

    def inputs(case: Case) -> object:
        return _names(case), sorted(case.overrides.items())

    found = (
        same(lambda r: f"{r.model} on {r.cluster}", inputs) or _same(list(map(_names, cases))),
        same(lambda r: r.strategy, lambda case: display_name(case.strategy)),
        same(lambda r: counted(r.gpus, "GPU"), lambda case: case.gpus or inputs(case)),
    )
    return [part for part in found if part]


def _names(case: Case) -> str:
    return f"{display_name(case.model)} on {display_name(case.cluster)}"


def _same(texts: Sequence[str]) -> str:
    """The text that all are, or none."""
    return texts[0] if len(set(texts)) == 1 else ""


def _print_notes(terminal: Console, results: Sequence[Result], goal: Goal) -> None:
    notes = ["batch: micro-batch x micro-steps, recomputation"]
    if not all(r.fits_in_memory for r in results):
        notes.append("* needs more than the memory of a GPU: as fast as if it fitted")
    if not any(r.fits_in_memory for r in results):
        notes.append("none fits: run one of them (`co2sim run`) to see what would")
    print_lines(terminal, *notes)
    result.print_sources(terminal, results)
    totals.print_remark(terminal, results, goal)
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
    cells = [*(one.shown(r) or "-" for one in in_table("sweep")), cost]
    return cells[:count]


__all__ = ["SweepTable", "keep"]


def keep(table: SweepTable, engine: Engine, *, as_json: bool) -> None:
    """Simulate what the folder does not have, and say so; exit code 1 if a case failed."""
    with opened(engine, len(table.shard.places(len(table.points)))) as pool:
        kept = stream(table, pool)
    print(json.dumps(kept.summary(), indent=2) if as_json else _words(kept))
    if kept.failed:
        failed = [
            (", ".join(f"{path}={display_name(value)}" for path, value in setting.items()), failure)
            for setting, failure in kept.failures
        ]
        end_with(failed, kept.failed, kept.cases, f"the others are in {kept.folder}")


def _words(kept: FolderSummary) -> str:
    reused = f", {kept.reused:,} were there already" if kept.reused else ""
    return (
        f"{counted(kept.computed, 'case')} simulated{reused}: all {kept.cases:,} in {kept.folder}"
    )
