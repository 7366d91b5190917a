"""A job, simulated: each kind of stage alone, by as few micro-steps as say all of it.

A step of many micro-steps is simulated by a few of them: those in its midst repeat, and each adds
the same. So do the local steps in the midst of a round.

What a simulation does next follows from what is under way. Where micro-steps in a row do the same
at the same times, and nothing else is under way, each further one does so, too. So its figures are
added as often as it was left out, which is exact: nothing is fitted. `repeated` says whether that
is so in a trace; where it is not, more micro-steps are simulated, and then all of them.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from co2sim.common.errors import OptionError
from co2sim.common.progress import Done
from co2sim.common.units import Seconds
from co2sim.prediction.job import Job, Stage
from co2sim.prediction.measure import Line, StageFigures, order_of, rates, result_of
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Collective, Schedule
from co2sim.simulation import metrics
from co2sim.simulation.costs import compute_time, cost_of, traffic
from co2sim.simulation.metrics import Window
from co2sim.simulation.noise import QUIET, RunOptions
from co2sim.simulation.run import Simulator
from co2sim.simulation.trace import Trace
from co2sim.strategies import LocalSteps, Strategy, is_built_in, with_options
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
        windows = [(row, _window(start[row], end[row], *under_way)) for row in rows]
        last = [Repeated(row, window) for row, window in windows if window]
        if len(last) < len(windows):
            return None
    return last


def _rows(schedule: Schedule, steps: re.Pattern[str]) -> list[_Places]:
    """Places [step, op] of each row of steps; none if those of a row do not do the same."""
    rows_of: dict[str, dict[int, list[int]]] = {}
    for index, (name, _) in enumerate(schedule.places):
        if match := steps.match(name):
            rows_of.setdefault(match[1], {}).setdefault(int(match[2]), []).append(index)
    rows: list[_Places] = []
    for numbered in rows_of.values():
        row = [numbered[step] for step in sorted(numbered)[-1 - _ROW : -1]]
        if len(row) < _ROW or len(set(map(len, row))) > 1:
            return []
        rows.append(np.array(row))
        apart = np.diff(rows[-1], axis=0)
        does = [[(schedule.work_numbers[n], schedule.offsets[n]) for n in step] for step in row]
        if (apart != apart[0, 0]).any() or any(step != does[0] for step in does):
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
    inside = np.count_nonzero((starts < end - close) & (ends > first + close))
    begun = np.searchsorted(all_starts, end - close)
    over = np.searchsorted(all_ends, first + close, side="right")
    return Window(first, first + period, 1) if begun - over == inside else None


def predict(job: Job, done: Done | None = None) -> Result:
    """Simulate and measure a job. Raises Co2simError for what cannot be."""
    if job.workload.pp > 1 and job.options.noise.uneven:
        raise OptionError(
            f"pp={job.workload.pp} does not combine with jitter, straggle or node_speed"
        )
    order = order_of(job)  # which refuses what it does not allow before anything is simulated
    figures = {stage: stage_figures(job, stage, done) for stage in sorted(set(job.alike))}
    return result_of(Line(job, tuple(figures[stage] for stage in job.alike), order))


def step_time(job: Job, done: Done | None = None) -> Seconds:
    """How long an optimizer step takes, and nothing else of it."""
    order = order_of(job)
    stages = sorted(set(job.alike))
    figures = {stage: stage_figures(job, stage, done, free=False) for stage in stages}
    return Line(job, tuple(figures[stage] for stage in job.alike), order).step


def stage_figures(
    job: Job, number: int = 0, done: Done | None = None, *, free: bool = True
) -> StageFigures:
    """Those of a stage, by as few micro-steps and local steps as say all of it.

    Without `free` nothing is simulated with free communication, for who needs times alone.
    """
    micros, short = job.workload.accumulation, job
    counts: list[int] = []
    if _may_repeat(job.options):
        short = replace(job, strategy=_with_few_local_steps(job.strategy))
        counts = [micros] if short.strategy is not job.strategy else []
        if micros >= 2 * _FEWEST:
            first = _first_try(short.stage(number, 2))
            few = [count for count in (first, _MORE * first) if 2 * count <= micros]
            counts = few or counts
    for count in counts:
        stage = replace(short.stage(number, count), job=job)
        figures = _figures(stage, micros - count, done, free=free)
        if figures:
            return figures
    figures = _figures(job.stage(number), 0, done, free=free)
    assert figures
    return figures


def at_speed(result: Result, job: Job) -> Result:
    """The result with the speed of another job: its times and rates, and nothing else of it."""
    step = step_time(job)
    return replace(
        result,
        **rates(job, step),
        step_time_s=step,
        round_time_s=step * result.steps_per_round,
    )


def _may_repeat(options: RunOptions) -> bool:
    """Whether micro-steps may be alike: ranks are, and no number of rounds is asked for."""
    return options.noise == QUIET and options.rounds is None and options.fold


def _with_few_local_steps(strategy: Strategy) -> Strategy:
    """The strategy with fewer local steps in a round, if those in the midst are alike.

    They may be where one average is launched behind the last step, and used behind a last one, or
    behind one of the first: those after it are alike.
    """
    if not (is_built_in(strategy) and isinstance(strategy, LocalSteps)):
        return strategy
    delay, parts = (getattr(strategy, name, None) for name in ("delay", "fragments"))
    few = _LOCAL_STEPS + (delay or 0)
    if parts not in {None, 1} or round_steps(strategy) < 2 * few:
        return strategy
    try:
        return with_options(strategy, {"tau": str(few)})
    except OptionError:  # another of its options needs as many as there are
        return strategy


def _first_try(stage: Stage) -> int:
    """Micro-steps enough for what else a step does to end meanwhile, such as an average."""
    schedule, cluster, work = stage.schedule, stage.cluster, stage.workload
    others = {
        schedule.works[index]
        for (name, _), index in zip(schedule.places, schedule.work_numbers, strict=True)
        if not _MICRO_STEP.match(name)
    }
    longest = max(
        (
            cost_of(work_, cluster).duration_alone(cluster)
            for work_ in others
            if isinstance(work_, Collective)
        ),
        default=0.0,
    )
    passes = sum(
        compute_time(work_, cluster.gpu, work.precision)
        for block in work.works()
        for work_ in (block.forward, block.backward)
    )
    return _FEWEST + (math.ceil(_SLOWER * longest / passes) if passes else 0)


def _figures(stage: Stage, left: int, done: Done | None, *, free: bool) -> StageFigures | None:
    """The figures of a stage whose schedule leaves out `left` micro-steps, and maybe local steps.

    None if it must not, as where steps of nodes spread: what that costs depends on all of a step.
    """
    schedule, strategy = stage.schedule, stage.strategy
    steps = round_steps(strategy) if isinstance(strategy, LocalSteps) else schedule.steps
    simulator = Simulator(stage.job.options, stage, done)
    few = left > 0 or steps > schedule.steps
    if few and (not is_built_in(strategy) or stage.cluster.step_spread):
        return None
    trace, rounds, steady = simulator.until_steady()
    more = _left_out(schedule, trace, left, steps) if steady or not few else None
    if more is None:
        return None
    if not free:
        figures = StageFigures.of_trace(stage, trace, rounds, steady)
        return _with_more(figures, trace, more, (), steps)
    quiet = simulator.rounds(trace.rounds, free=True)
    without = _left_out(schedule, quiet, left, steps)
    if without is None:
        return None
    figures = StageFigures.of_trace(stage, trace, rounds, steady, quiet)
    return _with_more(figures, trace, more, without, steps)


def _with_more(
    figures: StageFigures, trace: Trace, more: "_More", free: "_More", steps: int
) -> StageFigures:
    """With what repeats, in this trace and in the `free` one, in a round of `steps`."""
    if not more:
        return figures
    schedule, cluster = figures.stage.schedule, figures.stage.cluster
    time, busy, waiting, nic = figures.round_time, figures.busy, figures.waiting, figures.nic
    breakdown, sent = dict(figures.breakdown), dict(figures.sent)
    for part, times in more:
        time += times * part.window.round_time
        moved = metrics.communication(trace, schedule, part.window, part.row.ravel())
        busy, waiting = busy + times * moved.busy, waiting + times * moved.waiting
        for label, seconds in metrics.breakdown(trace, schedule, part.row[1]).items():
            breakdown[label] += times * seconds
        of_part = traffic(schedule, cluster, part.row[1])
        nic += times * of_part.nic
        for label, size in of_part.by_collective.items():
            sent[label] += times * size
    alone, exposed = figures.free_round, figures.exposed
    if alone is not None:
        alone += sum(times * part.window.round_time for part, times in free)
        exposed = metrics.exposed_by_difference(busy, time, alone)
    return replace(
        figures,
        steps=steps,
        round_time=time,
        free_round=alone,
        busy=busy,
        waiting=waiting,
        exposed=exposed,
        breakdown=breakdown,
        sent=sent,
        nic=nic,
    )


_More: TypeAlias = Sequence[tuple[Repeated, int]]
"""What repeats, and how many times more it does than in the trace."""


def _left_out(schedule: Schedule, trace: Trace, micros: int, steps: int) -> _More | None:
    """What is left out: `micros` micro-steps in each of `steps` local steps; None if it differs."""
    repeats: list[tuple[Repeated, int]] = []
    more = steps - schedule.steps
    if micros:
        ones = repeated(schedule, trace)
        if ones is None:
            return None
        again = len(ones) - _ROW  # the local step that repeats
        repeats = [(part, micros * (1 + more * (n == again))) for n, part in enumerate(ones)]
    if more:
        ones = repeated(schedule, trace, _LOCAL_STEP)
        if ones is None:
            return None
        repeats += [(part, more) for part in ones]
    return repeats
