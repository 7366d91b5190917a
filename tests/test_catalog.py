"""The catalog: every file loads, every number has a source, and bad input is one line."""

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis.measured.overrides import changed
from co2sim.catalog import load_cluster, load_model, names
from co2sim.catalog.facts import facts, plain
from co2sim.catalog.specs import (
    ClusterSpec,
    GPUSpec,
    KernelsSpec,
    LinkSpec,
    ScatterSpec,
    TierSpec,
)
from co2sim.cluster import GPU, Cluster, KernelTimes, Link, Scatter, Tier
from co2sim.errors import CatalogError, Co2simError, OptionError

CLUSTERS, GPUS, MODELS = names("clusters"), names("gpus"), names("models")


def tree(kind: str, key: str) -> dict[str, Any]:
    """A file of the catalog as it stands."""
    return tomllib.loads((resources.files("co2sim.catalog") / kind / f"{key}.toml").read_text())


@pytest.mark.parametrize("key", CLUSTERS)
def test_every_cluster_loads_with_plausible_links(key: str) -> None:
    """A cluster has more than one node, and its links inside a node are the faster ones."""
    cluster = load_cluster(key).value
    assert cluster.nodes >= 2
    assert cluster.gpus_per_node >= 1
    assert cluster.nodes % cluster.sites == 0
    per_gpu = cluster.inter.payload_bandwidth / cluster.gpus_per_node
    assert cluster.intra.payload_bandwidth >= per_gpu
    assert cluster.gpu.peak["fp16"] >= cluster.gpu.peak["fp32"]


@pytest.mark.parametrize("key", GPUS)
def test_every_gpu_loads_through_a_cluster(key: str) -> None:
    """A GPU can replace that of any cluster; its efficiencies rise with the size of the work."""
    gpu = load_cluster(CLUSTERS[0], {"gpu": key}).value.gpu
    assert gpu.memory >= 8e9
    sizes = [size for size, _ in gpu.efficiency]
    assert sizes == sorted(sizes)
    assert all(0 < fraction <= 1 for _, fraction in gpu.efficiency)


@pytest.mark.parametrize("key", MODELS)
def test_every_model_has_its_published_number_of_parameters(key: str) -> None:
    """The blocks of a model add up to the count that its file cites."""
    published = tree("models", key)["parameters"]
    count = published["value"] if isinstance(published, dict) else published
    assert load_model(key).value.parameters == count


@pytest.mark.parametrize(
    ("kind", "key"),
    [(kind, key) for kind in ("clusters", "gpus", "models", "failures") for key in names(kind)],  # type: ignore[arg-type]
)
def test_every_number_has_a_source_and_assumed_ones_say_why(kind: str, key: str) -> None:
    """No fact is without a source; what is assumed says so and why; units stand with the number."""
    for fact in facts(tree(kind, key)):
        assert len(fact.source) > 10, fact
        if fact.source.startswith("assumed"):
            assert fact.assumed, fact
        if fact.assumed:
            assert re.search("assum|computed", fact.source), fact


@pytest.mark.parametrize("key", CLUSTERS)
def test_what_is_assumed_is_shown(key: str) -> None:
    """`assumed` of an entry lists exactly the marked facts, of the GPU too, and the defaults."""
    entry = load_cluster(key)
    marked = {fact.path for fact in entry.facts if fact.assumed}
    assert {fact.path for fact in entry.assumed} == marked
    stated = {fact.path for fact in entry.facts if not fact.assumed}
    assert {"interference", "node_spread", "step_spread"} <= marked | stated
    assert ("gpu.launch_overhead" in marked) == any(
        fact.assumed and fact.path == "launch_overhead"
        for fact in facts(tree("gpus", plain(tree("clusters", key))["gpu"]))
    )


def test_a_table_hands_source_and_assumed_down() -> None:
    """What a table says of its source, and that it is assumed, holds for every fact inside."""
    nested = {
        "source": "a guess",
        "assumed": True,
        "inter": {"bandwidth": {"value": "1 GB/s"}, "latency": "1 us"},
        "known": {"value": "2", "source": "measured", "assumed": False},
    }
    found = {fact.path: (fact.source, fact.assumed) for fact in facts(nested)}
    assert found == {
        "inter.bandwidth": ("a guess", True),
        "inter.latency": ("a guess", True),
        "known": ("measured", False),
    }


