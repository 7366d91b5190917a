"""Hugging Face configurations: published sizes, and what changes the cost is never ignored."""

import json
import re
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ROOT

from co2sim import simulate
from co2sim.catalog import Contents, huggingface, load_model
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
MIXTRAL = MISTRAL | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}


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
    "id2label": {str(number): f"class {number}" for number in range(1000)},
}


def written(folder: Path, config: object) -> str:
    """The path of a `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


RELEASED: list[tuple[dict[str, Any], int, int]] = [
    (MISTRAL, 7_241_732_096, 32768),
    (QWEN, 7_615_616_512, 131072),
    (PHI, 3_821_079_552, 4096),
    (SMOLLM, 3_075_098_624, 65536),
    (OLMO, 6_888_095_744, 2048),
    (OPT, 1_315_758_080, 2048),
    (NEOX, 20_554_567_680, 2048),
    (MIXTRAL, 46_702_792_704, 32768),
    (DEEPSEEK, 671_026_404_352, 163840),
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


def test_a_window_costs_nothing_until_sequences_are_longer(tmp_path: Path) -> None:
    """Then a token sees no more than the window: half a window less than all, twice."""
    path = written(tmp_path, MISTRAL)
    wide = written(tmp_path / "..", MISTRAL | {"sliding_window": None})
    for tokens, scores in ((2048, 2048**2), (4096, 4096**2), (8192, 4096 * (2 * 8192 - 4096))):
        model, whole = (
            load_model(one, {"seq_len": str(tokens)}).value.blocks[1] for one in (path, wide)
        )
        missing = 4.0 * 4096 * (tokens**2 - scores)
        assert whole.flops - model.flops == missing
        assert whole.parameters == model.parameters


@pytest.mark.parametrize(
    ("config", "changes", "token"),
    [
        (MISTRAL, {"tie_word_embeddings": "yes"}, "true or false"),
        (MISTRAL, {"attention_bias": 1}, "true or false"),
        (MISTRAL, {"use_sliding_window": "no"}, "true or false"),
        (MISTRAL, {"num_experts": 8}, "type mistral has no experts"),
        (MISTRAL, {"n_routed_experts": 64}, "type mistral has no experts"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "1 to 8"),
        (MIXTRAL, {"mlp_only_layers": [3]}, "mlp_only_layers is [3]"),
        (MIXTRAL, {"num_local_experts": "many"}, "'many'"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias is true"),
        (DEEPSEEK, {"kv_lora_rank": 0}, "latent.kv_rank"),
        (MISTRAL, {"model_type": "mamba"}, "'mamba'"),
        (MISTRAL, {"model_type": None}, "model_type None"),
        (MISTRAL, {"kv_lora_rank": 512}, "type mistral has no latent attention"),
        (MISTRAL, {"add_cross_attention": True}, "cross attention"),
        (MISTRAL, {"layer_types": ["linear_attention"]}, "'linear_attention'"),
        (MISTRAL, {"layer_types": "full_attention"}, "must be a list"),
        (MISTRAL, {"layer_types": [["a"], {"b": 1}]}, "['a']"),
        (MISTRAL, {"hidden_size": 10**9}, "at most 1e+15"),
        (MISTRAL, {"hidden_size": "big"}, "'big'"),
        (MISTRAL, {"hidden_size": None}, "hidden_size is missing"),
        (MISTRAL, {"num_hidden_layers": True}, "whole number"),
        (MISTRAL, {"num_hidden_layers": 0}, "layers"),
        (MISTRAL, {"num_attention_heads": 0}, "heads"),
        (MISTRAL, {"sliding_window": "wide"}, "'wide'"),
        (MISTRAL, {"intermediate_size": None}, "intermediate_size is missing"),
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


def test_internlm2_has_a_head_of_its_own(tmp_path: Path) -> None:
    """20B: 19.86e9 parameters with both matrices over the vocabulary."""
    config = {
        "model_type": "internlm2",
        "vocab_size": 92_544,
        "hidden_size": 6144,
        "intermediate_size": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "bias": False,
    }
    model = load_model(written(tmp_path, config)).value
    assert model.parameters == 19_861_149_696


def test_fields_that_change_the_size_are_honoured(tmp_path: Path) -> None:
    """Each adds or takes away just the parameters that it stands for."""
    for config, changes, more in SIZES:
        plain, changed = (
            load_model(written(tmp_path, one)).value.parameters
            for one in (config, config | changes)
        )
        assert changed - plain == more, changes


def reaches(path: str, layers: int) -> list[int]:
    """How many tokens a token sees in the first layers; 0: all of them."""
    blocks = load_model(path).value.blocks[1 : 1 + layers]
    return [block.scores.reach for block in blocks if block.scores]


def test_layers_see_what_their_type_says(tmp_path: Path) -> None:
    """Every second layer of gpt-oss, five of six of Gemma 3, none but if asked of Qwen."""
    gemma = MISTRAL | {"model_type": "gemma3_text", "head_dim": 256}
    for config, changes, want in (
        (NEO, {}, [0, 256, 0, 256]),
        (NEO, {"attention_types": [[["global"], 24]]}, [0] * 4),
        (gemma, {"sliding_window": 512}, [512] * 5 + [0]),
        (MISTRAL, {"model_type": "gemma2"}, [4096, 0, 4096]),
        (MIXTRAL, {"sliding_window": 1024}, [1024] * 3),
        (
            QWEN,
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
            [0, 0, 64, 64],
        ),
        (QWEN, {"sliding_window": 64}, [0] * 4),
        (MISTRAL, {"layer_types": ["full_attention", "sliding_attention"] * 16}, [0, 4096, 0]),
    ):
        found = reaches(written(tmp_path, config | changes), len(want))
        assert found == want, (config["model_type"], changes)


def test_how_weights_are_stored_and_further_tokens_change_nothing(tmp_path: Path) -> None:
    """Released files name the format of their weights; training starts from the model itself."""
    plain = load_model(written(tmp_path, DEEPSEEK)).value
    stored = {"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "float8_e4m3fn"}
    found = load_model(written(tmp_path, DEEPSEEK | stored | {"num_nextn_predict_layers": 1})).value
    assert found == plain
    kimi = load_model(written(tmp_path, DEEPSEEK | {"model_type": "kimi_k2"})).value
    assert kimi == plain


def test_layers_without_experts_before_all_others_may_be_listed(tmp_path: Path) -> None:
    """As many as `first_k_dense_replace` says elsewhere."""
    listed = load_model(written(tmp_path, MIXTRAL | {"mlp_only_layers": [0, 1]})).value
    assert [bool(block.idle) for block in listed.blocks[1:4]] == [False, False, True]


def test_of_a_model_with_images_the_language_model_is_taken(tmp_path: Path) -> None:
    """Gemma 3 of 4B and more holds its configuration in one of several parts."""
    text = MISTRAL | {"model_type": "gemma3_text", "head_dim": 256, "tie_word_embeddings": True}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 9}}
    found, plain = (load_model(written(tmp_path, one)).value for one in (whole, text))
    assert found == plain


@pytest.mark.parametrize(
    ("config", "names", "more"),
    [
        (LLAMA3, ["LlamaForCausalLM"], 0),
        (LLAMA3, [], 0),
        (LLAMA3, None, 0),
        (LLAMA3, ["LlamaModel"], -128256 * 4096),
        (LLAMA3, ["LlamaForSequenceClassification"], (2 - 128256) * 4096),
        (LLAMA3 | {"num_labels": 1}, ["LlamaForSequenceClassification"], (1 - 128256) * 4096),
        (LLAMA3 | {"id2label": {"0": "no"}}, ["LLaMAForTokenClassification"], -128255 * 4096 + 1),
        (LLAMA3, ["LlamaForQuestionAnswering"], (2 - 128256) * 4096 + 2),
        (GPT2, ["GPT2LMHeadModel"], 0),
        (GPT2, ["GPT2Model"], 0),
        (GPT2 | {"num_labels": 5}, ["GPT2ForSequenceClassification"], 5 * 768),
        (BERT, ["BertForMaskedLM"], 0),
        (BERT, ["BertModel"], -30522 - 2 * 768),
        (BERT, ["BertForTokenClassification"], 2 * 768 + 2 - 30522 - 768**2 - 3 * 768),
        (VIT, ["ViTForImageClassification"], 0),
        (VIT, ["ViTModel"], 768**2 + 768 - 1000 * 768 - 1000),
    ],
)
def test_a_head_is_that_of_the_class_that_a_file_names(
    tmp_path: Path, config: dict[str, Any], names: object, more: int
) -> None:
    """`more` parameters than with a head over the vocabulary, or than an image classifier."""
    plain, named = (
        load_model(written(tmp_path, one)).value
        for one in (config, {**config, "architectures": names})
    )
    assert named.parameters - plain.parameters == more


@pytest.mark.parametrize(
    "names",
    [
        ["LlamaForRewardModel"],
        ["LlamaBidirectionalModel"],
        ["LlamaForCausalLMEagle"],
        ["LlamaDoubleHeadsModel"],
        ["MistralForCausalLM"],
        ["LlamaForCausalLM", "LlamaModel"],
        ["Model"],
        [None],
        7,
    ],
)
def test_classes_that_are_not_known_are_refused(tmp_path: Path, names: object) -> None:
    """Their code may compute anything."""
    with pytest.raises(CatalogError, match="architectures"):
        load_model(written(tmp_path, LLAMA | {"architectures": names}))


def test_a_classifier_is_divided_and_predicted_as_other_models(tmp_path: Path) -> None:
    """A head of few labels costs less than one over the vocabulary, and a missing head nothing."""
    times = []
    for name in ("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaModel"):
        path = written(tmp_path, LLAMA | {"architectures": [name]})
        result = simulate("dgx-h100", path, "zero3", gpus=16, tp=2, global_batch="16")
        times.append(result.step_time_s)
    assert times[0] > times[1] > times[2] > 0


TYPES = sorted({*huggingface.FAMILIES} - {"internlm2"})
CAUSAL = [kind for kind in TYPES if kind not in {"vit", "bert", "roberta", "xlm-roberta"}]
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 1024),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 6),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "vocab_size"), 160),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 300),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 16),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "num_channels"), 2),
    "num_key_value_heads": 1,
    "head_dim": 24,
    "type_vocab_size": 3,
    "topk_group": 1,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "sliding_window": 64,
    "image_size": 64,
    "patch_size": 8,
    "first_k_dense_replace": 2,
    "pad_token_id": 1,
    "rotary_dim": 8,
    "attention_types": [[["global", "local"], 3]],
}
"""Sizes that no class has as its default, and that fit to those that each has."""


def small(kind: str) -> dict[str, Any]:
    """A configuration of a type with the sizes of `SMALL` that its class has."""
    transformers = pytest.importorskip("transformers")
    made = type(transformers.AutoConfig.for_model(kind))
    names = {one.name for one in fields(made)} - set(made.attribute_map)
    return {key: value for key, value in SMALL.items() if key in names}


def built(kind: str, name: str, values: Mapping[str, Any]) -> int | None:
    """The parameters of a class of transformers; None where it refuses these values."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.for_model(kind, **values)
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
    except Exception:  # noqa: BLE001 - of a library, for values that nobody has
        return None
    return sum(one.numel() for one in model.parameters())


