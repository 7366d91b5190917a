"""Where the ranks of a group stand: on how many nodes, and at how many sites."""

from dataclasses import dataclass

from co2sim.cluster import Cluster
from co2sim.errors import OptionError
from co2sim.schedule import Group


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks of a group: in all, on each of its nodes, at each of its sites."""

    members: int
    per_node: int
    per_site: int

    @property
    def nodes(self) -> int:
        """How many have members."""
        return self.members // self.per_node

    @property
    def sites(self) -> int:
        """How many have members."""
        return self.members // self.per_site


def placement(group: Group, cluster: Cluster) -> Placement:
    """Of a group. Raises OptionError for ranks that do not stand evenly on nodes and sites."""
    layout = cluster.layout
    members = group.members(0, layout)
    per_node = max(1, min(len(members), layout.gpus_per_node // members.step))
    on_site = layout.gpus_per_node * cluster.nodes_per_site // members.step
    per_site = max(1, min(len(members), on_site))
    block = group.ranks * group.stride  # other groups are spread evenly on any layout
    if block and not (
        _divides(block, layout.gpus_per_node)
        and _divides(block, layout.gpus_per_node * cluster.nodes_per_site)
    ):
        raise OptionError(
            f"group {group} is not spread evenly over nodes of {layout.gpus_per_node} GPUs and"
            f" sites of {cluster.nodes_per_site} nodes"
        )
    return Placement(len(members), per_node, per_site)


def _divides(one: int, other: int) -> bool:
    """Whether the smaller number divides the larger."""
    return max(one, other) % min(one, other) == 0
