"""Averages that are used late: what workers keep, and in how many parts they travel."""

from typing import Literal

from co2sim.common.errors import OptionError

_EVEN = 64
"""Fragments of a long round: more would make the messages small, and the delay no shorter."""

MAX_FRAGMENTS = 1_000

_LONG = 8
"""Steps of a round from which on it is better to keep half of one's own progress."""


def even_fragments(tau: int) -> int:
    """One fragment for each step of a round, as far as that helps."""
    return min(tau, _EVEN)


def kept(tau: int, keep: float | None, predict: float | None) -> tuple[float, float]:
    """`keep` and `predict` of a late average: what was given, else all progress or half of it.

    A choice from trials with one small GPT and four workers, used one step late. In rounds of up to
    6 steps all progress was best kept, or within the noise of the best. In rounds of 12 a half was
    0.006 nats better than all (`benchmarks/results/convergence-runs.csv`, one seed), and three
    quarters 0.004 better than that. predict = 1 - keep.
    """
    share = (1.0 if tau < _LONG else 0.5) if keep is None else keep
    return share, 1 - share if predict is None else predict


def bounded(tau: int, delay: int, keep: float, predict: float) -> float:
    """What is predicted after a delay that was measured: `predict`, if what it repeats dies out.

    A predicted step is part of the next displacement, so that a share p = predict delay / tau of
    each average comes again in the next one: that ends only if p < 1 (docs/theory.md, the late
    average). Else 1 - keep, which replaces no more than what is not kept.
    """
    return predict if predict * delay < tau else min(predict, 1 - keep)


def check_predict(tau: int, delay: int | Literal["auto"], keep: float, predict: float) -> None:
    """Raise OptionError where what is predicted would be repeated for ever; see `bounded`."""
    if delay == "auto":
        delay, predict = tau, bounded(tau, tau, keep, predict)
    if predict * delay >= tau:
        raise OptionError(
            f"predict={predict:g} with keep={keep:g}, and an average used up to delay={delay} steps"
            f" late in rounds of tau={tau}: predict times delay / tau is {predict * delay / tau:g}"
            " and must be below 1, or progress is repeated for ever; take less of one"
        )
