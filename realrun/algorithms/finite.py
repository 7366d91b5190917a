"""Check that an average is finite before it is applied."""

import math

from realrun.algorithms.average import Flight
from realrun.algorithms.flat import Flat
from realrun.algorithms.rule import State, Total
from realrun.errors import NonFiniteError


def finite_norm(
    flight: Flight, now: int, flat: Flat, state: State, total: Total, first: int = 0
) -> float:
    """Norm of an average over the whole model, to be used in round `now`.

    It holds the elements of the model from `first` on.

    One pass over the vector serves both: a norm is finite only if all elements are. Raises
    NonFiniteError on all ranks of the worker, whichever holds the element.
    """
    norm = state.norm(flight.vector, total)
    if math.isfinite(norm):
        return norm
    bad = (~flight.vector.isfinite()).nonzero()
    (count,) = total([len(bad)])
    if not count:  # only the squares were too large for fp32
        (square,) = total([float((flight.vector.double() ** 2).sum())])
        return math.sqrt(square)
    where = f"first in {flat.name_at(first + int(bad[0]))!r}" if len(bad) else "on other ranks"
    raise NonFiniteError(
        f"the average of round {flight.round}, used in round {now}, has {count:g} elements that"
        f" are NaN or infinite, {where}; parameters, anchor and momentum are as before",
        round=flight.round,
    )
