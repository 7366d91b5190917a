"""Mechanisms that calibrated clusters use: each follows its closed form, and is off by default."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from co2sim.catalog import load_cluster, load_model, names
from co2sim.hardware.cluster import KernelTimes
from co2sim.models.operators import Attention, Block, Product
from co2sim.models.transformer import Transformer, language_model
from co2sim.schedule.schedule import (
    LEADERS,
    PEERS,
    WORLD,
    Collective,
    Compute,
    DType,
    FusedAttention,
    Gemm,
    Kernels,
    Kind,
)
from co2sim.simulation.costs import compute_time, cost_of
from co2sim.training.workload import Workload

CLUSTER = load_cluster("dgx2-ib1", {"inter.ring_loss": "0"}).value.resized(64)
PRODUCT = Gemm(10_000, 5_000, 10_000, width=2.0)
PASS = Compute("forward", 1e12, 0.0, Kernels((PRODUCT,), 20, elementwise_bytes=1e9))
SIZES = st.integers(1, 5000)


def test_kernels_are_the_slower_of_gpu_and_host() -> None:
    """Products, elementwise traffic and gaps on the GPU; or the calls of the host."""
    gpu = CLUSTER.gpu
    times = KernelTimes(gemm_efficiency=0.8, operand_efficiency=0.2, kernel_gap=1e-5)
    arithmetic, operands = 1e12 / (gpu.peak["fp16"] * 0.8), 4e8 / (gpu.memory_bandwidth * 0.2)
    products = math.sqrt(arithmetic**2 + operands**2)
    device = products + 1e9 / (gpu.memory_bandwidth * gpu.memory_efficiency) + 20e-5
    assert compute_time(PASS, replace(gpu, kernels=times), "fp16") == pytest.approx(device)
    slow_host = replace(times, call_overhead=device)
    assert compute_time(PASS, replace(gpu, kernels=slow_host), "fp16") == pytest.approx(20 * device)


def array(*shape: int) -> np.ndarray:
    """Half-precision numbers that take no memory."""
    return np.broadcast_to(np.float16(0), shape)


@given(rows=SIZES, inner=SIZES, columns=SIZES, samples=st.integers(1, 4))
def test_operands_of_a_product_are_its_arrays(
    rows: int, inner: int, columns: int, samples: int
) -> None:
    """Both operands and the result, with one copy of the weights for all samples."""
    x, w = array(samples * rows, inner), array(inner, columns)
    found = Product(rows=rows, inner=inner, columns=columns).gemm(samples, DType.FP16.bytes)
    assert found.bytes == x.nbytes + w.nbytes + array(len(x), columns).nbytes
    assert found.flops == 2 * samples * rows * inner * columns


@given(SIZES, SIZES, SIZES, SIZES, st.integers(1, 4), st.integers(1, 3))
def test_operands_of_eager_attention_are_its_arrays(
    rows: int, length: int, wide: int, value: int, heads: int, samples: int
) -> None:
    """Queries and keys give scores, and scores and values the output, of every head and sample."""
    shape = {"rows": rows, "length": length, "wide": wide, "value": value}
    attention = Attention(heads=heads, keys=heads, **shape)
    q, k, v = (
        array(heads * samples, *size) for size in ((rows, wide), (length, wide), (length, value))
    )
    p, out = array(heads * samples, rows, length), array(heads * samples, rows, value)
    found = attention.gemms(samples, DType.FP16.bytes)
    assert [one.bytes for one in found] == [
        sum(one.nbytes for one in operands) for operands in ((q, k, p), (p, v, out))
    ]
    assert [one.flops for one in found] == [2 * q.size * length, 2 * p.size * value]


def passes(job: Workload) -> list[tuple[Block, Compute]]:
    """Every pass over every block, those of full recomputation in two besides."""
    found = []
    for work in job.works():
        found += [(work.block, work.forward), (work.block, work.backward)]
        if job.repeats(work.block) and work.block.flops:
            found += [(work.block, one) for one in job.recomputed(work)]
    return found


@pytest.mark.parametrize("name", names("models"))
def test_products_of_a_block_add_up_to_its_flop(name: str) -> None:
    """Eager and reentrant: in every pass, for every recomputation, wherever products are known.

    Rows of experts are rounded up; eager attention also computes what a window hides.
    """
    model = load_model(name).value
    for recompute in ("none", "selective", "full"):
        job = Workload(
            model, micro_batch=2, attention="eager", recompute=recompute, checkpointing="reentrant"
        )
        for block, one in passes(job):
            again = any(op.remade for op in block.of(Product))  # by kernels of scans
            if one.kernels and not (again or any(op.window for op in block.of(Attention))):
                total = sum(product.flops for product in one.kernels.products)
                assert total == pytest.approx(one.flops, rel=5e-3 if block.idle else 1e-6)


@pytest.mark.parametrize("name", names("models"))
def test_a_repeated_layer_stops_before_its_last_product(name: str) -> None:
    """Its output is not needed again; the head, which keeps what it needs, is not repeated."""
    job = Workload(load_model(name).value, attention="eager", recompute="full")
    whole = replace(job, checkpointing="reentrant")
    assert not any(job.repeats(block) for block in job.model.blocks if block.logits)
    for mine, theirs in zip(job.works(), whole.works(), strict=True):
        assert mine.backward.flops == theirs.backward.flops  # as published figures count
        products = mine.block.of(Product)
        if not mine.backward.kernels or not theirs.backward.kernels or not products:
            continue
        left_out = sum(p.flops for p in theirs.backward.kernels.products) - sum(
            p.flops for p in mine.backward.kernels.products
        )
        expected = products[-1:] if job.repeats(mine.block) else products
        assert left_out == pytest.approx(sum(one.gemm(1, 2.0).flops for one in expected))


@given(
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 64),
    tokens=st.integers(1, 2048),
    samples=st.integers(1, 3),
    causal=st.booleans(),
)
def test_flash_attention_executes_five_products_backward_and_half_of_a_causal_one(
    heads: int, head_dim: int, tokens: int, samples: int, *, causal: bool
) -> None:
    """2 products of 2 s s d forward, 5 backward, half of each where causal (arXiv 2307.08691)."""
    body = Transformer(layers=1, hidden=heads * head_dim, heads=heads, ffn=8, causal=causal)
    model = language_model("m", body, vocab=10, tokens=tokens, tied=True)
    product = 2 * tokens**2 * heads * head_dim * samples / (2 if causal else 1)
    for recompute, again in (("none", 0), ("selective", 0), ("full", 2)):
        job = Workload(model, micro_batch=samples, recompute=recompute)  # type: ignore[arg-type]
        work = job.works()[1]
        forward, backward = work.forward.kernels, work.backward.kernels
        assert forward.attention.flops == pytest.approx(2 * product)
        assert backward.attention.flops == pytest.approx(again * product)
        assert backward.attention.backward == pytest.approx(5 * product)
        eager = replace(job, attention="eager").works()[1].forward.kernels
        assert not eager.attention
        assert len(eager.products) == len(forward.products) + 2  # the scores, and their use


def test_flash_attention_has_its_own_efficiency_by_length() -> None:
    """A number, or a table over the length, log-linear between its points; else as products."""
    gpu = CLUSTER.gpu
    peak = gpu.peak["fp16"]
    table = ((1024, 0.2), (4096, 0.4))
    for length, given_, attained in (
        (2048, 0.3, 0.3),
        (512, table, 0.2),
        (2048, table, 0.3),
        (65536, table, 0.4),
    ):
        kernels = Kernels((), 0, 0.0, attention=FusedAttention(1e12, 1e9, length))
        times = KernelTimes(0.8, attention_efficiency=given_)  # type: ignore[arg-type]
        took = compute_time(replace(PASS, kernels=kernels), replace(gpu, kernels=times), "fp16")
        assert took == pytest.approx(1e12 / (peak * attained))
    product = Kernels((PRODUCT,), 0, 0.0)
    flash = Kernels((), 0, 0.0, attention=FusedAttention(PRODUCT.flops, PRODUCT.bytes, 2048))
    bare = replace(gpu, kernels=KernelTimes(0.8, operand_efficiency=0.1))
    assert compute_time(replace(PASS, kernels=flash), bare, "fp16") == pytest.approx(
        compute_time(replace(PASS, kernels=product), bare, "fp16")
    )


def test_hops_in_turn_add_the_time_inside_the_node() -> None:
    """A ring over nodes takes the sum of both links instead of the larger one."""
    work = Collective(Kind.ALL_GATHER, "x", 10**9, DType.FP16, WORLD)
    in_turn = replace(CLUSTER, hops="in_turn")
    pushed = 2e9 * 63 / 64
    extra = pushed / CLUSTER.intra.payload_bandwidth
    together = cost_of(work, CLUSTER).duration_alone(CLUSTER)
    assert cost_of(work, in_turn).duration_alone(in_turn) == pytest.approx(together + extra)
    one, alone = CLUSTER.resized(16), in_turn.resized(16)
    assert cost_of(work, alone).duration_alone(alone) == cost_of(work, one).duration_alone(one)


def test_a_rank_that_relays_for_its_node_attains_a_fraction_of_the_nics() -> None:
    """Leaders move what one group of peers moves; where a node has one rank, nothing is relayed."""
    slow = replace(CLUSTER, inter=replace(CLUSTER.inter, relay_efficiency=0.5))
    work = Collective(Kind.ALL_REDUCE, "x", 10**9, DType.FP16, LEADERS)
    nodes = CLUSTER.nodes
    pushed = 2 * 2e9 * (nodes - 1) / nodes
    for cluster, rate in ((CLUSTER, 1.0), (slow, 0.5)):
        found = cost_of(work, cluster)
        assert found.bytes_per_link(cluster)[1] == pytest.approx(pushed)
        seconds = pushed / (cluster.inter.payload_bandwidth * rate)
        assert found.duration_alone(cluster) == pytest.approx(found.latency + seconds)
    peers = cost_of(replace(work, group=PEERS), slow)
    assert peers.bytes_per_link(slow)[1] == pytest.approx(pushed * slow.gpus_per_node)
    assert peers.inter_efficiency == 1
    single = replace(slow, gpus_per_node=1)
    assert cost_of(work, single) == cost_of(replace(work, group=WORLD), single)
