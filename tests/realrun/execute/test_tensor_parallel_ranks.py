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


def test_ranks_that_divide_experts_exchange_tokens_and_break_no_rule() -> None:
    """Gradients of experts meet the rank with the same ones, all others every rank."""
    variants = ["ddp", "zero1", "zero2", "fsdp"]
    found = on_ranks(
        "strategies_with_divided_experts",
        4,
        gpus_per_node=2,
        module="tensor_parallel_workers",
        variants=variants,
    )
    for rank in range(4):
        assert [text for text, *_ in found[rank]] == variants
        for text, broken, met in found[rank]:
            assert broken == [], text
            pair, alike = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
            assert met == {"world": [0, 1, 2, 3], "experts": pair, "replicas": alike}, text
