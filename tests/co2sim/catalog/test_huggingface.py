"""Hugging Face configurations: published sizes, and what changes the cost is never ignored."""

import json
import re
import runpy
import sys
from collections.abc import Mapping
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from places import DATA, ROOT

from co2sim import simulate
from co2sim.catalog import Contents, huggingface, load_model
from co2sim.common.errors import CatalogError
from co2sim.models.operators import Attention

RELEASED = json.loads((DATA / "huggingface.json").read_text())
"""Configurations of published checkpoints, with their parameters and tokens."""
MISTRAL, OPT, MIXTRAL, DEEPSEEK, LLAMA = (
    RELEASED[name]["config"] for name in ("mistral", "opt", "mixtral", "deepseek", "llama")
)


def written(folder: Path, config: object) -> str:
    """The path of a `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(("longest", "trained"), [(131_072, 8192), (8192, 8192), (2048, 2048)])
def test_a_model_is_trained_on_sequences_that_models_of_its_size_are_trained_on(
    tmp_path: Path, longest: int, trained: int
) -> None:
    """Llama 3.1 8B allows 131,072 tokens, and nearly all of its training was on 8,192."""
    config = {**RELEASED["llama3"]["config"], "max_position_embeddings": longest}
    assert load_model(written(tmp_path, config)).value.tokens == trained


def test_parameters_are_those_of_the_release(tmp_path: Path) -> None:
    """Exact counts of published checkpoints: biases of queries only, norms without parameters."""
    for name, release in RELEASED.items():
        model = load_model(written(tmp_path, release["config"])).value
        assert (model.parameters, model.tokens) == (release["parameters"], release["tokens"]), name
        assert model.unit == ("image" if name == "vit" else "token")


def test_a_model_of_the_hub_is_read_from_the_cache_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OWNER/NAME has the same operators as its config.json, and keeps its name."""
    hub = pytest.importorskip("huggingface_hub.constants", reason="it is not installed")
    kept = tmp_path / "models--own--Small-1.5B"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    config = kept / "snapshots" / "abc" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps(LLAMA))
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    model = load_model("own/Small-1.5B").value
    assert model.name == "own/Small-1.5B"
    assert model.blocks == load_model(str(config)).value.blocks


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
        (MISTRAL, {"num_experts": 8}, "type mistral has no experts"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "1 to 8"),
        (MIXTRAL, {"mlp_only_layers": [3]}, "mlp_only_layers is [3]"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias is true"),
        (MISTRAL, {"model_type": None}, "model_type None"),
        (MISTRAL, {"add_cross_attention": True}, "cross attention"),
        (MISTRAL, {"layer_types": ["linear_attention"]}, "'linear_attention'"),
        (MISTRAL, {"hidden_size": "big"}, "'big'"),
        (MISTRAL, {"hidden_size": None}, "hidden_size is missing"),
        (MISTRAL, {"attention_chunk_size": 512}, "attention_chunk_size"),
        (OPT, {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
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


def test_how_weights_are_stored_and_further_tokens_change_nothing(tmp_path: Path) -> None:
    """Released files name the format of their weights; training starts from the model itself."""
    plain = load_model(written(tmp_path, DEEPSEEK)).value
    stored = {"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "float8_e4m3fn"}
    found = load_model(written(tmp_path, DEEPSEEK | stored | {"num_nextn_predict_layers": 1})).value
    assert found == plain
    kimi = load_model(written(tmp_path, DEEPSEEK | {"model_type": "kimi_k2"})).value
    assert kimi == plain


@pytest.mark.parametrize(
    "names",
    [["LlamaForRewardModel"], ["MistralForCausalLM"], ["LlamaForCausalLM", "LlamaModel"], [None]],
)
def test_classes_that_are_not_known_are_refused(tmp_path: Path, names: object) -> None:
    """Their code may compute anything."""
    with pytest.raises(CatalogError, match="architectures"):
        load_model(written(tmp_path, LLAMA | {"architectures": names}))


@pytest.mark.parametrize(("name", "loads"), [("some/model", 1), ("./model", 0), ("a/b/model", 0)])
def test_only_a_name_of_the_hub_is_to_be_downloaded(name: str, loads: int) -> None:
    """Not a path of somebody's machine, of which the line says that nothing is there."""
    with pytest.raises(CatalogError, match=f"{name} is no file") as error:
        load_model(name)
    assert str(error.value).count("hf download") == loads


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
SMALL = json.loads((DATA / "huggingface-small.json").read_text())["sizes"]
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
        windows = [one.window for block in model.blocks for one in block.of(Attention)]
        assert [bool(one) for one in windows] == [one == "sliding_attention" for one in types]


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
