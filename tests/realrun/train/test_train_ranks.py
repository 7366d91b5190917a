"""Training on several ranks: every strategy learns, and what was interrupted goes on as it was."""

from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks

pytestmark = pytest.mark.dist

SHARED = ["ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp:reshard_after_forward=false"]
"""Every gradient is that of all: they learn the same."""

GENTLE = {"momentum": "0.1"}
"""With their default momentum a few rounds are too few."""

OUTER: dict[str, dict[str, str]] = {
    "local_sgd:tau=2": {},
    "overlap_local_sgd:tau=2": {},
    "slowmo:tau=2": GENTLE,
    "diloco:tau=2,dtype=int8": GENTLE,
    "diloco:tau=4,fragments=2,delay=1,dtype=int4": GENTLE,
    "co2.published:tau=2": GENTLE,
    "co2:tau=4,delay=2,keep=0.5,predict=0.5": {},
}


def learned(first: float, last: float) -> bool:
    """Better than half-way, and far from the ln 98 = 4.58 of a guess."""
    return last < first and last < 3.4


NODES = [f"local_sgd:tau=2,worker=node,inner={name}" for name in ("ddp", "zero2", "zero3", "fsdp")]
QUANTIZED = "local_sgd:tau=2,worker=node,inner=zeropp"
"""Inside a node gradients are int4 and gathered weights int8, between nodes all is fp32."""

RESUMED = [
    *("ddp", "zeropp", "co2.published:tau=4", "overlap_local_sgd:tau=4"),
    "co2:tau=4,delay=3,worker=node,inner=zero2",
    "co2.published:tau=4,worker=node,inner=zero2",
    *("zero1:shard=node", "zero2:shard=node"),
]


def two(function: str, **arguments: Any) -> list[Any]:
    """What a function gives on two ranks."""
    return on_ranks(function, 2, module="train_workers", **arguments)


def four(function: str, **arguments: Any) -> list[Any]:
    """What a function gives on two nodes of two ranks."""
    return on_ranks(function, 4, gpus_per_node=2, module="train_workers", **arguments)


def test_every_strategy_learns() -> None:
    """On two ranks; those that share every gradient end with the same loss."""
    strategies = {**{name: {} for name in (*SHARED, "zeropp")}, **OUTER}
    found, other = two("learn", strategies=strategies)
    for strategy, (first, last, sent) in found.items():
        assert learned(first, last), strategy
        assert other[strategy][:2] == [first, last]
        assert (sent is not None) == (strategy in OUTER)
    ends = [found[strategy][1] for strategy in SHARED]
    assert max(ends) - min(ends) < 1e-3


def test_states_divided_inside_nodes_learn_as_whole_ones_do() -> None:
    """Two nodes of two ranks, which hold the same states: every gradient is that of all four."""
    strategies = ["ddp", "zero1:shard=node", "zero2:shard=node", "zero1:shard=1"]
    found = four("learn", strategies={name: {} for name in strategies})
    ends = [found[0][name][1] for name in strategies]
    assert max(ends) - min(ends) < 1e-3
    for name in strategies:
        assert learned(*found[0][name][:2])
        assert all(one[name] == found[0][name] for one in found)


@pytest.mark.nightly
def test_a_node_is_a_worker() -> None:
    """Two nodes of two ranks: inside DDP or ZeRO, which give the same; averages between nodes.

    ZeRO++ inside learns as ZeRO does, within the error of int4, and sends as much between nodes.
    """
    found = four("learn", strategies={name: {} for name in (*NODES, QUANTIZED)})
    ends = [found[0][name][1] for name in NODES]
    assert max(ends) - min(ends) < 1e-3
    for name in NODES:
        first, last, sent = found[0][name]
        assert learned(first, last)
        assert all(one[name][1] == last for one in found)
        # 16 rounds of two workers: each rank sends its half of the model once, in fp32.
        assert sent == pytest.approx(16 * 4 * 61_248 / 2, rel=0.02)
    first, last, sent = found[0][QUANTIZED]
    _, end, plain = found[0][NODES[2]]
    assert learned(first, last)
    assert last == pytest.approx(end, rel=0.03)
    assert last != end
    assert sent == plain


@pytest.mark.nightly
def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    """Bit for bit, on two nodes of two ranks: every loss, every parameter.

    The stop is in the middle of a round; with nodes as workers every rank has a share of the outer
    state.
    """
    for one in four("resume", strategies=RESUMED, folder=str(tmp_path)):
        assert one == {strategy: [] for strategy in RESUMED}


def test_a_finished_training_goes_on_to_more_steps(tmp_path: Path) -> None:
    """As if it had had them from the start, where no learning rate depends on their number."""
    strategies = ["co2:tau=4,delay=2", "ddp"]
    for one in two("resume", strategies=strategies, folder=str(tmp_path), longer=True):
        assert one == {strategy: [] for strategy in strategies}


def test_a_resumption_keeps_the_tau_that_was_measured(tmp_path: Path) -> None:
    """And validates at the ends of its rounds: after 2 and 5 steps, then every 7 steps."""
    first, other = two("measured_tau", folder=str(tmp_path))
    assert first["tau"] == other["tau"] == [7, 7]
    assert first["seen"] == [12, 26, 33, 40]


def test_all_ranks_stop_after_the_same_step() -> None:
    """When one of four is asked to; soon, but not at once."""
    found = four("stopped")
    assert all(one == found[0] for one in found)
    assert found[0] == [24, 36]  # asked for the second vote, which counts at the third


def test_what_cannot_be_trained_is_refused_in_words() -> None:
    """By all ranks, before the first step."""
    for said in two("refused"):
        batch, prefetch, seed = said
        assert batch.startswith("OptionError: batch is 7")
        assert "prefetch" in prefetch
        assert seed.startswith("MismatchError: rank 1 ")
        assert "seed" in seed


def test_a_loss_that_is_no_number_stops_all() -> None:
    """The rank whose loss it is says which step; the other names that rank."""
    other, own = two("not_a_number", last=True)
    assert own.startswith("TrainingError: the loss of step 3 is nan on rank 1")
    assert other.startswith("RankFailure: ")
    assert "rank 1 raised TrainingError" in other
