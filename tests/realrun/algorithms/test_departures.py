"""Local-update algorithms end alike on all ranks, and who leaves is named to the others."""

import subprocess
import sys
from pathlib import Path
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
)
from realrun.algorithms.departures import DepartureLog  # noqa: E402 - needs torch

pytestmark = pytest.mark.dist

RAISED = [{"steps": 4, "options": {}}, {"steps": 12, "options": {"dtype": "int8"}}]
"""Rank 1 takes these steps and raises, all others take 12, in rounds of 3."""

SETTLED: list[dict[str, Any]] = [
    {"algorithm": "LocalSGD", "steps": [4, 7, 4], "options": {"tau": 3}},
    {"algorithm": "LocalSGD", "steps": [0, 3, 2], "options": {"tau": 2}},
    {"algorithm": "CO2", "steps": [5, 8, 9], "options": {"tau": 3, "delay": 2, "keep": 1}},
    {
        "algorithm": "CO2",
        "steps": [5, 8, 9],
        "options": {"tau": 4, "delay": 1, "fragments": 2, "keep": 1},
    },
    {
        "algorithm": "CO2",
        "steps": [5, 8, 12],
        "options": {"tau": 3, "outer_lr": 1.0, "gap": "constant"},
    },
]
"""Steps of three ranks, with a gain of 1: the mean of all workers moves as they do."""

NOT_FINITE: list[dict[str, Any]] = [
    {"algorithm": "LocalSGD", "steps": 6, "nan": 1, "ranks": [1], "options": {"tau": 3}},
    {
        "algorithm": "CO2",
        "steps": 9,
        "nan": 4,
        "ranks": [1],
        "options": {"tau": 3, "outer_lr": 1.0, "gap": "constant"},
    },
    {
        "algorithm": "CO2",
        "steps": 9,
        "nan": 4,
        "ranks": [0, 1],
        "options": {"tau": 3, "delay": 2, "keep": 1},
    },
]
"""Some ranks have a NaN in the step `nan`."""

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


def test_an_exception_is_told_at_once_with_counts() -> None:
    """Those that wait, and those that only close, name the rank, its exception and its steps."""
    found = three("raised", cases=RAISED)
    for case, given in enumerate(RAISED):
        answers = [answer[case] for answer in found]
        for rank in (0, 2):
            told = answers[rank]["told"]
            assert told.startswith("RankFailure: ")
            assert f"rank 1 raised ValueError (bad sample) after {given['steps']} steps" in told
            assert f"rank {rank} has taken " in told
        assert answers[1]["told"] == "ValueError: bad sample"


def test_uneven_ends_lose_no_progress() -> None:
    """With a constant gradient all ranks end with the mean of their numbers of steps.

    One warning on every rank names join() and points to the line of the user.
    """
    found = three("settled", cases=SETTLED)
    for first, *_ in found:
        (warning,) = first["said"]
        assert "join()" in warning
        assert set(first["line"]) == {"ending_workers.py"}
    for case, given in enumerate(SETTLED):
        for rank, answers in enumerate(found):
            answer, steps = answers[case], given["steps"]
            assert np.allclose(answer["end"], np.mean(steps), atol=1e-5), given
            assert answer["steps"] == steps[rank]


def test_a_worker_that_is_not_finite_continues_from_the_anchor() -> None:
    """Its steps since the last average are lost, and it does not count in that mean.

    With the same gradient everywhere all ranks end as if nothing had happened.
    """
    found = three("not_finite", cases=NOT_FINITE)
    for case, given in enumerate(NOT_FINITE):
        for rank, answers in enumerate(found):
            assert np.allclose(answers[case]["end"], given["steps"], atol=1e-5), given
            assert len(answers[case]["said"]) == (rank in given["ranks"])


def test_a_mean_of_no_finite_worker_is_refused() -> None:
    """On all ranks, also with on_nonfinite='anchor'."""
    assert all(said.startswith("NonFiniteError: ") for said in three("nobody_finite"))


def test_a_rank_that_makes_no_algorithm_is_named_in_time() -> None:
    """And so is one whose constructor raises, at once."""
    answers = three("outside")
    for answer in (answers[0], answers[2]):
        assert "rank 1 has not come" in answer["absent"]
        assert "all ranks" in answer["absent"]
        assert "rank 1 raised OptionError" in answer["raises"]
    assert answers[1]["raises"].startswith("OptionError")


def test_a_process_may_train_several_times() -> None:
    """Also after its default group was destroyed and made once more, whose timeout counts then."""
    answers = three("again", last=True)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] == answers[0][1] == answers[0][2] == answers[0][3]
    assert answers[0][4] == [41.0]


LOST = [
    ("step", [3], "SIGKILL"),
    ("step", [0], "SIGSTOP"),
    ("start", [2], "SIGKILL"),
    ("consensus", [1], "SIGSTOP"),
    ("end", [2, 3], "SIGKILL"),
]
"""Phase of the training, ranks of four, and what is done to them."""


@pytest.mark.parametrize(("phase", "victims", "how"), LOST)
def test_every_survivor_names_the_lost_ranks(phase: str, victims: list[int], how: str) -> None:
    """No other rank is blamed, though others leave, too."""
    answers = on_ranks(
        "lose", 4, module="ending_workers", dies=victims, phase=phase, victims=victims, how=how
    )
    for rank, answer in enumerate(answers):
        if rank not in victims:
            assert answer["ranks"] == victims, answer["said"]


def test_a_restarted_training_reads_no_notes_of_the_attempt_before(tmp_path: Path) -> None:
    """A rank raises in the first attempt of torchrun, and the second one resumes to its end."""
    script = Path(__file__).parents[2] / "helpers" / "restarted_rank.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", "--max-restarts=1", script, tmp_path],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (first, model), (again, other) = (torch.load(tmp_path / f"final-{rank}") for rank in (0, 1))
    assert (first, again) == (2, 2)
    assert all(torch.equal(model[name], other[name]) for name in model)


def test_notes_of_another_attempt_or_group_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one store that all of them share, as with `init_method="tcp://..."`."""
    store, prefixes = dist.HashStore(), []
    for attempt in ("0", "0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        prefixes += [departures.common_prefix(), departures.common_prefix()]
        dist.destroy_process_group()
    assert len(set(prefixes)) == 6


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
    """Each in a line; a step is, too, changes nothing, and training goes on; an end is an end."""
    for answer in three("within"):
        assert (answer.pop("same"), answer.pop("rounds")) == (True, 2)
        assert "finish()" in answer.pop("twice")
        assert answer.pop("step").startswith("OptionError: a step")
        assert "dict" in answer.pop("dict")
        for name, said in answer.items():
            assert said.startswith(f"OptionError: {name}")


def test_a_store_that_is_gone_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that held it has ended well; the deadline of 60 s was waited for."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    monkeypatch.setattr(departures, "_get_default_store", lambda: client)
    monkeypatch.setattr(departures, "common_prefix", lambda: "notes")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    one = DepartureLog([0, 1], lambda: 12)
    one.leave()
    del store
    one.compare(4, 1e6)  # which would be waited for


def test_a_consensus_after_unequal_numbers_of_steps_names_join() -> None:
    """On all ranks, with the rank that has taken fewer."""
    for heard in on_ranks("unequal_consensus", 2, module="ending_workers"):
        assert "rank 1 is at consensus() after 14 steps" in heard
        assert "join()" in heard
