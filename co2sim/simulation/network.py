"""Transfers in flight as fluid flows that share links max-min fairly.

A flow pushes a given number of bytes through each of its links and progresses on all of them
together, so its slowest link sets its pace. On every link that is full, the flows that it holds
back get equal bytes per second, and what slower flows leave over goes to the faster ones.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import simpy

from co2sim.common.units import Bytes, BytesPerSecond, Seconds
from co2sim.simulation.lowering import Transfer

_TOLERANCE = 1e-12
_MAX_PASSES = 1000


def max_min_rates(
    loads: Sequence[Mapping[Hashable, Bytes]],
    capacity: Mapping[Hashable, BytesPerSecond],
    copies: Sequence[Mapping[Hashable, int]] | None = None,
) -> list[float]:
    """Rate of each flow, in whole flows per second, when all are in flight together.

    `loads[i]` maps links to the bytes that flow i pushes through them. Every link repeatedly offers
    its flows the largest equal share (in bytes per second) that fills it, given what the flows can
    use elsewhere, until no offer changes (Charny, Clark and Jain 1995). `copies[i]` maps links to
    the number of equal flows that flow i stands for there (1 if left out): each gets a share.
    """
    shares = [
        {link: size / (copies[flow].get(link, 1) if copies else 1) for link, size in links.items()}
        for flow, links in enumerate(loads)
    ]
    users: dict[Hashable, list[tuple[int, int]]] = {}
    for flow, links in enumerate(loads):
        for link in links:
            count = copies[flow].get(link, 1) if copies else 1
            users.setdefault(link, []).append((flow, count))
    for link in _repeated(users, shares, capacity):
        for flow, _ in users.pop(link):
            del shares[flow][link]
    offer = dict.fromkeys(users, math.inf)

    def limit(flow: int, excluded: Hashable = None) -> float:
        return min(
            (offer[link] / size for link, size in shares[flow].items() if link != excluded),
            default=math.inf,
        )

    for _ in range(_MAX_PASSES):
        change = 0.0
        for link, flows in users.items():
            wanted = sorted(
                (shares[flow][link] * limit(flow, link), count) for flow, count in flows
            )
            share = _fill(wanted, capacity[link])
            if share != offer[link]:
                finite = offer[link] < math.inf
                change = max(change, abs(share / offer[link] - 1) if finite else 1.0)
                offer[link] = share
        if change <= _TOLERANCE:
            break
    return [limit(flow) for flow in range(len(loads))]


def _repeated(
    users: Mapping[Hashable, Sequence[tuple[int, int]]],
    shares: Sequence[Mapping[Hashable, Bytes]],
    capacity: Mapping[Hashable, BytesPerSecond],
) -> list[Hashable]:
    """Links that carry the same as one before them, such as the NICs of nodes that all meet.

    They change no rate. Offers of two of them would take turns, and settle slowly.
    """
    seen: set[Hashable] = set()
    repeated = []
    for link, flows in users.items():
        key = (capacity[link], *((flow, count, shares[flow][link]) for flow, count in flows))
        if key in seen:
            repeated.append(link)
        seen.add(key)
    return repeated


def _fill(wanted: Sequence[tuple[float, int]], capacity: float) -> float:
    """The level at which demands, each `count` times, capped by it sum to `capacity`, or inf."""
    left, waiting = capacity, sum(count for _, count in wanted)
    for demand, count in wanted:
        share = left / waiting
        if demand > share:
            return share
        left -= demand * count
        waiting -= count
    return math.inf


@dataclass(eq=False, slots=True)
class Flow:
    """Of the fraction of a transfer that is `left` since a moment, `rate` a second gets done."""

    loads: Mapping[Hashable, Bytes]
    copies: Mapping[Hashable, int]
    on_done: Callable[[], None]
    solo_rate: float
    left: float = 1.0
    rate: float = 0.0
    since: Seconds = 0.0
    version: int = 0

    def advance(self, now: Seconds) -> None:
        """Account for the progress made since the last change of rate."""
        self.left -= self.rate * (now - self.since)
        self.since = now


class Network:
    """Links of given payload capacity, and the flows on them, in a SimPy environment."""

    def __init__(self, env: simpy.Environment, capacity: Mapping[Hashable, BytesPerSecond]) -> None:
        """Start with no flow in flight."""
        self.env = env
        self.capacity = capacity
        self._now = dict(capacity)
        self._users: dict[Hashable, dict[Flow, None]] = {
            link: {} for link in capacity
        }  # ordered sets

    def transfer(self, what: Transfer, on_done: Callable[[], None]) -> None:
        """Start a transfer; `on_done` is called when its last byte has arrived."""
        if what.solo <= 0:
            self._later(what.latency, on_done)
            return
        flow = Flow(what.loads, what.copies, on_done, 1 / what.solo)
        self._later(what.latency, lambda: self._begin(flow))

    def resize(self, link: Hashable, capacity: BytesPerSecond) -> None:
        """Give a link another capacity from now on; flows on it get new rates."""
        if capacity != self._now[link]:
            self._now[link] = capacity
            self._share(self._users[link])

    def _later(self, delay: Seconds, call: Callable[[], None]) -> None:
        timer = self.env.timeout(delay)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: call())

    def _begin(self, flow: Flow) -> None:
        flow.since = self.env.now
        alone = True
        for link in flow.loads:
            users = self._users[link]
            users[flow] = None
            alone = alone and len(users) == 1 and self._now[link] == self.capacity[link]
        if alone:
            self._set_rate(flow, flow.solo_rate)
        else:
            self._share([flow])

    def _finish(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return
        self._leave(flow)
        flow.on_done()

    def _leave(self, flow: Flow) -> None:
        neighbours: dict[Flow, None] = {}
        for link in flow.loads:
            users = self._users[link]
            del users[flow]
            neighbours.update(users)
        if neighbours:
            self._share(neighbours)

    def _share(self, seeds: Iterable[Flow]) -> None:
        """Set the rates of all flows that share links with `seeds`, directly or through others."""
        affected = dict.fromkeys(seeds)
        queue, links = list(affected), set[Hashable]()
        while queue:
            for link in queue.pop().loads:
                if link in links:
                    continue
                links.add(link)
                new = [flow for flow in self._users[link] if flow not in affected]
                affected.update(dict.fromkeys(new))
                queue.extend(new)
        for flow, rate in zip(affected, self._rates(list(affected)), strict=True):
            if rate != flow.rate:
                flow.advance(self.env.now)
                self._set_rate(flow, rate)

    def _rates(self, flows: Sequence[Flow]) -> Sequence[float]:
        """The rates of flows that share no link with any other."""
        loads, copies = [flow.loads for flow in flows], [flow.copies for flow in flows]
        return max_min_rates(loads, self._now, copies)

    def _set_rate(self, flow: Flow, rate: float) -> None:
        flow.rate = rate
        flow.version += 1
        version = flow.version
        self._later(max(flow.left, 0.0) / rate, lambda: self._finish(flow, version))
