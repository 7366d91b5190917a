"""What the local-update family refuses on several ranks, and how it ends with an error."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from local_problem import begun, co2_of, network, optimizer, said, slopes, train, vector
from ranks import ranked
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from realrun.execute.world import World

SGD, ADAM = torch.optim.SGD, torch.optim.Adam


@ranked(3)
def test_ranks_that_differ_are_refused_at_the_start(world: World) -> None:
    """All ranks are told the first difference."""
    odd = world.rank == 1

    def start(model: nn.Module, kind: type[torch.optim.Optimizer] = SGD, **options: Any) -> None:
        trained = [each for each in model.parameters() if each.requires_grad]
        co2_of(model, kind(trained, lr=0.1), **options)

    plain, buffered = nn.Linear(2, 2), nn.Linear(2, 2)
    frozen = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 4 if odd else 3)})
    frozen["b"].requires_grad_(requires_grad=False)
    if odd:
        buffered.register_buffer("extra", torch.zeros(2))
    order = torch.channels_last if odd else torch.contiguous_format
    for call, words in (
        (partial(start, frozen), "b.weight"),
        (partial(start, buffered), "extra"),
        (partial(start, nn.Conv2d(3, 4, 3).to(memory_format=order)), "strides (27, 1, 9, 3)"),
        (partial(start, nn.Linear(3, 4 if odd else 5)), "(5, 3)"),
        (partial(start, nn.ModuleDict({"b" if odd else "a": nn.Linear(2, 2)})), "a.weight"),
        (
            partial(start, nn.Sequential(nn.Linear(2, 2), *([nn.Linear(2, 2)] if odd else []))),
            "1.weight",
        ),
        (partial(start, nn.Linear(2, 2).to(torch.bfloat16 if odd else torch.float32)), "bfloat16"),
        (partial(start, plain, ADAM if odd else SGD), "Adam"),
        (partial(start, plain, tau=3 if odd else 4), "tau = 4"),
        (partial(start, plain, outer_momentum=0.1 if odd else 0.2), "outer_momentum = 0.1"),
        (partial(start, plain, tau=2, offload=odd), "MismatchError: offload"),
    ):
        heard = said(call)
        assert heard.startswith("MismatchError: "), heard
        assert words in heard
        assert "rank 1 " in heard or "offload" in heard
    assert "OptionError: pg_options" in said(lambda: start(plain, tau=2, pg_options=object()))
    heard = said(lambda: start(DistributedDataParallel(nn.Linear(2, 2))))
    assert heard.startswith("OptionError")
    assert f"[{world.rank}]" in heard


@ranked(3)
def test_weights_loaded_on_one_rank_only_are_refused_at_the_first_step(world: World) -> None:
    """Loaded by all, training goes on from them; loaded by one, all ranks are told."""
    for ranks, words in ((range(3), ""), ([1], "MismatchError: rank 1 ")):
        model, optim, algorithm = begun(tau=1)
        if world.rank in ranks:
            model.load_state_dict(network(seed=5).state_dict())
        heard = said(partial(train, model, optim, world.rank, range(3)))
        assert heard.startswith(words)
        assert bool(heard) == bool(words)
        algorithm.close()


@pytest.mark.parametrize(
    ("poison", "dtype", "staleness"), [("nan", "fp32", 1), ("inf", "int8", 2), ("-inf", "bf16", 0)]
)
@ranked(3)
def test_an_average_that_is_not_finite_is_not_used(
    world: World, poison: str, dtype: str, staleness: int
) -> None:
    """All ranks are told round and parameter; anchor, momentum and live parameters stay.

    The last rank's model goes wrong in round 1.
    """
    model, optim, algorithm = begun(tau=2, dtype=dtype, staleness=staleness, bucket_mib=1e-4)
    state = algorithm._outer.state

    def kept() -> list[torch.Tensor]:
        first_layer = vector(model)[:35]
        return [first_layer, state.anchor.clone(), state.vectors["momentum"].clone()]

    before = []

    def go_on() -> None:
        for step in range(12):
            slopes(model, world.rank, step)
            if step == 3 and world.rank == 2:
                with torch.no_grad():
                    model[3].weight[1, 2] = float(poison)
            before[:] = kept()
            if step % 2:  # what closes a round moves other parameters only
                model[0].weight.grad.zero_()
            optim.step()

    heard = said(go_on)
    assert heard.startswith("NonFiniteError: the average of round 1, used in round")
    for words in (f"round {1 + staleness}", "3.weight", "rank 2"):
        assert words in heard
    assert all(map(torch.equal, before, kept()))
    assert state.anchor.isfinite().all()
    assert state.vectors["momentum"].isfinite().all()
    optim.zero_grad()
    assert said(optim.step) == heard
    algorithm.close()
    assert algorithm.stats().rounds == 1 + staleness


@ranked(3)
def test_the_drift_check_names_ranks_whose_anchor_is_another(world: World) -> None:
    """One bit in one element is enough: of rank 2's anchor."""

    def go_on(*, tampered: bool) -> None:
        model, optim, co2 = begun(tau=1, check_every=2)
        with co2:
            train(model, optim, world.rank, range(4))
            if tampered and world.rank == 2:
                anchor = co2._outer.state.anchor
                anchor[7] = torch.nextafter(anchor[7], torch.tensor(9.0))
            train(model, optim, world.rank, range(4, 8))

    go_on(tampered=False)
    heard = said(lambda: go_on(tampered=True))
    assert heard.startswith("MismatchError: after round 5")
    assert "[2]" in heard


