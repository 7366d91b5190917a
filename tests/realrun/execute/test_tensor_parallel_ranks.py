"""Ranks that share layers or experts: the same schedules over Gloo, and in the lab."""

import pytest
from ranks import on_ranks
from tiny import VARIANTS

pytest.importorskip("torch")
pytestmark = pytest.mark.dist


@pytest.mark.parametrize("per_node", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_strategy_runs_on_ranks_that_share_layers_and_breaks_no_rule(per_node: int) -> None:
    """Pairs share layers; all else meets those with one place in their pairs, in checking mode."""
    variants = VARIANTS[:: 4 if per_node == 4 else 3]
    found = on_ranks(
        "strategies_with_shared_layers",
        4,
        gpus_per_node=per_node,
        module="tensor_parallel_workers",
        variants=variants,
    )
    for rank in range(4):
        pair, alike = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert [text for text, *_ in found[rank]] == variants
        for text, broken, sharing, others in found[rank]:
            assert (broken, sharing) == ([], pair), text
            assert set(others) <= set(alike), text


@pytest.mark.parametrize(
    ("options", "met_besides"),
    [
        ({"ep": 2}, {"experts": "pair", "replicas": "alike"}),
        ({"ep": 2, "load": 1.5}, {"experts": "pair", "replicas": "alike"}),
        ({"ep": 4, "load": 1.3, "experts_all_to_all": "hierarchical"}, {"experts": "all"}),
        ({"cp": 2}, {"context": "pair"}),
    ],
)
def test_ranks_that_divide_experts_or_sequences_break_no_rule(
    options: dict[str, object], met_besides: dict[str, str]
) -> None:
    """Pairs exchange; gradients of experts meet the rank with the same ones, others all ranks."""
    variants = ["ddp", "zero1", "zero2", "fsdp"]
    found = on_ranks(
        "strategies_with_exchanges",
        4,
        gpus_per_node=2,
        module="tensor_parallel_workers",
        variants=variants,
        options=options,
    )
    for rank in range(4):
        assert [text for text, *_ in found[rank]] == variants
        members = {
            "pair": [rank // 2 * 2, rank // 2 * 2 + 1],
            "alike": [rank % 2, rank % 2 + 2],
            "all": [0, 1, 2, 3],
        }
        besides = {name: members[which] for name, which in met_besides.items()}
        for text, broken, met in found[rank]:
            assert broken == [], text
            assert met == {"world": [0, 1, 2, 3]} | besides, text


def test_states_divided_inside_nodes_meet_peers_only_between_them() -> None:
    """Of experts each rank of a node has others: their gradients meet the peers alone."""
    variants = ["zero1(shard=node)", "zero2(shard=node)"]
    found = on_ranks(
        "strategies_with_exchanges",
        4,
        gpus_per_node=2,
        module="tensor_parallel_workers",
        variants=variants,
        options={"ep": 2},
    )
    for rank in range(4):
        pair, alike = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        met = {"node": pair, "peers": alike, "experts": pair}
        assert found[rank] == [[text, [], met] for text in variants]
