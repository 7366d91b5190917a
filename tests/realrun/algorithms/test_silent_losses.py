"""Trainings that would be lost without a word: they are counted, kept, or refused by name."""

import pytest

pytest.importorskip("torch")
from ranks import on_ranks

pytestmark = pytest.mark.dist
MODULE = "silent_workers"


def test_a_local_step_is_the_outermost_step_however_it_is_taken() -> None:
    """Of an optimizer inside, through a parent's step, and compiled: eight steps, four rounds."""
    for found in on_ranks("counted", 2, module=MODULE):
        assert found == {"inside": [8, 4], "twice": [8, 4], "compiled": [8, 4]}


def test_training_that_is_not_counted_is_refused_and_kept() -> None:
    """By another optimizer, by none that counts, and without gradients; a clamp is no training."""
    for found in on_ranks("lost", 2, module=MODULE):
        assert all(kept for _, kept in found.values() if _)
        assert found["clamped"][0] == ""
        for name in ("another optimizer", "never counted", "by hand"):
            assert "has moved" in found[name][0] or "moved without" in found[name][0], name
        assert "another tensor" in found["assigned"][0]


def test_a_training_that_goes_on_uncounted_is_told_of_itself() -> None:
    """After some backward passes, not only in the end."""
    for told in on_ranks("in_passes", 2, module=MODULE, last=True):
        assert "backward passes" in told


def test_what_is_loaded_before_the_algorithm_is_made_goes_on_bit_for_bit() -> None:
    """Within a round, and with an average under way."""
    assert on_ranks("resumed", 2, module=MODULE) == [[0.0, 0.0]] * 2


def test_nodes_of_unequal_size_are_refused_on_all_ranks() -> None:
    """One, one and two ranks, each size of which divides the world."""
    told = on_ranks("uneven", 4, module=MODULE, last=True)
    assert all("same number of ranks" in one for one in told)


WAYS = ["max_norm", "bag", "functional", "clamp", "data", "assigned", "drawn rows", "halved"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("container", ["sequential", "dict"])
def test_layers_that_change_their_weights_in_forward_train_by_the_equations(
    way: str, container: str
) -> None:
    """On each rank's own data, before the first step, and in batches that make no step."""
    found = on_ranks("in_forward", 2, module=MODULE, way=way, container=container)
    assert all(apart < 1e-6 for apart in found)