@ranked(3)
def test_a_block_that_is_closed_within_a_round_lets_go(world: World) -> None:
    """An average under way is waited for, and not applied; hooks go."""
    model, optim, co2 = begun(tau=2)
    train(model, optim, world.rank, range(3))
    assert len(co2._outer.flights) == 1
    live = vector(model)
    co2.close()
    assert torch.equal(live, vector(model))
    assert co2.stats().steps == 3
    train(model, optim, world.rank, range(3, 7))
    co2.close()
    assert co2.stats().steps == 3


@ranked(3)
def test_misuse_is_told_and_not_trained_on(world: World) -> None:
    """A closed block, a second algorithm, a late parameter: all ranks are told."""
    model, optim, co2 = begun(tau=1)
    assert said(lambda: co2_of(model, optim, tau=1)).startswith("OptionError")
    with co2:
        train(model, optim, world.rank, range(1))

    def again() -> None:
        with co2:
            train(model, optim, world.rank, range(1, 2))

    def unfrozen() -> None:
        late = network()
        late[0].weight.requires_grad_(requires_grad=False)
        every = optimizer(late, "sgd")
        with co2_of(late, every, tau=1):
            late[0].weight.requires_grad_()
            train(late, every, world.rank, range(1))

    assert said(again).startswith("OptionError")
    heard = said(unfrozen)
    assert heard.startswith("OptionError")
    assert "(7, 5)" in heard


@ranked(3)
def test_states_of_other_ranks_and_runs_are_refused(world: World) -> None:
    """What may change between runs may; what may not is named."""

    def load(state: dict[str, Any], tau: int = 3, width: int = 2, **options: Any) -> str:
        model = nn.Linear(2, width)
        made = co2_of(model, SGD(model.parameters(), lr=0.1), tau=tau, **options)
        return said(lambda: made.load_state_dict(state))

    model = nn.Linear(2, 2)
    state = co2_of(model, SGD(model.parameters(), lr=0.1), tau=3).state_dict()
    heard = load({f"rank{world.rank + 1}": state[f"rank{world.rank}"]})
    if not world.rank:
        assert heard.startswith("OptionError")
        assert "load_anchor()" in heard
    assert "'tau = 3', here 'tau = 4'" in load(state, tau=4)
    assert "(3, 2)" in load(state, width=3)
    assert load(state, outer_lr=0.5) == ""
