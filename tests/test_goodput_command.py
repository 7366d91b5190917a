"""`co2sim goodput`: the answer in words, its tables, its JSON, and what it refuses."""

import json
import shlex
from typing import Any

import pytest
from commands import Command

HERE = ("goodput", "-c", "a100-tcp80", "-m", "gpt2-small", "-g", "64")
RSC = ("--set", "failures=meta-rsc-1")
SLOW = ("--set", "failures.checkpoint_bandwidth=10 MB/s")


def answers(cli: Command, *more: str) -> list[dict[str, Any]]:
    """What `--json` prints."""
    ended = cli(*HERE, *more, "--json")
    assert ended.code == 0, ended.err
    found: list[dict[str, Any]] = json.loads(ended.out)
    return found


def test_the_answer_is_a_sentence_for_every_strategy(cli: Command) -> None:
    """Useful time, what stops what, the interval, the largest loss; then what training does."""
    ended = cli(*HERE, *RSC, "-s", "ddp", "-s", "local_sgd:tau=20,worker=node")
    assert ended.code == 0, ended.err
    text = " ".join(ended.out.split())
    assert text.startswith("ddp: ")
    assert "of the time is useful work (" in text
    assert "A failure every 19.2 days stops all 64 GPUs; a checkpoint is taken after every" in text
    assert "A worker fails every 19.2 days, and stops alone, of 8" in text
    assert text.count("the largest loss is") == 2
    assert "the average is taken over those who are left" in text.replace("next ", "")
    assert "cluster.failures.detection" in text


def test_json_has_all_of_it(cli: Command) -> None:
    """Shares that sum to 1, speed, interval, state, and the command that repeats it."""
    (found,) = answers(cli, *RSC, "-s", "ddp")
    assert sum(found["shares"].values()) == pytest.approx(1, abs=1e-9)
    assert found["useful"] == found["shares"]["useful"]
    assert found["low"] <= found["useful"] <= found["high"]
    assert found["useful_tokens_per_s"] == pytest.approx(found["useful"] * found["tokens_per_s"])
    assert found["mean_time_to_failure_s"] == pytest.approx(153.8 * 86400 / 8)
    assert found["workers"] is None
    assert found["whole"]["every"] > 0
    again = cli(*shlex.split(found["command"])[1:], "--json")
    assert json.loads(again.out) == [found]


def test_what_never_happens_is_none_in_json(cli: Command) -> None:
    """JSON has no infinity: without failures of all there is no interval."""
    (found,) = answers(cli, *RSC, "-s", "local_sgd:tau=20,worker=node")
    assert found["whole"]["every"] is None
    assert found["workers"]["count"] == 8


def test_a_fixed_interval_is_kept(cli: Command) -> None:
    """`--every`, which costs compared with the best."""
    (best,) = answers(cli, *RSC, "-s", "ddp")
    (fixed,) = answers(cli, *RSC, "-s", "ddp", "--every", "6 h")
    assert fixed["whole"]["every"] == 6 * 3600
    assert fixed["useful"] < best["useful"]


def test_delays_that_are_chosen_are_chosen_first(cli: Command) -> None:
    """`auto` of CO2 is settled as by `run`."""
    (found,) = answers(cli, *RSC, "-s", "co2:tau=20,worker=node,delay=auto")
    assert "auto" not in found["strategy"]


def test_what_does_not_fit_is_said(cli: Command) -> None:
    """The shares stand all the same."""
    args = ("goodput", "-c", "dgx-h100", "-m", "llama-70b", *RSC, "-s", "ddp")
    assert "ddp does not fit in memory" in cli(*args).out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "has no failures; name them, --set failures=meta-rsc-1"),
        ((*RSC, "--every", "30"), "--every: '30' has no unit"),
        ((*RSC, "--every", "0 s"), "--every is '0 s'; it must be above 0"),
        (("--set", "failures.node=1 h", "--every", "1 s", *SLOW), "write less often"),
        ((*RSC, "-s", "ddp"), "strategy ddp is given twice"),
        (("--set", "failures.node=1 s"), "nothing gets done"),
        (("--set", "failures=none-such"), "unknown failure 'none-such'"),
    ],
)
def test_bad_input_is_one_line(cli: Command, more: tuple[str, ...], said: str) -> None:
    """Exit code 2, no traceback."""
    ended = cli(*HERE, "-s", "ddp", *more)
    assert ended.code == 2
    assert said in ended.err
    assert ended.err.count("\n") == 1
