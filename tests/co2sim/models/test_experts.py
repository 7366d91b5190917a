"""Mixtures of experts, latent attention and windows: parameters, FLOP, products and divisions."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_gpt import small

from co2sim.catalog import load_model
from co2sim.models.operators import Attention, Block, Product, shard_model
from co2sim.models.transformer import Experts, LatentAttention, Transformer, language_model
from co2sim.schedule.mesh import Mesh

TOKENS = 64
BODY = Transformer(layers=4, hidden=64, heads=4, ffn=128, gated=True, bias=False, norm="rmsnorm")
EXPERTS = Experts(count=8, active=2, width=32, shared=16, dense=1)
LATENT = LatentAttention(kv_rank=16, q_rank=24, nope=8, rope=4, value=12)


model = partial(small, BODY, TOKENS)


def scores_of(block: Block) -> float:
    """FLOP of a forward pass over a sample."""
    return sum(op.flops for op in block.of(Attention))


def test_deepseek_v3_computes_as_much_for_a_token_as_published() -> None:
    """250 GFLOP at 4,096 tokens, half of the scores: DeepSeek, arXiv 2505.09343, table 2."""
    found = load_model("deepseek-v3", {"seq_len": "4096"}).value
    scores = sum(map(scores_of, found.blocks))
    token = (found.flops_per_sample - 3 * scores / 2) / found.tokens
    assert token == pytest.approx(250e9, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("deepseek-v3", 37), ("qwen3-235b-a22b", 22), ("kimi-k2", 32)],
)
def test_active_parameters_are_those_of_the_release(name: str, billions: float) -> None:
    """Embeddings included, as their authors mostly count."""
    found = load_model(name).value.active_parameters / 1e9
    assert found == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("attention", [{}, {"latent": LATENT}, {"kv_heads": 2, "windows": (16, 0)}])
@pytest.mark.parametrize("mlp", [{}, {"experts": EXPERTS}, {"experts": replace(EXPERTS, every=2)}])
def test_flop_are_those_of_the_products(
    attention: dict[str, object], mlp: dict[str, object]
) -> None:
    """Those with weights; every weight multiplies once for a token that passes it."""
    for block in model(**attention, **mlp).blocks[1:-1]:
        flops = sum(one.gemm(1, 2.0).flops for one in block.of(Product))
        assert flops + scores_of(block) == pytest.approx(block.flops)
        passed = block.parameters - block.idle - 2 * BODY.hidden  # but for norms
        passed -= LATENT.q_rank + LATENT.kv_rank if "latent" in attention else 0
        assert flops == 2.0 * TOKENS * passed


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_rows_divide_among_experts(tokens: int, count: int, data: st.DataObject) -> None:
    """One call; with fewer rows than experts as many have one, and no row is lost."""
    active = data.draw(st.integers(1, count))
    body = replace(BODY, experts=Experts(count=count, active=active, width=8))
    found = language_model("m", body, vocab=96, tokens=tokens, tied=False)
    grouped = [one for one in found.blocks[1].of(Product) if one.groups]
    assert len(grouped) == 2
    for one in grouped:
        product = one.gemm(3, 2.0)
        assert product.count == 1
        assert product.batch == min(count, 3 * tokens * active)
        assert 0 <= product.rows * product.batch - 3 * tokens * active < product.batch


@pytest.mark.parametrize("changes", [{"experts": EXPERTS}, {"latent": LATENT, "experts": EXPERTS}])
def test_tensor_parallel_ranks_divide_experts_and_heads(changes: dict[str, object]) -> None:
    """Of a part the FLOP of experts and scores are a part, and norms and routers stay whole."""
    whole = model(**changes)
    part = shard_model(whole, Mesh(tp=4, sequence_parallel=True))
    for one, all_ in zip(part.blocks[2:-1], whole.blocks[2:-1], strict=True):
        assert scores_of(one) == scores_of(all_) / 4
        assert one.idle == all_.idle / 4
        assert all_.parameters / 4 < one.parameters < all_.parameters / 4 + 8000


def test_experts_that_a_token_does_not_pass_are_idle() -> None:
    """Six of eight, of three matrices each; a dense layer has none."""
    whole = model(latent=LATENT, experts=EXPERTS, windows=(8, 0), qk_norm="none")
    assert whole.blocks[1].idle == 0
    assert whole.blocks[2].idle == 6 * 3 * 64 * 32
