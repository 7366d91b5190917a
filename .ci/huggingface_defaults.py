"""Write what the configuration classes of transformers say where a `config.json` does not.

Model types and keys are those that co2sim reads; `tests/co2sim/catalog/test_huggingface.py` says
when it has to be run again.
"""

import json
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from co2sim.catalog import huggingface

KEYS = (
    *("hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "num_layers"),
    *("num_attention_heads", "n_head", "num_heads", "vocab_size", "ffn_dim", "word_embed_proj_dim"),
    *("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "do_layer_norm_before"),
    *("image_size", "patch_size", "num_channels", "qkv_bias", "window_size"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "n_inner", "tie_word_embeddings"),
    *("attention_bias", "attention_out_bias", "mlp_bias", "use_qk_norm", "enable_bias", "use_bias"),
    *("sliding_window", "use_sliding_window", "max_window_layers"),
    *("n_routed_experts", "num_local_experts", "num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts"),
    *("n_group", "topk_group"),
    *("first_k_dense_replace", "decoder_sparse_step", "type_vocab_size"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
PLACE = Path(huggingface.__file__).with_name("huggingface_defaults.json")


def defaults() -> dict[str, dict[str, Any]]:
    """By model type; null is what the class has, but computes from other values."""
    found = {}
    for kind in sorted(huggingface.FAMILIES):
        if kind in CONFIG_MAPPING:
            made = CONFIG_MAPPING[kind]
            pairs = [*made.attribute_map.items(), *((key, key) for key in KEYS)]
            names = {
                one: name for pair in pairs for one in pair for name in pair if hasattr(made, name)
            }
            given = {key: getattr(made, names[key]) for key in KEYS if key in names}
            found[kind] = {
                key: value for key, value in given.items() if isinstance(value, bool | int | None)
            }
    return found


if __name__ == "__main__":
    PLACE.write_text(json.dumps(defaults(), indent=1) + "\n")
