"""Models that a torch module or a file of one gives, wherever a model is named."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from places import ROOT  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import co2sim  # noqa: E402
from co2sim.catalog import load_model  # noqa: E402
from co2sim.catalog.huggingface import convert  # noqa: E402
from co2sim.catalog.model_files import model_from_json, model_to_json  # noqa: E402
from co2sim.common.errors import CatalogError, Co2simError, OptionError  # noqa: E402
from co2sim.models.operators import Model  # noqa: E402
from co2sim.strategies import STRATEGIES  # noqa: E402
from co2sim.tracing.from_torch import load_build, trace  # noqa: E402
from co2sim.tracing.trace import AttentionShape  # noqa: E402
from co2sim.training.workload import Workload  # noqa: E402

SOURCE = """
import torch
from torch import nn
from torch.nn import functional

class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self, d=64, words=256):
        super().__init__()
        self.table = nn.Embedding(words, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(4))
        self.head = nn.Linear(d, words)

    def forward(self, x):
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def build():
    return Net().bfloat16()

def batch():
    return torch.randint(0, 256, (2, 32))

def loss(model, x):
    return functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
"""


@pytest.fixture
def named(tmp_path: Path) -> str:
    """A module in a file, as a user names it."""
    (tmp_path / "own.py").write_text(SOURCE)
    return f"{tmp_path / 'own.py'}:build"


def test_a_module_is_a_model_by_the_name_of_its_file(named: str) -> None:
    """Its layers are alike, and share their operators."""
    model = load_model(named).value
    assert [block.name for block in model.blocks[1:-1]] == [f"layers.{i}" for i in range(4)]
    assert len({id(block.operators) for block in model.blocks}) == 3


def test_kept_activations_are_those_that_autograd_saves(named: str) -> None:
    """Counted on real tensors, but for the loss: inputs of norms, products and activations."""
    namespace: dict[str, Any] = {}
    exec(Path(named.removesuffix(":build")).read_text(), namespace)  # noqa: S102 - the file above
    net, x = namespace["build"](), namespace["batch"]()
    own = {p.untyped_storage().data_ptr() for p in net.parameters()} | {x.data_ptr()}
    saved: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = net(x)
    elements = sum(saved.values()) / 2 / len(x)
    model = load_model(named).value
    kept = sum(op.rows * op.kept for block in model.blocks for op in block.operators)
    assert kept == elements
    del out


def test_the_file_of_a_model_is_that_model(named: str, tmp_path: Path) -> None:
    """It is read without torch, and `-m` takes it."""
    model = load_model(named).value
    path = tmp_path / "own.json"
    path.write_text(json.dumps(model_to_json(model)))
    assert load_model(str(path)).value == model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_a_traced_model(named: str, strategy: str) -> None:
    """On two nodes, with full recomputation."""
    result = co2sim.simulate(
        cluster="dgx-h100", gpus=16, model=named, strategy=strategy, recompute="full"
    )
    assert result.tokens_per_s > 0


def test_stages_of_a_pipeline_are_whole_blocks(named: str) -> None:
    """Of a traced model, too."""
    result = co2sim.simulate(cluster="dgx-h100", gpus=16, model=named, strategy="fsdp", pp=2)
    assert result.tokens_per_s > 0


@pytest.mark.parametrize(
    "option",
    [{"tp": 2}, {"cp": 2}, {"ep": 2}, {"recompute": "norms"}, {"overrides": {"model.layers": "2"}}],
    ids=str,
)
def test_what_a_trace_does_not_say_is_refused(named: str, option: dict[str, Any]) -> None:
    """In one line."""
    options: dict[str, Any] = {"gpus": 16, "strategy": "fsdp", **option}
    with pytest.raises(Co2simError) as found:
        co2sim.simulate(cluster="dgx-h100", model=named, **options)
    assert "\n" not in str(found.value)


def test_a_plan_of_the_file_divides_its_layers(named: str) -> None:
    """By tensor parallelism."""
    path = Path(named.removesuffix(":build"))
    path.write_text(
        f'{SOURCE}\ntp_plan = {{"layers.*.up": "colwise", "layers.*.down": "rowwise"}}\n'
    )
    result = co2sim.simulate(cluster="dgx-h100", gpus=16, model=named, strategy="fsdp", tp=2)
    assert result.tokens_per_s > 0


def test_what_was_assumed_is_a_fact_without_a_source() -> None:
    """The choices of a router, of an object as of a file."""

    def build() -> Any:
        return torch.nn.Linear(4, 4).eval()

    model = co2sim.from_torch(build, lambda: torch.zeros(2, 4), name="own")
    assert model.assumed
    assert model_from_json(model_to_json(model)).assumed == model.assumed


def test_without_torch_a_module_is_refused_in_one_line(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to install."""
    monkeypatch.delitem(sys.modules, "co2sim.tracing.from_torch", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(OptionError, match="PyTorch"):
        load_model(named)


def test_a_unet_has_the_parameters_of_its_paper_and_the_flop_of_torch() -> None:
    """35.7M (Ho et al., 2020, appendix B); FLOP of both passes but for those of attention."""
    source = load_build(str(ROOT / "examples" / "unet.py"))
    step = trace(source.build, source.batch, source.loss)
    net = source.build()
    assert source.loss is not None
    with FlopCounterMode(display=False) as counted:
        source.loss(net, source.batch()).backward()
    assert round(step.parameter_count, -5) == 35_700_000
    traced = sum(k.flop for k in step.kernels if not isinstance(k.shape, AttentionShape))
    seen = counted.get_flop_counts()["Global"]
    of_attention = "bmm"  # a processor runs that of transposed tensors as plain products
    assert traced == sum(flop for op, flop in seen.items() if of_attention not in str(op))


def test_the_catalog_has_the_trace_of_the_unet() -> None:
    """Its file of operators is that of the example today."""
    traced = load_model(str(ROOT / "examples" / "unet.py")).value
    assert load_model("ddpm-unet").value.blocks == traced.blocks


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "olmo2": {},
    "starcoder2": {},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {"num_key_value_heads": 4},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
}


