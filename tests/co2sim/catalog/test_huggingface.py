"""Hugging Face configurations: published sizes, and what changes the cost is never ignored."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from co2sim.catalog import load_model
from co2sim.common.errors import CatalogError, Co2simError

Run = Callable[..., tuple[int, str, str]]

MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}
QWEN = MISTRAL | {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
PHI = MISTRAL | {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "sliding_window": 2047,
}
SMOLLM = MISTRAL | {
    "model_type": "smollm3",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 36,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": ["full_attention"] * 36,
    "tie_word_embeddings": True,
}
OLMO = MISTRAL | {
    "model_type": "olmo",
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "sliding_window": None,
}
OPT = {
    "model_type": "opt",
    "hidden_size": 2048,
    "ffn_dim": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 2048,
}
NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "vocab_size": 50432,
    "max_position_embeddings": 2048,
}
NEO = OPT | {"model_type": "gpt_neo", "num_layers": 24, "window_size": 256}


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
LLAMA3 = LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_inner": None,
    "n_positions": 1024,
    "vocab_size": 50257,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
}


def written(folder: Path, config: object) -> str:
    """The path of a `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


RELEASED: list[tuple[dict[str, Any], int, int]] = [
    (MISTRAL, 7_241_732_096, 4096),
    (QWEN, 7_615_616_512, 131072),
    (PHI, 3_821_079_552, 2047),
    (SMOLLM, 3_075_098_624, 65536),
    (OLMO, 6_888_095_744, 2048),
    (OPT, 1_315_758_080, 2048),
    (NEOX, 20_554_567_680, 2048),
    (LLAMA, 6_738_415_616, 2048),
    (LLAMA3, 8_030_261_248, 8192),
    (GPT2, 124_439_808, 1024),
    (BERT, 109_514_298, 512),
    (VIT, 86_567_656, 1),
]


def test_parameters_are_those_of_the_release(tmp_path: Path) -> None:
    """Exact counts of published checkpoints: biases of queries only, norms without parameters."""
    for config, parameters, tokens in RELEASED:
        model = load_model(written(tmp_path, config)).value
        assert (model.parameters, model.tokens) == (parameters, tokens), config["model_type"]
        assert model.unit == ("image" if config is VIT else "token")


def test_a_sequence_beyond_the_window_is_refused(tmp_path: Path) -> None:
    """Attention in a window costs less than is modelled: longer sequences are an error."""
    path = written(tmp_path, MISTRAL)
    assert load_model(path, {"seq_len": "2048"}).value.tokens == 2048
    with pytest.raises(CatalogError, match=r"8192.* 4096"):
        load_model(path, {"seq_len": "8192"})


@pytest.mark.parametrize(
    ("config", "changes", "token"),
    [
        (MISTRAL, {"tie_word_embeddings": "yes"}, "true or false"),
        (MISTRAL, {"attention_bias": 1}, "true or false"),
        (MISTRAL, {"use_sliding_window": "no"}, "true or false"),
        (MISTRAL, {"num_experts": 8}, "mixtures of experts"),
        (MISTRAL, {"n_routed_experts": 64}, "mixtures of experts"),
        (MISTRAL, {"model_type": "mixtral", "num_local_experts": 8}, "mixtures of experts"),
        (MISTRAL, {"model_type": "mamba"}, "'mamba'"),
        (MISTRAL, {"model_type": None}, "model_type None"),
        (MISTRAL, {"kv_lora_rank": 512}, "latent"),
        (MISTRAL, {"num_nextn_predict_layers": 1}, "further tokens"),
        (MISTRAL, {"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        (MISTRAL, {"add_cross_attention": True}, "cross attention"),
        (MISTRAL, {"layer_types": ["linear_attention"]}, "'linear_attention'"),
        (MISTRAL, {"layer_types": "full_attention"}, "must be a list"),
        (MISTRAL, {"layer_types": [["a"], {"b": 1}]}, "['a']"),
        (MISTRAL, {"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
        (MISTRAL, {"dtype": "float8_e5m2"}, "'float8_e5m2'"),
        (MISTRAL, {"hidden_size": 10**9}, "at most 1e+15"),
        (MISTRAL, {"hidden_size": "big"}, "'big'"),
        (MISTRAL, {"hidden_size": None}, "hidden_size or n_embd"),
        (MISTRAL, {"num_hidden_layers": True}, "whole number"),
        (MISTRAL, {"num_hidden_layers": 0}, "layers"),
        (MISTRAL, {"num_attention_heads": 0}, "heads"),
        (MISTRAL, {"sliding_window": "wide"}, "'wide'"),
        (MISTRAL, {"intermediate_size": None}, "ffn_dim or n_inner"),
        (MISTRAL, {"attention_chunk_size": 512}, "attention_chunk_size"),
        (MISTRAL, {"num_key_value_heads": 0}, "at least 1"),
        (MISTRAL, {"head_dim": 0}, "head_dim is 0"),
        (OPT, {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        (OPT, {"max_position_embeddings": None}, "max_position_embeddings"),
    ],
)
def test_what_changes_the_cost_is_refused_where_it_is_not_modelled(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], token: str
) -> None:
    """One line names the field, its value or the reason."""
    with pytest.raises(CatalogError) as caught:
        load_model(written(tmp_path, config | changes))
    assert token in str(caught.value)
    assert "\n" not in str(caught.value)


SIZES: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    (MISTRAL, {"attention_bias": True}, 32 * (4096 + 1024 + 1024 + 4096)),
    (MISTRAL, {"mlp_bias": True}, 32 * (14336 + 14336 + 4096)),
    (OPT, {"enable_bias": False}, -24 * (4 * 2048 + 8192 + 2048)),
    (NEOX, {"attention_bias": False}, -44 * 4 * 6144),
    (MISTRAL, {"tie_word_embeddings": True}, -32000 * 4096),
    (MISTRAL, {"head_dim": 256}, 32 * 4096 * (4096 + 1024) * 2),
]


def test_fields_that_change_the_size_are_honoured(tmp_path: Path) -> None:
    """Each adds or takes away just the parameters that it stands for."""
    for config, changes, more in SIZES:
        plain, changed = (
            load_model(written(tmp_path, one)).value.parameters
            for one in (config, config | changes)
        )
        assert changed - plain == more, changes


def test_local_layers_of_gpt_neo_are_windows(tmp_path: Path) -> None:
    """Local attention sees 256 tokens; without local layers everything is seen."""
    assert load_model(written(tmp_path, NEO)).value.tokens == 256
    everywhere = NEO | {"attention_types": [[["global"], 24]]}
    assert load_model(written(tmp_path, everywhere)).value.tokens == 2048


json_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5000),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.sampled_from([LLAMA, GPT2, BERT, VIT]).flatmap(
        lambda config: st.tuples(
            st.just(config),
            st.sampled_from([*config, "num_key_value_heads", "id2label", "head_dim"]),
            json_values,
        )
    )
)
def test_any_value_in_a_configuration_loads_or_is_one_line(
    tmp_path: Path, case: tuple[dict[str, Any], str, Any]
) -> None:
    """Whatever one key holds, the answer is a model or a typed error of one line."""
    config, key, value = case
    try:
        model = load_model(written(tmp_path, config | {key: value})).value
    except Co2simError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - both outcomes are right
    else:
        assert model.parameters > 0
        assert model.flops_per_sample > 0
