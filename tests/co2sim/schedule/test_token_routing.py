"""Where tokens go: on how many nodes their experts are, and how much one rank can get."""

import math
import random
from collections.abc import Iterator
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from co2sim.schedule.token_routing import TokenRouting, most_load

V3 = TokenRouting(8, 256, 7168, groups=8, active_groups=4)
"""DeepSeek-V3: 8 of 256 experts, from 4 of 8 groups."""


def choices(routing: TokenRouting) -> Iterator[tuple[int, ...]]:
    """All that a router may choose, each equally often."""
    size = routing.count // routing.groups
    for groups in combinations(range(routing.groups), routing.active_groups):
        allowed = chain.from_iterable(range(g * size, (g + 1) * size) for g in groups)
        yield from combinations(allowed, routing.active)


SMALL = [
    (TokenRouting(2, 6, 1), (1, 2, 3, 6)),
    (TokenRouting(3, 8, 1), (1, 2, 4, 8)),
    (TokenRouting(2, 8, 1, 4, 2), (1, 2, 4, 8)),
    (TokenRouting(3, 8, 1, 2, 1), (2, 4, 8)),
    (TokenRouting(2, 12, 1, 3, 2), (2, 3, 4, 6)),
    (TokenRouting(4, 12, 1, 4, 3), (2, 3, 4, 6)),
]


@pytest.mark.parametrize(("routing", "nodes"), SMALL)
def test_expected_nodes_are_the_mean_over_all_choices(
    routing: TokenRouting, nodes: tuple[int, ...]
) -> None:
    """Groups may be parts of nodes, several of a node, or lie across the border of two."""
    for many in nodes:
        each = routing.count // many
        met = [len({expert // each for expert in chosen}) for chosen in choices(routing)]
        assert routing.nodes(many) == pytest.approx(sum(met) / len(met))


def test_tokens_of_deepseek_v3_meet_at_most_four_of_eight_nodes() -> None:
    """A group is a node: 4 (1 - C(96, 8) / C(128, 8)) of them, and of 20,000 draws as many."""
    assert V3.nodes(8) == pytest.approx(4 * (1 - math.comb(96, 8) / math.comb(128, 8)))
    draw, met = random.Random(1), 0  # noqa: S311 - to count
    for _ in range(20_000):
        groups = draw.sample(range(8), 4)
        allowed = [32 * group + place for group in groups for place in range(32)]
        met += len({expert // 32 for expert in draw.sample(allowed, 8)})
    assert V3.nodes(8) == pytest.approx(met / 20_000, abs=0.02)  # four standard errors


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_expected_nodes_are_within_bounds(
    active: int, groups: int, chosen: int, nodes: int
) -> None:
    """At least one, at most as many as there are, or as experts; groups make them fewer."""
    chosen = min(chosen, groups)
    count = groups * 12
    found = TokenRouting(active, count, 1, groups, chosen).nodes(nodes)
    assert found <= min(nodes, active) * (1 + 1e-9)
    if count % nodes == 0:
        assert found >= 1 - 1e-9
        assert found <= TokenRouting(active, count, 1).nodes(nodes) * (1 + 1e-9)


def test_one_rank_gets_all_tokens_at_most() -> None:
    """Of 2 experts in 8 on 4 ranks: each of a token's two, from all 4 ranks."""
    assert most_load(2, 8, 4) == 4
    assert most_load(8, 256, 64) == 32  # each token half of its eight, on four experts
    assert most_load(8, 256, 1) == 1