def parameters(kind: str, values: Mapping[str, Any]) -> int:
    """What we count for a file of this type."""
    tree = huggingface.convert({"model_type": kind, **values}, kind)
    return load_model(Contents(kind, tree)).value.parameters


def classes(kind: str) -> list[str]:
    """Classes of transformers for a model type."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    tables = [one for one in dir(auto) if re.fullmatch("MODEL_.*MAPPING_NAMES", one)]
    own = [getattr(auto, table).get(kind, ()) for table in tables]
    return sorted({name for one in own for name in ([one] if isinstance(one, str) else one)})


def usual_class(kind: str) -> str:
    """The class that a file without `architectures` is read as."""
    ends = ("ForCausalLM", "LMHeadModel", "ForImageClassification")
    ends = ("ForMaskedLM",) if kind in {"bert", "roberta", "xlm-roberta"} else ends
    return next(name for name in classes(kind) if name.endswith(ends))


NOT_MODELLED = (
    *("ForMaskedImageModeling", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining"),
    *("DoubleHeadsModel", "BertLMHeadModel", "RobertaForCausalLM", "JevForDecision"),
)
"""Classes that are refused, by the ends of their names."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_every_class_has_the_parameters_that_transformers_builds(kind: str) -> None:
    """Of each model type, to the last bias; what is not modelled is refused."""
    names = [name for name in classes(kind) if not name.endswith(NOT_MODELLED)]
    assert len(names) >= 2
    for values in ({}, {"num_labels": 1}, {"id2label": {str(number): "a" for number in range(7)}}):
        given = small(kind) | values
        for name in names:
            assert parameters(kind, given | {"architectures": [name]}) == built(kind, name, given)
    for name in set(classes(kind)) - set(names):
        with pytest.raises(CatalogError, match="architectures"):
            parameters(kind, small(kind) | {"architectures": [name]})


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_what_a_file_leaves_out_has_the_value_that_transformers_takes(kind: str) -> None:
    """Each size alone, all but one, none, and null."""
    given, name = small(kind), usual_class(kind)
    cases: list[dict[str, Any]] = [{}, given]
    for key in given:
        cases += [{key: given[key]}, given | {key: None}]
        cases.append({other: given[other] for other in given if other != key})
    refused = []
    for values in cases:
        count = built(kind, name, values)
        if count is None:
            continue
        try:
            assert parameters(kind, values) == count, values
        except CatalogError as error:
            refused.append(str(error))
    words = ("word_embed_proj_dim", "groups", "is missing")
    assert [one for one in refused if not any(word in one for word in words)] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_what_a_file_switches_is_counted_or_refused(kind: str) -> None:
    """Whatever truth value a class has, such as biases, norms and ties."""
    pytest.importorskip("transformers")
    made = type(sys.modules["transformers"].AutoConfig.for_model(kind))
    switches = {one.name: getattr(made, one.name, None) for one in fields(made)}
    for key, value in switches.items():
        values = small(kind) | {key: not value}
        count = built(kind, usual_class(kind), values) if isinstance(value, bool) else None
        if count is None:
            continue
        try:
            assert parameters(kind, values) == count, key
        except CatalogError as error:
            assert key in str(error)  # noqa: PT017 - both outcomes are right


