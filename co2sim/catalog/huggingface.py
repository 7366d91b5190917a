"""A Hugging Face `config.json` as a model.

Defaults of a model type are those of its configuration class in github.com/huggingface/transformers
(src/transformers/models/*/configuration_*.py). What changes the cost of a model is taken over or
refused; what does not (rotary embeddings, multipliers, token ids) is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from co2sim.catalog.facts import Tree
from co2sim.common.errors import CatalogError
from co2sim.common.errors import given as shown

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

_ENCODERS = {"bert", "roberta", "xlm-roberta"}
_UNTIED = {
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "internlm2", "olmo", "olmo2", "granite"),
    *("gpt_neox", "gptj"),
}
"""Model types whose `tie_word_embeddings` is false where it is left out."""
_FOURFOLD = {"gpt2", "gptj", "gpt_neo", "bloom"}
"""Model types whose MLP is four times as wide as the model where it is left out."""
_HEAD_DIM = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128}
"""Model types whose heads are not hidden / heads wide where it is left out."""
_DROPOUT = {"gpt2", "opt", *_ENCODERS}
"""Model types that drop activations out where the configuration does not say how many."""
_SPARED = {"roberta": 2, "xlm-roberta": 2}
"""Positions that no token has: they start behind the padding index."""
_WINDOW_IF_ASKED = {"qwen2", "qwen3", "smollm3"}
"""Model types whose `sliding_window` holds only with `use_sliding_window`."""
_WINDOWS = {"gemma2": 4096, "gemma3_text": 4096}
"""Sliding windows of model types that have one where it is left out."""

_REFUSED = {
    "mixtures of experts are not modelled; a dense transformer is expected": (
        *("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
        *("moe_intermediate_size", "n_shared_experts"),
    ),
    "attention through a latent space is not modelled": ("kv_lora_rank", "q_lora_rank"),
    "layers that predict further tokens are not modelled": ("num_nextn_predict_layers",),
    "encoders with decoders, and cross attention, are not modelled": (
        *("is_encoder_decoder", "add_cross_attention"),
    ),
    "quantized weights are not modelled: give the configuration of the model as it is trained": (
        "quantization_config",
    ),
    "layers that share keys and values are not modelled": ("num_kv_shared_layers",),
    "attention within chunks of a sequence is not modelled": ("attention_chunk_size",),
}
"""What changes the cost of a model in a way that is not modelled, by the reason."""

_OFF = ("head_dim", "sliding_window", "positions", "token_types")
"""Numbers of a model that are 0, their default, where they do not apply."""


@dataclass(frozen=True, slots=True)
class _Config:
    """The values of a configuration, checked as they are read."""

    values: Mapping[str, Any]
    path: str
    kind: str

    def whole(self, *keys: str, default: int | None = None, least: int | None = None) -> int:
        """The first of the keys that is there."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise self.error(f"{key} is {shown(value)}; it must be a whole number")
                if least is not None and value < least:
                    raise self.error(f"{key} is {value}; it must be at least {least}")
                return value
        if default is None:
            raise self.error(f"{' or '.join(keys)} is missing")
        return default

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} is {shown(value)}; it must be true or false")
        return value

    def error(self, message: str) -> CatalogError:
        return CatalogError(f"{self.path}: {message}")


def convert(values: Mapping[str, Any], path: str) -> Tree:
    """The model tree of a config. Raises CatalogError for what is not a dense transformer."""
    for reason, keys in _REFUSED.items():
        given = [key for key in keys if values.get(key)]
        if given:
            raise CatalogError(f"{path}: {given[0]} is {shown(values[given[0]])}; {reason}")
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _GATED | _PLAIN:
        raise CatalogError(
            f"{path}: model_type {shown(kind)} is not known; known:"
            f" {', '.join(sorted(_GATED | _PLAIN))} (or write the model as TOML)"
        )
    config = _Config(values, path, kind)
    for key in ("torch_dtype", "dtype"):
        if str(values.get(key)).startswith("float8"):
            raise config.error(
                f"{key} is {shown(values[key])}; fp8 is not in the catalog: give the configuration"
                " of the model as it is trained in bf16, fp16 or fp32"
            )
    tree = _body(config) | (_vision(config) if kind == "vit" else _language(config))
    return {key: value for key, value in tree.items() if value != 0 or key not in _OFF}


def _name(config: _Config) -> str:
    """What the file calls the model, or the folder or file that it is in: not "config.json"."""
    given, place = config.values.get("_name_or_path"), Path(config.path)
    if given and isinstance(given, str):
        return given
    if place.is_dir():
        return place.resolve().name
    return place.stem if place.stem != "config" else place.resolve().parent.name


