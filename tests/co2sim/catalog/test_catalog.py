"""The catalog: every file loads, every number has a source, names are those that people type."""

import dataclasses
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from importlib import resources
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import pytest
import tiny
from one_sample import simulate

from co2sim.catalog import key_of, load_cluster, load_model, names
from co2sim.catalog.facts import Kind, facts, read
from co2sim.catalog.specs import (
    ClusterSpec,
    FabricSpec,
    GPUSpec,
    KernelsSpec,
    LinkSpec,
    ScatterSpec,
    TierSpec,
)
from co2sim.common.errors import CatalogError, OptionError, error_line
from co2sim.hardware.cluster import GPU, Cluster, KernelTimes, Link, Scatter
from co2sim.hardware.fabric import Fabric, Tier, pods
from co2sim.schedule.schedule import NODE, WORLD, Collective, DType
from co2sim.schedule.schedule import Kind as CollectiveKind
from co2sim.simulation.costs import cost_of

CLUSTERS, MODELS = names("clusters"), names("models")


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
        assert max(cluster.gpu.peak.values()) >= cluster.gpu.peak.get("fp32", 0.0), key


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


# --- one place for a field ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (ClusterSpec, Cluster),
        (GPUSpec, GPU),
        (LinkSpec, Link),
        (KernelsSpec, KernelTimes),
        (TierSpec, Tier),
        (FabricSpec, Fabric),
        (ScatterSpec, Scatter),
    ],
)
def test_a_file_may_say_every_field_of_what_it_describes(spec: Any, kind: Any) -> None:
    """A new field of a cluster is one line: files take it with its unit, range and default."""
    assert list(spec.model_fields) == [field.name for field in dataclasses.fields(kind)]


IMPOSSIBLE: list[Callable[[], Any]] = [
    lambda: Link(0.5),
    lambda: Link(1e9, efficiency=1.5),
    lambda: KernelTimes(0.0),
    lambda: GPU("g", 0.0, 1e9, {"bf16": 1e12}, ((1.0, 0.5),)),
    lambda: GPU("g", 1e9, 1e9, {"bf16": 1e12}, ()),
    lambda: GPU("g", 1e9, 1e9, {"bf16": 1e12}, ((2.0, 0.5), (1.0, 0.5))),
    lambda: tiny.cluster(2.5),
    lambda: Tier(8, oversubscription=0.05),
    lambda: pods(Fabric(Tier(8), Tier(12)), 1e9, 1),
    lambda: Fabric(spine=Tier(8)),
    lambda: Fabric(Tier()),
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


# --- machines ---------------------------------------------------------------------------------


ALIASES: dict[Kind, dict[str, list[str]]] = tomllib.loads(
    (resources.files("co2sim.catalog") / "aliases.toml").read_text("utf-8")
)

TYPED = {
    "p5": "p5.48xlarge",
    "P5.48xlarge": "p5.48xlarge",
    "ND H100 v5": "nd-h100-v5",
    "Standard_ND96isr_H100_v5": "nd-h100-v5",
    "BM.GPU.H100.8": "bm.gpu.h100.8",
    "cloud-3200g": "p5.48xlarge",
}


@pytest.mark.parametrize(("typed", "key"), TYPED.items())
def test_clusters_are_found_by_the_names_that_people_type(typed: str, key: str) -> None:
    """In any letters, and with a dot: it is no file; and so are GPUs."""
    assert key_of("clusters", typed) == key
    assert load_cluster(typed).value == load_cluster(key).value
    found = load_cluster("dgx-a100", {"gpu": "H100 SXM"}).value
    assert found.gpu == load_cluster("dgx-h100").value.gpu


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "Llama-3.1-8B", "llama3-8b"])
def test_models_are_found_by_the_names_of_the_hub(name: str) -> None:
    """With their owner, or without."""
    assert load_model(name).value == load_model("llama3-8b").value


@pytest.mark.parametrize("kind", ALIASES)
def test_an_alias_means_one_entry_and_shadows_no_key(kind: Kind) -> None:
    """All stand in small letters, for the reader of the table."""
    known = names(kind)
    assert set(ALIASES[kind]) <= set(known)
    others = [other for listed in ALIASES[kind].values() for other in listed]
    assert Counter(others).most_common(1)[0][1] == 1
    assert not set(others) & set(known)
    assert all(other == other.lower() and not {" ", "_"} & set(other) for other in others)
    for key, listed in ALIASES[kind].items():
        for other in (key, key.upper(), *listed):
            assert key_of(kind, other) == key


def test_the_refusal_of_a_cluster_has_a_file_that_works(tmp_path: Path) -> None:
    """Its lines, one a line in a file, are a cluster that a training runs on."""
    with pytest.raises(CatalogError) as caught:
        load_cluster("nosuch")
    assert len(error_line(str(caught.value))) < 400
    lines = str(caught.value).partition("lines: ")[2].split(" | ")
    assert len(lines) == 6
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(lines))
    assert simulate(str(file), "gpt2-small", "fsdp", gpus=32).tokens_per_s > 0


