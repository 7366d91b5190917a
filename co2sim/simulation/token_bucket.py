"""Links with a shaper: a token bucket, whose burst passes at once after a pause.

`tc tbf` in a laboratory is one. A bucket holds at most `burst` bytes of credit, earned at the rate
of the link while the link is not full. What is sent while there is credit takes no time on the link
(tc-tbf(8); RFC 2697).

So latency steps of a collective are not lost: what the link could not send meanwhile passes at once
in the next step, as far as the burst holds it. The collective takes one step and its bytes, or all
of its steps, whichever is longer.

Where cores are slow, the bytes of a burst take time, too: those of its bandwidth, on top of all
latency steps, since the same cores work for both. Cores are also late to use what a busy link
earns: a transfer longer than its burst falls behind by `lag` of its further time, at most by what
the burst gained, and the next one finds that credit: `realrun probe --stated` measures collectives
after a pause, and right behind an equal one.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from co2sim.common.units import Bytes, BytesPerSecond, Seconds
from co2sim.hardware.cluster import Cluster, Link, TokenBucket


@dataclass(frozen=True, slots=True)
class Shaper:
    """Of one link: payload bytes of a burst, the rate of the link, and how fast a burst passes.

    `lag` is the fraction of further time that longer transfers lose.
    """

    burst: Bytes
    rate: BytesPerSecond
    pace: BytesPerSecond = math.inf
    lag: float = 0.0

    @classmethod
    def of(cls, link: Link | None, bucket: TokenBucket | None) -> "Shaper | None":
        """The shaper of a link, if it has one."""
        if link is None or bucket is None:
            return None
        pace = math.inf if bucket.bandwidth is None else bucket.bandwidth * link.efficiency
        return cls(bucket.size * link.efficiency, link.payload_bandwidth, pace, bucket.lag)


Shapers: TypeAlias = tuple[Shaper | None, Shaper | None, Shaper | None]
"""Of the links of a GPU, of a node and of a site."""


def shapers(cluster: Cluster) -> Shapers:
    """Those of a cluster's links."""
    if (host := cluster.host) is None:
        return None, None, None
    return (
        Shaper.of(cluster.intra, host.intra),
        Shaper.of(cluster.inter, host.inter),
        Shaper.of(cluster.wan, host.wan),
    )


def hidden_share(shaper: Shaper | None, step: Seconds) -> float:
    """The part of a latency step whose bytes the burst keeps for the next one, 0 to 1."""
    lost = shaper.rate * step if shaper else 0.0
    return min(1.0, shaper.burst / lost) if shaper and lost else 0.0


def passed(times: Sequence[Seconds], on: Shapers) -> float:
    """The fraction, 0 to 1, of a transfer alone that passes at once after a pause.

    `times` are those that its bytes need on each of the links; it progresses on all together.
    """
    shares = [
        shaper.burst / shaper.rate / t for t, shaper in zip(times, on, strict=True) if shaper and t
    ]
    return min(1.0, *shares) if shares else 0.0


def lagged(share: float, lag: float) -> float:
    """The fraction of a transfer that is lost as lag, where a `share` of it passed at once."""
    return min(share, lag * (1.0 - share))


def alone(
    latency: Seconds, lead: Seconds, times: Sequence[Seconds], longest: Seconds, on: Shapers
) -> Seconds:
    """What a transfer alone takes after a pause; `lead` is the latency that is not hidden.

    `longest` is what its bytes take on the slowest link, `times` as in `passed`.
    """
    burst = passed(times, on)
    lag = lagged(burst, max((shaper.lag for shaper in on if shaper), default=0.0))
    held = max(
        (t * shaper.rate / shaper.pace for t, shaper in zip(times, on, strict=True) if shaper),
        default=0.0,
    )
    return max(latency, lead + (1 - burst + lag) * longest) + burst * held


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

    def __init__(self, shapers: Mapping[Hashable, Shaper]) -> None:
        """Of the links that have a shaper."""
        self._buckets = {
            link: _Bucket(shaper.burst, shaper.rate, shaper.burst, shaper.pace, shaper.lag)
            for link, shaper in shapers.items()
        }

    def __contains__(self, link: Hashable) -> bool:
        """Whether a link is shaped."""
        return link in self._buckets

    def spend(self, flows: Sequence[Mapping[Hashable, Bytes]], now: Seconds) -> list[Passing]:
        """What passes of each flow, of those that come at this moment.

        Flows are given by their bytes on each link. Those on one link share its credit by these.
        """
        demand: dict[Hashable, Bytes] = {}
        for loads in flows:
            for link in loads.keys() & self._buckets.keys():
                demand[link] = demand.get(link, 0.0) + loads[link]
        shares = {link: self._buckets[link].settle(now) / size for link, size in demand.items()}
        passing = [min(1.0, *(shares[link] for link in loads if link in demand)) for loads in flows]
        for loads, fraction in zip(flows, passing, strict=True):
            for link in loads.keys() & demand.keys():
                self._buckets[link].level -= fraction * loads[link]
        times = [
            {k: fraction * loads[k] / self._buckets[k].pace for k in loads if k in demand}
            for loads, fraction in zip(flows, passing, strict=True)
        ]
        sums = {link: sum(each.get(link, 0.0) for each in times) for link in demand}
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
