"""Local-update algorithms end alike on all ranks, and who leaves is named to the others."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from local_problem import network, optimizer, set_vector, train, vector  # noqa: E402 - needs torch
from ranks import on_ranks  # noqa: E402 - needs torch
from torch import distributed as dist  # noqa: E402 - needs torch

from realrun.algorithms import (  # noqa: E402
    LocalSGD,
    departures,
    rank_store,
)
from realrun.algorithms.departures import DepartureLog  # noqa: E402 - needs torch

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
            gone = (
                "raised ValueError (bad sample)"
                if "raises" in given
                else "is at the end of the block"
            )
            assert f"rank 1 {gone} after {given['steps']} steps" in told
            assert f"rank {rank} has taken " in told
        own = "ValueError: bad sample" if "raises" in given else "; rank 1 has taken 6"
        assert own in answers[1]["told"]


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


def test_a_step_within_consensus_is_refused() -> None:
    """It would be discarded. Nothing has changed, and training goes on; an end is an end."""
    for answer in three("misused"):
        assert (answer["same"], answer["rounds"]) == (True, 2)
        assert answer["inside"].startswith("OptionError")
        assert "finish()" in answer["twice"]


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
    model = network()
    for steps in (4, 9):
        optim = optimizer(model, "sgd")
        algorithm = LocalSGD(model, optim, tau=3)
        if state:
            algorithm.load_state_dict(state)
        train(model, optim, 0, range(algorithm.stats().steps, steps))
        algorithm.finish()
        assert algorithm.stats().steps == steps
        state = algorithm.state_dict()


def test_what_would_mistake_the_consensus_is_refused() -> None:
    """Each in a line; and a step is, after another consensus was refused."""
    for answer in three("within"):
        assert answer.pop("step").startswith("OptionError: a step")
        assert "dict" in answer.pop("dict")
        for name, said in answer.items():
            assert said.startswith(f"OptionError: {name}")


def test_a_store_that_is_gone_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that held it has ended well; the deadline of 60 s was waited for."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    monkeypatch.setattr(rank_store, "_get_default_store", lambda: client)
    monkeypatch.setattr(departures, "common_prefix", lambda: "notes")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    one = DepartureLog([0, 1], lambda: 12)
    one.leave()
    del store
    one.compare(4, 1e6)  # which would be waited for
