"""What the catalog's formulas say of a model type, beside a trace of transformers' own module.

    python benchmarks/formulas.py                # all cases: 2 minutes
    python benchmarks/formulas.py --only llama   # cases whose names hold this; the rest stays
    python benchmarks/formulas.py --quick        # two cases; keeps nothing

Writes formulas.csv: for each model type that a `config.json` may name, and some of its options, a
small configuration, with what a trace counts of the class of transformers for training, in bf16
and with attn_implementation="sdpa" (a causal language model; masked, of encoders; a classifier of
images): parameters, FLOP of products and of attention in both passes, and bytes that layers and
all else keep for the backward pass, but for those of the loss. Then by how much the formula is off.
"""

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from reports import folder, installed, made_by, parser, table

from co2sim.catalog import Contents, huggingface, load_model
from co2sim.models.operators import Attention, Model, Unfused
from co2sim.tracing.trace import AttentionShape, Trace
from co2sim.training.memory import kept_bytes
from co2sim.training.workload import Workload

NAME = "formulas.csv"
QUICK = ("llama", "qwen3_moe")
SAMPLES, TOKENS = 2, 512
HABITS: tuple[Unfused, ...] = ("activations", "norms", "masks", "experts", "code")
"""What transformers keeps besides what others do, as a stack says."""

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
"""Of all cases, where the class of the model type has them."""
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
    "gpt_neo": {
        "num_layers": 4,
        "num_hidden_layers": 4,
        "num_heads": 16,
        "attention_types": [[["global", "local"], 2]],
    },
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
    "phi": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": None},
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
    "cohere, no norms of heads": {"use_qk_norm": False},
    "deepseek_v3, queries from the hidden state": {"q_lora_rank": None},
    "gemma, all heads have keys": {"head_dim": 96, "num_key_value_heads": 16},
    "gemma2, no cap": {"attn_logit_softcapping": None, "sliding_window": 128},
    "glm4_moe, no norms of heads": {"use_qk_norm": False, "attention_bias": True},
    "gpt2, ReLU and no dropout": {"activation_function": "relu", "resid_pdrop": 0.0},
    "gpt2, untied": {"tie_word_embeddings": False, "n_inner": 1536},
    "gpt_neox, MLP behind attention": {"use_parallel_residual": False, "attention_bias": False},
    "llama, biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama, all heads have keys": {"num_key_value_heads": 16},
    "llama, odd sizes": {
        "hidden_size": 1080,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 72,
        "intermediate_size": 2977,
        "num_hidden_layers": 2,
        "vocab_size": 997,
    },
    "mistral, no window": {"sliding_window": None},
    "opt, GELU": {"activation_function": "gelu", "ffn_dim": 4096, "dropout": 0.0},
    "phi, GELU": {"hidden_act": "gelu"},
    "phi3, a window": {"sliding_window": 128},
    "qwen2, windows of the last layers": {
        "use_sliding_window": True,
        "sliding_window": 128,
        "max_window_layers": 1,
    },
    "qwen2_moe, experts in every second layer": {
        **_EXPERTS,
        "num_experts": 12,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
    },
    "starcoder2, no biases": {"use_bias": False, "sliding_window": None},
    "vit, large patches and ReLU": {"image_size": 224, "patch_size": 32, "hidden_act": "relu"},
}
"""A model type, and what is special about its configuration, if anything."""


@dataclass(frozen=True)
class Sizes:
    """Parameters; FLOP; bytes that are kept of layers, and of all else but the loss."""

    parameters: int
    products: float
    products_back: float
    attention: float
    attention_back: float
    kept_layers: float
    kept_others: float

    @property
    def flop(self) -> float:
        """Of both passes."""
        return self.products + self.products_back + self.attention + self.attention_back

    @property
    def kept(self) -> float:
        """In all."""
        return self.kept_layers + self.kept_others


def own_type(case: str) -> str:
    """The model type whose class transformers has."""
    kind = case.partition(",")[0]
    return huggingface._WRAPPED.get(kind, huggingface._ALIASES.get(kind, kind))  # noqa: SLF001


def configuration(case: str) -> Any:
    """The configuration of transformers for a case: what a type has of all sizes."""
    import transformers  # noqa: PLC0415 - slow

    kind = own_type(case)
    default = transformers.AutoConfig.for_model(kind)
    values = {**SIZES, **CASES[kind], **CASES[case]}
    has = {key: value for key, value in values.items() if hasattr(default, key)}
    return transformers.AutoConfig.for_model(kind, use_cache=False, **has)


def config_file(case: str) -> dict[str, Any]:
    """The `config.json` that transformers writes: what is not the default of the class."""
    kind, config = case.partition(",")[0], configuration(case)
    values: dict[str, Any] = json.loads(config.to_json_string())
    if kind in huggingface._WRAPPED:  # noqa: SLF001
        return {"model_type": kind, "text_config": values}
    return values | {"model_type": kind}


