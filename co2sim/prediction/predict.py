"""A job, simulated: each kind of stage alone, by as few micro-steps as say all of it.

A step of many micro-steps is simulated by a few of them: those in its midst repeat, and each adds
the same. So do the local steps in the midst of a round.

What a simulation does next follows from what is under way. Where micro-steps in a row do the same
at the same times, and nothing else is under way, each further one does so, too. So its figures are
added as often as it was left out, which is exact: nothing is fitted. `metrics.repeated` says
whether that is so in a trace; where it is not, more micro-steps are simulated, and then all of
them.

A round of many local steps of which each does the same, as with a fragment of the model averaged
behind each, is the round of the first of them, repeated (`one_turn`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

from co2sim.common.errors import OptionError
from co2sim.common.progress import Done
from co2sim.common.resources import LruCache
from co2sim.common.units import Seconds
from co2sim.prediction.job import Job, Stage
from co2sim.prediction.measure import Line, StageFigures, order_of, rates, result_of
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import After, Collective, Compute, Schedule, Work
from co2sim.simulation import metrics
from co2sim.simulation.costs import compute_time, cost_of, traffic
from co2sim.simulation.metrics import Repeated, repeated
from co2sim.simulation.noise import QUIET, RunOptions
from co2sim.simulation.run import Simulator
from co2sim.simulation.trace import Trace
from co2sim.strategies import LocalSteps, Strategy, is_built_in, with_options
from co2sim.strategies.local import round_steps

_FEWEST = 6
_MORE = 4
"""Times as many micro-steps are simulated where so few do not repeat."""
_SLOWER = 1.5
"""Times as long as alone a collective may take beside micro-steps; a guess that costs time only."""
_LOCAL_STEPS = metrics.COMPARED + 2
"""Simulated of a round: those that are compared, the first and the last."""


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
        index: op.work
        for op, index in zip(schedule.body, schedule.work_numbers, strict=True)
        if op.turn.micro_step is None and isinstance(op.work, Collective)
    }
    alone = (cost_of(other, cluster).duration_alone(cluster) for other in others.values())
    longest = max(alone, default=0.0)
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
    schedule, strategy, options = stage.schedule, stage.strategy, stage.job.options
    if _may_repeat(options) and is_built_in(strategy) and not stage.cluster.step_spread:
        turn = one_turn(schedule)
        if turn is not None:
            alone = replace(stage, schedule=turn)
            figures = _simulated(alone, left, turn.steps, done, free=free)
            if figures and figures.steady:
                return replace(_times(figures, schedule.steps // turn.steps), stage=stage)
    steps = round_steps(strategy) if isinstance(strategy, LocalSteps) else schedule.steps
    return _simulated(stage, left, steps, done, free=free)


def _simulated(
    stage: Stage, left: int, steps: int, done: Done | None, *, free: bool
) -> StageFigures | None:
    """Those of a round of `steps` local steps; None as in `_figures`."""
    schedule = stage.schedule
    simulator = Simulator(stage.job.options, stage, done)
    few = left > 0 or steps > schedule.steps
    if few and (not is_built_in(stage.strategy) or stage.cluster.step_spread):
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


def _times(figures: StageFigures, turns: int) -> StageFigures:
    """Those of a round that is `turns` times as long."""
    alone = figures.free_round
    longer: dict[str, Any] = {
        name: turns * getattr(figures, name)
        for name in ("steps", "round_time", "busy", "waiting", "exposed", "nic", "wan")
    }
    for name in ("breakdown", "sent"):
        longer[name] = {label: turns * size for label, size in getattr(figures, name).items()}
    return replace(figures, **longer, free_round=None if alone is None else turns * alone)


_TURNS: LruCache[Schedule, tuple[Schedule | None]] = LruCache(8, same=True)


def one_turn(schedule: Schedule) -> Schedule | None:
    """The local steps at the begin of a round, as a round, if all others do the same again.

    Every op then waits for those that came so long before it in the order of issue as in the whole
    round. None where local steps differ: by more than a part in a million of their works, as the
    pieces of a model do that are not quite equal.
    """
    known = _TURNS.get(schedule)
    if known is None:
        shorter = (step for step in range(1, schedule.steps) if schedule.steps % step == 0)
        turns = (_turn_of(schedule, step) for step in shorter)
        known = _TURNS.put(schedule, (next(filter(None, turns), None),))
    return known[0]


def _turn_of(schedule: Schedule, steps: int) -> Schedule | None:
    """The first `steps` local steps, if the others repeat them."""
    body, offsets, numbers = schedule.body, schedule.offsets, schedule.work_numbers
    length, rest = divmod(len(body) * steps, schedule.steps)
    if rest:
        return None
    like = cache(lambda first, second: _alike(schedule.works[first], schedule.works[second]))
    for index in range(length, len(body)):
        before = index - length
        if offsets[index] != offsets[before] or body[index].stream != body[before].stream:
            return None
        if numbers[index] != numbers[before] and not like(numbers[before], numbers[index]):
            return None
    ops = []
    for index, op in enumerate(body[:length]):
        places = [divmod(index - offset, length) for offset in offsets[index]]
        after = tuple(After(body[place].name, -turn) for turn, place in places)
        turn = op.turn._replace(local_step=None) if steps == 1 else op.turn
        ops.append(replace(op, after=after, turn=turn))
    return Schedule(schedule.name, tuple(ops), steps)


_ALIKE = 1e-6
"""By how much works of two local steps may differ that count as the same."""


def _alike(first: Work, second: Work) -> bool:
    """Whether two works differ in names, and hardly in size."""
    sizes = ("flops", "memory_bytes") if isinstance(first, Compute) else ("elements",)
    if type(first) is not type(second):
        return False
    pairs = [(getattr(first, name), getattr(second, name)) for name in sizes]
    if any(abs(one - other) > _ALIKE * one for one, other in pairs):
        return False
    same: dict[str, Any] = {name: one for name, (one, _) in zip(sizes, pairs, strict=True)}
    if isinstance(first, Collective):
        same["buffer"] = first.buffer
    return replace(second, **same) == first


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
    more, repeats = steps - schedule.steps, []
    if micros:
        of_each = repeated(schedule, trace, "micro_step")
        if of_each is None:
            return None
        again = len(of_each) - metrics.COMPARED  # the local step that repeats
        repeats = [(part, micros * (1 + more * (n == again))) for n, part in enumerate(of_each)]
    if more:
        of_round = repeated(schedule, trace, "local_step")
        if of_round is None:
            return None
        repeats += [(part, more) for part in of_round]
    return repeats
