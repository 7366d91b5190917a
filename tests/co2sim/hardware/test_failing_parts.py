"""Failures of a cluster: in files, by name, as single numbers; and the published ones."""

from pathlib import Path

import numpy as np
import pytest
from commands import OFFER
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from co2sim.catalog import load_cluster, names
from co2sim.hardware.failures import Failures
from co2sim.prediction.goodput import Trained, goodput_where

DAY, HOUR = 86400.0, 3600.0

CLUSTER = OFFER.format(name="two nodes", price=2, rate=25, nodes=2)


def failures(**overrides: str) -> Failures:
    """Of a cluster of the catalog, with numbers that are set."""
    found = load_cluster("dgx-h100", {k.replace("__", "."): v for k, v in overrides.items()}).value
    return found.failures


def per_second(entry: str, gpus: int) -> float:
    """Failures of a job of so many GPUs, 8 in a node."""
    job = Trained(gpus=gpus, nodes=-(-gpus // 8), parameters=1, round_time=1.0)
    return goodput_where(failures(failures=entry), job).failures_per_second


# --- files and overrides ------------------------------------------------------------------------


def test_no_cluster_of_the_catalog_fails_by_itself() -> None:
    """Failures are the user's to name: no step time depends on them."""
    assert all(load_cluster(key).value.failures is None for key in names("clusters"))


def test_a_file_names_an_entry_or_has_a_table(tmp_path: Path) -> None:
    """`failures = "meta-rsc-1"`, a file beside it, or `[failures]`."""
    path = tmp_path / "mine.toml"
    path.write_text(CLUSTER.replace("nodes = 2", 'nodes = 2\nfailures = "meta-rsc-1"', 1))
    named = load_cluster(str(path)).value.failures
    assert named == failures(failures="meta-rsc-1")
    (tmp_path / "ours.toml").write_text('node = "40 days"\nsource = "our log"\n')
    path.write_text(CLUSTER.replace("nodes = 2", 'nodes = 2\nfailures = "ours.toml"', 1))
    beside = load_cluster(str(path)).value.failures
    assert beside.node == 40 * DAY
    path.write_text(CLUSTER + '\n[failures]\nnode = "150 days"\nspares = 2\n')
    own = load_cluster(str(path)).value.failures
    assert (own.node, own.spares, own.gpu) == (150 * DAY, 2, None)


# --- the published ones -------------------------------------------------------------------------


def test_rates_of_the_entries_are_the_published_ones() -> None:
    """7.9 h for 1,024 GPUs; 2.34 in 1,000 node-days; 419 in 54 days; 175 in 90 days."""
    assert per_second("meta-rsc-1", 1024) * 7.9 * HOUR == pytest.approx(1)
    assert per_second("meta-rsc-2", 8000) * DAY == pytest.approx(2.34, rel=1e-3)
    assert per_second("llama3-405b", 16384) * 54 * DAY == pytest.approx(419, rel=2e-3)
    assert per_second("bytedance-dense", 9600) * 90 * DAY == pytest.approx(175, rel=1e-3)


@pytest.mark.parametrize(("entry", "count"), [("llama3-405b", 419), ("bytedance-dense", 175)])
def test_ranges_of_rates_are_those_of_a_count(entry: str, count: int) -> None:
    """The exact 90 % interval of a Poisson mean (Garwood 1936)."""
    found = failures(failures=entry)
    assert found.rate_low == pytest.approx(chi2.ppf(0.05, 2 * count) / 2 / count, abs=2e-3)
    assert found.rate_high == pytest.approx(chi2.ppf(0.95, 2 * count + 2) / 2 / count, abs=2e-3)


@pytest.mark.parametrize(
    ("gpus", "hours"), [(8, 47.7 * 24), (1024, 7.9), (16384, 1.8), (131072, 0.23)]
)
def test_sizes_that_were_counted_fail_as_counted(gpus: int, hours: float) -> None:
    """Figure 7 of Kokolis et al., arXiv 2410.21680, to the last digit."""
    assert 1 / per_second("meta-rsc-1", gpus) == pytest.approx(hours * HOUR)
    assert "at this size" in failures(failures="meta-rsc-1").basis_of(gpus)


@given(st.integers(1, 1_000_000))
def test_other_sizes_lie_on_lines_of_logarithms(gpus: int) -> None:
    """As NumPy interpolates; beyond the counts a GPU fails as often as in the nearest."""
    sizes, hours = np.array([8, 1024, 16384, 131072]), np.array([47.7 * 24, 7.9, 1.8, 0.23])
    inside = min(max(gpus, 8), 131072)
    expected = np.exp(np.interp(np.log(inside), np.log(sizes), np.log(hours))) * inside / gpus
    found = failures(failures="meta-rsc-1")
    of_job = found.of_job(gpus, 3)
    assert of_job.node == pytest.approx(3 * float(expected) * HOUR)
    assert of_job.by_size == ()
    words = "extrapolated" if gpus != inside else "interpolated"
    assert gpus in sizes or words in found.basis_of(gpus)


def test_a_rate_that_is_given_takes_the_place_of_counts_by_size() -> None:
    """`failures.node` is what it says, at every size."""
    own = failures(failures="meta-rsc-1", failures__node="150 days")
    assert own.of_job(1024, 128).node == 150 * DAY
    assert own.basis_of(1024) == ""
