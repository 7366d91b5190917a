"""Local-update algorithms end alike on all ranks, and who leaves is named to the others."""

import os
import signal
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from commands import rows
from local_problem import (
    algorithm_of,
    begun,
    co2_of,
    network,
    optimizer,
    said,
    set_vector,
    train,
    vector,
    warned,
)
from ranks import everywhere, on_ranks, ranked
from torch import distributed as dist
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from realrun.algorithms import LocalSGD, OptionError, RankFailure, departures
from realrun.algorithms.departures import DepartureLog
from realrun.execute.world import World

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("steps", "options"), [(4, {}), (12, {"dtype": "int8"})])
@ranked(3)
def test_an_exception_is_told_at_once_with_counts(
    world: World, steps: int, options: dict[str, Any]
) -> None:
    """Those that wait, and those that only close, name the rank, its exception and its steps.

    Rank 1 takes these steps and raises, all others take 12, in rounds of 3.
    """
    model = network()
    optim = optimizer(model, "sgd")

    def go_on() -> None:
        with co2_of(model, optim, tau=3, **options):
            train(model, optim, world.rank, range(steps if world.rank == 1 else 12))
            if world.rank == 1:
                raise ValueError("bad sample")

    heard = said(go_on)
    if world.rank == 1:
        assert heard == "ValueError: bad sample"
    else:
        assert heard.startswith("RankFailure: ")
        assert f"rank 1 raised ValueError (bad sample) after {steps} steps" in heard
        assert f"rank {world.rank} has taken " in heard
    dist.barrier()