# --- overrides ---------------------------------------------------------------------------------


def test_overrides_replace_values_and_their_source() -> None:
    """A dotted path sets one value, in any unit of its kind, and the source says who set it."""
    entry = load_cluster("a100-tcp80", {"inter.bandwidth": "25 Gbit/s", "gpu.memory": "40 GB"})
    assert entry.value.inter.bandwidth == pytest.approx(25e9 / 8)
    assert entry.value.gpu.memory == 40e9
    sources = {fact.path: fact.source for fact in entry.facts}
    assert sources["inter.bandwidth"] == sources["gpu.memory"] == "set by the user"
    deeper = load_model("gpt2-small", {"layers": "24"}).value
    assert len(deeper.blocks) == 26


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"inter.bandwith": "25 Gbit/s"}, "did you mean 'inter.bandwidth'?"),
        ({"inter.bandwidth": "25"}, "has no unit; expected a bandwidth such as '200 Gbit/s'"),
        ({"inter.bandwidth": "25 gb/s"}, "ambiguous"),
        ({"inter.bandwidth": "0 Gbit/s"}, "bandwidth is '0 Gbit/s'; it must be at least 1 B/s"),
        ({"gpu.memory": "3 GB/s"}, "given '3 GB/s'"),
        ({"inter.bandwidth": "-5 Gbit/s"}, "must be at least 1 B/s"),
        ({"inter.efficiency": "1.5"}, "must be above 0 and at most 1"),
        ({"nodes": "0"}, "must be at least 1"),
        ({"nodes": "two"}, "must be a whole number"),
        ({"nodes.x": "1"}, "'nodes' is a single value"),
        ({"inter": "fast"}, "inter is 'fast'; it must be a table"),
        ({"gpu": "a1000"}, "unknown gpu 'a1000'; did you mean"),
        ({"backend": "mpi"}, "'nccl' or 'gloo'"),
        ({"all_reduce": "rings"}, "'ring'"),
        ({"sites": "2"}, "sites above 1 and [wan] go together"),
        ({"sites": "3", "wan.bandwidth": "1 Gbit/s", "wan.latency": "1 ms"}, "equal sites"),
        ({"": "x"}, "unknown name ''"),
    ],
)
def test_wrong_overrides_are_refused_in_one_line(overrides: dict[str, str], said: str) -> None:
    """The error names the file and the place, what was given, and what is allowed."""
    with pytest.raises(CatalogError) as caught:
        load_cluster("a100-tcp80", overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"layer": "3"}, "did you mean 'layers'?"),
        ({"layers": "many"}, "must be a whole number"),
        ({"layers": "10001"}, "must be at most 10000"),
        ({"heads": "7"}, "not a multiple of heads 7"),
        (
            {"seq_len": "2048"},
            "1024 learned positions; give it as many (positions in its file, or --set model.pos",
        ),
        ({"kv_heads": "5"}, "not a multiple of kv_heads 5"),
        ({"attention": "flash"}, "'softmax' or 'linear'"),
        ({"kind": "rnn"}, "kind must be one of blocks, transformer, vit"),
    ],
)
def test_wrong_model_overrides_are_refused_in_one_line(
    overrides: dict[str, str], said: str
) -> None:
    """Shapes that do not fit together are errors that say which."""
    with pytest.raises(CatalogError) as caught:
        load_model("gpt2-small", overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_published_count_is_no_option() -> None:
    """`parameters` follows from the shape, so setting it is an error, never silently ignored."""
    with pytest.raises(CatalogError, match="parameters"):
        load_model("gpt2-small", {"parameters": "7000000000"})


# --- files -------------------------------------------------------------------------------------


def test_unknown_names_suggest_the_nearest() -> None:
    """A misspelt name, and a path that is not there, are told apart."""
    with pytest.raises(CatalogError, match="unknown cluster 'a100-tcp'; did you mean 'a100-tcp80'"):
        load_cluster("a100-tcp")
    with pytest.raises(CatalogError, match=r"cannot read \./nothing\.toml: No such file"):
        load_model("./nothing.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("layers = 1", "kind must be one of"),
        ("kind = ", "Invalid value"),
        ('kind = "transformer"', "layers, hidden, heads, ffn, vocab, seq_len are missing"),
        ('kind = "blocks"\nblocks = []', "blocks"),
        ("\udcff", "cannot read"),
    ],
)
def test_files_that_are_wrong_are_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    """The error starts with the path of the file."""
    path = tmp_path / "model.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CatalogError) as caught:
        load_model(str(path))
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_the_users_may_name_a_gpu_beside_it(tmp_path: Path) -> None:
    """A cluster file works from anywhere, with a GPU of the catalog or of its own."""
    source = resources.files("co2sim.catalog")
    text = (source / "clusters" / "a100-tcp80.toml").read_text()
    (tmp_path / "mine.toml").write_text(re.sub(r"(?m)^gpu = .*", 'gpu = "own.toml"', text))
    gpu = (source / "gpus" / "a100-80.toml").read_text()
    own = re.sub(r"(?m)^memory = .*", 'memory = "33 GB"', gpu)
    (tmp_path / "own.toml").write_text(own)
    assert load_cluster(str(tmp_path / "mine.toml")).value.gpu.memory == 33e9


