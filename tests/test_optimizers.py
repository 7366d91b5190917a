"""Local updates take several optimizers, wrapped ones, and go on with other numbers of workers."""

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from together import together  # noqa: E402 - needs torch

from realrun import algorithms  # noqa: E402 - needs torch

OTHERS: list[dict[str, Any]] = [
    {"tau": 2},
    {"tau": 2, "staleness": 2, "outer_momentum": 0.5, "clip": 0.1},
    {"tau": 4, "delay": 1},
    {"tau": 4, "delay": 3, "fragments": 2, "keep": 0.5},
    {"tau": 4, "delay": 4, "keep": 1.0},
]


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What three ranks gave, by function."""
    calls: dict[str, dict[str, Any]] = {
        "several": {},
        "muon": {},
        "wrapped": {},
        "refused": {},
        "fewer": {"cases": OTHERS},
        "mixed": {},
    }
    return together("optimizer_workers", 3, calls)


@pytest.mark.dist
def test_two_optimizers_train_as_two_groups_of_one(found: dict[str, list[Any]]) -> None:
    """Bit for bit: the last of them to step ends the local step."""
    assert found["several"] == [{"equal": True, "steps": [7, 7]}] * 3


@pytest.mark.dist
def test_a_step_is_over_when_each_optimizer_has_taken_one(found: dict[str, list[Any]]) -> None:
    """Muon every second step, AdamW every step: 30 local steps, and all ranks end alike."""
    first = found["muon"][0]
    for answer in found["muon"]:
        assert answer["steps"] == 30
        assert answer["end"] == first["end"]
        before, after = answer["losses"]
        assert after < 0.5 * before


@pytest.mark.dist
def test_an_optimizer_in_a_wrapper_counts(found: dict[str, list[Any]]) -> None:
    """As Accelerate and Lightning wrap it."""
    assert found["wrapped"] == [2] * 3


@pytest.mark.dist
def test_optimizers_that_cannot_be_are_refused(found: dict[str, list[Any]]) -> None:
    """None, one twice, a parameter in two, in none, something else, and what averages itself."""
    for told in found["refused"]:
        none, twice, shared, missing, other, post, zero = told
        assert none == "optimizer is an empty list; give one optimizer at least"
        assert twice == "an optimizer is there twice"
        assert shared == "two optimizers hold '0.weight'; one must, and no other"
        assert missing.startswith("the optimizer does not hold '1.weight', which is trainable")
        assert other == "optimizer is a str, not a torch.optim.Optimizer"
        assert "give the optimizer inside it" in post
        assert "ZeroRedundancyOptimizer over ranks [0, 1, 2], but a worker is ranks [" in zero


@pytest.mark.dist
@pytest.mark.parametrize("case", range(len(OTHERS)), ids=str)
def test_other_numbers_of_workers_go_on_from_the_anchor(
    case: int, found: dict[str, list[Any]]
) -> None:
    """They begin at what all agreed on, averages under way included, and stay equal."""
    two, same, alone = (answer[case] for answer in found["fewer"])
    for answer in (two, same, alone):
        assert answer["began"]
        assert answer["hint"].endswith("or take load_anchor()")
        assert answer["steps"] == 14
    assert two["end"] == same["end"] != alone["end"]


@pytest.mark.dist
def test_states_that_do_not_fit_are_refused(found: dict[str, list[Any]]) -> None:
    """Of different steps, of different anchors, of another run, and none."""
    for answer in found["mixed"]:
        steps, anchors, other, none, key = answer
        assert steps.startswith("MismatchError: rank 1 has another saved state than rank 0: 'of")
        assert anchors.startswith("MismatchError: rank 1 has another anchor than rank 0")
        assert other.startswith("OptionError: the saved state is of another run: 'tau = 5', here")
        assert none.startswith("OptionError: the saved state holds nothing; load_anchor() takes")
        assert key.endswith("load it on as many ranks as saved it, or take load_anchor()")


@pytest.mark.parametrize("name", ["CO2", "DiLoCo", "LocalSGD", "OverlapLocalSGD", "SlowMo"])
def test_help_shows_all_options(name: str) -> None:
    """Those of all algorithms stand in the signature of each, with their defaults."""
    shown = inspect.signature(getattr(algorithms, name)).parameters
    assert list(shown)[:3] == ["model", "optimizer", "tau"]
    assert {one.kind for one in list(shown.values())[2:]} == {inspect.Parameter.KEYWORD_ONLY}
    assert shown["worker"].default == "gpu"
    assert shown["deadline"].default is None


def test_a_class_of_ones_own_keeps_its_options() -> None:
    """With the constructor of CO2, or with one that passes on what it does not know."""

    class Same(algorithms.CO2):
        """Nothing else."""

    class Noisy(algorithms.CO2):
        """One option more."""

        def __init__(self, *given: Any, noise: float = 0.0, **others: Any) -> None:
            super().__init__(*given, **others)
            self.noise = noise

    class Third(Same):
        """Of a class of one's own."""

    shown = inspect.signature(algorithms.CO2)
    assert inspect.signature(Same) == inspect.signature(Third) == shown
    assert list(inspect.signature(Noisy).parameters) == ["given", "noise", "others"]
