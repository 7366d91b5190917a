"""A Hugging Face `config.json` as a model.

Values that a file leaves out are those of its configuration class in transformers
(`huggingface_defaults.json`, written by `.ci/huggingface_defaults.py`). What changes the cost of a
model is taken over or refused; what does not (rotary embeddings, multipliers, token ids) is left
out, and so is how published weights are stored (`quantization_config`), and layers that predict
further tokens, which transformers does not build.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from co2sim.catalog.facts import Tree
from co2sim.common.errors import CatalogError
from co2sim.common.errors import given as shown

_Biases = Literal["option", "qkv option", "qkv", "no"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What the code of a model type fixes, whatever a configuration says.

    `biases` are those of attention: as `attention_bias` says, for all of its matrices or but the
    last, always but the last, or never; `bias_key` is that of all matrices. `heads_norm` is a norm
    of queries and keys; "option": where `use_qk_norm` says so. One layer in
    `full_every` sees all tokens, the others a window. `tied`: embedding and head share weights
    where neither file nor class says it.
    """

    gated: bool = True
    norm: str = "rmsnorm"
    norms: int = 2
    heads_norm: str = "none"
    biases: _Biases = "option"
    bias_key: str = ""
    sinks: bool = False
    head_bias: bool = False
    full_every: int = 1
    shared_gate: bool = False
    expert_bias: bool = False
    tied: bool = True


_PLAIN_LAYERS = _Family(gated=False, norm="layernorm")
_PARALLEL = _Family(gated=False, norm="layernorm", norms=1, head_bias=True)

FAMILIES: Mapping[str, _Family] = {
    **dict.fromkeys(("llama", "smollm3", "granite", "granitemoe"), _Family()),
    "internlm2": _Family(tied=False),
    **dict.fromkeys(("mistral", "mixtral", "phi3", "gemma", "seed_oss"), _Family()),
    "olmo": _Family(norm="none"),
    "olmo2": _Family(heads_norm="whole"),
    "olmo3": _Family(heads_norm="whole", full_every=4),
    "olmoe": _Family(heads_norm="whole"),
    "gemma2": _Family(norms=4, full_every=2),
    "gemma3_text": _Family(norms=4, heads_norm="head", full_every=6),
    "qwen2": _Family(biases="qkv"),
    "qwen2_moe": _Family(biases="qkv", shared_gate=True),
    "qwen3": _Family(heads_norm="head"),
    "qwen3_moe": _Family(heads_norm="head"),
    "glm": _Family(biases="qkv option"),
    "glm4": _Family(biases="qkv option", norms=4),
    "glm4_moe": _Family(biases="qkv option", heads_norm="option head"),
    "deepseek_v3": _Family(biases="no"),
    "gpt_oss": _Family(sinks=True, full_every=2, expert_bias=True),
    "minimax_m2": _Family(biases="no", heads_norm="whole"),
    "exaone4": _Family(biases="no", heads_norm="head", full_every=4),
    "ernie4_5": _Family(bias_key="use_bias"),
    "cohere": _Family(norms=1, heads_norm="option whole"),
    "cohere2": _Family(norms=1, full_every=4),
    "arcee": _Family(gated=False),
    "starcoder2": _Family(gated=False, norm="layernorm", bias_key="use_bias"),
    **dict.fromkeys(("gpt2", "gpt_neo", "gpt_neox", "bloom", "vit"), _PLAIN_LAYERS),
    "opt": _Family(gated=False, norm="layernorm", bias_key="enable_bias"),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), _PLAIN_LAYERS),
    **dict.fromkeys(("gptj", "phi"), _PARALLEL),
}

