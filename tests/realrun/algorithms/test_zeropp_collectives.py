"""The collectives of ZeRO++ in one process: what is quantized, how it is rounded, and what counts.

The other ranks are threads, or stand-ins that hold what this one does.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from realrun.algorithms.zeropp import (
    Gather,
    Places,
    Reduce,
    Sent,
    ZeroPP,
    _generator,
)

BLOCK = 8
PART = 16


def group(size: int) -> Any:
    """A process group of which only the size is asked."""
    return SimpleNamespace(size=lambda: size)


@pytest.fixture
def two_by_two(monkeypatch: pytest.MonkeyPatch) -> Places:
    """Two nodes of two ranks that hold all the same: gathers repeat, exchanges give back."""

    def gather(output: Tensor, given: Tensor, **_: object) -> None:
        output.view(-1, given.numel())[:] = given.view(-1)

    def exchange(output: Tensor, given: Tensor, **_: object) -> None:
        output.copy_(given)

    monkeypatch.setattr("realrun.algorithms.zeropp.all_gather_single", gather)
    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    return Places(2, 2, 0, group(2), group(2))


def test_only_a_gather_over_all_ranks_for_a_forward_is_quantized(two_by_two: Places) -> None:
    """Inside a node the weights of the forward are gathered again, and need all their bits."""
    for state, size, exact in [
        (TrainingState.FORWARD, 4, False),
        (TrainingState.PRE_BACKWARD, 4, True),
        (TrainingState.PRE_BACKWARD, 2, True),
        (TrainingState.IDLE, 2, True),  # a user's own unshard, between forward and backward
    ]:
        zeropp = ZeroPP(two_by_two)
        shard = torch.linspace(-1.0, 1.0, PART) ** 3
        whole = torch.empty(size * PART)
        params: Any = SimpleNamespace(_training_state=state)
        Gather(params, zeropp, BLOCK)(whole, shard, group(size))
        assert torch.equal(whole, shard.repeat(size)) == exact
        assert (whole - shard.repeat(size)).abs().max() < 1 / 127
        unused = zeropp.forward if exact else zeropp.backward
        assert unused == Sent()


def gradients() -> Tensor:
    """Four parts of whole numbers, a block of each reaching 7: the first hop sends them exactly."""
    parts = torch.randint(-7, 8, (4, PART), generator=torch.Generator().manual_seed(0)).float()
    parts[:, ::BLOCK] = 7.0
    return parts


def summed(places: Places, rounding: Any, seed: int) -> Tensor:
    """The part of this rank: here all four parts are added up."""
    zeropp = ZeroPP(places, generator=_generator(seed, 0) if rounding == "stochastic" else None)
    out = torch.empty(PART)
    Reduce(zeropp, BLOCK, rounding)(out, gradients().flatten(), group(4), dist.ReduceOp.SUM)
    return out


def test_the_second_hop_of_a_reduction_rounds_as_it_was_asked_to(two_by_two: Places) -> None:
    """Sums of two ranks reach 14, so that their scale is 2 and odd ones fall between two codes.

    Nearest gives one result. Stochastic is off by 1 for each of the two odd sums at most, and by
    nothing on average: the mean of 400 draws is within five standard errors.
    """
    exact = gradients().sum(0)
    nearest = summed(two_by_two, "nearest", 0)
    assert torch.equal(nearest, summed(two_by_two, "nearest", 1))
    drawn = torch.stack([summed(two_by_two, "stochastic", seed) for seed in range(400)])
    assert bool((drawn.std(0) > 0.5).any())
    for found in (nearest, drawn):
        assert (found - exact).abs().max() <= 2.0 + 1e-3
    assert (drawn.mean(0) - exact).abs().max() < 5 * 2**0.5 / 400**0.5


class Members:
    """A process group of threads: its ranks, and what they give each other."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self.given: dict[int, Tensor] = {}
        self.barrier = threading.Barrier(len(ranks), timeout=60)

    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)


ME = threading.local()
"""Of every thread: its `rank`."""


