"""Local-update algorithms end alike on all ranks, and who leaves is named to the others."""

import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from local_problem import network, optimizer, set_vector, train, vector  # noqa: E402 - needs torch
from together import together  # noqa: E402 - needs torch
from torch import distributed as dist  # noqa: E402 - needs torch

from realrun.algorithms import LocalSGD, notices  # noqa: E402 - needs torch
from realrun.algorithms.notices import Notices  # noqa: E402 - needs torch

pytestmark = pytest.mark.dist

UNEVEN = [
    {"steps": 6, "options": {}},
    {"steps": 6, "options": {"dtype": "int8"}},
    {"steps": 6, "options": {"delay": 1}},
    {"steps": 4, "options": {}, "raises": True},
    {"steps": 12, "options": {}, "raises": True},
]
"""Rank 1 takes these steps, all others 12, in rounds of 3."""

FINISHED: list[dict[str, Any]] = [
    {"algorithm": "CO2", "steps": 6, "options": {"tau": 3}},
    {"algorithm": "CO2", "steps": 8, "options": {"tau": 3, "staleness": 2}},
    {"algorithm": "CO2", "steps": 8, "options": {"tau": 3, "delay": 2}},
    {"algorithm": "CO2", "steps": 7, "options": {"tau": 3, "delay": 1, "fragments": 3}},
    {"algorithm": "CO2", "steps": 7, "options": {"tau": 3, "delay": 1, "preview": True}},
    {"algorithm": "OverlapLocalSGD", "steps": 5, "options": {"tau": 2}},
    {"algorithm": "DiLoCo", "steps": 5, "options": {"tau": 2}},
    {"algorithm": "SlowMo", "steps": 4, "options": {"tau": 3}},
    {"algorithm": "LocalSGD", "steps": 5, "options": {"tau": 3}},
]


ELSEWHERE: list[dict[str, Any]] = [
    {"steps": 8, "options": {"delay": 1, "fragments": 4}, "evaluates": False},
    {"steps": 12, "options": {}, "evaluates": False},
    {"steps": 7, "options": {"delay": "auto"}, "evaluates": True},
]
"""What ranks 0 and 2 do, while rank 1 finishes after 6 steps, in rounds of 4."""

