"""How late an average has to be used to be hidden: "auto" options of CO2 become numbers.

What an average exposes is the time that a round takes beyond the same round without averages,
where communication slows no computing down: training measures its own tau by waiting alone, too.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

from co2sim.common.delayed_averaging import LONGEST, bounded
from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from co2sim.schedule.schedule import Schedule
from co2sim.strategies.co2 import CO2
from co2sim.strategies.local import OUTER, round_steps

RoundTime: TypeAlias = Callable[[CO2, bool], Seconds]
"""How long a round takes on the cluster at hand, with its averages (True) or without them."""

_TOLERANCE = 0.01
"""Of a round: what may stay exposed of an average that counts as hidden."""


def has_auto_options(strategy: Any) -> bool:
    """Whether a number is still to be chosen."""
    return isinstance(strategy, CO2) and "auto" in {strategy.tau, strategy.delay}


def without_averages(schedule: Schedule) -> Schedule:
    """The same rounds, where nothing is averaged and nothing waits for an average."""
    kept = [op for op in schedule.body if op.stream != OUTER]
    names = {op.name for op in kept}
    body = [replace(op, after=tuple(w for w in op.after if w.op in names)) for op in kept]
    return Schedule(schedule.name, tuple(body), schedule.steps)


def resolve(strategy: CO2, round_time: RoundTime) -> tuple[CO2, tuple[str, ...]]:
    """The strategy with numbers for "auto", and what speaks for each number.

    tau: the shortest round that hides its average, if it is used when the round ends, but no
    shorter than a given delay or number of fragments; two steps at least where the fragments are
    chosen, too. delay: the least that hides the average; where none does, the least that is as good
    as waiting for a whole round. Hidden: at most 1 % of a round is exposed. Raises OptionError
    where no round that can be simulated is long enough.
    """
    times = cache(round_time)
    notes = []
    keep, predict, least = strategy.keep, strategy.predict, strategy.late.shortest_round
    strategy = replace(strategy, keep=None, predict=None)  # which change no time
    if strategy.tau == "auto":
        tau, note = _shortest_round(strategy, least, times)
        strategy = replace(strategy, tau=tau)
        notes.append(note)
    if strategy.delay == "auto":
        parts = strategy.parts()
        strategy = replace(strategy, fragments=parts)
        delay, note = _least_delay(strategy, times)
        strategy = replace(strategy, delay=delay, fragments=parts if parts > 1 else None)
        notes.append(note)
        if predict is not None:
            share = replace(strategy, keep=keep, predict=0).kept()[0]
            less = bounded(round_steps(strategy), delay, share, predict)
            if less != predict:
                notes.append(f"predict {predict:g} would repeat progress for ever: {less:g} taken")
            predict = less
    return replace(strategy, keep=keep, predict=predict), tuple(notes)


def _shortest_round(strategy: CO2, least: int, times: RoundTime) -> tuple[int, str]:
    def exposed(tau: int) -> float:
        tried = replace(strategy, tau=tau, delay=tau)
        return max(0.0, 1 - times(tried, False) / times(tried, True))  # noqa: FBT003

    guess = float(least)
    for _ in range(2):
        tried = round(guess)  # if it is too short, its average takes the whole of the round
        guess = max(least, (1 - _TOLERANCE) * tried / (1 - exposed(tried)))
        if guess > LONGEST:
            raise OptionError(
                f"{strategy.name}: tau=auto: no round of at most {LONGEST} steps hides its"
                f" average, which takes as long as about {guess:.0f} steps"
            )
    tau = least_that_holds(least, LONGEST, round(guess), lambda tau: exposed(tau) <= _TOLERANCE)
    note = f"tau {tau} chosen: {exposed(tau):.1%} of a round exposed by the average if delay={tau}"
    return tau, note + (f"; {tau - 1} would leave {exposed(tau - 1):.1%}" if tau > least else "")


def _least_delay(strategy: CO2, times: RoundTime) -> tuple[int, str]:
    tau = round_steps(strategy)
    latest = replace(strategy, delay=tau)
    bare, shortest = times(latest, False), times(latest, True)  # noqa: FBT003
    hidden = shortest - bare <= _TOLERANCE * shortest

    def whole(delay: int) -> Seconds:
        return times(replace(strategy, delay=delay), True)  # noqa: FBT003

    def late(delay: int) -> Seconds:
        """What a longer delay could save."""
        return whole(delay) - (bare if hidden else shortest)

    guess = 1 + (late(1) / bare - _TOLERANCE) * tau
    delay = least_that_holds(
        1, tau, round(guess), lambda delay: late(delay) <= _TOLERANCE * (bare + late(delay))
    )
    shares = {tried: max(0.0, 1 - bare / whole(tried)) for tried in (delay, max(1, delay - 1))}
    note = f"delay {delay} chosen: {shares[delay]:.1%} of a round exposed by the average"
    if not hidden:
        note = f"no delay within a round hides the average, a longer tau might; {note}"
    return delay, note + (f"; {delay - 1} would leave {shares[delay - 1]:.1%}" if delay > 1 else "")


def least_that_holds(low: int, high: int, guess: int, holds: Callable[[int], bool]) -> int:
    """The least number from `low` on that `holds`, as all greater ones do; `high` if none does.

    Asked are numbers near the guess, then ever farther ones, then the middle of what is left.
    """
    at, reach = min(max(guess, low), high - 1), 1
    while low < high:
        if holds(at):
            high, nearby = at, at - reach
        else:
            low, nearby = at + 1, at + reach
        at, reach = nearby if low <= nearby < high else (low + high) // 2, 2 * reach
    return high