def _body(config: _Config) -> Tree:
    kind = config.kind
    hidden = config.whole("hidden_size", "n_embd", "d_model")
    heads = config.whole("num_attention_heads", "n_head", "num_heads")
    if config.whole("word_embed_proj_dim", default=hidden) != hidden:
        raise config.error("embeddings narrower than the model (word_embed_proj_dim): not modelled")
    wide = 4 * hidden if kind in _FOURFOLD else None
    gated_norm = "none" if kind == "olmo" else "rmsnorm"  # of OLMo without parameters
    return {
        "name": _name(config),
        "source": f"Hugging Face configuration {config.path}",
        "layers": config.whole("num_hidden_layers", "n_layer", "num_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.whole("num_key_value_heads", default=heads, least=1),
        "head_dim": config.whole("head_dim", default=_HEAD_DIM.get(kind, 0), least=1),
        "ffn": config.whole("intermediate_size", "ffn_dim", "n_inner", default=wide),
        "gated": kind in _GATED,
        "causal": kind not in {*_ENCODERS, "vit"},
        "dropout": _dropout(config),
        "bias": _bias(config),
        "norm": gated_norm if kind in _GATED else "layernorm",
    }


def _bias(config: _Config) -> bool | str:
    """Which matrices have biases: all, none, or those of one kind."""
    kind = config.kind
    if kind == "vit" and not config.flag("qkv_bias", default=True):
        raise config.error("qkv_bias is false; a vision transformer without it is not modelled")
    if kind == "qwen2":  # has no option for it
        return "qkv"
    attention = config.flag("attention_bias", default=kind not in _GATED and kind != "gptj")
    mlp = config.flag("mlp_bias", default=kind not in _GATED)
    if kind == "opt":
        attention = mlp = config.flag("enable_bias", default=True)
    if attention != mlp:
        return "attention" if attention else "mlp"
    return attention


def _dropout(config: _Config) -> bool:
    """Whether a layer drops some of its outputs out."""
    keys = ("resid_pdrop", "hidden_dropout_prob", "hidden_dropout", "resid_dropout", "dropout")
    given = next((config.values[key] for key in keys if config.values.get(key) is not None), None)
    return config.kind in _DROPOUT if given is None else bool(given)


def _vision(config: _Config) -> Tree:
    labels = config.values.get("id2label")
    return {
        "kind": "vit",
        "image": config.whole("image_size"),
        "patch": config.whole("patch_size"),
        "channels": config.whole("num_channels", default=3),
        "classes": config.whole(
            "num_labels", default=len(labels) if isinstance(labels, dict) else 1000
        ),
    }


def _language(config: _Config) -> Tree:
    kind = config.kind
    encoder = kind in _ENCODERS
    learned = kind in {"gpt2", "gpt_neo", "opt"} or encoder
    keys = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
    known = any(config.values.get(key) is not None for key in keys)
    longest = config.whole(*keys, default=None if learned else 2048)
    length, why = longest - _SPARED.get(kind, 0), "the longest that the model allows"
    if not known:
        why = "the configuration does not say how long a sequence may be"
    window = _window(config)
    if 0 < window < length:
        length, why = window, "the sliding window: longer sequences are not modelled"
    return {
        "kind": "transformer",
        "vocab": config.whole("vocab_size"),
        "seq_len": {
            "value": length,
            "source": f"{why}; set model.seq_len to yours",
            "assumed": True,
        },
        "sliding_window": window,
        "tied": config.flag("tie_word_embeddings", default=kind not in _UNTIED),
        "positions": longest + (2 if kind == "opt" else 0) if learned else 0,
        "token_types": config.whole("type_vocab_size", default=1) if encoder else 0,
        "embedding_norm": encoder or kind == "bloom",
        "head_transform": encoder,
    }


def _window(config: _Config) -> int:
    """How far a token sees in some layer, where that is less than everything; else 0."""
    if config.kind == "gpt_neo":
        layers = config.values.get("attention_types", config.values.get("attention_layers"))
        local = layers is None or "local" in repr(layers)
        return config.whole("window_size", default=256) if local else 0
    types = config.values.get("layer_types")
    if types is None:
        types = []
    if not isinstance(types, list):
        raise config.error(f"layer_types is {shown(types)}; it must be a list")
    other = [one for one in types if one not in ("full_attention", "sliding_attention")]
    if other:
        raise config.error(f"layer_types holds {shown(other[0])}, which is not modelled")
    if types and "sliding_attention" not in types:
        return 0
    usual = bool(types) or config.kind not in _WINDOW_IF_ASKED
    if not config.flag("use_sliding_window", default=usual):
        return 0
    return config.whole("sliding_window", default=_WINDOWS.get(config.kind, 0))
