"""What happened when: the rules that every trace must obey, and files that viewers open."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from co2sim.common import files
from co2sim.common.errors import CatalogError, ScheduleError, given
from co2sim.common.files import MAX_RECORD_BYTES, text_of
from co2sim.common.html_card import card
from co2sim.common.units import Seconds, counted, duration
from co2sim.schedule.schedule import Collective, Instance, Kind, Layout, Op, Schedule


class Span(NamedTuple):
    """One op of one round on one rank. A collective's span starts when the rank is ready for it."""

    rank: int
    round: int
    op: str
    stream: str
    start: Seconds
    end: Seconds


class Grid(NamedTuple):
    """Starts and ends in s, [round, place of the op, place of the rank]; NaN without a span."""

    starts: NDArray[np.float64]
    ends: NDArray[np.float64]


class SpanTable(Sequence[Span]):
    """The spans of a simulation as arrays, made into spans when one is asked for.

    `ops` are the names and streams of a round's ops, `ranks` those that are traced; `starts` and
    `ends` are in s, [round x ops + place of the op, place of the rank]. Spans are in the order in
    which they end.
    """

    def __init__(
        self,
        ops: Sequence[tuple[str, str]],
        ranks: Sequence[int],
        starts: NDArray[np.float64],
        ends: NDArray[np.float64],
    ) -> None:
        """Take the arrays as they are."""
        self.ops, self.ranks, self.starts, self.ends = ops, ranks, starts, ends

    @cached_property
    def _spans(self) -> tuple[Span, ...]:
        order = np.argsort(self.ends, axis=None, kind="stable")
        numbers, places = np.divmod(order, len(self.ranks))
        starts, ends = self.starts.ravel()[order].tolist(), self.ends.ravel()[order].tolist()
        names, streams = zip(*self.ops, strict=True)
        turns, ops = (values.tolist() for values in np.divmod(numbers, len(self.ops)))
        return tuple(
            [
                Span(self.ranks[column], turn, names[op], streams[op], start, end)
                for column, turn, op, start, end in zip(
                    places.tolist(), turns, ops, starts, ends, strict=True
                )
            ]
        )

    def first(self, rounds: int) -> "SpanTable":
        """Those of the first rounds."""
        kept = rounds * len(self.ops)
        return SpanTable(self.ops, self.ranks, self.starts[:kept], self.ends[:kept])

    def __len__(self) -> int:
        return self.ends.size

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | Sequence[Span]:
        return self._spans[index]

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._spans == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return SpanTable, (self.ops, self.ranks, self.starts, self.ends)


def last_end(spans: Sequence[Span]) -> Seconds:
    """When the last one ends; 0 for none."""
    if isinstance(spans, SpanTable):
        return float(np.nanmax(spans.ends, initial=0.0))
    return max((span.end for span in spans), default=0.0)


def by_stream(spans: Sequence[Span], rank: int) -> dict[str, tuple[int, Seconds]]:
    """The spans of a rank by stream: how many, and how long they take in all."""
    totals: dict[str, tuple[int, Seconds]] = {}
    if isinstance(spans, SpanTable):
        column = spans.ranks.index(rank)
        taken = (spans.ends - spans.starts)[:, column].reshape(-1, len(spans.ops))
        counts, sums = (~np.isnan(taken)).sum(axis=0), np.nansum(taken, axis=0)
        rows = [
            (stream, count, length)
            for (_, stream), count, length in zip(
                spans.ops, counts.tolist(), sums.tolist(), strict=True
            )
        ]
    else:
        rows = [(span.stream, 1, span.end - span.start) for span in spans if span.rank == rank]
    for stream, count, length in rows:
        before, taken_before = totals.get(stream, (0, 0.0))
        totals[stream] = before + count, taken_before + length
    return totals


