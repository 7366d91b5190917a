"""Memory: the published formulas, with published numbers."""

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from co2sim import strategies
from co2sim.architecture import Transformer, language_model, vision_transformer
from co2sim.memory import activations, model_states
from co2sim.schedule import DType, Layout
from co2sim.workload import Block, Model, Workload

GB = 1e9
PARAMETERS = 7_500_000_000
"""The model of the example in ZeRO's figure 1."""


def big(**changes: object) -> Workload:
    """7.5 billion parameters in one block."""
    model = Model("7.5b", (Block("all", (PARAMETERS,), 1.0, 0.0),), tokens=1)
    return Workload(model, **changes)  # type: ignore[arg-type]


def states(strategy: str, layout: Layout, job: Workload | None = None) -> float:
    """Bytes of parameters, gradients and optimizer of a strategy."""
    memory = strategies.parse(strategy).memory(job or big(), layout)
    return memory["parameters"] + memory["gradients"] + memory["optimizer"]


@pytest.mark.parametrize(
    ("strategy", "published"), [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)]
)
def test_model_states_are_those_of_zeros_figure_1(strategy: str, published: float) -> None:
    """7.5B parameters on 64 GPUs with K = 12: 120, 31.4, 16.6 and 1.9 GB (arXiv 1910.02054)."""
    assert states(strategy, Layout(8, 8)) / GB == pytest.approx(published, abs=0.05)


@given(st.integers(1, 12), st.integers(1, 8))
def test_sharding_divides_what_the_formulas_divide(nodes: int, gpus: int) -> None:
    """2 + 2 + K bytes per parameter: stage 1 divides K, stage 2 the gradients, 3 everything."""
    layout, n, k = Layout(nodes, gpus), nodes * gpus, 12
    expected = {
        "ddp": 2 + 2 + k,
        "zero1": 2 + 2 + k / n,
        "zero2": 2 + (2 + k) / n,
        "zero3": (2 + 2 + k) / n,
        "zeropp": (2 + 2 + k) / n,
    }
    for strategy, per_parameter in expected.items():
        assert states(strategy, layout) == pytest.approx(per_parameter * PARAMETERS)


def test_the_secondary_shard_is_one_more_copy_in_half_precision_per_node() -> None:
    """HpZ keeps 2 bytes per parameter, divided over the GPUs of its group."""
    for text, ranks in (("zeropp", 8), ("zeropp(hpz_group=4)", 4), ("zeropp(hpz_group=16)", 16)):
        memory = strategies.parse(text).memory(big(), Layout(4, 8))
        assert memory["secondary"] == pytest.approx(2 * PARAMETERS / ranks)
    assert "secondary" not in strategies.parse("zeropp(hpz=false)").memory(big(), Layout(4, 8))


@pytest.mark.parametrize(
    ("precision", "optimizer", "per_parameter"),
    [
        (DType.BF16, "adamw", 2 + 2 + 12),
        (DType.FP16, "sgd", 2 + 2 + 8),
        (DType.FP32, "adamw", 4 + 4 + 8),
        (DType.FP32, "sgd", 4 + 4 + 4),
    ],
)
def test_states_follow_precision_and_optimizer(
    precision: DType, optimizer: str, per_parameter: int
) -> None:
    """Mixed precision keeps an fp32 master copy; fp32 parameters are their own."""
    found = model_states(big(precision=precision, optimizer=optimizer))
    assert sum(found.values()) == pytest.approx(per_parameter * PARAMETERS)


@pytest.mark.parametrize(
    ("strategy", "copies"),
    [
        ("local_sgd", 1),
        ("slowmo", 3),
        ("overlap_local_sgd", 3),
        ("diloco", 3),
        ("co2", 3),
        ("co2(staleness=2)", 4),
        ("co2(dtype=bf16)", 2.5),
    ],
)
def test_outer_states_are_copies_of_the_parameters(strategy: str, copies: float) -> None:
    """CO2 adds anchor, momentum and one buffer in fp32: three copies, sharded inside a node."""
    alone = strategies.parse(strategy).memory(big(), Layout(4, 8))
    assert alone["outer"] == pytest.approx(copies * 4 * PARAMETERS)
    text = strategy.replace("(", "(worker=node,") if "(" in strategy else f"{strategy}(worker=node)"
    shared = strategies.parse(text).memory(big(), Layout(4, 8))
    assert shared["outer"] == pytest.approx(copies * 4 * PARAMETERS / 8)
    inner = strategies.parse("zero2").memory(big(), Layout(1, 8))
    assert {name: size for name, size in shared.items() if name != "outer"} == inner


