"""How ranks are placed on nodes, and which of them meet in a collective."""

from dataclasses import dataclass

from co2sim.common.errors import ScheduleError
from co2sim.common.validation import whole


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks are placed: `nodes` nodes of `gpus_per_node` ranks, filled node by node.

    The nodes are those of all `sites` together, filled site by site, as many at each.
    """

    nodes: int
    gpus_per_node: int
    sites: int = 1

    def __post_init__(self) -> None:
        """Refuse an empty layout, and unequal sites."""
        whole("nodes", self.nodes, 1, error=ScheduleError)
        whole("gpus_per_node", self.gpus_per_node, 1, error=ScheduleError)
        whole("sites", self.sites, 1, error=ScheduleError)
        if self.nodes % self.sites:
            raise ScheduleError(f"{self.nodes} nodes do not divide into {self.sites} equal sites")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def ranks_per_site(self) -> int:
        """Number of ranks at one site."""
        return self.world_size // self.sites

    def strided(self, stride: int) -> "Layout":
        """The layout in which `stride` consecutive ranks of a node count as one.

        Raises ScheduleError where they do not divide the ranks of a node.
        """
        if stride == 1:
            return self
        whole("stride", stride, 1, error=ScheduleError)
        if self.gpus_per_node % stride:
            raise ScheduleError(
                f"groups of {stride} ranks do not divide the {self.gpus_per_node} GPUs of a node"
            )
        return Layout(self.nodes, self.gpus_per_node // stride, self.sites)


@dataclass(frozen=True, slots=True)
class Group:
    """Which ranks meet in a collective; `ranks` is the size of blocks, 0 where these are nodes.

    `stride` consecutive ranks count as one in it: as many groups of the kind lie side by side, each
    with the ranks of one place in their strides.
    """

    name: str
    ranks: int = 0
    stride: int = 1

    def __str__(self) -> str:
        """`world`, `node`, `site`, `peers`, `site_peers`, `leaders`, `block(4)` or `peers(4)`.

        With a stride of 8 `world/8`, `block(4)/8`.
        """
        name = f"{self.name}({self.ranks})" if self.ranks else self.name
        return f"{name}/{self.stride}" if self.stride > 1 else name

    def members(self, rank: int, layout: Layout) -> range:
        """Ranks of the group that `rank` belongs to, in ring order."""
        if self.stride > 1:
            place, by = rank % self.stride, self.stride
            found = Group(self.name, self.ranks).members(rank // by, layout.strided(by))
            return range(found.start * by + place, found.stop * by, found.step * by)
        g, n = layout.gpus_per_node, layout.world_size
        size = self.ranks or (layout.ranks_per_site if self.name.startswith("site") else g)
        match self.name:
            case "world":
                return range(n)
            case "node" | "site":
                return range(rank // size * size, rank // size * size + size)
            case "peers" | "site_peers" if n % size == 0:
                return range(rank % size, n, size)
            case "leaders":
                return range(rank, rank + 1) if rank % g else range(0, n, g)
            case "block" | "tensor" if self.ranks and n % size == 0:
                return range(rank // size * size, rank // size * size + size)
        raise ScheduleError(f"group {self} does not divide {n} ranks")


WORLD = Group("world")
"""All ranks."""
NODE = Group("node")
"""The ranks of one node."""
PEERS = Group("peers")
"""The ranks with the same place in every node."""
LEADERS = Group("leaders")
"""The first rank of every node; all others are alone."""
SITE = Group("site")
"""The ranks of one site."""
SITE_PEERS = Group("site_peers")
"""The ranks with the same place at every site."""


def block(ranks: int) -> Group:
    """Blocks of `ranks` consecutive ranks."""
    return Group("block", ranks)


def peers_of_blocks(ranks: int) -> Group:
    """The ranks with the same place in every block of `ranks` consecutive ranks."""
    return Group("peers", ranks)


def tensor(ranks: int) -> Group:
    """Tensor-parallel groups: blocks of `ranks` consecutive ranks that hold a model together."""
    return Group("tensor", ranks)
