"""Three published trainings, checked by hand: parameters, FLOP, bytes of collectives, memory.

Every number follows here from the dimensions of the release, without a function of co2sim. Widths
and counts: config.json of deepseek-ai/DeepSeek-V3 and Qwen/Qwen3-235B-A22B, table 3 of Llama Team
2024 (arXiv 2407.21783). Divisions: DeepSeek-V3 (arXiv 2412.19437, section 3.2), Megatron-Bridge
26.02 (performance summary, GB200), Llama Team 2024, table 4.
"""

from functools import cache

import pytest
from one_sample import simulate

from co2sim import Result

BF16, FP32 = 2, 4
ADAMW = 12
"""Bytes of optimizer states for a parameter: fp32 master copy and two moments."""


@cache
def deepseek() -> Result:
    """2,048 H800: 16 stages, each of 128 GPUs, 64 of which divide the experts; 15,360 sequences."""
    return simulate(
        "h800-3200g",
        "deepseek-v3",
        "zero1",
        gpus=2048,
        ep=64,
        pp=16,
        accumulation=120,
        stack="megatron-core",
        precision="fp8",
        overrides={"model.seq_len": "4096", "stack.overlap_experts": "true"},
    )


@cache
def llama(*, long: bool = False) -> Result:
    """8,192 H100: 8 share layers, 16 stages; or 16,384, 16 of which divide sequences of 131,072."""
    return simulate(
        "dgx-h100",
        "llama3-405b",
        "fsdp(reshard_after_forward=false, sync=last)",
        gpus=16384 if long else 8192,
        tp=8,
        cp=16 if long else 1,
        pp=16,
        interleave=8,
        accumulation=16 if long else 32,
        sequence_parallel=True,
        stack="megatron-core",
        overrides={"model.seq_len": str(131072 if long else 8192)},
    )


def assert_held(found: Result, **items: float) -> None:
    """Items of memory of the fullest stage, to 0.1 % (chunks of shards are rounded)."""
    held = {name: found.memory_bytes_per_gpu[name] for name in items}
    assert held == pytest.approx(items, rel=1e-3)


def flops_of_a_token(found: Result) -> float:
    """Model FLOP, as MFU counts them."""
    return found.model_tflops_per_gpu * 1e12 / found.tokens_per_s_per_gpu


# DeepSeek-V3: 61 layers, the first 3 dense; latent attention of 128 heads
H, VOCAB, HEADS, RANKS = 7168, 129_280, 128, (1536, 512)
QUERY, VALUE, ROPE = 128 + 64, 128, 64
MLA = (
    H * RANKS[0]
    + RANKS[0] * HEADS * QUERY
    + H * (RANKS[1] + ROPE)
    + RANKS[1] * HEADS * (128 + VALUE)
    + HEADS * VALUE * H
)
MLA_NORMS = sum(RANKS) + 2 * H
DENSE, EXPERT = 3 * H * 18432, 3 * H * 2048
ROUTER = 256 * H + 256
"""With the bias that balances the load."""


def test_deepseek_v3_sends_what_its_dimensions_say() -> None:
    """First of 16 stages: the embedding, 3 dense layers and one of experts; 4 of 256 experts."""
    whole = VOCAB * H + 4 * (MLA + MLA_NORMS) + 3 * DENSE + ROUTER + EXPERT
    experts = 4 * EXPERT  # of two replicas in the 128 GPUs
    tokens = 4096 * 8 * H * BF16 * 63 / 64
    assert deepseek().sent_bytes_per_gpu_per_step == pytest.approx(
        {
            "all_to_all experts(64)": 120 * 4 * tokens,  # out and back, forward and backward
            "reduce_scatter world": whole * BF16 * 127 / 128,
            "all_gather world": whole * BF16 * 127 / 128,
            "reduce_scatter replicas(64)": experts * BF16 / 2,
            "all_gather replicas(64)": experts * BF16 / 2,
            "send_receive": 120 * 4096 * H * BF16,
        }
    )


def test_deepseek_v3_holds_what_its_dimensions_say() -> None:
    """The second stage is the fullest: 4 layers of experts, and 15 micro-batches in flight."""
    whole = 4 * (MLA + MLA_NORMS + ROUTER + EXPERT)  # one shared expert
    experts = 4 * 4 * EXPERT
    latent = 2 * 2 * sum(RANKS)  # before and behind their norms
    heads = BF16 * HEADS * (2 * QUERY + VALUE + VALUE)  # queries, keys, values, results
    inputs = 4 * BF16 * H  # of two norms, attention and MLP
    mlps = 9 * 3 * 2048 * BF16  # eight routed, one shared: two products and what they make
    token = inputs + latent + heads + mlps + 8 * H * BF16 + 256 * FP32
    layer = 4096 * token + 4096 * HEADS * FP32  # and the sums of softmax
    assert_held(
        deepseek(),
        parameters=BF16 * (whole + experts),
        gradients=FP32 * (whole + experts),
        optimizer=ADAMW * (whole / 128 + experts / 2),
        activations=15 * 4 * layer,
    )


