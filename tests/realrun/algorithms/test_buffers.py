"""Buffers, frozen weights and other modules of every kind end alike on all ranks, or are named."""

import pytest

pytest.importorskip("torch")
from ranks import on_ranks

pytestmark = pytest.mark.dist
MODULE = "buffer_workers"


def test_buffers_of_every_layout_start_from_the_first_rank_and_end_with_the_mean() -> None:
    """Slices, expanded, overlapping and sparse ones too; memory outside of a slice is untouched."""
    expected = on_ranks("first_ones", 2, module=MODULE)[0]
    for rank, found in enumerate(on_ranks("of_every_layout", 2, module=MODULE)):
        outside = found.pop("outside")
        assert {name: one[0] for name, one in found.items()} == {
            name: one[0] for name, one in expected.items()
        }
        for at in (1, 2):
            assert {name: one[at] for name, one in found.items()} == {
                name: one[1] for name, one in expected.items()
            }
        kept = [float(one) - 100 * rank for one in outside[0]]
        assert kept[3:6] + kept[9:12] == [9.0, 10.0, 11.0, 21.0, 22.0, 23.0]


def test_buffers_without_a_mean_stay_as_they_are() -> None:
    """Quantized and meta ones; codes of a subclass are sent, what cannot be read is named."""
    for found in on_ranks("left_alone", 2, module=MODULE):
        assert found["codes"] == [0, 1, 2, 3]
        assert found["ended"] == []
        (text,) = found["made"]
        assert "'closed'" in text


def test_elements_that_are_not_finite_on_one_rank_are_left_out_and_named() -> None:
    """Those of a mask that all ranks have stay."""
    one, other = on_ranks("not_finite", 2, module=MODULE)
    for end in ("finish", "consensus"):
        assert one[end]["mask"]
        assert other[end]["mask"]
        assert one[end]["told"] == other[end]["told"]
        bad, also = one[end]["told"]
        assert "'AveragedModel 0: module.seen'" in bad + also
        assert "'bad'" in bad + also
        assert "rank 1" in bad
    assert one["finish"] == other["finish"]
    assert one["finish"]["moving"] == ["0.5", "-inf", "-inf"]
    assert one["finish"]["bad"] == ["0.5", "4.0", "4.0"]
    assert one["finish"]["also"] == ["7.0", "0.0"]
    assert other["consensus"]["also"] == ["inf", "0.0"]


def test_a_rank_without_data_gives_nothing_to_buffers_counts_and_frozen_weights() -> None:
    """NaN of a rank that took no step does not count, and nothing is warned of."""
    one, other = on_ranks("joined", 2, module=MODULE)
    assert one == other
    assert one == {
        "batches": 2,
        "variance": True,
        "mask": ["-inf", "-inf"],
        "averaged": 9,
        "teacher": ["5.0"] * 6,
        "told": [],
    }


def test_buffers_that_differ_between_ranks_are_kept_and_named() -> None:
    """By all ranks at once; all others are averaged."""
    one, other = on_ranks("unlike", 2, module=MODULE)
    assert one["names"] == other["names"]
    assert set(one["names"]) == {
        "grown",
        "typed",
        "graph",
        "gone",
        "new",
        "Linear 0: weight",
        "Linear 0: bias",
    }
    assert one["alike"]
    assert (one["sizes"], other["sizes"]) == ([4, 3, 5], [8, 9, 5])
    assert one["mean"] == other["mean"] == [["0.5"] * 3] * 2
    assert one["parameters"] == other["parameters"]


def test_frozen_weights_that_moved_end_with_the_mean_however_they_were_written() -> None:
    """Through `.data`, by loading, as another tensor; what differed before the first step stays.

    A consensus has the mean, too, and afterwards each rank what it had.
    """
    for rank, found in enumerate(on_ranks("frozen", 2, module=MODULE)):
        assert found.pop("own") == [str(float(rank))]
        assert set(map(tuple, found.values())) == {("0.5", str(float(rank)), "0.5")}


@pytest.mark.parametrize(
    ("dtype", "device"), [("bfloat16", "cpu"), ("float64", "cpu"), ("float32", "meta")]
)
def test_the_defaults_of_torch_change_nothing(dtype: str, device: str) -> None:
    """What is kept is fp32, on the parameters' device, and the result is the same."""
    for usual, other in on_ranks("by_default", 2, module=MODULE, dtype=dtype, device=device):
        assert usual == other


def test_vectors_of_a_spectral_norm_are_the_first_ranks() -> None:
    """The mean of two vectors of length 1 is shorter, and with other signs nothing."""
    for (found,) in on_ranks("spectral", 2, module=MODULE):
        assert set(found) == {"True"}


def test_sparse_buffers_of_other_structure_are_named_at_the_start() -> None:
    """They cannot be sent in place."""
    for text in on_ranks("new_buffers", 2, module=MODULE, last=True):
        assert "MismatchError" in text
        assert "graph" in text
