"""Workers that die and come back, by torchft: averages as always, and one anchor for all.

Workers are threads, each with a Manager of its own, but where one is killed: that takes processes.
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("torchft", reason="the extra `torchft` is not installed")

import torch
import torch.distributed as dist
from local_problem import network, optimizer, train, vector
from pages import blocks
from places import ROOT
from reference_local_update import CLOSE, case, expected
from torch import nn
from torchft import Manager
from torchft.coordination import LighthouseServer
from torchft_workers import made_manager, until_killed

from co2sim.common.errors import OptionError
from realrun import algorithms
from realrun.adapters.torchft import fault_tolerant
from realrun.algorithms import CO2, DiLoCo, LocalSGD, LocalUpdate, SlowMo
from realrun.errors import MismatchError, RankFailure

pytestmark = [  # torchft warns with a method that is deprecated, and loads from what it only reads
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.*'warn':DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

ROUNDS = 6
Work = Callable[[int, Manager], Any]


@contextmanager
def lighthouse(workers: int, **options: int) -> Iterator[str]:
    """The address of one that asks for so many workers at least."""
    given = {"join_timeout_ms": 5000, "heartbeat_timeout_ms": 1500, "quorum_tick_ms": 20, **options}
    made = LighthouseServer(bind="[::]:0", min_replicas=workers, **given)
    try:
        yield f"http://localhost:{made.address().rpartition(':')[2]}"
    finally:
        made.shutdown()


def together(workers: int, work: Work, least: int = 0, **limits: float) -> list[Any]:
    """What `work(number, manager)` gives on every worker; raises what the first of them raises.

    Quorums have all workers, or at least so many.
    """

    def alone(number: int, address: str) -> Any:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        manager = made_manager(number, address, store.port, least or workers, **limits)
        try:
            return work(number, manager)
        finally:
            manager.shutdown()
            manager._checkpoint_transport._server.server_close()  # which torchft leaves open

    with (
        lighthouse(least or workers, join_timeout_ms=1000) as address,
        ThreadPoolExecutor(workers) as pool,
    ):
        results = [pool.submit(alone, number, address) for number in range(workers)]
        return [one.result(60) for one in results]


def steps(training: LocalUpdate, optim: torch.optim.Optimizer, worker: int, tau: int) -> None:
    """One round."""
    done = training.stats().rounds
    train(training.model, optim, worker, range(done * tau, (done + 1) * tau))


# --- what is learned -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        case("CO2", "adamw", rounds=ROUNDS + 1, tau=3),
        case("CO2", "sgd", rounds=ROUNDS + 1, tau=3, gap="constant", clip=0.03),
        case("CO2", "sgd", tau=2, gap="constant", staleness=0),
        case("SlowMo", "adamw", tau=4, outer_momentum=0.8, outer_lr=0.6),
        case("LocalSGD", "momentum", tau=1),
        case("DiLoCo", "sgd", tau=3, outer_momentum=0.9, outer_lr=0.7),
    ],
)
def test_it_trains_as_the_equations_say(problem: dict[str, Any]) -> None:
    """All begin with the first one's weights, and hold the same bits after every round.

    In the end, too, where an average that is under way is used.
    """
    name, options = problem["algorithm"], problem["options"]
    kind = CO2.published if name == "CO2" else getattr(algorithms, name)

    def work(number: int, manager: Manager) -> Any:
        model = models[number]
        optim = optimizer(model, problem["inner"])
        history = []
        with fault_tolerant(manager, kind, model, optim, **options) as training:
            while training.stats().rounds < ROUNDS:
                steps(training, optim, number, options["tau"])
                history.append(vector(model).numpy())
        return [*history, vector(model).numpy()], training.stats()

    models = [network(seed=number) for number in range(3)]
    ends = together(3, work)
    for history, stats in ends:
        assert all(map(np.array_equal, history, ends[0][0]))
        assert stats.rounds == ROUNDS
        assert stats.bytes_sent > 0
    wanted = list(expected(problem, 3)[:, 0])
    wanted += wanted[-1:] * (ROUNDS + 1 - len(wanted))
    assert np.abs(np.array(ends[0][0]) - wanted).max() < CLOSE


# --- an average that fails -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "missed"),
    [(CO2.published, {0, 1, 2}), (CO2.published, {1}), (DiLoCo, {1})],
)
def test_an_average_that_fails_is_lost_for_all_or_for_none(
    kind: type[LocalUpdate], missed: set[int]
) -> None:
    """If nobody has it, the anchor stays; who alone missed it takes over the anchor of the others.

    That is at the next quorum: the same round's with CO2, the next one's where averages are waited
    for.
    """

    def work(number: int, manager: Manager) -> Any:
        model = models[number]
        optim = optimizer(model, "sgd")
        vote = manager.should_commit
        failed = manager_failing(manager, at=3, when=number in missed)
        history, used = [], []
        with fault_tolerant(manager, kind, model, optim, tau=2, outer_lr=0.7) as training:
            assert manager.should_commit == failed != vote
            while training.stats().rounds < ROUNDS:
                steps(training, optim, number, 2)
                history.append(vector(model).numpy())
                used.append(manager.current_step())
        return [*history, vector(model).numpy()], used

    models = [network(seed=number) for number in range(3)]
    found = together(3, work)
    alike = [len({one[at].tobytes() for one, _ in found}) == 1 for at in range(ROUNDS + 1)]
    late = kind is DiLoCo and missed == {1}
    assert alike == [not (late and at == 1) for at in range(ROUNDS + 1)]
    lost = len(missed) == 3
    assert np.array_equal(found[0][0][1], found[0][0][2]) == lost
    assert {used[-1] for _, used in found} == {ROUNDS + (kind is DiLoCo) - lost}


def manager_failing(manager: Manager, at: int, *, when: bool) -> Callable[..., bool]:
    """Let the vote number `at` of a manager fail."""
    vote, votes = manager.should_commit, iter(range(1, 10**6))

    def voted(*given: Any, **more: Any) -> bool:
        if next(votes) == at and when:
            manager.report_error(RuntimeError("a connection was closed"))
        return bool(vote(*given, **more))

    manager.should_commit = voted
    return voted


# --- who comes -----------------------------------------------------------------------------------


class Whole(nn.Module):
    """A model with a buffer, and a frozen parameter."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.trained, self.fixed = network(seed=number), nn.Linear(1, 1)
        self.fixed.requires_grad_(requires_grad=False)
        self.register_buffer("mean", torch.full((2,), float(number)))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """As its trained part."""
        return self.trained(given)


