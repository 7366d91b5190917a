"""A lab that is slower than stated by as much as its clock: its times are those that are stated."""

from collections.abc import Iterator

import pytest

from co2sim.common.errors import OptionError
from realrun.cli.options import RankSettings
from realrun.cli.train import _check_clock
from realrun.lab import time_dilation


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is in a lab that is three times slower."""
    monkeypatch.setenv(time_dilation.DILATION, "3")
    time_dilation.dilation.cache_clear()
    yield
    monkeypatch.undo()
    time_dilation.dilation.cache_clear()


@pytest.mark.usefixtures("three")
def test_clock_and_waits_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ms of the lab are 30 ms of the machine, which are 10 by the lab's clock."""
    monkeypatch.setattr("realrun.lab.time_dilation.time.monotonic", lambda: 90.03)
    assert time_dilation.lasting(0.01) == pytest.approx(0.03)
    assert time_dilation.now() == pytest.approx(30.01)


def test_outside_of_labs_the_clock_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable, no change."""
    monkeypatch.setattr("realrun.lab.time_dilation.time.monotonic", lambda: 90.03)
    assert (time_dilation.now(), time_dilation.lasting(2.5)) == (90.03, 2.5)


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
        assert time_dilation.for_cores(ranks, cores) == times


@pytest.mark.usefixtures("three")
def test_what_goes_by_another_clock_is_refused() -> None:
    """Training, and GPUs."""
    with pytest.raises(OptionError, match="REALRUN_DILATION is 3"):
        _check_clock()
    with pytest.raises(OptionError, match="--backend is nccl"):
        RankSettings(backend="nccl")
    assert RankSettings(backend="gloo").nproc is None
