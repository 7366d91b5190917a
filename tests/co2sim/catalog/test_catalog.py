"""The catalog: every file loads, every number has a source, and bad input is one line."""

import dataclasses
import math
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from co2sim.catalog import load_cluster, load_model, names
from co2sim.catalog.facts import facts
from co2sim.catalog.specs import ClusterSpec, GPUSpec, KernelsSpec, LinkSpec, ScatterSpec, TierSpec
from co2sim.common.errors import CatalogError, Co2simError, OptionError
from co2sim.hardware.cluster import GPU, Cluster, KernelTimes, Link, Scatter, Tier

CLUSTERS, GPUS, MODELS = names("clusters"), names("gpus"), names("models")


def tree(kind: str, key: str) -> dict[str, Any]:
    """A file of the catalog as it stands."""
    return tomllib.loads((resources.files("co2sim.catalog") / kind / f"{key}.toml").read_text())


def test_every_cluster_loads_with_plausible_links() -> None:
    """A cluster has more than one node, and its links inside a node are the faster ones."""
    for key in CLUSTERS:
        cluster = load_cluster(key).value
        assert cluster.nodes >= 2, key
        assert cluster.gpus_per_node >= 1, key
        assert cluster.nodes % cluster.sites == 0, key
        per_gpu = cluster.inter.payload_bandwidth / cluster.gpus_per_node
        assert cluster.intra.payload_bandwidth >= per_gpu, key
        assert cluster.gpu.peak["fp16"] >= cluster.gpu.peak["fp32"], key


def test_every_model_has_its_published_number_of_parameters() -> None:
    """The blocks of a model add up to the count that its file cites."""
    for key in MODELS:
        published = tree("models", key)["parameters"]
        count = published["value"] if isinstance(published, dict) else published
        assert load_model(key).value.parameters == count, key


@pytest.mark.parametrize("kind", ["clusters", "gpus", "models", "failures"])
def test_every_number_has_a_source_and_assumed_ones_say_why(kind: Any) -> None:
    """No fact is without a source; what is assumed says so and why; units stand with the number."""
    for key in names(kind):
        for fact in facts(tree(kind, key)):
            assert len(fact.source) > 10, (key, fact)
            if fact.source.startswith("assumed"):
                assert fact.assumed, (key, fact)
            if fact.assumed:
                assert re.search("assum|computed", fact.source), (key, fact)


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
        ({"inter.bandwith": "25 Gbit/s"}, "'inter.bandwidth'"),
        ({"inter.bandwidth": "25"}, "has no unit"),
        ({"inter.bandwidth": "25 gb/s"}, "ambiguous"),
        ({"inter.bandwidth": "0 Gbit/s"}, "at least 1 B/s"),
        ({"gpu.memory": "3 GB/s"}, "given '3 GB/s'"),
        ({"inter.efficiency": "1.5"}, "above 0 and at most 1"),
        ({"nodes": "0"}, "at least 1"),
        ({"nodes": "two"}, "whole number"),
        ({"nodes.x": "1"}, "'nodes' is a single value"),
        ({"inter": "fast"}, "a table"),
        ({"gpu": "a1000"}, "unknown gpu 'a1000'"),
        ({"backend": "mpi"}, "'nccl' or 'gloo'"),
        ({"all_reduce": "rings"}, "'ring'"),
        ({"sites": "2"}, "[wan]"),
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
        ({"layer": "3"}, "'layers'"),
        ({"layers": "many"}, "whole number"),
        ({"layers": "10001"}, "at most 10000"),
        ({"heads": "7"}, "heads 7"),
        (
            {"seq_len": "2048"},
            "1024 learned positions",
        ),
        ({"parameters": "7000000000"}, "parameters"),
        ({"kv_heads": "5"}, "kv_heads 5"),
        ({"attention": "flash"}, "'softmax' or 'linear'"),
        ({"kind": "rnn"}, "blocks, transformer, vit"),
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


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" \n", "is empty"),
        ("layers = 1", "kind must be one of"),
        ("kind = ", "Invalid value"),
        ('kind = "transformer"', "layers, hidden, heads"),
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


def paths(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of everything in a tree."""
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{key}.")


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


IMPOSSIBLE: list[Callable[[], Any]] = [
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
    lambda: GPU("g", 1e9, 1e9, {"bf16": 1e12}, ()),
    lambda: GPU("g", 1e9, 1e9, {}, ((1.0, 0.5),)),
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
]


def test_objects_that_no_hardware_can_be_are_refused_in_one_line() -> None:
    """Whoever makes a cluster in Python meets the same ranges as a file."""
    for number, make in enumerate(IMPOSSIBLE):
        with pytest.raises(OptionError) as caught:
            make()
        pattern = "must be|listed by rising|no multiple of|only inter has|needs a peak"
        assert re.search(pattern, str(caught.value)), number
        assert "\n" not in str(caught.value), number