_NORMS_IN_FP32 = {"norms": 3}
_COPIED = {"copies": 1}
_CODE: Mapping[str, Tree] = {
    **dict.fromkeys(("gemma", "gemma3_text", "olmo2", "olmo3"), _NORMS_IN_FP32),
    "gemma2": _NORMS_IN_FP32 | {"scores": 4},
    "cohere": {"norms": 5},
    "cohere2": {"norms": 5},
    "olmo": {"norms": 1},
    **dict.fromkeys(("glm", "glm4", "minimax_m2", "phi"), _COPIED),
    "glm4_moe": _COPIED | {"wide_router": True},
    **dict.fromkeys(("gpt_neox", "phi3"), _COPIED | {"merged": True}),
    "deepseek_v3": {"wide_router": True},
    "gpt_oss": _NORMS_IN_FP32 | {"scores": 1, "function": 3},
    "bloom": {"scores": 3},
    "gptj": {"scores": 3, "copies": 2},
    "gpt_neo": {"scores": 3, "copies": 2},
}
"""What eager code keeps where it is not Llama's: fields of `transformer.Code`.

Of norms: products of numbers in fp32 with their weights; a copy in fp32 of the input alone (olmo);
LayerNorm made of single operators (cohere). Of scores: a softmax in fp32 and its copy in 16 bits,
and the scores that are capped (gemma2). Source: transformers 5.23, models/*/modeling_*.py."""
_FUNCTIONS = {"gelu_new": 3, "gelu_fast": 3, "relu": -1}
"""What functions between the products of an MLP keep beside input and output: GELU made of single
operators keeps three of them, ReLU no input."""
_USUAL_FUNCTION = {
    **dict.fromkeys(("gpt2", "gptj", "gpt_neo", "phi"), "gelu_new"),
    "opt": "relu",
}

_ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types whose code is that of another one."""
_WRAPPED = {"gemma3": "gemma3_text"}
"""Model types that hold a language model among others, by what that is."""
_OF_ALL = ("_name_or_path", "architectures", "id2label", "num_labels", "tie_word_embeddings")
"""What a file of such a type says beside its `text_config`, for all of its parts."""

_HEADS = {
    "decoder": {
        **dict.fromkeys(("ForCausalLM", "LMHeadModel"), "vocabulary"),
        "ForSequenceClassification": "scores",
        "ForTokenClassification": "labels",
        "ForQuestionAnswering": "answers",
        "ForConditionalGeneration": "vocabulary",
        "Model": "none",
    },
    "encoder": {
        "ForMaskedLM": "vocabulary",
        "ForSequenceClassification": "pooled labels",
        **dict.fromkeys(("ForTokenClassification", "ForQuestionAnswering"), "labels"),
        "Model": "pooled",
    },
    "vit": {"ForImageClassification": "labels", "Model": "pooled"},
}
"""What a class of transformers computes from its last layer, by the end of its name; the first of
each is that of a file without `architectures`."""

_ENCODERS = {"bert", "roberta", "xlm-roberta"}
_FOURFOLD = {"gpt2", "gptj", "gpt_neo", "bloom"}
"""Model types whose MLP is four times as wide as the model where it is left out."""
_DROPOUT = {"gpt2", "opt", "seed_oss", *_ENCODERS}
"""Model types that drop activations out where the configuration does not say how many."""
_SPARED = {"roberta": 2, "xlm-roberta": 2}
"""Positions that no token has: they start behind the padding index."""
_WINDOW_IF_ASKED = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}
"""Model types whose `sliding_window` holds only with `use_sliding_window`."""

_REFUSED = {
    "encoders with decoders, and cross attention, are not modelled": (
        *("is_encoder_decoder", "add_cross_attention"),
    ),
    "layers that share keys and values are not modelled": ("num_kv_shared_layers",),
    "attention within chunks of a sequence is not modelled": ("attention_chunk_size",),
    "layers without attention are not read: write the model as TOML, with [scan]": (
        "linear_num_key_heads",
        "mamba_d_state",
    ),
    "norms of queries and keys with biases are not modelled": ("qk_layernorm",),
    "a model without its last norm is not modelled": ("_remove_final_layer_norm",),
}
"""What changes the cost of a model in a way that is not modelled, by the reason."""

_USUAL: Mapping[str, Any] = {
    **dict.fromkeys(("positions", "token_types", "head_dim"), 0),
    **dict.fromkeys(("sinks", "head_bias", "head_transform", "pooler"), False),
    "final_norm": True,
    "labels": None,
    "norms": 2,
    "qk_norm": "none",
    "windows": [],
    "latent": None,
    "experts": None,
    "parallel": False,
    "code": None,
}
"""What a file of the catalog leaves out: the defaults."""


@cache
def _defaults() -> Mapping[str, Mapping[str, Any]]:
    """Values of the configuration classes of transformers, by model type."""
    text = (
        resources.files("co2sim.catalog").joinpath("huggingface_defaults.json").read_text("utf-8")
    )
    defaults: Mapping[str, Mapping[str, Any]] = json.loads(text)
    return defaults


@dataclass(frozen=True, slots=True)
class _Config:
    """The values of a configuration, checked as they are read."""

    values: Mapping[str, Any]
    path: str
    kind: str

    @property
    def family(self) -> _Family:
        return FAMILIES[self.kind]

    @property
    def own(self) -> Mapping[str, Any]:
        """What the class of the type has, with its defaults; None for what it computes."""
        return _defaults().get(self.kind, {})

    def get(self, key: str) -> Any:
        """What the file says, else what the class of its type says; None for nothing."""
        return self.values.get(key, self.own.get(key))

    def whole(self, *keys: str, default: int | None = None, least: int | None = None) -> int:
        """The first of the keys that the file has, else that of the class: null is none of it.

        A key that the class of the type lacks stands for nothing where it has another one.
        """
        keys = tuple(key for key in keys if key in self.own) or keys
        for key in [key for key in keys if key in self.values] or keys:
            value = self.get(key)
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
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} is {shown(value)}; it must be true or false")
        return value

    def list_of(self, key: str) -> list[Any]:
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(f"{key} is {shown(value)}; it must be a list")
        return value

    def error(self, message: str) -> CatalogError:
        return CatalogError(f"{self.path}: {message}")


def is_known(values: Mapping[str, Any]) -> bool:
    """Whether `convert` reads the model type of a config."""
    return str(values.get("model_type")) in {*FAMILIES, *_ALIASES, *_WRAPPED}


def convert(values: Mapping[str, Any], path: str) -> Tree:
    """The model tree of a config. Raises CatalogError for what is not modelled."""
    model_type = values.get("model_type")
    kind = _ALIASES.get(model_type, model_type) if isinstance(model_type, str) else ""
    if kind in _WRAPPED:
        text = values.get("text_config")
        if not isinstance(text, Mapping | None):
            raise CatalogError(f"{path}: text_config is {shown(text)}; it must be a table")
        of_all = {key: values.get(key) for key in _OF_ALL}
        values, kind = {**(text or {}), **of_all}, _WRAPPED[kind]
    for reason, keys in _REFUSED.items():
        present = [key for key in keys if values.get(key)]
        if present:
            raise CatalogError(f"{path}: {present[0]} is {shown(values[present[0]])}; {reason}")
    if kind not in FAMILIES:
        raise CatalogError(
            f"{path}: model_type {shown(model_type)} is not known; known:"
            f" {', '.join(sorted({*FAMILIES, *_ALIASES, *_WRAPPED}))} (or write the"
            " model as TOML, or install torch and transformers, whose class is then traced)"
        )
    config = _Config(values, path, kind)
    tree = _body(config) | (_vision(config) if kind == "vit" else _language(config))
    return {key: value for key, value in tree.items() if key not in _USUAL or value != _USUAL[key]}


def name_of(values: Mapping[str, Any], reference: str) -> str:
    """What the file calls the model, or the folder or file that it is in: not "config.json"."""
    name, path = values.get("_name_or_path"), Path(reference)
    if name and isinstance(name, str):
        return name
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.stem != "config" else path.resolve().parent.name


def _body(config: _Config) -> Tree:
    kind, family = config.kind, config.family
    older = kind == "bloom" and config.get("n_embed") is not None
    hidden = config.whole("n_embed") if older else config.whole("hidden_size", "n_embd", "d_model")
    heads = config.whole("num_attention_heads", "n_head", "num_heads", least=1)
    if config.whole("word_embed_proj_dim", default=hidden) != hidden:
        raise config.error("embeddings narrower than the model (word_embed_proj_dim): not modelled")
    wide = 4 * hidden if kind in _FOURFOLD else None
    experts = _experts(config)
    least_wide = experts["width"] if experts else None  # no layer has another MLP
    norm_of_heads = family.heads_norm.removeprefix("option ")
    if norm_of_heads != family.heads_norm and not config.flag("use_qk_norm"):
        norm_of_heads = "none"
    if norm_of_heads == "whole" and hidden % heads and config.get("head_dim") is None:
        raise config.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return {
        "name": name_of(config.values, config.path),
        "source": f"Hugging Face configuration {config.path}",
        "layers": config.whole("num_hidden_layers", "n_layer", "num_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads  # latent attention has no others
        if kind == "deepseek_v3"
        else config.whole("num_key_value_heads", default=heads, least=1),
        "head_dim": config.whole(
            "head_dim", default=hidden // heads if hidden % heads else 0, least=1
        ),
        "ffn": config.whole("intermediate_size", "ffn_dim", "n_inner", default=wide or least_wide),
        "gated": family.gated,
        "causal": kind not in {*_ENCODERS, "vit"},
        "dropout": _dropout(config),
        "bias": _bias(config),
        "norm": family.norm
        if config.flag("layer_norm_elementwise_affine", default=True)
        else "none",
        "norms": family.norms,
        "qk_norm": norm_of_heads,
        "sinks": family.sinks,
        "latent": _latent(config),
        "experts": experts,
        "parallel": kind == "gpt_neox" and config.flag("use_parallel_residual", default=True),
        "code": _code(config),
    }


def _code(config: _Config) -> Tree | None:
    """What eager code of the type keeps, where it is not Llama's."""
    keys = "activation_function", "hidden_act"
    named = next((config.values[key] for key in keys if config.values.get(key)), None)
    function = _FUNCTIONS.get(str(named or _USUAL_FUNCTION.get(config.kind)), 0)
    code = _CODE.get(config.kind, {})
    if config.kind == "gemma2" and config.values.get("attn_logit_softcapping", True) is None:
        code = code | {"scores": 3}
    return {**code, **({"function": function} if function else {})} or None


