"""Adapters (LoRA): what is trained, what a pass computes, what is sent, and what memory holds."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from moments import line, most
from one_sample import simulate
from small_gpt import small

from co2sim.catalog import load_cluster, load_model
from co2sim.hardware.failures import Failures
from co2sim.models.adapters import NF4, summed
from co2sim.models.operators import Product
from co2sim.models.transformer import Experts, LatentAttention, Transformer, language_model
from co2sim.prediction.goodput import goodput_of
from co2sim.prediction.job import schedule_of
from co2sim.schedule.schedule import Kind, Layout
from co2sim.strategies import parse
from co2sim.training.workload import Workload

RANK, LAYERS, H, KV, FFN, VOCAB, TOKENS = 4, 3, 64, 32, 128, 96, 16
BODY = Transformer(
    layers=LAYERS, hidden=H, heads=8, kv_heads=4, ffn=FFN, gated=True, bias=False, norm="rmsnorm"
)
EXPERTS = Experts(count=4, active=2, width=32, shared=16)
LATENT = LatentAttention(kv_rank=8, q_rank=8, nope=4, rope=4, value=8)
SIDES = [(H, H), (H, KV), (H, KV), (H, H), (H, FFN), (H, FFN), (FFN, H)]
"""In and out of the matrices of a layer: queries, keys, values, output, gate, up, down."""
WEIGHTS = LAYERS * sum(a * b for a, b in SIDES)
TRAINED = LAYERS * RANK * sum(a + b for a, b in SIDES)
NORMS = LAYERS * 2 * H + H
FROZEN = WEIGHTS + NORMS + 2 * VOCAB * H
LAYOUT = Layout(2, 4)
RANKS = 8
JOB = {"cluster": "dgx-h100", "model": "llama3-8b", "gpus": 16}


model = partial(small, BODY, TOKENS)


SMALL = model()
LORA = Workload(SMALL, lora=RANK)


def moved(strategy: str, job: Workload = LORA, layout: Layout = LAYOUT) -> Counter[Kind]:
    """Elements of a round by kind of collective, but for the norm of gradients."""
    found: Counter[Kind] = Counter()
    for work in tiny.collectives(schedule_of(parse(strategy), job, layout)):
        if work.buffer != "norm":
            found[work.kind] += work.elements
    return found


@pytest.mark.parametrize(("name", "trained"), [("llama3-8b", 41943040), ("llama3-70b", 207093760)])
def test_as_many_parameters_are_trained_as_in_peft(name: str, trained: int) -> None:
    """Rank 16 with target_modules="all-linear": 16 (in + out) of seven matrices a layer.

    8B: 16 x 32 (2 x 8192 + 2 x 5120 + 3 x 18432), 70B: 16 x 80 (2 x 16384 + 2 x 9216 + 3 x 36864).
    """
    bare = load_model(name).value
    job = Workload(bare, lora=16)
    assert job.trained == trained
    assert job.parameters == bare.parameters + trained


def test_routed_and_shared_experts_have_adapters_each_and_routers_none() -> None:
    """Those of an expert meet its own matrices only."""
    attention, expert, shared = SIDES[:4], [(H, 32), (H, 32), (32, H)], [(H, 16), (H, 16), (16, H)]
    sides = [*attention, *expert * 4, *shared]
    assert Workload(model(experts=EXPERTS), lora=RANK).trained == LAYERS * RANK * sum(
        a + b for a, b in sides
    )


def test_model_flop_are_four_for_a_frozen_parameter_and_six_for_a_trained_one() -> None:
    """And 12 x layers x width x seq_len for attention, as without adapters."""
    token = LORA.model.flops_per_sample / TOKENS
    assert token == 4 * (WEIGHTS + VOCAB * H) + 6 * TRAINED + 12 * LAYERS * H * TOKENS
    assert LORA.hardware_flops_per_sample == pytest.approx(LORA.model.flops_per_sample)


@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_kernels_have_one_product_of_a_frozen_weight_backward_and_two_of_adapters(
    attention: str,
) -> None:
    """Each adapter has two products of its own, one as wide as the rank on either side."""
    job = Workload(SMALL, micro_batch=2, lora=RANK, attention=attention)  # type: ignore[arg-type]
    bare = Workload(SMALL, micro_batch=2, attention=attention)  # type: ignore[arg-type]
    for one, plain in zip(job.works()[1:-1], bare.works()[1:-1], strict=True):
        products = one.forward.kernels.products
        pairs = [made for made in products if RANK in (made.inner, made.columns)]
        assert [(a.inner, a.columns) for a in pairs[::2]] == [(a, RANK) for a, _ in SIDES]
        assert [(b.inner, b.columns) for b in pairs[1::2]] == [(RANK, b) for _, b in SIDES]
        assert {pair.rows for pair in pairs} == {2 * TOKENS}
        base = 2 * 2 * TOKENS * sum(a * b for a, b in SIDES)
        small = 2 * 2 * TOKENS * RANK * sum(a + b for a, b in SIDES)
        mixing = sum(product.flops for product in plain.forward.kernels.products) - base
        assert sum(p.flops for p in products) == base + mixing + small
        assert sum(p.flops for p in one.backward.kernels.products) == base + 2 * (mixing + small)
        assert one.forward.kernels.calls == plain.forward.kernels.calls + 4 * len(SIDES)


def test_a_frozen_embedding_has_no_backward_pass_and_a_head_half_of_one() -> None:
    """Nothing before the first layer is trained."""
    first, *_, head = LORA.works()
    assert (first.backward.flops, first.backward.memory_bytes) == (0.0, 0.0)
    assert head.backward.flops == head.forward.flops == 2 * TOKENS * VOCAB * H


def test_gradients_and_parameters_of_adapters_are_all_that_replicas_exchange() -> None:
    """DDP all-reduces them; ZeRO-1 and 2 reduce-scatter them and gather them once updated."""
    assert moved("ddp") == {Kind.ALL_REDUCE: TRAINED}
    both = {Kind.REDUCE_SCATTER: TRAINED, Kind.ALL_GATHER: TRAINED}
    assert moved("zero1") == moved("zero2") == both


def test_sharded_parameters_are_gathered_whole_and_gradients_of_adapters_reduced() -> None:
    """FSDP gathers the root, embedding and head, once; ZeRO-3 every block twice."""
    root = 2 * VOCAB * H + H
    every = FROZEN + TRAINED
    assert moved("fsdp") == {Kind.ALL_GATHER: 2 * every - root, Kind.REDUCE_SCATTER: TRAINED}
    assert moved("zero3") == {Kind.ALL_GATHER: 2 * every, Kind.REDUCE_SCATTER: TRAINED}
    assert moved("zero3", Workload(SMALL, lora=RANK, accumulation=2)) == {
        Kind.ALL_GATHER: 4 * every,
        Kind.REDUCE_SCATTER: 2 * TRAINED,
    }


def test_hsdp_and_zeropp_reduce_adapters_only() -> None:
    """HSDP all-reduces shares of them between nodes; ZeRO++ exchanges them in two hops."""
    assert moved("fsdp:shard=node")[Kind.ALL_REDUCE] == LAYERS * (TRAINED // LAYERS // 4)
    assert moved("zeropp")[Kind.ALL_TO_ALL] == LAYERS * (TRAINED // LAYERS) * (1 + 1 / 4)
    assert moved("zeropp")[Kind.ALL_GATHER] == 2 * (FROZEN + TRAINED)


@pytest.mark.parametrize("strategy", ["local_sgd:tau=2", "co2.published:tau=2", "diloco:tau=2"])
def test_averages_are_of_adapters(strategy: str) -> None:
    """Of one GPU all; where a node is the worker a share, and shares are gathered in it."""
    assert moved(strategy) == {Kind.ALL_REDUCE: TRAINED}
    inside = moved(f"{strategy},worker=node,inner=zero1")
    assert inside[Kind.ALL_REDUCE] == TRAINED // 4
    assert inside[Kind.REDUCE_SCATTER] == 2 * TRAINED
    own, whole = (most(job, strategy, LAYOUT)["outer"] for job in (LORA, Workload(SMALL)))
    assert own / whole == pytest.approx(TRAINED / FROZEN)


def test_memory_by_item() -> None:
    """2 bytes of a frozen weight, and 16 of a parameter of adapters; FSDP's own are in fp32.

    FSDP reduces the gradient of a layer in fp32 while that of the next one is made, in bf16.
    """

    def states(strategy: str) -> tuple[float, ...]:
        found = most(LORA, strategy, LAYOUT)
        return tuple(found[name] for name in ("parameters", "gradients", "optimizer"))

    every, n = 2 * (FROZEN + TRAINED), RANKS
    assert states("ddp") == (every, 2 * TRAINED, 12 * TRAINED)
    assert states("zero1") == (every, 2 * TRAINED, 12 * TRAINED / n)
    assert states("zero2") == (every, 2 * TRAINED / n, 12 * TRAINED / n)
    assert states("zero3") == (every / n, 2 * TRAINED / n, 12 * TRAINED / n)
    assert states("fsdp") == ((2 * FROZEN + 4 * TRAINED) / n, 4 * TRAINED / n, 8 * TRAINED / n)
    assert most(LORA, "zero2", LAYOUT)["bucket"] == 2 * TRAINED
    assert most(LORA, "zero3", LAYOUT)["bucket"] == 2 * TRAINED / LAYERS
    assert most(LORA, "fsdp", LAYOUT)["bucket"] == 4 * TRAINED / LAYERS
    assert 0 < most(LORA, "fsdp", LAYOUT)["unreduced"] <= 2 * TRAINED / LAYERS


def test_what_is_as_wide_as_the_rank_is_kept() -> None:
    """Besides what is kept without adapters, when the loss is made."""
    plain, found = (
        line(Workload(SMALL, micro_batch=2, lora=r)).items["activations"][LAYERS + 2]
        for r in (None, RANK)
    )
    assert found - plain == LAYERS * len(SIDES) * 2 * TOKENS * RANK * 2


def test_a_tied_embedding_has_no_gradient() -> None:
    """Frozen, it needs none, whole or kept; else the head makes it, before any layer does."""
    tied = language_model("tied", BODY, vocab=VOCAB, tokens=TOKENS, tied=True)
    trained, frozen = (line(Workload(tied, lora=r), "ddp") for r in (None, RANK))
    first = LAYERS + 5  # behind the head
    assert trained.items["gradients"][first] >= 2 * VOCAB * H
    assert frozen.items["gradients"][first] == 0
    assert frozen.most("gradients") == 2 * TRAINED
    assert frozen.most("unreduced") <= 2 * TRAINED / LAYERS


@given(
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.sampled_from([{}, {"latent": LATENT}, {"experts": EXPERTS}]),
    st.integers(1, 16),
)
def test_tensor_parallel_ranks_have_adapters_once_but_for_matrices_that_meet_whole_sides(
    tp: int,
    sequence: bool,  # noqa: FBT001
    changes: dict[str, object],
    rank: int,
) -> None:
    """The sides that ranks do not divide are on all of them, and their gradients are summed up."""
    job = Workload(model(**changes), tp=tp, sequence_parallel=sequence and tp > 1, lora=rank)
    whole = sum(map(summed, job.share.model.blocks))
    assert tp * job.share.trained == job.trained + (tp - 1) * whole
    works = [work for one in job.share.works() for work in (one.forward, one.backward)]
    behind = [one for work in works if work.exchanges for one in work.exchanges.behind]
    assert sum(one.elements for one in behind if one.buffer == "adapters") == (
        whole if tp > 1 else 0
    )
    if not changes and tp > 1:  # A of five products with divided outputs, B of the two others
        assert whole == LAYERS * rank * (5 * H + 2 * H)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 16))
def test_experts_keep_their_adapters(ep: int, cp: int, rank: int) -> None:
    """A rank has those of its experts, and all others."""
    job = Workload(model(experts=EXPERTS), ep=ep, cp=cp, lora=rank)
    share = job.share
    of_experts = LAYERS * 4 * rank * 3 * (H + 32)
    assert share.trained == job.trained - of_experts + of_experts // ep
    assert share.trained_experts == (of_experts // ep if ep > 1 else 0)
    assert RANKS * share.owned_trained(RANKS) == pytest.approx(job.trained)
    if cp == 1:
        found = moved("zero1", job)
        assert found[Kind.REDUCE_SCATTER] == share.trained


def test_a_pipeline_has_the_flop_and_adapters_of_all_stages() -> None:
    """An answer for it says as much as that for one stage; gradients are those of its layers."""
    job = JOB | {"model": "llama3-8b", "strategy": "ddp", "lora": 16, "accumulation": 4}
    whole, stages = simulate(**job), simulate(**job, pp=2)  # type: ignore[arg-type]
    assert whole.trained_parameters == stages.trained_parameters == 41943040
    assert stages.model_tflops_per_gpu * stages.step_time_s == pytest.approx(
        whole.model_tflops_per_gpu * whole.step_time_s / 2
    )
    assert stages.memory_bytes_per_gpu["gradients"] == whole.memory_bytes_per_gpu["gradients"] / 2
    sent = "all_reduce world"
    assert stages.sent_bytes_per_gpu_per_step[sent] == pytest.approx(
        2 * 7 / 8 * 2 * 41943040 / 2, rel=1e-6
    )
    assert whole.sent_bytes_per_gpu_per_step[sent] == pytest.approx(
        2 * 15 / 16 * 2 * 41943040, rel=1e-6
    )


def test_checkpoints_hold_adapters_and_restarts_read_the_model_too() -> None:
    """12 bytes of a trained parameter are written; 2 of every other one are read besides."""
    cluster, bare = load_cluster("dgx-h100").value, load_model("llama3-8b").value
    cluster = replace(cluster, failures=Failures(node=1e7, detection=60.0, restart=240.0))
    found = [
        goodput_of(simulate(**JOB, strategy="fsdp", lora=lora), cluster, bare)  # type: ignore[arg-type]
        for lora in (None, 16)
    ]
    assert found[0]
    assert found[1]
    assert found[1].checkpoint_bytes == 12 * 41943040
    assert found[0].checkpoint_bytes == 12 * bare.parameters
    assert found[1].useful > found[0].useful


# --- weights in 4 bits (QLoRA) --------------------------------------------------------------------


QLORA = Workload(SMALL, lora=RANK, quantize_base="nf4")
STORED = sum(math.ceil(a * b * NF4 / 2) for a, b in SIDES)
"""Elements of two bytes that the matrices of a layer are stored as."""


def test_a_matrix_of_512_columns_takes_as_many_bytes_as_in_torchao() -> None:
    """By hand: 131,072 for 4 bits, 4,096 for scales of 64 weights, 64 for scales of 256 scales."""
    assert 512 * 512 * NF4 == 131_072 + 4_096 + 64


def test_only_weights_beside_adapters_are_in_four_bits() -> None:
    """Embedding, head, norms and adapters are in 16; and the model has as many parameters."""
    whole = 2 * (FROZEN - WEIGHTS + TRAINED + LAYERS * STORED)
    assert most(QLORA, "ddp", LAYOUT)["parameters"] == whole
    assert most(QLORA, "zero3", LAYOUT)["parameters"] == whole / RANKS
    assert most(QLORA, "ddp", LAYOUT)["optimizer"] == 12 * TRAINED
    assert QLORA.model.parameters == LORA.model.parameters == FROZEN + TRAINED
    assert QLORA.model.flops_per_sample == LORA.model.flops_per_sample


def test_what_is_gathered_is_what_is_stored() -> None:
    """FSDP gathers weights in 4 bits, and reduces gradients of adapters."""
    root = 2 * VOCAB * H + H
    every = FROZEN - WEIGHTS + TRAINED + LAYERS * STORED
    assert moved("fsdp", QLORA) == {
        Kind.ALL_GATHER: 2 * every - root,
        Kind.REDUCE_SCATTER: TRAINED,
    }


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_use_reads_four_bits_and_writes_sixteen(recompute: str) -> None:
    """Forward, backward and, in full recomputation, once more but for the last product."""
    job = Workload(
        SMALL, lora=RANK, quantize_base="nf4", recompute=recompute, checkpointing="reentrant"
    )
    layer = job.works()[1]
    once = 2 * STORED + 2 * sum(a * b for a, b in SIDES)
    assert layer.forward.kernels.cast_bytes == once
    assert layer.backward.kernels.cast_bytes == once * (1 + (recompute == "full"))
    plain = replace(job, model=SMALL, bare=None, quantize_base="none").works()[1]
    assert layer.forward.kernels.calls == plain.forward.kernels.calls + 3 * len(SIDES)
    assert layer.forward.kernels.products == plain.forward.kernels.products


def test_the_largest_matrix_is_whole_while_a_block_works() -> None:
    """Of 64 x 128 weights of two bytes, in layers only."""
    there = line(QLORA).items["dequantized"]
    assert there.max() == 2 * H * FFN
    assert there[0] == there[LAYERS + 1] == 0


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 4, "sequence_parallel": True}])
def test_tensor_parallel_ranks_have_parts_of_what_is_stored(mesh: dict[str, Any]) -> None:
    """And make whole only these."""
    share = replace(QLORA, **mesh).share
    ops = [op for op in share.model.blocks[1].of(Product) if op.packed]
    assert sum(op.elements for op in ops) == pytest.approx(STORED / mesh["tp"], abs=len(SIDES))
    assert sum(op.whole for op in ops) == pytest.approx(
        sum(a * b for a, b in SIDES) / mesh["tp"], abs=2 * len(SIDES)
    )


# --- products below 16 bits -----------------------------------------------------------------------


def test_products_of_frozen_weights_are_narrow_and_those_of_adapters_are_not() -> None:
    """Inputs and gradients are cast in one layout, as frozen weights have no gradients."""
    job = Workload(SMALL, lora=RANK, narrow="fp8")
    layer = job.works()[1]
    for made in (*layer.forward.kernels.products, *layer.backward.kernels.products):
        assert made.narrow == ("" if RANK in (made.inner, made.columns) else "fp8")
    merged = [(H, H + 2 * KV), (H, H), (H, 2 * FFN), (FFN, H)]
    inputs = TOKENS * sum(a for a, _ in merged)
    results = TOKENS * sum(b for _, b in merged)
    weights = sum(a * b for a, b in merged)
    read = 2 * 2  # twice, of two bytes
    assert layer.forward.kernels.cast_bytes == inputs * (read + 1) + weights * (read + 2)
    assert layer.backward.kernels.cast_bytes == results * (read + 1)
    assert most(job, "ddp", LAYOUT) == most(LORA, "ddp", LAYOUT)
