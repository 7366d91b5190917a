"""Which of two predictions is the faster one, and whether that is decided.

Two runs of a model on one cluster with one stack share much of what is wrong with either. What they
do not share is the error of their ratio: on published runs it grows with the distance of the two
(`ErrorModel.pairs`).
"""

import math

from co2sim.prediction.error_model import error_model
from co2sim.prediction.evidence import between
from co2sim.prediction.intervals import Interval, overlaps
from co2sim.prediction.result import Result


def interval_of(result: Result) -> Interval:
    """The interval of a result."""
    return Interval(result.tokens_per_s_low, result.tokens_per_s_high, result.interval_source)


def unshared(one: Result, other: Result) -> float:
    """How far a 90 % interval of the logarithm of their ratio reaches, by their own errors.

    inf for runs of two models, or on two clusters or stacks, whose errors are not alike.
    """
    pairs = error_model().pairs
    alike = (one.cluster, one.model, one.stack) == (other.cluster, other.model, other.stack)
    return pairs.reach(between(one, other)) if pairs and alike else math.inf


def undecided(one: Result, other: Result) -> bool:
    """Whether either may be the faster one: their intervals overlap, and so do what they differ by.

    Two without an interval, such as measured ones, are never undecided.
    """
    if not overlaps(interval_of(one), interval_of(other)):
        return False
    return abs(math.log(one.tokens_per_s / other.tokens_per_s)) <= unshared(one, other)