@pytest.mark.parametrize("kind", [CO2.published, SlowMo])
def test_one_that_comes_later_takes_over_all(kind: type[LocalUpdate]) -> None:
    """Anchor, momentum, numbers, what is frozen and buffers: all go on with the same bits."""
    rounds: dict[int, int] = {}

    def work(number: int, manager: Manager) -> Any:
        while number == 2 and rounds.get(0, 0) < 3:
            time.sleep(0.01)
        model = models[number]
        optim = torch.optim.SGD(model.trained.parameters(), lr=0.05)
        seen, begun = {}, None
        with fault_tolerant(manager, kind, model, optim, tau=2, outer_momentum=0.5) as training:
            begun = training.stats().rounds
            fixed = [float(one) for one in (model.fixed.weight, model.mean.sum())]
            while training.stats().rounds < 12:
                steps(training, optim, number, 2)
                time.sleep(0.02)
                rounds[number] = done = training.stats().rounds
                state = training.loop.state
                parts = (state.anchor, *state.vectors.values())
                numbers = json.dumps(state.numbers).encode()
                seen[done] = b"".join([*(one.numpy().tobytes() for one in parts), numbers])
        return begun, fixed, seen, manager.num_participants()

    models = [Whole(number) for number in range(3)]
    found = together(3, work, least=2)
    begun, fixed, seen, members = zip(*found, strict=True)
    assert begun[:2] == (0, 0)
    assert 3 <= begun[2] < 12
    assert fixed[0] == fixed[1] == fixed[2]
    assert sorted(seen[2]) == list(range(begun[2] + 1, 13))
    assert all(one[at] == seen[0][at] for one in seen for at in one)
    assert members == (3, 3, 3)


