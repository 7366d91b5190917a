"""Loky and Dask give the same bytes, whoever dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from co2sim import OptionError, Question, run, sweep_to
from co2sim.common.errors import EngineError
from co2sim.common.version import own_identity
from co2sim.studies import pools, results_folder, run_all
from co2sim.studies.candidates import Objective, Space
from co2sim.studies.grid import LazyGrid
from co2sim.studies.plan import plan
from co2sim.studies.pools import Engine, opened
from co2sim.studies.results_folder import Inputs, SweepTable, stream

VARY = {"micro_batch": range(1, 13), "strategy.bucket_mib": [1, 2]}
PATIENCE = 600.0


def cases(count: int) -> list[Question]:
    """As many, all different, and cheap."""
    one = Question(cluster=tiny.cluster(), model=tiny.model(), strategy="ddp")
    return [replace(one, micro_batch=n + 1) for n in range(count)]


def kept(folder: Path, **engine: Any) -> dict[str, bytes]:
    """The files of a sweep of 24 cases, in parts of five."""
    sweep_to(folder, tiny.cluster(), tiny.model(), "ddp", vary=VARY, **engine)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five rows, so that 24 cases make several."""
    monkeypatch.setattr(results_folder, "ROWS", 5)


def dask(name: str, *words: str) -> "subprocess.Popen[bytes]":
    """A process of Dask, quiet, on this machine alone."""
    local = ("--host", "127.0.0.1", "--no-dashboard")
    return subprocess.Popen(
        [sys.executable, "-m", f"distributed.cli.dask_{name}", *words, *local],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@contextmanager
def scheduler(folder: Path, workers: int) -> Iterator[tuple[str, list["subprocess.Popen[bytes]"]]]:
    """A real scheduler, as the file that it wrote, with worker processes that nobody restarts."""
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    told = folder / "scheduler.json"
    started = [dask("scheduler", "--port", "0", "--scheduler-file", str(told))]
    try:
        until = time.monotonic() + PATIENCE
        while not told.exists() or not told.read_text().endswith("}"):
            assert time.monotonic() < until, "Dask's scheduler did not start"
            time.sleep(0.05)
        address = json.loads(told.read_text())["address"]
        started += [
            dask("worker", address, "--nthreads", "1", "--no-nanny") for _ in range(workers)
        ]
        yield str(told), started[1:]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
def test_dask_gives_the_bytes_of_one_process_and_loses_nothing_with_a_worker(
    tmp_path: Path,
) -> None:
    """A real scheduler with two worker processes: first both, then one is killed midway."""
    with scheduler(tmp_path, 2) as (file, workers):
        one = kept(tmp_path / "one")
        assert len(one) == 5
        assert kept(tmp_path / "dask", engine="dask", scheduler=file) == one
        many = cases(60)
        address = json.loads(Path(file).read_text())["address"]
        with opened(Engine("dask", address), len(many)) as pool:
            assert pool.share >= 1
            found = {}
            inputs = Inputs()
            items = ((n, inputs.inlined(case)) for n, case in enumerate(many))
            for place, outcome in run_all.run_on_pool(pool, items, run_all.outcome_of, len(many)):
                found[place] = outcome
                if len(found) == 5:
                    workers[0].kill()
        assert [found[place] for place in range(60)] == [run(case) for case in many]
        space = Space(
            job=Question(cluster="", model="gpt2-small", strategy="", global_batch=64),
            clusters=("dgx-h100",),
            strategies=("ddp", "fsdp"),
            gpus="8,16",
        )
        wanted = Objective(want="fastest", tokens=1e9)
        assert plan(space, wanted, engine=Engine("dask", address)) == plan(space, wanted)


class Fallen:
    """A pool whose workers go after a few tasks."""

    slots, share = 2, 1

    def __init__(self) -> None:
        self.tasks = 0

    def submit(self, share: int, content: bytes) -> "Future[Any]":
        """Do it at once, or lose it."""
        future: Future[Any] = Future()
        self.tasks += 1
        if self.tasks > 3:
            future.set_exception(ConnectionError("gone"))
        else:
            future.set_result(pools.work(pools.expected(), share, content))
        return future

    def died(self, error: BaseException) -> bool:
        """No worker: the scheduler."""
        return not isinstance(error, ConnectionError)

    def check(self) -> None:
        """As a pool does that has lost its scheduler."""
        raise EngineError("the connection to the scheduler was lost")

    def close(self) -> None:
        """Nothing is held."""


def test_what_was_done_before_the_scheduler_was_lost_is_in_the_folder(tmp_path: Path) -> None:
    """One line says how many, and the same call goes on."""
    points = LazyGrid.of(replace(cases(1)[0], micro_batch=1), {"accumulation": range(1, 9)})
    table = SweepTable(points, tmp_path)
    with pytest.raises(EngineError, match=r"scheduler was lost; \d of 8 cases are in .*continues"):
        stream(table, Fallen(), progress=False)
    rest = stream(table, None)
    assert rest.reused >= 2
    assert rest.done == 8


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_loky_gives_the_same_bytes_with_any_number_of_processes(tmp_path: Path, jobs: int) -> None:
    """Whoever is done first, rows and files are in the order of the grid."""
    assert kept(tmp_path / "one") == kept(tmp_path / "other", jobs=jobs)


@pytest.mark.slow
def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    """A case whose process dies once is computed again: all results are there."""
    mark = tmp_path / "died"

    def once(case: Question) -> Any:
        """Die at the third case, the first time that it comes."""
        if case.micro_batch == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return run_all.outcome_of(case)

    many = cases(8)
    with opened(Engine(jobs=2), len(many)) as pool:
        found = dict(run_all.run_on_pool(pool, enumerate(many), once, len(many)))
    assert mark.exists()
    assert [found[place] for place in range(8)] == [run(case) for case in many]


def test_a_worker_with_another_co2sim_is_named_with_both() -> None:
    """Version, source, Python and NumPy; it reads nothing of the case."""
    other = ("9.9", "f" * 64, "3.99", "0.1")
    with pytest.raises(EngineError) as caught:
        pools.answers(pools.work(other, 1, b"nothing that could be read"))
    assert str(own_identity()) in str(caught.value)
    assert "install the same there" in str(caught.value)
    assert len(str(caught.value)) < 390


def test_what_a_worker_cannot_read_is_named() -> None:
    """Such as a class of a module that only the sender has."""
    with pytest.raises(
        EngineError, match=r"a worker cannot read the cases: .*; what they are made"
    ):
        pools.answers(pools.work(pools.expected(), 1, b"no pickle"))


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which extra to install."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(OptionError, match=r"pip install '\.\[dask\]'"), opened(Engine("dask"), 2):
        pass
