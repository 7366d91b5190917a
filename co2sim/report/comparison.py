"""What a study says of its clusters and strategies beside each other, as sentences."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from co2sim.common.units import counted
from co2sim.prediction.intervals import undecided
from co2sim.prediction.step_factors import local_updates
from co2sim.report.tables import Answered

_MAX = 3
"""Clusters that the fastest one is compared with, and pairs of strategies of each."""
_NOTABLE = 1.1
"""How many times as much a strategy must gain to be named besides."""
_SAME = 1.005
"""Below this there is no difference worth a word."""
_TIMES = 2.0
"""From here on people say "times"."""


def pace(one: Answered) -> float:
    """How fast a case gets on: units a second, or, with tokens to train, trainings a day.

    0 where the worth of its steps is not known.
    """
    if not one.asked:
        return one.result.tokens_per_s
    return 0.0 if one.totals is None else 1 / one.totals.days


def ends(one: Answered) -> tuple[float, float] | None:
    """The 90 % interval of `pace`; None where there is none."""
    if not one.asked:
        low, high = one.result.tokens_per_s_low, one.result.tokens_per_s_high
        return None if low is None or high is None else (low, high)
    if one.totals is None or one.totals.days_low is None or one.totals.days_high is None:
        return None
    return 1 / one.totals.days_high, 1 / one.totals.days_low


def first(group: Sequence[Answered]) -> Answered | None:
    """The one that gets on fastest, of those that fit in memory."""
    fitting = [one for one in group if one.result.fits_in_memory and pace(one)]
    return max(fitting, key=pace, default=None)


def clusters(largest: Mapping[str, Sequence[Answered]]) -> Iterator[str]:
    """How much faster one cluster is than the others, and so how much more it may cost.

    Nothing where they have not the same number of GPUs, or nothing fits in memory. Nothing of the
    price where only speeds are known, and a step of one is not worth a step of the other.
    """
    best = [one for group in largest.values() if (one := first(group))]
    if len(best) < 2 or len({one.result.gpus for one in best}) > 1:  # noqa: PLR2004
        return
    top, *others = sorted(best, key=pace, reverse=True)
    size = counted(top.result.gpus, "GPU")
    for other in others[:_MAX]:
        ratio, sure, told = pace(top) / pace(other), _ratio(top, other), ""
        if sure is not None:
            told = f" (90 %: {sure[0]:.2g} to {sure[1]:.2g} times)"
        yield from _told(top, other, ratio, f"on {size}{told}")
        yield (
            f"That is with the fastest strategy of each: {top.strategy} on {top.cluster},"
            f" {other.strategy} on {other.cluster}."
        )
        yield from _gained(largest[top.cluster], largest[other.cluster], ratio)
        if sure and sure[0] <= 1:
            yield "Which of the two is faster is undecided: their 90 % intervals overlap."
    yield " ".join(f"{one.cluster} is {one.result.cluster}." for one in best)


def _told(top: Answered, other: Answered, ratio: float, where: str) -> Iterator[str]:
    """The headline of two clusters."""
    names = {top.result.strategy, other.result.strategy}
    alike = top.asked or len(names) == 1 or not local_updates(names)
    speed = "" if alike else f" in {top.result.unit}s/s"
    if ratio < _SAME:
        advice = ": take the one that costs less" if alike else ""
        yield f"{top.cluster} and {other.cluster} are equally fast{speed} {where}{advice}."
        return
    worth = f": it is worth {_dearer(ratio)}" if alike else ""
    verb = "trains" if alike else "is"
    yield f"{top.cluster} {verb} {_faster(ratio)} {other.cluster}{speed} {where}{worth}."


def strategies(group: Sequence[Answered]) -> str:
    """One line on neighbours in pace whose order is undecided; "" for none."""
    ranked = sorted(
        (one for one in group if one.result.fits_in_memory and pace(one)), key=pace, reverse=True
    )
    pairs = [
        f"{one.strategy} and {other.strategy}"
        for one, other in pairwise(ranked)
        if _undecided(one, other)
    ]
    if not pairs:
        return ""
    more = f"; and {len(pairs) - _MAX} pairs more" if len(pairs) > _MAX else ""
    size = counted(group[0].result.gpus, "GPU")
    shown = "; ".join(pairs[:_MAX])
    return f"undecided at {size}, too close to call: {shown}{more}"


def _undecided(one: Answered, other: Answered) -> bool:
    """Of two on one cluster. What a step is worth is no error that they share."""
    if not one.asked:
        return undecided(one.result, other.result)
    sure = _ratio(one, other)
    return sure is not None and sure[0] <= 1


def _ratio(one: Answered, other: Answered) -> tuple[float, float] | None:
    """How many times as fast one is, from its worst against the other's best to the contrary."""
    these, those = ends(one), ends(other)
    if these is None or those is None:
        return None
    return these[0] / those[1], these[1] / those[0]


def _gained(here: Sequence[Answered], there: Sequence[Answered], ratio: float) -> Iterator[str]:
    """The strategy for which two clusters differ most, if that is more than the ratio.

    Of those that fit in memory on both.
    """
    speeds = {one.strategy: one.result.tokens_per_s for one in there if one.result.fits_in_memory}
    gained = {
        one.strategy: one.result.tokens_per_s / speeds[one.strategy]
        for one in here
        if one.result.fits_in_memory and one.strategy in speeds
    }
    name = max(gained, key=lambda name: abs(math.log(gained[name])), default="")
    more = max(gained[name], 1 / gained[name]) if name else 1.0
    if more > _NOTABLE * ratio:
        clusters = [here[0].cluster, there[0].cluster]
        faster, slower = clusters if gained[name] > 1 else reversed(clusters)
        yield f"With {name}, {faster} is {_faster(more)} {slower}."


def _faster(ratio: float) -> str:
    """How much faster, as a text that ends before what it is compared with."""
    return f"{ratio - 1:.1%} faster than" if ratio < _TIMES else f"{ratio:.1f} times as fast as"


def _dearer(ratio: float) -> str:
    if ratio < _TIMES:
        return f"a price an hour that is up to {ratio - 1:.1%} higher"
    return f"up to {ratio:.1f} times the price an hour"
