"""What a trace means: times, overlap, throughput. Every figure is defined here, once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from co2sim.common.units import Seconds
from co2sim.schedule.schedule import Collective, Compute, Schedule
from co2sim.simulation.trace import Grid, Span, Trace

_Array: TypeAlias = NDArray[np.float64]

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
    """The last `rounds` rounds. A trace of just as many rounds starts at 0.

    Where no op computes, the last op of the body stands for the last that does.
    """
    ends = _round_ends(trace, schedule)
    return Window(float(ends[max(0, trace.rounds - rounds)]), float(ends[-1]), rounds)


def round_times(trace: Trace, schedule: Schedule, rounds: int) -> _Array:
    """How long each of the last `rounds` rounds took; their mean is that of the window."""
    return np.diff(_round_ends(trace, schedule)[-1 - rounds :])


def _round_ends(trace: Trace, schedule: Schedule) -> _Array:
    """The start of the trace, and the end of each round; see `window`."""
    body = schedule.body
    backwards = range(len(body) - 1, -1, -1)
    last = next((n for n in backwards if isinstance(body[n].work, Compute)), len(body) - 1)
    ends = np.fmax.reduce(trace.grid(schedule).ends[:, last], axis=-1, initial=0.0)
    return np.concatenate([[0.0], ends])


def is_steady(trace: Trace, schedule: Schedule, rounds: int = 1) -> bool:
    """Whether the last `rounds` rounds, and every further one, repeat the same, shifted in time.

    True if their periods, and the last `lag` ones, are equal for all ops: then all that the next
    round waits for is shifted by the same time.
    """
    periods = max(schedule.lag, rounds)
    first = trace.rounds - 1 - periods
    if first < 0:
        return False
    shift = np.diff(trace.grid(schedule).ends[first:], axis=0)
    return bool(shift.max() - shift.min() <= _STEADY * shift.max())


COMPARED = 4
"""Micro-steps, or local steps, that are compared, just before the last one."""
_EQUAL = 1e-12
"""What may lie between two equal times, as a part of all the time that is simulated."""


class Repeated(NamedTuple):
    """A micro-step, or local step, that repeats: the second of a `row` of places, [step, op].

    `window` is its time in the last round.
    """

    row: NDArray[np.intp]
    window: Window


def repeated(
    schedule: Schedule, trace: Trace, loop: Literal["local_step", "micro_step"]
) -> list[Repeated] | None:
    """The step before the last but two, if it repeats in the trace wherever there are such steps.

    That is in every local step of a round for micro-steps, and once for local steps.
    """
    rows = _rows(schedule, loop)
    if not rows or len(trace.ranks) > 1:
        return None
    starts, ends = (times[..., 0] for times in trace.grid(schedule))
    under_way = np.sort(starts, axis=None), np.sort(ends, axis=None)
    last: list[Repeated] = []
    for start, end in zip(starts, ends, strict=True):
        windows = [(row, _window(start[row], end[row], *under_way)) for row in rows]
        last = [Repeated(row, during) for row, during in windows if during]
        if len(last) < len(windows):
            return None
    return last


def _rows(schedule: Schedule, loop: str) -> list[NDArray[np.intp]]:
    """Places [step, op] of each row of steps; none if those of a row do not do the same."""
    micro = loop == "micro_step"
    steps_of: dict[int | None, dict[int, list[int]]] = {}
    for index, op in enumerate(schedule.body):
        turn = getattr(op.turn, loop)
        if turn is not None:
            row_of = steps_of.setdefault(op.turn.local_step if micro else None, {})
            row_of.setdefault(turn, []).append(index)
    rows: list[NDArray[np.intp]] = []
    for steps in steps_of.values():
        row = [steps[turn] for turn in sorted(steps)[-1 - COMPARED : -1]]
        if len(row) < COMPARED or len(set(map(len, row))) > 1:
            return []
        rows.append(np.array(row))
        apart = np.diff(rows[-1], axis=0)
        does = [[(schedule.work_numbers[n], schedule.offsets[n]) for n in step] for step in row]
        if (apart != apart[0, 0]).any() or any(step != does[0] for step in does):
            return []
    return rows if not micro or len(rows) == schedule.steps else []


def _window(starts: _Array, ends: _Array, all_starts: _Array, all_ends: _Array) -> Window | None:
    """The second of a row of micro-steps, [micro-step, op], if it and the third are alike.

    All of the row come at the same distance, each ends before the next but one begins, and nothing
    else is under way in these two; `all_starts` and `all_ends`, in order, are those of all ops.
    """
    begins, close = starts.min(axis=1), _EQUAL * float(all_ends[-1])
    first, second, end = map(float, begins[1:])
    period = (end - first) / 2
    distances = np.stack([np.diff(starts, axis=0), np.diff(ends, axis=0)])
    if np.abs(distances - period).max() > close or ends[0].max() > second + close:
        return None
    if (ends - starts).max() > period + close:
        return None
    inside = np.count_nonzero((starts < end - close) & (ends > first + close))
    begun = np.searchsorted(all_starts, end - close)
    over = np.searchsorted(all_ends, first + close, side="right")
    return Window(first, first + period, 1) if begun - over == inside else None


def busy(spans: Iterable[Span], during: Window) -> Seconds:
    """Time in the window, per round, during which at least one of the spans was under way."""
    times = [(span.start, span.end) for span in spans]
    starts, ends = np.array(times).reshape(-1, 2).T
    return float(_busy(starts[None], ends[None], during)[0])


def _busy(starts: _Array, ends: _Array, during: Window) -> _Array:
    """As `busy`, by rank, for starts and ends [rank, span]."""
    ends = np.minimum(ends, during.end)
    order = np.lexsort((ends, starts), axis=-1)
    starts, ends = (np.take_along_axis(times, order, axis=-1) for times in (starts, ends))
    first = np.full((len(ends), 1), during.start)
    reached = np.maximum.accumulate(np.concatenate([first, ends], axis=-1), axis=-1)[:, :-1]
    lengths = np.maximum(ends - np.maximum(starts, reached), 0.0)
    added: _Array = np.cumsum(np.concatenate([np.zeros_like(first), lengths], axis=-1), axis=-1)
    return added[:, -1] / during.rounds


@dataclass(frozen=True, slots=True)
class Communication:
    """Seconds per round of the busiest rank: its collectives, and waits for slower ranks."""

    busy: Seconds
    waiting: Seconds


def communication(
    trace: Trace, schedule: Schedule, during: Window, places: NDArray[np.intp] | None = None
) -> Communication:
    """Split the spans of collectives into waiting and communication.

    A span starts when its rank is ready. Until the last member is there it waits. From then on the
    collective is under way (or waits for its communicator), until the last member has ended: ranks
    that share a core end one after the other. A rank that is alone in its group only copies.
    The busiest and the longest waiting rank count; where the first ranks of nodes do something
    alone, the others wait for what these do, so that only the waits of these count. With `places`
    only the ops at these places count.
    """
    led = next((group for group in schedule.groups if group.led), None)
    starts, come, ends = _meetings(trace, schedule, during.start, places)
    waiting = _busy(starts, come, during)
    if led:
        waiting = waiting[np.array([*trace.ranks]) % trace.layout.gpus_per_node < led.stride]
    return Communication(float(_busy(come, ends, during).max()), float(waiting.max()))


def exposed(trace: Trace, schedule: Schedule, during: Window) -> Seconds:
    """Seconds per round in which a rank communicates and computes nothing; those of the most.

    A part of `Communication.busy` of the same rank, by the same spans: never above it. Waiting for
    slower ranks, and what communication makes computation slower, are not in it.
    """
    grid = trace.grid(schedule)
    computes = np.flatnonzero([isinstance(op.work, Compute) for op in schedule.body])
    _, come, ends = _meetings(trace, schedule, during.start, None)
    starts, over = (_by_rank(times[:, computes]) for times in grid)
    counts = over > during.start
    starts, over = (np.where(counts, times, during.start) for times in (starts, over))
    begin, end = np.concatenate([come, starts], axis=-1), np.concatenate([ends, over], axis=-1)
    alone = _busy(begin, end, during) - _busy(starts, over, during)
    most = np.minimum(alone, _busy(come, ends, during)).max()  # but for rounding
    return max(0.0, float(most))


def exposed_by_difference(busy: Seconds, round_time: Seconds, free: Seconds) -> Seconds:
    """What a simulated round takes longer than one with free communication, a part of `busy`.

    What communication makes computation slower is in it. The rest of a difference above `busy`, as
    jitter can make it, is waiting.
    """
    return min(busy, max(0.0, round_time - free))


def overlap_ratio(busy: Seconds, exposed: Seconds) -> float | None:
    """The part of communication that is not exposed; None without communication."""
    return 1 - exposed / busy if busy else None


def _meetings(
    trace: Trace, schedule: Schedule, after: Seconds, places: NDArray[np.intp] | None
) -> tuple[_Array, _Array, _Array]:
    """When a rank comes to each collective, the last rank comes, and all have ended.

    Each is [rank, meeting], and `after` for what ends no later, or where a rank takes no part.
    """
    grid = trace.grid(schedule)
    numbers, counted = np.array(schedule.work_numbers), _among(schedule, places)
    here = {}
    for group in schedule.groups:
        meet = [isinstance(work, Collective) and work.group == group for work in schedule.works]
        here[group] = np.flatnonzero(np.array(meet)[numbers] & counted)
    meetings = trace.rounds * sum(map(len, here.values()))
    times = np.full((3, len(trace.ranks), meetings), after)
    begin = 0
    for group, ops in here.items():
        together: dict[range, list[int]] = {}
        for index, rank in enumerate(trace.ranks):
            together.setdefault(group.members(rank, trace.layout), []).append(index)
        end = begin + trace.rounds * len(ops)
        for members, indices in together.items():
            if len(members) > 1:
                times[:, indices, begin:end] = _meeting(grid, ops, indices, after)
        begin = end
    return times[0], times[1], times[2]


def _meeting(grid: Grid, ops: NDArray[np.intp], indices: Sequence[int], after: Seconds) -> _Array:
    """As `_meetings`, of the ranks of one group, [what, rank, meeting]."""
    starts, ends = (_by_rank(times[:, ops][..., indices]) for times in grid)
    counts = ends > after
    come, over = (np.where(counts, times, -np.inf).max(axis=0) for times in (starts, ends))
    return np.stack([np.where(counts, times, after) for times in (starts, come, over)])


def _by_rank(times: _Array) -> _Array:
    """Times [round, op, rank] as [rank, round x op]."""
    return times.reshape(-1, times.shape[-1]).T


def straggler_delay(round_time: Seconds, equal_round_time: Seconds) -> Seconds:
    """Seconds by which slower or uneven ranks delay a round.

    `equal_round_time` is that of the same case with every node at nominal speed and no jitter; a
    round that is shorter than that is not delayed. Waiting that something else hides is left out
    (`Communication.waiting` counts it): a rank that waits behind its own compute loses no time.
    """
    return max(0.0, round_time - equal_round_time)


def breakdown(
    trace: Trace, schedule: Schedule, places: NDArray[np.intp] | None = None
) -> dict[str, Seconds]:
    """Seconds per round of each kernel and collective, summed over the last round of one rank.

    With `places` only the ops at these places count.
    """
    starts, ends = (times[-1, :, 0] for times in trace.grid(schedule))
    traced = ~np.isnan(ends) & _among(schedule, places)
    numbers, count = np.array(schedule.work_numbers)[traced], len(schedule.works)
    taken = np.bincount(numbers, (ends - starts)[traced], count).tolist()
    first = np.full(count, np.inf)
    np.minimum.at(first, numbers, ends[traced])
    seconds: dict[str, Seconds] = {}
    for index in np.argsort(first, kind="stable").tolist():
        if first[index] < np.inf:
            label = schedule.works[index].label
            seconds[label] = seconds.get(label, 0.0) + taken[index]
    return seconds


def _among(schedule: Schedule, places: NDArray[np.intp] | None) -> NDArray[np.bool_]:
    """Whether each op is at one of some places; None stands for all."""
    mask = np.full(len(schedule.body), places is None)
    mask[places if places is not None else []] = True
    return mask


def scalability_ratio(per_gpu: float, reference_per_gpu: float) -> float:
    """(throughput_b / b) / (throughput_a / a), from throughputs per GPU at b and at a."""
    return per_gpu / reference_per_gpu
