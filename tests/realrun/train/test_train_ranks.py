"""Training on several ranks: every strategy learns, and what was interrupted goes on as it was."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from local_problem import said
from ranks import everywhere, ranked
from small_training import SMALL, parallelize, train, trained

from realrun.algorithms.pacing import AutoTau
from realrun.execute.world import World
from realrun.train import TrainSettings
from realrun.train.folder import MODEL
from realrun.train.log import History
from realrun.train.tasks.task import Task

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
NODES = [f"local_sgd:tau=2,worker=node,inner={name}" for name in ("ddp", "zero2", "zero3", "fsdp")]


def learn(world: World, strategies: list[str]) -> dict[str, tuple[float, Any]]:
    """Train by every strategy, which has to learn, alike on all ranks: loss and bytes sent.

    It ends better than half-way, and far from the ln 98 = 4.58 of a guess.
    """
    ends = {}
    for strategy in strategies:
        settings = {"strategy": strategy, "outer": OUTER.get(strategy, {}), "seed": 1}
        history = trained(world, steps=32, eval_every=16, **settings)
        first, last = (row.validation_loss for row in history.rows if row.validation_loss)
        assert last < first, strategy
        assert last < 3.4, strategy
        assert everywhere((first, last)) == [(first, last)] * world.layout.world_size
        ends[strategy] = last, history.rows[-1].bytes_sent
    return ends


def apart(ends: dict[str, tuple[float, Any]], strategies: list[str]) -> float:
    """How far the losses of these strategies are apart."""
    losses = [ends[strategy][0] for strategy in strategies]
    return max(losses) - min(losses)


@ranked(2)
def test_every_strategy_learns(world: World) -> None:
    """On two ranks; those that share every gradient end with the same loss."""
    ends = learn(world, [*SHARED, "zeropp", *OUTER])
    assert {strategy for strategy, (_, sent) in ends.items() if sent is not None} == set(OUTER)
    assert apart(ends, SHARED) < 1e-3


@ranked(4, gpus_per_node=2)
def test_states_divided_inside_nodes_learn_as_whole_ones_do(world: World) -> None:
    """Two nodes of two ranks, which hold the same states: every gradient is that of all four."""
    strategies = ["ddp", "zero1:shard=node", "zero2:shard=node", "zero1:shard=1"]
    assert apart(learn(world, strategies), strategies) < 1e-3


@pytest.mark.nightly
@ranked(4, gpus_per_node=2)
def test_a_node_is_a_worker(world: World) -> None:
    """Two nodes of two ranks: inside DDP or ZeRO, which give the same; averages between nodes.

    ZeRO++ inside, with gradients in int4 and weights in int8, learns as ZeRO does, within the error
    of int4, and sends as much between nodes.
    """
    quantized = "local_sgd:tau=2,worker=node,inner=zeropp"
    ends = learn(world, [*NODES, quantized])
    assert apart(ends, NODES) < 1e-3
    for name in NODES:
        # 16 rounds of two workers: each rank sends its half of the model once, in fp32.
        assert ends[name][1] == pytest.approx(16 * 4 * 61_248 / 2, rel=0.02)
    last, sent = ends[quantized]
    end, plain = ends[NODES[2]]
    assert last == pytest.approx(end, rel=0.03)
    assert (last != end, sent) == (True, plain)


def differences(whole: History, rest: History) -> list[str]:
    """Of two logs; the one of parts has the row of the stop, too: step 11."""
    parted = [row for row in rest.rows if row.step != 11]
    wrong = [] if len(parted) == len(whole.rows) else ["rows"]
    for expected, found in zip(whole.rows, parted, strict=False):
        for name, value in asdict(expected).items():
            same = value == asdict(found)[name]
            # The row after the stop averages fewer losses; times and waits are never equal.
            averaged = name == "train_loss" and expected.step == 12
            if not same and not averaged and name not in {"seconds", "waited", "late"}:
                wrong.append(f"{name} of step {expected.step}: {value}, {asdict(found)[name]}")
    return wrong


def resume(world: World, folder: Path, strategy: str, *, longer: bool = False) -> None:
    """24 steps at once, and 11 and the other 13 from a checkpoint, are the same training.

    `longer`: the first training has 11 steps in all, at a constant learning rate.
    """
    settings = {"strategy": strategy, "steps": 24, "eval_every": 12}
    settings |= {"final_lr": 1.0} if longer else {}
    first = {"steps": 11} if longer else {"stop": 11}
    at_once, parted = folder / "whole", folder / "parted"
    whole = trained(world, at_once, **settings)
    half = trained(world, parted, **{**settings, **first})
    rest = trained(world, parted, resume=True, **settings)
    assert (len(half.rows), half.stopped, rest.stopped) == (3, not longer, False)
    if world.rank == 0:
        assert differences(whole, rest) == []
        model, other = (torch.load(path / MODEL) for path in (at_once, parted))
        assert all(torch.equal(model[name], other[name]) for name in model)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "zeropp", "co2.published:tau=4", "overlap_local_sgd:tau=4"),
        "co2:tau=4,delay=3,worker=node,inner=zero2",
        "co2.published:tau=4,worker=node,inner=zero2",
        *("zero1:shard=node", "zero2:shard=node"),
    ],
)
@ranked(4, gpus_per_node=2)
def test_resumed_is_uninterrupted(world: World, strategy: str, tmp_path: Path) -> None:
    """Bit for bit, on two nodes of two ranks: every loss, every parameter.

    The stop is in the middle of a round; with nodes as workers every rank has a share of the outer
    state.
    """
    resume(world, tmp_path, strategy)


@pytest.mark.parametrize("strategy", ["co2:tau=4,delay=2", "ddp"])
@ranked(2)
def test_a_finished_training_goes_on_to_more_steps(
    world: World, strategy: str, tmp_path: Path
) -> None:
    """As if it had had them from the start, where no learning rate depends on their number."""
    resume(world, tmp_path, strategy, longer=True)


@ranked(2)
def test_a_resumption_keeps_the_tau_that_was_measured(world: World, tmp_path: Path) -> None:
    """And validates at the ends of its rounds: after 2 and 5 steps, then every 7 steps.

    The resumption would find tau to be 9.
    """
    settings = {"strategy": "co2", "steps": 40, "eval_every": 10}
    for tau, stop in ((7, {"stop": 22}), (9, {})):
        with pytest.MonkeyPatch.context() as patch:
            measured = lambda self, tau=tau: tau if self.steps else None  # noqa: E731
            patch.setattr(AutoTau, "averaged", measured)
            history = trained(world, tmp_path, resume=True, **settings, **stop)
    assert (history.rows[-1].tau, history.facts["outer_step"]["tau"]) == (7, 7)
    if world.rank == 0:  # which reads the log
        assert [row.step for row in history.rows if row.validation_loss] == [12, 26, 33, 40]


@pytest.mark.parametrize(("strategy", "end"), [("ddp", 24), ("co2.published:tau=12", 36)])
@ranked(4)
def test_all_ranks_stop_after_the_same_step(world: World, strategy: str, end: int) -> None:
    """When one of four is asked to, for the second vote, which counts at the third."""
    votes = 0

    def stop() -> bool:
        nonlocal votes
        votes += 1
        return world.rank == 3 and votes > 1

    settings = TrainSettings(**{**SMALL, "strategy": strategy, "steps": 600})
    history = train(settings, world, stop=stop)
    assert history.stopped
    assert history.rows[-1].step == end


@ranked(2)
def test_what_cannot_be_trained_is_refused_in_words(world: World) -> None:
    """By all ranks, before the first step."""
    for settings, begin, words in (
        ({"batch": 7}, "OptionError: batch is 7", ""),
        ({"strategy": "zero3:prefetch=3"}, "OptionError", "prefetch"),
        ({"seed": world.rank}, "MismatchError: rank 1 ", "seed"),
    ):
        heard = said(lambda: trained(world, steps=4, **settings))  # noqa: B023 - called at once
        assert heard.startswith(begin)
        assert words in heard


@ranked(2, last=True)
def test_a_loss_that_is_no_number_stops_all(world: World) -> None:
    """The rank whose loss it is says which step; the other names that rank: 1, in step 3."""
    draw, models = Task.batch, []

    def spoiled(self: Task, seed: int, step: int, *parts: Any) -> Any:
        if step == 3 and world.rank == 1:
            with torch.no_grad():
                models[0].norm.weight.fill_(math.nan)
        return draw(self, seed, step, *parts)

    def noticed(settings: TrainSettings, model: Any, world: World) -> Any:
        models.append(model)
        return parallelize.build(settings, model, world)

    settings = TrainSettings(strategy="co2.published:tau=2", steps=8, **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "batch", spoiled)
        heard = said(lambda: train(settings, world, build=noticed))
    if world.rank == 1:
        assert heard.startswith("TrainingError: the loss of step 3 is nan on rank 1")
    else:
        assert heard.startswith("RankFailure: ")
        assert "rank 1 raised TrainingError" in heard
