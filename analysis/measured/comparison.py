"""Predicted against measured: two traces of one schedule, joined by op, round and rank."""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from analysis.measured.attribution import Cause, Difference, attribute, dominant, totals
from analysis.measured.spans import active_starts
from co2sim import metrics
from co2sim.case import Prepared
from co2sim.cluster import Cluster
from co2sim.errors import OptionError
from co2sim.metrics import is_steady
from co2sim.result import Result
from co2sim.schedule import Collective, Op, Schedule
from co2sim.simulator import execute
from co2sim.trace import Trace
from co2sim.units import Seconds, scaled
from realrun.record import Record


@dataclass(frozen=True, slots=True)
class Row:
    """Ops of one label: means per instance in seconds, and parts summed over all instances.

    `count` is instances per round and rank, `instances` their number in all. `share` is the sum of
    the absolute errors over that of all rows, `cause` None where both traces agree.
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


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a round, on the average rank; they sum to the round time.

    `compute`: at least one compute op runs. `communication`: none does, but a collective is active.
    `waiting`: neither, but the rank waits in a collective for its last member. `idle`: the rest.
    """

    compute: Seconds
    communication: Seconds
    waiting: Seconds
    idle: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run beside its prediction. The traces hold the same rounds of the same ranks.

    `predicted` are the simulation's figures for these rounds, which may not have reached a steady
    state (rounds that wait for older ones may pile up slowly); `measured` those that the run gave.
    """

    name: str
    record: Record
    schedule: Schedule
    predicted: Result
    measured: Mapping[str, Any]
    simulated: Trace
    differences: Sequence[Difference]

    @property
    def round_time_error(self) -> float:
        """Signed error of the predicted round time, as a fraction of what was measured."""
        return self.predicted.round_time_s / float(self.measured["round_time_s"]) - 1

    @property
    def overlap_difference(self) -> float | None:
        """Measured - predicted overlap ratio; None without communication."""
        there = self.measured.get("overlap_ratio")
        here = self.predicted.overlap_ratio
        return None if there is None or here is None else float(there) - here

    @property
    def spent(self) -> tuple[Spent, Spent]:
        """Where the measured rounds went: predicted, measured."""
        rounds = self.record.rounds
        return (
            spent(self.simulated, self.schedule, rounds),
            spent(self.record.trace, self.schedule, rounds),
        )


def compare(name: str, record: Record, cluster: Cluster | None = None) -> Comparison:
    """Simulate what a record measured, on its own cluster or on another of the same layout.

    Raises OptionError when the layouts differ, or when the trace is not one of the schedule.
    """
    case = record.case
    if cluster is not None:
        case = replace(case, cluster=_fitting(name, cluster, record.trace))
    prepared = case.prepare()
    _check(name, record, prepared)
    simulated, free = (
        execute(
            prepared.schedule,
            prepared.cluster,
            precision=prepared.job.precision,
            rounds=record.trace.rounds,
            fold=False,
            free_communication=without,
        )
        for without in (False, True)
    )
    steady = is_steady(simulated, prepared.schedule, record.rounds)
    differences = attribute(
        prepared.schedule,
        prepared.cluster,
        prepared.job.precision,
        simulated,
        record.trace,
        rounds=record.rounds,
        clock_error=record.clock_error,
    )
    return Comparison(
        name=name,
        record=record,
        schedule=prepared.schedule,
        predicted=prepared.measure(simulated, record.rounds, steady, free),
        measured=record.figures,
        simulated=simulated,
        differences=differences,
    )


def _fitting(name: str, cluster: Cluster, trace: Trace) -> Cluster:
    layout = trace.layout
    sized = cluster.resized(layout.world_size)
    if sized.layout != layout:
        raise OptionError(
            f"{name} ran on {layout.nodes} x {layout.gpus_per_node} ranks (nodes x GPUs per node);"
            f" {cluster.name} would place them {sized.nodes} x {sized.gpus_per_node}"
        )
    return sized


def _check(name: str, record: Record, prepared: Prepared) -> None:
    trace = record.trace
    if not 1 <= record.rounds <= trace.rounds:
        raise OptionError(
            f"{name} says that {record.rounds} rounds were measured;"
            f" it must be 1 to {trace.rounds}, the rounds of its trace"
        )
    known = {op.name for op in prepared.schedule.body}
    unknown = next((span.op for span in trace.spans if span.op not in known), None)
    if unknown is not None:
        raise OptionError(
            f"{name}: its trace has an op {unknown!r}, which {prepared.schedule.name} has not"
        )
    if trace.layout != prepared.cluster.layout:
        raise OptionError(f"{name}: its trace has another layout than its cluster")
    if not isinstance(record.figures.get("round_time_s"), int | float):
        raise OptionError(f"{name}: its figures hold no round_time_s")
    last = {span.round for span in trace.spans if span.round >= trace.rounds - record.rounds}
    if len(last) < record.rounds:
        raise OptionError(f"{name}: its trace lacks some of the rounds that were measured")


def labels(schedule: Schedule) -> dict[str, str]:
    """Label of every op: ops that differ only in numbers (of a step, a layer) share it."""
    names = {op.name: _label(op) for op in schedule.body}
    sizes: dict[str, list[float]] = {}
    for op in schedule.body:
        if isinstance(op.work, Collective):
            sizes.setdefault(names[op.name], []).append(op.work.bytes)
    shown = {}
    for label, found in sizes.items():
        least, most = scaled(min(found), "B"), scaled(max(found), "B")
        shown[label] = f"{label}, {least}" + (f" to {most}" if most != least else "")
    return {name: shown.get(label, label) for name, label in names.items()}


def _label(op: Op) -> str:
    work = op.work
    if isinstance(work, Collective):
        return f"{work.kind} {_family(work.buffer)} over {work.group}"
    family = _family(op.name.rpartition(".")[2])
    return work.kernel if family == work.kernel else f"{work.kernel} {family}"


def _family(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def rows(comparison: Comparison) -> list[Row]:
    """One row per label, those with the largest share of the error first."""
    names = labels(comparison.schedule)
    return _rows(comparison, lambda found: names[found.op])


def ops(comparison: Comparison) -> list[Row]:
    """One row per op of the schedule, in its order."""
    order = {op.name: place for place, op in enumerate(comparison.schedule.body)}
    return sorted(_rows(comparison, lambda found: found.op), key=lambda row: order[row.label])


def _rows(comparison: Comparison, key: Callable[[Difference], str]) -> list[Row]:
    grouped = _grouped(comparison.differences, key)
    rounds_of_ranks = len({(d.round, d.rank) for d in comparison.differences})
    whole = sum(abs(d.error) for d in comparison.differences)
    found = []
    for label, members in grouped.items():
        predicted, measured = (
            sum(d.predicted for d in members),
            sum(d.measured for d in members),
        )
        parts = totals(members)
        found.append(
            Row(
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
    return sorted(found, key=lambda row: -row.share)


def _grouped(
    differences: Iterable[Difference], key: Callable[[Difference], str]
) -> dict[str, list[Difference]]:
    found: dict[str, list[Difference]] = {}
    for difference in differences:
        found.setdefault(key(difference), []).append(difference)
    return found


def causes(found: Sequence[Row]) -> dict[Cause, float]:
    """Share of each cause in all parts of the rows that do not agree, largest first.

    They sum to 1, or are all 0.
    """
    wrong = [row for row in found if row.cause]
    sizes = {cause: sum(abs(row.parts[cause]) for row in wrong) for cause in Cause}
    whole = sum(sizes.values())
    ordered = sorted(sizes, key=lambda cause: -sizes[cause])
    return {cause: sizes[cause] / whole if whole else 0.0 for cause in ordered}


def spent(trace: Trace, schedule: Schedule, rounds: int) -> Spent:
    """Where the last `rounds` rounds of a trace went."""
    during = metrics.window(trace, schedule, rounds)
    starts = active_starts(trace, schedule)
    active: dict[Hashable, list[Any]] = {rank: [] for rank in trace.ranks}
    whole: dict[Hashable, list[Any]] = {rank: [] for rank in trace.ranks}
    compute: dict[Hashable, list[Any]] = {rank: [] for rank in trace.ranks}
    for span in trace.spans:
        if span.end <= during.start or span.start >= during.end:
            continue
        start = starts.get((span.op, span.round, span.rank))
        if start is None:
            compute[span.rank].append(span)
        else:
            active[span.rank].append(span._replace(start=start))
            whole[span.rank].append(span)
    reached = [0.0, 0.0, 0.0]
    for rank in trace.ranks:
        computing = metrics.busy(compute[rank], during)
        moving = metrics.busy([*compute[rank], *active[rank]], during)
        reached[0] += computing
        reached[1] += moving - computing
        reached[2] += metrics.busy([*compute[rank], *whole[rank]], during) - moving
    computing, moving, waiting = (total / len(trace.ranks) for total in reached)
    idle = during.round_time - computing - moving - waiting
    rounding = 1e-9 * during.round_time
    return Spent(computing, moving, waiting, idle if idle > rounding else 0.0)


@dataclass(frozen=True, slots=True)
class Summary:
    """Several runs at once; differences of overlap are absolute, None without communication."""

    runs: int
    median_round_time_error: float
    largest_round_time_error: float
    largest_overlap_difference: float | None

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return asdict(self)


def summarise(comparisons: Sequence[Comparison]) -> Summary:
    """Median and largest absolute errors."""
    errors = [abs(found.round_time_error) for found in comparisons]
    gaps = [abs(gap) for c in comparisons if (gap := c.overlap_difference) is not None]
    return Summary(len(comparisons), median(errors), max(errors), max(gaps, default=None))