UNEQUAL = [7, 4, 9]
JOINED: list[dict[str, Any]] = [
    {"algorithm": "LocalSGD", "steps": UNEQUAL, "options": {"tau": 3}},
    {"algorithm": "LocalSGD", "steps": [0, 3, 2], "options": {"tau": 1}},
    {"algorithm": "LocalSGD", "steps": UNEQUAL, "options": {"tau": 3, "dtype": "int8"}},
    {"algorithm": "CO2", "steps": UNEQUAL, "options": {"tau": 3}},
    {"algorithm": "CO2", "steps": UNEQUAL, "options": {"tau": 3, "staleness": 2}},
    {"algorithm": "CO2", "steps": UNEQUAL, "options": {"tau": 3, "delay": 2}},
    {"algorithm": "CO2", "steps": UNEQUAL, "options": {"tau": 3, "delay": 1, "fragments": 3}},
    {"algorithm": "CO2", "steps": [30, 41, 22], "options": {"tau": 4, "delay": "auto"}},
    {"algorithm": "DiLoCo", "steps": UNEQUAL, "options": {"tau": 4}},
    {"algorithm": "OverlapLocalSGD", "steps": UNEQUAL, "options": {"tau": 2}},
]
EVEN: list[dict[str, Any]] = [
    {"algorithm": "CO2", "steps": [6] * 3, "options": {"tau": 3}},
    {"algorithm": "CO2", "steps": [6] * 3, "options": {"tau": 3, "staleness": 2}},
    {"algorithm": "SlowMo", "steps": [6] * 3, "options": {"tau": 3}},
    {"algorithm": "DiLoCo", "steps": [6] * 3, "options": {"tau": 2, "dtype": "bf16"}},
]


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What three ranks gave, by function."""
    calls: dict[str, dict[str, Any]] = {
        "uneven": {"cases": UNEVEN},
        "finished": {"cases": [*FINISHED, *[one | {"steps": 6} for one in EVEN]]},
        "evaluated": {},
        "misused": {},
        "rates": {},
        "joined": {"cases": [*JOINED, *EVEN]},
        "not_joined": {},
        "partly": {},
        "unfrozen": {},
        "within": {},
        "elsewhere": {"cases": ELSEWHERE},
        "joined_buffers": {},
        "within_a_long_round": {},
        "steps_joined": {"steps": UNEQUAL},
    }
    return together("ending_workers", 3, calls)


@pytest.mark.parametrize("case", [0, 1, 2])
def test_uneven_steps_are_told_at_once_with_counts(case: int, found: dict[str, list[Any]]) -> None:
    """Those that wait name the rank and both counts, and the one that left learns of it, too."""
    answers = [answer[case] for answer in found["uneven"]]
    for rank in (0, 2):
        told = answers[rank]["told"]
        assert told.startswith("RankFailure: the average of round 2 failed: rank 1 closed after 6")
        assert f"rank {rank} has taken " in told
    assert "; rank 1 has taken 6" in answers[1]["told"]
    assert "raised RankFailure" in answers[1]["told"]
    assert all(answer["seconds"] < 20 for answer in answers)  # of a deadline of 60


@pytest.mark.parametrize(("case", "steps"), [(3, 4), (4, 12)])
def test_an_exception_is_told_at_once(case: int, steps: int, found: dict[str, list[Any]]) -> None:
    """All others end with a line that names rank and exception, also where they only close."""
    answers = [answer[case] for answer in found["uneven"]]
    assert answers[1]["told"] == "ValueError: bad sample"
    for rank in (0, 2):
        told = answers[rank]["told"]
        assert told.startswith("RankFailure: ")
        assert f"rank 1 raised ValueError (bad sample) after {steps} steps" in told
    assert all(answer["seconds"] < 20 for answer in answers)


def test_an_exception_is_told_within_a_round(found: dict[str, list[Any]]) -> None:
    """In seconds, however long the round takes: those who train look once a second."""
    answers = found["within_a_long_round"]
    assert answers[1]["told"] == "ValueError: bad sample"
    for rank in (0, 2):
        told = answers[rank]["told"]
        assert told.startswith(
            "RankFailure: training failed: rank 1 raised ValueError (bad sample)"
        )
        assert answers[rank]["seconds"] < 15
        assert answers[rank]["step"] < 499


def test_steps_are_those_that_a_rank_took(found: dict[str, list[Any]]) -> None:
    """Not those that it helped others with, within `join`."""
    assert found["steps_joined"] == UNEQUAL


@pytest.mark.parametrize("case", range(len(FINISHED)))
def test_all_ranks_finish_alike(case: int, found: dict[str, list[Any]]) -> None:
    """Bit for bit, with what was under way and the last part of a round; then nothing is counted.

    With LocalSGD that is the mean of what the ranks held.
    """
    answers = [answer[case] for answer in found["finished"]]
    for answer in answers:
        assert answer["end"] == answers[0]["end"]
        assert answer["moved"] > 0  # a plain step
        assert answer["steps"] == FINISHED[case]["steps"]
    assert answers[0]["end"] != answers[0]["mean"] or FINISHED[case]["algorithm"] == "LocalSGD"
    if FINISHED[case]["algorithm"] == "LocalSGD":
        assert np.allclose(answers[0]["end"], answers[0]["mean"], atol=1e-6)


def test_buffers_and_copies_are_averaged_where_asked(found: dict[str, list[Any]]) -> None:
    """Within `consensus`, and for good by `finish`; counts become the first rank's."""
    for rank, answer in enumerate(found["evaluated"]):
        own = [rank, 7 + rank, 10.0 * rank]
        assert answer["before"] == answer["plain"] == answer["after"] == own
        assert answer["inside"] == answer["end"] == [1.0, 7.0, 10.0]


def test_a_step_within_consensus_is_refused(found: dict[str, list[Any]]) -> None:
    """It would be discarded. Nothing has changed, and training goes on; an end is an end."""
    for answer in found["misused"]:
        assert answer == {
            "inside": "OptionError: a step of the optimizer within consensus() would be discarded:"
            " take it outside",
            "same": True,
            "rounds": 2,
            "twice": "OptionError: finish() comes before close(), once",
        }


def test_different_learning_rates_are_said(found: dict[str, list[Any]]) -> None:
    """By rank and value, once; nothing is said where they are equal."""
    for rank, (odd, later, even) in enumerate(found["rates"]):
        assert odd.count("learning rates") == later.count("learning rates") == 1
        other, theirs, own = (0, 0.1, 0.05) if rank == 2 else (2, 0.05, 0.1)
        assert f"rank {other} goes on with the learning rates [{theirs}], this rank" in later
        other, theirs, own = (0, 0.1, 0.2) if rank == 2 else (2, 0.2, 0.1)
        assert f"rank {other} begins with the learning rates [{theirs}], this rank with" in odd
        assert f"this rank with [{own}]" in odd
        assert even == ""


def _local_sgd(steps: list[int], tau: int) -> list[float]:
    """Rounds of LocalSGD, one rank after another: means over those that took a step."""
    model = network()
    anchor, begin = vector(model), 0
    while begin < max(steps):
        ends = []
        for rank, most in enumerate(steps):
            taken = range(begin, min(begin + tau, most))
            if taken:
                set_vector(model, anchor)
                train(model, optimizer(model, "sgd"), rank, taken)
                ends.append(vector(model))
        anchor, begin = torch.stack(ends).mean(0), begin + tau
    return list(anchor.tolist())