# --- Hugging Face ------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("config", "parameters", "tokens", "unit"),
    [
        (LLAMA, 6_738_415_616, 2048, "token"),
        (LLAMA3, 8_030_261_248, 8192, "token"),
        (GPT2, 124_439_808, 1024, "token"),
        (BERT, 109_514_298, 512, "token"),
        (VIT, 86_567_656, 1, "image"),
    ],
    ids=["llama", "llama3", "gpt2", "bert", "vit"],
)
def test_a_hugging_face_configuration_gives_the_published_model(
    tmp_path: Path, config: dict[str, Any], parameters: int, tokens: int, unit: str
) -> None:
    """A `config.json` is a model with the parameters that its release has."""
    model = load_model(written(tmp_path, config)).value
    assert (model.parameters, model.tokens, model.unit) == (parameters, tokens, unit)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA | {"model_type": "mixtral", "num_local_experts": 8}, "mixtures of experts"),
        (LLAMA | {"n_routed_experts": 64}, "mixtures of experts"),
        (LLAMA | {"model_type": "mamba"}, "model_type 'mamba' is not known; known: bert"),
        ({}, "model_type None is not known"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size or n_embd"),
        (LLAMA | {"hidden_size": "big"}, "hidden_size is 'big'; it must be a whole number"),
        (LLAMA | {"num_hidden_layers": True}, "must be a whole number"),
        (LLAMA | {"num_attention_heads": 0}, "heads"),
        (LLAMA | {"num_hidden_layers": 0}, "layers"),
        ([1, 2], "expected a table"),
    ],
)
def test_configurations_that_are_not_modelled_are_refused(
    tmp_path: Path, config: object, said: str
) -> None:
    """Mixtures of experts, unknown kinds and wrong values are errors of one line."""
    with pytest.raises(CatalogError) as caught:
        load_model(written(tmp_path, config))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


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
    max_examples=150,
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


