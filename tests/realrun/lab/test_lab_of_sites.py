"""Sites as workers on real processes: who meets, what is learned, and a lab of two sites."""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks

from analysis.cli import main, measured
from co2sim.catalog import load_cluster
from co2sim.common.errors import OptionError
from co2sim.schedule.schedule import Layout
from realrun.errors import LabError
from realrun.lab.lab import FRAME, PAYLOAD, Lab, queue, site_burst, stated_cluster
from realrun.train import TrainSettings
from realrun.train.settings import check

LEARNED = ["local_sgd:tau=2,inner=ddp", "co2:tau=4,delay=3,inner=zero2", "diloco:tau=4,inner=fsdp"]


def four(function: str, **arguments: Any) -> list[Any]:
    """What a function gives on four nodes of one rank."""
    return on_ranks(function, 4, gpus_per_node=1, module="site_workers", **arguments)


@pytest.mark.dist
def test_ranks_meet_inside_their_site_and_across() -> None:
    """Sites {0, 1} and {2, 3}; peers {0, 2} and {1, 3}; what each adds up to."""
    assert four("met") == [
        [[0, 1, 3.0], [0, 2, 4.0]],
        [[0, 1, 3.0], [1, 3, 6.0]],
        [[2, 3, 7.0], [0, 2, 4.0]],
        [[2, 3, 7.0], [1, 3, 6.0]],
    ]


@pytest.mark.nightly
@pytest.mark.dist
def test_a_site_learns_as_a_node_of_as_many_ranks() -> None:
    """Bit for bit: losses of training and validation, and bytes that averages sent."""
    for one in four("learned", strategies=LEARNED):
        for text in LEARNED:
            by_node, by_site = one[text]
            assert by_node == by_site
            assert by_site[-1][2]


@pytest.mark.dist
def test_algorithms_take_sites_from_the_environment() -> None:
    """REALRUN_SITES of 4 ranks: two sites, four of one rank; one, and unequal ones, are refused."""
    for rank, found in enumerate(four("workers")):
        two, each, one, three, words = found
        assert two == [[rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]]
        assert each == [[rank], [0, 1, 2, 3]]
        assert "set to 2 sites or more of as many ranks; there are 4 ranks" in one
        assert "REALRUN_SITES is 3" in three
        assert "REALRUN_SITES is 'two'; it must be the number of sites" in words


def test_training_at_one_site_is_refused() -> None:
    """In one line that says how sites are told; nothing else is asked of them."""
    settings = TrainSettings(strategy="co2.published:tau=2,worker=site")
    with pytest.raises(OptionError, match="worker=site"):
        check(settings, Layout(2, 2))
    check(settings, Layout(2, 2, 2))


# --- the lab ------------------------------------------------------------------------------------


def test_a_lab_states_its_sites_and_the_link_between_them(tmp_path: Path) -> None:
    """Two sites of two nodes: the rate of a site's uplink, its burst, and what headers leave."""
    file = tmp_path / "lab.toml"
    file.write_text(stated_cluster(Lab(4, 1, "1 Gbit/s", sites=2, wan="50 Mbit/s")))
    cluster = load_cluster(str(file)).value
    assert (cluster.sites, cluster.nodes_per_site) == (2, 2)
    assert cluster.wan is not None
    assert cluster.wan.bandwidth == pytest.approx(50e6 / 8)
    assert cluster.wan.efficiency == pytest.approx(PAYLOAD / FRAME, abs=1e-4)
    assert cluster.host
    assert cluster.host.wan
    assert cluster.host.wan.size == site_burst(50e6 / 8, 1e9 / 8) >= 2 * queue(1e9 / 8)[1]
    one = tomllib.loads(stated_cluster(Lab(4, 1, "1 Gbit/s")))
    assert {"sites", "wan"}.isdisjoint(one)


def test_sites_that_cannot_be_built_are_refused() -> None:
    """One line says what was given and what is allowed."""
    for nodes, sites, wan, message in [
        (4, 3, "50 Mbit/s", "4 nodes do not divide into 3"),
        (4, 2, None, "sites is 2 and the rate"),
        (4, 1, "50 Mbit/s", "sites is 1 and the rate"),
        (4, 0, None, "sites is 0"),
        (4, 2, "slow", "the rate between sites of a"),
        (4, 2, "1 kbit/s", "the rate between sites is '1"),
    ]:
        with pytest.raises(LabError, match=message) as caught:
            Lab(nodes, 1, "1 Gbit/s", sites=sites, wan=wan)
        assert "\n" not in str(caught.value)


def test_the_lab_command_predicts_the_link_between_sites_from_its_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The probe runs at one site; the run has sites, and the latency that the probe measured."""
    seen: list[tuple[list[str], list[str]]] = []

    def record(lab: Sequence[str], command: Sequence[str]) -> None:
        seen.append((list(lab), list(command)))
        if command[0] == "probe":
            Path("out").mkdir()
            stated = stated_cluster(Lab(4, 1, "1 Gbit/s")).replace('"250 us"', '"123 us"')
            Path("out/probe.toml").write_text(stated)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measured, "_in_lab", record)
    monkeypatch.setattr(measured, "_compared", lambda _: [])
    monkeypatch.setattr(measured, "_report", lambda *_, **__: None)
    asked = ["lab", "--sites", "2", "--wan", "50 Mbit/s", "--model", "tiny-5m"]
    monkeypatch.setattr(sys, "argv", ["co2analysis", *asked, "-s", "co2.published:worker=site"])
    with pytest.raises(SystemExit):
        main()
    (flat, probe), (sited, run) = seen
    assert (probe[0], run[0]) == ("probe", "run")
    assert "--sites" not in flat
    assert sited[-4:] == ["--sites", "2", "--wan", "50 Mbit/s"]
    changes = dict(
        word.split("=", 1) for word, before in zip(run[1:], run, strict=False) if before == "--set"
    )
    cluster = load_cluster("out/probe.toml", changes).value
    assert cluster.sites == 2
    assert cluster.wan is not None
    assert (cluster.wan.bandwidth, cluster.wan.latency) == pytest.approx((50e6 / 8, 123e-6))