def test_an_average_by_leaders_is_whole_on_every_rank() -> None:
    """It is broadcast inside the node, so its buffer is not sharded; anchor and momentum are."""
    led = strategies.parse("co2(worker=node,average=leader,dtype=bf16)").memory(big(), Layout(4, 8))
    assert led["outer"] == pytest.approx((2 / 8 + 1 / 2) * 4 * PARAMETERS)


@pytest.mark.parametrize("strategy", tiny.VARIANTS)
def test_one_gpu_keeps_all_states(strategy: str) -> None:
    """Alone there is nobody to share with: 16 bytes per parameter, whatever the strategy."""
    assert states(strategy, Layout(1, 1), tiny.job()) == 16 * 2000


# --- activations -------------------------------------------------------------------------------


def gpt(layers: int, hidden: int, heads: int, tokens: int) -> Model:
    """A GPT: two-matrix MLP of 4 h, softmax attention."""
    body = Transformer(layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden)
    return language_model("gpt", body, vocab=1000, tokens=tokens, tied=True)


@given(
    st.integers(1, 4), st.integers(1, 16), st.integers(1, 8), st.integers(1, 512), st.integers(1, 4)
)
def test_a_gpt_layer_keeps_34sbh_and_5as2b(
    layers: int, head_dim: int, heads: int, tokens: int, batch: int
) -> None:
    """Korthikanti et al. 2022, equation 2: s b h (34 + 5 a s / h); selective drops the second."""
    h, a, s, b = head_dim * heads, heads, tokens, batch
    kept = {}
    for count in (layers, layers + 1):
        model = gpt(count, h, a, s)
        for recompute in ("none", "selective"):
            job = Workload(model, micro_batch=b, recompute=recompute)  # type: ignore[arg-type]
            kept[count, recompute] = activations(job)
    layer = {r: kept[layers + 1, r] - kept[layers, r] for r in ("none", "selective")}
    assert layer["selective"] == pytest.approx(34 * s * b * h)
    assert layer["none"] == pytest.approx(34 * s * b * h + 5 * a * s * s * b)


def test_a_gated_mlp_keeps_one_more_activation() -> None:
    """With three matrices both projections and their product are kept: 2 bytes x s x ffn more."""
    shape = {"layers": 1, "hidden": 64, "heads": 4, "ffn": 96}
    plain, gated = (Transformer(gated=g, **shape).blocks(10)[0] for g in (False, True))
    assert gated.activation_bytes - plain.activation_bytes == 2 * 10 * 96


def test_a_gate_of_attention_keeps_its_output_and_what_it_gates() -> None:
    """The gate multiplies the output of attention: 2 bytes x s x h more for the gate."""
    shape = {"layers": 1, "hidden": 64, "heads": 4, "ffn": 96}
    plain, gated = (Transformer(attention_gate=g, **shape).blocks(10)[0] for g in (False, True))
    assert gated.activation_bytes - plain.activation_bytes == 2 * 10 * 64


def test_logits_are_kept_in_fp32() -> None:
    """The cross entropy needs them: 4 bytes x s for every entry of the vocabulary."""
    body = Transformer(layers=1, hidden=64, heads=4, ffn=96)
    small, large = (
        language_model("m", body, vocab=vocab, tokens=10, tied=True) for vocab in (100, 101)
    )
    assert activations(Workload(large)) - activations(Workload(small)) == pytest.approx(4 * 10)


def test_a_vision_transformer_embeds_patches_and_not_its_class_token() -> None:
    """ViT-B/16: 196 patches of 3 x 16 x 16 numbers times 768 columns, 2 FLOP each."""
    body = Transformer(layers=12, hidden=768, heads=12, ffn=3072)
    model = vision_transformer("vit", body, image=224, patch=16, channels=3, classes=1000)
    assert model.blocks[0].flops == 2 * 196 * 768 * 768
    assert model.blocks[1] == body.blocks(197)[0]


