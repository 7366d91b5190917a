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


IN_EVERY_STEP = ["ddp", "zero1", "zero2", "fsdp"]


@pytest.mark.parametrize(
    ("variants", "options", "whom"),
    [
        (IN_EVERY_STEP, {"ep": 2}, {"experts": "pair", "replicas": "alike"}),
        (IN_EVERY_STEP, {"ep": 2, "load": 1.5}, {"experts": "pair", "replicas": "alike"}),
        (
            IN_EVERY_STEP,
            {"ep": 4, "load": 1.3, "experts_all_to_all": "hierarchical"},
            {"experts": "world"},
        ),
        (IN_EVERY_STEP, {"cp": 2}, {"context": "pair"}),
        # states divided inside nodes: gradients of experts meet the peers alone
        (
            ["zero1(shard=node)", "zero2(shard=node)"],
            {"ep": 2},
            {"node": "pair", "peers": "alike", "experts": "pair"},
        ),
    ],
)
def test_ranks_that_divide_experts_or_sequences_break_no_rule(
    variants: list[str], options: dict[str, object], whom: dict[str, str]
) -> None:
    """Pairs exchange; gradients of experts meet the rank with the same ones, others all ranks."""
    given = {"variants": variants, "options": options, "module": "tensor_parallel_workers"}
    found = on_ranks("strategies_with_exchanges", 4, gpus_per_node=2, **given)  # type: ignore[arg-type]
    for rank in range(4):
        members = {
            "pair": [rank // 2 * 2, rank // 2 * 2 + 1],
            "alike": [rank % 2, rank % 2 + 2],
            "world": [0, 1, 2, 3],
        }
        met = {name: members[which] for name, which in whom.items()}
        met |= {} if "node" in whom else {"world": members["world"]}
        assert found[rank] == [[text, [], met] for text in variants]