def exchange_among_threads(output: Tensor, given: Tensor, group: Members) -> None:
    """As all_to_all_single: part k of a rank goes to member k."""
    group.given[ME.rank] = given.clone()
    group.barrier.wait()
    place = group.ranks.index(ME.rank)
    parts = [group.given[rank].chunk(group.size())[place] for rank in group.ranks]
    output.copy_(torch.cat(parts))
    group.barrier.wait()


def reduced(given: list[Tensor], per_node: int, rounding: Any = "nearest", seed: int = 0) -> Tensor:
    """The mean over ranks of their gradients by qgZ, each rank a thread; all parts in a row."""
    ranks = len(given)
    nodes = ranks // per_node
    inside = [Members(list(range(n * per_node, (n + 1) * per_node))) for n in range(nodes)]
    across = [Members(list(range(place, ranks, per_node))) for place in range(per_node)]

    def work(rank: int) -> Tensor:
        ME.rank = rank
        groups: Any = (inside[rank // per_node], across[rank % per_node])
        places = Places(nodes, per_node, rank, *groups)
        generator = _generator(seed, rank) if rounding == "stochastic" else None
        out = torch.empty(given[rank].numel() // ranks)
        reduce = Reduce(ZeroPP(places, generator=generator), 256, rounding)
        reduce(out, given[rank], group(ranks), dist.ReduceOp.AVG)
        return out

    with ThreadPoolExecutor(ranks) as pool:
        return torch.cat(list(pool.map(work, range(ranks))))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges are among threads."""
    monkeypatch.setattr(dist, "all_to_all_single", exchange_among_threads)


def bound(ranks: int, per_node: int, largest: float) -> float:
    """Half of the steps on the way of an element of the mean, if none is above `largest`.

    Every rank's step, then every node's step of its sum, if there are two hops.
    """
    nodes = ranks // per_node
    steps = ranks * largest / 7
    if 1 < per_node < ranks:
        steps += nodes * (per_node * largest + steps / nodes / 2) / 7
    return steps / ranks / 2


def slope(got: Tensor, expected: Tensor) -> float:
    """Of the least squares line through the origin."""
    return float((got @ expected) / (expected @ expected))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("ranks", "per_node"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3)]
)
def test_qgz_gives_the_mean_over_all_ranks_in_every_layout(
    ranks: int, per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank ends with its own part of it, on nodes x ranks of up to 3x2 and 2x3.

    No element is off by more than half of the steps on its way, twice that where it is drawn; over
    eight seeds the errors of all elements add up to less than four standard errors. DeepSpeed's
    arithmetic (all_to_all_quant_reduce: a sum inside the node, a mean over nodes), which does not
    divide by the ranks of a node, gives as many times the mean. A NaN of one rank reaches its own
    block, and no others.
    """
    numbers = torch.Generator().manual_seed(ranks)
    common = torch.randn(ranks * 1000, generator=numbers)
    given = [common + torch.randn(ranks * 1000, generator=numbers) for _ in range(ranks)]
    expected = torch.stack(given).double().mean(0)
    limit = bound(ranks, per_node, float(torch.stack(given).abs().max()))
    got = reduced(given, per_node).double()
    assert (got - expected).abs().max() <= limit
    assert slope(got, expected) == pytest.approx(1.0, abs=0.01)
    runs = torch.stack([reduced(given, per_node, "stochastic", seed) for seed in range(8)]).double()
    assert (runs - expected).abs().max() <= 2 * limit
    variance = float(runs.var(0).sum()) / len(runs)
    assert abs(float((runs.mean(0) - expected).sum())) / variance**0.5 < 4
    spoilt = [one.clone() for one in given]
    spoilt[-1][1003] = torch.nan
    bad = ~reduced(spoilt, per_node).isfinite()
    assert bool(bad[1003])
    assert int(bad.sum()) <= 256
    monkeypatch.setattr("realrun.algorithms.zeropp._factor", lambda *_: per_node / ranks)
    assert slope(reduced(given, per_node).double(), expected) == pytest.approx(per_node, rel=0.01)
