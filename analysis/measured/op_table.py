"""Comparisons as tables, JSON and rows of a CSV file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import pandas as pd
from rich.console import Console

from analysis.measured.comparison import (
    AT_SPEED,
    BREAKDOWN,
    ERRORS,
    OpError,
    RunComparison,
    grouped,
    labels,
    order_errors,
    summarise,
)
from co2sim.common.tables import print_lines, print_table
from co2sim.common.units import counted, duration, percent
from co2sim.report.tables import Table

T = TypeVar("T")


def print_all(out: Console, comparisons: Sequence[RunComparison]) -> None:
    """The figures of a single run, or a summary of several; then the ops of each."""
    if len(comparisons) == 1:
        print_figures(out, comparisons[0])
    else:
        print_summary(out, comparisons)
    for run in comparisons:
        title = f"{run.name}: ops, mean over rounds and ranks, and their share of all absolute"
        _print(out, f"{title} errors", ops(run))
        shares = ", ".join(f"{c.words} {s:.0%}" for c, s in run.causes.items() if s >= SAID)
        if shares:
            out.print(f"errors by cause: {shares}\n", highlight=False, markup=False)


SAID = 0.005
"""Share of a cause that is said: what rounds to 1 %."""
_MOST_LINES = 8
"""Pairs of runs in another order than predicted that are named."""


def print_summary(out: Console, comparisons: Sequence[RunComparison]) -> None:
    """One line per run, communication first, then the figures over all of them."""
    _print(out, "communication per round: predicted, then measured", communication(comparisons))
    _print(out, "rounds and steps: predicted, then measured", rounds(comparisons))
    if lines := [error.sentence for error in order_errors(comparisons)]:
        more = len(lines) - _MOST_LINES
        print_lines(out, *lines[:_MOST_LINES])
        print_lines(out, *([f"and {counted(more, 'pair')} more"] if more > 0 else []), "")
    whole = summarise(comparisons)
    errors = [
        [words, *(dashed(whole[f"{part}_{name}"], form) for part in ("median", "largest"))]
        for name, (words, form) in _SUMMARY.items()
        if name != "at_speed_error" or whole[f"median_{name}"] is not None
    ]
    title = f"{len(comparisons)} runs, absolute"
    _print(out, title, Table(("figure", "median", "largest"), errors))


def print_figures(out: Console, run: RunComparison) -> None:
    """The figures of one run, and where its rounds went."""
    here = run.predicted
    title = (
        f"{run.name}: {here.model} on {here.cluster}, {here.strategy}, {here.gpus} GPUs;"
        f" {counted(run.record.rounds, 'round')} measured"
    )
    _print(out, title, times(run))
    before, after = map(asdict, run.time_breakdowns)
    pairs = {words: (before[key], after[key]) for key, words in BREAKDOWN.items()}
    pairs["sum"] = sum(before.values()), sum(after.values())
    went = [
        [words, duration(predicted), duration(measured), _longer(measured - predicted)]
        for words, (predicted, measured) in pairs.items()
    ]
    columns = ("average of ranks", "predicted", "measured", "difference")
    _print(out, "where a round went", Table(columns, went))


def _print(out: Console, title: str, table: Table) -> None:
    print_table(out, title, table.columns, table.rows, left=table.texts)


# --- tables of terminals and pages ---------------------------------------------------------------


def rounds(comparisons: Sequence[RunComparison]) -> Table:
    """Rounds and steps of runs, predicted and measured."""
    rows = [
        [
            run.name,
            run.predicted.strategy,
            run.predicted.cluster,
            str(run.predicted.gpus),
            duration(run.predicted.round_time_s),
            duration(run.measured_round),
            str(run.schedule.steps),
            *map(duration, run.step_times),
            signed(run.round_time_error),
        ]
        for run in comparisons
    ]
    figures = ("round", "measured round", "steps per round", "step", "measured step", "error")
    return Table(("run", "strategy", "cluster", "GPUs", *figures), rows, 3)


def communication(comparisons: Sequence[RunComparison]) -> Table:
    """Communication of a round of runs, predicted and measured."""
    columns = (
        *("run", "busy", "measured busy", "busy error"),
        *("exposed", "measured exposed", "exposed error"),
        *("overlap", "measured overlap", "overlap difference"),
    )
    rows = [
        [
            run.name,
            duration(run.predicted.comm_busy_s),
            dashed(run.measured.get("comm_busy_s"), duration),
            dashed(run.comm_busy_error, signed),
            duration(run.predicted.exposed_comm_s),
            dashed(run.measured.get("exposed_comm_s"), duration),
            dashed(run.exposed_error, signed),
            *_overlap(run),
        ]
        for run in comparisons
    ]
    return Table(columns, rows)


def times(run: RunComparison) -> Table:
    """The figures of one run."""
    rows = [
        [
            time.words,
            duration(time.predicted),
            dashed(time.measured, duration),
            dashed(time.error, signed),
        ]
        for time in run.times
    ]
    rows.insert(2, ["overlap ratio", *_overlap(run)])
    return Table(("figure", "predicted", "measured", "error"), rows)


def ops(run: RunComparison) -> Table:
    """The ops of one run."""
    rows = [
        [
            row.label,
            f"{row.count:g}",
            _milliseconds(row.predicted),
            _milliseconds(row.measured),
            dashed(row.error, signed),
            _share(row.share),
            row.cause.words if row.cause else "-",
        ]
        for row in run.ops
    ]
    return Table(
        ("op", "per round", "predicted ms", "measured ms", "error", "share", "cause"), rows
    )


def dashed(value: T | None, form: Callable[[T], str]) -> str:
    """A value in its form; a dash for none."""
    return "-" if value is None else form(value)


def signed(error: float) -> str:
    """In percent, with its sign."""
    return percent(error, 1)


def _overlap(run: RunComparison) -> Iterator[str]:
    """Overlap ratios, predicted and measured, and their difference."""
    for ratio in (run.predicted.overlap_ratio, run.measured.get("overlap_ratio")):
        yield dashed(ratio, _share)
    yield dashed(run.overlap_difference, _points)


def _share(value: float) -> str:
    return f"{value:.1%}"


def _points(value: float) -> str:
    return f"{percent(value, 1).removesuffix('%')} points"


def _longer(seconds: float) -> str:
    return ("+" if seconds > 0 else "") + duration(seconds)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


_SUMMARY: dict[str, tuple[str, Callable[[float], str]]] = {
    "comm_busy_error": ("error of communication busy time", _share),
    "exposed_error": ("error of exposed communication", _share),
    "overlap_difference": (
        "difference of overlap ratio",
        lambda value: _points(value).removeprefix("+"),
    ),
    "round_time_error": ("error of round time", _share),
    "at_speed_error": (f"error of round time, {AT_SPEED}", _share),
}


# --- JSON and CSV --------------------------------------------------------------------------------


def to_dict(comparisons: Sequence[RunComparison]) -> dict[str, Any]:
    """Everything, as plain values for JSON."""
    return {
        "runs": [_run(run) for run in comparisons],
        "summary": summarise(comparisons),
        "order_errors": [error.to_dict() for error in order_errors(comparisons)],
    }


def _run(run: RunComparison) -> dict[str, Any]:
    before, after = run.time_breakdowns
    return {
        "name": run.name,
        **{name: getattr(run.predicted, name) for name in ("strategy", "cluster", "model", "gpus")},
        "kernels": run.record.kernels,
        "environment": dict(run.record.environment),
        "rounds": run.record.rounds,
        "clock_error_s": run.record.clock_error,
        "predicted": run.predicted.to_dict(),
        "measured": dict(run.measured),
        **{name: getattr(run, name) for name in ERRORS},
        "steps_per_round": run.schedule.steps,
        "step_time_s": dict(zip(("predicted", "measured"), run.step_times, strict=True)),
        "speed": run.speed,
        "spent_s": {"predicted": asdict(before), "measured": asdict(after)},
        "causes": {str(cause): share for cause, share in run.causes.items()},
        "rows": [_entry(row) for row in run.ops],
        "ops": _every_op(run),
    }


def _entry(row: OpError) -> dict[str, Any]:
    return {
        "label": row.label,
        "per_round": row.count,
        "predicted_s": row.predicted,
        "measured_s": row.measured,
        "excess_s": row.measured - row.predicted,
        "error": row.error,
        "share": row.share,
        "cause": None if row.cause is None else str(row.cause),
    }


def _every_op(run: RunComparison) -> list[dict[str, Any]]:
    """Every op of the schedule: means over rounds and ranks, the parts of the excess by cause."""
    names = labels(run.schedule)
    by_op = {row.label: row for row in grouped(run.differences, {name: name for name in names})}
    whole = []
    for op in run.schedule.body:
        if (row := by_op.get(op.name)) is None:
            continue
        entry: dict[str, Any] = {
            "op": op.name,
            "stream": op.stream,
            "work": str(op.work),
            "row": names[op.name],
        }
        entry |= {key: value for key, value in _entry(row).items() if key != "label"}
        entry |= {f"{cause}_s": part / row.instances for cause, part in row.parts.items()}
        whole.append(entry)
    return whole


def to_csv(comparisons: Sequence[RunComparison]) -> bytes:
    """Every op of every run, one line each."""
    lines = [{"run": run.name, **entry} for run in comparisons for entry in _every_op(run)]
    return pd.DataFrame(lines).to_csv(index=False).encode()
