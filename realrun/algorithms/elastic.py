"""Averages that outlive a lost worker: they are launched anew among those who are left.

Whoever waits for an average that fails recovers: it meets the others who are left, connects to
them, and all launch again what they had launched. An average that one of them has got already is
not made again: that one gives it to the others. So all who are left use the same averages, and
training goes on as if the lost worker had not taken part in those that it left unfinished.

For this, an average leaves what was launched alone until it has arrived, and the last ones that
arrived are kept: up to two more fp32 vectors.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from co2sim.units import Seconds
from realrun.algorithms.average import Average, Flight
from realrun.errors import RankFailure


class ElasticFlight(Flight):
    """An average under way. `vector` holds what was launched until `wait` has returned."""

    __slots__ = ("attempt", "owner")

    def __init__(self, number: int, vector: Tensor, owner: "ElasticAverage") -> None:
        super().__init__(number, vector)
        self.owner = owner
        self.attempt: Flight | None = None

    def arrived(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.attempt is None or self.attempt.arrived()

    def wait(self) -> Seconds:
        """Wait until `vector` holds the mean; gives the seconds, those of a recovery too."""
        began = time.perf_counter()
        return self.owner.wait_for(self) and time.perf_counter() - began


class ElasticAverage:
    """Means over workers that come and go; for the rest as `Average`.

    They are waited for in the order of their launch, the same on all workers. `waited` counts those
    that were. `recover` is called when one fails: it must `connect` this to those who are left,
    let all `take` what others have got already, and `launch_again`.
    """

    def __init__(self, average: Average, kept: int, recover: Callable[[str], None]) -> None:
        """`kept`: how many averages are under way at most."""
        self._inner, self._kept, self._recover = average, kept, recover
        self._under_way: deque[ElasticFlight] = deque()
        self._got: dict[int, Tensor] = {}
        self.waited = 0

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to others."""
        return self._inner.sent

    @sent.setter
    def sent(self, count: int) -> None:
        self._inner.sent = count

    def launch(self, vector: Tensor, number: int) -> Flight:
        """Start averaging `vector`, for round `number`; it is written when it is waited for."""
        flight = ElasticFlight(number, vector, self)
        self._start(flight)
        self._under_way.append(flight)
        return flight

    def _start(self, flight: ElasticFlight) -> None:
        try:
            flight.attempt = self._inner.launch(flight.vector.clone(), flight.round)
        except RuntimeError as error:
            flight.attempt = _failed(flight, error)

    def wait_for(self, flight: ElasticFlight) -> bool:
        """Wait for all up to this one, recovering as often as needed; whether there was any."""
        if flight.attempt is None:
            return False
        while flight.attempt is not None:
            if failure := self._oldest_failed():
                self._recover(failure)
        return True

    def _oldest_failed(self) -> str:
        """Wait for the oldest; gives the failure in words, or nothing when it has arrived.

        The error itself would keep connections open to those who are left: they wait at them.
        """
        attempt = self._under_way[0].attempt
        assert attempt is not None
        try:
            attempt.wait()
        except RankFailure as error:
            return str(error)
        self._arrive(attempt.vector)
        return ""

    def _arrive(self, mean: Tensor) -> None:
        """The oldest one under way is there."""
        flight = self._under_way.popleft()
        flight.vector.copy_(mean)
        flight.attempt = None
        self._got[self.waited] = mean
        self._got.pop(self.waited - self._kept, None)
        self.waited += 1

    def disconnect(self) -> None:
        """Give up what is under way, and let go of the group."""
        self._inner.abandon()
        self._inner = self._inner.among(None)
        for flight in self._under_way:
            flight.attempt = _failed(flight, RuntimeError("there is no connection"))

    def connect(self, group: dist.ProcessGroup | None) -> None:
        """Average among others from now on."""
        self._inner = self._inner.among(group)

    def missing(self, waited: int) -> list[Tensor]:
        """What another one, who has waited for fewer, still needs of what is here."""
        return [self._got[number] for number in range(waited, self.waited)]

    def take(self, means: Sequence[Tensor]) -> None:
        """Averages that others have got already, the oldest first."""
        for mean in means:
            self._arrive(mean)

    def launch_again(self) -> None:
        """Launch all that is still under way, among those who are left."""
        for flight in self._under_way:
            self._start(flight)

    def state(self) -> dict[str, Any]:
        """For a worker that joins; nothing may be under way."""
        assert not self._under_way
        return {"waited": self.waited, "sent": self.sent}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.waited, self.sent = state["waited"], state["sent"]
        self._got.clear()

    def close(self) -> None:
        """End. No average may be under way."""
        self._inner.close()


def _failed(flight: Flight, error: RuntimeError) -> Flight:
    """An average that could not even be launched: waiting for it says so."""

    def fail(_: Seconds) -> None:
        raise error

    return Flight(flight.round, flight.vector, [fail], polls=[lambda: True])
