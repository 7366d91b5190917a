"""The local-update family on several ranks, against plain transcriptions and against itself."""

import copy
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as dcp
from commands import rows
from local_problem import algorithm_of, begun, co2_of, followed, network, optimizer, train, vector
from numpy.typing import NDArray
from ranks import everywhere, on_ranks, ranked
from reference_local_update import CLOSE, case, check, expected
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from realrun.algorithms import LocalSGD, pacing
from realrun.algorithms.averaging import Average, PendingAverage
from realrun.execute.world import World

pytestmark = pytest.mark.dist

SMALL = 1e-4
"""MiB of a bucket: the problem's 80 elements make four."""

CASES = [case(*words, **options) for *words, options in rows("local-updates.txt")]


def made(problem: dict[str, Any], world: World) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Model, optimizer and algorithm of a case, from a seed that only rank 0 has right."""
    model = network(getattr(torch, problem["model"]), seed=world.rank)
    model.to(problem.get("device", world.device))
    optim = optimizer(model, problem["inner"])
    return model, optim, algorithm_of(problem["algorithm"], model, optim, **problem["options"])


def follow(world: World, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train by every case: what this rank holds after each round, and its stats."""
    answers = []
    for problem in cases:
        model, optim, algorithm = made(problem, world)
        steps = partial(train, model, optim, world.rank)
        answers.append(followed(problem, algorithm, steps, partial(vector, model)))
    return answers


def histories(answers: list[Any], index: int) -> NDArray[np.float64]:
    """Rounds x ranks x elements of one case."""
    return np.array([answer[index]["history"] for answer in answers]).swapaxes(0, 1)


def test_every_algorithm_equals_its_published_equations() -> None:
    """All models after every round, Lambda, clipped share and residual, to float32 rounding."""
    answers = on_ranks("follow", 3, module=__name__, cases=CASES)
    for index, problem in enumerate(CASES):
        seen: list[Any] = []
        wanted = expected(problem, 3, seen)
        for rank, answer in enumerate(answers):
            check(answer[index], problem, wanted[:, rank], seen)


TAU = 3
WIRES: dict[str, Any] = {
    "plain": case("CO2", tau=TAU),
    "bf16": case("CO2", tau=TAU, dtype="bf16"),
    "int8": case("CO2", tau=TAU, dtype="int8"),
    "whole": case("CO2", tau=TAU, bucket_mib=25.0),
    "tiny": case("CO2", model="bfloat16", tau=TAU, outer_lr=0.01, rounds=40),
}
"""What travels: fp32, bf16 and int8, in one bucket, and steps below what the model resolves."""


