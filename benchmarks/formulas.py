"""What the catalog's formulas say of a model type, beside a trace of transformers' own module.

    python benchmarks/formulas.py                # all model types: 3 minutes
    python benchmarks/formulas.py --only llama   # rows whose names hold this; keeps nothing
    python benchmarks/formulas.py --quick        # two rows; keeps nothing

Writes formulas.csv: for each model type that a `config.json` may name a small configuration, with
its parameters, the FLOP of both passes, and the bytes that are kept for the backward pass but for
those of the loss: by the formula, and of the class of transformers (attention: sdpa, bf16).
"""

import argparse
import csv
import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from co2sim.catalog import Contents, huggingface, load_model
from co2sim.models.from_torch import trace
from co2sim.models.memory import kept_bytes
from co2sim.models.operators import FLASH_BACKWARD, Attention, Block, Product
from co2sim.models.trace import AttentionShape, Trace
from co2sim.models.workload import Workload
from reports import folder, parser, table

NAME = "formulas.csv"
SAMPLES, TOKENS = 2, 512
HABITS = ("activations", "norms", "keys", "copies")
"""What transformers keeps besides, as a stack says."""

SIZES = {
    "hidden_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 1031,
    "max_position_embeddings": 2048,
    "pad_token_id": 1,
}
"""Of all model types, where their class has them."""
_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 320}

CASES: Mapping[str, Mapping[str, Any]] = {
    "arcee": {},
    "bert": {},
    "bloom": {"n_layer": 3, "n_head": 16},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"sliding_window": 128, "num_hidden_layers": 4},
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 16,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "kv_lora_rank": 160,
        "q_lora_rank": 288,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 32,
        "v_head_dim": 56,
        "first_k_dense_replace": 1,
    },
    "ernie4_5": {"use_bias": True},
    "exaone4": {"sliding_window": 128, "num_hidden_layers": 4},
    "gemma": {"head_dim": 96},
    "gemma2": {"head_dim": 96, "sliding_window": 128, "num_hidden_layers": 4},
    "gemma3": {},
    "gemma3_text": {"head_dim": 96, "sliding_window": 128, "num_hidden_layers": 6},
    "glm": {"head_dim": 64, "attention_bias": True},
    "glm4": {"head_dim": 64, "attention_bias": True},
    "glm4_moe": {
        **_EXPERTS,
        "head_dim": 96,
        "use_qk_norm": True,
        "n_routed_experts": 12,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "gpt2": {"n_layer": 3, "n_head": 16, "n_embd": 1024},
    "gpt_neo": {"num_layers": 4, "num_heads": 16, "attention_types": [[["global", "local"], 2]]},
    "gpt_neox": {},
    "gpt_oss": {
        **_EXPERTS,
        "intermediate_size": 320,
        "head_dim": 96,
        "num_local_experts": 12,
        "sliding_window": 128,
    },
    "gptj": {"n_layer": 3, "n_head": 16, "n_embd": 1024, "rotary_dim": 32},
    "granite": {},
    "granitemoe": {"intermediate_size": 320, "num_local_experts": 12, "num_experts_per_tok": 3},
    "kimi_k2": {},
    "llama": {"head_dim": 96},
    "minimax_m2": {
        "intermediate_size": 320,
        "head_dim": 96,
        "num_local_experts": 12,
        "num_experts_per_tok": 3,
    },
    "mistral": {"sliding_window": 128},
    "mixtral": {"intermediate_size": 640, "num_local_experts": 6, "num_experts_per_tok": 3},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 128, "num_hidden_layers": 4},
    "olmoe": {"intermediate_size": 320, "num_experts": 12, "num_experts_per_tok": 3},
    "opt": {"ffn_dim": 2816, "word_embed_proj_dim": 1024},
    "phi": {},
    "phi3": {"sliding_window": 128},
    "qwen2": {},
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 12,
        "shared_expert_intermediate_size": 480,
        "mlp_only_layers": [0],
    },
    "qwen3": {"head_dim": 96},
    "qwen3_moe": {**_EXPERTS, "head_dim": 96, "num_experts": 12},
    "roberta": {},
    "seed_oss": {"head_dim": 96},
    "smollm3": {},
    "starcoder2": {"sliding_window": 128},
    "vit": {"image_size": 224, "patch_size": 16},
    "xlm-roberta": {},
}


@dataclass(frozen=True)
class Sizes:
    """Parameters, FLOP of products and of attention, and bytes kept of layers and of all else."""

    parameters: int
    products: tuple[float, float]
    attention: tuple[float, float]
    layers: float
    others: float

    @property
    def flop(self) -> float:
        """Of both passes."""
        return sum(self.products) + sum(self.attention)

    @property
    def kept(self) -> float:
        """In all, but for the loss."""
        return self.layers + self.others


