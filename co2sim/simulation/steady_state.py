"""As many rounds of a case as it takes: until they repeat, or as many as are to be averaged."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from co2sim.common.errors import ResourceError
from co2sim.common.progress import Done
from co2sim.common.resources import require_memory
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import Schedule
from co2sim.simulation import metrics
from co2sim.simulation.expected_slowdown import expected_slowdown
from co2sim.simulation.lowering import (
    LOCKSTEP_SPAN_BYTES,
    MAX_SPANS,
    SPAN_BYTES,
    class_count,
    span_count,
)
from co2sim.simulation.noise import RunOptions
from co2sim.simulation.run import execute
from co2sim.simulation.token_bucket import shapers
from co2sim.simulation.trace import Trace

_MAX_ROUNDS = 64
"""Where the search for a steady state ends."""
_ROUNDS_OF_JITTER = 10
"""Averaged where nothing repeats, unless the user says how many."""


class SimulationInput(Protocol):
    """What is simulated: a schedule on a cluster, such as `LoadedCase`."""

    @property
    def schedule(self) -> Schedule: ...  # noqa: D102
    @property
    def cluster(self) -> Cluster: ...  # noqa: D102
    @property
    def precision(self) -> str: ...  # noqa: D102


@dataclass(frozen=True)
class Simulator:
    """Simulates a case; `done` hears of the progress."""

    options: RunOptions
    prepared: SimulationInput
    done: Done | None

    @cached_property
    def slowdown(self) -> float:
        """Of the slowest node that all others wait for. Raises OptionError, see there."""
        what = self.prepared
        return expected_slowdown(
            what.schedule, what.cluster, precision=what.precision, noise=self.options.noise
        )

    def until_steady(self) -> tuple[Trace, int, bool]:
        """A trace, how many of its last rounds to measure, and whether they are a steady state.

        What is under way behind the last round may be faster than it ever is in the midst of a
        training, as no collectives of further rounds share its links: then the rounds before count.
        """
        options, prepared = self.options, self.prepared
        warm_up = max(prepared.schedule.lag, 1)
        if options.noise.jitter:
            measured = options.rounds or _ROUNDS_OF_JITTER
            return self.rounds(warm_up + measured), measured, False
        measured = options.rounds or 1
        if _repeats(options, prepared):
            return self.rounds(measured), measured, True
        behind = warm_up
        while True:
            found = self.rounds(warm_up + measured)
            for one in (found, found.first(found.rounds - behind)):
                if metrics.is_steady(one, prepared.schedule, measured):
                    return one, measured, True
            if warm_up >= _MAX_ROUNDS or not _fits(options, prepared, 2 * warm_up + measured):
                return found, max(measured, found.rounds // 2), False
            warm_up *= 2

    def rounds(self, rounds: int, *, free: bool = False) -> Trace:
        """Rounds in the midst of a training: where computing slows communication, others follow.

        Else what is under way behind the last step would be faster than it ever is.
        """
        options, prepared, done = self.options, self.prepared, self.done
        more = _trailing_rounds(options, prepared)
        if not free:  # which comes second, and is counted with the first
            _check_memory(options, prepared, rounds)
        found = execute(
            prepared.schedule,
            prepared.cluster,
            precision=prepared.precision,
            rounds=rounds + more,
            noise=options.noise,
            fold=options.fold,
            free_communication=free,
            slowdown=self.slowdown,
            progress=(lambda share: done(round(share * rounds), rounds)) if done else None,
        )
        return found.first(rounds) if more else found


def _repeats(options: RunOptions, prepared: SimulationInput) -> bool:
    """Whether all rounds are like the first: nothing of a round is left when the next one begins.

    All ranks end it at the same time, and no link has bytes saved that it may send at once.
    """
    schedule, cluster, noise = prepared.schedule, prepared.cluster, options.noise
    if noise.uneven or (cluster.host and any(shapers(cluster))) or not schedule.apart:
        return False
    slowdowns = noise.node_slowdowns(cluster.layout)
    return class_count(cluster.layout, slowdowns, schedule, allowed=True) == 1


def _trailing_rounds(options: RunOptions, prepared: SimulationInput) -> int:
    """Rounds that are simulated behind those asked for; see `Simulator.rounds`."""
    if prepared.cluster.inter.busy_efficiency == 1 or _repeats(options, prepared):
        return 0
    return prepared.schedule.lag


def _fits(options: RunOptions, prepared: SimulationInput, rounds: int) -> bool:
    """Whether a number of rounds can be simulated here."""
    try:
        return _check_memory(options, prepared, rounds) <= MAX_SPANS
    except ResourceError:
        return False


def _check_memory(options: RunOptions, prepared: SimulationInput, rounds: int) -> int:
    """The spans of a number of rounds. Raises ResourceError if they need too much memory."""
    schedule, cluster, noise = prepared.schedule, prepared.cluster, options.noise
    rounds, ops = rounds + _trailing_rounds(options, prepared), len(schedule.body)
    spans = span_count(schedule, cluster, rounds=rounds, noise=noise, fold=options.fold)
    ranks = spans // (rounds * ops)
    beside = cluster.interference or (cluster.host and cluster.host.depends_on_others)
    in_arrays = ranks > 1 and not beside
    given = options.rounds or (_ROUNDS_OF_JITTER if noise.jitter else 1)
    advice = {
        "fewer GPUs": cluster.layout.world_size > 1,
        f"rounds below {given}": given > 1,
        "no jitter": noise.jitter,
        "folded ranks": not options.fold,
    }
    require_memory(
        (LOCKSTEP_SPAN_BYTES if in_arrays else SPAN_BYTES) * spans,
        f"ops of a round: {ops:,}, rounds with the warm-up: {rounds:,}, simulated ranks: {ranks:,}",
        f"; take {' or '.join(words for words, helps in advice.items() if helps)}",
    )
    return spans