def sliding() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A model of zeros whose gradient is -1: a step of rate 1 adds 1 to all parameters."""
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def slide(model: nn.Linear, optim: torch.optim.Optimizer, *, spoilt: bool = False) -> None:
    """A step; the gradient of a `spoilt` one is NaN in the bias."""
    optim.zero_grad()
    (-sum(each.sum() for each in model.parameters())).backward()
    if spoilt:
        model.bias.grad.fill_(torch.nan)
    optim.step()


SETTLED: list[tuple[str, list[int], dict[str, Any]]] = [
    ("LocalSGD", [4, 7, 4], {"tau": 3}),
    ("LocalSGD", [0, 3, 2], {"tau": 2}),
    ("CO2", [5, 8, 9], {"tau": 3, "delay": 2, "keep": 1}),
    ("CO2", [5, 8, 9], {"tau": 4, "delay": 1, "fragments": 2, "keep": 1}),
    ("CO2", [5, 8, 12], {"tau": 3, "outer_lr": 1.0, "gap": "constant"}),
]
"""Steps of three ranks, with a gain of 1: the mean of all workers moves as they do."""


@ranked(3)
def test_uneven_ends_lose_no_progress(world: World) -> None:
    """With a constant gradient all ranks end with the mean of their numbers of steps.

    One warning on every rank names join() and points to the line of the user.
    """
    for index, (name, steps, options) in enumerate(SETTLED):
        model, optim = sliding()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with algorithm_of(name, model, optim, timeout=60, **options) as training:
                for _ in range(steps[world.rank]):
                    slide(model, optim)
        assert np.allclose(vector(model), np.mean(steps), atol=1e-5), (name, steps, options)
        assert training.stats().steps == steps[world.rank]
        if not index:
            assert {Path(each.filename).name for each in caught} == {Path(__file__).name}
            (warning,) = (str(each.message) for each in caught if "steps" in str(each.message))
            assert "join()" in warning


NOT_FINITE: list[tuple[str, int, int, list[int], dict[str, Any]]] = [
    ("LocalSGD", 6, 1, [1], {"tau": 3}),
    ("CO2", 9, 4, [1], {"tau": 3, "outer_lr": 1.0, "gap": "constant"}),
    ("CO2", 9, 4, [0, 1], {"tau": 3, "delay": 2, "keep": 1}),
]
"""Steps, the one with a NaN, and the ranks that have it."""


@ranked(3)
def test_a_worker_that_is_not_finite_continues_from_the_anchor(world: World) -> None:
    """Its steps since the last average are lost, and it does not count in that mean.

    With the same gradient everywhere all ranks end as if nothing had happened.
    """
    for name, steps, bad_step, ranks, options in NOT_FINITE:
        model, optim = sliding()
        with warned() as texts, algorithm_of(name, model, optim, on_nonfinite="anchor", **options):
            for step in range(steps):
                slide(model, optim, spoilt=step == bad_step and world.rank in ranks)
        assert np.allclose(vector(model), steps, atol=1e-5), (name, options)
        assert len(texts) == (world.rank in ranks)


@ranked(3)
def test_a_mean_of_no_finite_worker_is_refused(world: World) -> None:
    """On all ranks, also with on_nonfinite='anchor'."""
    model = network()
    optim = optimizer(model, "sgd")

    def go_on() -> None:
        with LocalSGD(model, optim, tau=2, on_nonfinite="anchor"):
            with torch.no_grad():
                model[0].bias[0] = torch.nan
            train(model, optim, world.rank, range(2))

    assert said(go_on).startswith("NonFiniteError")


@ranked(3)
def test_a_rank_that_makes_no_algorithm_is_named_in_time(world: World) -> None:
    """And so is one whose constructor raises, at once."""
    model = network()
    optim = optimizer(model, "sgd")
    if world.rank != 1:
        absent = said(lambda: LocalSGD(model, optim, timeout=2))
        assert "rank 1 has not come" in absent
        assert "all ranks" in absent
    dist.barrier()
    if world.rank == 1:
        optim.param_groups[0]["params"].pop()
        DepartureLog.of_all_ranks().end()  # of the algorithm that it has not made
    raises = said(lambda: LocalSGD(model, optim, timeout=60))
    if world.rank == 1:
        assert raises.startswith("OptionError")
    else:
        assert "rank 1 raised OptionError" in raises


@ranked(3, last=True)
def test_a_process_may_train_several_times(world: World) -> None:
    """Also after its default group was destroyed and made once more, whose timeout counts then."""
    ends = []
    store = dist.distributed_c10d._get_default_store()
    for attempt in range(2):
        for _ in range(2):
            model = network()
            optim = optimizer(model, "sgd")
            with LocalSGD(model, optim, tau=2, timeout=60):
                train(model, optim, world.rank, range(3))
            ends.append(vector(model).tolist())
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"again{attempt}", store),
            rank=world.rank,
            world_size=world.layout.world_size,
            timeout=timedelta(seconds=41),
        )
    assert everywhere(ends) == [[ends[0]] * 4] * 3
    model = network()
    with LocalSGD(model, optimizer(model, "sgd")) as last:
        assert last._links.deadline == 41.0


LOST = [
    ("step", [3], "SIGKILL"),
    pytest.param("step", [0], "SIGSTOP", marks=pytest.mark.nightly),
    pytest.param("start", [2], "SIGKILL", marks=pytest.mark.nightly),
    ("consensus", [1], "SIGSTOP"),
    ("end", [2, 3], "SIGKILL"),
]
"""Phase of the training, ranks of four, and what is done to them."""


@pytest.mark.parametrize(("phase", "victims", "how"), LOST)
def test_every_survivor_names_the_lost_ranks(phase: str, victims: list[int], how: str) -> None:
    """No other rank is blamed, though others leave, too."""
    given: dict[str, Any] = {"phase": phase, "victims": victims, "how": how}
    on_ranks("lose", 4, module=__name__, dies=victims, **given)


def lose(world: World, phase: str, victims: list[int], how: str) -> None:
    """Ranks are killed or stopped in a phase of a training: the others are told who."""
    model = network()
    optim = optimizer(model, "sgd")

    def fails(now: str) -> None:
        if now == phase and world.rank in victims:
            os.kill(os.getpid(), getattr(signal, how))

    with pytest.raises(RankFailure) as lost:  # noqa: PT012 - wherever the others are
        fails("start")
        with LocalSGD(model, optim, tau=2, timeout=3) as local:
            train(model, optim, world.rank, range(3))
            fails("step")
            train(model, optim, world.rank, range(3, 5))
            fails("consensus")
            with local.consensus(buffers=True):
                pass
            fails("end")
    assert list(lost.value.ranks) == victims, lost.value


def resumed_in_the_second_attempt(folder: str) -> tuple[int, list[float]]:
    """In the first one rank 1 raises; gives the step at which the second begins, and its end."""
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
    # torchrun keeps its store, in which torch 2.13 would find the addresses of the attempt before
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"attempt{attempt}", dist.TCPStore(*address, is_master=False)),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    model, optim, local = begun("LocalSGD", tau=2)
    saved = Path(folder) / f"state-{rank}"
    with local:
        first = 0
        if saved.exists():
            state = torch.load(saved)
            model.load_state_dict(state["model"])
            local.load_state_dict(state["local"])
            first = local.stats().steps
        for step in range(first, 6):
            if (attempt, rank, step) == ("0", 1, 3):
                raise ValueError("bad sample")
            train(model, optim, rank, range(step, step + 1))
            if step == 1:
                torch.save({"model": model.state_dict(), "local": local.state_dict()}, saved)
                dist.barrier()  # rank 0 is ended by torchrun once rank 1 has raised
    dist.destroy_process_group()
    return first, vector(model).tolist()


def test_a_restarted_training_reads_no_notes_of_the_attempt_before(tmp_path: Path) -> None:
    """A rank raises in the first attempt of torchrun, and the second one resumes to its end.

    By torchrun's own agent, which forks the ranks.
    """
    how = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="restarted",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    ends = elastic_launch(how, resumed_in_the_second_attempt)(str(tmp_path))
    assert ends[0][0] == ends[1][0] == 2
    assert ends[0] == ends[1]


def test_notes_of_another_attempt_or_group_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one store that all of them share, as with `init_method="tcp://..."`."""
    store, prefixes = dist.HashStore(), []
    for attempt in ("0", "0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        prefixes += [departures.common_prefix(), departures.common_prefix()]
        dist.destroy_process_group()
    assert len(set(prefixes)) == 6


def in_turn(steps: list[int], tau: int) -> torch.Tensor:
    """Rounds of LocalSGD, one rank after another: means over those that took a step."""
    model = network()
    anchor = vector(model)
    for begin in range(0, max(steps), tau):
        ends = []
        for rank, most in enumerate(steps):
            if taken := range(begin, min(begin + tau, most)):
                set_vector(model, anchor)
                train(model, optimizer(model, "sgd"), rank, taken)
                ends.append(vector(model))
        anchor = torch.stack(ends).mean(0)
    return anchor


@ranked(3)
def test_all_ranks_end_alike_with_averages_over_those_who_took_part(world: World) -> None:
    """Bit for bit, with what was under way and the last part of a round; then nothing is counted.

    By `finish`, or after other numbers of steps by `join`. LocalSGD ends as rounds done one rank
    after another do; a rank may have no data at all.
    """
    for name, counts, options in rows("local-update-ends.txt"):
        steps = [int(count) for count in counts.split(",")]
        model, optim, algorithm = begun(name, **options)
        mine = steps[world.rank]
        if len(set(steps)) > 1:
            with algorithm.join():
                train(model, optim, world.rank, range(mine))
        else:
            train(model, optim, world.rank, range(mine))
            algorithm.finish()
            assert algorithm.stats().steps == mine
        end = vector(model)
        assert all(torch.equal(other, end) for other in everywhere(end))
        assert not torch.equal(end, vector(network()))
        if name == "LocalSGD":
            close = 2e-2 if "dtype" in options else 1e-6
            assert np.allclose(end, in_turn(steps, options["tau"]), atol=close)
        counted = algorithm.stats().steps
        train(model, optim, world.rank, range(1))
        assert not torch.equal(vector(model), end)  # a plain step
        assert algorithm.stats().steps == counted


@ranked(3)
def test_what_join_cannot_do_is_said(world: World) -> None:
    """It begins between rounds; an exception within is told to all."""
    model, optim, co2 = begun(tau=2)
    with co2:
        train(model, optim, world.rank, range(1))
        with pytest.raises(OptionError, match=r"^join\(\)"):
            co2.join().__enter__()
        train(model, optim, world.rank, range(1, 2))
    dist.barrier()

    def raising() -> None:
        with co2_of(model, optim, tau=2) as co2, co2.join():
            train(model, optim, world.rank, range(3 + world.rank))
            if world.rank == 2:
                raise ValueError("bad sample")

    heard = said(raising)
    if world.rank == 2:
        assert heard == "ValueError: bad sample"
    else:
        assert "rank 2 raised ValueError (bad sample) after 5 steps" in heard
    dist.barrier()


def test_steps_are_counted_over_trainings_that_were_finished() -> None:
    """What goes on from the state after `finish` counts what each shorter round really had."""
    state: dict[str, Any] = {}
    model = network()
    for steps in (4, 9):
        optim = optimizer(model, "sgd")
        algorithm = LocalSGD(model, optim, tau=3)
        if state:
            algorithm.load_state_dict(state)
        train(model, optim, 0, range(algorithm.stats().steps, steps))
        algorithm.finish()
        assert algorithm.stats().steps == steps
        state = algorithm.state_dict()


@ranked(3)
def test_what_would_mistake_the_consensus_is_refused(world: World) -> None:
    """Each in a line; a step is, too, changes nothing, and training goes on; an end is an end."""
    model, optim, local = begun("LocalSGD", tau=2)
    with local:
        train(model, optim, world.rank, range(2))
        state = local.state_dict()
        with local.consensus():
            before = vector(model)
            for words, call in {
                "consensus()": lambda: local.consensus().__enter__(),
                "finish()": local.finish,
                "join()": lambda: local.join().__enter__(),
                "state_dict()": local.state_dict,
                "load_state_dict()": lambda: local.load_state_dict(state),
                "a step": lambda: train(model, optim, world.rank, range(1)),
            }.items():
                assert said(call).startswith(f"OptionError: {words}")
            assert torch.equal(before, vector(model))
        train(model, optim, world.rank, range(2, 4))
        assert local.stats().rounds == 2
        assert "dict" in said(partial(local.finish, {"weight": torch.ones(2)}))
    assert "finish()" in said(local.finish)


def test_a_store_that_is_gone_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that held it has ended well; the deadline of 60 s was waited for."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    monkeypatch.setattr(departures, "_get_default_store", lambda: client)
    monkeypatch.setattr(departures, "common_prefix", lambda: "notes")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    notes = DepartureLog([0, 1], lambda: 12)
    notes.leave()
    del store
    notes.compare(4, 1e6)  # which would be waited for


@ranked(2)
def test_a_consensus_after_unequal_numbers_of_steps_names_join(world: World) -> None:
    """On all ranks, with the rank that has taken fewer."""
    model = network()
    optim = optimizer(model, "sgd")

    def go_on() -> None:
        with co2_of(model, optim, tau=4, delay=2) as co2:
            train(model, optim, world.rank, range(20 - 6 * world.rank))
            with co2.consensus():
                pass

    heard = said(go_on)
    assert "rank 1 is at consensus() after 14 steps" in heard
    assert "join()" in heard
