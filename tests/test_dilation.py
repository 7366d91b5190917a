"""A lab that is slower than stated by as much as its clock: its times are those that are stated."""

import time
from collections.abc import Iterator

import pytest

from co2sim.errors import OptionError
from realrun import dilation
from realrun.cli.options import known_backend
from realrun.cli.train import _check_clock


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


@pytest.mark.usefixtures("three")
def test_what_goes_by_another_clock_is_refused() -> None:
    """Training, and GPUs."""
    with pytest.raises(OptionError, match="REALRUN_DILATION is 3"):
        _check_clock()
    with pytest.raises(OptionError, match="--backend is nccl"):
        known_backend("nccl")
    assert known_backend("gloo") == "gloo"
