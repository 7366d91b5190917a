"""Failures of a cluster: in files, by name, as single numbers; and the published ones."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from co2sim.catalog import load_cluster, names
from co2sim.common.errors import Co2simError
from co2sim.hardware.failures import Failures
from co2sim.prediction.goodput import Trained, goodput_where

DAY, HOUR = 86400.0, 3600.0

CLUSTER = """
name = "two nodes"
source = "our machine room"
nodes = 2
gpus_per_node = 4
gpu = "a100-40"
intra = { bandwidth = "300 GB/s", latency = "3 us" }
inter = { bandwidth = "25 Gbit/s", latency = "30 us" }
"""


def failures(**overrides: str) -> Failures:
    """Of a cluster of the catalog, with numbers that are set."""
    found = load_cluster("dgx-h100", {k.replace("__", "."): v for k, v in overrides.items()}).value
    assert found.failures is not None
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
    assert beside is not None
    assert beside.node == 40 * DAY
    path.write_text(CLUSTER + '\n[failures]\nnode = "150 days"\nspares = 2\n')
    own = load_cluster(str(path)).value.failures
    assert own is not None
    assert (own.node, own.spares, own.gpu) == (150 * DAY, 2, None)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"failures": "meta-rsc"}, "unknown failure 'meta-rsc'; did you mean 'meta-rsc-2'"),
        ({"failures.nod": "1 h"}, "did you mean 'failures.node'"),
        ({"failures.node": "150"}, "has no unit; expected a time"),
        ({"failures.node": "0 h"}, "must be above 0"),
        (
            {"failures": "meta-rsc-1", "failures.by_size.1.gpus": "8"},
            "has 8, 8, 16384, 131072 GPUs",
        ),
        ({"failures": "meta-rsc-1", "failures.by_size.1.shortest": "9 h"}, "above between"),
        ({"failures.preemption": "0 h"}, "must be above 0"),
        ({"failures.preemption": "1 h", "failures.spot_price": "1.5"}, "above 0 and at most 1"),
        ({"failures.detection": "1 min"}, "nothing fails; give the mean time between failures"),
        ({"failures.switch": "1 h"}, "switch and gpus_per_switch go together"),
        ({"failures.node": "1 h", "failures.spares": "-1"}, "must be at least 0"),
        ({"failures.node": "1 h", "failures.rate_low": "1.5"}, "above 0 and at most 1"),
        ({"failures.node": "1 h", "failures.rate_high": "0.5"}, "must be at least 1"),
        ({"failures.node": "1 h", "failures.restart_low": "1 h"}, "it must be at most restart"),
        ({"failures.node": "1 h", "failures.restart_high": "1 s"}, "must be at least 750"),
        ({"failures.node": "1 h", "failures.checkpoint": "often"}, "'background' or 'blocking'"),
        ({"failures.node": "1 h", "failures.checkpoint_bandwidth": "0 GB/s"}, "at least 1 B/s"),
    ],
)
def test_what_cannot_be_is_one_line(overrides: dict[str, str], said: str) -> None:
    """It says what, what was given, and what is allowed."""
    with pytest.raises(Co2simError, match=re.escape(said)) as error:
        load_cluster("dgx-h100", overrides)
    assert "\n" not in str(error.value)


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


def test_the_range_of_rsc_1_has_both_rates_of_its_paper() -> None:
    """At 1,024 GPUs from 7.0 h to the 28.8 h of 6.50 in 1,000 node-days; 7.9 h lies between."""
    of_job = failures(failures="meta-rsc-1").of_job(1024, 128)
    assert 7.9 / of_job.rate_low == pytest.approx(28.8)
    assert 7.9 / of_job.rate_high == pytest.approx(7.0)


def test_a_rate_that_is_given_takes_the_place_of_counts_by_size() -> None:
    """`failures.node` is what it says, at every size."""
    own = failures(failures="meta-rsc-1", failures__node="150 days")
    assert own.of_job(1024, 128).node == 150 * DAY
    assert own.basis_of(1024) == ""


@pytest.mark.parametrize("entry", names("failures"))
def test_the_headline_is_in_the_middle_of_its_range(entry: str) -> None:
    """Restarts are no nearer to one end than to the other, unless their mean was measured."""
    found = failures(failures=entry)
    low, high = found.restart_low, found.restart_high
    assert low is not None
    assert high is not None
    measured = entry == "bytedance-dense"
    assert measured or found.restart == pytest.approx((low + high) / 2)
    of_job = found.of_job(1024, 128)
    assert of_job.rate_low <= 1 <= of_job.rate_high
