"""What one op does on one rank: a span; many of them as arrays."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from co2sim.units import Seconds


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
    """The spans of a simulation as arrays, made into spans when somebody looks at one.

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
        turns, ops = (found.tolist() for found in np.divmod(numbers, len(self.ops)))
        return tuple(
            [
                Span(self.ranks[place], turn, names[op], streams[op], start, end)
                for place, turn, op, start, end in zip(
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
    found: dict[str, tuple[int, Seconds]] = {}
    if isinstance(spans, SpanTable):
        place = spans.ranks.index(rank)
        taken = (spans.ends - spans.starts)[:, place].reshape(-1, len(spans.ops))
        counts, sums = (~np.isnan(taken)).sum(axis=0), np.nansum(taken, axis=0)
        own = [
            (stream, count, length)
            for (_, stream), count, length in zip(
                spans.ops, counts.tolist(), sums.tolist(), strict=True
            )
        ]
    else:
        own = [(span.stream, 1, span.end - span.start) for span in spans if span.rank == rank]
    for stream, count, length in own:
        before, taken_before = found.get(stream, (0, 0.0))
        found[stream] = before + count, taken_before + length
    return found