def test_a_recomputed_backward_moves_what_both_passes_move() -> None:
    """The forward pass again, and a backward pass with twice its traffic."""
    job = Workload(gpt(2, 64, 4, 128), micro_batch=3, recompute="full")
    for work in job.works():
        again, rest = job.recomputed(work)
        assert again.kernel == "recompute"
        assert (again.flops, again.memory_bytes) == (work.forward.flops, work.forward.memory_bytes)
        assert rest.memory_bytes == 2 * work.forward.memory_bytes
        assert again.flops + rest.flops == work.backward.flops


@pytest.mark.parametrize(
    ("prefetch", "live"),
    [
        (0, 640),
        (499, 500 + 360),
        (500, 640 + 500),
        (860, 500 + 500 + 360),
        (1000, 640 + 500 + 500),
        (10**9, 2 * 2000),
    ],
)
def test_blocks_present_at_once_are_those_in_use_and_ahead(prefetch: int, live: int) -> None:
    """Blocks of 640, 500, 500 and 360, forward and back.

    Nothing ahead: the largest one. 500 ahead: the embedding and a layer. 860 ahead: a layer, and a
    layer and the head, 1360 in all, if the head leads the way back: 860 + 500. All: both ways.
    """
    memory = strategies.parse(f"zero3(prefetch={prefetch})").memory(tiny.job(), Layout(2, 2))
    assert memory["gathered"] == live * 2


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_quantized_average_is_made_from_a_whole_pseudo_gradient(dtype: str) -> None:
    """It saves bytes on the wire, not in memory: anchor, momentum and an fp32 buffer."""
    memory = strategies.parse(f"diloco(dtype={dtype})").memory(big(), Layout(4, 8))
    assert memory["outer"] == pytest.approx(3 * 4 * PARAMETERS)


def test_full_recomputation_keeps_inputs_and_one_layer() -> None:
    """2 s b h for every layer, and the largest block while it is recomputed."""
    model = gpt(10, 64, 4, 128)
    job = Workload(model, micro_batch=3, recompute="full")
    largest = max(block.activation_bytes + block.attention_bytes for block in model.blocks)
    inputs = 11 * 2 * 128 * 64  # of ten layers and the head
    assert activations(job) == pytest.approx(3 * (inputs + largest))


def test_recomputation_trades_memory_for_flops() -> None:
    """From none over selective to full there is less to keep and more to compute."""
    model = gpt(10, 64, 4, 512)
    jobs = [Workload(model, recompute=how) for how in ("none", "selective", "full")]
    kept = [activations(job) for job in jobs]
    work = [job.hardware_flops_per_sample for job in jobs]
    assert kept == sorted(kept, reverse=True)
    assert work == sorted(work)
    assert work[0] == pytest.approx(model.flops_per_sample)
    assert work[2] == pytest.approx(model.flops_per_sample * 4 / 3)


@given(st.integers(1, 4), st.integers(1, 16), st.integers(1, 8), st.integers(1, 512))
def test_model_flops_follow_palm(layers: int, head_dim: int, heads: int, tokens: int) -> None:
    """6 N + 12 L H Q T per token, N being the parameters that multiply (PaLM, appendix B)."""
    h, vocab = head_dim * heads, 1000
    model = gpt(layers, h, heads, tokens)
    multiplied = layers * 12 * h * h + vocab * h
    expected = 6 * multiplied + 12 * layers * heads * head_dim * tokens
    assert model.flops_per_sample / tokens == pytest.approx(expected)


def test_more_ranks_never_need_more_memory() -> None:
    """Sharding over more ranks keeps or shrinks every item."""
    for strategy in tiny.VARIANTS:
        found = [
            strategies.parse(strategy).memory(tiny.job(), Layout(nodes, 4)) for nodes in (1, 2, 4)
        ]
        for fewer, more in ((found[0], found[1]), (found[1], found[2])):
            assert all(more[item] <= fewer[item] for item in fewer)
