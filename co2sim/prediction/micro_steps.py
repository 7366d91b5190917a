"""A step of many micro-steps by a few of them: those in its midst repeat, and each adds the same.

So do the local steps in the midst of a round.

What a simulation does next follows from what is under way. Where micro-steps in a row do the same
at the same times, and nothing else is under way, each further one does so, too. So its figures are
added as often as it was left out, which is exact: nothing is fitted. `repeated` says whether that
is so in a trace; where it is not, more micro-steps are simulated, and then all of them.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from co2sim.common.errors import OptionError
from co2sim.common.progress import Done
from co2sim.common.units import Seconds
from co2sim.prediction.case import Case, LoadedCase
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Collective, Schedule
from co2sim.simulation import metrics
from co2sim.simulation.collective_cost import cost_of, traffic
from co2sim.simulation.compute_cost import compute_time
from co2sim.simulation.metrics import Window
from co2sim.simulation.noise import QUIET, RunOptions
from co2sim.simulation.run import Simulator
from co2sim.simulation.trace import Trace
from co2sim.strategies import STRATEGIES, LocalSteps, Strategy, parse, with_options
from co2sim.strategies.local import round_steps

_MICRO_STEP = re.compile(r"((?:s\d+\.)?)m(\d+)\.")
_LOCAL_STEP = re.compile(r"()s(\d+)\.")
"""Of an op: what it is one of several in, and its number; see `chaining.chain`, `micro_prefix`."""

_FEWEST = 8
_MORE = 4
"""Times as many micro-steps are simulated where so few do not repeat."""
_SLOWER = 1.5
"""Times as long as alone a collective may take beside micro-steps; a guess that costs time only."""
_ROW = 4
"""Micro-steps, or local steps, that are compared, just before the last one."""
_LOCAL_STEPS = _ROW + 2
"""Simulated of a round: these, the first and the last."""

_EQUAL = 1e-12
"""What may lie between two equal times, as a part of all the time that is simulated."""

_Places: TypeAlias = NDArray[np.intp]


class Repeated(NamedTuple):
    """A micro-step, or local step, that repeats: the second of a `row` of places, [step, op].

    `window` is its time in the last round.
    """

    row: _Places
    window: Window


def repeated(
    schedule: Schedule, trace: Trace, steps: re.Pattern[str] = _MICRO_STEP
) -> list[Repeated] | None:
    """The step before the last but two, if it repeats in the trace wherever there are such steps.

    That is in every local step of a round for micro-steps, and once for local steps.
    """
    rows = _rows(schedule, steps)
    if not rows or len(trace.ranks) > 1:
        return None
    starts, ends = (times[..., 0] for times in trace.grid(schedule))
    under_way = np.sort(starts, axis=None), np.sort(ends, axis=None)
    last: list[Repeated] = []
    for start, end in zip(starts, ends, strict=True):
        found = [(row, _window(start[row], end[row], *under_way)) for row in rows]
        last = [Repeated(row, window) for row, window in found if window]
        if len(last) < len(found):
            return None
    return last


def _rows(schedule: Schedule, steps: re.Pattern[str]) -> list[_Places]:
    """Places [step, op] of each row of steps; none if those of a row do not do the same."""
    found: dict[str, dict[int, list[int]]] = {}
    for place, (name, _) in enumerate(schedule.places):
        if match := steps.match(name):
            found.setdefault(match[1], {}).setdefault(int(match[2]), []).append(place)
    rows: list[_Places] = []
    for numbered in found.values():
        row = [numbered[number] for number in sorted(numbered)[-1 - _ROW : -1]]
        if len(row) < _ROW or len(set(map(len, row))) > 1:
            return []
        rows.append(np.array(row))
        apart = np.diff(rows[-1], axis=0)
        does = [[(schedule.work_numbers[n], schedule.offsets[n]) for n in one] for one in row]
        if (apart != apart[0, 0]).any() or any(one != does[0] for one in does):
            return []
    return rows if steps is _LOCAL_STEP or len(rows) == schedule.steps else []


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

    @property
    def whole(self) -> Result:
        """The figures of a case that has no other stages."""
        prepared, found, free = self
        busy = found.comm_busy_s
        exposed = metrics.exposed_by_difference(busy, found.round_time_s, free)
        return replace(
            found,
            **prepared.rates(found.step_time_s),
            exposed_comm_s=exposed,
            overlap_ratio=metrics.overlap_ratio(busy, exposed),
        )


Change: TypeAlias = Callable[[LoadedCase], LoadedCase]
"""What is otherwise than in a case: its cluster, say."""


def stage_figures(
    case: Case,
    number: int,
    held: float,
    micros: int,
    done: Done | None,
    change: Change = lambda one: one,
) -> StageFigures:
    """Those of a stage that holds activations of `held` of the `micros` micro-batches of a step.

    Throughput and what follows from it are left to who knows all stages.
    """
    whole = parse(case.strategy) if isinstance(case.strategy, str) else case.strategy
    tries: list[tuple[Strategy, int]] = []
    if _may_repeat(case.run_options):
        short = _with_few_local_steps(whole)
        tries = [(short, micros)] if short is not whole else []
        if micros >= 2 * _FEWEST:
            first = _first_try(replace(case, strategy=short).stage(number, held, 2))
            few = [count for count in (first, _MORE * first) if 2 * count <= micros]
            tries = [(short, count) for count in few] or tries
    for strategy, count in tries:
        prepared = change(replace(case, strategy=strategy).stage(number, held, count))
        prepared = replace(prepared, strategy=whole)
        found = _figures(case, prepared, micros - count, done)
        if found:
            return found
    all_of_them = _figures(case, change(case.stage(number, held)), 0, done)
    assert all_of_them
    return all_of_them


def _may_repeat(options: RunOptions) -> bool:
    """Whether micro-steps may be alike: ranks are, and no number of rounds is asked for."""
    return options.noise == QUIET and options.rounds is None and options.fold


def case_figures(case: Case, done: Done | None, change: Change = lambda one: one) -> StageFigures:
    """Those of a case without a pipeline; see `StageFigures.whole`. Raises as `Case.prepare`."""
    case.check_single_stage()
    return stage_figures(case, 0, 1.0, case.job().accumulation, done, change)


def _with_few_local_steps(strategy: Strategy) -> Strategy:
    """The strategy with fewer local steps in a round, if those in the midst are alike.

    They may be where one average is launched behind the last step, and used behind a last one, or
    behind one of the first: those after it are alike.
    """
    if type(strategy) not in STRATEGIES.values() or not isinstance(strategy, LocalSteps):
        return strategy
    delay, parts = (getattr(strategy, name, None) for name in ("delay", "fragments"))
    few = _LOCAL_STEPS + (delay or 0)
    if parts not in {None, 1} or round_steps(strategy) < 2 * few:
        return strategy
    try:
        return with_options(strategy, {"tau": str(few)})
    except OptionError:  # another of its options needs as many as there are
        return strategy


def _first_try(prepared: LoadedCase) -> int:
    """Micro-steps enough for what else a step does to end meanwhile, such as an average."""
    schedule, cluster, job = prepared.schedule, prepared.cluster, prepared.job
    others = {
        schedule.works[number]
        for (name, _), number in zip(schedule.places, schedule.work_numbers, strict=True)
        if not _MICRO_STEP.match(name)
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


def _figures(case: Case, prepared: LoadedCase, left: int, done: Done | None) -> StageFigures | None:
    """The figures of a stage whose schedule leaves out `left` micro-steps, and maybe local steps.

    None if it must not, as where steps of nodes spread: what that costs depends on all of a step.
    """
    schedule, strategy = prepared.schedule, prepared.strategy
    steps = round_steps(strategy) if isinstance(strategy, LocalSteps) else schedule.steps
    simulator = Simulator(case.run_options, prepared, done)
    few = left > 0 or steps > schedule.steps
    if few and (type(strategy) not in STRATEGIES.values() or prepared.cluster.step_spread):
        return None
    trace, rounds, steady = simulator.until_steady()
    more = _left_out(schedule, trace, left, steps) if steady or not few else None
    if more is None:
        return None
    quiet = simulator.rounds(trace.rounds, free=True)
    without = _left_out(schedule, quiet, left, steps)
    if without is None:
        return None
    result = prepared.measure(trace, rounds, steady, quiet)
    free = metrics.window(quiet, schedule, rounds).round_time
    free += sum(times * one.window.round_time for one, times in without)
    return StageFigures(prepared, _with_more(prepared, result, trace, more, steps), free)


_More: TypeAlias = Sequence[tuple[Repeated, int]]
"""What repeats, and how many times more it does than in the trace."""


def _left_out(schedule: Schedule, trace: Trace, micros: int, steps: int) -> _More | None:
    """What is left out: `micros` micro-steps in each of `steps` local steps; None if it differs."""
    found: list[tuple[Repeated, int]] = []
    more = steps - schedule.steps
    if micros:
        ones = repeated(schedule, trace)
        if ones is None:
            return None
        again = len(ones) - _ROW  # the local step that repeats
        found = [(one, micros * (1 + more * (n == again))) for n, one in enumerate(ones)]
    if more:
        ones = repeated(schedule, trace, _LOCAL_STEP)
        if ones is None:
            return None
        found += [(one, more) for one in ones]
    return found


def _with_more(
    prepared: LoadedCase, result: Result, trace: Trace, more: _More, steps: int
) -> Result:
    """The figures of a step and a round of `steps`, with what repeats; rates and ratios stay."""
    schedule, cluster = prepared.schedule, prepared.cluster
    time, busy, parts = result.round_time_s, result.comm_busy_s, dict(result.breakdown_s)
    waiting = result.waiting_s
    by_collective = {
        label: size * schedule.steps for label, size in result.sent_bytes_per_gpu_per_step.items()
    }
    nic = result.nic_bytes_per_node_per_step * schedule.steps
    for one, times in more:
        time += times * one.window.round_time
        moved = metrics.communication(trace, schedule, one.window, one.row.ravel())
        busy, waiting = busy + times * moved.busy, waiting + times * moved.waiting
        for label, seconds in metrics.breakdown(trace, schedule, one.row[1]).items():
            parts[label] += times * seconds
        sent = traffic(schedule, cluster, one.row[1])
        nic += times * sent.nic
        for label, size in sent.by_collective.items():
            by_collective[label] += times * size
    by_collective = {label: size / steps for label, size in by_collective.items()}
    return replace(
        result,
        steps_per_round=steps,
        round_time_s=time,
        step_time_s=time / steps,
        comm_busy_s=busy,
        waiting_s=waiting,
        breakdown_s=parts,
        sent_bytes_per_gpu_per_step=by_collective,
        wire_bytes_per_gpu_per_step=sum(by_collective.values()),
        nic_bytes_per_node_per_step=nic / steps,
    )
