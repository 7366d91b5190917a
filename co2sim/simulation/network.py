"""Transfers in flight as fluid flows that share links max-min fairly.

A flow pushes a given number of bytes through each of its links and progresses on all of them
together, so its slowest link sets its pace. On every link that is full, the flows that it holds
back get equal bytes per second, and what slower flows leave over goes to the faster ones. A link
with a bucket lets a flow that comes pass at once, as far as its credit goes (`shaping`).
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import simpy
from simpy.events import EventPriority

from co2sim.common.units import Bytes, BytesPerSecond, Seconds
from co2sim.simulation.token_bucket import HOST, Buckets, HostShare, Shaper

_LAST = EventPriority(8)
"""Behind what else comes at the same instant, but for the starts of exclusive collectives."""

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
                known = offer[link] < math.inf
                change = max(change, abs(share / offer[link] - 1) if known else 1.0)
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
    known: set[Hashable] = set()
    found = []
    for link, flows in users.items():
        key = (capacity[link], *((flow, count, shares[flow][link]) for flow, count in flows))
        if key in known:
            found.append(link)
        known.add(key)
    return found


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


def _last_of(count: int, call: Callable[[], None]) -> Callable[[], None]:
    """A call that is passed on when it has come so many times."""
    left = count

    def one() -> None:
        nonlocal left
        left -= 1
        if not left:
            call()

    return one


@dataclass(eq=False, slots=True)
class _Flow:
    loads: Mapping[Hashable, Bytes]
    copies: Mapping[Hashable, int]
    on_done: Callable[[], None]
    solo_rate: float
    earliest: Seconds = 0.0
    host: HostShare | None = None
    later: Seconds = 0.0
    lag: float = 0.0
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

    def __init__(
        self,
        env: simpy.Environment,
        capacity: Mapping[Hashable, BytesPerSecond],
        shapers: Mapping[Hashable, Shaper] = MappingProxyType({}),
    ) -> None:
        """Start with no flow in flight. `shapers` are those of links, their credit full."""
        self._env = env
        self.capacity = capacity
        self._buckets = Buckets(capacity, shapers) if shapers else None
        self._coming: list[_Flow] = []
        self._now = dict(capacity)
        self._users: dict[Hashable, dict[_Flow, None]] = {
            link: {} for link in capacity
        }  # ordered sets

    def transfer(
        self,
        loads: Mapping[Hashable, Bytes],
        latency: Seconds,
        solo: Seconds,
        on_done: Callable[[], None],
        copies: Mapping[Hashable, int] = MappingProxyType({}),
        least: Seconds = 0.0,
        host: HostShare | None = None,
    ) -> None:
        """Start a transfer; `on_done` is called when its last byte has arrived.

        `solo` is the time that the bytes take alone, without latency; `copies` as above. It ends no
        earlier than `least` seconds after its start. With `host`, latency and what bytes of a burst
        take are work of a shared host.
        """
        steps = host.steps if host else 0.0
        if solo <= 0:
            self._wait(max(latency, least), steps, on_done)
            return
        flow = _Flow(loads, copies, on_done, 1 / solo)
        if host:
            flow.host, flow.later = host, max(0.0, least - latency)
        else:
            flow.earliest = self._env.now + least
        self._wait(latency, steps, lambda: self._enter(flow))

    def _wait(self, seconds: Seconds, host: float, call: Callable[[], None]) -> None:
        """Call after so many seconds, or after so much work of a shared host."""
        if host and seconds > 0:
            self._begin(_Flow({HOST: seconds * host}, {}, call, 1 / seconds))
        else:
            self._later(seconds, lambda _: call())

    def resize(self, link: Hashable, capacity: BytesPerSecond) -> None:
        """Give a link another capacity from now on; flows on it get new rates."""
        if capacity != self._now[link]:
            self._now[link] = capacity
            self._share(self._users[link])

    def _later(self, delay: Seconds, call: Callable[[simpy.Event], None]) -> None:
        timer = self._env.timeout(delay)
        assert timer.callbacks is not None
        timer.callbacks.append(call)

    def _enter(self, flow: _Flow) -> None:
        if self._buckets is None or not any(link in self._buckets for link in flow.loads):
            self._send(flow)
            return
        if not self._coming:  # all that come at this instant share the credit
            last = simpy.Event(self._env)
            last._ok, last._value = True, None  # noqa: SLF001 - as in `reference_engine`
            assert last.callbacks is not None
            last.callbacks.append(self._admit)
            self._env.schedule(last, priority=_LAST)
        self._coming.append(flow)

    def _admit(self, _: simpy.Event) -> None:
        """Let what there is credit for pass."""
        assert self._buckets is not None
        coming, self._coming = self._coming, []
        passed = self._buckets.spend([flow.loads for flow in coming], self._env.now)
        for flow, each in zip(coming, passed, strict=True):
            took, share = each.together, 0.0
            if flow.host:
                took, share = each.alone, flow.host.bytes
            flow.lag, flow.left = each.lag, 1.0 - each.fraction + each.lag
            flow.earliest += took
            if took:
                self._wait(took, share, partial(self._send, flow))
            else:
                self._send(flow)

    def _send(self, flow: _Flow) -> None:
        """Let the bytes flow; later latency steps are work of a shared host meanwhile."""
        if flow.host and flow.later > 0:
            flow.on_done = _last_of(2, flow.on_done)
            self._wait(flow.later, flow.host.steps, flow.on_done)
        self._begin(flow)

    def _begin(self, flow: _Flow) -> None:
        flow.since = self._env.now
        alone = True
        for link in flow.loads:
            users = self._users[link]
            users[flow] = None
            alone = alone and len(users) == 1 and self._now[link] == self.capacity[link]
        if alone:
            self._set_rate(flow, flow.solo_rate)
        else:
            self._share([flow])

    def _finish(self, flow: _Flow, version: int) -> None:
        if version != flow.version:
            return
        if self._buckets:
            self._buckets.use(flow.loads, -flow.rate, self._env.now)
            self._buckets.give_back(flow.loads, flow.lag, self._env.now)
        neighbours: dict[_Flow, None] = {}
        for link in flow.loads:
            users = self._users[link]
            del users[flow]
            neighbours.update(users)
        if neighbours:
            self._share(neighbours)
        if self._env.now < flow.earliest:
            self._later(flow.earliest - self._env.now, lambda _: flow.on_done())
        else:
            flow.on_done()

    def _share(self, seeds: Iterable[_Flow]) -> None:
        """Set the rates of all flows that share links with `seeds`, directly or through others."""
        found = dict.fromkeys(seeds)
        queue = list(found)
        while queue:
            for link in queue.pop().loads:
                new = [flow for flow in self._users[link] if flow not in found]
                found.update(dict.fromkeys(new))
                queue.extend(new)
        loads, copies = [flow.loads for flow in found], [flow.copies for flow in found]
        rates = max_min_rates(loads, self._now, copies)
        for flow, rate in zip(found, rates, strict=True):
            if rate != flow.rate:
                flow.advance(self._env.now)
                self._set_rate(flow, rate)

    def _set_rate(self, flow: _Flow, rate: float) -> None:
        if self._buckets:
            self._buckets.use(flow.loads, rate - flow.rate, self._env.now)
        flow.rate = rate
        flow.version += 1
        version = flow.version
        self._later(max(flow.left, 0.0) / rate, lambda _: self._finish(flow, version))
