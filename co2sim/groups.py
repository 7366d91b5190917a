"""How ranks are placed on nodes, and which of them meet in a collective."""

from dataclasses import dataclass

from co2sim.errors import ScheduleError
from co2sim.ranges import whole


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks are placed: `nodes` nodes of `gpus_per_node` ranks, filled node by node."""

    nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        """Refuse an empty layout."""
        whole("nodes", self.nodes, 1, error=ScheduleError)
        whole("gpus_per_node", self.gpus_per_node, 1, error=ScheduleError)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Group:
    """Which ranks meet in a collective; `ranks` is the size of blocks, 0 where these are nodes."""

    name: str
    ranks: int = 0

    def __str__(self) -> str:
        """`world`, `node`, `peers`, `leaders`, `block(4)` or `peers(4)`."""
        return f"{self.name}({self.ranks})" if self.ranks else self.name

    def members(self, rank: int, layout: Layout) -> range:
        """Ranks of the group that `rank` belongs to, in ring order."""
        g, n = layout.gpus_per_node, layout.world_size
        match self.name:
            case "world":
                return range(n)
            case "node":
                return range(rank // g * g, rank // g * g + g)
            case "peers" if n % (self.ranks or g) == 0:
                return range(rank % (self.ranks or g), n, self.ranks or g)
            case "leaders":
                return range(rank, rank + 1) if rank % g else range(0, n, g)
            case "block" if self.ranks and n % self.ranks == 0:
                return range(rank // self.ranks * self.ranks, (rank // self.ranks + 1) * self.ranks)
        raise ScheduleError(f"group {self} does not divide {n} ranks")


WORLD = Group("world")
"""All ranks."""
NODE = Group("node")
"""The ranks of one node."""
PEERS = Group("peers")
"""The ranks with the same place in every node."""
LEADERS = Group("leaders")
"""The first rank of every node; all others are alone."""


def block(ranks: int) -> Group:
    """Blocks of `ranks` consecutive ranks."""
    return Group("block", ranks)


def peers_of_blocks(ranks: int) -> Group:
    """The ranks with the same place in every block of `ranks` consecutive ranks."""
    return Group("peers", ranks)
