"""Predicted against measured: two traces of one schedule, joined by op, round and rank."""

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from statistics import median
from typing import Any

from pydantic import ValidationError
from scipy.special import stdtrit

from analysis.measured.attribution import (
    Cause,
    Difference,
    active_starts,
    attribute,
    dominant,
    totals,
)
from co2sim.catalog.facts import override, plain, put_rates
from co2sim.catalog.specs import ClusterSpec, as_file
from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds, percent, scaled
from co2sim.common.validation import first_problem, names_at
from co2sim.hardware.cluster import Cluster
from co2sim.prediction.job import Stage
from co2sim.prediction.measure import measured
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Collective, Op, Schedule
from co2sim.simulation import metrics
from co2sim.simulation.metrics import is_steady, round_times
from co2sim.simulation.run import execute, expected_slowdown
from co2sim.simulation.trace import Trace
from realrun.execute.matmul_speed import at_speed, beside
from realrun.record import Record


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Seconds of a round, averaged over the ranks; they sum to the round time.

    `compute`: at least one compute op runs. `communication`: none does, but a collective is active.
    `waiting`: neither, but the rank waits in a collective for its last member. `idle`: the rest.
    """

    compute: Seconds
    communication: Seconds
    waiting: Seconds
    idle: Seconds


BREAKDOWN = {
    "compute": "computing",
    "communication": "communicating, nothing computed",
    "waiting": "waiting in a collective, nothing computed",
    "idle": "idle",
}
"""What tables call the fields of a `TimeBreakdown`."""


def time_breakdown(trace: Trace, schedule: Schedule, rounds: int) -> TimeBreakdown:
    """Where the time of the last `rounds` rounds of a trace went."""
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
    sums = [0.0, 0.0, 0.0]
    for rank in trace.ranks:
        computing = metrics.busy(compute[rank], during)
        moving = metrics.busy([*compute[rank], *active[rank]], during)
        sums[0] += computing
        sums[1] += moving - computing
        sums[2] += metrics.busy([*compute[rank], *whole[rank]], during) - moving
    computing, moving, waiting = (total / len(trace.ranks) for total in sums)
    idle = during.round_time - computing - moving - waiting
    rounding = 1e-9 * during.round_time
    return TimeBreakdown(computing, moving, waiting, idle if idle > rounding else 0.0)


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


def grouped(differences: Sequence[Difference], names: Mapping[str, str]) -> list[OpError]:
    """One entry per name of ops, those with the largest share of the error first."""
    groups: dict[str, list[Difference]] = {}
    for difference in differences:
        groups.setdefault(names[difference.op], []).append(difference)
    rounds_of_ranks = len({(d.round, d.rank) for d in differences})
    whole = sum(abs(d.error) for d in differences)
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


def shares_of_causes(entries: Sequence[OpError]) -> dict[Cause, float]:
    """Share of each cause in all parts of the entries that do not agree, largest first.

    They sum to 1, or are all 0.
    """
    wrong = [entry for entry in entries if entry.cause]
    sizes = {cause: sum(abs(entry.parts[cause]) for entry in wrong) for cause in Cause}
    whole = sum(sizes.values())
    ordered = sorted(sizes, key=lambda cause: -sizes[cause])
    return {cause: sizes[cause] / whole if whole else 0.0 for cause in ordered}


_HIDDEN = 0.01
"""Fraction of its busy time below which communication counts as hidden."""

AT_SPEED = "at the speed of the run"
"""Predicted for processors that multiply large matrices as fast as they did in it."""

_TIMES = {
    "waiting for slower ranks, per round": "waiting_s",
    "round time": "round_time_s",
    "step time": "step_time_s",
}


@dataclass(frozen=True, slots=True)
class TimeError:
    """A time of a round: what it is, predicted and measured; `error` is that of the prediction.

    None is what was not measured, or cannot be compared.
    """

    words: str
    predicted: Seconds
    measured: Seconds | None
    error: float | None


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """A run and its prediction. Both traces hold the same rounds of the same ranks.

    `cluster` is the one that predicts. `predicted` holds the figures of the simulation for these
    rounds, `measured` those of the run. The rounds need not be a steady state: waits for older
    rounds may still add up. `differences` holds every op of every measured round and rank.
    `at_speed` is the prediction for processors that multiply large matrices as fast as they did in
    the run; None where that was not timed.
    """

    name: str
    record: Record
    cluster: Cluster
    schedule: Schedule
    predicted: Result
    measured: Mapping[str, Any]
    simulated: Trace
    differences: Sequence[Difference]
    at_speed: Result | None = None

    @cached_property
    def ops(self) -> list[OpError]:
        """One entry per label of ops, those with the largest share of the error first."""
        return grouped(self.differences, labels(self.schedule))

    @cached_property
    def causes(self) -> dict[Cause, float]:
        """Shares of the causes of errors of ops, the largest first."""
        return shares_of_causes(self.ops)

    @property
    def measured_round(self) -> Seconds:
        """The time of a round, as measured."""
        return float(self.measured["round_time_s"])

    @property
    def comm_busy_error(self) -> float | None:
        """Signed error of the predicted communication busy time, as a fraction of the measured.

        None without communication.
        """
        there = self.measured.get("comm_busy_s")
        return self.predicted.comm_busy_s / float(there) - 1 if there else None

    @property
    def exposed_error(self) -> float | None:
        """Signed error of the predicted exposed communication, as a fraction of the measured.

        Where less than a hundredth of the busy time was exposed, as a fraction of that hundredth;
        None where the prediction says so, too: then there is nothing to compare.
        """
        busy, there = (self.measured.get(name) for name in ("comm_busy_s", "exposed_comm_s"))
        if not busy or there is None:
            return None
        here, least = self.predicted.exposed_comm_s, _HIDDEN * float(busy)
        return None if max(here, there) < least else (here - there) / max(there, least)

    @property
    def round_time_error(self) -> float:
        """Signed error of the predicted round time, as a fraction of what was measured."""
        return self.predicted.round_time_s / self.measured_round - 1

    @property
    def step_times(self) -> tuple[Seconds, Seconds]:
        """Of an optimizer step: predicted, measured. A round of local updates has several."""
        return self.predicted.step_time_s, self.measured_round / self.schedule.steps

    @property
    def speed(self) -> float | None:
        """Of large matrix products in the run, as a fraction of what the cluster says."""
        speed = self.record.product_speed
        return speed and beside(speed, self.cluster.gpu, self.predicted.precision)

    @property
    def at_speed_error(self) -> float | None:
        """Signed error of the round time that is predicted at the speed of the run."""
        if self.at_speed is None:
            return None
        return self.at_speed.round_time_s / self.measured_round - 1

    @property
    def overlap_difference(self) -> float | None:
        """Measured - predicted overlap ratio; None without communication."""
        there = self.measured.get("overlap_ratio")
        here = self.predicted.overlap_ratio
        return None if there is None or here is None else float(there) - here

    @property
    def times(self) -> list[TimeError]:
        """Times of a round, those of communication first."""
        here, there = self.predicted, self.measured
        errors = [
            ("communication busy, per round", "comm_busy_s", self.comm_busy_error),
            ("communication exposed, per round", "exposed_comm_s", self.exposed_error),
            *(
                (words, key, getattr(here, key) / there[key] - 1 if there.get(key) else None)
                for words, key in _TIMES.items()
            ),
        ]
        times = [
            TimeError(words, getattr(here, key), there.get(key), error)
            for words, key, error in errors
        ]
        if self.at_speed is not None:
            took, error = self.at_speed.round_time_s, self.at_speed_error
            times.append(TimeError(f"round time, {AT_SPEED}", took, self.measured_round, error))
        return times

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
    stage = case.stage()
    _check(name, record, stage)
    simulated, predicted = _predict(stage, record)
    of_speed = None
    if record.product_speed is not None:
        _, of_speed = _predict(at_speed(case, record.product_speed).stage(), record)
    differences = attribute(
        stage.schedule,
        stage.cluster,
        stage.workload.precision,
        simulated,
        record.trace,
        rounds=record.rounds,
        clock_error=record.clock_error,
    )
    return RunComparison(
        name=name,
        record=record,
        cluster=stage.cluster,
        schedule=stage.schedule,
        predicted=predicted,
        measured=_measured(stage.schedule, record),
        simulated=simulated,
        differences=differences,
        at_speed=of_speed,
    )


def _measured(schedule: Schedule, record: Record) -> dict[str, Any]:
    """The figures of a run; older ones took exposed communication from two executions."""
    figures = dict(record.figures)
    if busy := figures.get("comm_busy_s"):
        during = metrics.window(record.trace, schedule, record.rounds)
        figures["exposed_comm_s"] = metrics.exposed(record.trace, schedule, during)
        figures["overlap_ratio"] = metrics.overlap_ratio(busy, figures["exposed_comm_s"])
    return figures


def _predict(stage: Stage, record: Record) -> tuple[Trace, Result]:
    """The same rounds as were run, and their figures, by the definitions of a measurement."""
    precision, schedule, cluster = stage.workload.precision, stage.schedule, stage.cluster
    simulated = execute(
        schedule,
        cluster,
        precision=precision,
        rounds=record.trace.rounds,
        fold=False,
        slowdown=expected_slowdown(schedule, cluster, precision=precision),
    )
    steady = is_steady(simulated, schedule, record.rounds)
    return simulated, measured(stage, simulated, record.rounds, steady=steady)


def _fitting(name: str, cluster: Cluster, trace: Trace) -> Cluster:
    layout = trace.layout
    sized = cluster.resized(layout.world_size)
    if sized.layout != layout:
        raise OptionError(
            f"{name} ran on {layout.nodes} x {layout.gpus_per_node} ranks (nodes x GPUs per node);"
            f" {cluster.name} would place them {sized.nodes} x {sized.gpus_per_node}"
            + (
                ""
                if layout.sites == sized.sites
                else f"; at {layout.sites} sites, not {sized.sites}"
            )
        )
    return sized


def _check(name: str, record: Record, stage: Stage) -> None:
    trace = record.trace
    if not 1 <= record.rounds <= trace.rounds:
        raise OptionError(
            f"{name} says that {record.rounds} rounds were measured;"
            f" it must be 1 to {trace.rounds}, the rounds of its trace"
        )
    names = {op.name for op in stage.schedule.body}
    unknown = next((span.op for span in trace.spans if span.op not in names), None)
    if unknown is not None:
        raise OptionError(
            f"{name}: its trace has an op {unknown!r}, which {stage.schedule.name} does not have"
        )
    if trace.layout != stage.cluster.layout:
        raise OptionError(f"{name}: its trace has another layout than its cluster")
    if not isinstance(record.figures.get("round_time_s"), int | float):
        raise OptionError(f"{name}: its figures hold no round_time_s")
    last = {span.round for span in trace.spans if span.round >= trace.rounds - record.rounds}
    if len(last) < record.rounds:
        raise OptionError(f"{name}: its trace lacks some of the rounds that were measured")


ERRORS = (
    *("comm_busy_error", "exposed_error", "overlap_difference"),
    *("round_time_error", "at_speed_error"),
)
"""Names of the errors of a run, and of its difference."""


def summarise(comparisons: Sequence[RunComparison]) -> dict[str, float | None]:
    """Absolute errors over at least one run: `median_` and `largest_` before each of ERRORS.

    With kernels that sleep compute is exact by construction: an error of the round is then that of
    communication, made smaller by compute. Errors are fractions of what was measured; see
    `RunComparison.exposed_error`. The difference of the overlap ratio is itself one of fractions.
    Those of communication are None where no run has any to compare, and those at the speed of the
    run where no products were timed; see `RunComparison.at_speed`.
    """
    values: dict[str, float | None] = {"runs": len(comparisons)}
    for name in ERRORS:
        errors = [abs(e) for run in comparisons if (e := getattr(run, name)) is not None]
        values[f"median_{name}"] = median(errors) if errors else None
        values[f"largest_{name}"] = max(errors, default=None)
    return values


def changed(cluster: Cluster, changes: Mapping[str, str]) -> Cluster:
    """The cluster with texts such as "25 Gbit/s" at dotted paths such as "inter.bandwidth".

    Raises OptionError, or CatalogError, in one line when anything is unknown or wrong.
    """
    if "gpu" in changes:
        raise OptionError("--set gpu: name a whole cluster with --cluster as well, or set gpu.NAME")
    tree = as_file(cluster)
    shown = ", ".join(f"{p}={t}" for p, t in changes.items())
    currency = tree.pop("currency")  # a file says it with the price
    for name in ("price_per_gpu", "price_low", "price_high"):
        if name in tree:
            tree[name] = tree[name].replace("USD", currency)
    changes = put_rates(tree, changes, usual=None)
    for path, text in changes.items():
        override(tree, path, text)
    tree["name"] = f"{cluster.name}, with {shown}"
    try:
        built: Cluster = ClusterSpec.model_validate(plain(tree)).build()
    except ValidationError as error:
        problem = first_problem(
            error, partial(names_at, ClusterSpec), lambda path: ".".join(map(str, path))
        )
        raise OptionError(f"--set: {problem}") from error
    return built


_TIE = 0.006
"""Predicted speeds that differ by less are equal: the median error of a round in a lab with kernels
that sleep (`benchmarks/results/fidelity-sleep.md`)."""


@dataclass(frozen=True, slots=True)
class OrderError:
    """Two runs of which the one that was predicted to be faster took longer for a step.

    `predicted` is by which part of the speed of `second` the run `first` was predicted to be
    faster, `measured` the same as measured, below 0. `low` and `high` are the ends of its 95 %
    interval, from how rounds of one run differ; None where a run has a single round.
    """

    first: str
    second: str
    predicted: float
    measured: float
    low: float | None
    high: float | None

    @property
    def certain(self) -> bool:
        """Whether the noise of rounds alone does not explain the measured order."""
        return self.high is not None and self.high < 0

    @property
    def sentence(self) -> str:
        """It in words."""
        if self.low is None or self.high is None:
            noise = "one round does not say how much is noise"
        else:
            ends = f"95 % interval of the rounds: {percent(self.low, 1)} to {percent(self.high, 1)}"
            noise = ends if self.certain else f"within the noise of the rounds, {ends}"
        return (
            f"{'order reversed' if self.certain else 'order not certain'}: a step of {self.first}"
            f" was predicted {self.predicted:.1%} faster than one of {self.second}, and measured"
            f" {-self.measured:.1%} slower ({noise})"
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return {**asdict(self), "certain": self.certain}


def order_errors(runs: Sequence[RunComparison]) -> list[OrderError]:
    """All pairs of runs of one question whose order is not as predicted, the certain ones first."""
    errors: list[OrderError] = []
    for pair in combinations(runs, 2):
        if _question(pair[0]) == _question(pair[1]):
            errors += _reversed(*sorted(pair, key=lambda run: run.step_times[0]))
    return sorted(errors, key=lambda error: (not error.certain, error.measured))


def _question(run: RunComparison) -> tuple[object, ...]:
    """What two runs must share, or the time of a step says nothing of their strategies."""
    case, figures = run.record.case, run.predicted
    batch = figures.tokens_per_gpu_per_step, figures.precision
    return case.load()[1].value, run.record.trace.layout, *batch, run.record.kernels


def _reversed(first: RunComparison, second: RunComparison) -> Iterator[OrderError]:
    """The error of a pair, if it is one: `first` is predicted to be the faster."""
    (here, measured), (here_second, measured_second) = first.step_times, second.step_times
    predicted, ratio = here_second / here - 1, measured_second / measured
    if predicted < _TIE or ratio >= 1:
        return
    low, high = None, None
    if (reach := _reach(first, second)) is not None:
        low, high = (ratio * math.exp(sign * reach) - 1 for sign in (-1, 1))
    yield OrderError(first.name, second.name, predicted, ratio - 1, low, high)


def _reach(*runs: RunComparison) -> float | None:
    """Of a 95 % interval of the logarithm of the ratio of two means (Welch); None for one round."""
    parts, freedom = [], []
    for run in runs:
        times = round_times(run.record.trace, run.schedule, run.record.rounds)
        if len(times) == 1:
            return None
        parts.append(times.var(ddof=1) / len(times) / times.mean() ** 2)
        freedom.append(len(times) - 1)
    whole = sum(parts)
    if not whole:
        return 0.0
    shares = sum(part**2 / free for part, free in zip(parts, freedom, strict=True))
    return float(stdtrit(whole**2 / shares, 0.975) * math.sqrt(whole))