@pytest.mark.slow
def test_of_a_model_with_images_all_parts_say_what_the_language_model_is() -> None:
    """The whole file says whether weights are tied, and which class it is; not its text_config."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    text = {"hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 256}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name in ("ForConditionalGeneration", "ForSequenceClassification", "Model"):
        for outer, inner in product(({}, {"tie_word_embeddings": False}), repeat=2):
            given = {"text_config": text | inner, "vision_config": vision, **outer}
            config = transformers.Gemma3Config(**given)
            with torch.device("meta"):
                model = getattr(transformers, f"Gemma3{name}")(config)
            others = ("vision", "multi_modal")
            count = sum(
                one.numel()
                for place, one in model.named_parameters()
                if not any(word in place for word in others)
            )
            assert parameters("gemma3", given | {"architectures": [f"Gemma3{name}"]}) == count


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAUSAL)
def test_layers_of_every_model_type_see_what_they_do_in_transformers(kind: str) -> None:
    """A window where `layer_types` says so, also where the file leaves the types out."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind)
    types = getattr(config, "layer_types", None)
    if not types or set(types) > {"full_attention", "sliding_attention"}:
        pytest.skip(f"all layers of {kind} are alike")
    given = json.loads(config.to_json_string(use_diff=False))
    for values in (given, {"model_type": kind}):
        tree = huggingface.convert(values, kind)
        tokens = 2 * max(config.sliding_window or 0, config.max_position_embeddings)
        long = {"seq_len": str(tokens)}
        model = load_model(Contents(kind, tree), long).value
        reach = [one.scores.reach for one in model.blocks if one.scores]
        assert [bool(one) for one in reach] == [one == "sliding_attention" for one in types]


def test_routers_that_choose_groups_of_experts_first_are_told() -> None:
    """DeepSeek-V3's takes 4 of 8 unless the file says otherwise; others have no groups."""
    for changes, groups in (
        ({}, (8, 4)),
        ({"n_group": 1, "topk_group": 1}, (None, None)),
        ({"n_group": 4, "topk_group": 2}, (4, 2)),
    ):
        found = huggingface.convert(DEEPSEEK | changes, "config.json")["experts"]
        assert (found.get("groups"), found.get("active_groups")) == groups
    assert "groups" not in huggingface.convert(MIXTRAL | {"n_group": 2}, "config.json")["experts"]


@pytest.mark.slow
def test_what_a_file_leaves_out_is_what_transformers_takes() -> None:
    """`.ci/huggingface_defaults.py` writes the file that holds it."""
    pytest.importorskip("transformers")
    script = runpy.run_path(str(ROOT / ".ci" / "huggingface_defaults.py"))
    assert script["defaults"]() == json.loads(script["PLACE"].read_text())


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
    st.sampled_from([LLAMA, GPT2, BERT, VIT, MIXTRAL, DEEPSEEK]).flatmap(
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
