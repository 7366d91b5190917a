"""A question, answered by simulation."""

from dataclasses import replace
from typing import Any

from co2sim import metrics, strategies
from co2sim.case import Case
from co2sim.cluster import Cluster
from co2sim.errors import OptionError, nearest
from co2sim.noise import QUIET
from co2sim.result import Prepared, Result
from co2sim.schedule import Schedule
from co2sim.simulator import execute
from co2sim.trace import Trace
from co2sim.workload import Model

_MOST_ROUNDS = 64
"""Where the search for a steady state ends."""


def simulate(
    cluster: str | Cluster, model: str | Model, strategy: str | strategies.Strategy, **options: Any
) -> Result:
    """Simulate one configuration; `options` are the further fields of `Case`.

    >>> simulate("a100-tcp80", "llama-7b", "co2(tau=48, worker=node)", gpus=128).fits_in_memory
    True
    """
    known = Case.__dataclass_fields__
    unknown = [name for name in options if name not in known]
    if unknown:
        raise OptionError(f"unknown option {unknown[0]!r}; {nearest(unknown[0], known)}")
    return run(Case(cluster=cluster, model=model, strategy=strategy, **options))


def run(case: Case) -> Result:
    """Simulate and measure."""
    prepared = case.prepare()
    found, rounds, steady = _simulate(case, prepared)
    free = _execute(case, prepared, found.rounds, free=True)
    result = prepared.measure(found, rounds, steady, free)
    if not case.noise.uneven:
        return result
    equal, last, _ = _simulate(replace(case, noise=QUIET), prepared)
    nominal = metrics.window(equal, prepared.schedule, last).round_time
    delay = metrics.straggler_delay(result.round_time_s, nominal)
    return replace(result, straggler_delay_s=delay)


def trace(case: Case) -> tuple[Schedule, Trace]:
    """The simulated trace, warm-up included."""
    prepared = case.prepare()
    return prepared.schedule, _simulate(case, prepared)[0]


def _simulate(case: Case, prepared: Prepared) -> tuple[Trace, int, bool]:
    """A trace, how many of its last rounds to measure, and whether they are a steady state."""
    if case.rounds is not None and case.rounds < 1:
        raise OptionError(f"rounds is {case.rounds}; it must be at least 1")
    warm_up = max(prepared.schedule.lag, 1)
    if case.noise.jitter:
        measured = case.rounds or 10
        return _execute(case, prepared, warm_up + measured), measured, False
    measured = case.rounds or 1
    while True:
        found = _execute(case, prepared, warm_up + measured)
        steady = metrics.is_steady(found, prepared.schedule, measured)
        if steady or warm_up >= _MOST_ROUNDS:
            half = found.rounds // 2
            return found, (measured if steady else max(measured, half)), steady
        warm_up *= 2


def _execute(case: Case, prepared: Prepared, rounds: int, *, free: bool = False) -> Trace:
    """Rounds in the midst of a training: where computing slows communication down, others follow.

    Else what is under way behind the last step would be faster than it ever is.
    """
    more = prepared.schedule.lag if prepared.cluster.inter.busy_efficiency < 1 else 0
    found = execute(
        prepared.schedule,
        prepared.cluster,
        precision=prepared.job.precision,
        rounds=rounds + more,
        noise=case.noise,
        fold=case.fold,
        free_communication=free,
    )
    return found.first(rounds) if more else found
