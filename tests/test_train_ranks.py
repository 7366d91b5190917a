"""Training on several ranks: every strategy learns, and what was interrupted goes on as it was."""

from typing import Any

import pytest
from together import together

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
    "co2:tau=2": GENTLE,
    "co2:tau=4,delay=2,keep=0.5,predict=0.5": {},
}


def learned(first: float, last: float) -> bool:
    """Better than half-way, and far from the ln 98 = 4.58 of a guess."""
    return last < first and last < 3.4


NODES = [f"local_sgd:tau=2,worker=node,inner={name}" for name in ("ddp", "zero2", "zero3", "fsdp")]
QUANTIZED = "local_sgd:tau=2,worker=node,inner=zeropp"
"""Inside a node gradients are int4 and gathered weights int8, between nodes all is fp32."""

HSDP = ["fsdp:shard=node", "fsdp:reshard_after_forward=2"]
RESUMED = [
    *("ddp", "zeropp", "co2:tau=4", "overlap_local_sgd:tau=4"),
    "co2:tau=4,delay=3,worker=node,inner=zero2",
    "co2:tau=4,worker=node,inner=zero2",
]


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, list[Any]]:
    """What two ranks gave, by function; the last one leaves them unable to go on."""
    strategies = {**{name: {} for name in (*SHARED, "zeropp")}, **OUTER}
    calls: dict[str, dict[str, Any]] = {
        "learn": {"strategies": strategies},
        "deferred": {},
        "refused": {},
        "not_a_number": {},
    }
    return together("train_workers", 2, calls)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two nodes of two ranks gave, by function."""
    calls: dict[str, dict[str, Any]] = {
        "learn": {
            "strategies": {name: {} for name in (*NODES, QUANTIZED, *HSDP, "fsdp:reduce=bf16")}
        },
        "resume": {"strategies": RESUMED, "folder": str(tmp_path_factory.mktemp("resumed"))},
        "stopped": {},
    }
    return together("train_workers", 4, calls, gpus_per_node=2)


def test_every_strategy_learns(two_ranks: dict[str, list[Any]]) -> None:
    """On two ranks; those that share every gradient end with the same loss."""
    found, other = two_ranks["learn"]
    for strategy, (first, last, sent) in found.items():
        assert learned(first, last), strategy
        assert other[strategy][:2] == [first, last]
        assert (sent is not None) == (strategy in OUTER)
    ends = [found[strategy][1] for strategy in SHARED]
    assert max(ends) - min(ends) < 1e-3


def test_a_node_is_a_worker(two_nodes: dict[str, list[Any]]) -> None:
    """Two nodes of two ranks: inside DDP or ZeRO, which give the same; averages between nodes."""
    found = two_nodes["learn"]
    ends = [found[0][name][1] for name in NODES]
    assert max(ends) - min(ends) < 1e-3
    for name in NODES:
        first, last, sent = found[0][name]
        assert learned(first, last)
        assert all(one[name][1] == last for one in found)
        # 16 rounds of two workers: each rank sends its half of the model once, in fp32.
        assert sent == pytest.approx(16 * 4 * 61_248 / 2, rel=0.02)


def test_zeropp_runs_inside_a_node(two_nodes: dict[str, list[Any]]) -> None:
    """It learns as ZeRO inside does, within the error of int4, and sends as much between nodes."""
    for found in two_nodes["learn"]:
        first, last, sent = found[QUANTIZED]
        _, end, plain = found[NODES[2]]
        assert learned(first, last)
        assert last == pytest.approx(end, rel=0.03)
        assert last != end
        assert sent == plain


def test_groups_of_fsdp_share_every_gradient(two_nodes: dict[str, list[Any]]) -> None:
    """Sharded in nodes and replicated between, or gathered again by two: the same is learned."""
    found = two_nodes["learn"][0]
    first, last, sent = found["fsdp:shard=node"]
    assert learned(first, last)
    assert sent is None
    assert found["fsdp:reshard_after_forward=2"][1] == pytest.approx(last, abs=1e-3)
    assert found["fsdp:reduce=bf16"][1] == pytest.approx(last, abs=0.02)


def test_resumed_is_uninterrupted(two_nodes: dict[str, list[Any]]) -> None:
    """Bit for bit, on two nodes of two ranks: every loss, every parameter.

    The stop is in the middle of a round; with nodes as workers every rank has a share of the outer
    state.
    """
    for one in two_nodes["resume"]:
        assert one == {strategy: [] for strategy in RESUMED}


def test_validation_may_wait(two_ranks: dict[str, list[Any]]) -> None:
    """Copies that are validated after training give what was seen at once."""
    during, after = two_ranks["deferred"][0]
    assert during == after
    assert None not in during


def test_all_ranks_stop_after_the_same_step(two_nodes: dict[str, list[Any]]) -> None:
    """When one of four is asked to; soon, but not at once."""
    found = two_nodes["stopped"]
    assert all(one == found[0] for one in found)
    assert found[0] == [24, 36]  # asked for the second vote, which counts at the third


def test_what_cannot_be_trained_is_refused_in_words(two_ranks: dict[str, list[Any]]) -> None:
    """By all ranks, before the first step."""
    for said in two_ranks["refused"]:
        assert said == [
            "OptionError: batch is 7; it must be a multiple of the 2 ranks, which share it",
            "OptionError: zero3: prefetch cannot be trained with: FSDP2 fetches one layer ahead",
            "MismatchError: rank 1 has another training than rank 0: ' \"seed\": 1,' instead of"  # noqa: ISC004
            " ' \"seed\": 0,'",
        ]


def test_a_loss_that_is_no_number_stops_all(two_ranks: dict[str, list[Any]]) -> None:
    """The rank whose loss it is says which step; the other names that rank."""
    other, own = two_ranks["not_a_number"]
    assert own.startswith("TrainingError: the loss of step 3 is nan on rank 1: training cannot")
    assert other.startswith("RankFailure: ")
    assert "rank 1 raised TrainingError" in other