def test_low_precision_on_the_wire_and_in_the_model() -> None:
    """Averages in bf16 and int8 are close to fp32's, and cost the bytes that the ring moves.

    A bf16 model follows an fp32 anchor: steps far below its resolution add up.
    """
    n, elements, rounds = 3, 80, 6
    answers = on_ranks("follow", n, module=__name__, cases=list(WIRES.values()))
    exact = histories(answers, 0)
    moved = np.abs(exact[-1] - exact[0]).max()
    np.testing.assert_allclose(histories(answers, 3), exact, atol=CLOSE, err_msg="buckets")
    for index, share in ((1, 0.01), (2, 0.02)):
        error = np.abs(histories(answers, index) - exact).max()
        assert 0 < error < share * moved, (index, error, moved)
        assert np.ptp(histories(answers, index), axis=1).max() == 0, "ranks differ"
    buckets = [26, 26, 26, 2]  # 1e-4 MiB of fp32 are 26 elements
    parts = [-(-size // n) for size in buckets]
    sent = [answers[1][index]["sent"] for index in range(4)]
    ring = 2 * (n - 1) * rounds
    assert sum(buckets) == elements
    assert sent == [
        ring * 4 * sum(parts),
        ring * 2 * sum(parts),
        ring * sum(part + 4 + 4 for part in parts),  # a scale, half of what roundings took off
        ring * 4 * -(-elements // n),
    ]
    wanted = expected(WIRES["tiny"], n)
    resolution = 2.0**-8 * np.abs(wanted).max()
    assert np.abs(np.diff(wanted[:, 0], axis=0)).max() < 2 * resolution
    assert np.abs(wanted[-1] - wanted[0]).max() > 5 * resolution
    np.testing.assert_allclose(histories(answers, 4), wanted, rtol=2.0**-7, atol=1e-5)


@ranked(3)
def test_equal_runs_give_equal_bits(world: World) -> None:
    """Overlapped is serial; CO2 with staleness 0 is SlowMo, which is LocalSGD without momentum."""
    launch = Average.launch

    def launch_and_wait(self: Average, values: torch.Tensor, number: int) -> PendingAverage:
        flight = launch(self, values, number)
        flight.wait()
        return flight

    def run(name: str, **options: Any) -> list[list[float]]:
        problem = {"inner": "momentum", "rounds": 6, "model": "float32"}
        answers = follow(world, [{"algorithm": name, **problem, "options": options}])
        history: list[list[float]] = answers[0]["history"]
        return history

    for name, options in (
        ("CO2", {"staleness": 1}),
        ("CO2", {"staleness": 3, "clip": 0.02}),
        ("CO2", {"dtype": "bf16"}),
        ("CO2", {"dtype": "int8", "staleness": 2}),
        ("CO2", {"delay": 1, "keep": 0.5, "predict": 0.5}),
        ("CO2", {"dtype": "int8", "delay": 3}),
        ("CO2", {"delay": 2, "fragments": 3}),
        ("CO2", {"dtype": "bf16", "delay": 2, "keep": 0.3}),
        ("CO2", {"delay": 1, "preview": True, "outer_momentum": 0.5, "outer_lr": 0.5}),
        ("OverlapLocalSGD", {}),
    ):
        overlapped = run(name, tau=3, bucket_mib=SMALL, **options)
        with pytest.MonkeyPatch.context() as serial:
            serial.setattr(Average, "launch", launch_and_wait)
            assert overlapped == run(name, tau=3, bucket_mib=SMALL, **options), (name, options)
    momentum = {"tau": 2, "outer_momentum": 0.7, "outer_lr": 0.8}
    slow = run("SlowMo", **momentum)
    for gap in ("gap_aware", "constant"):
        assert run("CO2", staleness=0, gap=gap, **momentum) == slow
    assert run("SlowMo", tau=2, outer_momentum=0.0, outer_lr=1.0) == run("LocalSGD", tau=2)


@ranked(3)
def test_local_sgd_after_every_step_is_data_parallel_training(world: World) -> None:
    """With SGD and tau = 1, the mean of models is a step along the mean gradient."""
    ours, theirs = network(), DistributedDataParallel(network())
    mine, other = optimizer(ours, "sgd"), optimizer(theirs, "sgd")
    with LocalSGD(ours, mine, tau=1):
        train(ours, mine, world.rank, range(10))
    train(theirs, other, world.rank, range(10))
    assert (vector(ours) - vector(network())).abs().max() > 0.1
    assert (vector(ours) - vector(theirs)).abs().max() < 1e-6


@pytest.mark.parametrize("bucket", [2**25, 2**20])
@pytest.mark.parametrize("wire", ["int8", "int4"])
@ranked(3)
def test_what_quantization_takes_off_is_bounded_on_all_ranks_alike(
    world: World, wire: Any, bucket: int
) -> None:
    """The roots of both numbers add up to the error or more, and to about twice as much at most.

    Of independent roundings of n ranks at most sqrt(n + 1), by Cauchy and Schwarz. In one bucket
    and in several.
    """
    seed = torch.Generator().manual_seed(world.rank)
    values = torch.randn(400_001, generator=seed) * torch.logspace(-3, 0, 400_001)
    exact = values.double()
    dist.all_reduce(exact)
    average = Average(dist.group.WORLD, wire, 10.0, bucket)
    flight = average.launch(values.clone(), 0)
    flight.wait()
    error = float(((flight.vector.double() - exact / 3) ** 2).sum())
    answer = error, sent, mean = error, *flight.rounding()
    average.close()
    assert 0 < error <= (sent**0.5 + mean**0.5) ** 2 <= 1.2 * (3 + 1) * error
    assert everywhere(answer) == [answer] * 3


@pytest.mark.parametrize("preview", [False, True])
@ranked(2)
def test_the_recorded_rounding_covers_the_averages_of_all_fragments(
    world: World,
    preview: bool,  # noqa: FBT001 - a parameter
) -> None:
    """At least what all averages of a training are off by, of each fragment, and not far above."""
    model, optim, co2 = begun(tau=4, delay=2, fragments=4, keep=1.0, dtype="int8", preview=preview)
    loop, sums, flights = co2._outer, [], []
    launch = loop.launch

    def launched(moved: torch.Tensor) -> PendingAverage:
        exact = moved.double()
        dist.all_reduce(exact)
        sums.append(exact / 2)
        flights.append(launch(moved))
        return flights[-1]

    with co2, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "launch", launched)
        used = [0.0]
        absorb = loop.use_average

        def take(flight: PendingAverage, *rest: Any, **named: Any) -> None:
            absorb(flight, *rest, **named)
            (exact,) = (one for one, other in zip(sums, flights, strict=True) if other is flight)
            used[0] += float(((flight.vector.double() - exact) ** 2).sum())

        patch.setattr(loop, "use_average", take)
        train(model, optim, world.rank, range(13))
        recorded = co2.stats().rounding_residual
        assert 0 < used[0] <= recorded <= 4 * used[0]


@ranked(3)
def test_all_ranks_stop_after_the_step_of_one_that_is_told_to(world: World) -> None:
    """`any_rank` is true on all ranks, once it is on one: rank 1, after 5 steps."""
    model, optim, co2 = begun(tau=3)
    with co2:
        for step in range(20):
            train(model, optim, world.rank, range(step, step + 1))
            if co2.any_rank(world.rank == 1 and step == 4):
                break
        assert (step, co2.stats().steps) == (4, 5)


USUAL = ((1, "save"), (6, "save"), (8, "dcp"))
PHASES = ((4, "save"), (5, "save"), (6, "dcp"))
"""Of a round with averages under way."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "options", "inners", "cuts"),
    [
        ("CO2", {"staleness": 1, "clip": 0.05}, ("momentum", "adamw"), USUAL),
        ("CO2", {"staleness": 2}, ("momentum", "adamw"), USUAL),
        ("CO2", {"staleness": 1, "dtype": "int8"}, ("momentum", "adamw"), USUAL),
        ("SlowMo", {}, ("momentum", "adamw"), USUAL),
        ("OverlapLocalSGD", {}, ("momentum", "adamw"), USUAL),
        ("CO2", {"delay": 1, "dtype": "int8"}, ("momentum",), PHASES),
        ("CO2", {"delay": 2, "fragments": 3}, ("adamw",), PHASES),
        ("CO2", {"delay": 2, "keep": 0.5, "predict": 0.5}, ("adamw",), PHASES),
        ("CO2", {"delay": 2, "fragments": 2, "preview": True}, ("adamw",), PHASES),
    ],
)
@ranked(3)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    world: World, name: str, options: dict[str, Any], inners: Any, cuts: Any, tmp_path: Path
) -> None:
    """Cut between and within rounds, with averages under way; by torch.save and by dcp."""
    options = {"tau": 3, **options, "bucket_mib": SMALL}
    clock = {"waited": 0.0, "late": 0, "seconds": 0.0}
    for inner, (cut, way) in itertools.product(inners, cuts):
        problem = {"algorithm": name, "inner": inner, "model": "float32", "options": options}
        folder, mine = tmp_path / f"{inner}-{cut}", tmp_path / f"{inner}-{cut}-{world.rank}"
        whole = model, optim, algorithm = made(problem, world)
        with algorithm:
            train(model, optim, world.rank, range(cut))
            if way == "dcp":
                dcp.save({"algorithm": algorithm}, checkpoint_id=folder)
            torch.save([part.state_dict() for part in whole], mine)
            train(model, optim, world.rank, range(cut, 16))
            stats = algorithm.stats()
        other, again, resumed = made(problem, world)
        with resumed:
            weights, state, own = torch.load(mine)
            if way == "dcp":
                dcp.load({"algorithm": resumed}, checkpoint_id=folder)
            else:
                resumed.load_state_dict(own)
            other.load_state_dict(weights)
            again.load_state_dict(state)
            train(other, again, world.rank, range(cut, 16))
            ended = resumed.stats()
        assert torch.equal(vector(model), vector(other)), (inner, cut)
        assert torch.equal(algorithm._outer.state.anchor, resumed._outer.state.anchor)
        assert replace(stats, **clock) == replace(ended, **clock)
        assert bool(stats.rounding_residual) == (options.get("dtype") == "int8")


@ranked(3)
def test_the_chosen_delay_counts_each_average_as_on_its_slowest_rank(world: World) -> None:
    """A whole round until five were measured, then 3 for 1, 2 and 3; resuming keeps it."""

    def seen(self: PendingAverage) -> bool:
        return self.notices is None or self.notices.steps() - self.step > world.rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingAverage, "arrived", seen)
        patch.setattr(pacing, "_STEADY", float("inf"))  # whatever else this machine does
        model, other = network(), network()
        optim, again = optimizer(model, "sgd"), optimizer(other, "sgd")
        delays = []
        with co2_of(model, optim, tau=4, delay="auto") as co2:
            for t in range(7):
                train(model, optim, world.rank, range(4 * t, 4 * t + 4))
                delays.append(co2.stats().delay)
            state = copy.deepcopy(co2.state_dict())
        assert delays == [4] * 2 + [3] * 5
        with co2_of(other, again, tau=4, delay="auto") as resumed:
            other.load_state_dict(model.state_dict())
            resumed.load_state_dict(state)
            train(other, again, world.rank, range(8))
            assert resumed.stats().delay == 3


@pytest.mark.parametrize("outer", [{}, {"outer_momentum": 0.9, "outer_lr": 0.1, "preview": True}])
@ranked(3)
def test_the_consensus_is_what_the_training_would_end_with(
    world: World, outer: dict[str, Any]
) -> None:
    """After every step of three rounds: the same on all ranks, and the live model comes back.

    Without outer momentum, and with it and a preview.
    """
    for steps in range(1, 10):
        model, optim, co2 = begun(tau=3, delay=2, **outer)
        with co2:
            for step in range(steps):
                train(model, optim, world.rank, range(step, step + 1))
                live = vector(model)
                with co2.consensus():
                    inside = vector(model)
                assert torch.equal(live, vector(model))
        assert torch.equal(inside, vector(model))
        assert all(torch.equal(inside, other) for other in everywhere(inside))
