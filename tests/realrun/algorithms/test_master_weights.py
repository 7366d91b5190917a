"""Optimizers that keep the parameters once more: averaged by name, or refused."""

import pytest

pytest.importorskip("torch")
from ranks import on_ranks

pytestmark = pytest.mark.dist


def test_master_weights_are_averaged_in_the_layouts_of_four_libraries() -> None:
    """The model ends, bit for bit, where plain averages of fp32 masters end."""
    for found in on_ranks("trained", 2, module="master_workers"):
        assert found == dict.fromkeys(("state", "groups", "main", "flat"), 0.0)


def test_what_would_undo_averages_is_refused_with_a_remedy() -> None:
    """Masters that are not named, or shared out among ranks, slow weights, a wrong name."""
    for found in on_ranks("refused", 2, module="master_workers"):
        assert all(said.startswith("OptionError") for said in found.values()), found
        assert "master_weights='master_param'" in found["state"]
        assert "master_weights='param_groups_master'" in found["groups"]
        for layout in ("main", "flat"):
            assert "the optimizer does not hold '0.weight'" in found[layout]
        assert "have 10 elements on this rank, the parameter 20" in found["part"]
        assert "'slow' of Slow" in found["slow"]


def test_averages_that_something_hidden_takes_back_are_warned_of() -> None:
    """A flat master in an object that nobody looks into; a plain optimizer is not."""
    for hidden, plain in on_ranks("taken_back", 2, module="master_workers"):
        assert "steps take back" in hidden
        assert not plain


def test_masters_of_fp32_parameters_and_means_that_follow_end_alike_on_all_ranks() -> None:
    """The model gets what its masters get; the mean of ASGD needs no name."""
    one, other = on_ranks("in_fp32", 2, module="master_workers")
    assert one == other
