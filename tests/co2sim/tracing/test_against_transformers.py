"""Formulas beside traces of transformers' modules, which `benchmarks/formulas.py` writes."""

import csv
import importlib
import json
from importlib.metadata import version
from typing import Any

import pytest
from places import ROOT

from co2sim.catalog import Contents, huggingface, load_model
from co2sim.training.memory import kept_bytes
from co2sim.training.workload import Workload

FOLDER = ROOT / "benchmarks"
ROWS = {
    row["case"]: row
    for row in csv.DictReader((FOLDER / "results/formulas.csv").read_text("utf-8").splitlines())
}
LIBRARIES = ("torch", "transformers")
FEW = (
    *("llama", "gpt2", "bert", "vit", "gemma3_text", "gpt_oss", "qwen2_moe", "deepseek_v3"),
    *("phi3, a window", "cohere"),
)
"""Cases that are traced again in an ordinary run: each kind of operator once."""

PIXELS = {"vit", "vit, large patches and ReLU"}
"""FLOP differ: pixels have no gradient, and a formula counts six for every parameter and patch."""
GATE = {"qwen2_moe", "qwen2_moe, experts in every second layer"}
"""FLOP differ: the one column that weighs the shared experts of a token is left out."""
MASK = {"opt", "seed_oss", "gpt2, ReLU and no dropout"}
"""Kept bytes differ: the embedding drops out where layers do not, or the other way round."""


@pytest.fixture(autouse=True)
def formulas(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("formulas")


def config(case: str) -> dict[str, Any]:
    """The `config.json` of a case."""
    values: dict[str, Any] = json.loads(ROWS[case]["configuration"])
    return values


def test_every_model_type_is_compared() -> None:
    """All that a `config.json` may name, but for InternLM 2, which transformers does not have."""
    types = {*huggingface.FAMILIES, *huggingface._ALIASES, *huggingface._WRAPPED}
    assert types - {case.partition(",")[0] for case in ROWS} == {"internlm2"}


@pytest.mark.parametrize("case", ROWS)
def test_parameters_are_those_of_the_module(case: str, formulas: Any) -> None:
    """To the last one."""
    assert formulas.of_formula(config(case)).parameters == int(ROWS[case]["parameters"])


@pytest.mark.parametrize("case", ROWS)
def test_flop_are_those_of_the_module(case: str, formulas: Any) -> None:
    """Forward and backward, of products and of attention: 0.1 % at most, or a known difference."""
    ours, trace = formulas.of_formula(config(case)), formulas.sizes_of(ROWS[case])
    assert ours.attention == trace.attention
    assert ours.attention_back == trace.attention_back
    pixels = 0.0
    if case in PIXELS:
        values = config(case)
        size, patch = values.get("image_size", 224), values.get("patch_size", 16)
        inputs = values.get("num_channels", 3) * patch * patch
        pixels = 2.0 * formulas.SAMPLES * (size // patch) ** 2 * inputs * values["hidden_size"]
    assert ours.products_back - pixels == pytest.approx(trace.products_back, rel=1e-3)
    assert ours.products == pytest.approx(trace.products, rel=1e-3)
    assert (ours.products == trace.products) == (case not in GATE)


@pytest.mark.parametrize("case", ROWS)
def test_kept_activations_are_those_of_the_module(case: str, formulas: Any) -> None:
    """Of the layers, and with all else: 1.5 % at most."""
    ours, trace = formulas.of_formula(config(case)), formulas.sizes_of(ROWS[case])
    assert ours.kept_layers == pytest.approx(trace.kept_layers, rel=0.015)
    assert ours.kept == pytest.approx(trace.kept, rel=0.015)
    row = formulas.SAMPLES * formulas.TOKENS * formulas.SIZES["hidden_size"]
    apart = abs(ours.kept_others - trace.kept_others) / row  # a mask of a byte an element: 1
    assert apart == pytest.approx(float(case in MASK), abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in FEW else pytest.mark.nightly) for c in ROWS]
)
def test_the_trace_is_measured_again(case: str, formulas: Any) -> None:
    """Of the same versions a module counts what the table says."""
    for name in LIBRARIES:
        pytest.importorskip(name, reason=f"{name} is not installed")
        if version(name) != ROWS[case][name]:
            pytest.skip(f"the table is of {name} {ROWS[case][name]}")
    found = formulas.of_trace(formulas.measured(case))
    assert found == formulas.sizes_of(ROWS[case])
    assert formulas.config_file(case) == config(case)


PUBLISHED = {
    "Llama 3.1 8B": ("llama", 28, (4096, 32, 8, 128, 14336)),
    "SmolLM2 360M": ("llama", 24, (960, 15, 5, 64, 2560)),
    "Qwen3 4B": ("qwen3", 38, (2560, 32, 8, 128, 9728)),
    "Gemma 1.1 2B": ("gemma", 48, (2048, 8, 1, 256, 16384)),
    "DeepSeek R1 Qwen3 8B": ("qwen3", 29.8, (4096, 32, 8, 128, 12288)),
    "Mistral 7B": ("mistral", 28, (4096, 32, 8, 128, 14336)),
}
"""Model types, what was measured of a layer in batch x sequence x hidden x 2 bytes, and sizes.

Source: stas00/ml-engineering, training/performance/README.md."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_activations_of_a_layer_are_met(name: str) -> None:
    """Within 4 % of what was measured with transformers that repeats keys and orders outputs."""
    kind, measured, sizes = PUBLISHED[name]
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    values = dict(zip((*keys, "intermediate_size"), sizes, strict=True), sliding_window=None)
    given = {"model_type": kind, "num_hidden_layers": 2, "vocab_size": 1000, **values}
    model = load_model(Contents(name, huggingface.convert(given, name)), {"seq_len": "2048"}).value
    job = Workload(model, keeps=("activations", "norms", "keys", "copies", "code"))
    layer = job.executed[1][1]
    assert kept_bytes(job, layer) / (2 * 2048 * sizes[0]) == pytest.approx(measured, rel=0.04)