def test_deepseek_v3_computes_what_its_dimensions_say() -> None:
    """Parameters that a token passes, and all scores; 671 billion in all."""
    passed = H * VOCAB + 61 * MLA + 3 * DENSE + 58 * (9 * EXPERT + 256 * H)
    scores = 61 * HEADS * (QUERY + VALUE) * 4096
    assert flops_of_a_token(deepseek()) == pytest.approx(6 * (passed + scores))
    every = 2 * H * VOCAB + 61 * (MLA + MLA_NORMS) + 3 * DENSE + 58 * (257 * EXPERT + ROUTER) + H
    assert every == pytest.approx(671e9, rel=1e-3)


def test_the_training_of_deepseek_v3_is_in_the_interval() -> None:
    """180,000 hours of an H800 for 1e12 tokens: arXiv 2412.19437, section 1, with DualPipe."""
    published = 1e12 / (180_000 * 3600)
    assert deepseek().tokens_per_s_low / 2048 < published < deepseek().tokens_per_s_high / 2048


# Llama 3.1 405B: 126 layers, 128 heads, 8 of keys, of width 128
LLAMA_H, LLAMA_VOCAB, LLAMA_FFN = 16384, 128_256, 53248
LLAMA_LAYER = 2 * LLAMA_H * LLAMA_H + 2 * LLAMA_H * 1024 + 3 * LLAMA_H * LLAMA_FFN
LLAMA_PART = LLAMA_LAYER // 8 + 2 * LLAMA_H
"""Of a layer on one of 8 GPUs: norms are whole."""


@pytest.mark.parametrize("long", [False, True])
def test_llama3_405b_sends_what_its_dimensions_say(long: bool) -> None:  # noqa: FBT001
    """First of 16 stages: the embedding and 7 layers, as its authors took one away there."""
    ranks, micro = (1024 * 16 // 16 // 8, 16) if long else (512 // 8, 32)
    own = LLAMA_VOCAB * LLAMA_H // 8 + 7 * LLAMA_PART
    tokens = (131072 // 16 if long else 8192) * LLAMA_H * BF16
    far = {
        # two gathers and reductions forward; backward two of each, and both operands again
        "all_gather tensor(8)": micro * (7 * 6 + 1) * tokens * 7 / 8,
        "reduce_scatter tensor(8)": micro * (7 * 4 + 1) * tokens * 7 / 8,
        "all_gather world/8": own * BF16 * (ranks - 1) / ranks,
        "reduce_scatter world/8": own * FP32 * (ranks - 1) / ranks,
        "all_reduce world/8": 2 * FP32 * (ranks - 1) / ranks,
        # chunks send their output forward, and all but the first its gradient backward
        "send_receive": micro * 15 * tokens / 8,
    }
    if long:  # keys and values of 8 heads, one of them on a GPU: forward, and again backward
        keys = 131072 * 2 * 128 * BF16 * 15 / 16
        far["all_gather context(16)/8"] = 2 * micro * 7 * keys
        far["reduce_scatter context(16)/8"] = micro * 7 * keys
    assert llama(long=long).sent_bytes_per_gpu_per_step == pytest.approx(far, rel=1e-3)


def test_llama3_405b_holds_what_its_dimensions_say() -> None:
    """The second stage is the fullest: 141 passes over a layer are in flight.

    Most is there as the gradient of an MLP's input is made: those of its weights are, and what it
    kept between its products is free.
    """
    own = 8 * LLAMA_PART
    token = (8 * LLAMA_H + 4 * LLAMA_H + 4 * 1024 + 6 * LLAMA_FFN) / 8
    layer = 8192 * (token + 128 / 8 * FP32)
    mlp = 3 * LLAMA_FFN // 8  # two products side by side, and what is made of them
    assert_held(
        llama(),
        parameters=FP32 * own / 64,
        gradients=FP32 * own / 64,
        optimizer=2 * FP32 * own / 64,
        unreduced=FP32 * own + BF16 * mlp * LLAMA_H,
        activations=141 * layer - 8192 * BF16 * mlp,
    )


def test_llama3_405b_computes_what_its_dimensions_say() -> None:
    """2.63 TFLOP a token; so 430 TFLOP/s of a GPU, as published, are 163.8 tokens/s."""
    passed = LLAMA_H * LLAMA_VOCAB + 126 * LLAMA_LAYER
    scores = 126 * 2 * LLAMA_H * 8192
    assert flops_of_a_token(llama()) == pytest.approx(6 * (passed + scores))