def _latent(config: _Config) -> Tree | None:
    if config.kind != "deepseek_v3":
        _refuse(config, ("kv_lora_rank", "q_lora_rank"), "latent attention")
        return None
    if config.flag("attention_bias"):
        raise config.error("attention_bias is true; latent attention with biases is not modelled")
    return {
        "kv_rank": config.whole("kv_lora_rank"),
        "q_rank": config.whole("q_lora_rank", default=0),
        "nope": config.whole("qk_nope_head_dim"),
        "rope": config.whole("qk_rope_head_dim"),
        "value": config.whole("v_head_dim"),
    }


def _refuse(config: _Config, keys: Iterable[str], what: str) -> None:
    """What a file asks for that models of its type do not have."""
    for key in keys:
        if config.values.get(key):
            raise config.error(
                f"{key} is {shown(config.values[key])}; a model of type {config.kind} has no {what}"
            )


def _experts(config: _Config) -> Tree | None:
    """The mixture of experts; None for a model without."""
    names = "n_routed_experts", "num_local_experts", "num_experts"
    if not any(name in config.own for name in names):
        _refuse(config, names, "experts")
        return None
    count = config.whole(*names, default=0)
    if not count:
        return None
    skipped = config.list_of("mlp_only_layers")
    first = len(skipped)
    if skipped != list(range(first)):
        raise config.error(
            f"mlp_only_layers is {shown(skipped)}; layers without experts are modelled before all"
            " others only (first_k_dense_replace), and in turn (decoder_sparse_step)"
        )
    keys = config.own  # what code of other types ignores
    narrow = "moe_intermediate_size"
    width = config.whole(narrow if narrow in keys else "intermediate_size")
    wide = "shared_expert_intermediate_size"
    shared = config.whole(wide, default=0) if wide in keys else 0
    many = config.whole("n_shared_experts", default=0) if "n_shared_experts" in keys else 0
    groups = config.whole("n_group", default=1) if "n_group" in keys else 1
    experts = {
        "count": count,
        "active": config.whole("num_experts_per_tok"),
        "width": width,
        "shared": shared or width * many,
        "shared_gate": config.family.shared_gate,
        "dense": max(first, config.whole("first_k_dense_replace", default=0)),
        "every": config.whole("decoder_sparse_step", default=1, least=1),
        "bias": config.family.expert_bias,
        "groups": groups,
        "active_groups": config.whole("topk_group", default=groups) if "topk_group" in keys else 1,
    }
    usual = {"shared": 0, "shared_gate": False, "dense": 0, "every": 1, "bias": False}
    usual |= {"groups": 1, "active_groups": 1}
    return {name: value for name, value in experts.items() if usual.get(name) != value}