def paths(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of everything in a tree."""
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{key}.")


@settings(max_examples=80)
@given(
    st.sampled_from([*paths(tree("clusters", "two-sites-wan")), "gpu.peak.bf16", "gpu.x", "a..b"]),
    st.sampled_from(["", "0", "-1", "2", "1e400", "nan", "fast", "5 GB/s", "5 ms", "none", "\n"]),
)
def test_any_override_loads_or_is_one_line(path: str, text: str) -> None:
    """Whatever is set to whatever, the answer is a cluster or a typed error of one line."""
    try:
        cluster = load_cluster("two-sites-wan", {path: text}).value
    except Co2simError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - both outcomes are right
    else:
        assert cluster.nodes >= 1


def test_a_recorded_cluster_keeps_its_currency() -> None:
    """What a run was priced in stays, whatever else of the cluster is changed."""
    priced = load_cluster("dgx-h100", {"price_per_gpu": "2 EUR/h"}).value
    found = changed(priced, {"inter.latency": "5 us"})
    assert (found.price_per_gpu, found.currency) == (pytest.approx(2 / 3600), "EUR")
    assert changed(priced, {"price_per_gpu": "1 USD/h"}).currency == "USD"


# --- one place for a field ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (ClusterSpec, Cluster),
        (GPUSpec, GPU),
        (LinkSpec, Link),
        (KernelsSpec, KernelTimes),
        (TierSpec, Tier),
        (ScatterSpec, Scatter),
    ],
)
def test_a_file_may_say_every_field_of_what_it_describes(spec: Any, kind: Any) -> None:
    """A new field of a cluster is one line: files take it with its unit, range and default."""
    assert list(spec.model_fields) == [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("intra.latency", "3 us", 3e-6),
        ("inter.relay_efficiency", "0.5", 0.5),
        ("inter.busy_efficiency", "0.25", 0.25),
        ("gpu.launch_overhead", "7 us", 7e-6),
        ("gpu.memory_bandwidth", "1 TB/s", 1e12),
        ("channels", "4", 4),
        ("interference", "0.1", 0.1),
        ("node_spread", "0.03", 0.03),
        ("step_spread", "0.01", 0.01),
        ("network_overhead", "2 us", 2e-6),
        ("protocols", "nvlink", "nvlink"),
        ("price_per_gpu", "3600 USD/h", 1.0),
        ("hops", "in_turn", "in_turn"),
        ("communicators", "stream", "stream"),
    ],
)
def test_every_kind_of_field_can_be_set(path: str, text: str, value: object) -> None:
    """Times, sizes, fractions, counts, prices and choices, each in a unit of its kind."""
    found: Any = load_cluster("a100-tcp80", {path: text}).value
    for name in path.split("."):
        found = getattr(found, name)
    assert found == pytest.approx(value) if isinstance(value, float) else found == value


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(0.5),
        lambda: Link(1e9, -1.0),
        lambda: Link(1e9, math.nan),
        lambda: Link(1e9, efficiency=1.5),
        lambda: Link(1e9, busy_efficiency=0.0),
        lambda: KernelTimes(0.0),
        lambda: KernelTimes(0.5, vocabulary_efficiency=2.0),
        lambda: KernelTimes(0.5, kernel_gap=-1e-6),
        lambda: GPU("g", 0.0, 1e9, {"bf16": 1e12}, ((1.0, 0.5),)),
        lambda: GPU("g", 1e9, 1e9, {"bf16": 0.0}, ((1.0, 0.5),)),
        lambda: GPU("g", 1e9, 1e9, {"bf16": 1e12}, ((1.0, 1.5),)),
        lambda: GPU("g", 1e9, 1e9, {"bf16": 1e12}, ((2.0, 0.5), (1.0, 0.5))),
        lambda: tiny.cluster(0),
        lambda: tiny.cluster(2.5),  # type: ignore[arg-type]
        lambda: tiny.cluster(interference=-1.0),
        lambda: Tier(0),
        lambda: Tier(8, oversubscription=0.5),
        lambda: Tier(8, congestion=0.9),
        lambda: Link(1e9, rail=Tier(8), spine=Tier(12)),
        lambda: tiny.cluster(intra=Link(1e9, rail=Tier(8))),
        lambda: tiny.cluster(price_per_gpu=math.inf),
        lambda: tiny.cluster(channels=True),
    ],
)
def test_objects_that_no_hardware_can_be_are_refused_in_one_line(make: Callable[[], Any]) -> None:
    """Whoever makes a cluster in Python meets the same ranges as a file."""
    with pytest.raises(OptionError) as caught:
        make()
    assert re.search("must be|listed by rising|no multiple of|only inter has", str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_misspelt_name_is_told_beside_the_missing_one(tmp_path: Path) -> None:
    """`node = 2` is why `nodes` is missing."""
    source = resources.files("co2sim.catalog") / "clusters" / "dgx-h100.toml"
    path = tmp_path / "mine.toml"
    path.write_text(source.read_text("utf-8").replace("nodes", "node", 1))
    said = r"mine\.toml: nodes is missing; unknown name 'node'; did you mean 'nodes'\?$"
    with pytest.raises(CatalogError, match=said):
        load_cluster(str(path))
