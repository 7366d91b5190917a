"""Hosts that were idle: what starts then takes longer, since cores and threads have to wake up.

In labs whose kernels sleep, nothing runs between two collectives. In one lab an all-gather of 4 KiB
between two ranks, on two cores of a virtual machine, took 0.4 ms right after another one, 0.6 after
a pause of 0.5 ms, 0.85 after 2 ms, and 1.3 after 5, 20 or 60 ms. Timers are late there by 0.1 ms
after a pause of 0.5 ms and by 0.3 after 20 ms, and several threads wake up one after the other.
`benchmarks/collectives.py` compares predictions after 1 and 8 ms, and in a row.
"""

import math

from co2sim.common.units import Seconds
from co2sim.hardware.cluster import FULLY_IDLE


class Hosts:
    """The hosts that all nodes share: whether they are awake.

    `wake_up` is what a collective takes longer after a pause of `fully_idle`; after a shorter one,
    in proportion less. What starts while they wake up waits for the same moment.
    """

    def __init__(self, wake_up: Seconds, fully_idle: Seconds = FULLY_IDLE) -> None:
        """Idle for as long as can be."""
        self._wake_up, self._fully_idle = wake_up, fully_idle
        self._in_flight = 0
        self._idle_since, self._awake = -math.inf, -math.inf

    def begin(self, now: Seconds) -> Seconds:
        """A collective starts: how long it waits until hosts are awake."""
        if not self._in_flight:
            idle = min(1.0, (now - self._idle_since) / self._fully_idle)
            self._awake = now + idle * self._wake_up
        self._in_flight += 1
        return max(0.0, self._awake - now)

    def end(self, now: Seconds) -> None:
        """A collective has ended."""
        self._in_flight -= 1
        self._idle_since = now
