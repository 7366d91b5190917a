"""From a schedule and a cluster to what each class of ranks does, and what that costs.

Nothing runs here: the engines execute what `lower` gives.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, BytesPerSecond, Seconds
from co2sim.common.validation import whole
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import Collective, Compute, Group, Layout, Schedule
from co2sim.simulation.costs import CollectiveCost, cost_of, costs_of, work_time
from co2sim.simulation.crossings import pods_of, uplinks
from co2sim.simulation.noise import Noise


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective of one communicator on its links.

    `loads` are the bytes on each link, `copies` the number of equal flows that a folded one stands
    for there, `latency` comes before the first byte, and `solo` is what the bytes take alone.
    """

    loads: Mapping[Hashable, Bytes]
    copies: Mapping[Hashable, int]
    latency: Seconds
    solo: Seconds

    @property
    def alone(self) -> Seconds:
        """What the bytes take on an idle network: as on the network, by the rate of a flow."""
        return 1.0 / (1.0 / self.solo) if self.solo else 0.0

    @property
    def takes_time(self) -> bool:
        """Whether it has latency or bytes."""
        return self.solo > 0 or self.latency > 0

    def scaled(self, factor: float) -> "Transfer":
        """The same with `factor` times the bytes and the latency."""
        loads = {link: size * factor for link, size in self.loads.items()}
        return replace(self, loads=loads, latency=factor * self.latency, solo=factor * self.solo)


NOTHING = Transfer({}, {}, 0.0, 0.0)
"""What a rank that is alone transfers."""


@dataclass(frozen=True, slots=True)
class RankClass:
    """`count` identical ranks, represented by `rank`; `slowdown` is their compute time."""

    rank: int
    count: int
    slowdown: float


@dataclass(frozen=True, slots=True)
class Folding:
    """The classes of a layout's ranks: one per speed if `folded`, else one per rank."""

    layout: Layout
    classes: tuple[RankClass, ...]
    folded: bool

    def node(self, index: int) -> int:
        """The node whose NICs class `index` uses; folded classes have one for all of theirs."""
        return index if self.folded else self.classes[index].rank // self.layout.gpus_per_node

    def meetings(self, group: Group) -> list[tuple[int, ...]]:
        """The classes that meet in each communicator of `group`."""
        everyone = range(len(self.classes))
        if self.folded:
            leaves = group.leaves_node(self.layout)
            return [tuple(everyone)] if leaves else [(index,) for index in everyone]
        classes_of: dict[range, list[int]] = {}
        for index in everyone:
            members = group.members(self.classes[index].rank, self.layout)
            classes_of.setdefault(members, []).append(index)
        return [tuple(members) for members in classes_of.values()]


def class_count(
    layout: Layout, slowdowns: Sequence[float], schedule: Schedule, *, allowed: bool
) -> int:
    """How many classes `fold` gives, without making them."""
    if _folds(layout, slowdowns, schedule, allowed=allowed):
        return len(set(slowdowns))
    return layout.world_size


