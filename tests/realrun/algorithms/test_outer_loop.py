"""Rules of algorithms as pure functions, their options, and algorithms on one rank."""

import copy
import itertools
import math
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
from commands import refused, row
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from local_problem import algorithm_of, begun, co2_of, followed, network, optimizer, train, vector
from reference_local_update import CLOSE, case, check, expected
from torch import nn

from realrun.algorithms import CO2, LateAverage, NonFiniteError, OptionError, RankFailure, Stats
from realrun.algorithms.averaging import PendingAverage
from realrun.algorithms.departures import DepartureLog
from realrun.algorithms.flat_parameters import Flat
from realrun.algorithms.outer_loop import finite_norm, weighted_sum
from realrun.algorithms.process_groups import WorkerGroups, Workers
from realrun.algorithms.rules import MomentumRule, State
from realrun.errors import first_difference


def test_a_line_that_one_rank_lacks_is_the_difference() -> None:
    """Not the lines behind it, which are in other places then."""
    whole, without = "1.weight: (3,)\n1.bias: (1,)\ntau = 4", "1.weight: (3,)\ntau = 4"
    assert first_difference(whole, without) == ("1.bias: (1,)", "nothing")
    assert first_difference(without, whole) == ("nothing", "1.bias: (1,)")


def test_an_average_that_is_used_at_once_needs_no_momentum() -> None:
    """Without momentum a late average moves the anchor, and no vector is kept for it."""
    for options, vectors in (
        ({"late": LateAverage(delay=1)}, {}),
        ({"staleness": 1}, {"momentum": 0}),
    ):
        assert MomentumRule(outer_momentum=0.0, outer_lr=1.0, **options).vectors() == vectors


