"""Layers without attention: parameters, FLOP, what ranks have of them, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from co2sim.catalog import load_model
from co2sim.common.errors import CatalogError, OptionError
from co2sim.models.delta_rule import DeltaRule
from co2sim.models.operators import Block, Model, Product, shard_model
from co2sim.models.scan import Scan
from co2sim.models.ssd import SSD
from co2sim.models.transformer import Experts, Transformer, language_model
from co2sim.schedule.mesh import Mesh
from co2sim.schedule.schedule import Compute
from co2sim.training.workload import Workload

MAMBA = SSD(heads=8, head_dim=16, state=32, groups=4, chunk=64)
DELTA = DeltaRule(key_heads=2, value_heads=4, key_dim=16, value_dim=24)
BODY = Transformer(layers=4, hidden=64, bias=False, norm="rmsnorm", norms=1, scan=MAMBA)
HYBRID = replace(
    BODY,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn=96,
    gated=True,
    attention_gate=True,
    norms=2,
    qk_norm="head",
    scan=DELTA,
    full_every=4,
    experts=Experts(count=8, active=2, width=48, shared=48, shared_gate=True),
)
SCANS = st.one_of(
    st.builds(
        SSD,
        heads=st.sampled_from([4, 8]),
        head_dim=st.integers(1, 65),
        state=st.integers(1, 130),
        groups=st.sampled_from([1, 2, 4]),
        chunk=st.sampled_from([16, 64]),
    ),
    st.builds(
        DeltaRule,
        key_heads=st.sampled_from([1, 2]),
        value_heads=st.sampled_from([2, 4]),
        key_dim=st.integers(1, 65),
        value_dim=st.integers(1, 65),
        chunk=st.sampled_from([16, 64]),
    ),
)


def decoder(body: Transformer, tokens: int = 192) -> Model:
    """A language model."""
    return language_model("m", body, vocab=96, tokens=tokens, tied=False)


def counted(run: Callable[[], object]) -> float:
    """FLOP of products of a forward pass, as PyTorch counts them: convolutions left out."""
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

    with FlopCounterMode(display=False) as counter:
        run()
    by_kind = counter.get_flop_counts()["Global"]
    return float(sum(flops for kind, flops in by_kind.items() if "convolution" not in str(kind)))


def of_products(model: Model) -> float:
    """The same of a model here."""
    return sum(op.flops for block in model.blocks for op in block.operators) - sum(
        op.flops for block in model.blocks for op in block.operators if op.name == "convolution"
    )


CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2-2.7b": (
        "Mamba2",
        {
            "num_heads": 80,
            "vocab_size": 50288,
            "hidden_size": 2560,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-next-80b-a3b": ("Qwen3Next", {}),
    "nemotron-h-8b": (
        "NemotronH",
        {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"},
    ),
}
"""Classes of transformers, and what is other than in their configurations."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    """Of its module for causal language models, on no device."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    kind, options = CONFIGURATIONS[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    with torch.device("meta"):
        module = getattr(transformers, f"{kind}ForCausalLM")(config)
        module.tie_weights()
    assert load_model(name).value.parameters == sum(p.numel() for p in module.parameters())


def test_products_of_mamba_2_are_those_of_transformers() -> None:
    """Of a forward pass with a state for each head, but for how states pass from chunk to chunk.

    There transformers multiplies the states of all chunks with each other; kernels add them up.
    """
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    alone = replace(MAMBA, groups=8)
    config = transformers.Mamba2Config(
        num_heads=8,
        head_dim=16,
        vocab_size=96,
        hidden_size=64,
        state_size=32,
        num_hidden_layers=4,
        n_groups=8,
        chunk_size=64,
    )
    module = transformers.Mamba2ForCausalLM(config).eval()
    tokens, chunks = 192, 3
    passing = 2.0 * (chunks + 1) ** 2 * 8 * 16 * 32 * config.num_hidden_layers
    found = counted(lambda: module(torch.zeros(1, tokens, dtype=torch.long), use_cache=False))
    assert found - passing == of_products(decoder(replace(BODY, scan=alone), tokens))


