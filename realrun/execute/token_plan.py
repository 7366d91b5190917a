"""How many tokens every rank sends to every other one, in an all-to-all that is routed.

All ranks count alike, from the schedule alone: a framework would exchange these numbers first.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from co2sim.schedule.schedule import Collective

Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """Rows of tokens between members, which stand on nodes of `per_node` in order.

    `rows[i][j]` are for experts of member j: a token of member i for each of its experts there.
    `copies[i][d]` are the tokens of member i that have experts on node d, whatever their number.
    They take turns as rows, so that a member gets none of them more often than it has experts.
    """

    rows: Counts
    copies: Counts
    per_node: int

    def peers(self, me: int) -> range:
        """The members with one place in their nodes, by node."""
        return range(me % self.per_node, len(self.rows), self.per_node)

    def mates(self, me: int) -> range:
        """The members of one node."""
        first = me // self.per_node * self.per_node
        return range(first, first + self.per_node)


@dataclass(frozen=True, slots=True)
class Phase:
    """Rows that a member gives to each member, and takes from it."""

    gives: tuple[int, ...]
    takes: tuple[int, ...]


def apart(plan: TokenPlan, me: int) -> tuple[Phase, ...]:
    """The only phase of an all-to-all that is flat."""
    return (Phase(plan.rows[me], tuple(row[me] for row in plan.rows)),)


def by_node(plan: TokenPlan, me: int) -> tuple[Phase, ...]:
    """Copies to the peers of each node, then rows to its members."""
    node, members, peers = me // plan.per_node, len(plan.rows), plan.peers(me)
    between = Phase(
        _spread(members, peers, plan.copies[me]),
        _spread(members, peers, [plan.copies[peer][node] for peer in peers]),
    )
    mates = plan.mates(me)
    inside = Phase(
        _spread(members, mates, [sum(plan.rows[one][mate] for one in peers) for mate in mates]),
        _spread(
            members,
            mates,
            [sum(plan.rows[one][me] for one in plan.peers(mate)) for mate in mates],
        ),
    )
    return between, inside


def back(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """The same the other way round."""
    return tuple(Phase(one.takes, one.gives) for one in reversed(phases))


def passed_on(plan: TokenPlan, me: int) -> Tensor:
    """Which of the copies that came from peers each row inside the node is, in order."""
    node, found = me // plan.per_node, []
    peers = plan.peers(me)
    first = [0, *accumulate(plan.copies[peer][node] for peer in peers)]
    begun = dict.fromkeys(peers, 0)
    for mate in plan.mates(me):
        for place, peer in enumerate(peers):
            rows, copies = plan.rows[peer][mate], plan.copies[peer][node]
            turns = torch.arange(begun[peer], begun[peer] + rows)
            found.append(first[place] + turns % max(1, copies))
            begun[peer] += rows
    return torch.cat(found)


@lru_cache(maxsize=64)
def plan_of(work: Collective, members: int, nodes: int) -> TokenPlan:
    """The plan of a collective that is routed. Its busiest member is drawn, and so are the others.

    A member gets as many rows as its weight says, but for one; each sends as many as any other.
    """
    routed = work.routed
    assert routed is not None
    tokens = max(1, round(work.elements / routed.width / routed.load / routed.active))
    draw = random.Random(f"{work.group} {work.elements} {routed.load}")  # noqa: S311 - no secret
    weights = _weights(members, routed.load, draw)
    sent = tokens * routed.active
    rows = _divided([sent * one for one in weights], members)
    each, met = members // nodes, routed.nodes(nodes) / nodes
    whole = [sum(weights[node * each : (node + 1) * each]) / each for node in range(nodes)]
    wanted = _divided([members * tokens * met * one for one in whole], members)
    own = max(1, routed.count // members)
    copies = []
    for mine, some in zip(rows, wanted, strict=True):
        parts = [mine[node * each : (node + 1) * each] for node in range(nodes)]
        copies.append(
            tuple(
                min(tokens, sum(part), max(one, -(-max(part) // own)))
                for part, one in zip(parts, some, strict=True)
            )
        )
    return TokenPlan(rows, tuple(copies), each)


def _weights(members: int, load: float, draw: random.Random) -> list[float]:
    """What each member gets, as a multiple of the mean: one `load`, the others less, unevenly."""
    busiest = draw.randrange(members)
    if members == 1:
        return [1.0]
    rest = (members - load) / (members - 1)
    noise = [draw.uniform(-1, 1) for _ in range(members - 1)]
    noise = [one - sum(noise) / len(noise) for one in noise]
    most = max(map(abs, noise)) or 1.0
    found = [rest + one / most * min(rest, load - rest) / 2 for one in noise]
    return [*found[:busiest], load, *found[busiest:]]


def _divided(totals: Sequence[float], members: int) -> Counts:
    """Whole parts of totals, for each of `members` as equal as can be: sums are off by one at most.

    Of a sum c member i has (c + i) // members: together c (Hermite's identity).
    """
    ends = [0, *(round(one) for one in accumulate(totals))]
    return tuple(
        tuple((end + i) // members - (start + i) // members for start, end in pairwise(ends))
        for i in range(members)
    )


def _spread(members: int, among: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Counts of some members; nothing for all others."""
    given = dict(zip(among, counts, strict=True))
    return tuple(given.get(member, 0) for member in range(members))