def _bias(config: _Config) -> bool | str:
    """Which matrices have biases: all, none, or those of one kind."""
    kind, biases = config.kind, config.family.biases
    plain = not config.family.gated
    if kind == "vit" and not config.flag("qkv_bias", default=True):
        raise config.error("qkv_bias is false; a vision transformer without it is not modelled")
    if biases == "qkv":
        return "qkv" if "qkv_bias" not in config.own or config.flag("qkv_bias") else False
    attention = biases != "no" and config.flag("attention_bias", default=plain and kind != "gptj")
    if biases == "qkv option" or kind == "seed_oss":
        last = kind == "seed_oss" and config.flag("attention_out_bias")
        if last != attention:
            _refuse(config, ("mlp_bias",), "biases of an MLP where attention has some too")
            return "qkv" if attention else False
    mlp = config.flag("mlp_bias", default=plain)
    if config.family.bias_key:
        attention = mlp = config.flag(config.family.bias_key, default=True)
    if kind == "gpt_neo":
        return "not_qkv"
    if attention != mlp:
        return "attention" if attention else "mlp"
    return attention


def _dropout(config: _Config) -> bool:
    """Whether a layer drops some of its outputs out."""
    keys = (
        *("resid_pdrop", "hidden_dropout_prob", "hidden_dropout", "resid_dropout", "dropout"),
        "residual_dropout",
    )
    dropout = next((config.values[key] for key in keys if config.values.get(key) is not None), None)
    return config.kind in _DROPOUT if dropout is None else bool(dropout)


def _task(config: _Config) -> str:
    """What the class that a file names computes from its last layer, as `_HEADS` has it."""
    kind, classes = config.kind, config.values.get("architectures")
    heads = _HEADS["vit" if kind == "vit" else "encoder" if kind in _ENCODERS else "decoder"]
    if classes is None or classes == []:
        return next(iter(heads.values()))
    types = {_letters(kind), _letters(kind.removesuffix("_text"))}
    tasks = set()
    for name in classes if isinstance(classes, list) else [classes]:
        match = re.fullmatch(rf"(.+?)({'|'.join(heads)})", str(name), re.ASCII)
        if match is None or _letters(match[1]) not in types:
            raise config.error(
                f"architectures holds {shown(name)}, which is not modelled; modelled are classes of"
                f" {config.kind} that end with {', '.join(heads)} (or write the model as TOML)"
            )
        tasks.add(heads[match[2]])
    if len(tasks) > 1:
        raise config.error(f"architectures is {shown(classes)}; give one class")
    return tasks.pop()


def _letters(name: str) -> str:
    """A model type, or the name of its class, without what they write otherwise."""
    return re.sub(r"[-_]", "", name).lower()


