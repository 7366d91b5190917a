"""Local updates take several optimizers, wrapped ones, and go on with other numbers of workers."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ranks import on_ranks  # noqa: E402 - needs torch

OTHERS: list[dict[str, Any]] = [
    {"tau": 2},
    {"tau": 2, "staleness": 2, "outer_momentum": 0.5, "clip": 0.1},
    {"tau": 4, "delay": 1},
    {"tau": 4, "delay": 3, "fragments": 2, "keep": 0.5},
    {"tau": 4, "delay": 4, "keep": 1.0},
]


def three(function: str, **arguments: Any) -> list[Any]:
    """What a function gives on three ranks."""
    return on_ranks(function, 3, module="optimizer_workers", **arguments)


@pytest.mark.dist
def test_two_optimizers_train_as_two_groups_of_one() -> None:
    """Bit for bit: the last of them to step ends the local step."""
    assert three("several") == [{"equal": True, "steps": [7, 7]}] * 3


@pytest.mark.dist
def test_a_step_is_over_when_each_optimizer_has_taken_one() -> None:
    """Muon every second step, AdamW every step: 30 local steps, and all ranks end alike."""
    answers = three("muon")
    first = answers[0]
    for answer in answers:
        assert answer["steps"] == 30
        assert answer["end"] == first["end"]
        before, after = answer["losses"]
        assert after < 0.5 * before


@pytest.mark.dist
def test_optimizers_that_cannot_be_are_refused() -> None:
    """None, one twice, a parameter in two, in none, something else, and what averages itself."""
    for told in three("refused"):
        none, twice, shared, missing, other, post, zero = told
        assert "empty" in none
        assert "twice" in twice
        assert "'0.weight'" in shared
        assert "'1.weight'" in missing
        assert "str" in other
        assert "inside" in post
        assert "[0, 1, 2]" in zero


@pytest.mark.dist
def test_other_numbers_of_workers_go_on_from_the_anchor() -> None:
    """They begin at what all agreed on, averages under way included, and stay equal."""
    for two, same, alone in zip(*three("fewer", cases=OTHERS), strict=True):
        for answer in (two, same, alone):
            assert answer["began"]
            assert "load_anchor()" in answer["hint"]
            assert answer["steps"] == 14
        assert two["end"] == same["end"] != alone["end"]


@pytest.mark.dist
def test_states_that_do_not_fit_are_refused() -> None:
    """Of different steps, of different anchors, of another run, and none."""
    for answer in three("mixed"):
        steps, anchors, other, none, key = answer
        assert steps.startswith("MismatchError: rank 1 ")
        assert anchors.startswith("MismatchError: rank 1 ")
        assert "tau = 5" in other
        for said in (none, key):
            assert "load_anchor()" in said