def measured(case: str) -> Trace:
    """A training step of the class of transformers."""
    import torch  # noqa: PLC0415 - slow
    import transformers  # noqa: PLC0415

    from co2sim.tracing.from_torch import trace  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    config, kind = configuration(case), own_type(case)
    make = {"vit": transformers.AutoModelForImageClassification} | dict.fromkeys(
        ("bert", "roberta", "xlm-roberta"), transformers.AutoModelForMaskedLM
    )

    def build() -> Any:
        auto = make.get(kind, transformers.AutoModelForCausalLM)
        try:
            model = auto.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        except ValueError:  # the type has no fused attention
            model = auto.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        return model.train()

    def batch() -> dict[str, Any]:
        if kind == "vit":
            shape = SAMPLES, config.num_channels, config.image_size, config.image_size
            labels = torch.zeros(SAMPLES, dtype=torch.long)
            return {"pixel_values": torch.randn(shape, dtype=torch.bfloat16), "labels": labels}
        ids = torch.randint(2, config.vocab_size, (SAMPLES, TOKENS))
        return {"input_ids": ids, "labels": ids}

    return trace(build, batch)


def of_trace(found: Trace) -> Sizes:
    """What a trace counts. What no module but the whole one keeps is the loss."""
    flop = {"forward": [0, 0], "backward": [0, 0]}
    for kernel in found.kernels:
        flop[kernel.phase][isinstance(kernel.shape, AttentionShape)] += kernel.flop
    kept = {True: 0, False: 0}
    for one in found.storages:
        pixels = one.kind == "input" and one.size > 8 * found.units
        if one.kept_by and (one.kind == "activation" or (pixels and found.units == SAMPLES)):
            kept[any(part.isdigit() for part in one.kept_by.split("."))] += one.size
    return Sizes(
        found.parameter_count,
        flop["forward"][0],
        flop["backward"][0],
        flop["forward"][1],
        flop["backward"][1],
        kept[True],
        kept[False],
    )


def _attention_back(op: Attention) -> float:
    """FLOP of a backward pass over a sample, which computes the scores again.

    Three products have as many columns as a key, and two as many as a value.
    """
    return 2.0 * op.heads * op.rows * op.length * (3 * op.wide + 2 * op.value)


def of_formula(config: Mapping[str, Any]) -> Sizes:
    """What the catalog says of a `config.json`, with the whole square of all scores, as a trace.

    Attention of a type that transformers has no fused kernel for are products.
    """
    name = str(config["model_type"])
    tree = huggingface.convert(config, name)
    length = {} if name == "vit" else {"seq_len": str(TOKENS)}
    model: Model = load_model(Contents(name, tree), length).value
    apart = "scores" in (tree.get("code") or {})
    job = Workload(
        model,
        micro_batch=SAMPLES,
        keeps=HABITS,
        loss="eager",
        attention="eager" if apart else "flash",
    )
    scores = [op for block in model.blocks for op in block.of(Attention)]
    attention = SAMPLES * sum(replace(op, window=0).flops for op in scores)
    products = SAMPLES * sum(
        b.flops - sum(op.flops for op in b.of(Attention)) for b in model.blocks
    )
    kept = {
        layer: sum(kept_bytes(job, made) for one, made, _ in job.executed if one.is_layer == layer)
        for layer in (True, False)
    }
    return Sizes(
        model.parameters,
        products + attention * apart,
        2 * (products + attention * apart),
        attention * (not apart),
        SAMPLES * sum(map(_attention_back, scores)) * (not apart),
        kept[True],
        kept[False],
    )


def row(case: str) -> dict[str, str]:
    """A row of the table."""
    found = measured(case)
    config, sizes = config_file(case), of_trace(found)
    ours = of_formula(config)
    return {
        "case": case,
        **{name: f"{value:.0f}" for name, value in asdict(sizes).items()},
        "parameters_off": str(ours.parameters - sizes.parameters),
        "flop_off": f"{ours.flop / sizes.flop - 1:.5%}",
        "kept_off": f"{ours.kept / sizes.kept - 1:.2%}",
        "seconds": f"{found.seconds:.1f}",
        "torch": installed("torch"),
        "transformers": installed("transformers"),
        "configuration": json.dumps(config),
    }


def sizes_of(row: Mapping[str, str]) -> Sizes:
    """What the trace of a row counts."""
    return Sizes(**{one.name: int(row[one.name]) for one in fields(Sizes)})


def _kept(path: Path) -> dict[str, dict[str, str]]:
    """Rows of an earlier run."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["case"]: row for row in csv.DictReader(file) if row["case"] in CASES}


def _write(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _options() -> argparse.Namespace:
    command = parser(__doc__, "two cases")
    command.add_argument("--only", default="", help="cases with this text in their names")
    options = command.parse_args()
    if not any(options.only in case for case in CASES):
        command.error(f"--only {options.only}: no case has this in its name")
    return options


def main() -> None:
    """Trace the cases, and write the table."""
    options = _options()
    cases = QUICK if options.quick else [case for case in CASES if options.only in case]
    with folder(options) as out:
        rows = {} if options.quick else _kept(out / NAME)
        for done, case in enumerate(cases, 1):
            rows[case] = row(case)
            print(f"{done} of {len(cases)}: {case}", file=sys.stderr, flush=True)
        _write(out / NAME, [rows[case] for case in CASES if case in rows])
    shown = ("case", "parameters", "parameters_off", "flop_off", "kept_off", "seconds")
    print(table([{name: rows[case][name] for name in shown} for case in cases]))
    print(f"\n{made_by()}")


if __name__ == "__main__":
    main()
