"""90 % intervals of predictions on the terminal."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.console import Console

from co2sim.common.tables import print_lines
from co2sim.common.units import counted, percent
from co2sim.prediction.figures import INTERVAL
from co2sim.prediction.intervals import Interval, undecided
from co2sim.prediction.result import Result

_NAMED = 3
"""Strategies that are named."""
_PAIRS = 8
"""Pairs of strategies that are named."""


def interval_of(result: Result) -> Interval:
    """The interval of a result."""
    return Interval(result.tokens_per_s_low, result.tokens_per_s_high, result.interval_source)


def relative(result: Result) -> str:
    """Its ends relative to the prediction; a dash for none."""
    low, high = result.tokens_per_s_low, result.tokens_per_s_high
    if low is None or high is None:
        return "-"
    return " to ".join(percent(end / result.tokens_per_s - 1) for end in (low, high))


def print_sources(out: Console, results: Iterable[Result], *after: str) -> None:
    """Where intervals come from, and of which strategies if not of all; and lines after that."""
    found: dict[str, dict[str, None]] = {}
    for result in results:
        found.setdefault(result.interval_source, {})[result.strategy] = None
    found.pop("", None)
    lines = [
        f"{INTERVAL}{f' of {_first(strategies)}' if len(found) > 1 else ''}: {source}"
        for source, strategies in found.items()
    ]
    print_lines(out, *lines, *after)


def _first(names: Iterable[str]) -> str:
    """A few of them."""
    known = list(names)
    rest = len(known) - _NAMED
    return ", ".join(known[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def not_told_apart(named: Sequence[tuple[str, Result]]) -> str:
    """One line on neighbours in speed whose intervals overlap; "" for none."""
    ranked = sorted(named, key=lambda pair: -pair[1].tokens_per_s)
    pairs = [
        f"{one} and {other}"
        for (one, first), (other, second) in pairwise(ranked)
        if undecided(interval_of(first), interval_of(second))
    ]
    if not pairs:
        return ""
    size = counted(ranked[0][1].gpus, "GPU")
    more = len(pairs) - _PAIRS
    named_ = "; ".join(pairs[:_PAIRS]) + (f"; and {more} pairs more" if more > 0 else "")
    return f"undecided at {size}, as their {INTERVAL}s overlap: {named_}"
