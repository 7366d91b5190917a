"""Where the tokens of a layer with experts go: how unevenly, and by how many nodes."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from co2sim.common.errors import ScheduleError
from co2sim.common.validation import at_least, whole


@dataclass(frozen=True, slots=True)
class TokenRouting:
    """How an all-to-all of tokens differs from an even one among all of its members.

    Each token, of `width` elements, goes to `active` of `count` experts, of which every member has
    as many, in order. A router chooses them from `active_groups` of `groups` equal groups of
    experts in a row. The busiest member gets `load` times as much as the mean.

    With `by_node` a token crosses the network once for every node that has some of its experts, to
    the member with the sender's place there, which passes it on inside the node. With `back`
    results return the same way: those of a token are summed up in the node. Source: DeepSeek-AI
    2024, arXiv 2412.19437, section 3.2.2; deepseek-ai/DeepEP, its kernels between nodes.
    """

    active: int
    count: int
    width: int
    groups: int = 1
    active_groups: int = 1
    load: float = 1.0
    by_node: bool = False
    back: bool = False

    def __post_init__(self) -> None:
        """Refuse what no router can do."""
        error = ScheduleError
        whole("count", self.count, 1, error=error)
        whole("width", self.width, 1, error=error)
        whole("groups", self.groups, 1, self.count, error=error)
        whole("active_groups", self.active_groups, 1, self.groups, error=error)
        whole("active", self.active, 1, self.allowed, error=error)
        at_least("load", self.load, 1, error=error)

    @property
    def allowed(self) -> int:
        """Experts in the groups that are chosen for a token."""
        return self.active_groups * (self.count // self.groups)

    @property
    def even(self) -> bool:
        """Whether it is an all-to-all as any other."""
        return self.load == 1 and not self.by_node

    def nodes(self, nodes: int) -> float:
        """On how many of `nodes` nodes a token's experts are, as expected where all are alike."""
        return _expected_nodes(self.active, self.count, self.groups, self.active_groups, nodes)

    def __str__(self) -> str:
        """`8 of 256 experts, 4 of 8 groups, load 1.2, by node, back`."""
        some = f", {self.active_groups} of {self.groups} groups" if self.groups > 1 else ""
        load = f", load {self.load:g}" if self.load > 1 else ""
        way = f"{', by node' if self.by_node else ''}{', back' if self.back else ''}"
        return f"{self.active} of {self.count} experts{some}{load}{way}"


def most_load(active: int, count: int, members: int) -> float:
    """Times the mean that a member can get: all tokens, each for as many experts as it has."""
    return members * min(active, count // members) / active


@lru_cache(maxsize=256)
def _expected_nodes(active: int, count: int, groups: int, chosen: int, nodes: int) -> float:
    """Sum over nodes of the chance that one of its experts is chosen; exact.

    A node is missed if all come from the other allowed experts: C(allowed - here, active) of
    C(allowed, active) choices, for every choice of groups. Without groups that is
    nodes x (1 - C(count - count / nodes, active) / C(count, active)).
    """
    size, missed = count // groups, 0
    for node in range(nodes):
        first, last = node * count // nodes, (node + 1) * count // nodes
        ways = Counter({(0, 0): 1})  # of choosing groups, by how many, and how many experts here
        for group in range(groups):
            here = max(0, min(last, (group + 1) * size) - max(first, group * size))
            taken = {(many + 1, sum_ + here): times for (many, sum_), times in ways.items()}
            ways.update(taken)
        missed += sum(
            times * math.comb(chosen * size - here, active)
            for (many, here), times in ways.items()
            if many == chosen
        )
    return nodes - missed / (math.comb(groups, chosen) * math.comb(chosen * size, active))
