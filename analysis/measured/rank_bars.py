"""What a rank does in the last rounds of a trace, as bars of a timeline."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from analysis.measured.comparison import RunComparison
from analysis.measured.spans import active_starts
from co2sim import metrics
from co2sim.errors import OptionError
from co2sim.schedule import Collective, Op, Schedule
from co2sim.trace import Trace
from co2sim.units import Seconds

WAITS = "waiting for the last rank"
PIXELS = 1500
"""Width of a timeline, about; what is thinner is drawn together with its neighbour."""


@dataclass(frozen=True, slots=True)
class RankBar:
    """Ops of one label on a stream; `first` and `last` name them, `count` says how many."""

    stream: str
    label: str
    start: Seconds
    end: Seconds
    first: str
    last: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class RankWindow:
    """The rounds of one rank that are drawn: they begin and end by its own computes."""

    trace: Trace
    schedule: Schedule
    rank: int
    start: Seconds
    end: Seconds

    def bars(self, length: Seconds) -> list[RankBar]:
        """What the rank does so long from the start on; the start is 0, and both ends are cut."""
        start, end = self.start, self.start + length
        labels = {op.name: bar_label(op) for op in self.schedule.body}
        active = active_starts(self.trace, self.schedule)
        bars = []
        for span in self.trace.spans:
            if span.rank != self.rank or span.end <= start or span.start >= end:
                continue
            begins = active.get((span.op, span.round, self.rank), span.start)
            middle = min(max(begins, start), end)
            for name, first, last in (
                (WAITS, max(span.start, start), middle),
                (labels[span.op], middle, min(span.end, end)),
            ):
                if last > first:
                    place = (span.stream, name, first - start, last - start)
                    bars.append(RankBar(*place, span.op, span.op))
        lanes = {stream: lane for lane, stream in enumerate(self.schedule.streams)}
        ordered = sorted(bars, key=lambda bar: (lanes[bar.stream], bar.start))
        return _merged(ordered, length / PIXELS)


def windows(run: RunComparison, rank: int) -> tuple[RankWindow, RankWindow]:
    """Predicted and measured. Raises OptionError for a rank that was not traced."""
    ranks = run.record.trace.ranks
    if rank not in ranks:
        raise OptionError(f"--rank {rank}: {run.name} has the ranks 0 to {max(ranks)}")
    rounds = rounds_shown(run)
    before, after = (
        RankWindow(trace, run.schedule, rank, during.start, during.end)
        for trace in (run.simulated, run.record.trace)
        for during in (metrics.window(_only(trace, rank), run.schedule, rounds),)
    )
    return before, after


def rounds_shown(run: RunComparison) -> int:
    """The last measured round, or two if a round is a single step."""
    return min(2 if run.schedule.steps == 1 else 1, run.record.rounds)


def bar_label(op: Op) -> str:
    """The kernel, or the kind of the collective."""
    work = op.work
    return f"{work.kind} over {work.group}" if isinstance(work, Collective) else work.kernel


def _only(trace: Trace, rank: int) -> Trace:
    return replace(trace, spans=tuple(span for span in trace.spans if span.rank == rank))


def _merged(bars: Iterable[RankBar], pixel: Seconds) -> list[RankBar]:
    """Thin bars of one stream and label with a gap of less than a pixel between them, as one."""
    merged: list[RankBar] = []
    for bar in bars:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.stream, last.label) == (bar.stream, bar.label)
            and bar.start - last.end < pixel / 2
            and min(bar.end - bar.start, last.end - last.start) < 4 * pixel
        ):
            end, count = max(last.end, bar.end), last.count + bar.count
            merged[-1] = replace(last, end=end, last=bar.last, count=count)
        else:
            merged.append(bar)
    return merged
