"""Defaults of averages that are used late: what workers keep, and in how many parts they travel."""

_EVEN = 64
"""Fragments of a long round: more would make the messages small, and the delay no shorter."""

_LONG = 8
"""Steps of a round from which on it is better to keep half of one's own progress."""


def even_fragments(tau: int) -> int:
    """One fragment for each step of a round, as far as that helps."""
    return min(tau, _EVEN)


def kept(tau: int, keep: float | None, predict: float | None) -> tuple[float, float]:
    """`keep` and `predict` of a late average: what was given, else what learned best.

    In trials with the small GPT of `benchmarks/convergence.py` and four workers all progress was
    best kept in rounds of up to 6 steps, half of it in rounds of 12, with predict = 1 - keep.
    """
    share = (1.0 if tau < _LONG else 0.5) if keep is None else keep
    return share, 1 - share if predict is None else predict
