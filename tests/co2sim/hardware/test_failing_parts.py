"""Failures of a cluster: in files, by name, as single numbers; and the published ones."""

import re
from pathlib import Path

import pytest
from scipy.stats import chi2

from co2sim.catalog import load_cluster, names
from co2sim.common.errors import Co2simError
from co2sim.hardware.failures import Failures
from co2sim.prediction.goodput import Trained, goodput_where

DAY = 86400.0

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
        ({"failures.detection": "1 min"}, "nothing fails; give the mean time between failures"),
        ({"failures.switch": "1 h"}, "switch and gpus_per_switch go together"),
        ({"failures.node": "1 h", "failures.spares": "-1"}, "must be at least 0"),
        ({"failures.node": "1 h", "failures.rate_low": "1.5"}, "above 0 and at most 1"),
        ({"failures.node": "1 h", "failures.rate_high": "0.5"}, "must be at least 1"),
        ({"failures.node": "1 h", "failures.restart_low": "1 h"}, "it must be at most restart"),
        ({"failures.node": "1 h", "failures.restart_high": "1 s"}, "must be at least 300"),
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
    """6.50 and 2.34 in 1,000 node-days; 419 in 54 days; 175 in 90 days."""
    assert per_second("meta-rsc-1", 8000) * DAY == pytest.approx(6.50, rel=1e-3)
    assert per_second("meta-rsc-2", 8000) * DAY == pytest.approx(2.34, rel=1e-3)
    assert per_second("llama3-405b", 16384) * 54 * DAY == pytest.approx(419, rel=2e-3)
    assert per_second("bytedance-dense", 9600) * 90 * DAY == pytest.approx(175, rel=1e-3)


@pytest.mark.parametrize(("entry", "count"), [("llama3-405b", 419), ("bytedance-dense", 175)])
def test_ranges_of_rates_are_those_of_a_count(entry: str, count: int) -> None:
    """The exact 90 % interval of a Poisson mean (Garwood 1936)."""
    found = failures(failures=entry)
    assert found.rate_low == pytest.approx(chi2.ppf(0.05, 2 * count) / 2 / count, abs=2e-3)
    assert found.rate_high == pytest.approx(chi2.ppf(0.95, 2 * count + 2) / 2 / count, abs=2e-3)


def test_the_range_of_rsc_1_reaches_what_was_measured_at_1024_gpus() -> None:
    """7.9 h between failures."""
    found = per_second("meta-rsc-1", 1024) * failures(failures="meta-rsc-1").rate_high
    assert 1 / found == pytest.approx(7.9 * 3600, rel=2e-3)
