"""Sites as workers on real processes: who meets, what is learned, and a lab of two sites."""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from ranks import ranked

pytest.importorskip("torch")

from co2sim.catalog import load_cluster
from co2sim.common.errors import OptionError
from co2sim.schedule.schedule import SITE, SITE_PEERS, Collective, DType, Kind, Layout, Op, Schedule
from realrun.algorithms.process_groups import workers_of
from realrun.errors import SITES
from realrun.execute.collectives import allocate, carry_out
from realrun.execute.world import World
from realrun.lab.lab import FRAME, PAYLOAD, Lab, burst, queue, stated_cluster
from realrun.train import TrainSettings
from realrun.train.settings import check


@ranked(4, gpus_per_node=1)
def test_ranks_meet_inside_their_site_and_across(world: World) -> None:
    """Sites {0, 1} and {2, 3}; peers {0, 2} and {1, 3}; what each adds up to."""
    world.place(Layout(4, 1, 2))
    site, place = divmod(world.rank, 2)
    for group, members in ((SITE, (2 * site, 2 * site + 1)), (SITE_PEERS, (place, place + 2))):
        work = Collective(Kind.ALL_REDUCE, "x", 3, DType.FP32, group)
        world.connect(Schedule("s", (Op("c", work, "comm"),)))
        at = world.communicator("comm", group)
        assert at is not None
        assert tuple(at.members) == members
        buffers = allocate(work, len(at.members), world.device)
        buffers.given.fill_(world.rank + 1)
        carry_out(work, buffers, at, 30.0)
        assert buffers.given[0] == sum(members) + 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy",
    ["local_sgd:tau=2,inner=ddp", "co2:tau=4,delay=3,inner=zero2", "diloco:tau=4,inner=fsdp"],
)
@ranked(4, gpus_per_node=1)
def test_a_site_learns_as_a_node_of_as_many_ranks(world: World, strategy: str) -> None:
    """Bit for bit: losses of training and validation, and bytes that averages sent.

    Two nodes of two ranks as workers, and two sites of two nodes of one.
    """
    from small_training import trained  # noqa: PLC0415 - needs torch

    seen = []
    for worker, layout in (("node", Layout(2, 2)), ("site", Layout(4, 1, 2))):
        world.place(layout)
        history = trained(world, strategy=f"{strategy},worker={worker}", steps=16, eval_every=8)
        seen.append([(row.train_loss, row.validation_loss, row.bytes_sent) for row in history.rows])
    assert seen[0] == seen[1]
    assert seen[1][-1][2]


@ranked(4, gpus_per_node=1)
def test_algorithms_take_sites_from_the_environment(world: World) -> None:
    """REALRUN_SITES of 4 ranks: two sites, four of one rank; one, and unequal ones, are refused."""
    rank = world.rank
    with pytest.MonkeyPatch.context() as patch:
        for sites, inner, peers in (
            ("2", [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]),
            ("4", [rank], [0, 1, 2, 3]),
        ):
            patch.setenv(SITES, sites)
            workers = workers_of("site")
            assert (workers.inner_ranks, workers.peer_ranks) == (inner, peers)
        for sites, words in (
            ("1", "set to 2 sites or more of as many ranks; there are 4 ranks"),
            ("3", "REALRUN_SITES is 3"),
            ("two", "REALRUN_SITES is 'two'; it must be the number of sites"),
        ):
            patch.setenv(SITES, sites)
            with pytest.raises(OptionError, match=words):
                workers_of("site")


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
    assert cluster.host.wan.size == max(burst(50e6 / 8), 2 * queue(1e9 / 8)[1])
    one = tomllib.loads(stated_cluster(Lab(4, 1, "1 Gbit/s")))
    assert {"sites", "wan"}.isdisjoint(one)


def test_the_lab_command_predicts_the_link_between_sites_from_its_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The probe runs at one site; the run has sites, and the latency that the probe measured."""
    from analysis.cli import main, measured  # noqa: PLC0415 - ranks need none of it

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
