"""Machines of the catalog: the names that people type, dense peaks, and a run on every cluster."""

import tomllib
from collections import Counter
from importlib import resources
from itertools import pairwise, starmap

import pytest
from one_sample import simulate

from co2sim.catalog import key_of, load_cluster, names
from co2sim.catalog.facts import Kind, read

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
    """In any letters, and with a dot: it is no file."""
    assert key_of("clusters", typed) == key
    assert load_cluster(typed).value == load_cluster(key).value


def test_gpus_are_found_by_the_names_that_people_type() -> None:
    """On the command line, and in a file."""
    assert key_of("gpus", "H100-SXM") == "h100"
    found = load_cluster("dgx-a100", {"gpu": "H100 SXM"}).value
    assert found.gpu == load_cluster("dgx-h100").value.gpu


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


@pytest.mark.parametrize("key", names("gpus"))
def test_peaks_are_dense_and_rise_with_fewer_bits(key: str) -> None:
    """The next format is at most 4 times as fast; one that counted sparsity would be more."""
    gpu = load_cluster("dgx-h100", {"gpu": key}).value.gpu
    order = [gpu.peak[kind] for kind in ("bf16", "fp8", "fp4", "mxfp4") if kind in gpu.peak]
    assert all(starmap(lambda less, more: less <= more <= 4 * less, pairwise(order)))
    assert gpu.peak["fp32"] <= min(gpu.peak.get("bf16", gpu.peak["fp16"]), gpu.peak["fp16"])
    assert gpu.precisions
    assert set(gpu.precisions) <= {"bf16", "fp16", "fp32"}
    assert read("gpus", key)["name"] == gpu.name


@pytest.mark.parametrize("key", names("clusters"))
def test_a_run_on_every_cluster_has_an_interval(key: str) -> None:
    """On two nodes; a rack is a node."""
    gpus = 2 * load_cluster(key).value.gpus_per_node
    result = simulate(key, "gpt2-small", "fsdp", gpus=gpus)
    assert 0 < result.tokens_per_s_low < result.tokens_per_s < result.tokens_per_s_high
