"""Which ranks behave alike, so that one can be simulated for all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from co2sim.schedule import Group, Layout


@dataclass(frozen=True, slots=True)
class RankClass:
    """`count` ranks that behave alike, represented by `rank`; `slowdown` is their compute time."""

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
            inside = not _leaves_node(group, self.layout)
            return [(index,) for index in everyone] if inside else [tuple(everyone)]
        found: dict[range, list[int]] = {}
        for index in everyone:
            members = group.members(self.classes[index].rank, self.layout)
            found.setdefault(members, []).append(index)
        return [tuple(members) for members in found.values()]


def fold(
    layout: Layout, slowdowns: Sequence[float], groups: Iterable[Group], *, allowed: bool
) -> Folding:
    """Fold ranks on nodes of equal slowdown, if `allowed`.

    Blocks of several nodes mix slow and fast ones in ways of their own: then every rank stands for
    itself.
    """
    g = layout.gpus_per_node
    alike = min(slowdowns) == max(slowdowns)
    mixed = any(group.name == "block" and _leaves_node(group, layout) for group in groups)
    if not allowed or (mixed and not alike):
        ranks = range(layout.world_size)
        return Folding(
            layout, tuple(RankClass(r, 1, slowdowns[r // g]) for r in ranks), folded=False
        )
    nodes: dict[float, list[int]] = {}
    for node, slowdown in enumerate(slowdowns):
        nodes.setdefault(slowdown, []).append(node)
    classes = (RankClass(same[0] * g, g * len(same), slow) for slow, same in nodes.items())
    return Folding(layout, tuple(classes), folded=True)


def _leaves_node(group: Group, layout: Layout) -> bool:
    return group.members(0, layout)[-1] >= layout.gpus_per_node
