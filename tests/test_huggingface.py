"""Hugging Face configurations: published sizes, and what changes the cost is never ignored."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from co2sim.catalog import load_model
from co2sim.errors import CatalogError

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


def written(folder: Path, config: object) -> str:
    """The path of a `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "parameters", "tokens"),
    [
        (MISTRAL, 7_241_732_096, 4096),
        (QWEN, 7_615_616_512, 131072),
        (PHI, 3_821_079_552, 2047),
        (SMOLLM, 3_075_098_624, 65536),
        (OLMO, 6_888_095_744, 2048),
        (OPT, 1_315_758_080, 2048),
        (NEOX, 20_554_567_680, 2048),
    ],
    ids=["mistral", "qwen2", "phi3", "smollm3", "olmo", "opt", "gpt_neox"],
)
def test_parameters_are_those_of_the_release(
    tmp_path: Path, config: dict[str, Any], parameters: int, tokens: int
) -> None:
    """Exact counts of published checkpoints: biases of queries only, norms without parameters."""
    model = load_model(written(tmp_path, config)).value
    assert (model.parameters, model.tokens) == (parameters, tokens)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, 4096),
        ({"sliding_window": None}, 32768),
        ({"sliding_window": None, "layer_types": ["full_attention"]}, 32768),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 4096),
        ({"layer_types": ["full_attention"]}, 32768),
        ({"model_type": "qwen2"}, 32768),
        ({"model_type": "qwen2", "use_sliding_window": True}, 4096),
        ({"model_type": "gemma2", "sliding_window": None}, 4096),
        ({"model_type": "llama", "sliding_window": 64}, 64),
        ({"model_type": "llama", "sliding_window": 64, "use_sliding_window": True}, 64),
        ({"model_type": "llama", "sliding_window": 64, "use_sliding_window": False}, 32768),
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"]}, 32768),
    ],
)
def test_sequences_end_at_a_window_that_holds(
    tmp_path: Path, changes: dict[str, Any], window: int
) -> None:
    """The default length is the longest that is modelled; a window that is off limits nothing."""
    assert load_model(written(tmp_path, MISTRAL | changes)).value.tokens == window


def test_a_sequence_beyond_the_window_is_refused(tmp_path: Path) -> None:
    """Attention in a window costs less than is modelled: longer sequences are an error."""
    path = written(tmp_path, MISTRAL)
    assert load_model(path, {"seq_len": "2048"}).value.tokens == 2048
    with pytest.raises(CatalogError, match="seq_len 8192 exceeds the sliding window of 4096"):
        load_model(path, {"seq_len": "8192"})


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (MISTRAL, {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true"),
        (MISTRAL, {"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        (MISTRAL, {"num_experts": 8}, "num_experts is 8; mixtures of experts are not modelled"),
        (MISTRAL, {"kv_lora_rank": 512}, "latent"),
        (MISTRAL, {"num_nextn_predict_layers": 1}, "further tokens"),
        (MISTRAL, {"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        (MISTRAL, {"add_cross_attention": True}, "cross attention"),
        (MISTRAL, {"layer_types": ["linear_attention"]}, "'linear_attention'"),
        (MISTRAL, {"layer_types": "full_attention"}, "must be a list"),
        (MISTRAL, {"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn'; fp8 is not in the catalog"),
        (MISTRAL, {"dtype": "float8_e5m2"}, "dtype is 'float8_e5m2'; fp8 is not"),
        (MISTRAL, {"hidden_size": 10**9}, "parameters; it must be at most 1e+15"),
        (MISTRAL, {"sliding_window": "wide"}, "sliding_window is 'wide'"),
        (MISTRAL, {"intermediate_size": None}, "intermediate_size or ffn_dim or n_inner is"),
        (MISTRAL, {"attention_chunk_size": 512}, "attention_chunk_size is 512; attention within"),
        (MISTRAL, {"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be at least 1"),
        (MISTRAL, {"head_dim": 0}, "head_dim is 0; it must be at least 1"),
        (MISTRAL, {"use_sliding_window": "no"}, "use_sliding_window is 'no'; it must be true or"),
        (OPT, {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        (OPT, {"max_position_embeddings": None}, "max_position_embeddings"),
    ],
)
def test_what_changes_the_cost_is_refused_where_it_is_not_modelled(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    """One line names the field, its value and the reason."""
    with pytest.raises(CatalogError) as caught:
        load_model(written(tmp_path, config | changes))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "changes", "more"),
    [
        (MISTRAL, {"attention_bias": True}, 32 * (4096 + 1024 + 1024 + 4096)),
        (MISTRAL, {"mlp_bias": True}, 32 * (14336 + 14336 + 4096)),
        (OPT, {"enable_bias": False}, -24 * (4 * 2048 + 8192 + 2048)),
        (NEOX, {"attention_bias": False}, -44 * 4 * 6144),
        (MISTRAL, {"tie_word_embeddings": True}, -32000 * 4096),
        (MISTRAL, {"head_dim": 256}, 32 * 4096 * (4096 + 1024) * 2),
    ],
)
def test_fields_that_change_the_size_are_honoured(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], more: int
) -> None:
    """Each adds or takes away just the parameters that it stands for."""
    plain = load_model(written(tmp_path, config)).value.parameters
    assert load_model(written(tmp_path, config | changes)).value.parameters - plain == more


def test_local_layers_of_gpt_neo_are_windows(tmp_path: Path) -> None:
    """Local attention sees 256 tokens; without local layers everything is seen."""
    assert load_model(written(tmp_path, NEO)).value.tokens == 256
    everywhere = NEO | {"attention_types": [[["global"], 24]]}
    assert load_model(written(tmp_path, everywhere)).value.tokens == 2048


def test_only_numbers_that_apply_are_listed(tmp_path: Path) -> None:
    """A 0 that the file does not say has no source; what the file says is there."""
    said = {fact.path: fact.value for fact in load_model(written(tmp_path, MISTRAL)).facts}
    assert said["sliding_window"] == "4096"
    assert not said.keys() & {"head_dim", "positions", "token_types"}
    wide = load_model(written(tmp_path, MISTRAL), {"head_dim": "256"})
    assert ("head_dim", "256") in [(fact.path, fact.value) for fact in wide.facts]


@pytest.mark.parametrize("name", ["model.json", "model.toml"])
def test_an_empty_file_is_called_empty(tmp_path: Path, name: str) -> None:
    """Not by the place where a parser gave up."""
    (tmp_path / name).write_text(" \n")
    with pytest.raises(CatalogError, match=f"{name} is empty$"):
        load_model(str(tmp_path / name))


def test_a_configuration_is_called_by_its_folder(tmp_path: Path, cli: Run) -> None:
    """Never "config.json"; and `list` counts its parameters."""
    folder = tmp_path / "Mistral-7B-v0.1"
    folder.mkdir()
    path = written(folder, MISTRAL)
    assert load_model(path).value.name == "Mistral-7B-v0.1"
    assert load_model(str(folder)).value.name == "Mistral-7B-v0.1"
    assert load_model(written(folder, MISTRAL | {"_name_or_path": "m/x"})).value.name == "m/x"
    code, out, _ = cli("list", str(folder))
    assert code == 0
    assert "7,241,732,096" in out
    (tmp_path / "mine.json").write_text(json.dumps(MISTRAL))
    assert load_model(str(tmp_path / "mine.json")).value.name == "mine"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"model_type": "gpt2", "n_layer": 2, "n_layer": 24}', "n_layer"),
        ('{"model_type": "gpt2", "extra": {"a": 1, "b": 2, "a": 1}}', "a"),
    ],
)
def test_a_name_that_stands_twice_is_refused(
    tmp_path: Path, cli: Run, text: str, name: str
) -> None:
    """As TOML does, at any depth: which of the two values is meant cannot be known."""
    (tmp_path / "model.json").write_text(text)
    code, out, err = cli("run", "-c", "dgx-h100", "-m", "model.json", "-s", "ddp")
    assert (code, out) == (2, "")
    assert err == f"error: model.json: {name!r} is given twice\n"


@pytest.mark.parametrize("place", ["pipe.json", "pipe.toml", "/dev/zero"])
@pytest.mark.parametrize("option", ["--model", "--cluster", "--published"])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, cli: Run, place: str, option: str
) -> None:
    """A pipe would wait for ever, and a device may have no end."""
    if not place.startswith("/"):
        os.mkfifo(tmp_path / place)
    given = {"--model": "gpt2-small", "--cluster": "a100-tcp80"} | {option: str(tmp_path / place)}
    arguments = [word for pair in given.items() for word in pair]
    code, _, err = cli("scale", *arguments, "-s", "ddp", "-g", "8")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "it is not a regular file" in err


def test_a_file_that_is_too_large_for_a_model_is_refused(tmp_path: Path) -> None:
    """Before it is read: this one has no blocks on the disk, but 17 MB."""
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(17_000_000)
    with pytest.raises(CatalogError, match=r"cannot read .*: it is larger than 16 MB"):
        load_model(str(path))