__all__ = ["Grid", "Span", "SpanTable", "Trace"]


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of a run. `ranks` maps every traced rank to the number of ranks it stands for."""

    schedule: str
    layout: Layout
    rounds: int
    ranks: Mapping[int, int]
    spans: Sequence[Span]

    def first(self, rounds: int) -> "Trace":
        """The trace of the first rounds only."""
        spans: Sequence[Span]
        if isinstance(self.spans, SpanTable):
            spans = self.spans.first(rounds)
        else:
            spans = tuple([span for span in self.spans if span.round < rounds])
        return replace(self, rounds=rounds, spans=spans)

    def grid(self, schedule: Schedule) -> Grid:
        """The spans of all ops of `schedule` as arrays."""
        shape = (self.rounds, len(schedule.body), len(self.ranks))
        spans = self.spans
        if isinstance(spans, SpanTable):
            return Grid(spans.starts.reshape(shape), spans.ends.reshape(shape))
        grid = Grid(np.full(shape, np.nan), np.full(shape, np.nan))
        places = {op.name: position for position, op in enumerate(schedule.body)}
        ranks = {rank: column for column, rank in enumerate(self.ranks)}
        for span in spans:
            if span.op in places and span.rank in ranks and span.round < self.rounds:
                where = span.round, places[span.op], ranks[span.rank]
                grid.starts[where], grid.ends[where] = span.start, span.end
        return grid

    def violations(
        self, schedule: Schedule, tolerance: Seconds = 0.0, skew: Seconds = 0.0
    ) -> list[str]:
        """Broken rules of the schedule, as texts; empty for a correct trace.

        `tolerance` is the clock error to forgive. `skew` is how far apart a collective may end on
        its members: 0 in a simulation; on a real network (infinity) a member leaves as soon as its
        own part is done, but never before every member has come.
        """
        return list(_violations(self, schedule, tolerance, skew))

    def _repr_html_(self) -> str:
        """For notebooks: how much there is of it, and what the first rank did."""
        took, rounds = duration(last_end(self.spans)), counted(self.rounds, "round")
        traced = f"{len(self.ranks):,} of {counted(self.layout.world_size, 'rank')} traced"
        answer = (
            f"{self.schedule}: {rounds} in {took}, {traced}, {counted(len(self.spans), 'span')}."
        )
        if not self.ranks:
            return card(answer, [])
        rank, count = next(iter(self.ranks.items()))
        rows = [
            (stream, f"{many:,}", duration(length))
            for stream, (many, length) in by_stream(self.spans, rank).items()
        ]
        stands = f"Rank {rank} stands for {count} equal ranks." if count > 1 else ""
        columns = "stream", f"spans of rank {rank}", "which take in all"
        return card(answer, rows, columns, [stands] if stands else [])

    def to_chrome(self, schedule: Schedule) -> dict[str, object]:
        """Chrome trace: one process per rank, one track per stream. Perfetto opens it."""
        ops = {op.name: op for op in schedule.body}
        tracks = {stream: tid for tid, stream in enumerate(schedule.streams)}
        events: list[dict[str, object]] = []
        for rank, count in self.ranks.items():
            stands = f" (stands for {count} ranks)" if count > 1 else ""
            events.append(_named("process_name", f"rank {rank}{stands}", rank))
            events.extend(
                _named("thread_name", stream, rank, tid) for stream, tid in tracks.items()
            )
        events.extend(
            {
                "name": span.op,
                "cat": span.stream,
                "ph": "X",
                "pid": span.rank,
                "tid": tracks[span.stream],
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"round": span.round, **_arguments(ops[span.op])},
            }
            for span in self.spans
        )
        return {
            "displayTimeUnit": "ms",
            "otherData": {"schedule": self.schedule},
            "traceEvents": events,
        }

    def to_json_lines(self) -> Iterator[str]:
        """A header line, then one line per span; `read_json_lines` is the inverse."""
        yield json.dumps(
            {
                "schedule": self.schedule,
                "nodes": self.layout.nodes,
                "gpus_per_node": self.layout.gpus_per_node,
                **({"sites": self.layout.sites} if self.layout.sites > 1 else {}),
                "rounds": self.rounds,
                "ranks": {str(rank): count for rank, count in self.ranks.items()},
            }
        )
        for span in self.spans:
            yield json.dumps(span._asdict())


def _named(kind: str, name: str, rank: int, track: int = 0) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def _arguments(op: Op) -> dict[str, object]:
    if isinstance(op.work, Collective):
        work = op.work
        return {"work": str(work), "kind": work.kind, "bytes": work.bytes, "group": str(work.group)}
    return {"work": str(op.work), "flops": op.work.flops, "bytes": op.work.memory_bytes}


def _violations(
    trace: Trace, schedule: Schedule, tolerance: Seconds, skew: Seconds
) -> Iterator[str]:
    span_of: dict[tuple[int, int, str], Span] = {}
    for span in trace.spans:
        if (span.rank, span.round, span.op) in span_of:
            yield f"rank {span.rank} ran {span.op!r} twice in round {span.round}"
        if span.end < span.start - tolerance:
            yield f"rank {span.rank}: {span.op!r} of round {span.round} ends before it starts"
        span_of[span.rank, span.round, span.op] = span
    instances = list(schedule.instances(trace.rounds))
    for rank in trace.ranks:
        yield from _order(rank, instances, span_of, tolerance)
    expected = len(instances) * len(trace.ranks)
    if len(span_of) > expected:
        yield f"{len(span_of) - expected} spans are not in the schedule"
    yield from _togetherness(trace, schedule, span_of, tolerance, skew)


def _order(
    rank: int,
    instances: Iterable[Instance],
    span_of: Mapping[tuple[int, int, str], Span],
    tolerance: Seconds,
) -> Iterator[str]:
    free: dict[str, Span] = {}
    spans: list[Span | None] = []
    for instance in instances:
        _, turn, op, waits = instance
        span = span_of.get((rank, turn, op.name))
        spans.append(span)
        if span is None:
            yield f"rank {rank} did not run {op.name!r} in round {turn}"
            continue
        which = f"rank {rank}: {op.name!r} of round {turn}"
        if span.stream != op.stream:
            yield f"{which} ran on {span.stream!r}, not on {op.stream!r}"
        before = free.get(op.stream)
        if before is not None and span.start < before.end - tolerance:
            yield f"{which} starts before {before.op!r} frees {op.stream!r}"
        free[op.stream] = span
        for wait in waits:
            awaited = spans[wait]
            if awaited is not None and span.start < awaited.end - tolerance:
                yield f"{which} starts before {awaited.op!r} has finished"


def _decisive(spans: Sequence[Span], work: Collective) -> tuple[Span, Span]:
    """The member that may not end before another has come, and that other."""
    root = sorted(spans, key=lambda span: span.rank)[work.root % len(spans)]
    first = root if work.kind is Kind.REDUCE else min(spans, key=lambda span: span.end)
    last = root if work.kind is Kind.BROADCAST else max(spans, key=lambda span: span.start)
    return first, last


def _togetherness(
    trace: Trace,
    schedule: Schedule,
    span_of: Mapping[tuple[int, int, str], Span],
    tolerance: Seconds,
    skew: Seconds,
) -> Iterator[str]:
    """A collective ends on no member before all have come, and on all within `skew`."""
    for op in schedule.body:
        if not isinstance(op.work, Collective):
            continue
        for turn in range(trace.rounds):
            meetings: dict[range, list[Span]] = {}
            for rank in trace.ranks:
                if (rank, turn, op.name) in span_of:
                    members = op.work.group.members(rank, trace.layout)
                    meetings.setdefault(members, []).append(span_of[rank, turn, op.name])
            for spans in meetings.values():
                which = f"{op.name!r} of round {turn}"
                first, last = _decisive(spans, op.work)
                if first.end < last.start - tolerance:
                    early = duration(last.start - first.end)
                    yield (
                        f"{which} ends on rank {first.rank} {early} before rank {last.rank} has"
                        " come"
                    )
                ends = [span.end for span in spans]
                if max(ends) - min(ends) > skew + tolerance:
                    yield f"{which} ends apart in the group of rank {first.rank}"


_MAX = 10**9
"""Ranks, and rounds: beyond any trace that fits into a file."""
_LATEST: Seconds = 1e12
"""Of a time in a trace: 30,000 years."""
_FIELDS = frozenset(Span._fields)


def read_json_lines(path: Path) -> Trace:
    """Read a trace written by `to_json_lines`. Raises CatalogError when the file is not one."""
    try:
        lines = text_of(path, MAX_RECORD_BYTES).splitlines()
        head = _header(files.json_line(lines[0] if lines else ""))
        rows = enumerate(lines[1:], start=2)
        return replace(head, spans=tuple(_span(head, n, line) for n, line in rows))
    except OSError as error:
        raise CatalogError(f"{path} is not a trace in JSON Lines: {error.strerror}") from error
    except (ValueError, ScheduleError) as error:
        raise CatalogError(f"{path} is not a trace in JSON Lines: {error}") from error


def _header(row: Any) -> Trace:
    """What the first line says. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError(f"line 1 is {given(row)}; it must be an object")  # noqa: TRY004 - as below
    lacking = [name for name in ("schedule", "nodes", "gpus_per_node", "rounds") if name not in row]
    if lacking or not isinstance(row.get("ranks"), dict):
        raise ValueError(
            f"line 1 has no {(lacking or ['ranks'])[0]!r}, as the first line must have"
        )
    counts = [row["nodes"], row["gpus_per_node"], row.get("sites", 1), row["rounds"]]
    counts += row["ranks"].values()
    wrong = [count for count in counts if type(count) is not int or not 1 <= count <= _MAX]
    wrong += [rank for rank in row["ranks"] if not _is_rank(rank)]
    wrong += [] if isinstance(row["schedule"], str) else [row["schedule"]]
    if wrong:
        raise ValueError(
            f"line 1 holds {given(wrong[0])}; its counts must be whole numbers of 1 or more, and"
            " its schedule a text"
        )
    return Trace(
        schedule=row["schedule"],
        layout=Layout(row["nodes"], row["gpus_per_node"], row.get("sites", 1)),
        rounds=row["rounds"],
        ranks={int(rank): many for rank, many in row["ranks"].items()},
        spans=(),
    )


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < len(str(_MAX))


def _span(head: Trace, line_number: int, line: str) -> Span:
    """The span of a line. Raises ValueError."""
    row = files.json_line(line)
    if not isinstance(row, dict) or row.keys() != _FIELDS:
        raise ValueError(f"line {line_number} must be an object of {', '.join(Span._fields)}")
    span = Span(**row)
    whole = type(span.rank) is int and type(span.round) is int
    if not whole or span.rank not in head.ranks or not 0 <= span.round < head.rounds:
        raise ValueError(
            f"line {line_number}: rank {given(span.rank)} and round {given(span.round)} must be"
            " among those of the first line"
        )
    if not isinstance(span.op, str) or not isinstance(span.stream, str):
        raise ValueError(f"line {line_number}: op and stream must be texts")  # noqa: TRY004 - as above
    times = span.start, span.end
    if not all(type(time) in {int, float} and -_LATEST < time < _LATEST for time in times):
        raise ValueError(f"line {line_number}: start and end must be numbers of seconds")
    return span
