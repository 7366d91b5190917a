"""A lab that is slower than stated by as much as its clock: its times are those that are stated."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from co2sim.catalog import load_cluster
from co2sim.errors import OptionError
from realrun import dilation
from realrun.cli.options import known_backend
from realrun.cli.train import _check_clock
from realrun.errors import LabError
from realrun.launch.lab import check_machine, stated_cluster
from realrun.launch.lab_plan import Lab
from realrun.launch.namespaces import payload_share


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is in a lab that is three times slower."""
    monkeypatch.setenv(dilation.DILATION, "3")
    dilation.dilation.cache_clear()
    yield
    monkeypatch.undo()
    dilation.dilation.cache_clear()


@pytest.mark.usefixtures("three")
def test_clock_and_waits_fit_together() -> None:
    """Waiting for 10 ms of the lab takes 30 ms of the machine, and 10 by the lab's clock."""
    before, own, after = time.monotonic(), dilation.now(), time.monotonic()
    time.sleep(dilation.lasting(0.01))
    least, passed, most = time.monotonic() - after, dilation.now() - own, time.monotonic() - before
    assert least >= 0.03
    assert least / 3 <= passed <= most / 3


def test_outside_of_labs_the_clock_is_that_of_the_machine() -> None:
    """No variable, no change."""
    before = time.monotonic()
    assert before <= dilation.now() <= time.monotonic()
    assert dilation.lasting(2.5) == 2.5


def test_only_where_cores_are_few_a_lab_is_slower() -> None:
    """Half as slow again as there are ranks for a core, in whole numbers; at most 100 times."""
    for ranks, cores, times in [
        (1, 2, 1),
        (2, 2, 2),
        (2, 3, 1),
        (4, 16, 1),
        (3, 2, 3),
        (4, 2, 3),
        (8, 2, 6),
        (256, 1, 100),
    ]:
        assert dilation.for_cores(ranks, cores) == times


def test_only_kernels_that_sleep_may_take_longer() -> None:
    """Real ones are as fast as the cores are, and other programs go by the machine's clock.

    Between sites links are slow enough.
    """
    for command, times in [
        (("realrun", "run", "-s", "ddp", "-m", "tiny-5m"), 3),
        (("realrun", "run", "--kernels", "sleep"), 3),
        (("realrun", "run", "--kernels", "flops"), 1),
        (("realrun", "run", "--kernels=flops"), 1),
        (("realrun", "run", "--out", "flops"), 3),
        (("realrun", "probe", "--stated", "--gpu", "virtual"), 3),
        (("realrun", "probe", "--gpu=virtual"), 3),
        (("realrun", "probe", "--stated"), 1),
        (("realrun", "train", "--task", "text"), 1),
        (("python", "train.py"), 1),
        ((), 1),
    ]:
        assert dilation.chosen("auto", command, ranks=4, cores=2) == times
        assert dilation.chosen("auto", command, ranks=4, cores=2, sites=2) == 1
        assert dilation.chosen("7", command, ranks=4, cores=2, sites=2) == 7


def test_other_numbers_are_refused() -> None:
    """One line says what was given and what is allowed, as an option and as a variable."""
    for text in ["0", "-1", "2.5", "", "twice", "101", "9" * 5000]:
        with pytest.raises(OptionError, match="--dilation is "):
            dilation.chosen(text, (), ranks=4, cores=2)
        with pytest.raises(OptionError, match="REALRUN_DILATION is "):
            dilation.dilation_of({dilation.DILATION: text})
        with pytest.raises(LabError, match="dilation is 101"):
            Lab(2, 1, "1 Gbit/s", dilation=101)


@pytest.mark.usefixtures("three")
def test_what_goes_by_another_clock_is_refused() -> None:
    """Training, and GPUs."""
    with pytest.raises(OptionError, match="REALRUN_DILATION is 3"):
        _check_clock()
    with pytest.raises(OptionError, match="--backend is nccl"):
        known_backend("nccl")
    assert known_backend("gloo") == "gloo"


def test_stated_are_the_rates_that_were_asked_for(tmp_path: Path) -> None:
    """And what is of the machine by the lab's clock: latencies a third, packets as they are."""
    found = []
    for times in (1, 3):
        file = tmp_path / f"{times}.toml"
        lab = Lab(2, 2, "900 Mbit/s", sites=2, wan="300 Mbit/s", dilation=times)
        file.write_text(stated_cluster(lab))
        found.append(load_cluster(str(file)).value)
        assert lab.rates.node == pytest.approx(900e6 / 8 / times)
        assert lab.rates.site == pytest.approx(300e6 / 8 / times)
        assert lab.rates.loopback == pytest.approx(6e9 / 8 / times)
    one, slow = found
    for name in ("intra", "inter", "wan"):
        assert getattr(slow, name).bandwidth == getattr(one, name).bandwidth
    assert slow.inter.latency == pytest.approx(one.inter.latency / 3, rel=1e-2)
    assert slow.intra.latency == pytest.approx(one.intra.latency / 3, rel=1e-2)
    assert slow.wan
    assert one.wan
    assert slow.wan.latency == pytest.approx(one.wan.latency / 3, rel=1e-2)
    assert slow.fully_idle == pytest.approx(one.fully_idle / 3, rel=1e-2)
    assert slow.inter.efficiency == pytest.approx(payload_share(100e6 / 8, two=True), abs=1e-4)


@pytest.mark.nightly
@pytest.mark.lab
@pytest.mark.dist
def test_a_slower_lab_measures_the_same(tmp_path: Path) -> None:
    """A round takes as long by the lab's clock, and the record says which clock it was."""
    try:
        check_machine()
    except LabError as error:
        pytest.skip(str(error))
    rounds = []
    for times in ("1", "3"):
        where = tmp_path / times
        command = [sys.executable, "-m", "realrun", "lab", "run", "--nodes", "2", "--rate"]
        command += ["300 Mbit/s", "--dilation", times, "--", "realrun", "run", "-s", "ddp"]
        command += ["-m", "tiny-5m", "--rounds", "5", "--out", str(where)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        assert ("this lab and its clock run 3 times slower" in done.stderr) == (times == "3")
        record = json.loads((where / "ddp" / "run.json").read_text())
        assert record["environment"]["dilation"] == times
        rounds.append(record["figures"]["round_time_s"])
    assert rounds[1] == pytest.approx(rounds[0], rel=0.1)
