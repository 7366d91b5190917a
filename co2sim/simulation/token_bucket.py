"""Links with a shaper: a token bucket, whose burst passes at once after a pause.

`tc tbf` in a lab is one, and so are the rate limits of clouds. A bucket holds at most `burst` bytes
of credit, earned at the rate of the link while the link is not full. What is sent while there is
credit takes no time on the link (tc-tbf(8); RFC 2697).

So latency steps of a collective are not lost: what the link could not send meanwhile passes at once
in the next step, as far as the burst holds it. The collective takes one step and its bytes, or all
of its steps, whichever is longer.

Where hosts are slow, the bytes of a burst take time, too: those of `burst_bandwidth`, on top of all
latency steps, since the same cores work for both. Hosts are also late to use what a busy link
earns: a transfer longer than its burst falls behind by `burst_lag` of its further time, at most by
what the burst gained, and the next one finds that credit (`benchmarks/collectives.py`). Where all
nodes are one machine (`hosts` of a cluster), collectives in flight at once share its cores: what
each takes of them alone adds up.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from co2sim.common.units import Bytes, BytesPerSecond, Seconds
from co2sim.hardware.cluster import Link

HOST = "host"
"""The link that stands for a host which all nodes share; its bytes are seconds."""


class HostShare(NamedTuple):
    """Fractions of a shared host that one transfer takes: its latency steps, and its bytes.

    What is known are times of all groups of a kind at once.
    """

    steps: float
    bytes: float


def hidden_share(link: Link, step: Seconds) -> float:
    """The part of a latency step whose bytes the burst keeps for the next one, 0 to 1."""
    lost = link.payload_bandwidth * step
    return min(1.0, link.payload_burst / lost) if lost else 0.0


def passed(times: Sequence[Seconds], links: Sequence[Link | None]) -> float:
    """The fraction, 0 to 1, of a transfer alone that passes at once after a pause.

    `times` are those that its bytes need on each of the links; it progresses on all together.
    """
    shares = [
        link.payload_burst / link.payload_bandwidth / time
        for time, link in zip(times, links, strict=True)
        if link and link.burst and time
    ]
    return min(1.0, *shares) if shares else 0.0


def lagged(share: float, lag: float) -> float:
    """The fraction of a transfer that is lost as lag, where a `share` of it passed at once."""
    return min(share, lag * (1.0 - share))


def held(times: Sequence[Seconds], links: Sequence[Link | None]) -> Seconds:
    """The time of a transfer's bytes as fast as bursts pass; `times` as in `passed`."""
    return max(
        (
            time * link.payload_bandwidth / link.payload_burst_bandwidth
            for time, link in zip(times, links, strict=True)
            if link and link.burst
        ),
        default=0.0,
    )


@dataclass(frozen=True, slots=True)
class Shaper:
    """Payload bytes of a burst, how fast they pass, and what longer transfers lose."""

    burst: Bytes
    pace: BytesPerSecond = math.inf
    lag: float = 0.0

    @classmethod
    def of(cls, link: Link) -> "Shaper":
        """The shaper of a link."""
        return cls(link.payload_burst, link.payload_burst_bandwidth, link.burst_lag)


@dataclass(slots=True)
class _Bucket:
    """The credit of one link in bytes; `used` is what its flows take, in B/s."""

    depth: Bytes
    rate: BytesPerSecond
    level: Bytes
    pace: BytesPerSecond
    lag: float
    used: BytesPerSecond = 0.0
    since: Seconds = 0.0

    def settle(self, now: Seconds) -> Bytes:
        """The credit at this moment."""
        earned = (self.rate - self.used) * (now - self.since)
        self.level = min(self.depth, max(0.0, self.level + earned))
        self.since = now
        return self.level


class Passing(NamedTuple):
    """What passes of a flow with the burst: a fraction, and how long its bytes take.

    `alone`, or `together` with those of all flows that came at the same moment. `lag` is the
    fraction that the flow sends in vain.
    """

    fraction: float
    lag: float
    alone: Seconds
    together: Seconds


class Buckets:
    """The buckets of a network's links, full at the start."""

    def __init__(
        self, capacity: Mapping[Hashable, BytesPerSecond], shapers: Mapping[Hashable, Shaper]
    ) -> None:
        """Of the links that have a burst, in bytes of payload as their capacity is."""
        self._buckets = {
            link: _Bucket(one.burst, capacity[link], one.burst, one.pace, one.lag)
            for link, one in shapers.items()
        }

    def __contains__(self, link: Hashable) -> bool:
        """Whether a link is shaped."""
        return link in self._buckets

    def spend(self, flows: Sequence[Mapping[Hashable, Bytes]], now: Seconds) -> list[Passing]:
        """What passes of each flow, of those that come at this moment.

        Flows are given by their bytes on each link. Those on one link share its credit by these.
        """
        asked: dict[Hashable, Bytes] = {}
        for loads in flows:
            for link in loads.keys() & self._buckets.keys():
                asked[link] = asked.get(link, 0.0) + loads[link]
        shares = {link: self._buckets[link].settle(now) / size for link, size in asked.items()}
        passing = [min(1.0, *(shares[link] for link in loads if link in asked)) for loads in flows]
        for loads, fraction in zip(flows, passing, strict=True):
            for link in loads.keys() & asked.keys():
                self._buckets[link].level -= fraction * loads[link]
        times = [
            {at: fraction * loads[at] / self._buckets[at].pace for at in loads if at in asked}
            for loads, fraction in zip(flows, passing, strict=True)
        ]
        sums = {link: sum(each.get(link, 0.0) for each in times) for link in asked}
        return [
            Passing(
                fraction,
                lagged(fraction, max(self._buckets[link].lag for link in each)),
                max(each.values()),
                max(sums[link] for link in each),
            )
            for fraction, each in zip(passing, times, strict=True)
        ]

    def give_back(self, loads: Mapping[Hashable, Bytes], share: float, now: Seconds) -> None:
        """A flow has ended that sent this fraction in vain: it is credit again."""
        for link in loads.keys() & self._buckets.keys():
            bucket = self._buckets[link]
            bucket.level = min(bucket.depth, bucket.settle(now) + share * loads[link])

    def use(self, loads: Mapping[Hashable, Bytes], change: float, now: Seconds) -> None:
        """A flow changes its rate, in whole flows per second."""
        for link in loads.keys() & self._buckets.keys():
            bucket = self._buckets[link]
            bucket.settle(now)
            bucket.used += change * loads[link]