# --- kinds of accelerators ----------------------------------------------------------------------


def test_a_slice_of_tpus_gathers_by_all_links_of_its_torus() -> None:
    """By hand: 256 chips have 4 links of 45 GB/s; 1.8 GB take 255 / 256 x 10 ms, and hops."""
    cluster = load_cluster("tpu-v5e").value.resized(256)
    gather = Collective(CollectiveKind.ALL_GATHER, "weights", 900_000_000, DType.BF16, WORLD)
    taken = cost_of(gather, cluster).duration_alone(cluster)
    assert taken == pytest.approx(10e-3 * 255 / 256 + 255 * 0.12e-6, rel=1e-6)


@pytest.mark.parametrize("name", ["a6000-2x4", "g5.48xlarge", "rtx4090-4x8"])
def test_cards_without_nvlink_gather_by_pci_express(name: str) -> None:
    """By hand: 32 GB/s, of which NCCL has three quarters; 2.4 GB take all but one share of 0.1 s.

    Each step of the ring has 5.7 us.
    """
    cluster = load_cluster(name).value
    ranks = cluster.gpus_per_node
    gather = Collective(CollectiveKind.ALL_GATHER, "weights", 1_200_000_000, DType.BF16, NODE)
    taken = cost_of(gather, cluster).duration_alone(cluster)
    assert taken == pytest.approx(0.1 * (ranks - 1) / ranks + (ranks - 1) * 5.7e-6, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "links", "rate"), [("hls-gaudi2", 21, 100), ("hls-gaudi3", 21, 200)]
)
def test_a_gaudi_gathers_by_its_links_to_the_others_of_its_node(
    name: str, links: int, rate: int
) -> None:
    """By hand: 21 links of 100 or 200 Gbit/s; the file says what of it attains."""
    cluster = load_cluster(name).value
    assert cluster.intra.bandwidth == links * rate * 1e9 / 8
    gather = Collective(CollectiveKind.ALL_GATHER, "weights", 1_200_000_000, DType.BF16, NODE)
    taken = cost_of(gather, cluster).duration_alone(cluster)
    alone = 2.4e9 * 7 / 8 / (cluster.intra.bandwidth * cluster.intra.efficiency)
    assert taken == pytest.approx(alone, rel=0.01)


@pytest.mark.parametrize(
    "name", ["hls-gaudi3", "tpu-v6e", "mi250-800g", "g5.48xlarge", "a6000-2x4"]
)
def test_intervals_are_wider_where_no_constant_was_fitted_to_trainings(name: str) -> None:
    """Than those of as many H100, for the same question: 2.4 times from end to end, not 1.5."""
    wide, usual = (
        simulate(cluster, "llama3-8b", "fsdp", gpus=8, accumulation=8)
        for cluster in (name, "dgx-h100")
    )
    ends = [(r.tokens_per_s_low or 0.0, r.tokens_per_s_high or 0.0) for r in (wide, usual)]
    assert ends[0][1] / ends[0][0] > 1.4 * ends[1][1] / ends[1][0]


def test_a_die_of_an_mi250x_is_half_of_a_module() -> None:
    """By hand: 383 TFLOP/s, 128 GiB, 3276.8 GB/s and 560 W of a module of two."""
    die = load_cluster("frontier").value.gpu
    assert 2 * die.peak["bf16"] == 383e12
    assert (2 * die.memory, 2 * die.memory_bandwidth) == (128 * 2**30, 3276.8e9)
    assert die.tdp == 280


@pytest.mark.parametrize("key", names("gpus"))
def test_peaks_are_dense_and_rise_with_fewer_bits(key: str) -> None:
    """The next format is at most 4 times as fast; one that counted sparsity would be more."""
    gpu = load_cluster("dgx-h100", {"gpu": key}).value.gpu
    order = [gpu.peak[kind] for kind in ("bf16", "fp8", "fp4", "mxfp4") if kind in gpu.peak]
    assert all(starmap(lambda less, more: less <= more <= 4 * less, pairwise(order)))
    in_16_bits = [gpu.peak[kind] for kind in ("bf16", "fp16") if kind in gpu.peak]
    assert gpu.peak.get("fp32", 0.0) <= min(in_16_bits)
    assert gpu.precisions
    assert set(gpu.precisions) <= {"bf16", "fp16", "fp32"}
    assert read("gpus", key)["name"] == gpu.name


@pytest.mark.parametrize("key", names("clusters"))
def test_a_run_on_every_cluster_has_an_interval(key: str) -> None:
    """On two nodes; a rack is a node."""
    gpus = 2 * load_cluster(key).value.gpus_per_node
    result = simulate(key, "gpt2-small", "fsdp", gpus=gpus)
    assert 0 < result.tokens_per_s_low < result.tokens_per_s < result.tokens_per_s_high