OF_OTHER_TYPES: list[tuple[str, dict[str, Any], str]] = [
    ("CO2", {"outer_lr": math.nan}, "outer_lr is nan"),
    ("CO2", {"timeout": "60 s"}, "timeout is '60 s'"),
    ("CO2", {"timeout": timedelta()}, "timeout is 0"),
]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        *OF_OTHER_TYPES,
        *((*row(line), words) for line, words in refused("local-updates-refused.txt")),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    """What was given, and what is allowed."""
    with pytest.raises(OptionError) as caught:
        begun(name, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_optimizer_must_hold_what_is_trained() -> None:
    """Otherwise parts of the model would drift apart, or be moved by nobody."""
    model, other = network(), nn.Linear(2, 2)
    part = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(OptionError, match=r"1\.weight"):
        co2_of(model, part)
    more = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(OptionError, match="not the model's"):
        co2_of(model, more)
    with pytest.raises(OptionError, match="optimizer is a Linear"):
        co2_of(model, other)  # type: ignore[arg-type]
    for parameter in model[1:].parameters():
        parameter.requires_grad_(requires_grad=False)
    with co2_of(model, part) as co2:
        assert co2._outer.flat.elements == 5 * 7 + 7


def test_ranks_that_did_not_meet_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, a forgotten init_process_group would train every rank on its own."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = network()
    with pytest.raises(OptionError, match="WORLD_SIZE is 4"):
        co2_of(model, optimizer(model, "sgd"))


def test_one_worker_needs_no_process_group() -> None:
    """CO2 alone equals its transcription with one worker; nothing is sent or waited for.

    Averages under way are used by `finish` as by rounds that end without local steps.
    """
    for inner, tau, k, gap in itertools.product(
        ("sgd", "adamw"), (1, 3), (1, 2), ("constant", "gap_aware")
    ):
        rounds, rule = 5, {"outer_lr": 0.8, "gap": gap, "staleness": k}
        lone = case("CO2", inner, rounds=rounds + k, tau=tau, **rule)
        seen: list[Any] = []
        wanted = expected(lone, 1, seen)[:, 0]
        lone["rounds"] = rounds
        model, optim, co2 = begun(inner=inner, **lone["options"])
        steps = partial(train, model, optim, 0)
        answer = followed(lone, co2, steps, partial(vector, model))
        check(answer, lone, wanted[:rounds], seen[: rounds - k])
        np.testing.assert_allclose(vector(model).numpy(), wanted[-1], atol=CLOSE)
        stats = co2.stats()
        alone = Stats(rounds, rounds * tau, stats.penalty, 0.0, 0.0, 0.0, 0.0, 0, tau=tau)
        assert stats.seconds > 0
        assert stats.waiting_share == 0
        assert stats == replace(alone, seconds=stats.seconds)


def test_what_saving_waits_for_is_no_wait_of_training() -> None:
    """An average on its way is counted where it is due, not where a state is saved."""
    for options in [{}, {"delay": 1}]:
        model, optim, co2 = begun(tau=2, **options)
        with co2:
            launch = co2._outer.average.launch

            def slow(values: torch.Tensor, number: int) -> PendingAverage:
                flight = launch(values, number)  # noqa: B023 - called at once
                flight.pieces.append((lambda _: None, lambda: False))
                return flight

            co2._outer.average.launch = slow  # type: ignore[method-assign]
            train(model, optim, 0, range(2))
            co2.state_dict()
            with co2.consensus():
                pass
            assert co2.stats().waited == 0
            train(model, optim, 0, range(2, 6))
            assert co2.stats().waited > 0
            assert co2.stats().late > 0


def test_weights_loaded_after_construction_are_where_training_begins() -> None:
    """With learning rate 0 they stay what was loaded; a stale anchor pulled 100 to 0, 200 or 673.

    A state that is loaded brings an anchor of its own, which is kept; another model is told of.
    """
    for name in ["CO2", "SlowMo", "LocalSGD", "DiLoCo", "OverlapLocalSGD"]:
        model = nn.Linear(1, 1, bias=False)
        optim = torch.optim.SGD(model.parameters(), lr=0.0)
        with algorithm_of(name, model, optim, tau=2) as algorithm:
            model.load_state_dict({"weight": torch.tensor([[100.0]])})
            for _ in range(8):
                optim.step()
                assert model.weight.item() == 100.0
            saved = algorithm.state_dict()
        with algorithm_of(name, model, optim, tau=2) as resumed:
            resumed.load_state_dict(saved)
            model.load_state_dict({"weight": torch.tensor([[1.0]])})
            with pytest.warns(UserWarning, match="own model"):
                optim.step()
            assert resumed._outer.state.anchor.item() == 100.0


def test_hooks_schedulers_and_gradient_accumulation_of_others_run_beside_ours() -> None:
    """Steps of the optimizer count, not backward passes; hooks before and after ours are called."""
    model = network()
    optim = optimizer(model, "sgd")
    seen = []
    optim.register_step_pre_hook(lambda *_: seen.append("before"))
    with co2_of(model, optim, tau=2) as co2:
        optim.register_step_pre_hook(lambda *_: seen.append("after"))
        scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
        for step in range(6):
            model(torch.ones(1, 5)).sum().backward()
            if step % 2:
                optim.step()
                scheduler.step()
        assert (co2.stats().rounds, co2.stats().steps) == (1, 3)
    assert seen == ["before", "after"] * 3


def test_huge_averages_are_finite_and_infinite_ones_are_not() -> None:
    """Their squares overflow fp32, which is no reason to stop; an infinity is, and is named."""
    flat = Flat.of([("a", torch.zeros(3)), ("b", torch.zeros(2))])
    state = State(flat.empty(), {}, {}, 2)
    huge = torch.tensor([3e30, 0.0, 0.0, 0.0, -4e30])
    links = WorkerGroups(Workers.per_gpu(), 1.0, owns=False)
    norm = finite_norm(PendingAverage(4, huge), 5, flat, state, links)
    assert norm == pytest.approx(5e30)
    huge[3] = -math.inf
    with pytest.raises(NonFiniteError, match=r"round 4, used in round 5, has 1 .*first in 'b'"):
        finite_norm(PendingAverage(4, huge), 5, flat, state, links)


def test_norms_of_large_parts_add_up_in_double_precision() -> None:
    """Each part's square fits into fp32, their sum does not."""
    state = State(torch.zeros(2), {}, {}, chunk=1)
    assert state.norm(torch.full((2,), 1.5e19), list) == pytest.approx(1.5e19 * 2**0.5)


def test_clipped_elements_are_counted_over_all_shards_of_a_worker() -> None:
    """The share and the residual of one shard, of which there are two: 3 of its 4 elements."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    with co2_of(model, optim, tau=1, staleness=0, clip=0.5, gap="constant") as co2:
        co2._outer._elements = 8.0
        co2._links.total = lambda numbers: [2 * one for one in numbers]  # type: ignore[method-assign]
        model.weight.grad = torch.tensor([[1.0, 1.0], [1.0, 0.1]])
        optim.step()
        assert co2.stats().clipped == 6 / 8
        assert co2.stats().clip_residual == pytest.approx(2 * 3 * 0.5**2)


@pytest.mark.parametrize("options", [{"staleness": 1}, {"staleness": 0}, {"delay": 1, "keep": 1.0}])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_running_residual_is_that_of_the_mean_of_what_was_clipped(
    momentum: float, options: dict[str, Any]
) -> None:
    """Of displacements that are known, against the recursion in NumPy; Lambda counts."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    rule: dict[str, Any] = {"clip": 0.3, "residual_decay": 0.8}
    penalty = 2.0 if "staleness" in options else 1.0
    if penalty != 1:
        rule |= {"penalty": penalty, "gap": "constant"}
    rounds = np.random.default_rng(3).normal(size=(20, 3))
    co2 = co2_of(model, optim, tau=1, outer_momentum=momentum, outer_lr=1.0, **rule, **options)
    wanted, m, mean = 0.0, np.zeros(3), np.zeros(3)
    with co2:
        for gradient in rounds:
            model.weight.grad = torch.tensor(gradient[None], dtype=torch.float32)
            optim.step()
        found = co2.stats()
    late = 0 if options.get("staleness") == 0 else 1
    for gradient in rounds[: len(rounds) - late]:
        u = momentum * m + gradient / penalty
        m = np.clip(u, -0.3, 0.3)
        mean = 0.8 * mean + 0.2 * penalty * (u - m)
        wanted += mean @ mean
    assert found.running_residual == pytest.approx(wanted, rel=1e-5)
    assert 0 < found.running_residual < found.clip_residual


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_a_resumed_run_goes_on_with_the_residual(decay: float) -> None:
    """Stats of a run that was cut in the middle are those of an uncut one; older states have 0."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, CO2]:
        model = network()
        optim = optimizer(model, "sgd")
        rule = {"clip": 0.01, "residual_decay": decay}
        return model, optim, co2_of(model, optim, tau=2, outer_momentum=0.5, **rule)

    model, optim, co2 = made()
    train(model, optim, 0, range(7))
    kept = copy.deepcopy([model.state_dict(), optim.state_dict(), co2.state_dict()])
    train(model, optim, 0, range(7, 14))
    other, again, resumed = made()
    for one, state in zip((other, again, resumed), kept, strict=True):
        one.load_state_dict(state)
    train(other, again, 0, range(7, 14))
    assert co2.stats().clip_residual > 0
    assert bool(co2.stats().running_residual) == bool(decay)
    times = {"waited": 0.0, "seconds": 0.0}
    assert replace(resumed.stats(), **times) == replace(co2.stats(), **times)
    del kept[2]["rank0"]["numbers"]["clip_residual"]
    resumed.load_state_dict(kept[2])
    assert resumed.stats().clip_residual == 0
    co2.close()
    resumed.close()


def test_all_buckets_of_an_average_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take what is left of it; one that comes too late is a lost worker."""
    now, granted = [100.0], []

    def bucket(seconds: float) -> None:
        granted.append(seconds)
        now[0] += 4.0
        if seconds < 4.0:
            raise TimeoutError("nobody answers")

    monkeypatch.setattr("realrun.algorithms.averaging.time.monotonic", lambda: now[0])
    PendingAverage(7, torch.zeros(1), [(bucket, lambda: False)] * 3, deadline=12.0).wait()
    late = PendingAverage(7, torch.zeros(1), [(bucket, lambda: False)] * 4, deadline=10.0)
    with pytest.raises(RankFailure, match=r"round 7 .*10 s"):
        late.wait()
    late.wait()  # again: for the two that were not there yet
    assert granted == [12.0, 8.0, 4.0, 10.0, 6.0, 2.0, 10.0, 6.0]


@pytest.mark.parametrize("fails", [False, True])
def test_an_average_that_ends_as_a_look_around_begins_is_no_failure(*, fails: bool) -> None:
    """The time of a wait was up, and the average was there a moment later: asked again, it says."""
    asked = []

    def bucket(seconds: float) -> None:
        asked.append(seconds)
        if fails or len(asked) == 1:
            raise TimeoutError("connection closed" if len(asked) > 1 else "time is up")

    flight = PendingAverage(7, torch.zeros(1), [(bucket, lambda: True)], deadline=12.0)
    flight.notices = DepartureLog([0], lambda: 7)
    if fails:
        with pytest.raises(RankFailure, match=r"round 7 .*connection closed"):
            flight.wait()
    else:
        flight.wait()
    assert asked == [0.5, pytest.approx(12.0, abs=1.0)]


@given(st.integers(0, 39), st.integers(0, 39), st.sampled_from(["float32", "bfloat16", "int64"]))
def test_the_mark_of_a_gpu_tells_one_word_and_two_that_are_exchanged(
    one: int, other: int, dtype: str
) -> None:
    """As the hash of a CPU does."""
    tensor = torch.arange(1, 41).to(getattr(torch, dtype))
    moved = tensor.clone()
    moved[one], moved[other] = tensor[other], tensor[one]
    assert (weighted_sum(moved) == weighted_sum(tensor)) is (one == other)
    changed = tensor.clone()
    changed[one] += 1
    assert weighted_sum(changed) != weighted_sum(tensor)