@pytest.mark.parametrize(("case", "close"), [(0, 1e-6), (1, 1e-6), (2, 2e-2)])
def test_joined_averages_are_over_those_who_took_part(
    case: int, close: float, found: dict[str, list[Any]]
) -> None:
    """As rounds done one rank after another give; a rank without any data, too."""
    one = JOINED[case]
    expected = _local_sgd(one["steps"], one["options"]["tau"])
    assert np.allclose(found["joined"][0][case], expected, atol=close)


@pytest.mark.parametrize("case", range(len(JOINED)))
def test_joined_ranks_end_alike(case: int, found: dict[str, list[Any]]) -> None:
    """Bit for bit, whatever numbers of steps they took; and they have learned."""
    answers = [answer[case] for answer in found["joined"]]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] != vector(network()).tolist()


@pytest.mark.parametrize("case", range(len(EVEN)))
def test_joined_ranks_with_equal_data_end_as_without(
    case: int, found: dict[str, list[Any]]
) -> None:
    """Full rounds within `join` end with the bits that `finish` gives."""
    for joined, finished in zip(found["joined"], found["finished"], strict=True):
        assert joined[len(JOINED) + case] == finished[len(FINISHED) + case]["end"]


def test_what_join_cannot_do_is_said(found: dict[str, list[Any]]) -> None:
    """It begins between rounds; an exception within is told to all."""
    for rank, answer in enumerate(found["not_joined"]):
        said = "OptionError: join() is entered once, between two rounds"
        assert answer["middle"] == said
        if rank == 2:
            assert answer["raised"] == "ValueError: bad sample"
        else:
            assert "rank 2 raised ValueError (bad sample) after 5 steps" in answer["raised"]


def test_steps_are_counted_over_trainings_that_were_finished() -> None:
    """What goes on from the state after `finish` counts what each shorter round really had."""
    state: dict[str, Any] = {}
    for steps in (4, 9):
        model = network()
        optim = optimizer(model, "sgd")
        algorithm = LocalSGD(model, optim, tau=3)
        if state:
            algorithm.load_state_dict(state)
        train(model, optim, 0, range(algorithm.stats().steps, steps))
        algorithm.finish()
        assert algorithm.stats().steps == steps
        state = algorithm.state_dict()


def test_steps_that_only_one_of_two_optimizers_took_count(found: dict[str, list[Any]]) -> None:
    """They are averaged by `finish`, where they were lost; and it is said that no round ends."""
    for answer in found["partly"]:
        assert (answer["mean"], answer["steps"]) == (True, 1)
        assert answer["moved"] > 0.01
        (said,) = answer["said"]
        assert said.startswith("optimizer 0 (SGD) has taken 4 steps since optimizer 1 (SGD) took")


def test_a_parameter_that_is_not_averaged_is_named_at_the_end(found: dict[str, list[Any]]) -> None:
    """Not only where a round ends: ranks ended with different models."""
    for answer in found["unfrozen"]:
        for said in answer.values():
            assert said.startswith("OptionError: the optimizer trains a parameter of shape (7, 5)")


def test_what_would_mistake_the_consensus_is_refused(found: dict[str, list[Any]]) -> None:
    """Each in a line; and a step is, after another consensus was refused."""
    for answer in found["within"]:
        assert answer.pop("step").startswith("OptionError: a step of the optimizer within")
        assert "is a dict; it must be a torch.nn.Module" in answer.pop("dict")
        for name, said in answer.items():
            assert said == (
                f"OptionError: {name} within consensus(), where the model holds another point:"
                " leave it"
            )


@pytest.mark.parametrize("case", range(len(ELSEWHERE)))
def test_all_come_to_an_end_after_the_same_steps(case: int, found: dict[str, list[Any]]) -> None:
    """Else all are told at once who is where after how many: a process was aborted."""
    answers = [answer[case] for answer in found["elsewhere"]]
    steps = ELSEWHERE[case]["steps"]
    for rank in (0, 2):
        assert answers[rank]["told"].startswith("RankFailure: ")
        assert "failed: rank 1 is at finish() after 6 steps; rank" in answers[rank]["told"]
    assert f"after {steps} steps; rank 1 has taken 6" in answers[1]["told"]
    assert all(answer["seconds"] < 20 for answer in answers)


def test_join_averages_buffers_where_asked(found: dict[str, list[Any]]) -> None:
    """Over the ranks that took a step, for good; what others would have to join in is refused."""
    for answer in found["joined_buffers"]:
        assert np.allclose(answer["end"], np.mean(answer["own"][1:], axis=0), atol=1e-6)
        finish, consensus = answer["told"]
        assert finish == "OptionError: finish() within join(): the end of that block does it"
        assert consensus.startswith("OptionError: consensus() within join() averages no buffers")


def test_a_store_that_is_gone_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that held it has ended well; the deadline of 60 s was waited for."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    monkeypatch.setattr(notices, "_get_default_store", lambda: client)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    one = Notices([0, 1], lambda: 12)
    one.leave()
    del store
    began = time.monotonic()
    one.compare(4, 60.0)
    assert time.monotonic() - began < 10