def test_products_of_layers_that_are_one_part_alone_are_those_of_transformers() -> None:
    """Nemotron-H: a scan, attention and an MLP by turns, with the same exception."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.NemotronHConfig(
        vocab_size=96,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        ssm_state_size=32,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=8,
        chunk_size=64,
        hybrid_override_pattern="M-M*-",
        attn_implementation="eager",
    )
    module = transformers.NemotronHForCausalLM(config).eval()
    body = replace(
        BODY,
        layers=5,
        heads=4,
        kv_heads=2,
        head_dim=32,
        ffn=96,
        scan=replace(MAMBA, groups=8),
        pattern="M-M*-",
    )
    model, tokens, chunks = decoder(body), 192, 3
    assert sum(p.numel() for p in module.parameters()) == model.parameters
    found = counted(lambda: module(torch.zeros(1, tokens, dtype=torch.long), use_cache=False))
    assert found - 2.0 * (chunks + 1) ** 2 * 8 * 16 * 32 * 2 == of_products(model)


def test_products_of_a_hybrid_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-Next with its delta rule, gated attention and experts, whose gate is one column.

    Transformers then inverts the triangular matrices of the rule by rows, as kernels do.
    """
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_next import modeling_qwen3_next as code  # noqa: PLC0415

    monkeypatch.setattr(code, "is_torchdynamo_exporting", lambda: True)
    config = transformers.Qwen3NextConfig(
        vocab_size=96,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        num_experts_per_tok=2,
        num_experts=8,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    module = transformers.Qwen3NextForCausalLM(config).eval()
    model, tokens = decoder(HYBRID), 192
    assert sum(p.numel() for p in module.parameters()) == model.parameters
    found = counted(lambda: module(torch.zeros(1, tokens, dtype=torch.long), use_cache=False))
    gates = 2.0 * tokens * config.hidden_size * config.num_hidden_layers
    assert found - gates == of_products(model)


@given(SCANS, st.integers(1, 5), st.integers(2, 4))
def test_flop_of_a_scan_grow_with_the_tokens(scan: Scan, chunks: int, times: int) -> None:
    """Those of products, convolution and all, as long as tokens fill whole chunks."""

    def flops(tokens: int) -> float:
        return Block("layer", scan.operators(tokens, 48)).flops

    tokens = chunks * scan.chunk  # type: ignore[attr-defined]  # of every kind
    assert flops(times * tokens) == pytest.approx(times * flops(tokens))


@given(SCANS, st.sampled_from([2, 4]))
def test_ranks_have_equal_parts_of_a_scan_or_are_refused(scan: Scan, tp: int) -> None:
    """Of all FLOP; parameters of norms that all heads share are whole on each rank."""
    heads = scan.groups if isinstance(scan, SSD) else scan.key_heads  # type: ignore[attr-defined]
    whole = decoder(replace(BODY, scan=scan))
    if heads % tp:
        with pytest.raises(OptionError, match=f"the {heads} "):
            shard_model(whole, Mesh(tp=tp))
        return
    part = shard_model(whole, Mesh(tp=tp))
    for one, layer in zip(part.blocks[1:-1], whole.blocks[1:-1], strict=True):
        assert tp * one.flops == pytest.approx(layer.flops)
        whole_ones = [op for op in layer.operators if op.cut != "width" and op.name != "output"]
        shared = sum(op.elements for op in whole_ones)
        assert tp * one.parameters == layer.parameters + (tp - 1) * shared


def backward(work: Compute, name: str, layer: Block) -> float:
    """How often a backward pass calls a product of a layer."""
    assert work.kernels
    products = layer.of(Product)
    place = next(i for i, op in enumerate(products) if op.name == name)
    return work.kernels.products[place].count


def test_a_backward_pass_makes_again_what_the_kernels_of_a_scan_do_not_keep() -> None:
    """States of chunks and their scores are products of the forward pass, too; model FLOP are not.

    Source: `_mamba_chunk_scan_combined_bwd` in mamba_ssm/ops/triton/ssd_combined.py.
    """
    job = Workload(decoder(BODY))
    work = job.works()[1]
    for name, often in (("states", 3), ("scores", 3), ("in chunks", 2), ("output", 2)):
        assert backward(work.backward, name, work.block) == often
    assert work.backward.flops == 2 * work.forward.flops


@pytest.mark.parametrize("body", [BODY, HYBRID], ids=["ssd", "delta rule"])
def test_ranks_do_not_divide_a_sequence_with_a_scan(body: Transformer) -> None:
    """How they would pass its state on is not modelled."""
    with pytest.raises(OptionError, match="cp=2"):
        shard_model(decoder(body), Mesh(cp=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scan.heads": "81", "scan.groups": "2"}, "81"),
        ({"scan.kind": "rwkv"}, "scan.kind"),
        ({"scan.chunk": "0"}, "scan.chunk"),
        ({"full_every": "4"}, "heads"),
        ({"pattern": "M*"}, "64"),
        ({"pattern": "M" * 63 + "X"}, "X"),
        ({"pattern": "M" * 63 + "*"}, "heads"),
        ({"pattern": "M" * 63 + "-"}, "ffn"),
    ],
)
def test_what_no_model_with_a_scan_can_be_is_refused(changes: dict[str, str], message: str) -> None:
    """In one line that names it."""
    with pytest.raises(CatalogError, match=message) as error:
        load_model("mamba2-2.7b", changes)
    assert "\n" not in str(error.value)