def by_formula(values: dict[str, Any], path: Path) -> Model:
    """The model that the catalog makes of a config, whose sequences have all positions."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(values))
    assert convert(values, str(path))
    return load_model(str(path), {"seq_len": "128"}).value


@pytest.mark.parametrize("kind", FAMILIES)
def test_formulas_have_the_parameters_and_flop_of_transformers(kind: str, tmp_path: Path) -> None:
    """Equal parameters, and FLOP within 0.1 %."""
    transformers = pytest.importorskip("transformers")
    values = {**SMALL, **FAMILIES[kind], "model_type": kind}
    config = transformers.AutoConfig.for_model(**values)
    config.use_cache = False
    ids = torch.zeros((1, 128), dtype=torch.int64)
    traced = co2sim.from_torch(
        lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
        lambda: {"input_ids": ids, "labels": ids},
    )
    formula = by_formula(values | {"architectures": [traced.name]}, tmp_path / kind)
    assert traced.parameters == formula.parameters
    assert traced.flops_per_sample == pytest.approx(formula.flops_per_sample, rel=1e-3)


def test_a_type_without_formulas_is_traced(tmp_path: Path) -> None:
    """By the class of transformers."""
    pytest.importorskip("transformers")
    values = {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "n_groups": 1,
        "head_dim": 32,
        "vocab_size": 256,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_model(str(tmp_path)).value.parameters > 2 * 64 * 256


def test_an_unknown_type_is_refused(tmp_path: Path) -> None:
    """Of a `config.json` that transformers does not know either."""
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(CatalogError):
        load_model(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_kernels_of_a_traced_layer_are_scaled_to_those_of_its_formula(*, compiled: bool) -> None:
    """Of Llama 3 8B, by which the scale was found.

    The calls are equal; the bytes of a step are within 1 %, those of each pass within 8 %.
    """
    transformers = pytest.importorskip("transformers")
    formula = load_model("llama3-8b").value
    shape = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        attn_implementation="sdpa",
        use_cache=False,
    )
    auto = transformers.AutoModelForCausalLM
    model = co2sim.from_torch(
        lambda: auto.from_config(shape, dtype=torch.bfloat16),
        lambda: torch.randint(0, 100, (1, formula.tokens)),
        lambda module, x: module(input_ids=x, labels=x).loss,
    )
    mine, theirs = (Workload(one, compiled=compiled).works()[1] for one in (model, formula))
    for way in ("forward", "backward"):
        traced, counted = getattr(mine, way).kernels, getattr(theirs, way).kernels
        assert traced.calls == pytest.approx(counted.calls)
        assert traced.elementwise_bytes == pytest.approx(counted.elementwise_bytes, rel=0.08)
    both = [
        sum(p.kernels.elementwise_bytes for p in (w.forward, w.backward)) for w in (mine, theirs)
    ]
    assert both[0] == pytest.approx(both[1], rel=0.01)
