"""Tokens of a mixture of experts on real ranks: how many go where, and that they arrive."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import everywhere, ranked

from co2sim.hardware.cluster import Link
from co2sim.schedule.schedule import Collective, DType, Kind, Layout, Op, Schedule, experts
from co2sim.schedule.token_routing import TokenRouting, most_load
from co2sim.simulation.costs import cost_of

pytest.importorskip("torch")

import tiny
import torch

from realrun.execute.collectives import allocate, carry_out, plan_of
from realrun.execute.world import World


def routed(tokens: int, members: int, dtype: DType = DType.BF16, **options: Any) -> Collective:
    """Tokens of as many ranks."""
    how = TokenRouting(**options)
    elements = round(tokens * how.active * how.width * how.load)
    return Collective(Kind.ALL_TO_ALL, "t", elements, dtype, experts(members), routed=how)


@given(
    st.sampled_from([(1, 2), (2, 2), (2, 4), (4, 2), (4, 1), (8, 8)]),
    st.integers(1, 8),
    st.integers(1, 2000),
    st.floats(0.0, 1.0),
    st.sampled_from([(1, 1), (4, 2), (4, 4)]),
)
def test_the_busiest_rank_gets_its_load_and_all_send_alike(
    shape: tuple[int, int], active: int, tokens: int, share: float, groups: tuple[int, int]
) -> None:
    """All tokens are sent, once for each expert; nobody gets more than the busiest, but for one."""
    nodes, each = shape
    members = nodes * each
    load = 1 + share * (most_load(active, 64, members) - 1)
    chosen = {"groups": groups[0], "active_groups": groups[1]}
    work = routed(tokens, members, active=active, count=64, width=8, load=load, **chosen)
    plan = plan_of(work, members, nodes)
    assert [sum(row) for row in plan.rows] == [tokens * active] * members
    got = [sum(column) for column in zip(*plan.rows, strict=True)]
    assert max(got) == pytest.approx(load * tokens * active, abs=1.0 + 1e-6)
    own = 64 // members
    for mine, copies in zip(plan.rows, plan.copies, strict=True):
        for node, sent in enumerate(copies):
            here = mine[node * each : (node + 1) * each]
            assert sent <= min(tokens, sum(here))
            assert bool(sent) == bool(sum(here))
            assert max(here) <= max(sent * own, max(here) if sent == tokens else 0)


@pytest.mark.parametrize("active", [2, 4, 8])
def test_ranks_send_the_bytes_that_the_simulator_counts(active: int) -> None:
    """Between 4 nodes and inside them, but for rounding; with groups, too."""
    for groups, chosen in ((1, 1), (8, 3)):
        how = {"active": active, "count": 64, "width": 8, "groups": groups, "active_groups": chosen}
        work = routed(5000, 16, **how, by_node=True)
        plan = plan_of(work, 16, 4)
        cost = cost_of(work, tiny.cluster(4, 4, inter=Link(1e9, 0.0)))
        between = [
            sum(n for node, n in enumerate(copies) if node != me // 4)
            for me, copies in enumerate(plan.copies)
        ]
        assert max(between) * 16 * 4 == pytest.approx(cost.inter, rel=2e-3)
        inside = [
            sum(plan.rows[peer][mate] for peer in plan.peers(me) for mate in plan.mates(me))
            - sum(plan.rows[peer][me] for peer in plan.peers(me))
            for me in range(16)
        ]
        assert max(inside) * 16 == pytest.approx(cost.intra, rel=2e-3)


CASES: list[dict[str, Any]] = [
    {"active": 2, "count": 8, "width": 3, "load": 1.5},
    {"active": 2, "count": 8, "width": 3, "by_node": True},
    {"active": 3, "count": 8, "width": 40_000, "load": 1.7, "by_node": True},
    {"active": 2, "count": 8, "width": 5, "groups": 4, "active_groups": 2, "by_node": True},
    {"active": 1, "count": 4, "width": 5, "load": 4.0, "by_node": True},
]


def there_and_back(world: World, tokens: int, options: dict[str, Any]) -> list[list[int]]:
    """Rows that this rank sent, got, and got back; experts multiply by the rank plus one.

    A row is a number that no other has: a thousand times the rank and its place in what was sent.
    """
    rows: list[torch.Tensor] = []
    for back in (False, True):
        work = routed(tokens, world.layout.world_size, DType.FP32, **options, back=back)
        world.connect(Schedule("one", (Op("c", work, "comm"),)))
        at = world.communicator("comm", work.group)
        assert at is not None
        buffers = allocate(work, len(at.members), world.device, at.me, at.nodes)
        filled = buffers.given.view(-1, options["width"])
        if back:
            filled.copy_(rows[1] * (world.rank + 1))
        else:
            filled.copy_((torch.arange(len(filled)) + 1000 * world.rank).unsqueeze(1))
            rows.append(filled.clone())
        for _ in range(2):  # a buffer is used again
            carry_out(work, buffers, at, 20.0)
        rows.append(buffers.taken.view(-1, options["width"]).clone())
    assert all(torch.equal(part, part[:, :1].expand_as(part)) for part in rows)
    return [part[:, 0].to(torch.int64).tolist() for part in rows]


@pytest.mark.parametrize("per_node", [2, 4])
@pytest.mark.parametrize("options", CASES)
@ranked(4)
def test_tokens_reach_the_ranks_of_their_experts_and_come_back(
    world: World, per_node: int, options: dict[str, Any]
) -> None:
    """As a single process counts them, which knows what was sent and how many go where.

    By node every token reaches a node once, and members there as often as the plan says: in turn.
    Results come back with the sum of what the experts made of each.
    """
    tokens, ranks = 37, 4
    world.place(Layout(ranks // per_node, per_node))
    sent, arrived, returned = there_and_back(world, tokens, options)
    relayed = bool(options.get("by_node")) and per_node < ranks
    plan = plan_of(routed(tokens, ranks, **options), ranks, ranks // per_node)
    got = [Counter(rows) for rows in everywhere(arrived)]
    wholes = plan.copies[world.rank] if relayed else plan.rows[world.rank]
    assert len(sent) == len(returned) == sum(wholes)
    first = 0
    for place, many in enumerate(wholes):
        part = sent[first : first + many]
        homes = range(place * per_node, (place + 1) * per_node) if relayed else [place]
        for home in homes:
            times = [got[home][token] for token in part]
            assert sum(times) == plan.rows[world.rank][home]
            assert max(times, default=0) - min(times, default=0) <= 1
            assert max(times, default=0) <= options["count"] // ranks
        assert all(sum(got[home][token] for home in homes) for token in part)
        back = [token * sum((home + 1) * got[home][token] for home in homes) for token in part]
        assert returned[first : first + many] == back
        first += many
    assert sum(everywhere(len(arrived))) == ranks * tokens * options["active"]
