"""Check that an average is finite before it is applied."""

import math

from torch import Tensor

from realrun.algorithms.average import Flight
from realrun.algorithms.flat import Flat
from realrun.algorithms.links import Links
from realrun.algorithms.rule import State
from realrun.errors import NonFiniteError


def finite_norm(
    flight: Flight, now: int, flat: Flat, state: State, links: Links, first: int = 0
) -> float:
    """Norm of an average over the whole model, to be used in round `now`.

    It holds the elements of the model from `first` on.

    One pass over the vector serves both: a norm is finite only if all elements are. Raises
    NonFiniteError on all ranks, whichever holds the element; it names those that gave such ones.
    """
    total = links.total
    norm = state.norm(flight.vector, total)
    if math.isfinite(norm):
        return norm
    bad = (~flight.vector.isfinite()).nonzero()
    (count,) = total([len(bad)])
    if not count:  # only the squares were too large for fp32
        (square,) = total([float((flight.vector.double() ** 2).sum())])
        return math.sqrt(square)
    where = f"first in {flat.name_at(first + int(bad[0]))!r}" if len(bad) else "on other ranks"
    flight.blame = flight.blame or _blame(flight.given, links)
    raise NonFiniteError(
        f"the average of round {flight.round}, used in round {now}, has {count:g} elements that"
        f" are NaN or infinite, {where}; {flight.blame}; parameters, anchor and momentum are as"
        " before",
        round=flight.round,
    )


def _blame(given: Tensor | None, links: Links) -> str:
    """Who gave what is not finite, in words. All ranks call this."""
    ranks = links.which(here=given is not None and not bool(given.isfinite()))
    if ranks:
        return f"from {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
    return "what ranks gave to it was finite, or is not known any more"
