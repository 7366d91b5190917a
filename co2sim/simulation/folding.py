"""Classes of ranks that behave identically: one rank of each class is simulated for all.

Where the first ranks of all nodes do something alone, they stand for the others, who wait for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from co2sim.schedule.schedule import (
    LEADERS,
    NODE,
    SITE,
    SITE_PEERS,
    Collective,
    Group,
    Layout,
    Op,
    Schedule,
)


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
            inside = not leaves_node(group, self.layout)
            return [(index,) for index in everyone] if inside else [tuple(everyone)]
        found: dict[range, list[int]] = {}
        for index in everyone:
            members = group.members(self.classes[index].rank, self.layout)
            found.setdefault(members, []).append(index)
        return [tuple(members) for members in found.values()]


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

    Blocks and sites of several nodes mix slow and fast ones in ways of their own, and who does not
    wait for the first rank of its node may be ahead of it: then every rank stands for itself.
    """
    equal = _equal(slowdowns)
    mixed = any(_mixes(group, layout) for group in schedule.groups)
    led = layout.gpus_per_node > 1 and any(one.name == LEADERS.name for one in schedule.groups)
    ahead = led and not _await_leaders(schedule)
    return allowed and not ahead and (equal or not mixed)


def _mixes(group: Group, layout: Layout) -> bool:
    """Whether only some nodes meet in a group, and not those of one place in every node."""
    if group.name in {SITE.name, SITE_PEERS.name}:
        return 1 < layout.sites < layout.nodes
    return bool(group.ranks) and leaves_node(group, layout)


def _await_leaders(schedule: Schedule) -> bool:
    """Whether all that follows what leaders do is a collective of the node, for them and others."""
    led = {op.name for op in schedule.body if _meets(op, LEADERS)}
    following = []
    for stream in schedule.streams:
        row = [op for op in schedule.body if op.stream == stream]
        following += [b for a, b in zip(row, row[1:] + row[:1], strict=True) if a.name in led]
    following += [op for op in schedule.body if any(wait.op in led for wait in op.after)]
    return all(_meets(op, NODE) for op in following)


def _meets(op: Op, kind: Group) -> bool:
    return isinstance(op.work, Collective) and op.work.group.name == kind.name


def leaves_node(group: Group, layout: Layout) -> bool:
    """Whether ranks of several nodes meet in a group."""
    return group.members(0, layout)[-1] >= layout.gpus_per_node
