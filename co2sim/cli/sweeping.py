"""`co2sim sweep`: any parameter over values."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from co2sim.batch import Failure, Outcome, run_all
from co2sim.case import Case
from co2sim.cli.failures import end_with_failures
from co2sim.console import loss
from co2sim.console.result_tables import print_assumed
from co2sim.console.tables import console, print_lines, print_table
from co2sim.files import write_atomically
from co2sim.frames import check_column, order, to_frame
from co2sim.grid import Setting, label
from co2sim.result import Result
from co2sim.step_factors import Goal, to_dict
from co2sim.units import counted, duration, scaled


def sweep(
    cases: Sequence[Case],
    settings: Sequence[Setting],
    csv: Path | None,
    jobs: int,
    sort: str | None,
    goal: Goal,
    *,
    as_json: bool,
) -> None:
    """Simulate all cases; `settings` says what each varies. Those that fail are named."""
    if sort is not None:
        check_column(sort, settings, goal)
    outcomes = run_all(cases, jobs)
    frame = to_frame(cases, outcomes, settings, goal)
    if sort is not None:
        places = order(frame, sort)
        frame = frame.iloc[places]
        settings, outcomes = [settings[i] for i in places], [outcomes[i] for i in places]
    if csv is not None:
        write_atomically({csv: frame.to_csv(index=False).encode()})
    if as_json:
        rows = [
            {"setting": dict(setting), **_figures(outcome, goal)}
            for setting, outcome in zip(settings, outcomes, strict=True)
        ]
        print(json.dumps(rows, indent=2))
    else:
        _print(cases, settings, outcomes, goal)
        if csv is not None:
            print_lines(console(), f"table   {csv}")
    if any(isinstance(outcome, Failure) for outcome in outcomes):
        names = (
            ", ".join(f"{path}={label(value)}" for path, value in setting.items())
            for setting in settings
        )
        kept = "the others are above" if csv is None else f"the others are in {csv}"
        end_with_failures(names, outcomes, kept)


def _figures(outcome: Outcome, goal: Goal) -> dict[str, object]:
    if isinstance(outcome, Failure):
        return {"error": outcome.reason}
    return to_dict(outcome, goal)


def _print(
    cases: Sequence[Case], settings: Sequence[Setting], outcomes: Sequence[Outcome], goal: Goal
) -> None:
    results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    unit = results[0].unit
    columns = [
        *(*settings[0], f"{unit}s/s", "per GPU", "step", "exposed", "efficiency", "overlap"),
        *("MFU", "memory"),
    ]
    currencies = {r.currency for r in results if r.currency is not None}
    columns += [f"{' or '.join(sorted(currencies))} per billion {unit}s"] if currencies else []
    mixed = len(currencies) > 1
    rows = [
        [*map(label, setting.values()), *_cells(outcome, len(columns) - len(setting), mixed)]
        for setting, outcome in zip(settings, outcomes, strict=True)
    ]
    to_loss = loss.heads(results, goal)
    columns += to_loss
    for row, outcome in zip(rows, outcomes, strict=True):
        known = loss.cells(outcome, goal) if to_loss and isinstance(outcome, Result) else ["", ""]
        row.extend(known[: len(to_loss)])
    left = len(settings[0])
    if any(result.notes for result in results):
        columns.insert(left, "chosen")
        for row, outcome in zip(rows, outcomes, strict=True):
            row.insert(left, outcome.strategy if isinstance(outcome, Result) else "")
        left += 1
    terminal = console()
    where = _same([f"{r.model} on {r.cluster}" for r in results]) or _same(
        [f"{label(case.model)} on {label(case.cluster)}" for case in cases]
    )
    others = _same([r.strategy for r in results]), _same([counted(r.gpus, "GPU") for r in results])
    constant = [part for part in (where, *others) if part]
    title = ", ".join([*constant, f"by {' and '.join(settings[0])}"])
    print_table(terminal, title, columns, rows, left=left)
    _print_notes(terminal, results, goal)


def _same(texts: Sequence[str]) -> str:
    """The text that all are, or none."""
    return texts[0] if len(set(texts)) == 1 else ""


def _print_notes(terminal: Console, results: Sequence[Result], goal: Goal) -> None:
    notes = ["efficiency: against the same round with free communication"]
    if not all(r.fits_in_memory for r in results):
        notes.append("* does not fit in the memory of a GPU: shown as if it did")
    if not any(r.fits_in_memory for r in results):
        notes.append("none fits: run one of them (`co2sim run`) to see what would")
    print_lines(terminal, *notes)
    loss.print_remark(terminal, results, goal)
    print_assumed(terminal, results)


def _cells(outcome: Outcome, count: int, mixed: bool) -> list[str]:  # noqa: FBT001
    """The first `count` figures of a row; the last is the cost, which not every cluster has.

    It names its currency if the column is `mixed`.
    """
    if isinstance(outcome, Failure):
        return ["failed", *[""] * (count - 1)]
    r = outcome
    currency = f" {r.currency}" if mixed else ""
    cells = [
        f"{r.tokens_per_s:,.0f}",
        f"{r.tokens_per_s_per_gpu:,.1f}",
        duration(r.step_time_s),
        f"{r.exposed_share:.1%}",
        f"{r.efficiency_vs_free_communication:.1%}",
        "-" if r.overlap_ratio is None else f"{r.overlap_ratio:.1%}",
        f"{r.mfu:.1%}",
        scaled(r.memory_bytes_per_gpu["total"], "B") + ("" if r.fits_in_memory else "*"),
        "-" if r.cost_per_billion_tokens is None else f"{r.cost_per_billion_tokens:,.2f}{currency}",
    ]
    return cells[:count]
