"""Every span of a trace, split: waiting for others, then active, alone or overlapped."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from co2sim.common.units import Seconds
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import Collective, Group, Schedule
from co2sim.simulation.costs import CollectiveCost, cost_of
from co2sim.simulation.trace import Span, Trace

Key: TypeAlias = tuple[str, int, int]
"""Op, round and rank: what the spans of two traces are joined by."""

_CLOSE = 0.999
"""The largest fraction of its time that anything loses to others."""
_ROUNDING = 1e-9
"""Fractions, and sums of weights, below which there is only rounding."""


@dataclass(frozen=True, slots=True)
class Split:
    """One span, in seconds: `waiting` for the last member of its group, then `active`.

    `overlap_fraction` of a collective, below 1, is the part of its active time that it loses to
    others of the rank. For a compute op it is the part during which communication of the rank is
    under way, up to 1: `attribution` says how much of that is lost.
    """

    waiting: Seconds
    active: Seconds
    overlap_fraction: float

    @property
    def total(self) -> Seconds:
        """Length of the span."""
        return self.waiting + self.active

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
        key, place = (span.op, span.round, span.rank), (span.rank, groups[span.op])
        running[key] = min(span.end, max(starts[key], free.get(place, 0.0)))
        free[place] = span.end
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
