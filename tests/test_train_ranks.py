"""Training on several ranks: every strategy learns, and what was interrupted goes on as it was."""

from pathlib import Path

import pytest
from ranks import on_ranks

pytestmark = pytest.mark.dist

SHARED = ["ddp", "zero1", "zero2", "zero3"]
"""Every gradient is that of all: they learn the same."""

GENTLE = {"momentum": "0.1"}
"""With their default momentum a few rounds are too few."""

OUTER: dict[str, dict[str, str]] = {
    "local_sgd:tau=2": {},
    "overlap_local_sgd:tau=2": {},
    "slowmo:tau=2": GENTLE,
    "diloco:tau=2,dtype=int8": GENTLE,
    "co2:tau=2": GENTLE,
}


def learned(first: float, last: float) -> bool:
    """Better than half-way, and far from the ln 98 = 4.58 of a guess."""
    return last < first and last < 3.4


def test_every_strategy_learns() -> None:
    """On two ranks; those that share every gradient end with the same loss."""
    strategies = {**{name: {} for name in (*SHARED, "zeropp")}, **OUTER}
    found, other = on_ranks("learn", 2, module="train_workers", strategies=strategies)
    for strategy, (first, last, sent) in found.items():
        assert learned(first, last), strategy
        assert other[strategy][:2] == [first, last]
        assert (sent is not None) == (strategy in OUTER)
    ends = [found[strategy][1] for strategy in SHARED]
    assert max(ends) - min(ends) < 1e-3


def test_a_node_is_a_worker() -> None:
    """Two nodes of two ranks: inside DDP or ZeRO, which give the same; averages between nodes."""
    names = [f"local_sgd:tau=2,worker=node,inner={name}" for name in ("ddp", "zero2", "zero3")]
    found = on_ranks(
        "learn", 4, gpus_per_node=2, module="train_workers", strategies={name: {} for name in names}
    )
    ends = [found[0][name][1] for name in names]
    assert max(ends) - min(ends) < 1e-3
    for name in names:
        first, last, sent = found[0][name]
        assert learned(first, last)
        assert all(one[name][1] == last for one in found)
        assert sent


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    """Bit for bit, on two nodes of two ranks: every loss, every parameter.

    The stop is in the middle of a round; with nodes as workers every rank has a share of the outer
    state.
    """
    strategies = [
        *("ddp", "zeropp", "co2:tau=4", "overlap_local_sgd:tau=4"),
        "co2:tau=4,worker=node,inner=zero2",
    ]
    found = on_ranks(
        "resume",
        4,
        gpus_per_node=2,
        module="train_workers",
        strategies=strategies,
        folder=str(tmp_path),
    )
    for one in found:
        assert one == {strategy: [] for strategy in strategies}


def test_validation_may_wait() -> None:
    """Copies that are validated after training give what was seen at once."""
    during, after = on_ranks("deferred", 2, module="train_workers")[0]
    assert during == after
    assert None not in during


def test_all_ranks_stop_after_the_same_step() -> None:
    """When one of three is asked to; soon, but not at once."""
    found = on_ranks("stopped", 3, module="train_workers")
    assert found[0] == found[1] == found[2]
    assert found[0] == [24, 36]  # asked for the second vote, which counts at the third


def test_what_cannot_be_trained_is_refused_in_words() -> None:
    """By all ranks, before the first step."""
    for said in on_ranks("refused", 2, module="train_workers"):
        assert said == [
            "OptionError: batch is 7; it must be a multiple of the 2 ranks, which share it",
            "OptionError: zero3: prefetch cannot be trained with: FSDP2 fetches one layer ahead",
            "MismatchError: rank 1 has another training than rank 0: ' \"seed\": 1,' instead of"  # noqa: ISC004
            " ' \"seed\": 0,'",
        ]


def test_a_loss_that_is_no_number_stops_all() -> None:
    """The rank whose loss it is says which step; the other names that rank."""
    other, own = on_ranks("not_a_number", 2, module="train_workers")
    assert own.startswith("TrainingError: the loss of step 3 is nan on rank 1: training cannot")
    assert other.startswith("RankFailure: rank 1 raised TrainingError in 'local step 3' of round")