def configuration(kind: str) -> Any:
    """The configuration of transformers for a case."""
    import transformers

    own = huggingface._ALIASES.get(kind, huggingface._WRAPPED.get(kind, kind))
    default = transformers.AutoConfig.for_model(own)
    values = {**SIZES, **(CASES[kind] or CASES[own])}
    has = {key: value for key, value in values.items() if hasattr(default, key)}
    config = transformers.AutoConfig.for_model(own, **has)
    config.use_cache = False
    return config


def of_transformers(kind: str) -> Trace:
    """A training step of the class of transformers."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = configuration(kind)
    auto = transformers.AutoModelForCausalLM
    if kind == "vit":
        auto = transformers.AutoModelForImageClassification
    elif kind in huggingface._ENCODERS:
        auto = transformers.AutoModelForMaskedLM

    def build() -> Any:
        try:
            made = auto.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        except ValueError:
            made = auto.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        return made.train()

    def batch() -> Any:
        if kind == "vit":
            return {
                "pixel_values": torch.randn(
                    SAMPLES, 3, config.image_size, config.image_size, dtype=torch.bfloat16
                ),
                "labels": torch.zeros(SAMPLES, dtype=torch.long),
            }
        ids = torch.randint(2, config.vocab_size, (SAMPLES, TOKENS))
        return {"input_ids": ids, "labels": ids}

    return trace(build, batch)


def is_layer(path: str | None) -> bool:
    """Whether a module belongs to a numbered part of a list of layers."""
    return any(part.isdigit() for part in (path or "").split("."))


def traced(found: Trace) -> Sizes:
    """Of a trace."""
    flop = {}
    for phase in ("forward", "backward"):
        of = [kernel for kernel in found.kernels if kernel.phase == phase]
        attention = sum(k.flop for k in of if isinstance(k.shape, AttentionShape))
        flop[phase] = (sum(k.flop for k in of) - attention, attention)
    kept = [s for s in found.storages if s.kept_by and s.kind == "activation"]
    return Sizes(
        found.parameter_count,
        (flop["forward"][0], flop["backward"][0]),
        (flop["forward"][1], flop["backward"][1]),
        sum(s.size for s in kept if is_layer(s.kept_by)),
        sum(s.size for s in kept if not is_layer(s.kept_by)),
    )


def formula(kind: str) -> tuple[Sizes, Workload]:
    """By the catalog."""
    values = json.loads(configuration(kind).to_json_string(use_diff=False))
    if kind in huggingface._WRAPPED:
        values = {"model_type": kind, "text_config": values}
    elif kind in huggingface._ALIASES:
        values["model_type"] = kind
    tree = huggingface.convert(values, kind)
    length = {} if kind == "vit" else {"seq_len": str(TOKENS)}
    model = load_model(Contents(kind, tree), length).value
    job = Workload(model, micro_batch=SAMPLES, keeps=HABITS, loss="eager")

    def products(block: Block) -> float:
        return block.flops - sum(op.flops for op in block.of(Attention))

    forward = SAMPLES * sum(map(products, model.blocks))
    # The trace counts the whole square of causal and of windowed attention.
    scores = SAMPLES * sum(
        replace(op, window=0).flops for block in model.blocks for op in block.of(Attention)
    )
    kept = {
        layer: sum(
            kept_bytes(job, made) for block, made, _ in job.executed if block.is_layer == layer
        )
        for layer in (True, False)
    }
    return Sizes(
        model.parameters,
        (forward, 2 * forward),
        (scores, FLASH_BACKWARD * scores),
        kept[True],
        kept[False],
    ), job


if __name__ == "__main__":
    import sys
    for kind in sys.argv[1:] or CASES:
        began = time.perf_counter()
        try:
            t = traced(of_transformers(kind))
            f, _ = formula(kind)
        except Exception as e:
            print(kind, type(e).__name__, str(e)[:300], flush=True)
            continue
        row = SAMPLES * TOKENS * 2
        print(f"{kind:12} par {f.parameters - t.parameters} prod fwd {f.products[0]/t.products[0]-1:+.4%} bwd {f.products[1]/t.products[1]-1:+.4%}"
          f" attn {f.attention[0]/max(1,t.attention[0])-1:+.3%} {f.attention[1]/max(1,t.attention[1])-1:+.3%}"
          f" layers {f.layers/t.layers-1:+.2%} all {f.kept/t.kept-1:+.2%} others {f.others/row/1024:.2f}/{t.others/row/1024:.2f}h layers {f.layers/row/1024:.2f}/{t.layers/row/1024:.2f}h  {time.perf_counter()-began:.1f}s", flush=True)
