"""The links of one class of ranks, and the flows on them: `network`, for a few flows at a time.

Few collectives of one class are in flight at once, and the same ones meet again and again: how fast
each goes is computed once for all meetings.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeAlias

from co2sim.lowering import Lowered, Transfer
from co2sim.network import max_min_rates
from co2sim.units import Bytes, Seconds

LAST = 9
"""Priority behind all that happens at the same instant, which has 1."""

Happening: TypeAlias = Callable[[Seconds, Any, int], None]
"""What happens: when, to what, of which version."""


class Agenda:
    """What is to happen, in the order of time, of priority, and in which it was put there."""

    def __init__(self) -> None:
        """Start with nothing to do."""
        self._events: list[tuple[Seconds, int, int, Happening, Any, int]] = []
        self._tickets = count()

    def at(
        self, time: Seconds, happen: Happening, what: object, version: int = 0, priority: int = 1
    ) -> None:
        """Let something happen at a time."""
        heappush(self._events, (time, priority, next(self._tickets), happen, what, version))

    def is_free(self, until: Seconds) -> bool:
        """Whether nothing happens until then, nor at that instant."""
        return not self._events or self._events[0][0] > until

    def run(self, most: int) -> bool:
        """Let so many things happen; whether there are more."""
        events = self._events
        for _ in range(most):
            if not events:
                return False
            now, _, _, happen, what, version = heappop(events)
            happen(now, what, version)
        return bool(events)


@dataclass(eq=False, slots=True)
class Flow:
    """Work of instance `number`: `left` of it at `since`, done at `rate` from then on.

    `loads` are the bytes on each link. `version` counts the changes of the rate.
    """

    number: int
    loads: Mapping[Hashable, Bytes]
    left: float = 1.0
    rate: float = 0.0
    since: Seconds = 0.0
    version: int = 0

    def set_rate(self, now: Seconds, rate: float) -> Seconds:
        """Go on at another rate; when it will be done, inf at a rate of 0."""
        self.left = self.left_at(now)
        self.rate, self.since, self.version = rate, now, self.version + 1
        return now + max(self.left, 0.0) / rate if rate else math.inf

    def left_at(self, now: Seconds) -> float:
        """What is left of it, at the same rate."""
        return self.left - self.rate * (now - self.since)


class FairLinks:
    """The links, and the flows on them; `done` is called with a flow that has arrived."""

    def __init__(self, lowered: Lowered, agenda: Agenda, done: Happening) -> None:
        """Start with no flow in flight, and no compute under way."""
        self._agenda, self._done = agenda, done
        self._capacity = dict(lowered.capacity)
        self._nic = "nic", lowered.folding.node(0)
        self._full, self._left = self._capacity[self._nic], lowered.cluster.inter.busy_efficiency
        self._computing, self._slower = 0, False
        self._flows: list[Flow] = []
        self._transfers: dict[int, Transfer] = {}
        self._rates: dict[tuple[int, ...], list[float]] = {}

    def transfer(self, now: Seconds, flow: Flow, transfer: Transfer) -> None:
        """Start a flow, which enters its links after its latency."""
        begin = now + transfer.latency
        if transfer.solo <= 0:
            self._agenda.at(begin, self._done, flow)
            return
        end = begin + transfer.alone
        if not self._flows and not self._slower and self._agenda.is_free(end):
            self._agenda.at(end, self._done, flow)  # nobody comes before it is gone
        else:
            self._transfers[id(flow.loads)] = transfer
            self._agenda.at(begin, self._enter, flow)

    def occupy(self, now: Seconds, change: int) -> None:
        """Count what computes; the NICs attain less while anything does."""
        self._computing += change
        if self._left < 1 and self._slower != (self._computing > 0):
            self._agenda.at(now, self._resize, None, priority=LAST)

    def _resize(self, now: Seconds, _: None, __: int) -> None:
        self._slower = self._computing > 0
        capacity = self._full * self._left if self._slower else self._full
        if capacity != self._capacity[self._nic]:
            self._capacity[self._nic] = capacity
            self._share(now, self._users(self._nic))

    def _enter(self, now: Seconds, flow: Flow, _: int) -> None:
        flow.since = now
        alone = not (self._slower and self._nic in flow.loads) and all(
            flow.loads.keys().isdisjoint(other.loads) for other in self._flows
        )
        self._flows.append(flow)
        if alone:
            self._go_on(now, flow, 1 / self._transfers[id(flow.loads)].solo)
        else:
            self._share(now, [flow])

    def _leave(self, now: Seconds, flow: Flow, version: int) -> None:
        if version == flow.version:
            self._flows.remove(flow)
            self._share(now, [other for link in flow.loads for other in self._users(link)])
            self._done(now, flow, 0)

    def _users(self, link: Hashable) -> list[Flow]:
        return [flow for flow in self._flows if link in flow.loads]

    def _share(self, now: Seconds, seeds: Sequence[Flow]) -> None:
        """New rates for all flows that share links with `seeds`, directly or through others."""
        found = dict.fromkeys(seeds)
        queue = list(found)
        while queue:
            for link in queue.pop().loads:
                new = [flow for flow in self._users(link) if flow not in found]
                found.update(dict.fromkeys(new))
                queue.extend(new)
        if not found:
            return
        key = self._slower, *(id(flow.loads) for flow in found)
        if key not in self._rates:
            copies = [self._transfers[id(flow.loads)].copies for flow in found]
            loads = [flow.loads for flow in found]
            self._rates[key] = max_min_rates(loads, self._capacity, copies)
        for flow, rate in zip(found, self._rates[key], strict=True):
            if rate != flow.rate:
                self._go_on(now, flow, rate)

    def _go_on(self, now: Seconds, flow: Flow, rate: float) -> None:
        end = flow.set_rate(now, rate)
        self._agenda.at(end, self._leave, flow, flow.version)
