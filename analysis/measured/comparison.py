"""Predicted against measured: two traces of one schedule, joined by op, round and rank."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from analysis.measured.attribution import Difference, attribute
from analysis.measured.time_breakdown import TimeBreakdown, time_breakdown
from co2sim.case import Prepared
from co2sim.cluster import Cluster
from co2sim.errors import OptionError
from co2sim.metrics import is_steady
from co2sim.result import Result
from co2sim.schedule import Schedule
from co2sim.simulator import execute
from co2sim.trace import Trace
from realrun.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """A run and its prediction. Both traces hold the same rounds of the same ranks.

    `predicted` holds the figures of the simulation for these rounds, `measured` those of the run.
    The rounds need not be a steady state: waits for older rounds may still add up. `differences`
    holds every op of every measured round and rank.
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
    def time_breakdowns(self) -> tuple[TimeBreakdown, TimeBreakdown]:
        """Where the measured rounds went: predicted, measured."""
        predicted, measured = (
            time_breakdown(trace, self.schedule, self.record.rounds)
            for trace in (self.simulated, self.record.trace)
        )
        return predicted, measured


def compare(name: str, record: Record, cluster: Cluster | None = None) -> RunComparison:
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
    return RunComparison(
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
            f"{name}: its trace has an op {unknown!r}, which {prepared.schedule.name} does not have"
        )
    if trace.layout != prepared.cluster.layout:
        raise OptionError(f"{name}: its trace has another layout than its cluster")
    if not isinstance(record.figures.get("round_time_s"), int | float):
        raise OptionError(f"{name}: its figures hold no round_time_s")
    last = {span.round for span in trace.spans if span.round >= trace.rounds - record.rounds}
    if len(last) < record.rounds:
        raise OptionError(f"{name}: its trace lacks some of the rounds that were measured")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Absolute errors over several runs.

    Errors of the round time are fractions of what was measured. The difference of the overlap ratio
    is itself a difference of fractions, None without communication.
    """

    runs: int
    median_round_time_error: float
    largest_round_time_error: float
    largest_overlap_difference: float | None

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return asdict(self)


def summarise(comparisons: Sequence[RunComparison]) -> RunSummary:
    """Median and largest absolute errors of at least one run."""
    errors = [abs(one.round_time_error) for one in comparisons]
    gaps = [abs(gap) for one in comparisons if (gap := one.overlap_difference) is not None]
    return RunSummary(len(comparisons), median(errors), max(errors), max(gaps, default=None))
