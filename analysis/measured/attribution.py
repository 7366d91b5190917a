"""Why a measured op takes longer or shorter than predicted: every error, split by cause.

The parts of an error add up to it exactly. Each is decided from the two traces and the cluster
that predicts, as follows.

1. A collective's span is *waiting* until the last member of its group has started, then *active*.
   The difference of the waiting parts is the part `waiting`.
2. An active time is a time alone, stretched by a factor. A collective is stretched while others of
   its rank load the link that bounds it (equal shares, as in `simulation.network`), or hold its
   NCCL communicator. A compute op is stretched while communication of its rank is under way. In the
   prediction the cluster states by how much. In the measurement it is the factor that makes equal
   works on one rank take equally long; 1 where no work ran both with and without communication.
3. Measured compute of a rank is also stretched by the *pace* of the rank: all that it computes,
   measured over predicted, relative to the first quartile of ranks, if slower.
4. What is left alone is a fixed time per op plus a time that grows with the work: latency steps and
   bytes for collectives, launch and arithmetic or memory for computes. Both are fitted to the
   measured medians of all different works (those of a kernel, or a kind, share a slope; those of a
   group, or all computes, share the fixed time), where sizes differ enough to tell them apart.

A product of ratios is split into differences by logarithms (the LMDI decomposition; Ang 2004,
Energy Policy 32(9)), so that nothing is left over and traces that agree have no parts.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from co2sim.common.units import Bytes, Flops, Seconds
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import Collective, Compute, Group, Kind, Schedule
from co2sim.simulation.costs import CollectiveCost, cost_of, work_time
from co2sim.simulation.trace import Span, Trace

Array: TypeAlias = NDArray[np.float64]

Key: TypeAlias = tuple[str, int, int]
"""Op, round and rank: what the spans of two traces are joined by."""

_CLOSE = 0.999
"""The largest fraction of its time that anything loses to others."""
_ROUNDING = 1e-9
"""Fractions, and sums of weights, below which there is only rounding."""


class Split(NamedTuple):
    """One span, in seconds: `waiting` for the last member of its group, then `active`.

    `overlap_fraction` of a collective, below 1, is the part of its active time that it loses to
    others of the rank. For a compute op it is the part during which communication of the rank is
    under way, up to 1: `attribution` says how much of that is lost.
    """

    waiting: Seconds
    active: Seconds
    overlap_fraction: float

    @property
    def alone(self) -> Seconds:
        """What the active time would be without what is lost to others."""
        return self.active * (1 - self.overlap_fraction)


class _Steps:
    """A sum of weighted intervals, and its integrals over time."""

    def __init__(self, intervals: Iterable[tuple[Seconds, Seconds, float]]) -> None:
        changes: dict[Seconds, float] = defaultdict(float)
        for start, end, weight in intervals:
            changes[start] += weight
            changes[end] -= weight
        self._times = np.array(sorted(changes))
        level = np.cumsum([changes[time] for time in self._times])[:-1]
        some = level > _ROUNDING
        shares = np.divide(1.0, level, out=np.zeros_like(level), where=some)
        length = np.diff(self._times)
        self._covered = np.concatenate([[0.0], np.cumsum(length * some)])
        self._shared = np.concatenate([[0.0], np.cumsum(length * shares)])

    def _integral(self, start: Seconds, end: Seconds, values: NDArray[np.float64]) -> float:
        if not len(self._times):
            return 0.0
        return float(np.diff(np.interp([start, end], self._times, values))[0])

    def covered(self, start: Seconds, end: Seconds) -> Seconds:
        """Time with at least one interval."""
        return self._integral(start, end, self._covered)

    def shared(self, start: Seconds, end: Seconds) -> Seconds:
        """Time, each instant divided by the weight of all intervals there."""
        return self._integral(start, end, self._shared)


def split(trace: Trace, schedule: Schedule, cluster: Cluster, first: int) -> dict[Key, Split]:
    """Every span of the rounds from `first` on, split.

    A compute op overlaps while a collective of its rank runs. A collective loses to others of its
    rank the time until it may run, and what equal shares of the link that bounds it on `cluster`
    (`CollectiveCost.bound_by`) leave to them; of the latter only the share of its time alone
    that is not latency.
    """
    works = {op.name: op.work for op in schedule.body if isinstance(op.work, Collective)}
    costs = {work: _bound(cost_of(work, cluster), cluster) for work in set(works.values())}
    bounds = {name: costs[work] for name, work in works.items()}
    starts = active_starts(trace, schedule)
    running = _running_starts(trace, schedule, cluster, starts)
    flights: dict[int, list[tuple[Seconds, Seconds, str]]] = {rank: [] for rank in trace.ranks}
    for span in trace.spans:
        if span.op in works:
            start = running[span.op, span.round, span.rank]
            flights[span.rank].append((start, span.end, span.op))
    traffic = {
        rank: _Steps((start, end, 1.0) for start, end, _ in flown)
        for rank, flown in flights.items()
    }
    links = {
        (rank, link): _Steps(
            (start, end, bounds[op].flows[link])
            for start, end, op in flown
            if bounds[op].flows[link]
        )
        for rank, flown in flights.items()
        for link in range(3)
    }
    splits: dict[Key, Split] = {}
    for span in trace.spans:
        if span.round < first:
            continue
        key = (span.op, span.round, span.rank)
        length = max(0.0, span.end - span.start)
        if span.op in works:
            bound = bounds[span.op]
            mine = links[span.rank, bound.link].shared(running[key], span.end)
            splits[key] = _collective(span, starts[key], running[key], mine, bound)
        else:
            overlap = traffic[span.rank].covered(span.start, span.end) / length if length else 0.0
            splits[key] = Split(0.0, length, min(overlap, 1.0))
    return splits


def _collective(
    span: Span, start: Seconds, running: Seconds, shared: Seconds, bound: "_Bound"
) -> Split:
    """One collective; `shared` is its time on its link, divided by the flows there."""
    waiting = max(0.0, start - span.start)
    active = max(0.0, span.end - start)
    runs = max(0.0, span.end - running)
    taken = max(0.0, runs - bound.flows[bound.link] * shared) * bound.growing
    overlap = (active - runs + taken) / active if active else 0.0
    return Split(waiting, active, min(overlap, _CLOSE) if overlap > _ROUNDING else 0.0)


def _running_starts(
    trace: Trace, schedule: Schedule, cluster: Cluster, starts: Mapping[Key, Seconds]
) -> dict[Key, Seconds]:
    """When every collective may run: at its active start, or later.

    A communicator of NCCL that several streams share runs its collectives one at a time.
    """
    running = dict(starts)
    if cluster.backend != "nccl" or cluster.communicators != "group":
        return running
    groups = {op.name: op.work.group for op in schedule.body if isinstance(op.work, Collective)}
    free: dict[tuple[int, Group], Seconds] = {}
    for span in sorted((span for span in trace.spans if span.op in groups), key=lambda s: s.end):
        key, member = (span.op, span.round, span.rank), (span.rank, groups[span.op])
        running[key] = min(span.end, max(starts[key], free.get(member, 0.0)))
        free[member] = span.end
    return running


def active_starts(trace: Trace, schedule: Schedule) -> dict[Key, Seconds]:
    """When the last member of its group had started, for every collective; never after its end."""
    groups = {op.name: op.work.group for op in schedule.body if isinstance(op.work, Collective)}
    last: dict[tuple[str, int, range], Seconds] = {}
    meetings: list[tuple[Span, tuple[str, int, range]]] = []
    for span in trace.spans:
        if span.op in groups:
            members = groups[span.op].members(span.rank, trace.layout)
            meeting = (span.op, span.round, members)
            last[meeting] = max(last.get(meeting, span.start), span.start)
            meetings.append((span, meeting))
    return {
        (span.op, span.round, span.rank): max(span.start, min(last[meeting], span.end))
        for span, meeting in meetings
    }


@dataclass(frozen=True, slots=True)
class _Bound:
    """Flows on the link of a GPU, of a node and of a site, and which of them bounds the time.

    `growing` is the share of the time alone that is not latency.
    """

    flows: tuple[float, float, float]
    link: int
    growing: float


def _bound(cost: CollectiveCost, cluster: Cluster) -> _Bound:
    on_node, on_site = cost.groups(cluster)
    counts = (1.0, float(on_node), float(on_site))
    loads = cost.bytes_per_link(cluster)
    intra, inter, far = (count if size else 0.0 for count, size in zip(counts, loads, strict=True))
    alone = cost.duration_alone(cluster)
    return _Bound(
        flows=(intra, inter, far),
        link=cost.bound_by(cluster),
        growing=1 - cost.latency / alone if alone else 0.0,
    )


_MAX_INFLATION = 6.0
"""Variance inflation above which sizes are too similar to separate fixed from growing time."""
_MIN_SPREAD = 0.05
"""Standard deviation of the overlap of equal works below which it explains nothing."""
_RATES = np.linspace(0.0, 0.9, 181)


class WorkTime(NamedTuple):
    """A work: its family, predicted fixed and growing time alone, and its measured time alone."""

    family: str
    fixed: Seconds
    growing: Seconds
    measured: Seconds


def fixed_and_slope(points: Sequence[WorkTime]) -> float | None:
    """The factor a of the best fit measured = a x fixed + b x growing, with one b per family.

    Least squares of relative errors, a >= 0. No fixed time may exceed what was measured. None where
    the points are too few, or their sizes too similar.
    """
    used = [p for p in points if p.measured > 0]
    if not any(p.fixed for p in used):
        return None
    fixed = np.array([p.fixed / p.measured for p in used])
    growing = np.array([p.growing / p.measured for p in used])
    rest_fixed, rest_measured = fixed.copy(), np.ones(len(used))
    for family in {p.family for p in used}:
        mine = np.array([p.family == family for p in used])
        slope = growing[mine]
        square = float(slope @ slope)
        if square:
            rest_fixed[mine] -= slope * (slope @ fixed[mine]) / square
            rest_measured[mine] -= slope * (slope @ rest_measured[mine]) / square
    left = float(rest_fixed @ rest_fixed)
    if left * _MAX_INFLATION < float(fixed @ fixed):
        return None
    most = 1 / float(fixed.max())
    return float(min(max(0.0, float(rest_fixed @ rest_measured) / left), most))


def interference(samples: Sequence[tuple[Hashable, Seconds, float]]) -> float:
    """The fraction of their speed, 0 to 0.9, that computes lose while communication is under way.

    Samples are (work, seconds, fraction of them with communication); samples of one work should
    take equally long alone. The fraction is the one of `_RATES` that makes them most nearly so: 0
    where no work ran both with and without communication.
    """
    if not samples:
        return 0.0
    numbers: dict[Hashable, int] = {}
    group = np.array([numbers.setdefault(work, len(numbers)) for work, _, _ in samples])
    times = np.array([time for _, time, _ in samples])
    overlap = np.array([fraction for _, _, fraction in samples])
    count = np.bincount(group, weights=times)

    def variance(values: NDArray[np.float64]) -> float:
        centred = values - (np.bincount(group, weights=values * times) / count)[group]
        return float((centred**2) @ times) / float(times.sum())

    if variance(overlap) < _MIN_SPREAD**2:
        return 0.0
    spread = [variance(np.log(times) + np.log(1 - rate * overlap)) for rate in _RATES]
    return float(_RATES[int(np.argmin(spread))])


AGREES = 0.01
"""Relative mean error below which no cause is named."""


class Cause(StrEnum):
    """What a part of an error comes from."""

    BANDWIDTH = "bandwidth"
    """Collectives: time alone that grows with the bytes, or that nothing else explains. Where the
    sizes of a group do not tell it from latency: all of it, if bytes dominate the prediction."""
    LATENCY = "latency"
    """Collectives: fixed time per call. Where sizes do not tell: all of it, if latency steps
    dominate the prediction."""
    CONTENTION = "contention"
    """Collectives: more or less overlap with others on the same link than predicted. Computes: a
    slowdown by communication at the same time that differs from the predicted one."""
    WAITING = "waiting"
    """Collectives: longer or shorter until the last member of the group has started. Waits up to
    the clock error of the trace do not count."""
    STRAGGLER = "straggler"
    """Computes: the rank is slower than others in all that it computes. The others wait for it."""
    LAUNCH = "launch"
    """Computes: fixed time per op. Where sizes do not tell: all of it, if launch dominates the
    prediction."""
    COMPUTE = "compute"
    """Computes: time alone that grows with the work (arithmetic or memory), and all the rest."""

    @property
    def words(self) -> str:
        """The cause as tables name it."""
        return "waiting for a straggler" if self is Cause.WAITING else self.value


class Difference(NamedTuple):
    """One op of one round on one rank, in both traces; `parts` sum to measured - predicted."""

    op: str
    round: int
    rank: int
    predicted: Seconds
    measured: Seconds
    parts: Mapping[Cause, Seconds]

    @property
    def error(self) -> Seconds:
        """Measured - predicted."""
        return self.measured - self.predicted


Work: TypeAlias = tuple[str, Flops, Bytes] | tuple[Kind, Bytes, Group]
"""What makes works equal."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """Predicted time alone of a work: `fixed` + `growing`. Works of a `pool` share a fixed time."""

    work: Work
    family: str
    pool: Group | None
    fixed: Seconds
    growing: Seconds


def attribute(
    schedule: Schedule,
    cluster: Cluster,
    precision: str,
    predicted: Trace,
    measured: Trace,
    *,
    rounds: int,
    clock_error: Seconds = 0.0,
) -> list[Difference]:
    """Every op that both traces hold in the last `rounds` rounds, with its error by cause.

    Waiting that is no longer than the error of the clocks counts as none.
    """
    first = measured.rounds - rounds
    before, after = (split(trace, schedule, cluster, first) for trace in (predicted, measured))
    by_work = {work: _cost(work, cluster, precision) for work in {op.work for op in schedule.body}}
    costs = {op.name: by_work[op.work] for op in schedule.body}
    keys = [key for key in after if key in before]
    here, there = (
        np.reshape([splits[key] for key in keys], (-1, 3)).T for splits in (before, after)
    )
    unsure = there[0] <= clock_error
    there[1] += np.where(unsure, there[0], 0.0)
    there[0] = np.where(unsure, 0.0, there[0])
    of_ops = [costs[op] for op, *_ in keys]
    computes = np.array([cost.pool is None for cost in of_ops], dtype=bool)
    samples = [
        ((cost.work, key[2]), active, overlap)
        for cost, key, active, overlap in zip(of_ops, keys, *there[1:], strict=True)
        if cost.pool is None and active > 0
    ]
    here[2, computes] *= cluster.interference / (1 + cluster.interference)
    there[2, computes] *= interference(samples)
    alone, taken = (active * (1 - overlap) for _, active, overlap in (here, there))
    paces = _paces([rank for *_, rank in keys], computes, alone, taken)
    fits = _fit(of_ops, taken / paces, there[2] > 0)
    return [
        Difference(*key, float(now), float(then), parts)
        for key, now, then, parts in zip(
            keys,
            here[:2].sum(axis=0),
            there[:2].sum(axis=0),
            _parts(of_ops, here, there, paces, fits),
            strict=True,
        )
    ]


def dominant(parts: Mapping[Cause, Seconds], error: Seconds, predicted: Seconds) -> Cause | None:
    """The cause of the largest part in the direction of the error; None where traces agree."""
    if not parts or abs(error) <= AGREES * predicted:
        return None
    return max(parts, key=lambda cause: parts[cause] * math.copysign(1.0, error))


def _cost(work: Compute | Collective, cluster: Cluster, precision: str) -> _Cost:
    if isinstance(work, Compute):
        launch = cluster.gpu.launch_overhead if work.place == "gpu" else 0.0
        growing = work_time(work, cluster, precision) - launch
        key: Work = (work.kernel, work.flops, work.memory_bytes)
        return _Cost(key, work.kernel, None, launch, growing)
    cost = cost_of(work, cluster)
    key = (work.kind, work.bytes, work.group)
    return _Cost(
        key, work.kind, work.group, cost.latency, cost.duration_alone(cluster) - cost.latency
    )


def _paces(ranks: Sequence[int], computes: NDArray[np.bool_], alone: Array, taken: Array) -> Array:
    """How many times slower the rank of each op computes than the first quartile; at least 1.

    1 for collectives. `alone` and `taken` are times alone, predicted and measured.
    """
    count = max(ranks, default=0) + 1
    stated, needed = (
        np.bincount(np.array(ranks, dtype=int)[computes], times[computes], count)
        for times in (alone, taken)
    )
    by_rank = np.divide(needed, stated, out=np.zeros(count), where=stated > 0)
    ordered = np.sort(by_rank[stated > 0])
    usual = ordered[(len(ordered) - 1) // 4] if len(ordered) else 0.0
    paces = np.maximum(1.0, by_rank / usual) if usual else np.ones(count)
    return np.where(computes, paces[np.array(ranks, dtype=int)], 1.0)


def _fit(of_ops: Sequence[_Cost], taken: Array, overlapped: NDArray[np.bool_]) -> dict[Work, float]:
    """The fixed part of the measured time alone of every work; NaN where sizes do not tell.

    Where a work ran without communication, too, only that counts.
    """
    rows: dict[_Cost, list[int]] = {}
    for row, cost in enumerate(of_ops):
        rows.setdefault(cost, []).append(row)
    pools: dict[Group | None, list[_Cost]] = {}
    for cost in rows:
        pools.setdefault(cost.pool, []).append(cost)
    fits: dict[Work, float] = {}
    for pool in pools.values():
        any_fixed = any(cost.fixed for cost in pool)
        points = []
        for cost in pool:
            free = [row for row in rows[cost] if not overlapped[row]]
            middle = float(np.median(taken[free or rows[cost]]))
            fixed = cost.fixed if any_fixed else 1.0
            points.append(WorkTime(cost.family, fixed, cost.growing, middle))
        factor = fixed_and_slope(points)
        for cost, point in zip(pool, points, strict=True):
            fits[cost.work] = math.nan if factor is None else factor * point.fixed
    return fits


def _parts(
    of_ops: Sequence[_Cost], here: Array, there: Array, paces: Array, fits: Mapping[Work, float]
) -> Iterator[dict[Cause, Seconds]]:
    """The errors of ops by cause.

    `here` and `there` are waiting, active and overlap of each, predicted and measured.
    """
    mean = _mean(here[1], there[1])
    contention = mean * np.log((1 - here[2]) / (1 - there[2]))
    straggler = mean * np.log(paces)
    rest = there[1] - here[1] - contention - straggler
    usual = _mean(here[1] * (1 - here[2]), there[1] * (1 - there[2]) / paces)
    scale = np.divide(mean, usual, out=np.ones_like(mean), where=usual != 0)
    for row, cost in enumerate(of_ops):
        fit, left = fits[cost.work], float(rest[row])
        if math.isnan(fit):
            fixed = left if cost.fixed > cost.growing else 0.0
        else:
            fixed = float((fit - cost.fixed) * scale[row])
        parts = {Cause.CONTENTION: float(contention[row])}
        if cost.pool is None:
            parts |= {Cause.STRAGGLER: float(straggler[row])}
            yield parts | {Cause.LAUNCH: fixed, Cause.COMPUTE: left - fixed}
        else:
            parts |= {Cause.WAITING: float(there[0, row] - here[0, row])}
            yield parts | {Cause.LATENCY: fixed, Cause.BANDWIDTH: left - fixed}


def _mean(first: Array, second: Array) -> Array:
    """The logarithmic mean: second - first = mean x log(second / first). 0 if either is 0."""
    some = (first > 0) & (second > 0)
    change = np.log(np.divide(second, first, out=np.ones_like(first), where=some))
    mean = np.divide(second - first, change, out=first.copy(), where=np.abs(change) > _ROUNDING)
    return np.where(some, mean, 0.0)


def totals(differences: Sequence[Difference]) -> dict[Cause, Seconds]:
    """Parts of several differences, summed with their signs."""
    sums = dict.fromkeys(Cause, 0.0)
    for difference in differences:
        for cause, part in difference.parts.items():
            sums[cause] += part
    return sums
