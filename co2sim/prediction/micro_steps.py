"""A step of many micro-steps by a few of them: those in its midst repeat, and each adds the same.

What a simulation does next follows from what is under way. Where micro-steps in a row do the same
at the same times, and nothing else is under way, each further one does so, too. So its figures are
added as often as it was left out, which is exact: nothing is fitted. `repeated` says whether that
is so in a trace; where it is not, more micro-steps are simulated, and then all of them.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from co2sim.common.progress import Done
from co2sim.common.units import Seconds
from co2sim.prediction.case import Case, LoadedCase
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Collective, Schedule
from co2sim.simulation import metrics
from co2sim.simulation.collective_cost import cost_of, traffic
from co2sim.simulation.compute_cost import compute_time
from co2sim.simulation.metrics import Window
from co2sim.simulation.steady_state import Simulator
from co2sim.simulation.trace import Trace
from co2sim.strategies import STRATEGIES

_NAME = re.compile(r"((?:s\d+\.)?)m(\d+)\.")
"""Of an op of a micro-step; see `chaining.chain` and `step.micro_prefix`."""

_FEWEST = 8
_MORE = 4
"""Times as many micro-steps are simulated where so few do not repeat."""
_SLOWER = 1.5
"""Times as long as alone a collective may take beside micro-steps; a guess that costs time only."""
_ROW = 4
"""Micro-steps that are compared, just before the last one."""

_EQUAL = 1e-12
"""What may lie between two equal times, as a part of all the time that is simulated."""

_Places: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Repeated:
    """A micro-step that repeats, in each local step of a round.

    `rows` are places of ops, [local step, micro-step, op], of which the second micro-step repeats.
    `windows` are its times in the local steps of the last round.
    """

    rows: _Places
    windows: tuple[Window, ...]

    @property
    def time(self) -> Seconds:
        """Of the micro-step, in all local steps of a round."""
        return sum(window.round_time for window in self.windows)


def repeated(schedule: Schedule, trace: Trace) -> Repeated | None:
    """The micro-step before the last but two, if it repeats in every local step of the trace."""
    rows = _rows(schedule)
    if not rows or len(trace.ranks) > 1:
        return None
    starts, ends = (times[..., 0] for times in trace.grid(schedule))
    under_way = np.sort(starts, axis=None), np.sort(ends, axis=None)
    windows: list[Window] = []
    for start, end in zip(starts, ends, strict=True):
        found = [_window(start[row], end[row], *under_way) for row in rows]
        windows = [window for window in found if window]
        if len(windows) < len(found):
            return None
    return Repeated(np.stack(rows), tuple(windows))


def _rows(schedule: Schedule) -> list[_Places]:
    """Places [micro-step, op] of a row of micro-steps in each local step; none if they differ."""
    steps: dict[str, dict[int, list[int]]] = {}
    for place, (name, _) in enumerate(schedule.places):
        if match := _NAME.match(name):
            steps.setdefault(match[1], {}).setdefault(int(match[2]), []).append(place)
    rows: list[_Places] = []
    for micros in steps.values():
        row = [micros[number] for number in sorted(micros)[-1 - _ROW : -1]]
        if len(row) < _ROW or len(set(map(len, row))) > 1:
            return []
        rows.append(np.array(row))
        apart = np.diff(rows[-1], axis=0)
        does = [[(schedule.work_numbers[n], schedule.offsets[n]) for n in one] for one in row]
        if (apart != apart[0, 0]).any() or any(one != does[0] for one in does):
            return []
    return rows if len(rows) == schedule.steps else []


def _window(
    starts: NDArray[np.float64],
    ends: NDArray[np.float64],
    all_starts: NDArray[np.float64],
    all_ends: NDArray[np.float64],
) -> Window | None:
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
    own = np.count_nonzero((starts < end - close) & (ends > first + close))
    begun = np.searchsorted(all_starts, end - close)
    over = np.searchsorted(all_ends, first + close, side="right")
    return Window(first, first + period, 1) if begun - over == own else None


class StageFigures(NamedTuple):
    """A stage alone: its figures, and how long a round takes with free communication."""

    prepared: LoadedCase
    result: Result
    free_round: Seconds


def stage_figures(
    case: Case, number: int, held: float, micros: int, done: Done | None
) -> StageFigures:
    """Those of a stage that holds activations of `held` of the `micros` micro-batches of a step.

    Throughput and what follows from it are left to who knows all stages.
    """
    first = _first_try(case.stage(number, held, min(2, micros)))
    for few in (first, _MORE * first):
        if 2 * few <= micros:
            found = _by_few(case, case.stage(number, held, few), micros - few, done)
            if found:
                return found
    all_of_them = _by_few(case, case.stage(number, held), 0, done)
    assert all_of_them
    return all_of_them


def _first_try(prepared: LoadedCase) -> int:
    """Micro-steps enough for what else a step does to end meanwhile, such as an average."""
    schedule, cluster, job = prepared.schedule, prepared.cluster, prepared.job
    others = {
        schedule.works[number]
        for (name, _), number in zip(schedule.places, schedule.work_numbers, strict=True)
        if not _NAME.match(name)
    }
    longest = max(
        (
            cost_of(work, cluster).duration_alone(cluster)
            for work in others
            if isinstance(work, Collective)
        ),
        default=0.0,
    )
    passes = sum(
        compute_time(one, cluster.gpu, job.precision)
        for work in job.works()
        for one in (work.forward, work.backward)
    )
    return _FEWEST + (math.ceil(_SLOWER * longest / passes) if passes else 0)


def _by_few(case: Case, prepared: LoadedCase, left: int, done: Done | None) -> StageFigures | None:
    """The figures of a stage of which `left` micro-steps are not simulated; None if they must be.

    They must where steps of nodes spread: what that costs depends on all that a step does.
    """
    known = type(prepared.strategy) in STRATEGIES.values() and not prepared.cluster.step_spread
    if left and not known:
        return None
    simulator = Simulator(case.run_options, prepared, done)
    trace, rounds, steady = simulator.until_steady()
    one = repeated(prepared.schedule, trace) if left and steady else None
    if left and not one:
        return None
    quiet = simulator.rounds(trace.rounds, free=True)
    result = prepared.measure(trace, rounds, steady, quiet)
    free = metrics.window(quiet, prepared.schedule, rounds).round_time
    if one:
        without = repeated(prepared.schedule, quiet)
        if not without:
            return None
        result, free = _with_more(prepared, result, trace, one, left), free + left * without.time
    return StageFigures(prepared, result, free)


def _with_more(
    prepared: LoadedCase, result: Result, trace: Trace, one: Repeated, times: int
) -> Result:
    """The figures of a step, and of a micro-step of it, with that micro-step `times` more.

    Of its rates and ratios nothing is changed.
    """
    schedule, steps = prepared.schedule, prepared.schedule.steps
    places = one.rows[:, 1].ravel()
    busy = sum(
        metrics.communication(trace, schedule, window, row.ravel()).busy
        for window, row in zip(one.windows, one.rows, strict=True)
    )
    sent = traffic(schedule, prepared.cluster, places)
    parts = metrics.breakdown(trace, schedule, places)
    return replace(
        result,
        round_time_s=result.round_time_s + times * one.time,
        step_time_s=result.step_time_s + times * one.time / steps,
        comm_busy_s=result.comm_busy_s + times * busy,
        breakdown_s={
            label: time + times * parts.get(label, 0.0)
            for label, time in result.breakdown_s.items()
        },
        wire_bytes_per_gpu_per_step=result.wire_bytes_per_gpu_per_step + times * sent.gpu / steps,
        nic_bytes_per_node_per_step=result.nic_bytes_per_node_per_step + times * sent.nic / steps,
    )
