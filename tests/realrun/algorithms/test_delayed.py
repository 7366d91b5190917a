"""CO2 with a delay: averages that are used in the middle of the next round, without a restart."""

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import reference_local_update as reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_problem import begun, co2_of, loss, network, train, vector

from realrun.algorithms import CO2, DiLoCo, LocalSGD, LocalUpdate, SlowMo
from realrun.algorithms.delayed_loop import take_displacement, take_offset
from realrun.algorithms.pacing import SAMPLES, AutoDelay, AutoTau, Launch, WaitWatch


@given(
    steps=st.integers(1, 6).flatmap(lambda tau: st.tuples(st.just(tau), st.integers(1, tau))),
    beta=st.floats(0, 0.95),
    alpha=st.floats(0.05, 1.5),
    seed=st.integers(0, 2**31),
    preview=st.booleans(),
)
def test_with_all_kept_the_mean_moves_as_if_no_average_were_late(
    steps: tuple[int, int], beta: float, alpha: float, seed: int, *, preview: bool
) -> None:
    """Keep 1, the same gradients: at a round's end the mean of workers is SlowMo's, within 1e-11.

    With a preview outer momentum is not late; without one, and with a gain of 1, that is local SGD.
    """
    (tau, d), workers, rounds = steps, 3, 6
    gradients = np.random.default_rng(seed).normal(size=(workers, rounds * tau, 4))
    x0, many = np.zeros(4), (workers, rounds)
    outer = {"beta": beta, "alpha": alpha} if preview else {"beta": 0.0, "alpha": 1.0}

    def step(worker: int, x: reference.Vector, k: int) -> reference.Vector:
        return x - gradients[worker, k]

    def local(worker: int, x: reference.Vector, t: int) -> reference.Vector:
        return x - gradients[worker, t * tau : (t + 1) * tau].sum(0)

    late = reference.late_co2(x0, step, *many, tau=tau, d=d, preview=preview, **outer)
    wanted = reference.slowmo(x0, local, *many, rate=1.0, **outer)
    np.testing.assert_allclose(late.mean(1), wanted.mean(1), rtol=0, atol=1e-11)


def test_the_second_half_of_a_preview_doubles_what_is_stable() -> None:
    """Rounds of a step, used a step late: workers come together where alpha h < 2, and only there.

    h is the curvature in units of the inner step. With all of the difference gone when the mean
    comes it would be 1: z + c = 0 instead of z^2 + c z + c / 2 = 0, with c = alpha h.
    """

    def apart(c: float) -> float:
        """How far two workers are apart after many rounds on a parabola, of 1 at the start."""
        alpha = 0.1
        late = reference.late_co2(
            np.zeros(1),
            lambda i, x, k: x - c / alpha * x + (i - 0.5 if not k else 0.0),
            2,
            1000,
            tau=1,
            d=1,
            alpha=alpha,
            preview=True,
        )
        return float(np.ptp(late[-1]))

    assert apart(1.98) < 1e-2
    assert apart(2.02) > 1e2


@given(st.lists(st.floats(-100, 100, width=16), min_size=3, max_size=3), st.floats(0, 1, width=16))
def test_a_parameter_that_did_not_move_has_no_displacement(
    anchor: list[float], offset: float
) -> None:
    """In bf16 the anchor keeps what the model cannot hold, and the offset does, too."""
    anchors, own = torch.tensor(anchor), torch.full((3,), offset)
    live = (anchors + own).bfloat16().float()
    parts, moved = [(torch.bfloat16, slice(0, 3))], torch.ones(3)
    take_displacement(parts, anchors, own, live, moved)
    assert torch.equal(moved, -own)
    take_offset(parts, anchors, own, live)
    assert torch.equal(own, torch.full((3,), offset))


def test_what_dies_out_may_be_predicted() -> None:
    """A whole round late with the defaults of short rounds; the choice that learned best."""
    for more in [
        {"tau": 1, "delay": 1},
        {"tau": 2, "delay": 2},
        {"tau": 12, "delay": 4, "keep": 0.25, "predict": 1},
    ]:
        assert _last_loss(**more) < 0.2