@pytest.mark.parametrize("kind", [CO2.published, LocalSGD])
def test_who_ends_before_goes_on_with_what_others_need(kind: type[LocalUpdate]) -> None:
    """Workers with fewer rounds end with the same anchor, which has the others' later rounds."""

    def work(number: int, manager: Manager) -> Any:
        optim = optimizer(models[number], "sgd")
        with fault_tolerant(manager, kind, models[number], optim, tau=2) as training:
            while training.stats().rounds < 2 + 2 * number:
                steps(training, optim, number, 2)
            own = vector(models[number])
        return own.numpy(), vector(models[number]).numpy(), training.stats().rounds

    models = [network(seed=number) for number in range(3)]
    own, end, rounds = zip(*together(3, work), strict=True)
    assert np.array_equal(end[0], end[1])
    assert np.array_equal(end[0], end[2])
    assert not np.array_equal(own[0], end[0])
    assert rounds == (6, 6, 6)


def test_a_training_goes_on_from_a_saved_state(tmp_path: Path) -> None:
    """On another number of workers; a saved state is not loaded later."""

    def first(number: int, manager: Manager) -> Any:
        optim = optimizer(models[number], "sgd")
        with fault_tolerant(manager, SlowMo, models[number], optim, tau=2) as training:
            while training.stats().rounds < 3:
                steps(training, optim, number, 2)
            state = training.loop.state
            kept = state.anchor.clone(), state.vectors["momentum"].clone()
            saved = {key: dict(one) for key, one in training.state_dict().items()}
            with pytest.raises(OptionError, match="given to fault_tolerant"):
                training.load_state_dict(saved)
        return kept, torch.save(saved, paths[number])

    def second(number: int, manager: Manager) -> Any:
        optim = optimizer(others[number], "sgd")
        saved = torch.load(paths[number])
        training = fault_tolerant(manager, SlowMo, others[number], optim, tau=2, state=saved)
        state = training.loop.state
        return state.anchor.clone(), state.vectors["momentum"].clone(), training.stats().rounds

    paths = [tmp_path / f"{number}.pt" for number in range(3)]
    models, others = ([network(seed=seed) for seed in range(3)] for _ in range(2))
    (kept, _), *_ = together(3, first)
    for anchor, momentum, rounds in together(2, second):
        assert torch.equal(anchor, kept[0])
        assert torch.equal(momentum, kept[1])
        assert rounds == 3


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("CO2", {"delay": 1}, "CO2 has a delay, fragments, a pull, or staleness 1"),
        ("DiLoCo", {"fragments": 2}, "DiLoCo has a delay, fragments, a pull"),
        ("OverlapLocalSGD", {}, "with torchft it must have none of them"),
        ("CO2.published", {"staleness": 2}, "staleness 2; with torchft it must have none of them"),
        ("CO2", {"dtype": "int8"}, "dtype is 'int8'; with torchft leave it out"),
        ("CO2", {"worker": "node"}, "worker is 'node'; with torchft leave it out"),
        ("CO2", {"check_every": 2}, "check_every is 2; with torchft leave it out"),
        ("CO2", {"timeout": 9.0}, "timeout is 9.0; with torchft leave it out"),
    ],
)
def test_what_torchft_has_or_cannot_have_is_refused(
    kind: str, options: dict[str, Any], words: str
) -> None:
    """In one line; the optimizer is free for another algorithm then."""
    model = network()
    optim = optimizer(model, "sgd")
    manager: Any = SimpleNamespace(_use_async_quorum=False)
    for _ in range(2):
        with pytest.raises(OptionError, match=words) as raised:
            fault_tolerant(manager, attrgetter(kind)(algorithms), model, optim, tau=4, **options)
        assert "\n" not in str(raised.value)


def test_a_manager_whose_quorum_is_behind_training_is_refused() -> None:
    """As by torchft's own DiLoCo."""
    model = network()
    manager: Any = SimpleNamespace(_use_async_quorum=True)
    with pytest.raises(OptionError, match="use_async_quorum of the Manager is True"):
        fault_tolerant(manager, CO2.published, model, optimizer(model, "sgd"))