def fold_ranks(
    layout: Layout, slowdowns: Sequence[float], schedule: Schedule, *, allowed: bool
) -> Folding:
    """Fold ranks on nodes of equal slowdown, if `allowed` and nothing speaks against it."""
    g = layout.gpus_per_node
    if not _folds(layout, slowdowns, schedule, allowed=allowed):
        ranks = range(layout.world_size)
        return Folding(
            layout, tuple(RankClass(r, 1, slowdowns[r // g]) for r in ranks), folded=False
        )
    if _equal(slowdowns):
        everyone = RankClass(0, layout.world_size, slowdowns[0])
        return Folding(layout, (everyone,), folded=True)
    nodes: dict[float, list[int]] = {}
    for node, slowdown in enumerate(slowdowns):
        nodes.setdefault(slowdown, []).append(node)
    classes = (RankClass(same[0] * g, g * len(same), slow) for slow, same in nodes.items())
    return Folding(layout, tuple(classes), folded=True)


def _equal(slowdowns: Sequence[float]) -> bool:
    return slowdowns.count(slowdowns[0]) == len(slowdowns)


def _folds(
    layout: Layout, slowdowns: Sequence[float], schedule: Schedule, *, allowed: bool
) -> bool:
    """Whether one rank can stand for all on nodes of equal slowdown.

    Blocks and sites of several nodes mix slow and fast ones in their own ways, and who does not
    wait for the first rank of its node may be ahead of it: then every rank stands for itself.
    """
    equal = _equal(slowdowns)
    mixed = any(_mixes(group, layout) for group in schedule.groups)
    led = layout.gpus_per_node > 1 and any(group.led for group in schedule.groups)
    ahead = led and not _await_leaders(schedule)
    return allowed and not ahead and (equal or not mixed)


def _mixes(group: Group, layout: Layout) -> bool:
    """Whether only some nodes meet in a group, and not those of one place in every node."""
    if group.by_site:
        return 1 < layout.sites < layout.nodes
    return bool(group.ranks) and group.leaves_node(layout)


def _await_leaders(schedule: Schedule) -> bool:
    """Whether all that follows what leaders do is a collective of the node, for them and others."""
    led = {op.name for op in schedule.body if isinstance(op.work, Collective) and op.work.group.led}
    following = []
    for stream in schedule.streams:
        row = [op for op in schedule.body if op.stream == stream]
        following += [b for a, b in zip(row, row[1:] + row[:1], strict=True) if a.name in led]
    following += [op for op in schedule.body if any(wait.op in led for wait in op.after)]
    return all(isinstance(op.work, Collective) and op.work.group.is_node for op in following)


def capacities(cluster: Cluster, folding: Folding) -> dict[Hashable, BytesPerSecond]:
    """Payload bytes per second of every link."""
    capacity: dict[Hashable, float] = {}
    for index in range(len(folding.classes)):
        capacity["gpu", index] = cluster.intra.payload_bandwidth
        capacity["nic", folding.node(index)] = cluster.inter.payload_bandwidth
        for pod in cluster.pods:
            node = np.array(folding.node(index))
            of_node = 0 if folding.folded else int(pods_of(pod, node, cluster.nodes_per_site))
            capacity[pod, of_node] = uplinks(pod, cluster)
    if cluster.wan:
        speed = cluster.wan.payload_bandwidth
        capacity.update({("wan", site): speed for site in range(cluster.sites)})
    return capacity


Times: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""When instances start and end, [instance, class of ranks]."""

SPAN_BYTES: Bytes = 400.0
"""Memory that a span may take while it is simulated and measured: 60 to 320 were seen."""
LOCKSTEP_SPAN_BYTES: Bytes = 160.0
"""The same where many classes of ranks run in lockstep, in arrays: 41 to 108 were seen."""

MAX_SPANS = 50_000_000
"""What a simulation may hold: up to 20 GB."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """Classes of ranks that meet in a group: one collective at a time in an `exclusive` one."""

    index: int
    members: tuple[int, ...]
    exclusive: bool


@dataclass(frozen=True, eq=False)
class LoweredSchedule:
    """A schedule on a cluster: places in `seconds` and `transfers` are those of ops in the body.

    `seconds` is the nominal time of a compute op. `transfers` lists, for a collective, one transfer
    for each communicator of its group; both are empty for the other kind of work. `class_factors`
    and `communicator_factors` are the factors of jitter, [instance, class] and
    [instance, communicator]; None without jitter. `contend` says that communication and computing
    slow each other down, `free` that collectives take no time once all members are there.
    """

    schedule: Schedule
    cluster: Cluster
    precision: str
    rounds: int
    folding: Folding
    free: bool
    seconds: tuple[Seconds, ...]
    communicators: Mapping[Group, tuple[Communicator, ...]]
    transfers: tuple[tuple[Transfer, ...], ...]
    capacity: Mapping[Hashable, BytesPerSecond]
    class_factors: NDArray[np.float64] | None
    communicator_factors: NDArray[np.float64] | None
    contend: bool

    @property
    def slows(self) -> bool:
        """Whether a compute may take longer than alone."""
        return self.contend and self.cluster.interference > 0

    @property
    def classes(self) -> tuple[RankClass, ...]:
        """The classes of ranks."""
        return self.folding.classes

    @cached_property
    def place(self) -> Mapping[Group, tuple[int, ...]]:
        """For every group, the place of each class's communicator among those of the group."""
        by_group = {}
        for group, together in self.communicators.items():
            places = {index: n for n, meeting in enumerate(together) for index in meeting.members}
            by_group[group] = tuple([position for _, position in sorted(places.items())])
        return by_group


def span_count(
    schedule: Schedule, cluster: Cluster, *, rounds: int, noise: Noise, fold: bool = True
) -> int:
    """How many spans a simulation of `rounds` rounds records; see `SPAN_BYTES`."""
    slowdowns = noise.node_slowdowns(cluster.layout)
    classes = class_count(cluster.layout, slowdowns, schedule, allowed=fold and not noise.jitter)
    return classes * len(schedule.body) * rounds


def lower(
    schedule: Schedule,
    cluster: Cluster,
    *,
    precision: str,
    rounds: int,
    noise: Noise,
    fold: bool,
    slowdown: float = 1.0,
) -> LoweredSchedule:
    """Fold the ranks and cost every op. Raises OptionError where the spans would be too many.

    Compute takes `slowdown` times as long on every rank, beside what `noise` says.
    """
    rounds = whole("rounds", rounds, 0)
    spans = span_count(schedule, cluster, rounds=rounds, noise=noise, fold=fold)
    if spans > MAX_SPANS:
        classes = spans // max(1, rounds * len(schedule.body))
        raise OptionError(
            f"{rounds:,} rounds, warm-up included, of {len(schedule.body):,} ops on {classes:,}"
            f" simulated ranks are {spans:,} spans; at most {MAX_SPANS:,} are simulated"
        )
    slowdowns = noise.node_slowdowns(cluster.layout)
    if slowdown != 1:
        slowdowns = tuple([slowdown * factor for factor in slowdowns])
    allowed = fold and not noise.jitter
    folding = fold_ranks(cluster.layout, slowdowns, schedule, allowed=allowed)
    communicators = _communicators(schedule, cluster, folding)
    capacity = capacities(cluster, folding)
    count = rounds * len(schedule.body)
    total = sum(map(len, communicators.values()))
    return LoweredSchedule(
        schedule=schedule,
        cluster=cluster,
        precision=precision,
        rounds=rounds,
        folding=folding,
        free=False,
        seconds=_seconds(schedule, cluster, precision, free=False),
        communicators=communicators,
        transfers=_transfers(schedule, cluster, folding, communicators, capacity),
        capacity=capacity,
        class_factors=_factors(
            noise, 1, [rank_class.rank for rank_class in folding.classes], count
        ),
        communicator_factors=_factors(noise, 2, range(total), count),
        contend=cluster.interference > 0
        or (cluster.inter.busy_efficiency < 1 and cluster.nodes > 1),
    )


def without_communication(lowered: LoweredSchedule) -> LoweredSchedule:
    """The same where collectives take no time once all members are there.

    It is the baseline of exposed communication, of the same jitter.
    """
    schedule, nothing = lowered.schedule, {}
    exchange = any(isinstance(work, Compute) and work.exchanged for work in schedule.works)
    for group, together in lowered.communicators.items():
        nothing[group] = (NOTHING,) * len(together)
    return replace(
        lowered,
        free=True,
        seconds=_seconds(schedule, lowered.cluster, lowered.precision, free=True)
        if exchange
        else lowered.seconds,
        transfers=tuple(
            [
                nothing[op.work.group] if isinstance(op.work, Collective) else ()
                for op in schedule.body
            ]
        ),
        contend=False,
    )


def _factors(
    noise: Noise, family: int, members: Iterable[int], count: int
) -> NDArray[np.float64] | None:
    """Those of jitter on `count` instances, [instance, member]; None without jitter."""
    if not noise.jitter:
        return None
    drawn = [noise.op_slowdowns(family, member, count) for member in members]
    return np.stack(drawn, axis=1) if drawn else np.empty((count, 0))


def _seconds(
    schedule: Schedule, cluster: Cluster, precision: str, *, free: bool
) -> tuple[Seconds, ...]:
    by_work = [
        alone(work, cluster, precision, free=free) if isinstance(work, Compute) else 0.0
        for work in schedule.works
    ]
    return tuple([by_work[index] for index in schedule.work_numbers])


def alone(work: Compute, cluster: Cluster, precision: str, *, free: bool) -> Seconds:
    """Seconds of a work; `free` says that communication takes no time."""
    exchanges = () if free else work.exchanged
    exchanged = sum(cost_of(exchange, cluster).duration_alone(cluster) for exchange in exchanges)
    return work_time(work, cluster, precision, exchanged)


def _communicators(
    schedule: Schedule, cluster: Cluster, folding: Folding
) -> dict[Group, tuple[Communicator, ...]]:
    """The communicators of every group. One stream alone never needs the lock."""
    streams: dict[Group, set[str]] = {}
    for work, stream in zip(schedule.works, schedule.work_streams, strict=True):
        if isinstance(work, Collective):
            streams.setdefault(work.group, set()).add(stream)
    communicators: dict[Group, tuple[Communicator, ...]] = {}
    first = 0
    for group, used in streams.items():
        shared = cluster.communicators == "group" and len(used) > 1
        exclusive = cluster.backend == "nccl" and shared
        meetings = folding.meetings(group)
        communicators[group] = tuple(
            Communicator(first + index, members, exclusive and _meet(group, folding, members))
            for index, members in enumerate(meetings)
        )
        first += len(meetings)
    return communicators


def _transfers(
    schedule: Schedule,
    cluster: Cluster,
    folding: Folding,
    communicators: Mapping[Group, tuple[Communicator, ...]],
    capacity: Mapping[Hashable, BytesPerSecond],
) -> tuple[tuple[Transfer, ...], ...]:
    meets = {
        group: [_meet(group, folding, communicator.members) for communicator in together]
        for group, together in communicators.items()
    }
    by_work = [
        tuple(
            [
                _transfer(cluster, folding, meeting.members, cost, capacity) if others else NOTHING
                for meeting, others in zip(
                    communicators[work.group], meets[work.group], strict=True
                )
            ]
        )
        if isinstance(work, Collective) and cost
        else ()
        for work, cost in zip(schedule.works, costs_of(schedule, cluster), strict=True)
    ]
    return tuple([by_work[index] for index in schedule.work_numbers])


def _meet(group: Group, folding: Folding, members: tuple[int, ...]) -> bool:
    """Whether several ranks meet. One alone only copies, and never waits."""
    return len(group.members(folding.classes[members[0]].rank, folding.layout)) > 1


def _transfer(
    cluster: Cluster,
    folding: Folding,
    members: tuple[int, ...],
    cost: CollectiveCost,
    capacity: Mapping[Hashable, BytesPerSecond],
) -> Transfer:
    """Bytes on every link; a folded rank stands for all groups that share its node and site."""
    loads: dict[Hashable, float] = {}
    copies: dict[Hashable, int] = {}
    intra, nic, wan = cost.bytes_per_link(cluster)
    nic /= cost.inter_efficiency  # the time of the link that the messages take
    on_node, on_site = cost.groups(cluster)
    for index in members:
        loads["gpu", index] = intra
        node = folding.node(index)
        if folding.folded:
            loads["nic", node], copies["nic", node] = nic, on_node
            loads["wan", 0], copies["wan", 0] = wan, on_site
        else:
            loads["nic", node] = cost.inter / cost.inter_efficiency
            loads["wan", node // cluster.nodes_per_site] = cost.wan
    for crossing in cost.tiers:
        if folding.folded:
            pushed, many = {0: crossing.bytes}, crossing.groups
        else:
            ranks = [folding.node(index) for index in members]
            pushed, many = crossing.of_group(ranks, cluster.nodes_per_site), 1
        for pod, size in pushed.items():
            loads[crossing.pod, pod] = (1 + crossing.lost) * size
            copies[crossing.pod, pod] = many
    loads = {link: size / cost.share for link, size in loads.items() if size}
    solo = max((size / capacity[link] for link, size in loads.items()), default=0.0)
    return Transfer(loads, copies, cost.exposed_latency(cluster), solo)


def shared_works(lowered: LoweredSchedule) -> set[int]:
    """Works, by index, that may meet others on a link or wait for their communicator.

    Those of one communicator in one stream follow each other. NICs that attain less while their
    node computes are shared with that. Free communication shares nothing.
    """
    if lowered.free:
        return set()
    schedule, users = lowered.schedule, dict[object, set[tuple[str, int]]]()
    nics = {("nic", lowered.folding.node(index)) for index in range(len(lowered.classes))}
    transfers_of = dict(zip(schedule.work_numbers, lowered.transfers, strict=True))
    works = {
        index: (lowered.communicators[work.group], transfers_of[index])
        for index, work in enumerate(schedule.works)
        if isinstance(work, Collective)
    }
    for index, (together, transfers) in works.items():
        for communicator, transfer in zip(together, transfers, strict=True):
            user = schedule.work_streams[index], communicator.index
            for link in transfer.loads:
                users.setdefault(link, set()).add(user)
    return {
        index
        for index, (together, transfers) in works.items()
        if any(
            (communicator.exclusive and (transfer.solo or transfer.latency))
            or any(len(users[link]) > 1 for link in transfer.loads)
            or (lowered.contend and any(link in nics for link in transfer.loads))
            for communicator, transfer in zip(together, transfers, strict=True)
        )
    }