def _labels(config: _Config) -> int:
    """How many labels a classifier has: those that are named, else their number, else two."""
    named = config.values.get("id2label")
    if named is None:
        return config.whole("num_labels", default=2, least=1)
    if not isinstance(named, Mapping) or not named:
        raise config.error(f"id2label is {shown(named)}; it must be a table of labels")
    return len(named)


def _head(config: _Config) -> Tree:
    """The last block of a language model."""
    kind, task = config.kind, _task(config)
    encoder = kind in _ENCODERS
    head: Tree
    if task == "vocabulary":
        tied = config.flag("tie_word_embeddings", default=config.family.tied)
        if encoder and not tied:
            raise config.error("tie_word_embeddings is false; it is modelled for decoders only")
        head = {
            "tied": tied,
            "head_transform": encoder,
            "head_bias": config.family.head_bias,
        }
    elif task in {"none", "pooled"}:
        head = {"labels": 0, "pooler": task == "pooled"}
    else:
        two = task == "answers" and kind != "gptj"
        head = {
            "labels": 2 if two else _labels(config),
            "pooler": task == "pooled labels",
            "head_bias": task != "scores",
        }
    normed = not encoder and config.flag("do_layer_norm_before", default=True)
    return {**head, "final_norm": normed or (task == "vocabulary" and encoder)}


def _vision(config: _Config) -> Tree:
    if _task(config) == "labels":
        classes = _labels(config)
    else:  # a dense layer for the first token
        classes = config.whole("pooler_output_size", "hidden_size")
    return {
        "kind": "vit",
        "image": config.whole("image_size"),
        "patch": config.whole("patch_size"),
        "channels": config.whole("num_channels", default=3),
        "classes": classes,
    }


def _language(config: _Config) -> Tree:
    kind = config.kind
    encoder = kind in _ENCODERS
    learned = kind in {"gpt2", "gpt_neo", "opt"} or encoder
    keys = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
    stated = any(config.values.get(key) is not None for key in keys)
    longest = config.whole(*keys, default=None if learned else 2048)
    why = "the longest that the model allows"
    if not stated:
        why = "the configuration does not say how long a sequence may be"
    return {
        "kind": "transformer",
        "vocab": config.whole("vocab_size"),
        "seq_len": {
            "value": longest - _SPARED.get(kind, 0),
            "source": f"{why}; set model.seq_len to yours",
            "assumed": True,
        },
        "windows": _windows(config),
        "positions": longest + (2 if kind == "opt" else 0) if learned else 0,
        "token_types": config.whole("type_vocab_size", default=1) if encoder else 0,
        "embedding_norm": encoder or kind == "bloom",
        **_head(config),
    }


def _windows(config: _Config) -> list[int]:
    """How many tokens a token sees in the layers in turn (0: all); none where it is all in all."""
    if config.kind == "gpt_neo":
        layers = config.values.get("attention_types", config.values.get("attention_layers"))
        local = layers is None or "local" in repr(layers)
        return [0, config.whole("window_size", default=256)] if local else []
    window = _window(config)
    types = config.list_of("layer_types")
    other = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if other:
        raise config.error(f"layer_types holds {shown(other[0])}, which is not modelled")
    if not window or (types and "sliding_attention" not in types):
        return []
    if types:
        return [window if kind == "sliding_attention" else 0 for kind in types]
    pattern = config.whole("sliding_window_pattern", default=config.family.full_every, least=1)
    if config.kind in _WINDOW_IF_ASKED:
        layers = config.whole("num_hidden_layers")
        first = config.whole("max_window_layers", default=0)
        return [0 if layer < first else window for layer in range(layers)]
    return [window] * (pattern - 1) + [0] if pattern > 1 else [window]


def _window(config: _Config) -> int:
    """The size of sliding windows; 0 where there are none."""
    usual = config.kind not in _WINDOW_IF_ASKED or bool(config.list_of("layer_types"))
    if not config.flag("use_sliding_window", default=usual):
        return 0
    return config.whole("sliding_window", default=0)
