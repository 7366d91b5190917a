"""What a trace means: times, overlap, throughput. Every figure is defined here, once."""

from collections.abc import Iterable
from dataclasses import dataclass

from co2sim.schedule import LEADERS, Collective, Compute, Op, Schedule
from co2sim.trace import Span, Trace
from co2sim.units import Seconds

_STEADY = 1e-9
"""Relative difference below which two periods count as equal."""


@dataclass(frozen=True, slots=True)
class Window:
    """The last `rounds` rounds of a trace: from the end of the last compute op before them on."""

    start: Seconds
    end: Seconds
    rounds: int

    @property
    def round_time(self) -> Seconds:
        """Average length of a round."""
        return (self.end - self.start) / self.rounds


def window(trace: Trace, schedule: Schedule, rounds: int) -> Window:
    """The last `rounds` rounds. A trace of just as many rounds starts at 0."""
    last = next(op for op in reversed(schedule.body) if isinstance(op.work, Compute)).name
    before = trace.rounds - rounds - 1
    ends = {before: 0.0, trace.rounds - 1: 0.0}
    for span in trace.spans:
        if span.op == last and span.round in ends:
            ends[span.round] = max(ends[span.round], span.end)
    return Window(ends[before], ends[trace.rounds - 1], rounds)


def is_steady(trace: Trace, schedule: Schedule, rounds: int = 1) -> bool:
    """Whether the last `rounds` rounds, and every further one, repeat the same, shifted in time.

    True if their periods, and the last `lag` ones, are equal for all ops: then all that the next
    round waits for is shifted by the same time.
    """
    periods = max(schedule.lag, rounds)
    first = trace.rounds - 1 - periods
    if first < 0:
        return False
    ends = {(s.round, s.rank, s.op): s.end for s in trace.spans if s.round >= first}
    shift = [
        end - ends[turn - 1, rank, op] for (turn, rank, op), end in ends.items() if turn > first
    ]
    return max(shift) - min(shift) <= _STEADY * max(shift)


def busy(spans: Iterable[Span], during: Window) -> Seconds:
    """Time in the window, per round, during which at least one of the spans was under way."""
    total, reached = 0.0, during.start
    for start, end in sorted((span.start, min(span.end, during.end)) for span in spans):
        if end > max(start, reached):
            total += end - max(start, reached)
            reached = end
    return total / during.rounds


@dataclass(frozen=True, slots=True)
class Communication:
    """Seconds per round of the busiest rank: collectives under way, and waits for slower ranks."""

    busy: Seconds
    waiting: Seconds


def communication(trace: Trace, schedule: Schedule, during: Window) -> Communication:
    """Split the spans of collectives into waiting and communication.

    A span starts when its rank is ready. Until the last member is there it waits; from then on it
    communicates (or waits for its communicator). A rank that is alone in its group only copies.
    The busiest and the longest waiting rank count; where the first ranks of nodes do something
    alone, the others wait for what these do, so that only the waits of these count.
    """
    groups = {op.name: op.work.group for op in schedule.body if isinstance(op.work, Collective)}
    started: dict[tuple[str, int, range], Seconds] = {}
    spans, meetings = [], []
    for span in trace.spans:
        if span.op not in groups or span.end <= during.start:
            continue
        members = groups[span.op].members(span.rank, trace.layout)
        if len(members) == 1:
            continue
        key = (span.op, span.round, members)
        started[key] = max(started.get(key, span.start), span.start)
        spans.append(span)
        meetings.append(key)
    under_way: dict[int, list[Span]] = {rank: [] for rank in trace.ranks}
    waiting: dict[int, list[Span]] = {rank: [] for rank in trace.ranks}
    for span, key in zip(spans, meetings, strict=True):
        under_way[span.rank].append(span._replace(start=started[key]))
        waiting[span.rank].append(span._replace(end=started[key]))
    return Communication(
        busy=max(busy(found, during) for found in under_way.values()),
        waiting=max(
            busy(found, during)
            for rank, found in waiting.items()
            if LEADERS not in groups.values() or not rank % trace.layout.gpus_per_node
        ),
    )


def straggler_delay(round_time: Seconds, equal_round_time: Seconds) -> Seconds:
    """Seconds by which slower or uneven ranks delay a round.

    `equal_round_time` is that of the same case with every node at nominal speed and no jitter; a
    round that is shorter than that is not delayed. Waiting that something else hides is left out
    (`Communication.waiting` counts it): a rank that waits behind its own compute loses no time.
    """
    return max(0.0, round_time - equal_round_time)


def breakdown(trace: Trace, schedule: Schedule) -> dict[str, Seconds]:
    """Seconds per round of each kernel and collective, summed over the last round of one rank."""
    labels = {op.name: _label(op) for op in schedule.body}
    found: dict[str, Seconds] = {}
    rank = next(iter(trace.ranks))
    for span in trace.spans:
        if span.rank == rank and span.round == trace.rounds - 1:
            label = labels[span.op]
            found[label] = found.get(label, 0.0) + span.end - span.start
    return found


def _label(op: Op) -> str:
    return f"{op.work.kind} {op.work.group}" if isinstance(op.work, Collective) else op.work.kernel


def scalability_ratio(per_gpu: float, reference_per_gpu: float) -> float:
    """(throughput_b / b) / (throughput_a / a), from throughputs per GPU at b and at a."""
    return per_gpu / reference_per_gpu
