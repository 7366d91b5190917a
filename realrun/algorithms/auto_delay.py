"""How many local steps an average takes: measured on the first ones, the same on all ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from realrun.algorithms.average import Flight
from realrun.algorithms.workers import Links

SAMPLES = 3
"""Averages that are measured; the slowest on any rank decides."""


class AutoDelay:
    """Looks after every local step which averages have arrived, until enough were seen.

    Until then averages are used a whole round late. The very first is not counted: it opens
    connections. Nor is one that something else waited for, such as an evaluation.
    """

    def __init__(self, tau: int, links: Links) -> None:
        """Nothing is known yet."""
        self._tau, self._links = tau, links
        self._uses, self._samples, self._slowest = 0, 0, 0
        self._took: int | None = None
        self._spoiled = False

    def look(self, now: int, flights: Sequence[Flight], launches: Sequence[Any]) -> None:
        """After a local step: see whether the average is there."""
        if not flights or self._took is not None:
            return
        vector = flights[0].vector
        if vector.is_cuda:  # the host may be steps ahead
            torch.cuda.current_stream(vector.device).synchronize()
        if flights[0].arrived():
            self._took = max(1, now - launches[0].step)

    def disturbed(self, flights: Iterable[Flight]) -> None:
        """Averages under way are about to be waited for."""
        if self._took is None and not all(flight.arrived() for flight in flights):
            self._spoiled = True

    def used(self) -> int | None:
        """An average was used. All ranks call this; gives the delay once it is known."""
        counted = self._uses > 0 and not self._spoiled
        if counted:
            self._samples += 1
            self._slowest = max(self._slowest, self._took or self._tau)
        self._uses += 1
        self._took, self._spoiled = None, False
        fewest, slowest = self._links.largest([-float(self._samples), float(self._slowest)])
        return min(self._tau, int(slowest)) if -fewest >= SAMPLES else None

    def numbers(self) -> dict[str, float]:
        """To be saved."""
        return {"uses": self._uses, "samples": self._samples, "slowest": self._slowest}

    def go_on(self, numbers: Mapping[str, float]) -> None:
        """Go on from what was saved. An average under way then was waited for."""
        self._uses, self._samples = int(numbers["uses"]), int(numbers["samples"])
        self._slowest = int(numbers["slowest"])
        self._took, self._spoiled = None, True
