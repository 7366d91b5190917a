"""Local-update algorithms end alike on all ranks, and who leaves is named to the others."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from local_problem import network, optimizer, set_vector, train, vector  # noqa: E402 - needs torch
from ranks import on_ranks  # noqa: E402 - needs torch
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


def three(function: str, **arguments: Any) -> list[Any]:
    """What a function gives on three ranks."""
    return on_ranks(function, 3, module="ending_workers", **arguments)


def test_uneven_steps_are_told_at_once_with_counts() -> None:
    """Those that wait name the rank and both counts, and the one that left learns of it, too.

    An exception is told by its name, also where all others only close.
    """
    found = three("uneven", cases=UNEVEN)
    for case, given in enumerate(UNEVEN):
        answers = [answer[case] for answer in found]
        for rank in (0, 2):
            told = answers[rank]["told"]
            assert told.startswith("RankFailure: ")
            gone = "raised ValueError (bad sample)" if "raises" in given else "closed"
            assert f"rank 1 {gone} after {given['steps']} steps" in told
            assert f"rank {rank} has taken " in told
        own = "ValueError: bad sample" if "raises" in given else "; rank 1 has taken 6"
        assert own in answers[1]["told"]


@pytest.mark.nightly
def test_an_exception_is_told_within_a_round() -> None:
    """In seconds, however long the round takes: those who train look once a second."""
    answers = three("within_a_long_round")
    assert answers[1]["told"] == "ValueError: bad sample"
    for rank in (0, 2):
        assert "rank 1 raised ValueError" in answers[rank]["told"]
        assert answers[rank]["step"] < 499


def test_steps_are_those_that_a_rank_took() -> None:
    """Not those that it helped others with, within `join`."""
    assert three("steps_joined", steps=UNEQUAL) == UNEQUAL


def test_all_ranks_finish_alike() -> None:
    """Bit for bit, with what was under way and the last part of a round; then nothing is counted.

    With LocalSGD that is the mean of what the ranks held.
    """
    found = three("finished", cases=FINISHED)
    for case, given in enumerate(FINISHED):
        answers = [answer[case] for answer in found]
        for answer in answers:
            assert answer["end"] == answers[0]["end"]
            assert answer["moved"] > 0  # a plain step
            assert answer["steps"] == given["steps"]
        if given["algorithm"] == "LocalSGD":
            assert np.allclose(answers[0]["end"], answers[0]["mean"], atol=1e-6)
        else:
            assert answers[0]["end"] != answers[0]["mean"]


def test_buffers_and_copies_are_averaged_where_asked() -> None:
    """Within `consensus`, and for good by `finish`; counts become the first rank's."""
    for rank, answer in enumerate(three("evaluated")):
        own = [rank, 7 + rank, 10.0 * rank]
        assert answer["before"] == answer["plain"] == answer["after"] == own
        assert answer["inside"] == answer["end"] == [1.0, 7.0, 10.0]


def test_a_step_within_consensus_is_refused() -> None:
    """It would be discarded. Nothing has changed, and training goes on; an end is an end."""
    for answer in three("misused"):
        assert (answer["same"], answer["rounds"]) == (True, 2)
        assert answer["inside"].startswith("OptionError")
        assert "finish()" in answer["twice"]


def test_different_learning_rates_are_said() -> None:
    """By rank and value, once; nothing is said where they are equal."""
    for rank, (odd, later, even) in enumerate(three("rates")):
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


def test_joined_averages_are_over_those_who_took_part() -> None:
    """As rounds done one rank after another give; a rank without any data, too.

    All ranks end alike, bit for bit, whatever numbers of steps they took.
    """
    found = three("joined", cases=JOINED)
    for case, one in enumerate(JOINED):
        answers = [answer[case] for answer in found]
        assert answers[0] == answers[1] == answers[2]
        assert answers[0] != vector(network()).tolist()
        if one["algorithm"] == "LocalSGD":
            expected = _local_sgd(one["steps"], one["options"]["tau"])
            close = 2e-2 if "dtype" in one["options"] else 1e-6
            assert np.allclose(answers[0], expected, atol=close)


def test_joined_ranks_with_equal_data_end_as_without() -> None:
    """Full rounds within `join` end with the bits that `finish` gives."""
    finished = three("finished", cases=[one | {"steps": 6} for one in EVEN])
    for joined, ended in zip(three("joined", cases=EVEN), finished, strict=True):
        assert joined == [one["end"] for one in ended]


def test_what_join_cannot_do_is_said() -> None:
    """It begins between rounds; an exception within is told to all."""
    for rank, answer in enumerate(three("not_joined")):
        assert answer["middle"].startswith("OptionError: join()")
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


def test_steps_that_only_one_of_two_optimizers_took_count() -> None:
    """They are averaged by `finish`, where they were lost; and it is said that no round ends."""
    for answer in three("partly"):
        assert (answer["mean"], answer["steps"]) == (True, 1)
        assert answer["moved"] > 0.01
        (said,) = answer["said"]
        assert said.startswith("optimizer 0 (SGD) has taken 4 steps since optimizer 1 (SGD) took")


def test_a_parameter_that_is_not_averaged_is_named_at_the_end() -> None:
    """Not only where a round ends: ranks ended with different models."""
    for answer in three("unfrozen"):
        for said in answer.values():
            assert said.startswith("OptionError")
            assert "(7, 5)" in said


def test_what_would_mistake_the_consensus_is_refused() -> None:
    """Each in a line; and a step is, after another consensus was refused."""
    for answer in three("within"):
        assert answer.pop("step").startswith("OptionError: a step")
        assert "dict" in answer.pop("dict")
        for name, said in answer.items():
            assert said.startswith(f"OptionError: {name}")


@pytest.mark.nightly
def test_all_come_to_an_end_after_the_same_steps() -> None:
    """Else all are told at once who is where after how many: a process was aborted."""
    found = three("elsewhere", cases=ELSEWHERE)
    for case, given in enumerate(ELSEWHERE):
        answers = [answer[case] for answer in found]
        for rank in (0, 2):
            assert answers[rank]["told"].startswith("RankFailure: ")
            assert "rank 1 is at finish() after 6 steps" in answers[rank]["told"]
        assert f"after {given['steps']} steps" in answers[1]["told"]


def test_join_averages_buffers_where_asked() -> None:
    """Over the ranks that took a step, for good; what others would have to join in is refused."""
    for answer in three("joined_buffers"):
        assert np.allclose(answer["end"], np.mean(answer["own"][1:], axis=0), atol=1e-6)
        finish, consensus = answer["told"]
        assert finish.startswith("OptionError: finish()")
        assert consensus.startswith("OptionError: consensus()")


def test_a_store_that_is_gone_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that held it has ended well; the deadline of 60 s was waited for."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    monkeypatch.setattr(notices, "_get_default_store", lambda: client)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    one = Notices([0, 1], lambda: 12)
    one.leave()
    del store
    one.compare(4, 1e6)  # which would be waited for
