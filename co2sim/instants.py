"""What happens at the same instant, and how often a collective has begun.

Times of one instant may differ in their last digits, by the way they were added up.
"""

from dataclasses import dataclass

from co2sim.units import Seconds

INSTANT: Seconds = 1e-9
"""What is no further apart happens at once: what begins or ends is off by so much at most."""


@dataclass(eq=False, slots=True)
class Begun:
    """The collectives of a rank, each of which takes some time from the compute beside it.

    One that begins as a compute begins is beside it, whichever is heard of first.
    """

    count: int = 0
    _now: int = 0
    _last: Seconds = -1.0

    def begin(self, now: Seconds) -> None:
        """One begins. Call it in the order of time."""
        self._now = self._now + 1 if now - self._last <= INSTANT else 1
        self.count, self._last = self.count + 1, now

    def before(self, now: Seconds) -> int:
        """How many have begun before this instant, which is not before that of the last one."""
        return self.count - (self._now if now - self._last <= INSTANT else 0)