def test_a_measured_delay_bounds_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages that take the whole round: it was repeated for ever, and the loss exploded."""
    measured = iter([4])
    monkeypatch.setattr(AutoDelay, "used", lambda *_, **__: next(measured, None))
    with pytest.warns(UserWarning, match=r"predict=1 .*0\.75") as said:
        assert _last_loss(tau=4, delay="auto", keep=0.25, predict=1, fragments=1) < 0.2
    assert len(said) == 1


def _last_loss(**options: Any) -> float:
    model, optim, co2 = begun(**options)
    with co2:
        train(model, optim, 0, range(80))
        with co2.consensus():
            return loss(model, 0, 0).item()


class OfRanks:
    """Links that know what the other ranks say: `others` are their numbers, call by call."""

    rank = 0

    def __init__(self, others: Iterable[list[float]]) -> None:
        self.others = iter(others)

    def largest(self, numbers: list[float]) -> list[float]:
        """As of `WorkerGroups`."""
        return [max(pair) for pair in zip(numbers, next(self.others), strict=True)]


def measuring(others: Iterable[list[float]], **more: Any) -> AutoDelay:
    """In rounds of eight steps."""
    return AutoDelay(8, OfRanks(others), measures=True, **more)  # type: ignore[arg-type]


def used(auto: AutoDelay, took: list[int], *, late: bool = False) -> list[int | None]:
    """What is chosen after each of some averages that take so many steps."""
    start = auto.uses
    return [
        auto.used(Launch(0, start + place, steps), late=late) for place, steps in enumerate(took)
    ]


def delay_of(took: list[int], untold: set[int] = frozenset(), **more: Any) -> int | None:  # type: ignore[assignment]
    """The delay after these averages; other ranks cannot tell those `untold`."""
    auto = measuring(([float(place in untold), 0.0, 0.0] for place in range(len(took))), **more)
    *before, chosen = used(auto, took)
    assert before == [None] * len(before)
    return chosen


def test_the_delay_is_that_of_the_middle_average() -> None:
    """As many as the middle one takes; the very first average is left out."""
    assert delay_of([7, 1, 1, 1, 1, 1]) == 1
    assert delay_of([1, 1, 5, 1, 2, 2]) == 2
    assert delay_of([1, 5, 5, 1, 1, 1]) == 1
    assert delay_of([1, 5, 5, 1, 5, 1]) == 5
    assert delay_of([1, 1, 1, 1, 1]) is None
    assert delay_of([1, 1, 3, 3, 3, 3, 3], untold={1}) == 3
    assert delay_of([1, 1, 2, 3, 4, 5, 6, 7, 8], fragments=8) == 4  # they queue in a round
    assert SAMPLES == 5


def test_only_steady_steps_are_measured_and_again_when_they_change() -> None:
    """Steps of a compilation are left out; a third longer later, and averages are measured anew."""
    paces = [9.0, 9.0, 1.0, 1.1, 1.2, 1.2, 1.2, 1.7, *[1.7] * 5]
    auto = measuring([0.0, pace, 0.0] for pace in paces)
    assert used(auto, [1, 7, 2, 2, 3, 2, 2]) == [None] * 6 + [2]
    *between, looked = used(auto, [2] * 9)  # the next look is at the 16th average
    assert between == [None] * 8
    assert looked == 8
    assert auto.measures
    assert used(auto, [4] * 5) == [None] * 4 + [4]


def test_averages_that_come_late_are_measured_again() -> None:
    """The delay becomes longer, though it seemed long enough, and is tau at most."""
    auto = measuring([0.0, 1.0, 0.0] for _ in range(40))
    assert used(auto, [1] * 6)[-1] == 1
    assert used(auto, [1] * 26, late=True)[-1] == 8
    assert used(auto, [1] * 5)[-1] == 2


def test_what_was_measured_is_kept() -> None:
    """A resumed training counts on; names are the same before and after."""
    auto = measuring([0.0, 1.0, 0.0] for _ in range(4))
    resumed = measuring([[0.0, 1.1, 0.0]] * 2)
    used(auto, [1, 5, 2, 2])
    assert resumed.numbers(1).keys() == auto.numbers(1).keys()
    resumed.go_on(auto.numbers(1), 8, [])
    assert (resumed.samples, resumed.uses, resumed.measures) == ([5, 2, 2], 4, True)
    assert used(resumed, [3, 3]) == [None, 3]
    assert not resumed.measures


@given(st.floats(1e-4, 10), st.floats(1e-4, 10), st.integers(2, 100))
def test_tau_is_the_shortest_round_that_hides_an_average(
    step: float, average: float, least: int
) -> None:
    """By the slowest rank; no shorter than fragments and a given delay allow."""
    clock = [0.0]
    auto = AutoTau(OfRanks([[average, 0.0]]), least, now=lambda: clock[0])  # type: ignore[arg-type]
    chosen = None
    for number in range(1, 6):
        clock[0] += step
        if auto.ends(number):
            clock[0] += average / 2  # another rank took longer
            chosen = auto.averaged()
    assert chosen == max(least, min(10_000, math.ceil(average / step - 1e-9)))


def test_a_link_that_needs_longer_rounds_is_named_once() -> None:
    """The tau that would hide the averages, from what the rank waits that waits least."""
    clock = [0.0]
    watch = WaitWatch(OfRanks([[-0.5]] * 9), now=lambda: clock[0])  # type: ignore[arg-type]

    def steps() -> None:
        for number in range(1, 129):
            clock[0] += 1.0
            watch.used(4, 1, 4, 0.9 * number)

    with pytest.warns(UserWarning, match="tau=8 ") as said:
        steps()
    assert len(said) == 1


def progress(algorithm: Callable[..., LocalUpdate], steps: int, resumed: int) -> tuple[Any, Any]:
    """What `consensus` shows after some steps of a constant gradient, and what training ends with.

    In units of one step. Each step accumulates two gradients; state is saved and loaded in between.
    """
    model, size = network(), 2.0**-6
    optim = torch.optim.SGD(model.parameters(), lr=size)
    before, trained = vector(model), algorithm(model, optim)
    for step in range(steps):
        if step == resumed:
            state = copy.deepcopy(trained.state_dict())
            trained.close()
            trained = algorithm(model, optim)
            trained.load_state_dict(state)
        for _ in range(2):
            sum(one.sum() / 2 for one in model.parameters()).backward()
        optim.step()
        optim.zero_grad()
    with trained.consensus():
        shown = vector(model)
    trained.finish()
    return (before - shown) / size, (before - vector(model)) / size


@given(st.data())
def test_every_step_counts_once(data: st.DataObject) -> None:
    """With a constant gradient N steps make N steps of progress, wherever training ends.

    For every method whose outer step takes the mean as it is, and any delay, fragments, share
    that is kept, preview, number of steps and resumption; and the end is what `consensus` showed.
    """
    draw, tau = data.draw, data.draw(st.integers(1, 13))
    late = {
        "delay": draw(st.integers(1, tau) | st.just("auto")),
        "fragments": draw(st.integers(1, tau)),
    }
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
    algorithm = draw(
        st.sampled_from(
            [
                partial(LocalSGD, tau=tau),
                partial(SlowMo, tau=tau, **plain),
                partial(DiLoCo, tau=tau, **plain),
                partial(DiLoCo, tau=tau, fragments=late["fragments"], **plain),
                partial(DiLoCo, tau=tau, keep=1.0, **late, **plain),
                partial(co2_of, tau=tau, staleness=2, gap="constant", **plain),
                partial(co2_of, tau=tau, **late, keep=draw(st.floats(0.1, 1))),
                partial(co2_of, tau=tau, **late, keep=1.0, preview=True),
                CO2,
            ]
        )
    )
    steps = draw(st.integers(1, 4 * tau + 3))
    shown, ended = progress(algorithm, steps, draw(st.integers(0, steps)))
    assert torch.equal(shown, ended)
    np.testing.assert_allclose(ended, steps, rtol=1e-6 * 2**6)


@given(st.data())
def test_training_ends_at_the_mean_of_workers_where_the_gain_is_one(data: st.DataObject) -> None:
    """Without momentum the last averages move no mean: wherever it ends, whatever is kept.

    So a bound of the mean after the last step is one of the model that is saved.
    """
    tau = data.draw(st.integers(1, 8))
    late = {"delay": data.draw(st.integers(1, tau)), "fragments": data.draw(st.integers(1, tau))}
    model = network()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    keep = data.draw(st.floats(0.1, 1))
    trained = co2_of(model, optim, tau=tau, **late, keep=keep, outer_lr=1.0, outer_momentum=0.0)
    for step in range(data.draw(st.integers(1, 3 * tau + 2))):
        loss(model, 0, step).backward()
        optim.step()
        optim.zero_grad()
    mean = vector(model)
    trained.finish()
    assert torch.allclose(vector(model), mean, rtol=0, atol=1e-6)


def test_a_last_step_of_size_zero_moves_nothing() -> None:
    """An average that is used at the end replaces no step that was not taken since its launch."""
    for delay in (2, 6, 12):
        ends = []
        for more in (0, 1):
            model = network()
            optim = torch.optim.SGD(model.parameters(), lr=0.1)
            with co2_of(model, optim, tau=12, delay=delay):
                for step in range(48 + more):
                    optim.param_groups[0]["lr"] = 0.1 if step < 48 else 0.0
                    loss(model, 0, step).backward()
                    optim.step()
                    optim.zero_grad()
            ends.append(vector(model))
        assert torch.allclose(*ends, rtol=0, atol=1e-6)


def test_a_clamp_by_hand_after_every_step_is_part_of_the_training() -> None:
    """Also where it moves weights farther than steps do, wherever training ends."""
    for algorithm in (partial(LocalSGD, tau=4), partial(co2_of, tau=4, delay=2)):
        for steps in (8, 9):
            model = network()
            optim = torch.optim.SGD(model.parameters(), lr=0.5)
            with algorithm(model, optim) as trained:
                for step in range(steps):
                    train(model, optim, 0, range(step, step + 1))
                    for one in model.parameters():
                        one.data.clamp_(-0.02, 0.02)
            assert trained.stats().steps == steps
