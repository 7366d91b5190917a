"""The collectives of ZeRO++ in one process: what is quantized, how it is rounded, and what counts.

The other ranks are stand-ins: whatever is exchanged comes back as if all of them held the same.
"""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - needs torch
from torch import Tensor  # noqa: E402 - needs torch
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState  # noqa: E402

from realrun.algorithms.zeropp import _generator  # noqa: E402 - needs torch
from realrun.algorithms.zeropp_collectives import (  # noqa: E402 - needs torch
    Gather,
    Places,
    Reduce,
    Sent,
    ZeroPP,
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

    monkeypatch.setattr(dist, "all_gather_single", gather)
    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    return Places(2, 2, 0, group(2), group(2))


@pytest.mark.parametrize(
    ("state", "size", "exact"),
    [
        (TrainingState.FORWARD, 4, False),
        (TrainingState.PRE_BACKWARD, 4, True),
        (TrainingState.PRE_BACKWARD, 2, True),
        (TrainingState.IDLE, 2, True),  # a user's own unshard, between forward and backward
    ],
)
def test_only_a_gather_over_all_ranks_for_a_forward_is_quantized(
    two_by_two: Places, state: TrainingState, size: int, *, exact: bool
) -> None:
    """Inside a node the weights of the forward are gathered again, and need all their bits."""
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


def test_every_rank_and_every_seed_draws_its_own_numbers() -> None:
    """Ranks that drew the same numbers would round alike, and their errors would add up."""
    drawn = {
        float(torch.rand((), generator=_generator(seed, rank)))
        for seed in (0, 5)
        for rank in range(4)
    }
    assert len(drawn) == 8
    assert _generator(5, 3).initial_seed() == _generator(5, 3).initial_seed()
