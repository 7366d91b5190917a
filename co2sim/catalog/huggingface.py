"""A Hugging Face `config.json` as a model."""

from collections.abc import Mapping
from typing import Any

from co2sim.catalog.facts import Tree
from co2sim.errors import CatalogError

_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_intermediate_size")

_GATED = {
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text",
    "phi3", "internlm2", "olmo", "olmo2",
    "smollm3", "granite",
}  # fmt: skip
"""Model types with a gated MLP, RMSNorm, no learned positions; biases only if it says so."""

_PLAIN = {
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "opt",
    "bert",
    "roberta",
    "xlm-roberta",
    "bloom",
    "gptj",
    "vit",
}
"""Model types with a two-matrix MLP, LayerNorm and biases."""


def convert(config: Mapping[str, Any], path: str) -> Tree:
    """The model tree of a config. Raises CatalogError for kinds that are not dense transformers."""
    kind = config.get("model_type")
    if any(config.get(key) for key in _EXPERTS):
        raise CatalogError(
            f"{path}: mixtures of experts are not modelled; a dense transformer is expected"
        )
    if not isinstance(kind, str) or kind not in _GATED | _PLAIN:
        raise CatalogError(
            f"{path}: model_type {kind!r} is not known; known: {', '.join(sorted(_GATED | _PLAIN))}"
            " (or write the model as TOML)"
        )
    gated = kind in _GATED

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            value = config.get(key)
            if value is not None:
                return _whole(value, key, path)
        if default is None:
            raise CatalogError(f"{path}: {' or '.join(keys)} is missing")
        return default

    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head", "num_heads")
    tree: Tree = {
        "name": str(config.get("_name_or_path") or path),
        "source": f"Hugging Face configuration {path}",
        "layers": number("num_hidden_layers", "n_layer", "num_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": number("num_key_value_heads", default=heads),
        "head_dim": number("head_dim", default=0),
        "ffn": number("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        "gated": gated,
        "bias": bool(config.get("attention_bias") and config.get("mlp_bias")) if gated else True,
        "norm": "rmsnorm" if gated else "layernorm",
    }
    if kind == "vit":
        labels = config.get("id2label")
        vision = {
            "kind": "vit",
            "image": number("image_size"),
            "patch": number("patch_size"),
            "channels": number("num_channels", default=3),
            "classes": number(
                "num_labels", default=len(labels) if isinstance(labels, dict) else 1000
            ),
        }
        return tree | vision
    longest = number("max_position_embeddings", "n_positions", "n_ctx", "seq_length", default=2048)
    encoder = kind in {"bert", "roberta", "xlm-roberta"}
    learned = kind in {"gpt2", "gpt_neo", "opt"} or encoder
    spare = {"roberta": 2, "xlm-roberta": 2}.get(
        str(kind), 0
    )  # positions start behind the padding index
    text = {
        "kind": "transformer",
        "vocab": number("vocab_size"),
        "seq_len": {
            "value": longest - spare,
            "source": "the longest that the model allows; set model.seq_len to yours",
            "assumed": True,
        },
        "tied": bool(
            config.get(
                "tie_word_embeddings",
                kind not in {"llama", "mistral", "qwen2", "qwen3", "gpt_neox"},
            )
        ),
        "positions": longest + (2 if kind == "opt" else 0) if learned else 0,
        "token_types": number("type_vocab_size", default=1) if encoder else 0,
        "embedding_norm": encoder or kind == "bloom",
        "head_transform": encoder,
    }
    return tree | text


def _whole(value: object, key: str, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CatalogError(f"{path}: {key} is {value!r}; it must be a whole number")
    return value