def test_changes_from_outside_are_refused() -> None:
    """Weights that were loaded after all had the same."""

    def work(number: int, manager: Manager) -> None:
        model = network(seed=number)
        optim = optimizer(model, "sgd")
        fault_tolerant(manager, LocalSGD, model, optim, tau=2)
        with torch.no_grad():
            next(model.parameters()).add_(0.1)
        with pytest.raises(OptionError, match="load weights before"):
            train(model, optim, 0, range(1))

    together(1, work)


def test_no_quorum_is_one_line() -> None:
    """It names what to look at."""

    def work(_: int, manager: Manager) -> None:
        model = network()
        with pytest.raises(RankFailure, match="a quorum failed in round 0: torchft says") as raised:
            fault_tolerant(manager, CO2.published, model, optimizer(model, "sgd"))
        assert "\n" not in str(raised.value)

    together(1, work, least=2, quorum=0.3)


def test_another_training_cannot_join() -> None:
    """It ends in one line, which names the difference; the other one is left alone."""

    def work(number: int, manager: Manager) -> str:
        model = network()
        with pytest.raises((MismatchError, RankFailure)) as raised:
            fault_tolerant(manager, SlowMo, model, optimizer(model, "sgd"), tau=3 + number)
        return str(raised.value)

    alone, refused = together(2, work, limit=1.0, quorum=3.0)
    assert alone.startswith("a quorum failed")
    what = "this worker has another model, optimizer or setting than the others"
    assert refused == f"{what}: 'tau = 4' instead of 'tau = 3'"


# --- one that is killed --------------------------------------------------------------------------


class Killable:
    """A worker in a process of its own, and what it notes."""

    def __init__(self, number: int, address: str, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "realrun.algorithms"])
        self.path = folder / f"{number}.jsonl"
        self._new = lambda: context.Process(target=until_killed, args=(number, address, folder))
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        self.process = self._new()
        self.process.start()

    def notes(self, since: float = 0.0) -> list[Any]:
        """Time, round, workers in it, and anchor, after every round."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [note for note in map(json.loads, lines) if note[0] > since]

    def among(self, workers: int, since: float = 0.0) -> bool:
        """Whether it has ended a round with so many workers."""
        return any(note[2] == workers for note in self.notes(since))


def wait(ready: Callable[[], bool]) -> None:
    """Wait until it is so."""
    end = time.monotonic() + 100
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_worker_is_dropped_and_comes_back(tmp_path: Path) -> None:
    """Of four, at a random time: the others go on within seconds, and all end with one anchor."""
    stay = tmp_path / "until"
    stay.write_text("1000000")
    with lighthouse(2) as address:
        workers = [Killable(number, address, tmp_path) for number in range(4)]
        *others, killed = workers
        try:
            wait(lambda: all(one.among(4) for one in workers))
            time.sleep(random.uniform(0.0, 0.5))  # noqa: S311 - any time will do
            begin = time.time()
            os.kill(killed.process.pid, signal.SIGKILL)
            wait(lambda: all(one.among(3, begin) for one in others))
            dropped, back = time.time() - begin, time.time()
            killed.start()
            wait(lambda: all(one.among(4, back) for one in workers))
            stay.write_text(str(max(one.notes()[-1][1] for one in workers) + 20))
            for one in workers:
                one.process.join(60)
                assert one.process.exitcode == 0
        finally:
            for one in workers:
                one.process.kill()
    assert dropped < 15
    assert len({tuple(one.notes()[-1][1::2]) for one in workers}) == 1
    anchors: dict[int, set[str]] = {}
    for one in workers:
        for _, rounds, _, anchor in one.notes(back)[:-1]:
            anchors.setdefault(rounds, set()).add(anchor)
    assert all(len(one) == 1 for one in anchors.values())


@pytest.mark.nightly
def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    """Under two torchruns, as written."""
    (script,) = (
        block.text
        for block in blocks(ROOT / "docs" / "frameworks.md")
        if block.title == "torchft_training.py"
    )
    (tmp_path / "script.py").write_text(script)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    with lighthouse(2) as address:
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": address}
        workers = [
            subprocess.Popen(
                [*words, "script.py"],
                cwd=tmp_path,
                env={**os.environ, **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(2)
        ]
        for one in workers:
            told = one.communicate(timeout=200)[0]
            assert one.returncode == 0, told[-3000:]
            assert "Stats(rounds=5, steps=60" in told
