"""Comparisons as tables, JSON and rows of a CSV file."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
from rich.console import Console

from analysis.measured.attribution import Cause, Difference, dominant, totals
from analysis.measured.comparison import (
    AT_SPEED,
    ERRORS,
    RunComparison,
    RunSummary,
    order_errors,
    summarise,
)
from co2sim.common.tables import print_lines, print_table
from co2sim.common.units import Seconds, counted, duration, percent, scaled
from co2sim.schedule.schedule import Collective, Op, Schedule


@dataclass(frozen=True, slots=True)
class OpError:
    """The error of the ops that share a label, in one run.

    `instances` is how often they ran in the measured rounds, over all ranks; `count` the same per
    round and rank. `predicted` and `measured` are means per instance. `parts` are sums over all
    instances. `share`, 0 to 1, is the sum of absolute errors over that of the whole run. `cause` is
    None where both traces agree.
    """

    label: str
    count: float
    instances: int
    predicted: Seconds
    measured: Seconds
    share: float
    parts: Mapping[Cause, Seconds]
    cause: Cause | None

    @property
    def error(self) -> float | None:
        """Signed error of the predicted mean, as a fraction of what was measured."""
        return self.predicted / self.measured - 1 if self.measured else None


def labels(schedule: Schedule) -> dict[str, str]:
    """Label of every op: ops that differ only in numbers (of a step, a layer) share it."""
    names = {op.name: _label(op) for op in schedule.body}
    sizes: dict[str, list[float]] = {}
    for op in schedule.body:
        if isinstance(op.work, Collective):
            sizes.setdefault(names[op.name], []).append(op.work.bytes)
    shown = {}
    for label, lengths in sizes.items():
        least, most = scaled(min(lengths), "B"), scaled(max(lengths), "B")
        shown[label] = f"{label}, {least}" + (f" to {most}" if most != least else "")
    return {name: shown.get(label, label) for name, label in names.items()}


def _label(op: Op) -> str:
    work = op.work
    if isinstance(work, Collective):
        return f"{work.kind} {_family(work.buffer)} over {work.group}"
    family = _family(op.name.rpartition(".")[2])
    return work.kernel if family == work.kernel else f"{work.kernel} {family}"


def _family(name: str) -> str:
    """The name with a star in place of every number."""
    return re.sub(r"\d+", "*", name)


def by_label(comparison: RunComparison) -> list[OpError]:
    """One entry per label, those with the largest share of the error first."""
    names = labels(comparison.schedule)
    return _grouped(comparison, lambda difference: names[difference.op])


def by_op(comparison: RunComparison) -> list[OpError]:
    """One entry per op of the schedule, in its order."""
    order = {op.name: index for index, op in enumerate(comparison.schedule.body)}
    entries = _grouped(comparison, lambda difference: difference.op)
    return sorted(entries, key=lambda entry: order[entry.label])


def _grouped(comparison: RunComparison, key: Callable[[Difference], str]) -> list[OpError]:
    """One entry per value of `key`, those with the largest share of the error first."""
    groups: dict[str, list[Difference]] = {}
    for difference in comparison.differences:
        groups.setdefault(key(difference), []).append(difference)
    rounds_of_ranks = len({(d.round, d.rank) for d in comparison.differences})
    whole = sum(abs(d.error) for d in comparison.differences)
    entries = []
    for label, members in groups.items():
        predicted = sum(d.predicted for d in members)
        measured = sum(d.measured for d in members)
        parts = totals(members)
        entries.append(
            OpError(
                label=label,
                count=len(members) / rounds_of_ranks,
                instances=len(members),
                predicted=predicted / len(members),
                measured=measured / len(members),
                share=sum(abs(d.error) for d in members) / whole if whole else 0.0,
                parts=parts,
                cause=dominant(parts, measured - predicted, predicted),
            )
        )
    return sorted(entries, key=lambda entry: -entry.share)


def causes(entries: Sequence[OpError]) -> dict[Cause, float]:
    """Share of each cause in all parts of the entries that do not agree, largest first.

    They sum to 1, or are all 0.
    """
    wrong = [entry for entry in entries if entry.cause]
    sizes = {cause: sum(abs(entry.parts[cause]) for entry in wrong) for cause in Cause}
    whole = sum(sizes.values())
    ordered = sorted(sizes, key=lambda cause: -sizes[cause])
    return {cause: sizes[cause] / whole if whole else 0.0 for cause in ordered}


BREAKDOWN = {
    "compute": "computing",
    "communication": "communicating, nothing computed",
    "waiting": "waiting in a collective, nothing computed",
    "idle": "idle",
}


def print_all(out: Console, comparisons: Sequence[RunComparison]) -> None:
    """The figures of a single run, or a summary of several; then the ops of each."""
    if len(comparisons) == 1:
        print_figures(out, comparisons[0])
    else:
        print_summary(out, comparisons)
    for run in comparisons:
        print_ops(out, run)


def print_summary(out: Console, comparisons: Sequence[RunComparison]) -> None:
    """One line per run, communication first, then the figures over all of them."""
    _print_communication(out, comparisons)
    rounds = [
        (
            run.name,
            run.predicted.strategy,
            run.predicted.cluster,
            str(run.predicted.gpus),
            duration(run.predicted.round_time_s),
            duration(run.measured["round_time_s"]),
            str(run.schedule.steps),
            *(duration(step) for step in run.step_times),
            percent(run.round_time_error, 1),
        )
        for run in comparisons
    ]
    times = ("round", "measured round", "steps per round", "step", "measured step", "error")
    named = ("run", "strategy", "cluster", "GPUs", *times)
    print_table(out, "rounds and steps: predicted, then measured", named, rounds, left=3)
    if lines := [
        error.sentence for error in order_errors([(run.name, run) for run in comparisons])
    ]:
        print_lines(out, *_few(lines), "")
    _print_errors(out, summarise(comparisons))


_MOST_LINES = 8
"""Pairs of runs in another order than predicted that are named."""


def _few(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], *([f"and {counted(more, 'pair')} more"] if more > 0 else [])]


def _print_communication(out: Console, comparisons: Sequence[RunComparison]) -> None:
    columns = (
        *("run", "busy", "measured busy", "busy error"),
        *("exposed", "measured exposed", "exposed error"),
        *("overlap", "measured overlap", "overlap difference"),
    )
    lines = [
        (
            run.name,
            duration(run.predicted.comm_busy_s),
            _time(run.measured.get("comm_busy_s")),
            _fraction(run.comm_busy_error),
            duration(run.predicted.exposed_comm_s),
            _time(run.measured.get("exposed_comm_s")),
            _fraction(run.exposed_error),
            _ratio(run.predicted.overlap_ratio),
            _ratio(run.measured.get("overlap_ratio")),
            _points(run.overlap_difference),
        )
        for run in comparisons
    ]
    print_table(out, "communication per round: predicted, then measured", columns, lines)


def _print_errors(out: Console, whole: RunSummary) -> None:
    errors: list[tuple[str, float | None, float | None]] = [
        ("communication busy time", whole.median_comm_busy_error, whole.largest_comm_busy_error),
        ("exposed communication", whole.median_exposed_error, whole.largest_exposed_error),
        ("round time", whole.median_round_time_error, whole.largest_round_time_error),
    ]
    if whole.median_at_speed_error is not None:
        middle, most = whole.median_at_speed_error, whole.largest_at_speed_error
        errors.append((f"round time, {AT_SPEED}", middle, most))
    lines: list[tuple[str, ...]] = [
        (f"error of {what}", _share(middle), _share(most)) for what, middle, most in errors
    ]
    overlap = (whole.median_overlap_difference, whole.largest_overlap_difference)
    lines.insert(2, ("difference of overlap ratio", *(_points(value, "") for value in overlap)))
    print_table(out, f"{whole.runs} runs, absolute", ("figure", "median", "largest"), lines)


def print_figures(out: Console, run: RunComparison) -> None:
    """The figures of one run, and where its rounds went."""
    here, there = run.predicted.to_dict(), run.measured
    lines = [
        (time.words, duration(time.predicted), _time(time.measured), _fraction(time.error))
        for time in run.times
    ]
    overlap = (_ratio(here["overlap_ratio"]), _ratio(there.get("overlap_ratio")))
    lines.insert(2, ("overlap ratio", *overlap, _points(run.overlap_difference)))
    rounds = run.record.rounds
    title = (
        f"{run.name}: {here['model']} on {here['cluster']}, {here['strategy']},"
        f" {here['gpus']} GPUs; {rounds} {'round' if rounds == 1 else 'rounds'} measured"
    )
    print_table(out, title, ("figure", "predicted", "measured", "error"), lines)
    before, after = map(asdict, run.time_breakdowns)
    went: list[tuple[str, ...]] = [
        (words, duration(before[key]), duration(after[key]), _signed(after[key] - before[key]))
        for key, words in BREAKDOWN.items()
    ]
    total, reached = sum(before.values()), sum(after.values())
    went.append(("sum", duration(total), duration(reached), _signed(reached - total)))
    columns = ("average of ranks", "predicted", "measured", "difference")
    print_table(out, "where a round went", columns, went)


def print_ops(out: Console, run: RunComparison) -> None:
    """The op table of one run, and what causes its errors."""
    table = by_label(run)
    lines = [
        (
            row.label,
            f"{row.count:g}",
            _milliseconds(row.predicted),
            _milliseconds(row.measured),
            "-" if row.error is None else percent(row.error, 1),
            f"{row.share:.1%}",
            row.cause.words if row.cause else "-",
        )
        for row in table
    ]
    columns = ("op", "per round", "predicted ms", "measured ms", "error", "share", "cause")
    print_table(
        out,
        f"{run.name}: ops, mean over rounds and ranks, and their share of all absolute errors",
        columns,
        lines,
    )
    shares = ", ".join(f"{c.words} {s:.0%}" for c, s in causes(table).items() if s >= 0.005)  # noqa: PLR2004 - what rounds to 1 %
    if shares:
        out.print(f"errors by cause: {shares}\n", highlight=False, markup=False)


def to_dict(comparisons: Sequence[RunComparison]) -> dict[str, Any]:
    """Everything, as plain values for JSON."""
    return {
        "runs": [_run(run) for run in comparisons],
        "summary": summarise(comparisons).to_dict(),
        "order_errors": [
            error.to_dict() for error in order_errors([(run.name, run) for run in comparisons])
        ],
    }


def _run(run: RunComparison) -> dict[str, Any]:
    table = by_label(run)
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
        "causes": {str(cause): share for cause, share in causes(table).items()},
        "rows": [_entry(row) for row in table],
        "ops": _ops(run),
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


def _ops(run: RunComparison) -> list[dict[str, Any]]:
    """Every op of the schedule: means over rounds and ranks, the parts of the excess by cause."""
    names = labels(run.schedule)
    body = {op.name: op for op in run.schedule.body}
    whole = []
    for row in by_op(run):
        op = body[row.label]
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
    lines = [{"run": run.name, **entry} for run in comparisons for entry in _ops(run)]
    return pd.DataFrame(lines).to_csv(index=False).encode()


def _time(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _signed(seconds: float) -> str:
    return ("+" if seconds > 0 else "") + duration(seconds)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _fraction(error: float | None) -> str:
    return "-" if error is None else percent(error, 1)


def _share(error: float | None) -> str:
    return "-" if error is None else f"{error:.1%}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _points(value: float | None, sign: str = "+") -> str:
    if value is None:
        return "-"
    text = percent(value, 1).removesuffix("%")
    return f"{text if sign else text.removeprefix('+')} points"
